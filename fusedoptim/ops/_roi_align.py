r"""ROIAlign, forward and backward: boxes of maps averaged over a grid of bins.

Channels last is the layout that the kernels read and write as whole vectors. A map in another
layout is copied to this one, in memory of the pool, unless the boxes are so few that they touch
little of the map. docs/design/detection.md says what that costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusedoptim.allocator import current_pool
from fusedoptim.launch.block import row_addresses
from fusedoptim.launch.devices import queue_of
from fusedoptim.ops._arguments import as_integer, as_real, check_bool, check_constant, check_tensors
from fusedoptim.ops._autocast import autocast
from fusedoptim.ops._launching import DTYPE_NAMES, VARIANT_OF, launch_table
from fusedoptim.ops._registering import register
from fusedoptim.ops._roi_align_backward import roi_align_backward
from fusedoptim.ops._roi_taps import (
    MOST_SAMPLES,
    TAPS,
    BoxTaps,
    Grid,
    are_few,
    check_boxes,
    is_channels_last,
    read_boxes,
)

__all__ = ["roi_align"]


def roi_align(
    input: Tensor,  # noqa: A002 (torchvision's name)
    boxes: Tensor | Iterable[Tensor],
    output_size: int | Sequence[int],
    spatial_scale: float = 1.0,
    sampling_ratio: int = -1,
    aligned: bool = False,
) -> Tensor:
    r"""Average each bin of boxes over samples that are interpolated between pixels.

    .. math::
        o_{k,c,p,q} = \frac{1}{n_y n_x} \sum_{s=1}^{n_y} \sum_{t=1}^{n_x}
            \sum_{i,j} \max(0, 1 - |y_{ps} - i|)\, \max(0, 1 - |x_{qt} - j|)\, m_{b_k,c,i,j}

    Args:
        input: the maps :math:`m`, of shape (N, C, H, W), contiguous or channels last: float32,
            float64, bfloat16 or float16. Arithmetic is float32, or float64 for float64.
        boxes: of shape (K, 5), with the index of a map and the corners x1, y1, x2, y2 in each row;
            or for each map a tensor of shape (L, 4). In ``input``'s dtype, or in float32 if that
            has 16 bits. They have no gradient.
        output_size: height and width of the result, in bins; an integer for both.
        spatial_scale: the factor from coordinates of boxes to those of the maps.
        sampling_ratio: samples of a bin in each direction. If it is not positive, there is one for
            each pixel of the bin's height or width, rounded up.
        aligned: shift boxes by half a pixel, and do not enlarge those smaller than a pixel.

    Returns:
        (K, C, height, width), contiguous, in ``input``'s dtype. The gradient has the layout of
        ``input``, and the same bits on any number of threads. If ``sampling_ratio`` is not
        positive, bins of boxes that are not finite, and with ``aligned`` of boxes without area,
        have no samples and are 0.

    Raises:
        TypeError: a dtype is not one of these, output_size or sampling_ratio is not an integer,
            aligned is not a bool, or spatial_scale is not a number, or is a tensor that requires
            grad.
        ValueError: a shape does not fit, or a box is not finite and ``sampling_ratio`` is positive.
            Or a bin would have more than 1,048,576 samples in one direction, by ``sampling_ratio``
            or because a box is so large: their number is the time that a call takes, and no map has
            so many pixels.
        IndexError: a box belongs to a map that ``input`` does not have.

    Example:
        >>> import torch
        >>> image = torch.arange(16.0).reshape(1, 1, 4, 4)
        >>> roi_align(image, [torch.tensor([[0.0, 0.0, 2.0, 2.0]])], 2, sampling_ratio=1)
        tensor([[[[2.5000, 3.5000],
                  [6.5000, 7.5000]]]])

    Semantics: ``torchvision.ops.roi_align`` of torchvision 0.28, which does not accept bfloat16.
    """
    check_tensors("roi_align", input=input)
    height, width = _pair(output_size)
    check_constant("roi_align", "spatial_scale", spatial_scale)
    scale = as_real("roi_align", "spatial_scale", spatial_scale)
    ratio = as_integer("roi_align", "sampling_ratio", sampling_ratio)
    check_bool("roi_align", "aligned", aligned)
    if isinstance(boxes, Tensor):
        rois = autocast(boxes, torch.float32)
    elif isinstance(boxes, Iterable):
        rois = _joined(list(boxes), input.dtype)
    else:
        raise TypeError(
            f"roi_align: boxes are of type {type(boxes).__name__}; pass a tensor of (K, 5), or one "
            "of (L, 4) for each map"
        )
    result: Tensor = _roi_align(input, rois, scale, height, width, ratio, aligned)
    return result


def _pair(output_size: int | Sequence[int]) -> tuple[int, int]:
    sizes = output_size if isinstance(output_size, Sequence) else (output_size, output_size)
    if len(sizes) != 2:
        raise ValueError(f"roi_align: output_size={output_size!r}; pass one integer, or two")
    height, width = (as_integer("roi_align", "output_size", size) for size in sizes)
    return height, width


def _joined(boxes: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Boxes of several maps of a dtype, each with the index of its map."""
    check_tensors("roi_align", **{f"boxes[{k}]": of_map for k, of_map in enumerate(boxes)})
    for k, of_map in enumerate(boxes):
        if of_map.dim() != 2 or of_map.shape[1] != 4:
            raise ValueError(
                f"roi_align: boxes[{k}] has shape {tuple(of_map.shape)}; pass (L, 4) for each map, "
                "or one tensor of (K, 5)"
            )
    if not boxes:
        raise ValueError("roi_align: boxes is an empty list; pass a tensor of (L, 4) for each map")
    corners = autocast(torch.cat(boxes), torch.float32)
    if corners.dtype == dtype and dtype.itemsize == 2:
        corners = corners.float()  # 16 bits cannot tell all maps apart, bfloat16 only 257
    kind = corners.dtype
    indices = [torch.full_like(of_map[:, :1], k, dtype=kind) for k, of_map in enumerate(boxes)]
    return torch.cat([torch.cat(indices), corners], 1)


