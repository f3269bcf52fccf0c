"""A compiled kernel on a queue, and the block of memory that one launch reads.

The launch block is one allocation that the device can read, in 8-byte words::

    [ head | row 0 | row 1 | ... ]
    head: [ rows | rows for each group | one word for each Scalar, Flag and Computed ]
    row: [ the head's address | one word for each other argument ]

A row is a chunk of a tensor: its length, the address of its first element in each array, and
values of its own. One work-group walks one row, or some short ones, so one launch serves any number
of tensors of any size. The kernel has one argument, the first row's address: each further argument
would cost 0.65 us a launch, of 6 us in all.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fusedoptim.allocator import default_pool, is_forked
from fusedoptim.kernels.language import Role
from fusedoptim.launch.launchers import Launcher, OpenCLLauncher, SyclLauncher
from fusedoptim.launch.modules import COUNTS, Module, load_module
from fusedoptim.launch.opencl import driver_of
from fusedoptim.launch.sycl import BuildError, build

if TYPE_CHECKING:
    from torch import Tensor

Indices = np.ndarray[Any, np.dtype[np.int64]]

_WORD = 8


class LaunchShape(NamedTuple):
    """How a kernel is spread over a device of one kind."""

    lanes: int
    """work items in a group."""
    chunk: int
    """elements in a row, at most."""
    run: int
    """elements that a group walks: of rows that are shorter than that, it walks several."""


# CPU: 16 lanes are the SIMD width of float32 under AVX-512; 8, 32 and 64 lanes take 2.5, 1.3 and
# 1.7 times as long, and chunks of 8 Ki to 1 Mi elements differ by 3%. 10,000 rows of 64 elements,
# none of them in a cache, take two cores 0.80 ms with a group for each row, and 0.49, 0.41 and 0.37
# ms with one for 4, 16 and 64. GPU: not measured.
_LAUNCH_SHAPES = {"cpu": LaunchShape(16, 32 * 1024, 1024), "gpu": LaunchShape(256, 64 * 1024, 1)}


class Kernel:
    """A compiled module, built for one queue."""

    def __init__(self, queue: Any, module: Module) -> None:
        device = queue.sycl_device
        if module.dtype == "f64" and not device.has_aspect_fp64:
            raise RuntimeError(
                f"{device.name} has no float64 arithmetic, so it cannot update float64 parameters; "
                "convert the model to float32 (model.float())"
            )
        self.queue = queue
        self.module = module
        self.on_host = device.is_cpu
        self.shape = _LAUNCH_SHAPES["cpu" if self.on_host else "gpu"]
        wide, narrow = "d", "f4x"  # a float32 takes the first half of its word
        scalar = wide if module.dtype == "f64" else narrow
        formats = {Role.SCALAR: scalar, Role.FLAG: "q", Role.COMPUTED: "Q"}
        self._head_names = [argument.name for argument in module.head]
        self.head = struct.Struct("<" + "".join(formats[argument.role] for argument in module.head))
        self.row_names = [argument.name for argument in module.row]
        self.real = np.dtype(np.float64 if module.dtype == "f64" else np.float32)
        """The arithmetic dtype."""
        self.new_launcher = _build(queue, module, self.shape.lanes)
        """Makes what one launch block is launched by."""

    def in_order(self, values: Mapping[str, float]) -> tuple[float, ...]:
        """The head's values in the order of the kernel's arguments."""
        return tuple([values[name] for name in self._head_names])


def _build(queue: Any, module: Module, lanes: int) -> Callable[[], Launcher]:
    """Have the device's driver compile ``module``; returns what makes a launcher of its kernel."""
    device = queue.sycl_device
    driver = driver_of(device) if device.is_cpu else None
    try:
        if driver is not None:
            program = driver.program(module.spirv)
            return functools.partial(OpenCLLauncher, driver, program, module.name, lanes)
        handle = build(queue, module.spirv).get_sycl_kernel(module.name)
        return functools.partial(SyclLauncher, queue, handle, lanes)
    except BuildError as error:
        raise RuntimeError(
            f"the driver of {device.name} ({device.sycl_platform.name}, version "
            f"{device.driver_version}) cannot build the kernel {module.name}; kernels are for "
            "Intel's drivers: pip install intel-opencl-rt, unset OCL_ICD_FILENAMES, and call "
            "allocator.queue() before dpctl is asked for devices, or update the GPU driver"
        ) from error


@functools.cache
def kernel_for(queue: Any, name: str, dtype: str) -> Kernel:
    """The kernel ``name`` for parameters of ``dtype`` on ``queue``, built at the first call."""
    module = load_module(name, dtype)
    if module.dtype != dtype:
        return kernel_for(queue, name, module.dtype)
    return Kernel(queue, module)


def row_places(values: Tensor, rows: Indices | None = None, dims: int = 1) -> Indices:
    """The address of each row, or of those ``rows``, of a contiguous tensor.

    A row is what is left of it when the first ``dims`` dimensions are indexed.
    """
    if rows is None:
        rows = np.arange(len(values), dtype=np.int64)
    places = rows * (math.prod(values.shape[dims:]) * values.element_size())
    places += ctypes.c_int64(values.data_ptr()).value  # a GPU's may pass 2^63
    return places


