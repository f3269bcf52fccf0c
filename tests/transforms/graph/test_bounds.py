"""Clamps such as ReLU are left to oneDNN only while no value can be NaN, and the bounds hold."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx import GraphModule
from torch.nn import functional as F

from tests.transforms.graph.helpers import (
    LAST,
    Compiled,
    Residual,
    assert_as_eager,
    each_packed_dtype,
    images,
)
from tests.transforms.graph.test_numerics import PRODUCTS, Activated
from tests.transforms.helpers import assert_right, exactly, randomise
from transforms.graph import bounds
from transforms.graph.constants import Evaluator
from transforms.graph.plan import Plan

pytestmark = pytest.mark.usefixtures("gradients_off")

CLAMPS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": lambda x: F.hardtanh(x, -0.3, 0.2),
}
DTYPES = (torch.float32, torch.bfloat16)


class Chain(nn.Module):
    """Convolutions, each with a clamp, two of them around an addition."""

    def __init__(self, clamp: Callable[[Tensor], Tensor], depth: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(2 * depth))
        self.clamp = clamp

    def forward(self, x: Tensor) -> Tensor:
        x = self.clamp(self.first(x))
        for i in range(0, len(self.blocks), 2):
            x = self.clamp(self.blocks[i + 1](self.clamp(self.blocks[i](x))) + x)
        return x


def chain(clamp: str = "relu", depth: int = 1, dtype: torch.dtype = torch.float32) -> nn.Module:
    return Chain(CLAMPS[clamp], depth).eval().to(dtype, memory_format=LAST)


def compared(ours: Compiled) -> tuple[str, ...] | None:
    """The values that the last call compared."""
    laid_out = ours.plans[-1]._laid_out
    return None if laid_out is None else laid_out.compared


@each_packed_dtype
@pytest.mark.parametrize("clamp", CLAMPS)
def test_what_is_left_to_onednn(clamp: str, dtype: torch.dtype) -> None:
    model = chain(clamp, dtype=dtype)
    ours, x = Compiled(model), images(2, 3, 9, 11)
    right = exactly(model, x, dtype=dtype)
    for _ in range(3):
        assert_right(ours, right, x, dtype=dtype)
    assert compared(ours) == ("l_x_",)
    assert ours.counts.additions == 1
    # The sum's ReLU is applied too; oneDNN's operator has no other clamp there.
    assert ours.counts.activations == (3 if clamp == "relu" else 2)
    assert ours.is_scripted()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clamp", CLAMPS)
def test_nan_and_infinity_come_through(clamp: str, dtype: torch.dtype) -> None:
    model, x = chain(clamp, dtype=dtype), images(2, 3, 9, 11).to(dtype)
    for number in (float("nan"), float("inf"), -float("inf")):
        ours, special = Compiled(model), x.clone()
        special[1, 2, 3, 4] = number
        for given in (x, x, special, x, x):
            assert_as_eager(ours, model, given)
        assert compared(ours) is None  # torch computes clamps from then on
        assert_as_eager(ours, model, special)


@pytest.mark.parametrize("factor", [1e8, 1e30])
def test_values_that_are_larger_than_assumed(factor: float) -> None:
    model = chain()
    ours, x = Compiled(model), images(2, 3, 9, 11)
    for _ in range(2):
        assert_as_eager(ours, model, x)
    assert compared(ours) is not None
    for each in (factor * x, x, x, x, x):  # C++ only after some calls
        assert_as_eager(ours, model, each)
    assert compared(ours) is None
    assert ours.is_scripted()


class Later(nn.Module):
    """A function of the input, a clamped convolution, and a buffer."""

    total: Tensor

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.function = nn.Conv2d(3, 16, 3, padding=1), function
        self.register_buffer("total", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, F.relu(self.conv(x)), self.total)


def written_and_returned(x: Tensor, y: Tensor, total: Tensor) -> Tensor:
    y[0] = 0
    return y


ONCE: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "input": lambda x, y, total: y + x.sub_(x.mean()).mean(),
    "input by keyword": lambda x, y, total: y + F.elu(input=x, inplace=True).mean(),
    "buffer": lambda x, y, total: total.add_(y.mean((0, 2, 3))).clone(),
    "dropout": lambda x, y, total: F.dropout(y, 0.5),
    "dropout2d": lambda x, y, total: F.dropout2d(y, 0.5),
    "dropout2d in place": lambda x, y, total: F.dropout2d(y + 0.5, 0.5, True, True),
    "random": lambda x, y, total: y + torch.rand(11),
    "method": lambda x, y, total: y.sigmoid().bernoulli(),
    "attention": lambda x, y, total: F.scaled_dot_product_attention(y, y, y, None, 0.5),
}


def seeded(model: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
    def call(x: Tensor) -> Any:
        torch.manual_seed(0)
        return model(x), torch.rand(())

    return call


@pytest.mark.parametrize("name", ONCE)
def test_nothing_happens_twice(name: str) -> None:
    """A larger value than assumed lets a graph run again, but not one with effects."""
    model = Later(ONCE[name]).eval()
    ours, plain = Compiled(copy.deepcopy(model)), seeded(model)
    for factor in (1.0, 1.0, 1e8, 1.0):
        assert_as_eager(seeded(ours), plain, factor * images(2, 3, 9, 11))


def test_a_result_may_be_written_to() -> None:
    ours = Compiled(Later(written_and_returned).eval())
    for _ in range(2):
        ours(images(2, 3, 9, 11))
    assert compared(ours) == ("l_x_",)


def test_limits_that_are_arguments_and_sizes() -> None:
    class Limited(nn.Conv2d):
        def forward(self, x: Tensor, least: int) -> Tensor:
            return F.relu(F.hardtanh(super().forward(x), least, x.shape[-1] / 16))

    model = Limited(3, 16, 3).eval().to(memory_format=LAST)
    ours = Compiled(model, dynamic=True)
    for i in (1, 2, 2, 2, 3):
        assert_as_eager(ours, model, images(2, 3, 9, 8 + i), -i)


@each_packed_dtype
def test_weights_that_become_large(dtype: torch.dtype) -> None:
    model = chain(dtype=dtype)
    ours, x = Compiled(model), images(2, 3, 9, 11).to(dtype)
    plain = copy.deepcopy(model)
    for factor in (1.0, 1e15, 1e-15, float("inf"), 0.0):
        for each in (model, plain):
            each.blocks[0].weight.mul_(factor)  # type: ignore[index,union-attr,operator]
            each.blocks[1].weight.mul_(factor)  # type: ignore[index,union-attr,operator]
        for _ in range(4):
            assert_as_eager(ours, plain, x)
        assert (compared(ours) is None) == (factor in (1e15, float("inf"), 0.0))


@each_packed_dtype
def test_bounds_begin_anew_within(dtype: torch.dtype) -> None:
    model = chain(depth=20, dtype=dtype)
    ours, x = Compiled(model), images(2, 3, 9, 11).to(dtype)
    for _ in range(3):
        assert_as_eager(ours, model, x)
    assert 1 < len(compared(ours) or ()) < 8
    assert ours.counts.additions == 20
    # Each value is small enough for the next, but those in the middle are infinite.
    for block in model.blocks:  # type: ignore[union-attr]
        block.weight.mul_(40.0)  # type: ignore[operator,union-attr]
    for _ in range(3):
        assert_as_eager(ours, model, x)
    assert not torch.isfinite(model(x)).all()


def test_what_has_no_bounds() -> None:
    factors, square = torch.ones(4), torch.eye(4)
    for function in (
        lambda x: x.cumsum(1),
        lambda x: x.view(torch.int32).view(torch.float32),
        lambda x: x + x[:0].mean(),
        lambda x: F.max_pool2d(x, 2, padding=1, dilation=4),
        lambda x: torch.addmm(factors, x[0, 0], square, alpha=2),
    ):
        ours = Compiled(nn.Sequential(nn.Conv2d(3, 16, 1), Called(function), nn.ReLU()).eval())
        for _ in range(2):
            ours(torch.randn(2, 3, 4, 4))
        assert compared(ours) is None
    ours = Compiled(nn.Sequential(nn.Conv2d(3, 16, 1), nn.Softplus()).eval())
    for _ in range(2):  # there is no clamp
        ours(torch.randn(2, 3, 4, 4))
    assert compared(ours) is None


def test_residual_network() -> None:
    model = randomise(Residual()).to(memory_format=LAST)
    ours = Compiled(model)
    for _ in range(4):
        assert_right(ours, model, images(2, 3, 17, 15))
    assert compared(ours)


class Called(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **CLAMPS,
    "all negative": lambda x: F.hardtanh(x, -7.0, -5.0),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "silu": F.silu,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
    "tanh": Tensor.tanh,
    "leaky_relu": lambda x: F.leaky_relu(x, -3.0),
    "softmax": lambda x: x.softmax(1),
    "max_pool2d": lambda x: F.max_pool2d(x, 3, stride=2, padding=1, ceil_mode=True),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2, padding=1),
    "divided by less": lambda x: F.avg_pool2d(x, 3, divisor_override=1),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 1),
    "mean": lambda x: x.mean((2, 3), keepdim=True),
    "added": lambda x: x + x.sigmoid(),
    "negative": lambda x: -3 - x,
    "joined": lambda x: torch.cat([x, -3 * x], 1),
    "multiplied": lambda x: x * x,
    "views": lambda x: x.flatten(1).unsqueeze(0)[0, 1:].to(torch.float64),
}


def bounded(model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> int:
    """Check that no value exceeds its bound; return how many have one."""
    seen: list[tuple[Plan, Sequence[Any]]] = []
    monkeypatch.setattr(Plan, "_examined", lambda plan, args: seen.append((plan, args)))
    Compiled(model)(x)
    (plan, args), *_ = seen
    given = plan._simplified()
    rules = bounds._Rules(given.constants, Evaluator(given.graph, args).evaluate)
    count = 0

    class Checked(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            nonlocal count
            result = super().run_node(n)
            if n in given.constants or not isinstance(result, Tensor):
                return result
            if n.op == "placeholder":
                rules.assume(n)
            else:
                count += 1
                assert result.abs().max() <= rules.bound(n) < float("inf")
            return result

    Checked(GraphModule(plan._captured, given.graph)).run(*args)
    return count


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_bounds_of_functions(name: str, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), Called(FUNCTIONS[name])).eval()
    assert bounded(model, scale * torch.randn(2, 3, 9, 8), monkeypatch) >= 2


@pytest.mark.parametrize(
    "name",
    [
        *("conv2d", "conv2d-strided", "conv2d-groups", "conv2d-deep", "conv3d"),
        *("transposed", "transposed-groups"),
    ],
)
def test_bounds_of_products(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, inputs = PRODUCTS[name]
    assert bounded(Activated(make(), torch.relu).eval(), inputs(), monkeypatch) == 2


def test_bounds_of_linears(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Flatten(), nn.Linear(8 * 72, 5000), nn.ReLU())
    assert bounded(model.eval(), torch.randn(2, 3, 9, 8), monkeypatch) == 4


NAN = float("nan")
NAN_MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "pad": lambda x: F.pad(x, (1, 1), value=NAN),
    "hardtanh": lambda x: F.hardtanh(x, -1.0, NAN),
    "leaky_relu": lambda x: F.leaky_relu(x, NAN),
    "cat": lambda x: torch.cat([x, F.leaky_relu(x, NAN)], 2),
}


@pytest.mark.parametrize("name", NAN_MADE)
def test_nan_that_an_argument_makes(name: str) -> None:
    model = Activated(nn.Conv2d(3, 8, 1), F.relu)
    whole = nn.Sequential(Activated(nn.Identity(), NAN_MADE[name]), model).to(memory_format=LAST)
    ours = Compiled(whole)
    for _ in range(4):
        x = images(1, 3, 5, 6)
        assert whole(x).isnan().any()
        assert_as_eager(ours, whole, x)
