"""Weights and biases that are no Parameters: buffers, plain attributes, pruned, parametrized."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from fusedoptim import transforms
from tests.transforms.helpers import assert_right


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def as_buffer(module: nn.Module, name: str) -> None:
    value = getattr(module, name).detach() / 2
    delattr(module, name)
    module.register_buffer(name, value)


def as_attribute(module: nn.Module, name: str) -> None:
    value = getattr(module, name).detach() / 2
    delattr(module, name)
    setattr(module, name, value)


@torch.no_grad()  # torch copies no module whose weight has a graph
def pruned(module: Any, name: str) -> None:
    prune.l1_unstructured(module, name, 0.5)  # type: ignore[no-untyped-call]  # torch's


def parametrized(module: nn.Module, name: str) -> None:
    parametrize.register_parametrization(module, name, Half())


CHANGES = (as_buffer, as_attribute, pruned, parametrized)
Change = Callable[[Any, str], None]

PACKED: dict[str, tuple[nn.Module, Tensor]] = {
    "linear": (nn.Linear(257, 515), torch.randn(65, 257)),
    "conv1d": (nn.Conv1d(64, 65, 15), torch.randn(2, 64, 99)),
    "conv2d": (nn.Conv2d(8, 65, 3), torch.randn(2, 8, 33, 31)),
    "conv3d": (nn.Conv3d(8, 33, 3), torch.randn(2, 8, 9, 9, 9)),
    "transposed": (nn.ConvTranspose2d(8, 65, 3), torch.randn(2, 8, 33, 31)),
}


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("case", PACKED)
class TestPacked:
    def test_changed_before(self, case: str, change: Change, name: str) -> None:
        module, x = PACKED[case]
        plain = nn.Sequential(copy.deepcopy(module)).eval()
        change(plain[0], name)
        ours = transforms.optimize(plain, auto_channels_last=False)
        assert not transforms.report(ours).done("weights_prepack")
        with torch.no_grad():
            assert torch.equal(ours(x), plain(x))

    def test_changed_after(self, case: str, change: Change, name: str) -> None:
        module, x = PACKED[case]
        plain = nn.Sequential(copy.deepcopy(module)).eval()
        ours = transforms.optimize(plain, auto_channels_last=False)
        with torch.no_grad():
            ours(x)  # packs
            for model in (plain, ours):
                change(model[0], name)
            assert torch.equal(ours(x), plain(x))


NORMED: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "conv_bn_folding": (
        lambda: nn.Sequential(nn.Conv2d(3, 9, 3), nn.BatchNorm2d(9)),
        torch.randn(2, 3, 9, 9),
    ),
    "linear_bn_folding": (
        lambda: nn.Sequential(nn.Linear(33, 65), nn.BatchNorm1d(65)),
        torch.randn(17, 33),
    ),
}
"""Each pass that folds BatchNorms, a model, and its input."""


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("place", ["product", "norm"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("knob", NORMED)
def test_batch_norms(knob: str, change: Change, place: str, name: str) -> None:
    """Only buffers of the BatchNorm itself are folded."""
    make, x = NORMED[knob]
    plain: Any = make()
    plain(x)  # statistics other than the initial ones
    for p in plain[1].parameters():
        nn.init.normal_(p)
    change(plain[place == "norm"], name)
    ours = transforms.optimize(plain.eval(), weights_prepack=False, auto_channels_last=False)
    report = transforms.report(ours)
    if change is as_buffer and place == "norm":
        assert report.done(knob)
        assert_right(ours, plain, x)
    else:
        assert not report.done(knob)
        with torch.no_grad():
            assert torch.equal(ours(x), plain(x))
    assert transforms.restore(ours).state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("change", CHANGES)
def test_lstms(change: Change) -> None:
    plain, x = nn.LSTM(8, 16).eval(), torch.randn(5, 2, 8)
    change(plain, "weight_ih_l0")
    ours = transforms.optimize(plain)
    assert not transforms.report(ours).done("weights_prepack")
    with torch.no_grad():
        assert torch.equal(ours(x)[0], plain(x)[0])


def test_convolutions_without_a_weight() -> None:
    conv = nn.Conv2d(3, 9, 3).eval()
    conv.register_parameter("weight", None)
    with pytest.warns(transforms.NoEffectWarning, match="has no weight"):
        transforms.optimize(conv, auto_channels_last=True)
