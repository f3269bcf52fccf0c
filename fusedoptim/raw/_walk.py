"""How a kernel finds the elements of tensors of any strides from one running index."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

# The shape of the launches, those of fusedoptim/launch/table.py: on a CPU, a group of
# 16 work items, the SIMD width, walks a chunk of 32 Ki elements. A GPU wants more; not measured.
LANES = {"cpu": 16, "xpu": 256}
_CHUNK = 32 * 1024
_LEAST = 4 * 1024  # so that a group's start costs little


def chunk_of(n: int) -> int:
    """Elements that a group walks of ``n``: fewer where a processor's cores would be idle."""
    return min(_CHUNK, max(_LEAST, -(-n // 16)))


class Walk(NamedTuple):
    """Dimensions, outermost first, and how far apart each tensor's elements are in each."""

    shape: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def cut(self, dims: int) -> tuple[Walk, Walk]:
        """The walk of the ``dims`` outer dimensions, and that of the others."""
        outer, inner = [of_one[:dims] for of_one in self.strides], [o[dims:] for o in self.strides]
        return Walk(self.shape[:dims], tuple(outer)), Walk(self.shape[dims:], tuple(inner))

    @property
    def pattern(self) -> tuple[tuple[int, ...], ...]:
        """What the C depends on: of each stride, whether it is 0, 1 or another."""
        return tuple([tuple([min(stride, 2) for stride in of_one]) for of_one in self.strides])

    @property
    def numbers(self) -> list[int]:
        """What the C takes as arguments: sizes, and the strides that are neither 0 nor 1."""
        return [*self.shape[1:], *[s for of_one in self.strides for s in of_one if s > 1]]

    def names(self, index: str) -> list[str]:
        """The names of :attr:`numbers` in C, where the running index is ``index``."""
        strides = [
            f"{index}_stride_{k}_{d}_"
            for k, of_one in enumerate(self.strides)
            for d, stride in enumerate(of_one)
            if stride > 1
        ]
        return [f"{index}_size_{d}_" for d in range(1, len(self.shape))] + strides

    def split(self, index: str) -> str:
        """C that makes an index in each dimension of the running one."""
        dims = len(self.shape)
        if dims < 2:
            return ""
        lines = [f"narrow_t {index}_rest_ = (narrow_t){index};"]
        for d in range(dims - 1, 0, -1):
            size = f"(narrow_t){index}_size_{d}_"
            lines.append(f"const index_t {index}_{d}_ = {index}_rest_ % {size};")
            lines.append(f"{index}_rest_ /= {size};")
        return "\n".join([*lines, f"const index_t {index}_0_ = {index}_rest_;"])

    def offset(self, index: str, k: int) -> str:
        """C of where the element of tensor ``k`` is, after :meth:`split`."""
        terms = []
        for d, stride in enumerate(self.strides[k]):
            place = f"{index}_{d}_" if len(self.shape) > 1 else index
            if stride:
                terms.append(place if stride == 1 else f"{place} * {index}_stride_{k}_{d}_")
        return " + ".join(terms) or "0"


def walk(
    shape: Sequence[int], strides: Sequence[Sequence[int]], order_of: int | None = None
) -> Walk:
    """How to walk tensors of ``shape`` in as few dimensions as possible.

    Args:
        shape: of the elements that are walked.
        strides: of each tensor in its dimensions.
        order_of: a tensor in the order of whose memory the elements are walked, or None to keep
            the order of ``shape``.
    """
    dims = [d for d in range(len(shape)) if shape[d] != 1]
    if order_of is not None:
        dims.sort(key=lambda d: -strides[order_of][d])
    sizes: list[int] = []
    steps: list[tuple[int, ...]] = []
    for d in dims:
        step = tuple([of_one[d] for of_one in strides])
        if sizes and all(outer == inner * shape[d] for outer, inner in zip(steps[-1], step)):
            sizes[-1] *= shape[d]
            steps[-1] = step
        else:
            sizes.append(shape[d])
            steps.append(step)
    return Walk(tuple(sizes), tuple(zip(*steps)) if steps else ((),) * len(strides))


def memory(tensor: Tensor) -> Tensor:
    """All that lies between the first and the last element of a tensor, contiguous."""
    if tensor.is_contiguous():
        return tensor
    reach = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape))
    return tensor.as_strided((reach + 1,), (1,))
