"""How generated C finds the elements of tensors with any strides from one running index."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Walk(NamedTuple):
    """Dimensions, outermost first, and each tensor's stride in each of them."""

    shape: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def cut(self, dims: int) -> tuple[Walk, Walk]:
        """The walk of the ``dims`` outer dimensions, and that of the others."""
        outer = tuple([strides[:dims] for strides in self.strides])
        inner = tuple([strides[dims:] for strides in self.strides])
        return Walk(self.shape[:dims], outer), Walk(self.shape[dims:], inner)

    def numbers(self, index: str) -> dict[str, int]:
        """The sizes and strides that the C needs, by name; strides of 0 and 1 are in its text.

        Args:
            index: the C name of the running index.
        """
        sizes = {f"{index}_size_{d}_": size for d, size in enumerate(self.shape) if d}
        return sizes | {
            f"{index}_stride_{k}_{d}_": stride
            for k, strides in enumerate(self.strides)
            for d, stride in enumerate(strides)
            if stride > 1
        }

    def split(self, index: str) -> str:
        """C that computes the index in each dimension from the running index."""
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
        """The C expression of an element's offset in tensor ``k``, after :meth:`split`."""
        terms = []
        for d, stride in enumerate(self.strides[k]):
            place = f"{index}_{d}_" if len(self.shape) > 1 else index
            if stride:
                terms.append(place if stride == 1 else f"{place} * {index}_stride_{k}_{d}_")
        return " + ".join(terms) or "0"


def walk(
    shape: Sequence[int], strides: Sequence[Sequence[int]], order_of: int | None = None
) -> Walk:
    """The walk over tensors of ``shape`` in as few dimensions as possible.

    Args:
        shape: the shape of the elements.
        strides: the strides of each tensor.
        order_of: the index of a tensor whose order in memory the walk follows; None keeps the order
            of ``shape``.
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
    """A contiguous view of everything between a tensor's first and last element."""
    reach = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape))
    return tensor.as_strided((reach + 1,), (1,))
