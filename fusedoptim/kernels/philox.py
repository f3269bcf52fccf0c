"""Philox-4x32-10: random words that are a function of a counter and a key, and of nothing else.

So any work item can draw the words of any element again. The arithmetic is that of int64 with
masks: it has the same low 64 bits whether products wrap, as on a device, or do not, as in Python.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), whose
library Random123 publishes known answers.
"""

from __future__ import annotations

__all__ = ["philox"]

_WORD = 0xFFFFFFFF
_MULTIPLIER0 = 0xD2511F53
_MULTIPLIER1 = 0xCD9E8D57
_WEYL0 = 0x9E3779B9  # the golden ratio
_WEYL1 = 0xBB67AE85  # the square root of 3, less 1


def philox(
    counter0: int, counter1: int, counter2: int, counter3: int, key0: int, key1: int
) -> tuple[int, int, int, int]:
    """Four random words of 32 bits for a counter of four words and a key of two."""
    a, b, c, d = counter0, counter1, counter2, counter3
    rounds = 10
    while rounds > 0:
        product0 = _MULTIPLIER0 * a
        product1 = _MULTIPLIER1 * c
        a = ((product1 >> 32) & _WORD) ^ b ^ key0
        b = product1 & _WORD
        c = ((product0 >> 32) & _WORD) ^ d ^ key1
        d = product0 & _WORD
        key0 = (key0 + _WEYL0) & _WORD
        key1 = (key1 + _WEYL1) & _WORD
        rounds -= 1
    return a, b, c, d
