"""The taps of boxes for ROIAlign: the rows and columns of a map that each bin reads, weighted.

See :mod:`fusedoptim.kernels.roi_align`. The boxes are read on the host: the number of samples in a
bin may depend on them, and so does the division of the work.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fusedoptim.launch.block import row_addresses
from fusedoptim.ops._launching import ARITHMETIC_OF, VARIANT_OF, launch_table

TAPS = 8
"""Pixels that a bin reads, approximately."""
MOST_SAMPLES = 1 << 20
"""Samples of a bin in each direction, at most.

No map has a bin of more pixels. A call's time grows with their number: 2**31 would seem to hang.
"""
_WORK = 16
"""Elements of an update that take as long as one sample."""

Reals = np.ndarray[Any, Any]
Integers = np.ndarray[Any, np.dtype[np.int64]]


class Grid(NamedTuple):
    """What all boxes share."""

    spatial_scale: float
    y_bins: int
    x_bins: int
    sampling_ratio: int
    aligned: bool

    @property
    def bins(self) -> int:
        """The bins of a box."""
        return self.y_bins * self.x_bins


class Side(NamedTuple):
    """Where the bins of each box lie on one side of a map."""

    start: Reals
    """The position of the first bin."""
    extent: Reals
    """The size of a bin."""
    samples: Integers
    """How many samples each bin has."""

    def reach(self, bins: int, size: int) -> tuple[Integers, Integers]:
        """A first and a last pixel of each box, between which all of its taps are."""
        ends = np.stack([self.start, self.start + bins * self.extent])
        first, last = np.floor(ends.min(0)) - 1, np.ceil(ends.max(0)) + 1
        both = np.nan_to_num(np.stack([first, last])).clip(0, size - 1).astype(np.int64)
        return both[0], both[1]


class Taps(NamedTuple):
    """The taps of all boxes on one side, as the kernels' arguments have them."""

    places: Tensor
    """(boxes, bins, room): the element of the map, counted from the first row or column."""
    weights: Tensor
    """(boxes, bins, room)."""
    counts: Tensor
    """(boxes, bins): how many of the room are in use."""

    @property
    def room(self) -> int:
        """The most taps that a bin may have."""
        return self.places.shape[2]

    def columns(self, side: str) -> dict[str, Integers]:
        """The addresses for each box, by the kernels' names of the taps of the "y" or "x" side."""
        named = zip(self._fields, self)
        return {f"{side}_{name}": row_addresses(tensor) for name, tensor in named}


def sides_of(rois: Reals, grid: Grid) -> tuple[Side, Side]:
    """The rows and the columns of boxes.

    Args:
        rois: (K, 5), float32 or float64. The arithmetic is torchvision's, operation by operation,
            so that the same number of samples is taken.
        grid: what the boxes share.
    """
    real = rois.dtype.type
    with np.errstate(all="ignore"):  # what is not finite has no samples
        corners = rois[:, 1:] * real(grid.spatial_scale) - real(0.5 if grid.aligned else 0.0)
        start, whole = corners[:, :2], corners[:, 2:] - corners[:, :2]
        if not grid.aligned:
            whole = np.where(whole < 1, real(1), whole)
        extent = whole / np.array([grid.x_bins, grid.y_bins], real)
        is_adaptive = grid.sampling_ratio <= 0
        samples = np.ceil(extent) if is_adaptive else np.full_like(extent, grid.sampling_ratio)
        counts = np.where((samples >= 1) & np.isfinite(samples), samples, 0)
    _check_samples(rois, counts)
    counts = counts.astype(np.int64)
    x, y = (Side(start[:, k], extent[:, k], counts[:, k]) for k in (0, 1))
    return y, x


def _check_samples(rois: Reals, counts: Reals) -> None:
    """Raise for a box that is so large that the samples of its bins would take too long."""
    wrong = np.flatnonzero((counts > MOST_SAMPLES).any(1))
    if len(wrong):
        k = wrong[0]
        raise ValueError(
            f"roi_align: boxes[{k}] is {rois[k, 1:].tolist()}, so that a bin has "
            f"{counts[k].max():.0f} samples in one direction, one for each pixel, and at most "
            f"{MOST_SAMPLES} are possible; clip boxes to the image, or pass sampling_ratio=2"
        )


