"""Boxes of feature maps, and the taps of their samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from fusedoptim.doctor._examples.example import Example, Integers


def taps(random: np.random.Generator) -> Example:
    """Sides of boxes, in numbers that are exact in float32; some of their samples are outside."""
    samples, bins = np.array([1, 2, 4, 2, 0]), np.array([3, 2, 4, 1, 2])
    room = 2 * np.maximum(samples, 1)
    places = bins * room
    return Example(
        bins,
        {"places": places, "weights": places, "counts": bins},
        {
            "bins": bins,
            "start": random.integers(-24, 60, len(bins)) / 8,
            "extent": random.integers(-4, 20, len(bins)) / 4,
            "samples": samples,
            "size": random.integers(1, 9, len(bins)),
            "stride": np.array([1, 7, 64, 3, 5]),
            "room": room,
            "places": np.zeros(places.sum()),
            "counts": np.zeros(bins.sum()),
        },
    )


_CHANNELS = 150  # two blocks of four vectors of 16, and a remainder
_SHAPE = (5, 6)  # height and width of a map


def _boxes(random: np.random.Generator, boxes: Integers, spacing: int) -> Example:
    """The taps of 2 x 3 bins of ``boxes`` boxes in each row; a bin may have no taps."""
    height, width = _SHAPE
    pixel = _CHANNELS if spacing == 1 else 1
    sizes: dict[str, Integers] = {}
    given: dict[str, Any] = {"channels": _CHANNELS, "spacing": spacing}
    for side, bins, size, stride in (("y", 2, height, width * pixel), ("x", 3, width, pixel)):
        room, count = 3, bins * boxes.sum()
        sizes |= {f"{side}_places": boxes * bins * room, f"{side}_counts": boxes * bins}
        sizes[f"{side}_weights"] = sizes[f"{side}_places"]
        pixels = np.sort(random.random((count, size)).argsort(1)[:, :room], 1)
        given |= {
            f"{side}_bins": bins,
            f"{side}_room": room,
            f"{side}_places": pixels.ravel() * stride,
            f"{side}_counts": random.integers(0, room + 1, count),
            f"{side}_weights": random.uniform(0.25, 0.5, count * room),
        }
    return Example(boxes * _CHANNELS, sizes, given)


def average(spacing: int) -> Callable[[np.random.Generator], Example]:
    def example(random: np.random.Generator) -> Example:
        lengths, sizes, given, _ = _boxes(random, np.ones(2, np.int64), spacing)
        own = {"pixels": np.full(2, _CHANNELS * math.prod(_SHAPE))}
        own["output"] = np.full(2, _CHANNELS * given["y_bins"] * given["x_bins"])
        return Example(lengths, {**sizes, **own}, given)

    return example


def spread(spacing: int) -> Callable[[np.random.Generator], Example]:
    def example(random: np.random.Generator) -> Example:
        boxes = np.array([3, 1])
        lengths, sizes, given, _ = _boxes(random, boxes, spacing)
        row = _SHAPE[1] * (_CHANNELS if spacing == 1 else 1)
        own = {
            "grad": boxes * _CHANNELS * given["y_bins"] * given["x_bins"],
            "sums": np.full(2, _CHANNELS * math.prod(_SHAPE)),
            "boxes": np.array([2, 1]),
        }
        bands = {"boxes": np.array([0, 2, 0]), "count": own["boxes"]}
        bands |= {"begin": np.array([0, 2]) * row, "stop": np.array([3, 5]) * row}
        return Example(lengths, {**sizes, **own}, {**given, **bands})

    return example


def channels_first(random: np.random.Generator) -> Example:
    """Two runs of pixels."""
    sizes, channels, spacing = np.array([40, 7]), 5, 50
    return Example(
        sizes * channels,
        {"values": sizes * channels, "output": (channels - 1) * spacing + sizes},
        {"size": sizes, "channels": channels, "spacing": spacing},
    )


APART = math.prod(_SHAPE)
"""Elements from one channel to the next where channels come first."""
