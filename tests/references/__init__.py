"""The optimizers as their papers write them: the update of one tensor, in plain torch.

Each module has one function ``step(theta, grad, state, t, *, hyper-parameters) -> theta``. It takes
a tensor, its gradient, its state (a dictionary, empty before the first step, in which it stores new
tensors) and the number of this step, counted from 1. It returns the tensor after the step. No
tensor is written to. The formulas take float64 tensors, or anything that has their operators, such
as values with error bounds.
"""
