r"""Non-maximum suppression: the boxes that do not overlap a kept box with a higher score.

The results are torchvision's, box by box: the kernel does torchvision's arithmetic, and equal
scores come in torchvision's order.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusedoptim.launch.block import row_addresses
from fusedoptim.ops._arguments import as_real, check_tensors
from fusedoptim.ops._autocast import autocast
from fusedoptim.ops._launching import VARIANT_OF, launch_table
from fusedoptim.ops._registering import register_without_gradient

__all__ = ["batched_nms", "nms"]

_TILE = 32
"""Elements of working memory that the kernel needs."""
_FEW = {"cpu": 4000}
"""Up to this many coordinates, all classes are one launch; on other devices, up to 100,000. Both
are torchvision's limits."""


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    r"""The boxes that do not overlap a kept box with a higher score.

    .. math::
        \mathrm{IoU}(a, b) = \frac{|a \cap b|}{|a| + |b| - |a \cap b|}

    Args:
        boxes: corners x1, y1, x2, y2, of shape (N, 4); float32 or float64.
        scores: the scores, of shape (N,), in the same dtype.
        iou_threshold: a box is removed if its IoU with a kept box is larger.

    Returns:
        the int64 indices of the kept boxes, by descending score; of equal scores the first comes
        first. The IoU of two boxes without area is NaN, and so is that of a box with NaN. NaN is
        not larger than any threshold.

    Raises:
        TypeError: boxes are neither float32 nor float64, or scores have another dtype.
        ValueError: a shape or a device does not fit.

    Example:
        >>> import torch
        >>> boxes = torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 2.5], [5, 5, 6, 6]])
        >>> nms(boxes, torch.tensor([0.5, 0.9, 0.7]), 0.5)
        tensor([1, 2])

    Semantics: ``torchvision.ops.nms`` of torchvision 0.28.
    """
    check_tensors("nms", boxes=boxes, scores=scores)
    threshold = as_real("nms", "iou_threshold", iou_threshold)
    boxes, scores = autocast(boxes, torch.float32), autocast(scores, torch.float32)
    result: Tensor = _nms(boxes, scores, None, threshold)
    return result


def batched_nms(boxes: Tensor, scores: Tensor, idxs: Tensor, iou_threshold: float) -> Tensor:
    """The boxes of several classes, each suppressed only by those of its own class.

    Args:
        boxes: the boxes, of shape (N, 4), as :func:`nms` takes them.
        scores: the scores, of shape (N,).
        idxs: the class of each box, of shape (N,).
        iou_threshold: the threshold, as :func:`nms` takes it.

    Returns:
        the int64 indices of the kept boxes, by descending score, NaN first. With more than 1,000
        boxes, equal scores come in the order of ``torch.sort``, which is not stable.

    Raises:
        TypeError: as :func:`nms`.
        ValueError: as :func:`nms`, or there is not one class for each box.

    Example:
        >>> import torch
        >>> boxes = torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 2.5], [5, 5, 6, 6]])
        >>> batched_nms(boxes, torch.tensor([0.5, 0.9, 0.7]), torch.tensor([3, 4, 4]), 0.5)
        tensor([1, 2, 0])

    Semantics: ``torchvision.ops.batched_nms`` of torchvision 0.28. Up to 1,000 boxes, both move the
    classes apart by an offset, which rounds the coordinates.
    """
    check_tensors("batched_nms", boxes=boxes, scores=scores, idxs=idxs)
    threshold = as_real("batched_nms", "iou_threshold", iou_threshold)
    boxes, scores = autocast(boxes, torch.float32), autocast(scores, torch.float32)
    if boxes.numel() > _FEW.get(boxes.device.type, 100_000):
        result: Tensor = _nms(boxes, scores, idxs, threshold)
        return result
    if boxes.numel() == 0:
        return torch.empty(0, dtype=torch.int64, device=boxes.device)
    _check_shapes(boxes, idxs=idxs)
    offsets = idxs.to(boxes) * (boxes.max() + 1)
    return nms(boxes + offsets[:, None], scores, threshold)


