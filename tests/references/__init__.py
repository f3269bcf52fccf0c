"""The optimizers as their papers write them: the update of one tensor, in plain torch.

Each module has one function ``step(theta, grad, state, t, *, hyper-parameters) -> theta``: from a
tensor, its gradient, its state (which is empty before the first step, and gets new tensors) and the
number of this step, counted from 1, to the tensor after the step. No tensor is written to. The
formulas take float64 tensors, or whatever has their operators, such as values with error bounds.
"""
