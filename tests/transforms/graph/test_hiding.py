"""In any group, oneDNN Graph keeps NaN and infinity, or torch computes the function."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.running import check_script
from tests.transforms.graph.helpers import (
    LAST,
    Compiled,
    assert_as_eager,
    each_packed_dtype,
    images,
)

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "sigmoid of tanh": lambda y: torch.tanh(y).sigmoid(),
    "tanh": torch.tanh,
    "silu": F.silu,
    "hardswish": F.hardswish,
    "leaky_relu": lambda y: F.leaky_relu(y, -0.5),
    "a slope of 0": lambda y: F.leaky_relu(y, 0.0),
    "quotient": lambda y: y / (y * y + 1),
    "divided by a number": lambda y: y / 3,
    "number divided": lambda y: 2 / y,
    "log of abs": lambda y: y.abs().log(),
    "root of square": lambda y: y.square().sqrt(),
    "elu": lambda y: F.elu(y, 0.3),
    "clamp": lambda y: y.clamp(-0.5, 0.5),
    "clamp to a tensor": lambda y: y.clamp(max=y.new_full((), 0.25)),
    "gelu": F.gelu,
    "gelu by tanh": lambda y: F.gelu(y, approximate="tanh"),
    "exp": torch.exp,
    "round": torch.round,
    "softmax": lambda y: torch.softmax(y, 1),
    "permuted": lambda y: y.movedim(0, 1).tanh().permute(1, 0, *range(2, y.dim())),
}
AFTER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "halved": lambda z, y: z * 0.5,
    "added": lambda z, y: z + y,
    "multiplied": lambda z, y: z * y,
}


class Layers(nn.Module):
    """Several products, of which ``first`` chooses, and what follows one of them."""

    def __init__(
        self,
        first: Callable[[Layers, Tensor], Tensor],
        function: Callable[[Tensor], Tensor],
        after: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.conv, self.deep = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.transposed, self.linear = nn.ConvTranspose2d(16, 16, 1), nn.Linear(16, 16)
        self.first, self.function, self.after = first, function, after

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(self, x)
        return self.after(self.function(y), y), self.conv(x)


FIRST: dict[str, Callable[[Layers, Tensor], Tensor]] = {
    "sum": lambda m, x: x + x,
    "pooled": lambda m, x: F.avg_pool2d(x, 3, 1, 1),
    "convolution": lambda m, x: m.conv(x),
    "depthwise": lambda m, x: m.deep(x),
    "transposed": lambda m, x: m.transposed(x),
    "residual": lambda m, x: m.conv(x) + x,
    "linear": lambda m, x: m.linear(x.permute(0, 2, 3, 1)),
    "matmul": lambda m, x: x.permute(0, 2, 3, 1) @ m.linear.weight,
    "bmm": lambda m, x: torch.bmm(x.flatten(0, 1), x.flatten(0, 1).transpose(1, 2)),
}


@pytest.mark.usefixtures("gradients_off")
@each_packed_dtype
@pytest.mark.parametrize("first", FIRST)
def test_nan_and_infinity(first: str, dtype: torch.dtype) -> None:
    x = images(2, 16, 5, 6).to(dtype)
    specials = [x.clone() for _ in range(3)]
    for special, number in zip(specials, (float("nan"), float("inf"), -float("inf"))):
        special[1, 3, 2, 4] = number
    pairs = [(name, "halved") for name in FUNCTIONS]
    pairs += itertools.product(("sigmoid", "gelu", "softmax"), ("added", "multiplied"))
    for name, after in pairs:
        torch.compiler.reset()
        model = Layers(FIRST[first], FUNCTIONS[name], AFTER[after])
        model = model.eval().to(dtype, memory_format=LAST)
        ours = Compiled(model)
        for given in (x, x, *specials):
            assert_as_eager(ours, model, given)
        assert ours.is_scripted(), name


ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "floor": lambda y: torch.div(y, y + 8, rounding_mode="floor"),
    "trunc, by a number": lambda y: torch.div(y, 0.25, rounding_mode="trunc"),
    "mixed dtypes": lambda y: y / y.double(),
    "integers": lambda y: y * (y.int() / 3),
}


@pytest.mark.usefixtures("gradients_off")
@pytest.mark.parametrize("name", ROUNDED)
def test_quotients_that_round_or_convert(name: str) -> None:
    """oneDNN Graph would only divide."""
    model = Layers(FIRST["convolution"], ROUNDED[name], AFTER["halved"]).to(memory_format=LAST)
    ours = Compiled(model)
    for _ in range(3):
        assert_as_eager(ours, model, images(2, 16, 5, 6))
    rounds = name in ("floor", "trunc, by a number")  # as the last bit of the convolution says
    assert rounds or ours.is_scripted()


@pytest.mark.usefixtures("gradients_off")
@pytest.mark.parametrize("first", FIRST)
def test_an_integer_as_slope(first: str) -> None:
    """TorchScript's oneDNN expects a float, so Python computes."""
    model = Layers(FIRST[first], lambda y: F.leaky_relu(y, 0), AFTER["halved"])
    ours = Compiled(model.to(memory_format=LAST))
    x = images(2, 16, 5, 6)
    x[1, 3, 2, 4] = float("nan")
    x[0, 3, 2, 4] = -float("inf")
    for _ in range(3):
        assert_as_eager(ours, model, x)
    assert not ours.is_scripted()


