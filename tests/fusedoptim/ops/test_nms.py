"""The operators nms and batched_nms: values, ties, tracing, errors."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fusedoptim.ops import batched_nms, nms
from tests.references.nms import nms as reference
from tests.running import at_each_thread_count

OP = torch.ops.fusedoptim.nms.default
COUNTS = [0, 1, 15, 16, 17, 33, 150]


def new_boxes(count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Boxes on a grid, many of which overlap by simple fractions, and scores with ties."""
    corners = torch.randint(0, 12, (count, 2))
    boxes = torch.cat([corners, corners + torch.randint(0, 6, (count, 2))], 1)
    return boxes.to(dtype), torch.randint(0, count + 1, (count,)).to(dtype)


class TestValues:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("count", COUNTS)
    @pytest.mark.parametrize("threshold", ["0", "1/2", "1/4", "7/10", "1", "-1"])
    def test_equals_the_reference(self, threshold: str, count: int, dtype: torch.dtype) -> None:
        """At thresholds of 1/2 and 1/4, boxes whose overlap equals the threshold stay."""
        boxes, scores = new_boxes(count, dtype)
        limit = Fraction(threshold)
        expected = reference(boxes, scores, limit)
        kept = nms(boxes, scores, float(limit))
        assert kept.dtype == torch.int64
        assert kept.tolist() == expected

    @pytest.mark.parametrize("count", [*COUNTS, 1200])
    def test_classes(self, count: int) -> None:
        """Few boxes are moved apart, and many boxes take one launch of several rows."""
        boxes, scores = new_boxes(count)
        classes = torch.randint(-2, 5, (count,))
        kept = [
            index
            for of_class in classes.unique()
            for index in _within(boxes, scores, classes == of_class)
        ]
        expected = torch.tensor(sorted(kept), dtype=torch.int64)
        is_stable = count <= 1000
        order = scores[expected].sort(stable=is_stable, descending=True)[1]
        assert torch.equal(batched_nms(boxes, scores, classes, 0.5), expected[order])

    def test_nan(self) -> None:
        """A box with NaN overlaps nothing; a score of NaN comes first."""
        boxes = torch.tensor([[0.0, 0, 2, 2]] * 4)
        boxes[1, 0] = math.nan
        scores = torch.tensor([0.5, 0.9, math.nan, 0.5])
        assert nms(boxes, scores, 0.5).tolist() == [2, 1]
        assert nms(boxes, scores, math.nan).tolist() == [2, 1, 0, 3]

    def test_any_number_of_threads(self) -> None:
        boxes, scores = torch.rand(3000, 4).sort(1)[0] * 50, torch.randint(0, 100, (3000,)).float()
        classes = torch.randint(0, 4, (3000,))
        first, *others = at_each_thread_count(lambda: batched_nms(boxes, scores, classes, 0.5))
        assert all(torch.equal(first, other) for other in others)

    def test_autocast(self) -> None:
        boxes, scores = new_boxes(40)
        with torch.autocast("cpu"):
            kept = nms(boxes.bfloat16(), scores.bfloat16(), 0.5)
        assert torch.equal(kept, nms(boxes, scores.bfloat16().float(), 0.5))

    @pytest.mark.parametrize("count", [200, 1500])
    def test_autocast_keeps_float64(self, count: int) -> None:
        """Boxes that differ by less than float32 can tell."""
        boxes, scores = new_boxes(count, torch.float64)
        boxes = 1000 + boxes * 1e-6
        scores, classes = 1 + scores * 1e-9, torch.zeros(count)
        expected = nms(boxes, scores, 0.5), batched_nms(boxes, scores, classes, 0.5)
        assert len(expected[0]) < count  # in float32, no box has an area, and all are kept
        with torch.autocast("cpu", torch.bfloat16):
            kept = nms(boxes, scores, 0.5), batched_nms(boxes, scores, classes, 0.5)
        assert all(map(torch.equal, kept, expected))

    def test_arguments_that_require_grad(self) -> None:
        boxes, scores = new_boxes(40)
        kept = nms(boxes.requires_grad_(), scores.requires_grad_(), 0.5)
        assert not kept.requires_grad


def _within(boxes: Tensor, scores: Tensor, mask: Tensor) -> list[int]:
    indices = mask.nonzero().flatten()
    return indices[reference(boxes[mask], scores[mask], Fraction(1, 2))].tolist()


class TestTracing:
    def test_opcheck(self) -> None:
        boxes, scores = new_boxes(40)
        for classes in (None, torch.randint(0, 3, (40,))):
            torch.library.opcheck(OP, (boxes, scores, classes, 0.5))

    def test_compiled_equals_eager(self) -> None:
        def function(boxes: Tensor, scores: Tensor) -> Tensor:
            return scores[nms(boxes * 2, scores, 0.5)] + 1

        boxes, scores = new_boxes(40)
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(boxes, scores), function(boxes, scores))


class TestRefused:
    @pytest.mark.parametrize(
        ("change", "error", "match"),
        [
            ({"boxes": torch.zeros(3, 4).half()}, TypeError, r"such as boxes.float\(\)"),
            ({"boxes": torch.zeros(3, 4).int()}, TypeError, "torch.int32"),
            ({"scores": torch.zeros(3).double()}, TypeError, "scores have dtype torch.float64"),
            ({"boxes": torch.zeros(3, 5)}, ValueError, r"pass \(N, 4\)"),
            ({"boxes": torch.zeros(4)}, ValueError, r"pass \(N, 4\)"),
            ({"scores": torch.zeros(2)}, ValueError, r"pass \(3,\)"),
            ({"scores": torch.zeros(3, 1)}, ValueError, r"pass \(3,\)"),
            ({"boxes": [[0.0, 0, 1, 1]]}, TypeError, "boxes is of type list; pass a tensor"),
            ({"scores": [0.5]}, TypeError, "scores is of type list; pass a tensor"),
            (
                {"iou_threshold": ".5"},
                TypeError,
                r"iou_threshold='\.5' is of type str; pass a number",
            ),
            ({"iou_threshold": None}, TypeError, "iou_threshold=None is of type NoneType"),
        ],
    )
    def test_refused(self, change: dict[str, Any], error: type[Exception], match: str) -> None:
        boxes, scores = torch.zeros(3, 4), torch.zeros(3)
        arguments: dict[str, Any] = {"boxes": boxes, "scores": scores, "iou_threshold": 0.5}
        with pytest.raises(error, match=match):
            nms(**arguments | change)
        if "boxes" not in change or isinstance(change["boxes"], list):
            with pytest.raises(error, match=match):
                batched_nms(**arguments | {"idxs": torch.zeros(3)} | change)

    @pytest.mark.parametrize("count", [3, 2000])
    @pytest.mark.parametrize("classes", [1, 2])
    def test_too_few_classes(self, count: int, classes: int) -> None:
        boxes, scores = torch.zeros(count, 4), torch.zeros(count)
        with pytest.raises(ValueError, match=rf"idxs have shape \({classes},\); pass \({count},"):
            batched_nms(boxes, scores, torch.zeros(classes), 0.5)
        with pytest.raises(TypeError, match="idxs is of type list; pass a tensor"):
            batched_nms(boxes, scores, [0] * count, 0.5)  # type: ignore[arg-type]

    def test_numbers_of_other_types(self) -> None:
        boxes, scores = new_boxes(40)
        expected = nms(boxes, scores, 0.5)
        for threshold in (np.float32(0.5), torch.tensor(0.5)):
            assert torch.equal(nms(boxes, scores, threshold), expected)