class Chunks:
    """Tensors cut into pieces of at most so many elements, a row for each piece."""

    def __init__(self, numels: Sequence[int], most: int) -> None:
        self.numels = numels
        """elements of each tensor."""
        sizes = np.asarray(numels, dtype=np.int64)
        counts = -(-sizes // most)
        self.counts = counts
        """pieces of each tensor."""
        self.owner = np.repeat(np.arange(len(sizes)), counts)
        """the tensor of each piece."""
        self.first = np.cumsum(counts) - counts
        """each tensor's first piece."""
        self.start = (np.arange(len(self.owner)) - self.first[self.owner]) * most
        """element of the tensor at which a piece starts."""
        self.lengths = np.minimum(sizes[self.owner] - self.start, most)
        """elements of each piece."""


class LaunchBlock:
    """The memory of a kernel's launches over given rows, written to only where it changes."""

    def __init__(self, kernel: Kernel, lengths: Indices) -> None:
        """Lay out the rows.

        Args:
            kernel: that will read the block.
            lengths: of each row.
        """
        self.kernel = kernel
        self.rows = len(lengths)
        self._events: Sequence[Any] = ()
        """of the latest launches; the last is kept until it has happened."""
        self._head_values: tuple[float, ...] = ()
        columns = 1 + len(kernel.row_names)
        head = COUNTS * _WORD + kernel.head.size
        self._memory = default_pool(kernel.queue, "host").allocate(
            head + self.rows * columns * _WORD
        )
        # Not memoryview(memory): Python 3.11 loses an interrupt that comes within.
        in_c = (ctypes.c_char * self._memory.nbytes).from_address(self._memory.address)
        self._bytes = memoryview(in_c).cast("B")
        self._elements = int(lengths.sum())
        self._run = max(kernel.shape.run * self.rows // max(self._elements, 1), 1)
        """Rows for each group."""
        self._counts = self._bytes[: COUNTS * _WORD].cast("q")
        self._counts[0], self._counts[1] = self.rows, self._run
        words = np.frombuffer(
            self._bytes, dtype=np.int64, count=self.rows * columns, offset=head
        ).reshape(self.rows, columns)
        # A float32 takes the first half of its word.
        reals = words.view(kernel.real)[:, :: _WORD // kernel.real.itemsize]
        address = self._memory.address
        words[:, 0] = address
        roles = [argument.role for argument in kernel.module.row]
        self._words = self._bytes[head : head + words.nbytes].cast("Q")
        self._columns = columns
        self._column = {
            name: (reals if role is Role.ROW_SCALAR else words)[:, i]
            for i, (name, role) in enumerate(zip(kernel.row_names, roles), start=1)
        }
        self.write("length", lengths)
        self._first_row = address + head
        self._lanes = kernel.shape.lanes
        self._launcher = kernel.new_launcher()

    def write_head(self, values: tuple[float, ...]) -> None:
        """Set the launch's scalars, flags and addresses, in the kernel's order."""
        if values != self._head_values:
            packed = self.kernel.head.pack(*values)
            self.wait()
            self._head_values = ()  # whatever is written if this is interrupted
            start = COUNTS * _WORD
            self._bytes[start : start + len(packed)] = packed
            self._head_values = values

    def write(self, column: str, values: Any, rows: int | None = None) -> None:
        """Set one argument of every row, or of the first ``rows``: one value, or one for each."""
        self.wait()
        self._column[column][:rows] = values

    def write_few(self, column: str, addresses: Sequence[int]) -> None:
        """As :meth:`write`, an address for each row: quicker for a few, which are in no array."""
        self.wait()
        place = 1 + self.kernel.row_names.index(column)
        for address in addresses:
            self._words[place] = address
            place += self._columns

    def launch(self, events: list[Any] | None = None, rows: int | None = None) -> None:
        """Submit the kernel; on a GPU, return while it runs.

        Args:
            events: to which the launch's is added, in the same call of C that submits it: whatever
                interrupts this function, an event is there if and only if the kernel runs.
            rows: how many, from the first on; all by default.
        """
        rows = self.rows if rows is None else rows
        if rows == 0:
            return
        if rows != self._counts[0]:
            self.wait()
            self._counts[0] = rows
        events = [] if events is None else events
        self._events = events
        items = -(-rows // self._run) * self._lanes
        elements = self._elements * rows // self.rows
        if not self._launcher.submit(self._first_row, items, elements, events):
            self._events = ()

    def wait_on_host(self) -> None:
        """On the CPU device, return when the kernel has ended: its results are torch's memory."""
        if self.kernel.on_host:
            self.wait()

    def wait(self) -> None:
        """Return when the kernel has ended."""
        if self._events:
            self._launcher.wait(self._events[-1])
            self._events = ()

    def __del__(self) -> None:
        # A kernel may still read the block's memory. In a forked child there is none to wait for.
        if getattr(self, "_events", ()) and not is_forked():
            self.wait()