def test_batch_norm_beside_its_input() -> None:
    """oneDNN never returns if it sees them; the script has a time limit."""
    check_script("""
        import torch
        from torch import nn
        from tests.transforms.graph.helpers import Compiled, agreeing, images

        class Beside(nn.Module):
            def __init__(self, function):
                super().__init__()
                self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
                self.function = function

            def forward(self, x):
                y = self.conv(x)
                return self.function(self.norm(y), y)

        with torch.no_grad():
            for function in (torch.add, torch.mul, lambda z, y: torch.relu(z + y)):
                ours = agreeing(Beside(function).eval(), 2, 16, 7, 8)
                assert ours.is_scripted()
            empty = Compiled(Beside(torch.add).eval())
            for _ in range(3):
                assert empty(images(0, 16, 7, 8)).shape == (0, 16, 7, 8)
    """)


def test_an_operand_before_and_after_a_sum() -> None:
    """torch would end the process."""
    check_script("""
        import torch
        from torch import nn
        from tests.transforms.graph.helpers import agreeing

        class Gated(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv, self.last = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)
                self.factor = nn.Parameter(torch.randn(16, 1, 1))

            def forward(self, x):
                y, p = self.conv(x), x.mean((2, 3), keepdim=True)
                z = self.last(x.cos())
                return (y * p + x) * p, z + self.factor + self.factor

        with torch.no_grad():
            assert agreeing(Gated(), 2, 16, 7, 8).is_scripted()
    """)


UNCHANGED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "times 1": lambda m, x: x * 1.0,
    "1 times": lambda m, x: 1 * x,
    "plus 0": lambda m, x: x + 0,
    "minus 0": lambda m, x: x - 0.0,
    "by 1": lambda m, x: x / 1,
    "times True": lambda m, x: torch.mul(x, True),
    "times a tensor": lambda m, x: x * torch.ones(()),
    "plus a tensor": lambda m, x: x + torch.zeros(()),
    "times a computed parameter": lambda m, x: x * (m.part + m.part),
    "plus a computed parameter": lambda m, x: x + (m.part - m.part),
    "times a size": lambda m, x: x * x.shape[0],
}


@pytest.mark.usefixtures("gradients_off")
@pytest.mark.parametrize("name", UNCHANGED)
def test_results_that_equal_their_input(name: str) -> None:
    """TorchScript takes them for their input, over which the next function would write."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(16, 16, 1)
            self.part = nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            same = UNCHANGED[name]
            y = self.conv(F.hardsigmoid(same(self, x)).exp())
            return y, F.relu(same(self, x)), same(self, x)

    model = Model().to(memory_format=LAST)
    ours = Compiled(model)
    for sign in (1, 1, 1, -1):
        x = images(1, 16, 5, 6).abs() * sign
        copy = x.clone()
        results = ours(x)
        assert torch.equal(x, copy)
        for actual, expected in zip(results, model(copy)):
            torch.testing.assert_close(actual, expected)
        assert len({each.untyped_storage().data_ptr() for each in (x, *results)}) == 4


@pytest.mark.usefixtures("gradients_off")
def test_sums_with_a_factor() -> None:
    """TorchScript would multiply first, in the factor's dtype."""
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda y: torch.add(y, y.half(), alpha=1000.0),
        lambda y: torch.add(y, (y.abs() * 9).to(torch.uint8), alpha=50),
        lambda y: y.add(y * 1e38, alpha=2),
    ]
    for function in functions:
        torch.compiler.reset()
        model = Layers(FIRST["convolution"], function, AFTER["halved"]).to(memory_format=LAST)
        ours = Compiled(model)
        for _ in range(4):
            assert_as_eager(ours, model, images(2, 16, 5, 6))


@pytest.mark.usefixtures("gradients_off")
def test_negative_zeros_are_left_to_python() -> None:
    model = Layers(FIRST["convolution"], lambda y: y + (-0.0), lambda z, y: F.relu(y - 6) / 0.0)
    ours = Compiled(model.to(memory_format=LAST))
    for _ in range(3):
        assert_as_eager(ours, model, images(2, 16, 5, 6))
    assert not ours.is_scripted()


@pytest.mark.usefixtures("gradients_off")
@each_packed_dtype
def test_signs_of_zeros(dtype: torch.dtype) -> None:
    """TorchScript takes 0 and -0 for one constant."""

    class Zeros(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(16, 16, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            y = (self.conv(x) + 1).sigmoid()
            return y, x / x.amax(), torch.clamp(x, 0.0, 2.0), F.relu6(x), (-x * 0.0) / (y + 1)

    model = Zeros().to(dtype, memory_format=LAST)
    ours = Compiled(model)
    for _ in range(4):
        x = images(2, 16, 5, 6).to(dtype)
        assert_as_eager(ours, model, x)
        for actual, expected in zip(ours(x), model(x)):
            assert torch.equal(actual.signbit(), expected.signbit())
    assert ours.is_scripted()
