"""Graphs captured under autocast compute the same in C++, where it is off."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.transforms.graph.helpers import (
    LAST,
    Compiled,
    Encoder,
    Residual,
    assert_as_eager,
    images,
)
from tests.transforms.helpers import needs_bfloat16_products, randomise
from transforms.graph import autocast

pytestmark = [needs_bfloat16_products, pytest.mark.usefixtures("gradients_off")]


class Around(nn.Module):
    """Convolutions in autocast's dtype, and a function of an image and a convolution of it."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 24, 1)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.function(x, self.first(x)))
        return y


def compared(function: Callable[[Tensor, Tensor], Tensor], factors: Sequence[float]) -> Compiled:
    """A compiled model that agreed with eager under autocast, for images times each factor."""
    model = Around(function).to(memory_format=LAST)
    ours = Compiled(model)
    with torch.autocast("cpu", torch.bfloat16):
        for factor in factors:
            x = factor * images(2, 16, 8, 8)
            assert_as_eager(ours, model, x, arithmetic=torch.bfloat16)
            assert torch.is_autocast_enabled("cpu")
    return ours


CONVERTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the image": lambda x, y: x.relu(),
    "matmul": lambda x, y: x @ y,
    "matmul, method": lambda x, y: x.matmul(y.float()),
    "bmm": lambda x, y: torch.bmm(x.flatten(0, 1), y.flatten(0, 1)).view_as(y),
    "mm": lambda x, y: torch.mm(x.flatten(0, 2), y[0, 0]).view_as(y),
    "addmm": lambda x, y: torch.addmm(x[0, 0, 0], y.flatten(0, 2), x[0, 0]).view_as(y),
    "baddbmm": lambda x, y: torch.baddbmm(
        x[0, 0], x.flatten(0, 1), y.flatten(0, 1), alpha=0.5
    ).view_as(y),
    "convolution by values": lambda x, y: F.conv2d(x, y[:, :16, :3, :3], padding=1)[:, :1] * y,
    "attention": lambda x, y: F.scaled_dot_product_attention(x, y, x + y),
    "cat": lambda x, y: torch.cat([x[:, :8], y[:, 8:]], 1),
    "stack": lambda x, y: torch.stack([y, x], 1).sum(1),
    "sum": lambda x, y: x + y,
    "norm": lambda x, y: F.layer_norm(y.float(), (8,)) + F.layer_norm(x, (8,)),
    "padded": lambda x, y: F.pad(x, (1, 0, 0, 0)) + F.pad(y, (1, 0, 0, 0), mode="circular"),
    "resized": lambda x, y: F.interpolate(x, (4, 4), mode="bilinear") * F.normalize(y)[..., :4, :4],
    "half of it by hand": lambda x, y: (x.bfloat16() + y).float() * x,
}


@pytest.mark.parametrize("name", CONVERTED)
def test_what_autocast_converts(name: str) -> None:
    assert compared(CONVERTED[name], [1] * 4).is_scripted()


def _without(x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return y.float() @ x


LEFT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "in float32": lambda x, y: F.avg_pool3d(y.contiguous(), 3, 1, 1),
    "loss": lambda x, y: y * F.mse_loss(y, y + 1),
    "float64": lambda x, y: torch.matmul(x.double(), x.double()).float(),
    "product of elements": lambda x, y: y * y.prod(),
    "einsum": lambda x, y: torch.einsum("nchw,nciw->nchi", x, x),
    "reflected": lambda x, y: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "area": lambda x, y: F.interpolate(x, (4, 4), mode="area"),
    "a context within the model": _without,
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_python(name: str) -> None:
    assert not compared(LEFT[name], [1] * 4).is_scripted()


def test_with_and_without_autocast_in_turn() -> None:
    model = randomise(Residual()).to(memory_format=LAST)
    ours = Compiled(model)
    for _ in range(4):
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            x = images(2, 3, 16, 16)
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                assert_as_eager(ours, model, x, arithmetic=dtype)
    scripted = [any(made._kept.scripts.values()) for made in ours.plans if made._kept is not None]
    assert scripted == [True, True, False]


def test_linears_alone() -> None:
    """They run in C++ for the first shape; torch captures one graph for all others."""
    model = randomise(Encoder())
    ours = Compiled(model)
    with torch.autocast("cpu", torch.bfloat16):
        for words in (31, 31, 31, 17, 17, 17, 40, 31):
            x = torch.randn(3, words, 96)
            assert_as_eager(ours, model, x, arithmetic=torch.bfloat16)
    first, others = ours.plans
    assert first._kept is not None
    assert any(first._kept.scripts.values())
    assert others._kept is not None
    assert not others._kept.scripts
    torch.compiler.reset()
    ours = Compiled(model)
    for _ in range(3):
        assert_as_eager(ours, model, torch.randn(3, 31, 96))
    assert not ours.is_scripted()  # float32 gains nothing


def test_weights_that_change() -> None:
    """They are converted again."""
    model = randomise(Residual()).to(memory_format=LAST)
    ours, x = Compiled(model), images(2, 3, 16, 16)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        for _ in range(3):
            for _ in range(8):
                assert_as_eager(ours, model, x, arithmetic=torch.bfloat16)
            assert ours.is_scripted()
            for parameter in model.parameters():
                parameter.mul_(1.25)


@torch.library.custom_op("fusedoptim_tests::asks", mutates_args=())
def asks(x: Tensor) -> Tensor:
    """Depends on autocast: it may not run without it."""
    return x * (2.0 if torch.is_autocast_enabled("cpu") else 3.0)


asks.register_fake(torch.empty_like)


def test_operators_of_others() -> None:
    """With zeros, any factor is right."""
    assert not compared(lambda x, y: asks(y), [0, 0, 0, 1]).is_scripted()


def test_autocast_has_rules_for_each() -> None:
    """Without a rule in torch a name would do nothing here."""
    assert autocast._changed() >= autocast._CONVERTED
