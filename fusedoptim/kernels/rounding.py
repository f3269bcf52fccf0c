r"""Stochastic rounding, and the 8-bit numbers of optimizer state.

A value is rounded up with a probability equal to its distance from the number below, so that small
changes are not lost: on average the rounded value is the value. The same random word may round
several values; each is unbiased by itself.

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
    "e4m3_larger",
    "e4m3_scale",
    "e4m3_value",
    "e5m3_code",
    "e5m3_larger",
    "e5m3_scale",
    "e5m3_value",
    "for_each_element",
    "larger_magnitude",
    "next_word",
    "to_bf16",
]

BLOCK = 128
"""Elements that share a scale, at most."""
DRAW = 16
"""Elements whose words come from one draw: four from each word of it."""
NAN_E4M3 = 0x7F
NAN_E5M3 = 0xFF
SIGN_E4M3 = 0x80
FRACTION_BITS = 20
"""Bits of a float32 after those of the code."""
BINADES_E4M3 = 13
BINADES_E5M3 = 29
"""From the scale up to the largest value's binade. One more is left for rounding up."""
SQUARE_EXPONENT = 63
"""The squares of numbers below 2 to this are finite, and their double."""
LEAST_EXPONENT = 120
"""A scale is at least 2 to minus this: all numbers of a block are normal float32 values."""


def as_word(word: int) -> int:
    """A random word, as the functions below take it."""
    return word


def next_word(word: int) -> int:
    """The word for the next value: of four in succession, the upper bytes are independent.

    Not a rotation, of which LLVM would make a call that keeps the CPU driver from vectorizing.
    """
    return (word ^ word << 8) & 0xFFFFFFFF


def to_bf16(value: float, word: int) -> float:
    """``value`` rounded to a bfloat16."""
    if not math.isfinite(value):
        return value
    return _float((_bits(value) + (word >> 16)) & 0xFFFF0000)


def larger_magnitude(largest: float, value: float) -> float:
    """The larger of ``largest`` and the magnitude of ``value``, if its square is finite."""
    return max(largest, abs(value)) if abs(value) < 2.0**SQUARE_EXPONENT else largest


def e4m3_larger(largest: int, code: int) -> int:
    """The larger magnitude of two codes, of which NaN does not count."""
    magnitude = code & NAN_E4M3
    return largest if magnitude == NAN_E4M3 else max(largest, magnitude)


def e5m3_larger(largest: int, code: int) -> int:
    """The larger of two codes, of which NaN does not count."""
    return largest if code == NAN_E5M3 else max(largest, code)


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
    return min((distance + (word >> (32 - FRACTION_BITS))) >> FRACTION_BITS, nan)


def _scale(largest: float, binades: int) -> float:
    _, exponent = math.frexp(largest)
    return math.ldexp(1.0, max(exponent - 1 - binades, -LEAST_EXPONENT))


def _bits(value: float) -> int:
    """Those of ``value`` as a float32."""
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
) -> None:
    """Call ``update(i, word, *arguments)`` for this lane's elements from ``first`` to ``end``.

    The words depend on the parameter's ``number``, the element's position in it and the ``step``,
    and on nothing else, so a step can be repeated. One draw serves DRAW elements of a lane.

    Args:
        update: a function of the kernel's module.
        arguments: of it.
        first: element of the row at which the group begins.
        end: element after the last.
        position: of the row's first element in the parameter.
        number: of the parameter.
        step: which one it is.
    """
    start = first
    while start + DRAW * lanes() <= end:
        a, b, c, d = _draw(position + start + lane(), number, step)
        stop = start + DRAW * lanes()
        while start < stop:
            word = as_word(a)
            a, b, c = b, c, d
            update(start + lane(), word, *arguments)
            word = next_word(word)
            update(start + lanes() + lane(), word, *arguments)
            word = next_word(word)
            update(start + 2 * lanes() + lane(), word, *arguments)
            word = next_word(word)
            update(start + 3 * lanes() + lane(), word, *arguments)
            start += 4 * lanes()
    while start < end:
        a, b, c, d = _draw(position + start + lane(), number, step)
        if start + lane() < end:
            update(start + lane(), as_word(a), *arguments)
        start += lanes()


def _draw(position: int, number: int, step: float) -> tuple[int, int, int, int]:
    return philox(position & 0xFFFFFFFF, position >> 32, int(step), 0, number, 0)
