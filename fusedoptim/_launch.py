"""A compiled kernel on a queue, and the block of memory that one launch reads.

The launch block is one allocation that the device can read, in 8-byte words::

    [ one word for each Scalar and Flag | row 0 | row 1 | ... ]
    row: [ one word for each Length, Storage, State and RowFlag ]

A row is a chunk of a tensor: its length, the address of its first element in each array, and
flags. One work-group walks one row, so one launch serves any number of tensors of any size,
and the kernel has one argument, the block's address: each further argument would cost 0.65 us
a launch, of 6 us in all.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fusedoptim._modules import Module, load_module
from fusedoptim.allocator import check_not_forked, is_forked, load_dpctl
from fusedoptim.kernels.language import Role

_WORD = 8


class LaunchShape(NamedTuple):
    """How a kernel is spread over a device of one kind."""

    lanes: int
    """work items in a group."""
    chunk: int
    """elements in a row, at most."""


# CPU: 16 lanes are the SIMD width of float32 under AVX-512; 8, 32 and 64 lanes take 2.5, 1.3 and
# 1.7 times as long, and chunks of 8 Ki to 1 Mi elements differ by 3%. GPU: not measured.
_LAUNCH_SHAPES = {"cpu": LaunchShape(16, 32 * 1024), "gpu": LaunchShape(256, 64 * 1024)}


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
        program = load_dpctl().program
        # dpctl 0.22 renamed the function.
        build = getattr(program, "create_kernel_bundle_from_spirv", None)
        bundle = (build or program.create_program_from_spirv)(queue, module.spirv, "")
        self.handle = bundle.get_sycl_kernel(module.name)
        self.on_host = device.is_cpu
        self.shape = _LAUNCH_SHAPES["cpu" if self.on_host else "gpu"]
        wide, narrow = "d", "f4x"  # a float32 takes the first half of its word
        scalar = wide if module.dtype == "f64" else narrow
        formats = {Role.SCALAR: scalar, Role.FLAG: "q"}
        self._scalar_names = [argument.name for argument in module.scalars]
        self.head = struct.Struct(
            "<" + "".join(formats[argument.role] for argument in module.scalars)
        )
        self.row_names = [argument.name for argument in module.row]

    def in_order(self, scalars: Mapping[str, float]) -> tuple[float, ...]:
        """The values of ``scalars`` in the order of the kernel's arguments."""
        return tuple([scalars[name] for name in self._scalar_names])


@functools.cache
def kernel_for(queue: Any, name: str, dtype: str) -> Kernel:
    """The kernel ``name`` for parameters of ``dtype`` on ``queue``, built at the first call."""
    return Kernel(queue, load_module(name, dtype))


class LaunchBlock:
    """The memory of one launch over tensors of given sizes, written to only where it changes."""

    def __init__(self, kernel: Kernel, numels: Sequence[int], widths: dict[str, int]) -> None:
        """Lay out the rows.

        Args:
            kernel: that will read the block.
            numels: elements of each tensor.
            widths: bytes of an element in each array column.
        """
        chunk, columns = kernel.shape.chunk, len(kernel.row_names)
        sizes = np.asarray(numels, dtype=np.int64)
        chunks = -(-sizes // chunk)
        self._owner = np.repeat(np.arange(len(sizes)), chunks)
        first_row = np.cumsum(chunks) - chunks
        start = (np.arange(len(self._owner)) - first_row[self._owner]) * chunk
        self._offsets = {name: start * width for name, width in widths.items()}

        self._kernel = kernel
        self._event: Any = None
        self._scalars: tuple[float, ...] = ()
        head = kernel.head.size
        rows = len(self._owner)
        memory = load_dpctl().memory
        self._memory = memory.MemoryUSMHost(
            max(head + rows * columns * _WORD, _WORD), queue=kernel.queue
        )
        self._bytes = memoryview(self._memory)
        words = np.frombuffer(self._memory, dtype=np.int64, count=rows * columns, offset=head)
        self._rows = words.reshape(rows, columns)
        self._column = {name: self._rows[:, i] for i, name in enumerate(kernel.row_names)}
        self._column["length"][:] = np.minimum(sizes[self._owner] - start, chunk)
        address, _ = self._memory.__sycl_usm_array_interface__["data"]
        self._argument = [ctypes.c_int64(address)]
        self._global_size = [rows * kernel.shape.lanes]
        self._local_size = [kernel.shape.lanes]

    def write_scalars(self, values: tuple[float, ...]) -> None:
        """Set the launch's scalars and flags, in the kernel's order."""
        if values != self._scalars:
            packed = self._kernel.head.pack(*values)
            self._finish()
            self._bytes[: len(packed)] = packed
            self._scalars = values

    def write_addresses(self, column: str, addresses: Sequence[int]) -> None:
        """Set the address of each tensor in one array column."""
        self._finish()
        base = np.array(addresses, dtype=np.uint64).view(np.int64)  # a GPU's may pass 2^63
        np.add(base[self._owner], self._offsets[column], out=self._column[column])

    def write_flags(self, column: str, flags: Sequence[bool]) -> None:
        """Set one row flag of each tensor."""
        self._finish()
        self._column[column][:] = np.array(flags, dtype=np.int64)[self._owner]

    def launch(self) -> None:
        """Submit the kernel; on a GPU, return while it runs."""
        if self._global_size[0] == 0:
            return
        kernel = self._kernel
        check_not_forked()
        self._event = kernel.queue.submit_async(
            kernel.handle, self._argument, self._global_size, self._local_size
        )

    def wait_on_host(self) -> None:
        """On the CPU device, return when the kernel has ended: its results are torch's memory."""
        if self._kernel.on_host:
            self._finish()

    def __del__(self) -> None:
        # A kernel may still read the block's memory. In a forked child there is none to wait for.
        if getattr(self, "_event", None) is not None and not is_forked():
            self._finish()

    def _finish(self) -> None:
        if self._event is not None:
            self._event.wait()
            self._event = None
