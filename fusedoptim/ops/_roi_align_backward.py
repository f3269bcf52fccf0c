"""The gradient of ROIAlign, by bands of rows that each add up what boxes pass on to them.

No two work items write to one pixel, so there are no atomic additions. The order of each sum is
that of the boxes, which gives the same bits on any number of threads (docs/design/detection.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusedoptim.allocator import current_pool
from fusedoptim.launch.block import row_addresses
from fusedoptim.launch.devices import queue_of
from fusedoptim.ops._launching import ARITHMETIC_OF, VARIANT_OF, launch_table
from fusedoptim.ops._registering import register
from fusedoptim.ops._roi_taps import (
    TAPS,
    BoxTaps,
    Grid,
    Integers,
    are_few,
    check_boxes,
    read_boxes,
)

_BAND = 16
"""The most rows of a map in a band."""
_RUN = 256
"""Pixels that change their layout together."""


def _like(
    grad: Tensor,
    rois: Tensor,
    spatial_scale: float,
    y_bins: int,
    x_bins: int,
    sampling_ratio: int,
    aligned: bool,
    shape: Sequence[int],
    is_last: bool,
) -> Tensor:
    """The gradient of the maps, uninitialized."""
    layout = torch.channels_last if is_last else torch.contiguous_format
    return torch.empty(tuple(shape), dtype=grad.dtype, device=grad.device, memory_format=layout)


def _spread(grad: Tensor, rois: Tensor, *arguments: Any) -> Tensor:
    """The gradient of the maps, whose shape and layout are the last two arguments."""
    *numbers, shape, is_last = arguments
    grid = Grid(*numbers)
    maps, channels, height, width = shape
    boxes = read_boxes(rois, grad.dtype)
    check_boxes(boxes, grid, maps, (height, width))
    result = _like(grad, rois, *arguments)
    if not grad.numel() or not result.numel():
        return result.zero_()
    real = ARITHMETIC_OF[grad.dtype]
    if is_last or are_few(len(boxes), grid, maps * height * width):
        sums = torch.zeros_like(result, dtype=real)
        taps = BoxTaps(boxes, grid, (height, width), channels, is_last, grad.device)
        _add_up(grad, taps, grid, sums.permute(0, 2, 3, 1) if is_last else sums, height)
        return sums.to(grad.dtype)
    pool = current_pool(queue_of(grad.device))
    sums = pool.empty((maps, height, width, channels), real).zero_()
    taps = BoxTaps(boxes, grid, (height, width), channels, True, grad.device)
    _add_up(grad, taps, grid, sums, height)
    return _channels_first(sums, result)


def _add_up(grad: Tensor, taps: BoxTaps, grid: Grid, sums: Tensor, height: int) -> None:
    """Add what the boxes pass on to ``sums``, which has a map in each index."""
    maps, channels = len(sums), grad.shape[1]
    grad = grad.contiguous()
    band = max(min(maps * height // (4 * torch.get_num_threads()), _BAND), 1)
    lists, counts = _boxes_of_bands(taps, grid, maps, height, band)
    boxes = torch.from_numpy(lists).to(grad.device)
    starts = np.tile(np.arange(0, height, band), maps)
    columns = {
        "length": counts * (channels * grid.bins * TAPS) + 1,
        "grad": grad.data_ptr(),
        "sums": np.repeat(row_addresses(sums), len(starts) // maps),
        "boxes": boxes.data_ptr() + (np.cumsum(counts) - counts) * boxes.element_size(),
        "count": counts,
        "begin": starts * taps.row,
        "stop": np.minimum(starts + band, height) * taps.row,
        **{name: addresses[0] for name, addresses in taps.columns().items()},
    }
    name = "roi_align_backward" if taps.is_last else "roi_align_backward_strided"
    launch_table(name, grad.device, VARIANT_OF[grad.dtype], columns, taps.numbers())


def _boxes_of_bands(
    taps: BoxTaps, grid: Grid, maps: int, height: int, band: int
) -> tuple[Integers, Integers]:
    """The boxes of each band in their order, one band after the other, and how many each has."""
    per_map = -(-height // band)
    first, last = (rows // band for rows in taps.sides[0].reach(grid.y_bins, height))
    each = last - first + 1
    boxes = np.repeat(np.arange(len(each)), each)
    further = np.arange(len(boxes)) - np.repeat(np.cumsum(each) - each, each)
    bands = taps.maps[boxes] * per_map + first[boxes] + further
    return boxes[np.argsort(bands, kind="stable")], np.bincount(bands, minlength=maps * per_map)


def _channels_first(values: Tensor, result: Tensor) -> Tensor:
    """Write values of shape (N, H, W, C) to ``result``, of shape (N, C, H, W) and contiguous."""
    maps, channels, height, width = result.shape
    pixels = height * width
    starts = np.tile(np.arange(0, pixels, _RUN), maps)
    sizes = np.minimum(pixels - starts, _RUN)
    per_map = len(starts) // maps
    to_values, to_result = (
        np.repeat(row_addresses(tensor), per_map) + starts * size
        for tensor, size in (
            (values, channels * values.element_size()),
            (result, result.element_size()),
        )
    )
    columns = {"length": sizes * channels, "size": sizes, "values": to_values, "output": to_result}
    numbers = {"channels": channels, "spacing": pixels}
    launch_table("channels_first", result.device, VARIANT_OF[result.dtype], columns, numbers)
    return result


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, rois, *ctx.numbers, _, _ = inputs
    ctx.save_for_backward(rois)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # The gradient is linear in that of the output, and its transpose is the average itself.
    (rois,) = ctx.saved_tensors
    of_grad = torch.ops.fusedoptim.roi_align(grad, rois, *ctx.numbers)
    return of_grad, *[None] * 8


roi_align_backward = register(
    "roi_align_backward(Tensor grad, Tensor boxes, float spatial_scale, SymInt y_bins, "
    "SymInt x_bins, int sampling_ratio, bool aligned, SymInt[] shape, bool is_last) -> Tensor",
    kernel=_spread,
    fake=_like,
    setup_context=_setup_context,
    backward=_backward,
)