class BoxTaps:
    """The taps of boxes of maps, in the layout of the maps."""

    def __init__(
        self,
        boxes: Reals,
        grid: Grid,
        sizes: tuple[int, int],
        channels: int,
        is_last: bool,
        device: torch.device,
    ) -> None:
        """Compute the taps.

        Args:
            boxes: (K, 5), K at least 1.
            grid: what the boxes share.
            sizes: height and width of a map.
            channels: the channels of a map.
            is_last: whether channels are the last dimension of a map, or the first.
            device: where the taps are computed.
        """
        self.maps: Integers = boxes[:, 0].astype(np.int64)
        """The map of each box."""
        self.sides = sides_of(boxes, grid)
        """Rows and columns."""
        height, width = sizes
        self.is_last = is_last
        """Whether channels are the last dimension."""
        pixel = channels if is_last else 1
        self.row = width * pixel
        """Elements from one row to the next."""
        self._grid, self._channels = grid, channels
        self._spacing = 1 if is_last else height * width
        bins, strides = (grid.y_bins, grid.x_bins), (self.row, pixel)
        self._y, self._x = _taps_of(self.sides, bins, sizes, strides, device)

    def columns(self) -> dict[str, Integers]:
        """The addresses of each box's taps, by the kernels' names."""
        return {**self._y.columns("y"), **self._x.columns("x")}

    def numbers(self) -> dict[str, float]:
        """The launch's arguments; only the kernels named strided read the last one."""
        return {
            "y_bins": self._grid.y_bins,
            "x_bins": self._grid.x_bins,
            "y_room": self._y.room,
            "x_room": self._x.room,
            "channels": self._channels,
            "spacing": self._spacing,
        }


def is_channels_last(maps: Tensor) -> bool:
    """Whether the channels of a pixel follow each other."""
    return maps.is_contiguous(memory_format=torch.channels_last)


def are_few(boxes: int, grid: Grid, pixels: int) -> bool:
    """Whether ``boxes`` boxes read less of maps than changing the maps' layout does."""
    return boxes * grid.bins * TAPS < pixels


def read_boxes(rois: Tensor, dtype: torch.dtype) -> Reals:
    """The boxes of maps of a dtype, in the dtype of arithmetic, on the host."""
    values: Reals = rois.detach().to("cpu", ARITHMETIC_OF[dtype]).contiguous().numpy()
    return values


def check_boxes(boxes: Reals, grid: Grid, maps: int, sizes: tuple[int, int]) -> None:
    """Raise for boxes that have no place on the maps."""
    of_map = boxes[:, 0]
    wrong = np.flatnonzero(~((of_map > -1) & (of_map < maps)))
    if len(wrong):
        known = f"maps 0 to {maps - 1}" if maps > 1 else "only map 0" if maps else "no maps"
        raise IndexError(
            f"roi_align: boxes[{wrong[0]}] names map {of_map[wrong[0]]:g}, but input has {known}"
        )
    if grid.sampling_ratio > 0:
        with np.errstate(all="ignore"):
            wrong = np.flatnonzero(~np.isfinite(boxes[:, 1:] * grid.spatial_scale).all(1))
        if len(wrong):
            raise ValueError(
                f"roi_align: boxes[{wrong[0]}] is {boxes[wrong[0], 1:].tolist()}, with "
                f"spatial_scale={grid.spatial_scale}; leave out boxes that are not finite"
            )
    if len(boxes) and 0 in sizes:
        raise ValueError(
            f"roi_align: input's maps have {sizes[0]} x {sizes[1]} pixels, but there are boxes; "
            "leave them out"
        )


def _taps_of(
    sides: tuple[Side, Side],
    bins: tuple[int, int],
    sizes: tuple[int, int],
    strides: tuple[int, int],
    device: torch.device,
) -> tuple[Taps, Taps]:
    """The taps of all boxes: those of rows, and those of columns.

    Args:
        sides: the boxes' rows and columns.
        bins: the numbers of bins, at least 1.
        sizes: height and width of the map.
        strides: between its rows and between its columns, in elements.
        device: where the taps are computed.
    """
    real = getattr(torch, sides[0].start.dtype.name)
    taps, columns = [], []
    for side, count, size, stride in zip(sides, bins, sizes, strides):
        boxes = len(side.start)
        # Taps of a bin rise from pixel to pixel, and a sample has two.
        room = max(min(2 * int(side.samples.max()), size), 1)
        made = Taps(
            torch.empty((boxes, count, room), dtype=torch.int64, device=device),
            torch.empty((boxes, count, room), dtype=real, device=device),
            torch.empty((boxes, count), dtype=torch.int64, device=device),
        )
        shared = {"bins": count, "size": size, "stride": stride, "room": room}
        columns.append(
            side._asdict()
            | {name: np.full(boxes, number) for name, number in shared.items()}
            | {name: row_addresses(tensor) for name, tensor in made._asdict().items()}
            | {"length": count * side.samples * _WORK}
        )
        taps.append(made)
    both = {name: np.concatenate([column[name] for column in columns]) for name in columns[0]}
    launch_table("roi_align_taps", device, VARIANT_OF[real], both, {})
    return taps[0], taps[1]
