r"""What rounding a float32 tensor to 16 bits loses, kept in 16 bits more.

The rounded value and the original are neighbours, so the difference of their bit patterns is small:

.. math::
    r = \mathrm{bits}(x) - \mathrm{bits}(\mathrm{float32}(\mathrm{round}(x)))

It fits an int16 but for ties, NaN, overflow and what float16 holds as a subnormal number; those few
are kept whole. Rounded values and residue take the 4 bytes that the float32 value took.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fusedoptim._giving_back import CHUNK, give_back

_MOST = torch.iinfo(torch.int16).max


class Residue(NamedTuple):
    """What :func:`join` needs besides the rounded tensor."""

    differences: Tensor
    """int16, laid out as the tensor in memory."""
    exceptions: Tensor
    """int64: where in memory order the difference does not fit."""
    originals: Tensor
    """float32: the values there."""

    @property
    def nbytes(self) -> int:
        """Of memory."""
        return self.differences.nbytes + self.exceptions.nbytes + self.originals.nbytes


def split(values: Tensor, dtype: torch.dtype, is_used_up: bool = False) -> tuple[Tensor, Residue]:
    """``values`` rounded to ``dtype``, and what is lost.

    Args:
        values: float32, of any strides; overlapping ones are laid out anew.
        dtype: bfloat16 or float16.
        is_used_up: give the memory of the values back, if they need not be laid out anew.
    """
    if torch.empty_like(values, device="meta").stride() != values.stride():
        values, is_used_up = torch.empty_like(values).copy_(values), False
    rounded = torch.empty_like(values, dtype=dtype)
    differences = torch.empty_like(values, dtype=torch.int16)
    exceptions, originals = [], []
    # The same for each piece: one of its own each would leave a heap full of holes.
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
                give_back(exact)
    except BaseException:  # an interrupt
        for (exact, low, difference), where, original in zip(pieces[:done], exceptions, originals):
            exact.view(torch.int32).copy_(low.float().view(torch.int32) + difference)
            exact[where] = original
        raise
    none = values.new_empty(0)
    places = [where + i * CHUNK for i, where in enumerate(exceptions)]
    return rounded, Residue(
        differences, torch.cat([none.long(), *places]), torch.cat([none, *originals])
    )


def join(rounded: Tensor, residue: Residue) -> Tensor:
    """The float32 values that :func:`split` was given, bit for bit, and with its strides.

    Where ``rounded`` has been written to since, a value that rounds to the new one.
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
    """Each tensor's memory in pieces, so that what is computed of one needs little more."""
    return [torch.split(_in_memory_order(tensor), CHUNK) for tensor in tensors]


def _in_memory_order(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor as a vector over the same memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
