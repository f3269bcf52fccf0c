"""A kernel's arguments in memory, in the form that the C functions of SYCL and OpenCL take."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

WORD = 8
LOCAL = struct.Struct("<5Q")
"""Memory of a work-group, as dpctl describes it: dimensions, type of the elements, and the size in
each dimension."""


class Value(NamedTuple):
    """An argument that is passed by value."""

    argument: int
    """Its index."""
    place: int
    """Offset in the frame."""
    size: int
    """Bytes."""


class Packing:
    """How one kernel's arguments lie in a :class:`Frame`: a table of addresses, then the values."""

    def __init__(self, formats: Sequence[str | None], local: Collection[int] = ()) -> None:
        """``formats`` are :mod:`struct`'s, None for a pointer.

        ``local`` are the indices of arguments that are memory of the work-group.
        """
        self.count = len(formats)
        self.pointers = tuple([i for i, code in enumerate(formats) if code is None])
        self.values: list[Value] = []
        self.local: list[Value] = []
        """Arguments that are memory of the work-group."""
        self._places: list[int | None] = [None] * self.count
        whole = f"<{self.count}Q"
        for i, code in enumerate(formats):
            if code is not None:
                value = Value(i, struct.calcsize(whole), struct.calcsize(f"<{code}"))
                (self.local if i in local else self.values).append(value)
                self._places[i] = value.place
                whole += f"{code}{-value.size % WORD}x"
        self._struct = struct.Struct(whole)
        self.pack_into = self._struct.pack_into
        """Writes the table and then the values to a frame's buffer, from an offset on."""

    def new_frame(self) -> Frame:
        """Memory for the arguments of one launch at a time."""
        return Frame(self._struct.size, self._places)


class Frame:
    """The memory that holds a launch's arguments while it is submitted."""

    __slots__ = (
        "buffer",
        "given",
        "how",
        "kernel",
        "meanwhile",
        "owner",
        "parts",
        "passed",
        "table",
    )

    def __init__(self, size: int, places: Sequence[int | None]) -> None:
        """``places`` are the offsets of the arguments' values, None for a pointer."""
        self.buffer = ctypes.create_string_buffer(max(size, 1))
        base = ctypes.addressof(self.buffer)
        self.table = [0 if place is None else base + place for place in places]
        """The address of each argument's value; pointers are set for each launch."""
        self.owner: Any = None
        """The kernel that ``kernel`` belongs to."""
        self.kernel: Any = None
        """OpenCL's handle, which keeps the arguments that it was given."""
        self.parts: Any = None
        """What a launch of ``kernel`` in parts needs."""
        self.how: Any = None
        """How ``kernel`` last ran without being put into a queue."""
        self.given: bytes | None = None
        """The contents of the buffer when ``kernel`` was last given its arguments."""
        self.meanwhile: Any = None
        """A C function without arguments or a result, which a launch calls when it has begun."""
        self.passed: Frame | None = None
        """See :meth:`as_argument`."""

    def as_argument(self) -> Frame:
        """The frame of a kernel whose one argument is the address of this frame's memory."""
        if self.passed is None:
            self.passed = frame_of(ctypes.addressof(self.buffer))
        return self.passed


ONE_ADDRESS = Packing(["q"])
"""The packing for a kernel whose one argument is an address, passed as an int64."""


def frame_of(address: int) -> Frame:
    """The arguments of a kernel that takes one address."""
    frame = ONE_ADDRESS.new_frame()
    ONE_ADDRESS.pack_into(frame.buffer, 0, *frame.table, ctypes.c_int64(address).value)
    return frame