def _suppress(boxes: Tensor, scores: Tensor, idxs: Tensor | None, iou_threshold: float) -> Tensor:
    _check(boxes, scores, idxs)
    boxes, scores = boxes.detach(), scores.detach()  # indices have no gradient
    if not len(boxes):
        return scores.new_empty(0, dtype=torch.int64)
    order = scores.sort(stable=True, descending=True)[1]
    if idxs is None:
        return order[_kept(boxes[order], [len(boxes)], iou_threshold)]
    classes, by_class = idxs[order].sort(stable=True)
    sizes = np.unique(classes.cpu().numpy(), return_counts=True)[1].tolist()
    by_class = order[by_class]
    kept = by_class[_kept(boxes[by_class], sizes, iou_threshold)].sort()[0]
    return kept[scores[kept].sort(descending=True)[1]]  # torchvision's order of equal scores


def _check(boxes: Tensor, scores: Tensor, idxs: Tensor | None) -> None:
    if boxes.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"nms: boxes have dtype {boxes.dtype}; pass float32 or float64, such as boxes.float()"
        )
    if scores.dtype != boxes.dtype:
        raise TypeError(f"nms: scores have dtype {scores.dtype}, and boxes {boxes.dtype}")
    of_boxes = {"scores": scores} if idxs is None else {"scores": scores, "idxs": idxs}
    _check_shapes(boxes, **of_boxes)
    for name, tensor in of_boxes.items():
        if tensor.device != boxes.device:
            raise ValueError(f"nms: {name} are on {tensor.device}; move them to {boxes.device}")


def _check_shapes(boxes: Tensor, **of_boxes: Tensor) -> None:
    if boxes.dim() != 2 or boxes.shape[1] != 4:
        raise ValueError(f"nms: boxes have shape {tuple(boxes.shape)}; pass (N, 4)")
    for name, tensor in of_boxes.items():
        if tensor.shape != boxes.shape[:1]:
            raise ValueError(
                f"nms: {name} have shape {tuple(tensor.shape)}; pass {tuple(boxes.shape[:1])}, one "
                "for each box"
            )


def _kept(boxes: Tensor, sizes: list[int], iou_threshold: float) -> Tensor:
    """The indices of the kept boxes; runs of these sizes are independent, by descending score."""
    with_areas = boxes.new_empty(len(boxes), 5)
    with_areas[:, :4] = boxes
    sides = boxes[:, 2:] - boxes[:, :2]
    torch.mul(sides[:, 0], sides[:, 1], out=with_areas[:, 4])
    best = torch.empty_like(with_areas)
    rivals = torch.empty((len(sizes), _TILE), dtype=torch.int64, device=boxes.device)
    kept = torch.empty(len(boxes), dtype=torch.int64, device=boxes.device)
    counts = torch.empty(len(sizes), dtype=torch.int64, device=boxes.device)
    size = np.array(sizes)
    first = np.cumsum(size) - size
    columns: dict[str, Any] = {
        "length": size * size // _TILE + 1,
        "size": size,
        "boxes": row_addresses(with_areas, first),
        "best": row_addresses(best, first),
        "rivals": row_addresses(rivals),
        "kept": row_addresses(kept, first),
        "count": row_addresses(counts),
    }
    least = _least_above(iou_threshold, boxes.dtype)
    launch_table("nms", boxes.device, VARIANT_OF[boxes.dtype], columns, {"threshold": least})
    if len(sizes) == 1:
        return kept[: int(counts[0])]
    runs = zip(first.tolist(), counts.tolist())
    return torch.cat([kept[start : start + count] + start for start, count in runs])


def _least_above(threshold: float, dtype: torch.dtype) -> float:
    """The smallest number of ``dtype`` that is larger than ``threshold``."""
    real = np.float64 if dtype == torch.float64 else np.float32
    with np.errstate(over="ignore"):
        nearest = real(threshold)
    if float(nearest) > threshold or math.isnan(threshold):
        return float(nearest)
    return float(np.nextafter(nearest, real(math.inf)))


def _like(boxes: Tensor, scores: Tensor, idxs: Tensor | None, iou_threshold: float) -> Tensor:
    _check(boxes, scores, idxs)
    size = torch.library.get_ctx().new_dynamic_size()
    return scores.new_empty(size, dtype=torch.int64)


_nms = register_without_gradient(
    "nms(Tensor boxes, Tensor scores, Tensor? idxs, float iou_threshold) -> Tensor",
    kernel=_suppress,
    fake=_like,
)
