"""Functions that graph mode knows: what they return, and that graphs with them run in C++."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.transforms.graph.helpers import LAST, Compiled, agreeing, assert_as_eager, images
from transforms.graph import operators

pytestmark = pytest.mark.usefixtures("gradients_off")


class Between(nn.Module):
    """A function of a convolution's result, before another convolution of 16 channels."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 24, 1)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.function(self.first(x)))
        return y


def _masked(y: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, y, -y)


FRESH: dict[str, Callable[[Tensor], Tensor]] = {
    "bitwise_and": lambda y: _masked(y, (y > 0) & (y < 1)),
    "bitwise_or": lambda y: _masked(y, (y > 1) | (y < 0)),
    "bitwise_xor": lambda y: _masked(y, (y > 1) ^ (y < 2)),
    "bitwise_not": lambda y: _masked(y, ~(y > 1)),
    "diff": lambda y: torch.diff(y, dim=3),
    "full_like": lambda y: y + torch.full_like(y, 2),
    "fold": lambda y: F.fold(F.unfold(y, 2), y.shape[2:], 2),
    "interpolate": lambda y: F.interpolate(y, scale_factor=2.0),
    "interpolate, bilinear": lambda y: F.interpolate(y, (9, 11), mode="bilinear"),
    "interpolate, same size": lambda y: F.interpolate(y, tuple(y.shape[2:]), mode="bicubic"),
    "linalg_vector_norm": lambda y: y * torch.linalg.vector_norm(y, dim=1, keepdim=True),
    "max": lambda y: y - y.max(),
    "max along an axis": lambda y: y - y.max(1, keepdim=True)[0],
    "max of two": lambda y: torch.max(y, -y),
    "min": lambda y: y - torch.min(y),
    "normalize": F.normalize,
    "ones_like": lambda y: y + torch.ones_like(y),
    "pad": lambda y: F.pad(y, (1, 2, 0, 1)),
    "pad by nothing": lambda y: F.pad(y, (0, 0)) * 2,
    "pad, reflected": lambda y: F.pad(y, (1, 2, 0, 1), mode="reflect"),
    "pad, circular": lambda y: F.pad(y, (1, 2, 0, 1), "circular"),
    "zeros_like": lambda y: torch.max(y, torch.zeros_like(y)),
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "bool": lambda y: y * y.bool(),
    "movedim": lambda y: (y.movedim(1, -1) * 2).movedim(-1, 1),
    "double": lambda y: (y.double() * 2).float(),
    "einsum": lambda y: torch.einsum("nchw->ncwh", y),
    "einsum, a product": lambda y: (
        torch.einsum("nchw,ndhw->ncdh", y, y)[:, :, :5]
        .transpose(1, 2)
        .reshape(2, 5, 16, -1)
        .transpose(1, 2)
    ),
    "int": lambda y: y + y.int().int(),
    "long": lambda y: y + y.long().long(),
    "reshape_as": lambda y: (y.flatten(2) * 2).reshape_as(y),
    "unbind": lambda y: torch.stack(y.unbind(2)[::-1], 2),
    "unfold": lambda y: y.unfold(3, 2, 2).flatten(3),
}


@pytest.mark.parametrize("name", {**FRESH, **VIEWS})
def test_function(name: str) -> None:
    """It computes the same, and runs in C++: it is known, and neither writes nor draws numbers."""
    ours = agreeing(Between({**FRESH, **VIEWS}[name]), 2, 16, 7, 8)
    assert ours.is_scripted()


def test_counted_uses() -> None:
    """torchvision's StochasticDepth counts its uses, unless it is traced."""

    def count(y: Tensor) -> Tensor:
        torch._C._log_api_usage_once("tests.count")
        return y * 2

    assert agreeing(Between(count), 2, 16, 7, 8).is_scripted()


def _same(x: Tensor) -> list[Tensor]:
    """Results of functions that might return their input, given arguments that change nothing."""
    modes = ("constant", "reflect", "replicate", "circular")
    size = tuple(x.shape[2:])
    return [
        *(F.pad(x, (0, 0, 0, 0), mode=mode) for mode in modes),
        *(F.interpolate(x, size, mode=mode) for mode in ("nearest", "bilinear", "bicubic", "area")),
        F.normalize(x),
        torch.diff(x, n=0),
        *(each(x) for each in (torch.abs, torch.ceil, torch.floor, torch.round, torch.trunc)),
        *torch.max(x[:, :1], 1),
        torch.max(x[:1, :1, :1, :1]),
        torch.max(x, x),
        torch.linalg.vector_norm(x[:1, :1], dim=1),
        F.fold(F.unfold(x, 1), size, 1),
    ]


def test_fresh_results_share_no_memory() -> None:
    x = torch.rand(2, 3, 4, 5)
    of_input = x.untyped_storage().data_ptr()
    assert all(each.untyped_storage().data_ptr() != of_input for each in _same(x))
    whole = x.int()
    rounded = [f(whole) for f in (torch.ceil, torch.floor, torch.round, torch.sign, torch.trunc)]
    assert all(each.data_ptr() != whole.data_ptr() for each in rounded)


@pytest.mark.parametrize("inplace", [True, 1, 2.5])
def test_what_stands_for_true_writes_in_place(inplace: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(16, 16, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.conv(x)
            F.silu(y, inplace=inplace)
            F.relu(x, inplace)
            return y, self.conv(x)

    model = Model().to(memory_format=LAST)
    ours = Compiled(model)
    for _ in range(3):
        x = images(2, 16, 7, 8)
        copy = x.clone()
        for actual, expected in zip(ours(x), model(copy)):
            torch.testing.assert_close(actual, expected)
        assert torch.equal(x, copy)


def test_weights_that_forward_standardizes_are_constants() -> None:
    """As in BiT, whose convolutions normalize their weights by a BatchNorm without statistics."""

    class Standardized(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            flat = self.weight.reshape(1, self.out_channels, -1)
            weight = F.batch_norm(flat, None, None, training=True, momentum=0.0)
            return F.conv2d(x, weight.reshape_as(self.weight), self.bias, self.stride, self.padding)

    model = nn.Sequential(Standardized(16, 16, 3, padding=1), nn.ReLU(), Standardized(16, 24, 1))
    ours = agreeing(model, 2, 16, 7, 8)
    assert ours.counts.packed == 2
    assert ours.is_scripted()
    with torch.no_grad():
        model[0].weight.mul_(torch.rand(16, 16, 3, 3))
    assert_as_eager(ours, model, images(2, 16, 7, 8))


def test_options_of_builtin_functions_by_position() -> None:
    """After a product, and of a value that they may write over."""
    leaky_relu, hardtanh = torch._C._nn.leaky_relu, torch._C._nn.hardtanh

    class Clipped(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return leaky_relu(y, 0.5), leaky_relu(x - 1, 0.5), hardtanh(x * 2, -0.5, 1.5)

    model = Clipped(512, 512)
    ours = Compiled(model)
    for _ in range(3):
        assert_as_eager(ours, model, torch.randn(64, 512))


@pytest.mark.parametrize("statistics", [False, True])
def test_batch_norm_in_training_writes_its_statistics(statistics: bool) -> None:
    model = nn.Sequential(nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16, track_running_stats=statistics))
    ours = Compiled(model.train())
    with torch.no_grad():
        ours(images(2, 16, 7, 8))
    (graph,) = (made._captured.graph for made in ours.plans)
    (norm,) = (node for node in graph.nodes if operators.name(node) == "batch_norm")
    assert operators.is_writing(norm) == statistics
