r"""What is lost when a plain weight is computed from the folded one, in two bits for each element.

A folded weight is :math:`W' = \mathrm{round}(s W)`. Rounding moves it by at most half an ulp of
:math:`W'`, which in :math:`W' / s` is less than one ulp of :math:`W`. Rounding the quotient adds at
most half an ulp. So the difference of the bit patterns,

.. math::
    r = \mathrm{bits}(W) - \mathrm{bits}(\mathrm{round}(W' / s)),

is -1, 0 or 1, except in channels with a scale near 0. Those values are stored whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fusedoptim.split.pages import CHUNK
from transforms.rewrites.watched_parameter import detached

_LEAST, _MOST = -1, 2
"""The differences that two bits hold."""
_PER_BYTE = 4
_FEW = 16
"""At most one value in so many may be stored whole."""


class Remainder(NamedTuple):
    """The data that :func:`join` needs besides the folded weight."""

    shape: tuple[int, ...]
    """The shape of the plain weight."""
    strides: tuple[int, ...]
    """The strides of the plain weight."""
    differences: Tensor
    """uint8: four to a byte, piece by piece."""
    scale: Tensor
    """float64: the factors, which broadcast to the weight."""
    exceptions: Tensor
    """int64, (dimensions, count): where the difference does not fit."""
    originals: Tensor
    """float32: the values there."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that take memory."""
        return self.differences, self.scale, self.exceptions, self.originals


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
    differences, exceptions = [], []
    for rows in row_pieces(plain):
        quotient = _quotient(folded, scale, rows)
        distance = plain[rows].contiguous().view(torch.int32) - quotient.view(torch.int32)
        fits = distance.clamp(_LEAST, _MOST)
        differences.append(_packed(fits))
        where = (fits != distance).nonzero().T
        where[0] += rows.start
        exceptions.append(where)
    places = torch.cat(exceptions, 1)
    if places.shape[1] > plain.numel() // _FEW:
        return None
    return Remainder(
        *(tuple(plain.shape), plain.stride(), torch.cat(differences)),
        *(scale, places, plain[tuple(places)]),
    )


def join(folded: Tensor, remainder: Remainder) -> Tensor:
    """The plain weight, bit for bit, wherever the folded one is unchanged.

    Where the folded weight was written to, the result is an arbitrary value.
    """
    folded = detached(folded).cpu()
    plain = torch.empty_strided(
        remainder.shape, remainder.strides, dtype=torch.float32, device="cpu"
    )
    start = 0
    for rows in row_pieces(plain):
        quotient = _quotient(folded, remainder.scale, rows)
        stop = start + _bytes_of(quotient.numel())
        differences = _unpacked(remainder.differences[start:stop], quotient.shape)
        plain[rows] = quotient.view(torch.int32).add_(differences).view(torch.float32)
        start = stop
    plain[tuple(remainder.exceptions)] = remainder.originals
    return plain


def _shifts() -> Tensor:
    return torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device="cpu")


def _bytes_of(count: int) -> int:
    return -(-count // _PER_BYTE)


def _packed(differences: Tensor) -> Tensor:
    """Differences packed into bytes; the last byte is padded."""
    count = differences.numel()
    codes = torch.zeros(_bytes_of(count), _PER_BYTE, dtype=torch.uint8, device="cpu")
    codes.view(-1)[:count] = (differences - _LEAST).view(-1)
    return (codes << _shifts()).sum(1, dtype=torch.uint8)


def _unpacked(packed: Tensor, shape: torch.Size) -> Tensor:
    codes = packed[:, None] >> _shifts()
    return (codes & 3).to(torch.int32).add_(_LEAST).view(-1)[: shape.numel()].view(shape)


def _quotient(folded: Tensor, scale: Tensor, rows: slice) -> Tensor:
    factor = scale[rows] if scale.shape[0] == folded.shape[0] else scale
    return folded[rows].double().div_(factor).float().contiguous()


def row_pieces(weight: Tensor) -> Iterator[slice]:
    """Ranges of rows to convert at once, so that temporaries stay small."""
    count = len(weight)
    step = max(1, CHUNK * count // max(weight.numel(), 1))
    return (slice(start, min(start + step, count)) for start in range(0, max(count, 1), step))
