"""What may be updated by a kernel, and whether it still is what it was at the last step.

Between two steps a user may replace a gradient, swap a parameter's storage, load or move state.
A launch writes through raw addresses, so all of that has to be noticed, every time, before
anything is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

State = dict[str, Any]

# dtype of a parameter: the kernels' name for it, the dtype of its state
DTYPES = {
    torch.float32: ("f32", torch.float32),
    torch.float64: ("f64", torch.float64),
    torch.bfloat16: ("bf16", torch.float32),
    torch.float16: ("f16", torch.float32),
    # A complex number is two real ones that every elementwise update treats alike.
    torch.complex64: ("f32", torch.complex64),
    torch.complex128: ("f64", torch.complex128),
}
_FORMATS = {torch.contiguous_format: None, torch.channels_last: 4, torch.channels_last_3d: 5}

# Tensors that are read together. A pass over a list takes one fact from each tensor, and a few
# hundred tensors with their gradients and state stay in the L2 cache from pass to pass: 10,000 of
# them take 10 ms in runs of 500, 11 ms in runs of 1,000, and 16 ms in one run.
RUN = 500


class Candidate(NamedTuple):
    """A parameter with a gradient, and what an error would call it."""

    param: Tensor
    grad: Tensor
    name: str


def state_dtype(param: Tensor) -> torch.dtype:
    """The dtype of ``param``'s optimizer state: float32 for the 16-bit dtypes, else its own."""
    return DTYPES[param.dtype][1] if param.dtype in DTYPES else param.dtype


def check_candidate(optimizer: str, candidate: Candidate) -> None:
    """Raise unless the parameter can be updated by a kernel with this gradient.

    Raises:
        TypeError: a dtype, layout or tensor class that no kernel can take.
        RuntimeError: a device that SYCL does not serve, elements that share memory, or a
            gradient that does not fit.
    """
    param, grad, name = candidate
    what = f"{optimizer}: {name} (shape {tuple(param.shape)}, {param.dtype}, {param.device})"
    instead = "leave it out of the optimizer, or use the torch.optim class"
    if param.layout is not torch.strided:
        raise TypeError(f"{what} has layout {param.layout} and only strided ones work; {instead}")
    if param.device.type not in ("cpu", "xpu"):
        raise RuntimeError(
            f"{what} is on a device that SYCL does not serve; move it to 'cpu' or 'xpu', "
            f"or {instead}"
        )
    if param.dtype not in DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f"{what} has a dtype that is none of {known}; convert it, or {instead}")
    if param.numel() and param.data_ptr() == 0:
        raise TypeError(f"{what} is a {type(param).__name__} with no memory of its own; {instead}")
    if any(stride == 0 and size > 1 for stride, size in zip(param.stride(), param.shape)):
        raise RuntimeError(
            f"{what} has elements that share memory (strides {param.stride()}); clone() it first"
        )
    for fact in ("shape", "dtype", "device"):
        if getattr(grad, fact) != getattr(param, fact):
            raise RuntimeError(
                f"{what} has a gradient of {fact} {getattr(grad, fact)}; "
                "zero_grad() and compute it again"
            )


def same_order(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape hold their elements in the same order, without gaps."""
    return is_dense(a) and (
        a.stride() == b.stride()
        or any(
            a.is_contiguous(memory_format=f) and b.is_contiguous(memory_format=f)
            for f, dim in _FORMATS.items()
            if dim in (None, a.dim())
        )
    )


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one range of memory, in whatever order."""
    if tensor.is_contiguous():
        return True
    return tensor.stride() == torch.empty_like(tensor, device="meta").stride()


def laid_out_like(target: Tensor, value: Tensor) -> Tensor:
    """``value`` in the element order of ``target``, copied if need be."""
    if same_order(value, target) and not value.is_conj() and not value.is_neg():
        return value
    return torch.empty_like(target, dtype=value.dtype).copy_(value.detach())


class TensorRun:
    """At most RUN parameters of one device and dtype, as they were when checked."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        """Record tensors that :func:`check_candidate` has passed; their state comes later."""
        self.params = [candidate.param for candidate in candidates]
        self._dtype = self.params[0].dtype
        # What a kernel writes: the parameter or, where that has gaps, a dense copy of it.
        self.targets = [p if is_dense(p) else _dense_copy(p) for p in self.params]
        self.copied = [(p, t) for p, t in zip(self.params, self.targets) if p is not t]
        grads = [candidate.grad for candidate in candidates]
        # A complex gradient may be conjugated lazily, so each is looked at in every step.
        self._to_lay_out = [
            i
            for i, (grad, target) in enumerate(zip(grads, self.targets))
            if self._dtype.is_complex or not same_order(grad, target)
        ]
        self._lay_out(grads)
        self._shapes = [p.shape for p in self.params]
        self.numels = [p.numel() for p in self.params]
        # Mostly the strides say no more than "contiguous", which costs half as much to ask.
        contiguous = all(map(Tensor.is_contiguous, grads))
        self._layout_of = Tensor.is_contiguous if contiguous else Tensor.stride
        self._layouts = list(map(self._layout_of, grads))
        self.addresses = list(map(Tensor.data_ptr, self.targets))
        self.grad_addresses = list(map(Tensor.data_ptr, grads))
        self._states: list[State] = []
        self._state_addresses: dict[str, list[int]] = {}

    def set_states(self, states: list[State], names: Sequence[str]) -> None:
        """Record each parameter's state, of which a kernel updates the tensors of these names."""
        self._states = states
        self._state_addresses = {name: self.addresses_of(name) for name in names}

    def addresses_of(self, name: str) -> list[int]:
        """Where the state tensors called ``name`` are now."""
        return list(map(Tensor.data_ptr, [state[name] for state in self._states]))

    def _lay_out(self, grads: list[Tensor]) -> None:
        for i in self._to_lay_out:
            grads[i] = laid_out_like(self.targets[i], grads[i])
        # The launch reads copies that nothing else would keep.
        self._kept = [grads[i] for i in self._to_lay_out]

    def read_gradients(self) -> bool:
        """Take this step's gradients; False if any tensor is not as it was when checked."""
        grads: list[Any] = [p.grad for p in self.params]
        try:
            if [grad.shape for grad in grads] != self._shapes:
                return False
            if self._to_lay_out:
                self._lay_out(grads)
            self.grad_addresses = list(map(Tensor.data_ptr, grads))
            for name, addresses in self._state_addresses.items():
                if self.addresses_of(name) != addresses:
                    return False
        except (AttributeError, KeyError, TypeError, RuntimeError):
            return False  # a gradient is None or sparse, or state was taken away
        return (
            [grad.dtype for grad in grads].count(self._dtype) == len(grads)
            and list(map(self._layout_of, grads)) == self._layouts
            and list(map(Tensor.data_ptr, self.targets)) == self.addresses
            and [p.shape for p in self.params] == self._shapes
        )


def _dense_copy(param: Tensor) -> Tensor:
    return param.detach().clone(memory_format=torch.contiguous_format)
