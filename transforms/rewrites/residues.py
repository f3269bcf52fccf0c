r"""The part of a float32 tensor that rounding to 16 bits loses, stored in 16 bits.

A value and its rounded value are close, so the difference of their bit patterns is small:

.. math::
    r = \mathrm{bits}(x) - \mathrm{bits}(\mathrm{float32}(\mathrm{round}(x)))

It fits into an int16 except for ties, NaN, overflow and float16 subnormals; those few values are
stored whole. A rounded value and its residue take 4 bytes together, like the float32 value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fusedoptim.split.pages import CHUNK, release_pages

_MOST = torch.iinfo(torch.int16).max


class Residue(NamedTuple):
    """The data that :func:`join` needs besides the rounded tensor."""

    differences: Tensor
    """int16, with the memory layout of the tensor."""
    exceptions: Tensor
    """int64: positions, in memory order, where the difference does not fit."""
    originals: Tensor
    """float32: the values at those positions."""


def split(values: Tensor, dtype: torch.dtype, is_used_up: bool = False) -> tuple[Tensor, Residue]:
    """Round float32 ``values``, and return the rounded tensor and the residue.

    ``is_used_up`` releases the memory of ``values``, unless elements overlap.
    """
    if torch.empty_like(values, device="meta").stride() != values.stride():
        values, is_used_up = torch.empty_like(values).copy_(values), False
    rounded = torch.empty_like(values, dtype=dtype)
    differences = torch.empty_like(values, dtype=torch.int16)
    exceptions, originals = [], []
    # Reused for all pieces, as buffers for each piece would fragment the heap.
    buffers = [
        torch.empty(CHUNK, dtype=kind, device=values.device)
        for kind in (torch.int32, torch.bool, torch.bool)
    ]
    pieces = list(zip(*_chunks(values, rounded, differences)))
    done = 0
    try:
        for exact, low, difference in pieces:
            low.copy_(exact)
            distance, is_over, is_under = (buffer[: exact.numel()] for buffer in buffers)
            distance.view(torch.float32).copy_(low)
            torch.sub(exact.view(torch.int32), distance, out=distance)
            difference.copy_(distance)  # wraps where it does not fit
            torch.gt(distance, _MOST, out=is_over)
            torch.lt(distance, -_MOST - 1, out=is_under)
            (where,) = is_over.logical_or_(is_under).nonzero(as_tuple=True)
            exceptions.append(where)
            originals.append(exact[where])
            done += 1
            if is_used_up:
                release_pages(exact)
        none = values.new_empty(0)
        places = [where + i * CHUNK for i, where in enumerate(exceptions)]
        return rounded, Residue(
            differences, torch.cat([none.long(), *places]), torch.cat([none, *originals])
        )
    except BaseException:  # for example KeyboardInterrupt
        for (exact, low, difference), where, original in zip(pieces[:done], exceptions, originals):
            exact.view(torch.int32).copy_(low.float().view(torch.int32) + difference)
            exact[where] = original
        raise


def join(rounded: Tensor, residue: Residue) -> Tensor:
    """The float32 values that :func:`split` was given, bit for bit, and with its strides.

    Where ``rounded`` was written to since, the result is a value that rounds to the new one.
    """
    differences, where, originals = (t.to(rounded.device) for t in residue)
    low = torch.empty_like(differences, dtype=rounded.dtype).copy_(rounded)
    result = torch.empty_like(differences, dtype=torch.float32)
    for out, values, difference in zip(*_chunks(result, low, differences)):
        wide = values.float()
        out.view(torch.int32).copy_(wide.view(torch.int32) + difference)
        fits = out.to(values.dtype).view(torch.int16) == values.view(torch.int16)
        torch.where(fits, out, wide, out=out)
    flat_low, flat = _in_memory_order(low), _in_memory_order(result)
    bits = originals.to(low.dtype).view(torch.int16)
    unchanged = bits == flat_low[where].view(torch.int16)
    flat[where[unchanged]] = originals[unchanged]
    return result


def _chunks(*tensors: Tensor) -> list[Sequence[Tensor]]:
    """Split each tensor's memory into pieces, so that temporaries stay small."""
    return [torch.split(_in_memory_order(tensor), CHUNK) for tensor in tensors]


def _in_memory_order(tensor: Tensor) -> Tensor:
    """A view of a dense tensor's memory as a vector."""
    return tensor.as_strided((tensor.numel(),), (1,))
