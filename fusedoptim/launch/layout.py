"""Where each value of a launch lies in its launch block.

The writer (:mod:`fusedoptim.launch.block`) and the compiler (:mod:`fusedoptim.kernels._compiler`)
both ask here. A block is words of 8 bytes::

    [ head | row 0 | row 1 | ... ]
    head: [ HEADER | one word for each argument of the launch ]
    row:  [ the head's address | one word for each argument of a row ]
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from fusedoptim.kernels.language import Role

WORD = 8
HEADER = ("rows", "rows_per_group")
"""The int64 numbers with which every head begins."""

ADDRESSES = (
    *(Role.PARAM, Role.TRAIL, Role.GRAD, Role.INPUT, Role.OUTPUT, Role.VALUES, Role.INDICES),
    *(Role.STATE, Role.STATE_BF16, Role.STATE_E4M3, Role.STATE_E5M3, Role.BLOCK_SCALES),
    *(Role.SUMS, Role.CHUNK_SUMS, Role.RESULT, Role.ROW_RESULT),
    *(Role.ROW_INT, Role.DEVICE_SCALAR, Role.DEVICE_INT),
)
INTEGERS = (
    *(Role.LENGTH, Role.POSITION, Role.PARAM_NUMBER),
    *(Role.ROW_FLAG, Role.ROW_INTEGER, Role.FLAG, Role.INTEGER),
)
REALS = (Role.SCALAR, Role.ROW_SCALAR)
"""The roles of numbers in the arithmetic dtype."""
_FORMATS = dict.fromkeys(ADDRESSES, "Q") | dict.fromkeys(INTEGERS, "q")
# A float32 takes the first half of its word.
_REAL_FORMATS = {"float32": "f4x", "float64": "d"}


class Argument(NamedTuple):
    """One argument of a kernel: its name, and where its value comes from."""

    name: str
    role: Role


class Layout:
    """The places of one kernel's arguments."""

    def __init__(self, arguments: Sequence[Argument]) -> None:
        """Lay out a kernel's arguments.

        Raises:
            TypeError: it is not known what the word of an argument holds.
        """
        for name, role in arguments:
            if role not in _FORMATS and role not in REALS:
                raise TypeError(
                    f"argument {name!r}: a launch block has no word for {role}; add it to "
                    "ADDRESSES, INTEGERS or REALS in fusedoptim/launch/layout.py"
                )
        self.row = tuple(argument for argument in arguments if argument.role.in_row)
        """The arguments of each row."""
        self.head = tuple(argument for argument in arguments if not argument.role.in_row)
        """The arguments of the launch."""
        self.row_words = 1 + len(self.row)
        self.head_bytes = WORD * (len(HEADER) + len(self.head))
        self.row_word = {name: word for word, (name, _) in enumerate(self.row, start=1)}
        """The word of a row that holds each of its arguments."""
        names = [*HEADER, *(name for name, _ in self.head)]
        self.head_word = {name: word for word, name in enumerate(names)}
        """The word of the head that holds each of its arguments and each of HEADER."""

    def head_packing(self, arithmetic: str) -> struct.Struct:
        """Packs the arguments of the launch, which follow HEADER, in their order."""
        real = _REAL_FORMATS[arithmetic]
        return struct.Struct("<" + "".join(_FORMATS.get(role, real) for _, role in self.head))