def _like(
    input: Tensor,  # noqa: A002
    rois: Tensor,
    spatial_scale: float,
    y_bins: int,
    x_bins: int,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    """The output, uninitialized; raise if the operator does not accept these arguments."""
    if input.dtype not in VARIANT_OF:
        raise TypeError(
            f"roi_align: input has dtype {input.dtype}, and kernels compute with {DTYPE_NAMES}; "
            "convert it"
        )
    is_wider = rois.dtype == torch.float32 and input.dtype.itemsize == 2
    if rois.dtype != input.dtype and not is_wider:
        raise TypeError(
            f"roi_align: boxes have dtype {rois.dtype} and input has {input.dtype}; convert one"
        )
    if input.dim() != 4:
        raise ValueError(f"roi_align: input has shape {tuple(input.shape)}; pass (N, C, H, W)")
    if rois.dim() != 2 or rois.shape[1] != 5:
        raise ValueError(
            f"roi_align: boxes have shape {tuple(rois.shape)}; pass (K, 5), or a list of (L, 4)"
        )
    if rois.device != input.device:
        raise ValueError(f"roi_align: boxes are on {rois.device}; move them to {input.device}")
    if y_bins < 0 or x_bins < 0:
        raise ValueError(
            f"roi_align: output_size is {(y_bins, x_bins)}; sizes must not be negative"
        )
    if sampling_ratio > MOST_SAMPLES:
        raise ValueError(
            f"roi_align: sampling_ratio={sampling_ratio}, and at most {MOST_SAMPLES} samples are "
            "possible; pass 2, or -1 for one for each pixel of a bin"
        )
    return input.new_empty((rois.shape[0], input.shape[1], y_bins, x_bins))


def _average(input: Tensor, rois: Tensor, *numbers: Any) -> Tensor:  # noqa: A002
    output = _like(input, rois, *numbers)
    grid = Grid(*numbers)
    maps, channels, height, width = input.shape
    boxes = read_boxes(rois, input.dtype)
    check_boxes(boxes, grid, maps, (height, width))
    if not output.numel():
        return output
    if is_channels_last(input):
        source, is_last = input, True
    elif are_few(len(boxes), grid, maps * height * width):
        source, is_last = input.contiguous(), False
    else:
        source, is_last = _copied(input), True
    taps = BoxTaps(boxes, grid, (height, width), channels, is_last, input.device)
    columns = {
        "length": np.full(len(boxes), channels * grid.bins * TAPS),
        "pixels": row_addresses(source.permute(0, 2, 3, 1) if is_last else source)[taps.maps],
        "output": row_addresses(output),
        **taps.columns(),
    }
    # Sorted by vertical position, overlapping boxes are processed at about the same time.
    order = np.argsort(taps.sides[0].start, kind="stable")
    columns = {name: values[order] for name, values in columns.items()}
    name = "roi_align" if is_last else "roi_align_strided"
    launch_table(name, input.device, VARIANT_OF[input.dtype], columns, taps.numbers())
    return output


def _copied(input: Tensor) -> Tensor:  # noqa: A002
    """The maps, channels last, in memory of the pool, which gets it back for the next call."""
    maps, channels, height, width = input.shape
    pool = current_pool(queue_of(input.device))
    copy = pool.empty((maps, height, width, channels), input.dtype).permute(0, 3, 1, 2)
    return copy.copy_(input)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    source, rois, *ctx.numbers = inputs
    ctx.save_for_backward(rois)
    ctx.shape = source.shape
    ctx.is_last = is_channels_last(source) and not source.is_contiguous()


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (rois,) = ctx.saved_tensors
    of_input = roi_align_backward(grad, rois, *ctx.numbers, list(ctx.shape), ctx.is_last)
    return of_input, None, None, None, None, None, None


_roi_align = register(
    "roi_align(Tensor input, Tensor boxes, float spatial_scale, SymInt y_bins, SymInt x_bins, "
    "int sampling_ratio, bool aligned) -> Tensor",
    kernel=_average,
    fake=_like,
    setup_context=_setup_context,
    backward=_backward,
)
