"""Launches an operator's kernel over all elements of tensors, the rows of matrices, or a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusedoptim.launch.block import Chunks, LaunchBlock, row_addresses
from fusedoptim.launch.devices import BACKENDS
from fusedoptim.launch.kernel import kernel_for
from fusedoptim.launch.pipeline import Pipeline
from fusedoptim.step.tensors import PARAM_DTYPES

DEVICES = tuple(BACKENDS)
"""The types of the devices that kernels run on."""
VARIANT_OF = {d: known.variant for d, known in PARAM_DTYPES.items() if not d.is_complex}
"""The variant of a kernel for each dtype that kernels compute with; no complex ones."""
ARITHMETIC_OF = {dtype: PARAM_DTYPES[dtype].arithmetic for dtype in VARIANT_OF}
"""The dtype that kernels compute in, for each dtype of ``VARIANT_OF``."""
DTYPE_NAMES = ", ".join(str(dtype).removeprefix("torch.") for dtype in VARIANT_OF)
"""The dtypes of ``VARIANT_OF``, as errors list them."""
_DEVICES = (*DEVICES, "meta")
_MOST_IDLE = 256
_LARGE, _MOST_BYTES = 64 << 10, 64 << 20

_idle: dict[Any, list[Pipeline]] = {}
"""Pipelines that no call uses, by all that their rows depend on except addresses."""
_idle_blocks: dict[Any, list[LaunchBlock]] = {}
"""Launch blocks over matrices and tables that no call uses, by the same."""


def is_served(tensor: Tensor) -> bool:
    """Whether operators accept the tensor; False for anything else."""
    if not isinstance(tensor, Tensor):
        return False
    is_wrapper = hasattr(tensor, "__tensor_flatten__")  # of other tensors, such as a DTensor
    is_plain = tensor.layout is torch.strided and not tensor.is_nested and not is_wrapper
    return is_plain and tensor.dtype in VARIANT_OF and tensor.device.type in _DEVICES


def in_order_of(tensor: Tensor, like: Tensor) -> Tensor:
    """The values of a tensor, in the memory order of another."""
    return tensor if tensor.stride() == like.stride() else torch.empty_like(like).copy_(tensor)


def launch(name: str, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> None:
    """Run a kernel over all elements; on a GPU, return while it runs.

    Args:
        name: the kernel's name.
        tensors: the tensors, by the names of its Inputs and Outputs: dense, not empty, of one
            device, dtype, shape and strides.
        numbers: the launch's arguments, by name; the address of those computed on the device.
    """
    first = next(iter(tensors.values()))
    queue = BACKENDS[first.device.type].queue(first.device)
    key = queue, name, first.dtype, first.numel()
    try:
        pipeline = _idle[key].pop()
    except LookupError:
        kernel = kernel_for(queue, name, VARIANT_OF[first.dtype])
        pipeline = Pipeline([kernel], Chunks([first.numel()], kernel.shape.chunk), first.device)
    for column, tensor in tensors.items():
        pipeline.write_addresses(column, [tensor.data_ptr()], first.element_size())
    pipeline.write_head(numbers)
    pipeline.run()
    _keep(_idle, key, pipeline)


def launch_rows(name: str, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> None:
    """Run a kernel that walks each row of a matrix as a whole; on a GPU, return while it runs.

    Args:
        name: the kernel's name.
        tensors: the tensors, by the names of its arguments: contiguous, not empty, of one device;
            the first is a matrix, and each has one row, or one value, for each of the matrix's
            rows.
        numbers: the launch's arguments, as in :func:`launch`.
    """
    matrix = next(iter(tensors.values()))
    rows, length = matrix.shape
    lengths = {"length": np.broadcast_to(np.int64(length), rows)}
    addresses = {column: row_addresses(tensor) for column, tensor in tensors.items()}
    TableLaunch(name, matrix.device, VARIANT_OF[matrix.dtype], lengths).run(addresses, numbers)


class TableLaunch:
    """A kernel over rows with their own arguments, some of which are the same in all launches."""

    def __init__(
        self, name: str, device: torch.device, variant: str, columns: Mapping[str, Any]
    ) -> None:
        """Prepare launches.

        Args:
            name: the kernel's name.
            device: the device of all memory.
            variant: one of :data:`fusedoptim.dtypes.VARIANTS`.
            columns: the arguments of rows that are the same in all launches, by name: an integer
                for all rows or one for each. "length" has one for each, about proportional to the
                row's work.
        """
        self._columns = columns
        self._lengths = np.asarray(columns["length"], dtype=np.int64)
        self._device = device
        # How many short rows a group takes depends roughly on the sum of their lengths.
        work = int(self._lengths.sum()).bit_length()
        self._kernel, self._size = (name, variant), (len(self._lengths), work)

    def run(self, columns: Mapping[str, Any], numbers: Mapping[str, float]) -> None:
        """Launch; on a GPU, return while the kernel runs.

        Args:
            columns: the other arguments of the rows.
            numbers: the launch's arguments, as in :func:`launch`.
        """
        queue = BACKENDS[self._device.type].queue(self._device)
        key = queue, *self._kernel, *self._size
        try:
            block = _idle_blocks[key].pop()
        except LookupError:
            block = LaunchBlock(kernel_for(queue, *self._kernel), self._lengths)
        if block.known is not self._columns:  # it has served other launches
            for column, values in self._columns.items():
                block.write(column, values)
            block.known = self._columns
        for column, values in columns.items():
            block.write(column, values)
        block.write_head(numbers)
        block.launch()
        if block.kernel.backend.runs_on_host:
            block.wait()
        _keep(_idle_blocks, key, block)


def launch_table(
    name: str,
    device: torch.device,
    variant: str,
    columns: Mapping[str, Any],
    numbers: Mapping[str, float],
) -> None:
    """Run a kernel once over rows that each have their own arguments.

    The arguments are those of :class:`TableLaunch` and its ``run``.
    """
    TableLaunch(name, device, variant, columns).run({}, numbers)


def _keep(idle: dict[Any, list[Any]], key: Any, launched: Any) -> None:
    """Keep what has run for reuse. Interrupted calls skip this: their kernel may still run."""
    if launched.nbytes > _MOST_BYTES:
        return
    if len(idle) >= _MOST_IDLE or (launched.nbytes > _LARGE and _is_full(idle, launched.nbytes)):
        idle.clear()
    idle.setdefault(key, []).append(launched)


def _is_full(idle: dict[Any, list[Any]], more: int) -> bool:
    """Whether too little is left for ``more`` bytes; counted only where these are many."""
    kept: list[int] = [each.nbytes for found in list(idle.values()) for each in list(found)]
    return sum(kept) + more > _MOST_BYTES
