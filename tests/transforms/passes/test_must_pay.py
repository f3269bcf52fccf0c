"""Passes are timed with the sample; those that must pay are undone together if it is not faster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fusedoptim import transforms
from tests.transforms.models import images
from tests.transforms.passes.test_pack_weights import linear
from transforms import front_end
from transforms.rewrites.fused_activation import FusedActivation
from transforms.rewrites.packed import PackedModule


def times(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    """Let the model take these times: plain, before and with passes, and at the end."""
    remaining: Iterator[float] = iter(seconds)
    monkeypatch.setattr(front_end, "seconds", lambda call: next(remaining))


def is_rewritten(model: nn.Module) -> list[bool]:
    kinds = (PackedModule, FusedActivation)
    return [any(isinstance(m, kind) for m in model.modules()) for kind in kinds]


@pytest.mark.parametrize(
    ("asked", "after", "expected"),
    [
        ({}, 0.001, [True, True]),
        ({}, 0.003, [False, False]),
        ({"weights_prepack": True, "fuse": True}, 0.003, [True, True]),
        ({"weights_prepack": True}, 0.003, [True, True]),
        ({"weights_prepack": False}, 0.003, [False, False]),
    ],
)
def test_what_stays(
    asked: dict[str, bool], after: float, expected: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    times(monkeypatch, 0.004, 0.002, after, 0.0015)
    model, x = nn.Sequential(linear()[0], nn.GELU()).eval(), linear()[1]
    ours = transforms.optimize(model, sample_input=x, **asked)
    assert is_rewritten(ours) == expected
    report = transforms.report(ours)
    assert "on the sample: 4 ms plain, 2 ms before " in str(report)
    assert report.seconds["plain"] == 0.004
    if not asked and after > 0.002:
        assert report.left("fuse")[0].what == (
            "undone: not faster on the sample: 3 ms instead of 2 ms"
        )
    with torch.no_grad():
        torch.testing.assert_close(ours(x), model(x))
    assert list(map(type, transforms.restore(ours))) == list(map(type, model))


@pytest.mark.parametrize(("again", "pays"), [(0.005, True), (0.007, False)])
def test_other_load_that_begins_meanwhile(
    again: float, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time without the passes has risen too, so they are run and timed once more."""
    times(monkeypatch, 0.004, 0.002, 0.005, 0.006, again, 0.006)
    model, x = nn.Sequential(linear()[0], nn.GELU()).eval(), linear()[1]
    ours = transforms.optimize(model, sample_input=x)
    assert is_rewritten(ours) == [pays, pays]
    report = transforms.report(ours)
    assert report.seconds["before weights_prepack and fuse"] == 0.006
    assert report.seconds["with weights_prepack and fuse"] == again
    assert report.seconds["optimized"] == (again if pays else 0.006)
    assert list(map(type, transforms.restore(ours))) == list(map(type, model))


def test_each_pass_that_changes_something_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows the last of them is not timed again."""
    times(monkeypatch, 0.009, 0.008, 0.007, 0.006, 0.005, 0.004)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(), nn.GELU()
    ours = transforms.optimize(
        nn.Sequential(*layers).eval(), sample_input=images(), auto_channels_last=True,
        graph_mode=True,
    )  # fmt: skip
    assert transforms.report(ours).seconds == {
        "plain": 0.009,
        "with conv_bn_folding": 0.008,
        "with replace_dropout_with_identity": 0.007,
        "with auto_channels_last": 0.006,
        "before weights_prepack and fuse": 0.006,
        "with weights_prepack and fuse": 0.005,
        "with graph_mode": 0.004,
        "optimized": 0.004,
    }
