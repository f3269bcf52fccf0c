"""What may be updated by a kernel, and whether it still is what it was at the last step.

Between two steps a user may replace a gradient, swap a parameter's storage, load or move state.
A launch writes through raw addresses, so all of that has to be noticed, every time, before
anything is written.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

from fusedoptim._device import SERVED
from fusedoptim._modes import has_memory

State = dict[str, Any]
Group = dict[str, Any]

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

# Parameters that are read together. A pass over a list takes one fact from each tensor, and a few
# hundred tensors, a parameter's gradient and state among them, stay in the L2 cache from pass to
# pass: a step of 10,000 parameters takes 19 ms in runs of 125 and of 250 on a Xeon, 20.6 ms in runs
# of 500, and 24 ms in runs of 1,000.
RUN = 150

_GRAD = operator.attrgetter("grad")

set_grad_enabled = torch._C._set_grad_enabled
"""One call of C. torch.no_grad() is Python's code: one interrupt of a step in 3,000 came in the
middle of it, and left gradients switched off."""

increment_version = torch._C._increment_version
"""Tells autograd of writes that it did not see: what torch.autograd.graph.increment_version calls,
which takes 1 us more, of the 30 us that a small step takes between other work."""

TRAIL = "trail"
"""State of a split parameter: the lower 16 bits of its float32 values, as int16."""


class Candidate(NamedTuple):
    """A parameter with a gradient, and what an error would call it."""

    param: Tensor
    grad: Tensor
    name: str


def state_dtype(param: Tensor) -> torch.dtype:
    """The dtype of ``param``'s optimizer state: float32 for the 16-bit dtypes, else its own."""
    return DTYPES[param.dtype][1] if param.dtype in DTYPES else param.dtype


def describe(optimizer: str, candidate: Candidate) -> str:
    """What an error says first of a parameter."""
    param, _, name = candidate
    return f"{optimizer}: {name} (shape {tuple(param.shape)}, {param.dtype}, {param.device})"


def check_candidate(optimizer: str, candidate: Candidate) -> None:
    """Raise unless the parameter can be updated by a kernel with this gradient.

    Raises:
        TypeError: a dtype, layout or tensor class that no kernel can take.
        RuntimeError: a device that SYCL does not serve, elements that share memory, or a
            gradient that does not fit.
    """
    param, grad, _ = candidate
    what = describe(optimizer, candidate)
    check_param(what, param)
    if grad.layout not in (torch.strided, torch.sparse_coo):
        raise TypeError(f"{what} has a gradient of layout {grad.layout}; make it strided or COO")
    if grad.device.type != "meta" and not has_memory(grad):
        raise TypeError(
            f"{what} has a gradient with no memory of its own; clone() it first, or compute it "
            "outside of FakeTensorMode and the like"
        )
    for fact in ("shape", "dtype", "device"):
        if getattr(grad, fact) != getattr(param, fact):
            raise RuntimeError(
                f"{what} has a gradient whose {fact} differs: {_text(getattr(grad, fact))}; "
                "call zero_grad() after changing a parameter, and compute the gradient anew"
            )


def check_param(what: str, param: Tensor) -> None:
    """Raise unless ``param``, which errors call ``what``, can be updated by a kernel.

    Raises:
        TypeError: a dtype, layout or tensor class that no kernel can take.
        RuntimeError: a device that SYCL does not serve, or elements that share memory.
    """
    instead = "leave it out of the optimizer, or use the torch.optim class"
    if param.layout is not torch.strided:
        raise TypeError(f"{what} has layout {param.layout} and only strided ones work; {instead}")
    if param.device.type not in SERVED:
        raise RuntimeError(
            f"{what} is on a device that SYCL does not serve; move it to 'cpu' or 'xpu', "
            f"or {instead}"
        )
    if param.dtype not in DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f"{what} has a dtype that is none of {known}; convert it, or {instead}")
    if not has_memory(param):
        raise TypeError(f"{what} is a {type(param).__name__} with no memory of its own; {instead}")
    if has_shared_elements(param):
        raise RuntimeError(
            f"{what} has elements that share memory (strides {param.stride()}); clone() it first"
        )


def _text(fact: object) -> str:
    return str(tuple(fact) if isinstance(fact, torch.Size) else fact)


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


def has_shared_elements(tensor: Tensor) -> bool:
    """Whether elements share memory, as those of an expanded tensor do."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape))


def is_lazy(tensor: Tensor) -> bool:
    """Whether the values are the conjugates or negatives of what is in memory."""
    return tensor.is_conj() or tensor.is_neg()


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one range of memory, in whatever order."""
    if tensor.is_contiguous():
        return True
    return tensor.stride() == torch.empty_like(tensor, device="meta").stride()


def laid_out_like(target: Tensor, value: Tensor) -> Tensor:
    """``value`` in the element order of ``target``, copied if need be."""
    if same_order(value, target) and not is_lazy(value):
        return value
    return torch.empty_like(target, dtype=value.dtype).copy_(value.detach())


