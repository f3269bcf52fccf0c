"""torchvision's operators on our kernels: models run, and everything is restored."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedoptim.ops import batched_nms, nms, replace_torchvision, roi_align
from tests import torchvision_operators


@pytest.fixture(scope="module")
def torchvision() -> Iterator[Any]:
    with torchvision_operators.loaded() as module:
        yield module


def new_boxes(count: int) -> Tensor:
    corners = torch.rand(count, 2) * 40
    return torch.cat([corners, corners + torch.rand(count, 2) * 30 + 1], 1)


def test_functions_are_ours(torchvision: Any) -> None:
    x, boxes, scores = torch.randn(1, 20, 20, 22), new_boxes(1500), torch.rand(1500)
    classes = torch.randint(0, 3, (1500,))
    with replace_torchvision():
        ours = torchvision.ops
        assert torch.equal(ours.roi_align(x, [boxes], 7, 0.25), roi_align(x, [boxes], 7, 0.25))
        assert torch.equal(ours.nms(boxes, scores, 0.5), nms(boxes, scores, 0.5))
        for of_boxes in (scores, (9 * scores).floor(), scores.masked_fill(scores < 0.1, math.nan)):
            kept = ours.batched_nms(boxes, of_boxes, classes, 0.5)
            assert torch.equal(kept, batched_nms(boxes, of_boxes, classes, 0.5))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradient_has_the_layout_of_the_maps(torchvision: Any, layout: torch.memory_format) -> None:
    x = torch.randn(1, 20, 20, 22).to(memory_format=layout).requires_grad_()
    boxes = new_boxes(9)
    with replace_torchvision():
        y = torchvision.ops.roi_align(x, [boxes], 7, 0.25)
    grad = torch.randn_like(y)
    ours, expected = (
        torch.autograd.grad(of, x, grad)[0] for of in (y, roi_align(x, [boxes], 7, 0.25))
    )
    assert ours.stride() == x.stride()
    assert torch.equal(ours, expected)


def test_backward_operator(torchvision: Any) -> None:
    x, rois = torch.randn(2, 3, 9, 9, requires_grad=True), torch.tensor([[1.0, 0, 0, 5, 6]])
    y = roi_align(x, rois, 2)
    (expected,) = torch.autograd.grad(y.sum(), x)
    with replace_torchvision():
        ours = torch.ops.torchvision._roi_align_backward(
            torch.ones_like(y), rois, 1.0, 2, 2, *x.shape, -1, False
        )
    assert torch.equal(ours, expected)


def is_ours() -> bool:
    x = torch.randn(1, 2, 9, 9, requires_grad=True)
    try:
        y = torch.ops.torchvision.roi_align(x, torch.zeros(1, 5), 1.0, 2, 2, 1, False)
    except (NotImplementedError, RuntimeError):  # where torchvision has no kernels
        return False
    return "GeneratedBackward" not in type(y.grad_fn).__name__


def test_restored(torchvision: Any) -> None:
    assert not is_ours()
    replaced = replace_torchvision()
    assert replace_torchvision() is replaced
    assert replaced.is_active
    assert is_ours()
    replaced.restore()
    replaced.restore()
    assert not replaced.is_active
    assert not is_ours()
    with pytest.raises(RuntimeError, match=r"was restored.*call replace_torchvision\(\) again"):
        replaced.__enter__()
    with pytest.raises(ZeroDivisionError), replace_torchvision():
        raise ZeroDivisionError
    assert not is_ours()


def test_nested_contexts(torchvision: Any) -> None:
    """The end of an inner context restores nothing that an outer one, or a call, has replaced."""
    with replace_torchvision() as replaced:
        with replace_torchvision(), replaced:
            assert is_ours()
        assert replaced.is_active
        assert is_ours()
    assert not is_ours()
    replaced = replace_torchvision()
    with replace_torchvision():
        assert is_ours()
    assert is_ours()
    with replaced:
        assert is_ours()
    assert not is_ours()


def test_restore_within_a_context(torchvision: Any) -> None:
    with replace_torchvision(), replace_torchvision() as replaced:
        replaced.restore()
        assert not is_ours()
        other = replace_torchvision()
    assert other.is_active
    other.restore()
    assert not is_ours()


def test_contexts_in_threads(torchvision: Any) -> None:
    """A thread that leaves its context does not end that of another."""
    entered, left = threading.Event(), threading.Event()
    found = []

    def first() -> None:
        with replace_torchvision():
            entered.set()
            left.wait(60)
            found.append(is_ours())

    thread = threading.Thread(target=first)
    thread.start()
    entered.wait(60)
    with replace_torchvision():
        found.append(is_ours())
    left.set()
    thread.join()
    assert found == [True, True]
    assert not is_ours()


def test_detector(torchvision: Any) -> None:
    """A model trains a step and infers, with our ROIAlign and NMS."""
    detection = torchvision.models.detection
    model = detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=4, min_size=96, max_size=128
    )
    images = [torch.rand(3, 96, 120)]
    targets = [{"boxes": torch.tensor([[5.0, 5, 60, 50]]), "labels": torch.tensor([2])}]
    with replace_torchvision():
        losses = model.train()(images, targets)
        sum(losses.values()).backward()
        assert all(
            param.grad is None or param.grad.isfinite().all() for param in model.parameters()
        )
        with torch.no_grad():
            (found,) = model.eval()(images)
    assert set(found) == {"boxes", "labels", "scores"}


def test_without_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr("importlib.import_module", broken)
    with pytest.raises(ImportError, match="install the build for your torch: pip install"):
        replace_torchvision()
