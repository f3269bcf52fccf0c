"""The random words: the known answers of Random123, in Python and compiled."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from fusedoptim.kernels.philox import philox
from fusedoptim.raw import RawKernel
from fusedoptim.raw.language import Global, Int64, global_id

ALL = 0xFFFFFFFF
# Counter and key, and the words: kat_vectors of Random123 1.14, "philox4x32 10".
KNOWN = [
    ((0, 0, 0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL, ALL, ALL, ALL, ALL, ALL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("given", "words"), KNOWN)
def test_known_answers(given: tuple[int, ...], words: tuple[int, ...]) -> None:
    assert philox(*given) == words


def write_words(n: Int64, given: Global[Int64], words: Global[Int64]) -> None:
    i = global_id(0)
    if i < n:
        a, b, c, d = philox(
            given[6 * i],
            given[6 * i + 1],
            given[6 * i + 2],
            given[6 * i + 3],
            given[6 * i + 4],
            given[6 * i + 5],
        )
        words[4 * i] = a
        words[4 * i + 1] = b
        words[4 * i + 2] = c
        words[4 * i + 3] = d


@pytest.mark.skipif(importlib.util.find_spec("numba_dpex") is None, reason="pip install '.[jit]'")
def test_compiled() -> None:
    """Compiled words are the known answers, and those that Python computes."""
    random = torch.randint(0, 1 << 32, (1000, 6))
    given = torch.cat([torch.tensor([given for given, _ in KNOWN]), random])
    words = torch.empty(len(given), 4, dtype=torch.int64)
    RawKernel(write_words)(1024, 16, (len(given), given, words))
    assert words.tolist() == [list(philox(*row)) for row in given.tolist()]