class TensorRun:
    """At most RUN parameters of one device and dtype, as they were when checked."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        """Record tensors that :func:`check_candidate` has passed; their state comes later."""
        self.params = [candidate.param for candidate in candidates]
        # What a kernel writes: the parameter or, where memory is not its values, a dense copy.
        self.targets = [p if is_dense(p) and not is_lazy(p) else dense_copy(p) for p in self.params]
        self.copied = [(p, t) for p, t in zip(self.params, self.targets) if p is not t]
        self.grads = grads = [candidate.grad for candidate in candidates]
        """As they are; kept until a launch has read them, as another thread may drop them."""
        self._to_lay_out = [
            i
            for i, (grad, target) in enumerate(zip(grads, self.targets))
            if is_lazy(grad) or not same_order(grad, target)
        ]
        self._laid_out = self._lay_out(grads)
        self.numels = [p.numel() for p in self.params]
        self._empty = self.numels.count(0)
        self.addresses = list(map(Tensor.data_ptr, self.targets))
        self.grad_addresses = list(map(Tensor.data_ptr, self._laid_out))
        """Of this step; another list if one may be another."""
        self._grads = slice(len(grads), 2 * len(grads))  # of a list of all tensors
        self._held: list[Any] = []

    def watch(self, states: Sequence[State], names: Sequence[str]) -> None:
        """Have :meth:`refresh` compare with what is there now, before anything is released.

        Args:
            states: of the parameters, in order.
            names: of the tensors in them that a kernel updates.
        """
        self.states = states
        """Where those tensors are found."""
        self._get_state = list(map(operator.itemgetter, names))
        updated = [get(state) for get in self._get_state for state in states]
        self._facts = facts_of([*self.params, *self.grads, *updated])
        tensors = [*self.params, *self._laid_out, *updated]
        self._places = list(map(Tensor.data_ptr, tensors))

    def release(self) -> None:
        """Keep nothing alive that only the launch needed."""
        self.grads = self._laid_out = self._held = []

    def refresh(self) -> bool:
        """Take this step's gradients; False if any tensor is not as it was when watched."""
        # One list of all, for each pass over a list takes 0.2 us and more, however short it is.
        tensors: list[Any] = [*self.params, *map(_GRAD, self.params)]
        try:
            for get in self._get_state:
                tensors += map(get, self.states)
        except KeyError:  # state was taken away
            return False
        if not self._facts.check(*tensors):
            return False
        if self._to_lay_out:
            tensors[self._grads] = self._lay_out(tensors[self._grads])
        self._held = tensors
        places = list(map(Tensor.data_ptr, tensors))
        if places != self._places:
            expected = self._places.copy()
            expected[self._grads] = grad_addresses = places[self._grads]
            if places != expected or grad_addresses.count(0) != self._empty:
                return False
            self.grad_addresses = grad_addresses  # before an interrupt can have the places known
            self._places = places
        return True

    def _lay_out(self, grads: list[Tensor]) -> list[Tensor]:
        """The gradients in the element orders of the targets."""
        if not self._to_lay_out:
            return grads
        grads = grads.copy()
        for i in self._to_lay_out:
            grads[i] = laid_out_like(self.targets[i], grads[i])
        return grads


def are_same_objects(some: Collection[object], others: Collection[object]) -> bool:
    """Whether both hold the same objects in the same order; tensors have an ``==`` of their own."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def facts_of(tensors: Sequence[Tensor]) -> TensorGuards:
    """What a kernel relies on, of each tensor, but for its address.

    torch.compile's guard compares class, dtype, device, shape, strides and the conjugate and
    negative bits of a list of tensors in one call, at 0.1 us a tensor; asking each in Python for
    its shape alone takes as long.
    """
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


def dense_copy(param: Tensor) -> Tensor:
    """A copy without gaps in memory."""
    return torch.empty(param.shape, dtype=param.dtype, device=param.device).copy_(param.detach())


def turns(params: Sequence[Tensor]) -> list[int]:
    """For each parameter, after how many others of the list that share its memory it comes.

    torch updates one parameter after the other, so one that is given twice, or is a view of
    another, is updated twice; one launch updates all its rows at once.
    """
    ranges = [_byte_range(p) for p in params]
    result = [0] * len(params)
    clusters: list[list[int]] = []
    cluster_end = 0
    for i in sorted(range(len(params)), key=ranges.__getitem__):
        start, end = ranges[i]
        if start == end:
            continue
        if clusters and start < cluster_end:
            clusters[-1].append(i)
        else:
            clusters.append([i])
        cluster_end = max(cluster_end, end)
    for cluster in clusters:
        cluster.sort()
        for k, i in enumerate(cluster):
            start, end = ranges[i]
            earlier = [j for j in cluster[:k] if max(ranges[j][0], start) < min(ranges[j][1], end)]
            result[i] = 1 + max((result[j] for j in earlier), default=-1)
    return result


def _byte_range(param: Tensor) -> tuple[int, int]:
    start = param.data_ptr()
    if param.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(param.shape, param.stride()))
    return start, start + (last + 1) * param.element_size()
