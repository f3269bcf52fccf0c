r"""The part of a plain weight that dividing the folded one by its scale loses, in a byte each.

A folded weight is :math:`W' = \mathrm{round}(s W)`, so the quotient :math:`W' / s` is off by an
ulp or two. The difference of the bit patterns,

.. math::
    r = \mathrm{bits}(W) - \mathrm{bits}(\mathrm{round}(W' / s)),

fits into an int8 but for channels with a scale near 0. Those values are stored whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fusedoptim.split.pages import CHUNK

_LEAST, _MOST = torch.iinfo(torch.int8).min, torch.iinfo(torch.int8).max
_FEW = 16
"""At most one value in so many may be stored whole."""


class Remainder(NamedTuple):
    """What :func:`join` needs besides the folded weight."""

    differences: Tensor
    """int8, with the strides of the plain weight."""
    scale: Tensor
    """float64: the factors, which broadcast to the weight."""
    exceptions: Tensor
    """int64, (dimensions, count): where the difference does not fit."""
    originals: Tensor
    """float32: the values there."""


def split(plain: Tensor, folded: Tensor, scale: Tensor) -> Remainder | None:
    """The remainder of a plain weight; None if too many values would be stored whole.

    Args:
        plain: float32, of at least one dimension.
        folded: float32, of the same shape.
        scale: float64, broadcasts to both.

    Example:
        >>> import torch
        >>> plain, scale = torch.tensor([0.1, 0.2]), torch.tensor([3.0], dtype=torch.float64)
        >>> folded = (plain * scale).float()
        >>> torch.equal(join(folded, split(plain, folded, scale)), plain)
        True
    """
    differences = torch.empty_like(plain, dtype=torch.int8)
    exceptions = []
    for rows in row_pieces(plain):
        quotient = _quotient(folded, scale, rows)
        distance = plain[rows].contiguous().view(torch.int32) - quotient.view(torch.int32)
        differences[rows] = distance.to(torch.int8)
        where = (differences[rows] != distance).nonzero().T
        where[0] += rows.start
        exceptions.append(where)
    places = torch.cat(exceptions, 1)
    if places.shape[1] > plain.numel() // _FEW:
        return None
    return Remainder(differences, scale, places, plain[tuple(places)])


def join(folded: Tensor, remainder: Remainder) -> Tensor:
    """The plain weight, bit for bit, where the folded one is as it was.

    Where it was written to since, the result is an arbitrary value.
    """
    differences, scale, places, originals = remainder
    folded = folded.detach().cpu()
    plain = torch.empty_like(differences, dtype=torch.float32)
    for rows in row_pieces(plain):
        bits = _quotient(folded, scale, rows).view(torch.int32)
        plain[rows] = bits.add_(differences[rows]).view(torch.float32)
    plain[tuple(places)] = originals
    return plain


def _quotient(folded: Tensor, scale: Tensor, rows: slice) -> Tensor:
    factor = scale[rows] if scale.shape[0] == folded.shape[0] else scale
    return folded[rows].double().div_(factor).float().contiguous()


def row_pieces(weight: Tensor) -> Iterator[slice]:
    """Ranges of rows to convert at once, so that temporaries stay small."""
    count = len(weight)
    step = max(1, CHUNK * count // max(weight.numel(), 1))
    return (slice(start, min(start + step, count)) for start in range(0, max(count, 1), step))
