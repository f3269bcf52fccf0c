r"""Stochastic rounding, and the 8-bit numbers of optimizer state.

A value is rounded up with a probability equal to its distance from the number below, so that small
changes are not lost: on average the rounded value is the value. The same random word, a number of
WORD_BITS bits, may round several values; each is unbiased by itself but for less than one part in
:math:`2^{20}` of the distance.

An 8-bit number has three bits of fraction :math:`f`, and an exponent :math:`e` of four bits and a
sign (e4m3, for values of either sign) or of five bits (e5m3, for values that are not negative).
With the scale :math:`s` of its block, a power of two, its magnitude is

.. math::
    |x| = s\,2^{e-1}\,(1 + f/8) \text{ if } e > 0, \text{ else } s\,f/8

and the largest code is NaN. For the bits of a float32, :math:`y = |x| + \max(|x|, s)` puts all of
them on one line: those of :math:`y`, less those of :math:`s`, are the code and 20 more bits, which
are rounded; and :math:`|x| = \min(y/2, y - s)`.

Compiled, :mod:`fusedoptim.kernels._rounding` has the meaning of these functions.
"""

from __future__ import annotations

import math
import struct
from typing import Any

from fusedoptim.kernels.language import lane, lanes
from fusedoptim.kernels.philox import philox

__all__ = [
    "as_word",
    "e4m3_code",
    "e4m3_product",
    "e4m3_scale",
    "e4m3_value",
    "e5m3_code",
    "e5m3_product",
    "e5m3_scale",
    "e5m3_value",
    "for_each_element",
    "is_scalable",
    "larger_magnitude",
    "to_bf16",
    "xor",
]

BLOCK = 64
"""Elements that share a scale, at most."""
DRAW = 64
"""Elements whose words come from one draw."""
WORD_BITS = 20
"""Bits of a random word: as many as a float32 has after those of an 8-bit number."""
NAN_E4M3 = 0x7F
NAN_E5M3 = 0xFF
SIGN_E4M3 = 0x80
FRACTION_BITS = 20
"""Bits of a float32 after those of the code."""
BF16_FRACTION_BITS = 16
"""Bits of a float32 after those of a bfloat16."""
BINADES_E4M3 = 13
BINADES_E5M3 = 29
"""Binades from the scale to the largest value; one more is reserved for rounding up."""
SCALABLE_EXPONENT = 126
"""Values below 2 to this power can be doubled, as encoding does, without overflow."""
LEAST_EXPONENT = 120
"""A scale is at least 2 to minus this power, so all numbers of a block are normal float32
values."""


def as_word(word: int) -> int:
    """A random word, as the functions below take it."""
    return word


def xor(word: int, other: int) -> int:
    """Both words, bit by bit."""
    return word ^ other


def to_bf16(value: float, word: int) -> float:
    """``value`` rounded to a bfloat16."""
    if not math.isfinite(value):
        return value
    return _float((_bits(value) + (word >> (WORD_BITS - BF16_FRACTION_BITS))) & 0xFFFF0000)


def larger_magnitude(largest: float, value: float) -> float:
    """The larger of ``largest`` and the magnitude of ``value``; NaN is larger than a number."""
    return value if math.isnan(value) else max(abs(value), largest)


def is_scalable(m: float, v: float) -> bool:
    """Whether a block may have a scale for both values: they are finite, and not huge."""
    return abs(m) < 2.0**SCALABLE_EXPONENT and abs(v) < 2.0**SCALABLE_EXPONENT


def e4m3_scale(largest: float) -> float:
    """The scale of a block of values up to ``largest``."""
    return _scale(largest, BINADES_E4M3)


def e5m3_scale(largest: float) -> float:
    """The scale of a block of values up to ``largest``."""
    return _scale(largest, BINADES_E5M3)


def e4m3_value(code: int, scale: float) -> float:
    """The value of a code."""
    return math.copysign(_magnitude(code & NAN_E4M3, scale, NAN_E4M3), -(code & SIGN_E4M3) or 1)


def e5m3_value(code: int, scale: float) -> float:
    """The value of a code."""
    return _magnitude(code, scale, NAN_E5M3)


def e4m3_product(code: int, scale: float, factor: float) -> float:
    """The value of a code, times ``factor``."""
    return factor * e4m3_value(code, scale)


