"""The launch block: the memory that tells a kernel which rows to update, and with what.

A row is a chunk of a tensor: its length, the address of its first element in each array, and
scalars of its own. One work-group walks one row, or several short ones, so one launch serves any
number of tensors of any size. The kernel's one argument is the first row's address. The words of a
block are laid out by :mod:`fusedoptim.launch.layout`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fusedoptim.allocator import default_pool, is_forked
from fusedoptim.kernels.language import Role
from fusedoptim.launch.arguments import frame_of
from fusedoptim.launch.kernel import Kernel
from fusedoptim.launch.layout import HEADER, WORD

if TYPE_CHECKING:
    from torch import Tensor

Indices = np.ndarray[Any, np.dtype[np.int64]]
_ACTION = ctypes.CFUNCTYPE(None)


def as_int64(addresses: Sequence[int]) -> Indices:
    """Addresses as a launch block has them: a GPU's may pass 2^63."""
    return np.array(addresses, dtype=np.uint64).view(np.int64)


def row_addresses(values: Tensor, rows: Indices | None = None, dims: int = 1) -> Indices:
    """The addresses of rows of a contiguous tensor: one for each index of its first ``dims``."""
    if rows is None:
        rows = np.arange(len(values), dtype=np.int64)
    addresses = rows * (math.prod(values.shape[dims:]) * values.element_size())
    addresses += ctypes.c_int64(values.data_ptr()).value  # a GPU's may pass 2^63
    return addresses


class Chunks:
    """Tensors cut into pieces of a limited number of elements, with a row for each piece."""

    def __init__(self, numels: Sequence[int], limit: int) -> None:
        """Cut tensors of ``numels`` elements into chunks of at most ``limit``."""
        self.numels = numels
        """Elements of each tensor."""
        sizes = np.asarray(numels, dtype=np.int64)
        counts = -(-sizes // limit)
        self.counts = counts
        """Chunks of each tensor."""
        self.owner = np.repeat(np.arange(len(sizes)), counts)
        """The tensor of each chunk."""
        self.first = np.cumsum(counts) - counts
        """The first chunk of each tensor."""
        self.start = (np.arange(len(self.owner)) - self.first[self.owner]) * limit
        """The element of its tensor at which each chunk starts."""
        self.lengths = np.minimum(sizes[self.owner] - self.start, limit)
        """Elements of each chunk."""


class LaunchBlock:
    """The memory that the launches of one kernel read, written only where it changes.

    Every method that writes waits first for the launch that may still be reading.
    """

    def __init__(self, kernel: Kernel, lengths: Indices) -> None:
        self.kernel = kernel
        self.rows = len(lengths)
        self.pending: Sequence[Any] = ()
        """Events of launches, of which the last may not have ended; empty if all have."""
        self.known: object = None
        """Whose arguments the rows have, if whoever writes them keeps track."""
        self._head_values: list[float] = []
        layout = kernel.layout
        head, columns = layout.head_bytes, layout.row_words
        self._memory = default_pool(kernel.queue, "host").allocate(
            head + self.rows * columns * WORD
        )
        self.nbytes = self._memory.nbytes
        """Its bytes of memory."""
        # Not memoryview(memory): Python 3.11 loses an interrupt that arrives inside it.
        in_c = (ctypes.c_char * self._memory.nbytes).from_address(self._memory.address)
        self._bytes = memoryview(in_c).cast("B")
        self._elements = int(lengths.sum())
        self._selected = -1
        self._rows_per_group = max(
            kernel.shape.elements_per_group * self.rows // max(self._elements, 1), 1
        )
        self._header = self._bytes[: len(HEADER) * WORD].cast("q")
        self._header[layout.head_word["rows_per_group"]] = self._rows_per_group
        words = np.frombuffer(
            self._bytes, dtype=np.int64, count=self.rows * columns, offset=head
        ).reshape(self.rows, columns)
        # A float32 takes the first half of its word.
        self.reals_per_word = WORD // kernel.real.itemsize
        reals = words.view(kernel.real)[:, :: self.reals_per_word]
        address = self._memory.address
        words[:, 0] = address
        self.words = self._bytes[head : head + words.nbytes].cast("Q")
        """All rows, word by word: quicker than an array where few words are written."""
        self.reals: memoryview[float] = self._bytes[head : head + words.nbytes].cast(
            "d" if kernel.real == np.float64 else "f"
        )
        """The same as numbers of the arithmetic dtype."""
        self._column = {
            name: (reals if role is Role.ROW_SCALAR else words)[:, layout.row_word[name]]
            for name, role in layout.row
        }
        self.write("length", lengths)
        self._on_device = kernel.on_device
        self._frame = frame_of(address + head)
        self._on_device.prepare(self._frame)
        self.select(self.rows)

    def write_head(self, numbers: Mapping[str, float]) -> None:
        """Set the launch's scalars, flags and addresses, by the names of the arguments."""
        values = [numbers[name] for name, _ in self.kernel.layout.head]
        if values != self._head_values:
            packed = self.kernel.head_packing.pack(*values)
            self.wait()
            self._head_values = []  # unknown, should an interrupt come now
            start = len(HEADER) * WORD
            self._bytes[start : start + len(packed)] = packed
            self._head_values = values

    def write(self, column: str, values: Any, rows: int | None = None) -> None:
        """Set one argument of every row, or of the first ``rows``: one value, or one for each."""
        if self.pending:
            self.wait()
        self._column[column][:rows] = values

    def select(self, rows: int) -> None:
        """Make launches walk only the first ``rows``; if never called, they walk all."""
        if rows != self._selected:
            self.wait()
            self._header[self.kernel.layout.head_word["rows"]] = rows
            lanes = self.kernel.shape.lanes
            items = -(-rows // self._rows_per_group) * lanes
            self._sizes = self._on_device.sizes((items,), (lanes,))
            self._selected_elements = self._elements * rows // max(self.rows, 1)
            self._selected = rows

    def while_running(self, action: Callable[[], object]) -> None:
        """Make each launch call ``action`` too, on the launching thread, once it has begun.

        ``action`` must be a C function that raises nothing. A launch in parts calls it within the
        C call that runs the parts, so no interrupt can come in between; other threads run on.
        """
        self._frame.meanwhile = _ACTION(action)

    def launch(self, events: list[Any] | None = None) -> None:
        """Submit the kernel; on a GPU, return while it runs.

        Its event is appended to ``events`` in the same C call that submits it: whatever interrupts
        this method, an event is there if and only if the kernel runs.
        """
        if not self._selected:
            return
        events = [] if events is None else events
        self.pending = events
        if not self._on_device.submit(self._frame, self._sizes, self._selected_elements, events):
            self.pending = ()

    def wait(self) -> None:
        """Return when the kernel has ended."""
        if self.pending:
            self._on_device.wait(self.pending[-1])
            self.pending = ()

    def __del__(self) -> None:
        # A kernel may still read the block's memory. In a forked child there is none to wait for.
        if getattr(self, "pending", ()) and not is_forked():
            self.wait()
