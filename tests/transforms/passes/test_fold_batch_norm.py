"""Folded BatchNorms compute the same, and a sample input reveals if they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusedoptim import transforms
from tests.transforms.helpers import CONV, LINEAR, assert_right, fingerprint, fold, randomise
from tests.transforms.models import FOLDED, Block, images
from transforms.rewrites import fold as rewrite
from transforms.rewrites.exchanged_class import own_class


@pytest.mark.parametrize("name", FOLDED)
def test_sequence_is_folded(name: str) -> None:
    make, shape = FOLDED[name]
    model = randomise(nn.Sequential(*make()))
    optimized, report = fold(model)
    assert isinstance(optimized[1], nn.Identity)
    assert own_class(optimized[0]) is type(model[0])
    assert [entry.where for entry in report.done(CONV) + report.done(LINEAR)] == ["1"]
    assert sum(p.numel() for p in optimized[1].parameters()) == 0
    assert_right(optimized, model, torch.randn(shape))


def test_model_in_channels_last() -> None:
    """The weight of a 1 x 1 kernel is contiguous, though its last strides are not 1."""
    model = randomise(nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)))
    model.to(memory_format=torch.channels_last)
    assert model[0].weight.is_contiguous()
    assert model[0].weight.stride(-1) != 1
    optimized, report = fold(model)
    assert [entry.where for entry in report.done(CONV)] == ["1"]
    assert_right(optimized, model, images())
    before = fingerprint(model)
    transforms.restore(fold(model, inplace=True)[0])
    assert fingerprint(model) == before


def test_folded_weight_is_rounded_once() -> None:
    model = randomise(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
    conv, norm = model[0], model[1]
    scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    weight = conv.weight.double() * scale.reshape(-1, 1, 1, 1)
    bias = norm.bias.double() + scale * (conv.bias.double() - norm.running_mean.double())
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        optimized = transforms.optimize(model, dtype=dtype)
        assert torch.equal(optimized[0].weight, weight.to(dtype))
        assert torch.equal(optimized[0].bias, bias.to(dtype))


def test_linear_and_a_norm_over_another_dimension() -> None:
    """BatchNorm1d takes channels from the middle of three dimensions, so a folded model raises."""
    model = randomise(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    x = torch.randn(7, 8, 8)
    with pytest.raises(RuntimeError, match="linear_bn_folding=False"):
        fold(model)[0](x)
    assert torch.equal(fold(model, linear_bn_folding=False)[0](x), model(x))


@pytest.mark.parametrize("name", [n for n, (_, shape) in FOLDED.items() if len(shape) != 3])
def test_input_without_a_batch(name: str) -> None:
    """The module before the norm takes it, and the plain norm refuses it."""
    make, (_, *shape) = FOLDED[name]
    model = randomise(nn.Sequential(*make()))
    optimized, x = fold(model)[0], torch.randn(shape)
    for each in (model, optimized):
        with pytest.raises(ValueError, match=f"got {x.dim()}D input"):
            each(x)


OTHER_DIMENSION: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...]]] = {
    "linear, 1d": (lambda: [nn.Linear(8, 8), nn.BatchNorm1d(5)], (7, 5, 8)),
    "linear, 2d": (lambda: [nn.Linear(8, 8), nn.BatchNorm2d(8)], (7, 8, 8, 8)),
    "linear, 3d": (lambda: [nn.Linear(8, 8), nn.BatchNorm3d(8)], (2, 8, 3, 4, 8)),
    "conv1d, no batch": (lambda: [nn.Conv1d(8, 8, 1), nn.BatchNorm1d(6)], (8, 6)),
    "conv2d, no batch": (lambda: [nn.Conv2d(8, 8, 1), nn.BatchNorm1d(8)], (8, 8, 8)),
    "conv3d, no batch": (lambda: [nn.Conv3d(8, 8, 1), nn.BatchNorm2d(8)], (8, 8, 8, 8)),
    "transposed 3d": (lambda: [nn.ConvTranspose3d(8, 8, 1), nn.BatchNorm2d(6)], (8, 6, 8, 8)),
}


@pytest.mark.parametrize("name", OTHER_DIMENSION)
def test_norm_over_another_dimension_is_left(name: str) -> None:
    make, shape = OTHER_DIMENSION[name]
    model = randomise(nn.Sequential(*make()))
    optimized, report = fold(model)
    assert report.done(CONV) + report.done(LINEAR) == []
    assert len(report.left(CONV) + report.left(LINEAR)) == 1
    x = torch.randn(shape)
    assert torch.equal(optimized(x), model(x))


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_pass_that_changes_the_output_for_the_sample_is_undone(
    monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    """A pass is undone whatever the cause: here the fold's own arithmetic is wrong."""
    exact = rewrite.folded

    def wrong(*args: Any) -> tuple[Tensor, Tensor]:
        weight, bias = exact(*args)
        return weight * 1.01, bias

    monkeypatch.setattr(rewrite, "folded", wrong)
    model = randomise(nn.Sequential(Block(), nn.Dropout(), nn.Flatten(), nn.Linear(243, 2)))
    nn.init.ones_(model[0].norm.bias)  # else relu may return next to nothing
    before = fingerprint(model)
    knobs = {CONV: True, "replace_dropout_with_identity": True, "sample_input": images()}
    with pytest.warns(transforms.NoEffectWarning, match=f"{CONV} changed nothing.*undone"):
        _, report = fold(model, inplace=True, level=level, **knobs)
    assert [(e.where, e.done) for e in report.passes[CONV]] == [("0.norm", False)]
    assert "undone: the output for sample_input changed by" in report.left(CONV)[0].what
    assert len(report.done("replace_dropout_with_identity")) == 1
    transforms.restore(model)
    assert fingerprint(model) == before


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_rounding_is_no_change_of_the_output(dtype: torch.dtype | None) -> None:
    model = randomise(nn.Sequential(*[Block() for _ in range(8)]))
    low = randomise(nn.Sequential(*[Block() for _ in range(8)])).to(dtype)
    for last in (model[-1], low[-1]):
        nn.init.ones_(last.norm.bias)  # else relu may return next to nothing
    for each, x, options in (model, images(), {"dtype": dtype}), (low, images().to(dtype), {}):
        _, report = fold(each, sample_input=x, **options)
        assert len(report.done(CONV)) == 8


def test_model_whose_output_is_random_is_not_compared() -> None:
    class Noisy(Block):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.randn(x.shape, generator=self.generator)

    _, report = fold(randomise(Noisy()), inplace=True, sample_input=images())
    assert len(report.done(CONV)) == 1