def e5m3_product(code: int, scale: float, factor: float) -> float:
    """The value of a code, times ``factor``."""
    return factor * e5m3_value(code, scale)


def e4m3_code(value: float, scale: float, word: int) -> int:
    """The code of ``value``, rounded."""
    sign = SIGN_E4M3 if math.copysign(1, value) < 0 else 0
    return _rounded(abs(value), scale, word, NAN_E4M3) | sign


def e5m3_code(value: float, scale: float, word: int) -> int:
    """The code of ``value``, rounded."""
    return _rounded(value, scale, word, NAN_E5M3)


def _magnitude(code: int, scale: float, nan: int) -> float:
    if code == nan:
        return math.nan
    y = _float((code << FRACTION_BITS) + _bits(scale))
    return min(y / 2, y - scale)


def _rounded(magnitude: float, scale: float, word: int, nan: int) -> int:
    if not math.isfinite(magnitude):
        return nan
    distance = _bits(magnitude + max(magnitude, scale)) - _bits(scale)
    return min((distance + word) >> FRACTION_BITS, nan)


def _scale(largest: float, binades: int) -> float:
    _, exponent = math.frexp(largest)
    return math.ldexp(1.0, max(exponent - 1 - binades, -LEAST_EXPONENT))


def _bits(value: float) -> int:
    """The bits of ``value`` as a float32."""
    try:
        return int.from_bytes(struct.pack("<f", value), "little")
    except OverflowError:
        return 0x7F800000


def _float(bits: int) -> float:
    return float(struct.unpack("<f", bits.to_bytes(4, "little"))[0])


def for_each_element(
    update: Any,
    arguments: Any,
    first: int,
    end: int,
    position: int,
    number: int,
    step: float,
    ahead: Any,
) -> None:
    """Call ``update(i, k, word, *arguments)`` for this lane's elements from ``first`` to ``end``.

    Element ``i`` is the lane's ``k``-th of them.

    The words depend on the parameter's ``number``, the element's position in it and the ``step``,
    and on nothing else, so a step can be repeated. One draw serves DRAW elements of a lane.

    Args:
        update: a function of the kernel's module.
        arguments: further arguments of ``update``.
        first: element of the row at which the group begins.
        end: element after the last.
        position: the position of the row's first element in the parameter.
        number: the parameter's number.
        step: the number of the step.
        ahead: a function of the kernel's module, which is called as ``ahead(start, *arguments)``
            after each four elements of all lanes, of a whole draw; None for none.
    """
    start, k = first, 0
    while start + DRAW * lanes() <= end:
        a, b, c, d, e, f, g = _words(position + start + lane(), number, step)
        stop = start + DRAW * lanes()
        while start < stop:
            update(start + lane(), k, a, *arguments)
            update(start + lanes() + lane(), k + 1, b, *arguments)
            update(start + 2 * lanes() + lane(), k + 2, c, *arguments)
            update(start + 3 * lanes() + lane(), k + 3, d, *arguments)
            if ahead is not None:
                ahead(start, *arguments)
            a, b, c, d, e, f, g = e, f, g, xor(a, b), xor(b, c), xor(c, d), xor(d, e)
            start += 4 * lanes()
            k += 4
    if start < end:
        a, b, c, d, e, f, g = _words(position + start + lane(), number, step)
        while start < end:
            if start + lane() < end:
                update(start + lane(), k, a, *arguments)
            a, b, c, d, e, f, g = b, c, d, e, f, g, xor(a, b)
            start += lanes()
            k += 1


def _words(position: int, number: int, step: float) -> tuple[int, int, int, int, int, int, int]:
    """The first seven words of a draw, whose upper 18 bits are bits of Philox that no other has.

    The word after seven is the exclusive or of the first two of them. By this recurrence, of period
    127, all words of a draw are different sums of the first seven: each is uniform, and the upper
    18 bits of any two are independent.
    """
    a, b, c, d = philox(position & 0xFFFFFFFF, position >> 32, int(step), 0, number, 0)
    e = (a & 0x3FFF) << 6 | (b & 0x3FFF) >> 8
    f = (c & 0x3FFF) << 6 | (d & 0x3FFF) >> 8
    g = (b & 0x3FF) << 10 | d & 0x3FF
    a, b, c, d = as_word(a >> 12), as_word(b >> 12), as_word(c >> 12), as_word(d >> 12)
    return a, b, c, d, as_word(e), as_word(f), as_word(g)
