"""Facts about tensors that kernels rely on: dtype, layout, memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from fusedoptim.allocator import current_pool
from fusedoptim.dtypes import VARIANTS
from fusedoptim.launch.devices import BACKENDS, queue_of
from fusedoptim.step.sharding import local_of

State = dict[str, Any]
"""The optimizer state of one parameter."""
Group = dict[str, Any]
"""A parameter group."""

TRAIL = "trail"
"""State of a split parameter: the lower 16 bits of its float32 values, as int16."""


class ParamDtype(NamedTuple):
    """What follows from the dtype of a parameter."""

    variant: str
    """The variant of the kernels that updates it."""
    state: torch.dtype
    """The dtype of its optimizer state."""
    arithmetic: torch.dtype
    """The real dtype in which its update is computed."""
    components: int
    """Real numbers in an element."""

    @property
    def largest(self) -> float:
        """The largest number in its update."""
        return torch.finfo(self.arithmetic).max


def _param_dtypes() -> dict[torch.dtype, ParamDtype]:
    found = {}
    for variant in VARIANTS.values():
        arithmetic = getattr(torch, variant.arithmetic)
        for name in variant.params:
            dtype = getattr(torch, name)
            state = dtype if dtype.is_complex else arithmetic
            components = 2 if dtype.is_complex else 1
            found[dtype] = ParamDtype(variant.name, state, arithmetic, components)
    return found


PARAM_DTYPES = _param_dtypes()
"""The dtypes that kernels can update."""

_FORMATS = {torch.contiguous_format: None, torch.channels_last: 4, torch.channels_last_3d: 5}


def state_dtype(param: Tensor) -> torch.dtype:
    """The dtype of ``param``'s optimizer state: float32 for the 16-bit dtypes, else its own."""
    known = PARAM_DTYPES.get(param.dtype)
    return param.dtype if known is None else known.state


def new_state(target: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialized memory for a state of ``target``, laid out like it.

    It comes from the pool, which staggers the addresses of one parameter's states within their
    pages (docs/design/staggered-addresses.md).
    """
    if target.device.type not in BACKENDS:  # the step will raise
        return torch.empty_like(target, dtype=dtype, requires_grad=False)
    return current_pool(queue_of(target.device)).empty_like(target, dtype)


def has_memory(tensor: Tensor) -> bool:
    """Whether the elements, if there are any, lie in memory that the tensor itself holds.

    The elements of DTensors and other wrappers, of fake tensors and of functorch's tensors do not.
    The elements of a DTensor's local shard may.
    """
    try:
        if tensor.layout is torch.sparse_coo:
            return has_memory(tensor._values())
        storage = tensor.untyped_storage()
        is_meta = storage.device.type == "meta"  # also of a fake one, whose data_ptr() warns
        return not is_meta and (tensor.numel() == 0 or storage.data_ptr() != 0)
    except RuntimeError:  # it has no storage, or one whose address must not be taken
        return False


def is_lazy(tensor: Tensor) -> bool:
    """Whether its values are the conjugates or negatives of what is in memory."""
    return tensor.is_conj() or tensor.is_neg()


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one range of memory, in whatever order."""
    if tensor.is_contiguous():
        return True
    return tensor.stride() == torch.empty_like(tensor, device="meta").stride()


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


def has_tangent(tensor: Tensor) -> bool:
    """Whether forward-mode differentiation, which is active, differentiates by the tensor."""
    tangent: Tensor | None = unpack_dual(tensor).tangent  # type: ignore[no-untyped-call]  # torch's
    return tangent is not None


def has_shared_elements(tensor: Tensor) -> bool:
    """Whether elements share memory, as those of an expanded tensor do."""
    if tensor.numel() < 2:
        return False
    steps = sorted((s, size) for s, size in zip(tensor.stride(), tensor.shape) if size > 1)
    reach, is_apart = 0, True
    for stride, size in steps:
        is_apart &= stride > reach
        reach += stride * (size - 1)
    if is_apart:  # each step leads past all elements of the smaller ones
        return False
    if steps[0][0] == 0 or tensor.numel() > reach + 1:
        return True
    places = np.zeros(1, np.int64)
    for stride, size in steps:
        places = np.add.outer(places, stride * np.arange(size)).ravel()
    return np.unique(places).size < places.size


def memory_of(
    tensor: Tensor, order: Tensor | torch.memory_format = torch.preserve_format
) -> Tensor:
    """The tensor whose memory kernels use for a parameter, its gradient or its state.

    Only this function chooses it. It is ``tensor`` itself, or the local shard of a DTensor. It is a
    copy if the memory has gaps or another order, or holds the conjugates or negatives of the
    values. A step writes the copy of a parameter back.

    Args:
        tensor: a tensor of any strides.
        order: the order of the elements in memory: ``torch.contiguous_format``;
            ``torch.preserve_format`` for any order without gaps; or a tensor, the parameter's
            memory, for its order.
    """
    tensor = local_of(tensor)
    if isinstance(order, Tensor) and order.shape == tensor.shape:
        fits = same_order(tensor, order)
    else:  # scales are not laid out like their parameter
        fits = tensor.is_contiguous() or (order is torch.preserve_format and is_dense(tensor))
    if fits and not is_lazy(tensor):
        return tensor
    if isinstance(order, Tensor):
        copy = torch.empty_like(order, dtype=tensor.dtype)
    else:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor.detach())


def update_order(params: Sequence[Tensor]) -> list[int]:
    """For each parameter, how many updates of others that share its memory must come first.

    torch updates one parameter after the other, whereas one launch updates all its rows at once.
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
    if param.numel() == 0 or param.is_meta:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(param.shape, param.stride()))
    return start, start + (last + 1) * param.element_size()
