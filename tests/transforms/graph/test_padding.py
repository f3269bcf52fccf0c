"""Zeros that a function adds around an image go into the convolution that reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.transforms.graph.helpers import LAST, Compiled, agreeing, assert_as_eager, images
from tests.transforms.helpers import needs_bfloat16_products, randomise

pytestmark = pytest.mark.usefixtures("gradients_off")


class Padded(nn.Module):
    """A function that pads, a convolution and more."""

    def __init__(self, pad: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 16, *args, **kwargs), nn.BatchNorm2d(16)
        self.pad = pad

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.conv(self.pad(x))).relu()
        return y


FOLDED: dict[str, tuple[Callable[[Tensor], Tensor], Sequence[Any], dict[str, Any]]] = {
    "both": (lambda x: F.pad(x, (1, 1, 1, 1)), (3,), {}),
    "a module": (nn.ZeroPad2d((2, 2, 1, 1)), (3,), {}),
    "one dimension": (lambda x: F.pad(x, (2, 2)), (3,), {}),
    "with the convolution's own": (
        lambda x: F.pad(x, (1, 1, 2, 2), "constant", 0.0),
        (5, 2, 1),
        {},
    ),
    "deep": (lambda x: F.pad(x, [1] * 4), (3,), {"groups": 8}),
    "dilated": (lambda x: F.pad(x, [2] * 4), (3,), {"dilation": 2}),
    "twice": (lambda x: F.pad(F.pad(x, [1] * 4), [1] * 4), (5,), {}),
    "padding='same'": (lambda x: F.pad(x, [1] * 4), (3,), {"padding": "same"}),
    "padding='valid'": (lambda x: F.pad(x, [1] * 4), (3, 2), {"padding": "valid"}),
}
LEFT: dict[str, tuple[Callable[[Tensor], Tensor], Sequence[Any], dict[str, Any]]] = {
    "one end": (lambda x: F.pad(x, (0, 1, 0, 1)), (3, 2), {}),
    "another value": (lambda x: F.pad(x, [1] * 4, value=0.5), (3,), {}),
    "a mode": (lambda x: F.pad(x, [1] * 4, mode="replicate"), (3,), {}),
    "less": (lambda x: F.pad(x, [-1] * 4), (3,), {}),
    "channels": (lambda x: F.pad(x[:, 2:], (1, 1, 1, 1, 1, 1)), (3,), {}),
    "rows of padding alone": (lambda x: F.pad(x, [6] * 4), (2,), {"dilation": 7}),
}


@pytest.mark.parametrize("name", FOLDED)
def test_folded(name: str) -> None:
    pad, args, kwargs = FOLDED[name]
    ours = agreeing(randomise(Padded(pad, *args, **kwargs)), 2, 8, 9, 11)
    assert ours.counts.paddings == (2 if name == "twice" else 1)
    assert ours.counts.folded == ours.counts.packed == 1
    assert ours.is_scripted()


@pytest.mark.parametrize("name", LEFT)
def test_left(name: str) -> None:
    pad, args, kwargs = LEFT[name]
    assert agreeing(randomise(Padded(pad, *args, **kwargs)), 2, 8, 9, 11).counts.paddings == 0


@needs_bfloat16_products
@pytest.mark.parametrize("name", ["both", "padding='same'"])
def test_autocast(name: str) -> None:
    pad, args, kwargs = FOLDED[name]
    model = randomise(Padded(pad, *args, **kwargs)).to(memory_format=LAST)
    ours = Compiled(model)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(4):
            assert_as_eager(ours, model, images(2, 8, 9, 11), arithmetic=torch.bfloat16)
    assert ours.counts.paddings == 1


def test_a_value_with_other_users_is_still_padded() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = F.pad(x, [1] * 4)
            return self.conv(x), x * 2

    assert agreeing(randomise(Twice()), 2, 8, 9, 11).counts.paddings == 0


def test_an_input_that_is_written_before_it_is_read() -> None:
    class PreActivated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.conv = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3)
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            padded = F.pad(x, [1] * 4)
            x = self.relu(x)
            y: Tensor = self.conv(padded) + x
            return y

    assert agreeing(randomise(PreActivated()), 2, 8, 9, 11).counts.paddings == 0


def test_an_image_without_pixels() -> None:
    """torch's convolutions raise for one, unless a function has padded it."""
    model = nn.Sequential(nn.ZeroPad2d(1), nn.Conv2d(8, 8, 2))
    ours = Compiled(model)
    for _ in range(2):
        assert_as_eager(ours, model, torch.randn(1, 8, 0, 5))


def test_several_convolutions_of_one_value() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = F.pad(x, [1] * 4)
            return self.first(x), self.second(x)

    ours = agreeing(randomise(Branches()), 2, 8, 9, 11)
    assert ours.counts.paddings == 1
    assert ours.counts.packed == 2


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_a_weight_that_is_not_finite(number: float) -> None:
    """Times a zero it is NaN, which a convolution that pads itself would not compute."""
    model = Padded(lambda x: F.pad(x, [1] * 4), 3)
    model.norm = nn.Identity()
    model = model.to(memory_format=LAST)
    ours = Compiled(model)
    assert_as_eager(ours, model, images(2, 8, 9, 11))
    assert ours.counts.paddings == 1
    with torch.no_grad():
        model.conv.weight[3, 2, 0, 0] = number
    for _ in range(4):
        assert_as_eager(ours, model, images(2, 8, 9, 11))
    assert ours.counts.paddings == 0


def test_a_weight_that_autocast_makes_infinite() -> None:
    model = Padded(lambda x: F.pad(x, [1] * 4), 3)
    with torch.no_grad():
        model.conv.weight[3, 2, 0, 0] = 1e5  # the largest number of float16 is 65504
    model = model.eval().to(memory_format=LAST)
    ours = Compiled(model)
    with torch.autocast("cpu", torch.float16):
        for _ in range(4):
            x = images(2, 8, 9, 11)
            assert torch.equal(ours(x).isnan(), model(x).isnan())
            assert model(x).isnan().any()
    assert ours.counts.paddings == 0
