"""Convolutions in channels_last: by level, by setting and by call, and undone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusedoptim import transforms
from tests.transforms.helpers import assert_right, randomise
from tests.transforms.models import Net, images
from transforms.passes import channels_last


class Views(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x.view(x.shape[0], -1)


class FlatWeights(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * nn.utils.parameters_to_vector(self.parameters()).norm()


@pytest.mark.parametrize(("cls", "name"), [(Views, "view"), (FlatWeights, "parameters_to_vector")])
def test_code_that_depends_on_strides_is_left(cls: type[nn.Module], name: str) -> None:
    model, x = cls(nn.Conv2d(3, 8, 3)).eval(), images()
    optimized = transforms.optimize(model)
    (left,) = transforms.report(optimized).left("auto_channels_last")
    assert f"{cls.__name__}.forward uses {name}" in left.what
    assert torch.equal(optimized(x), model(x))


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_undone_beside_a_scripted_module() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), torch.jit.script(nn.ReLU())).eval()
    optimized = transforms.optimize(model)
    assert not optimized[0].weight.is_contiguous()
    assert transforms.restore(optimized)[0].weight.is_contiguous()


def test_by_call_and_by_setting() -> None:
    def is_last(**arguments: Any) -> bool:
        optimized = transforms.optimize(randomise(Net()), **arguments)
        return optimized.conv.weight.is_contiguous(memory_format=torch.channels_last)

    assert is_last()
    assert not is_last(level="O0")
    transforms.disable_auto_channels_last()
    assert not is_last()
    assert is_last(auto_channels_last=True)
    transforms.enable_auto_channels_last()
    assert is_last(level="O0")
    assert not is_last(auto_channels_last=False)
    model = randomise(nn.Sequential(nn.Linear(3, 3)))
    transforms.optimize(model)  # nothing to do, and this call did not ask for it


@pytest.mark.parametrize("channels", [1, 3])
def test_in_three_dimensions_and_transposed(channels: int) -> None:
    model = nn.Sequential(nn.Conv3d(channels, 4, 3), nn.ConvTranspose3d(4, 2, 3)).eval()
    optimized = transforms.optimize(model)
    for module in optimized:
        assert module.weight.is_contiguous(memory_format=torch.channels_last_3d)
    assert_right(optimized, model, torch.randn(2, channels, 6, 6, 6))


def test_shared_weight() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)).eval()
    model[1].weight = model[0].weight
    strides = model[0].weight.stride()
    optimized = transforms.optimize(model)
    assert optimized[1].weight.is_contiguous(memory_format=torch.channels_last)
    assert transforms.restore(optimized)[1].weight.stride() == strides


@pytest.mark.parametrize(
    ("times", "is_last"),
    [
        ((0.004, 0.003), True),
        ((0.003, 0.004), False),
        ((0.0040, 0.0038, 0.0037, 0.0039), False),
        ((0.0038, 0.0040, 0.0039, 0.0037), True),
    ],
)
def test_layouts_are_timed_until_one_is_clearly_faster(
    times: tuple[float, ...], is_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In turn the given layout and channels_last; the fastest of each counts."""
    remaining = list(times)
    monkeypatch.setattr(channels_last, "seconds", lambda call: remaining.pop(0))
    optimized = transforms.optimize(randomise(Net()), sample_input=images())
    assert not remaining
    assert optimized.conv.weight.is_contiguous(memory_format=torch.channels_last) == is_last
