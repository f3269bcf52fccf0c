"""A launch on the CPU that is repeated with other arguments of the same forms."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusedoptim.launch.arguments import Frame
from fusedoptim.raw._arguments import REFUSALS, Signature
from fusedoptim.raw._build import Built, Shape
from fusedoptim.raw._pointers import Uses

_ADDRESS = Tensor.data_ptr


class _Slot:
    """The arguments of one launch at a time."""

    __slots__ = ("addresses", "frame", "passed", "scratch")

    def __init__(self, frame: Frame, passed: Frame, scratch: object) -> None:
        self.frame = frame
        self.passed = passed
        """The frame of the kernel, which takes the address of the other."""
        self.scratch = scratch
        """Owns memory that the frame has an address of."""
        self.addresses: list[int] = []
        """The addresses of the caller's tensors in the frame."""


class Repeat:
    """Launches a kernel that takes a frame.

    Its last arguments are the caller's tensors and numbers.
    """

    def __init__(
        self,
        built: Built,
        shape: Shape,
        signature: Signature,
        uses: Uses,
        first: Sequence[Tensor],
        zeros: int,
    ) -> None:
        """Prepare launches.

        Args:
            built: the kernel.
            shape: the sizes of the launch.
            signature: the kernel's signature.
            uses: the memory that the tensors use.
            first: the first arguments, the same in each launch.
            zeros: bytes of zeros, the next argument, which a launch leaves as zeros; 0 if there is
                none.
        """
        self._built = built
        self._shape = shape
        self._at_once = built.waited.at_once
        self._sizes = shape.waited
        self._elements = uses.elements
        self._packing = signature.packing
        self._pack_into = signature.packing.pack_into
        self._uses = uses
        self._first = first
        self._zeros = zeros
        own = len(first) + (zeros > 0)
        self._own = own
        self._values = [(i - own, convert) for i, convert in signature.values]
        self._pointers = [i - own for i in signature.packing.pointers[own:]]
        self._free: list[_Slot] = []  # a list's pop and append are atomic

    def launch(self, arguments: Sequence[Any]) -> bool:
        """Launch the kernel and wait for its end.

        Returns:
            whether it ran; False if the arguments must be refused or checked again.
        """
        values: list[Any] = []
        if self._values:
            try:
                values = [convert(arguments[i]) for i, convert in self._values]
            except REFUSALS:
                return False
            arguments = [arguments[i] for i in self._pointers]
        addresses = list(map(_ADDRESS, arguments))
        try:
            slot = self._free.pop()
        except IndexError:
            slot = self._new_slot()
        if addresses != slot.addresses or values:
            if 0 in addresses:  # freed memory
                self._free.append(slot)
                return False
            self._write(slot, addresses, values)
        run = self._at_once(slot.passed, self._sizes, self._elements)
        if run is None:
            self._built.run(self._shape, slot.passed, self._uses)
        elif status := run():
            self._built.check(status, slot.passed)
        self._free.append(slot)  # not after an error, which may leave other values than zeros
        return True

    def _write(self, slot: _Slot, addresses: list[int], values: Sequence[Any]) -> None:
        """Write these arguments into a slot, for its next launch."""
        frame = slot.frame
        table = frame.table
        for i, address in zip(self._pointers, addresses):
            table[self._own + i] = address
        self._pack_into(frame.buffer, 0, *table, *values)
        slot.addresses = addresses

    def _new_slot(self) -> _Slot:
        frame = self._packing.new_frame()
        known = list(map(_ADDRESS, self._first))
        scratch = None
        if self._zeros:
            scratch = ctypes.create_string_buffer(self._zeros)
            known.append(ctypes.addressof(scratch))
        frame.table[: len(known)] = known
        return _Slot(frame, self._built.prepared(frame), scratch)
