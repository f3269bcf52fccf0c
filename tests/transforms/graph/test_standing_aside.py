"""The captured graph runs where a plan might differ from it; order and aliases are kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

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
)
from tests.transforms.helpers import assert_right, exactly, operators_called, randomise
from transforms.graph import attention
from transforms.graph.backend import graph_backend
from transforms.rewrites.packed import supported_dtypes


def test_gradients_are_torchs() -> None:
    plain = randomise(Residual())
    model = copy.deepcopy(plain)
    ours, x = Compiled(model), torch.randn(2, 3, 9, 9)
    with torch.no_grad():
        assert_as_eager(ours, plain, x)
    for each in (ours, plain):
        each(x).square().mean().backward()
    for a, b in zip(model.parameters(), plain.parameters()):
        assert torch.equal(a.grad, b.grad)
    x.requires_grad_()
    for p in (*plain.parameters(), *model.parameters()):
        p.requires_grad_(False)
    (theirs,) = torch.autograd.grad(plain(x).sum(), x)
    (mine,) = torch.autograd.grad(ours(x).sum(), x)
    assert torch.equal(mine, theirs)
    with torch.no_grad():
        assert_as_eager(ours, plain, x.detach())


def test_training_mode() -> None:
    plain = nn.Sequential(Residual(), nn.Dropout(0.3))
    model = copy.deepcopy(plain)
    ours, x = Compiled(model), torch.randn(2, 3, 9, 9)
    for mode in (True, False, True):
        for each in (model, plain):
            each.train(mode)
        for _ in range(2):
            with torch.no_grad():
                torch.manual_seed(0)
                actual = ours(x)
                torch.manual_seed(0)
                torch.testing.assert_close(actual, plain(x))
        for a, b in zip(model.buffers(), plain.buffers()):
            torch.testing.assert_close(a, b)


def test_gradient_modes_in_turn() -> None:
    model = Encoder().eval()
    ours, x = Compiled(model), torch.randn(3, 31, 96)
    for _ in range(2):
        for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with context():
                actual, expected = ours(x), model(x)
            torch.testing.assert_close(actual, expected)
            assert actual.requires_grad == expected.requires_grad
            assert actual.is_inference() == expected.is_inference()


def test_autocast_in_turn() -> None:
    model = Encoder().eval()
    ours, x = Compiled(model), torch.randn(3, 31, 96)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    right = {dtype: exactly(model, x, dtype=dtype) for dtype in dtypes}
    with torch.no_grad():
        for _ in range(2):
            for dtype in dtypes:
                assert_right(ours, right[dtype], x, dtype=dtype)


class Casting(nn.Module):
    """A model that enters and leaves autocast in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(257, 515), nn.Linear(515, 515)

    def forward(self, x: Tensor) -> Any:
        x = F.gelu(self.first(x))
        with torch.autocast("cpu", torch.bfloat16):
            y = self.second(x)
            scale = self.second.weight.exp() @ self.second.bias
        with torch.autocast("cpu", enabled=False):
            z = self.second(x.float())
        return {"low": y, "high": [z + x], "scale": scale}


def test_autocast_inside() -> None:
    model = Casting()
    ours, x = Compiled(model), torch.randn(65, 257)
    with torch.no_grad():
        for _ in range(2):
            assert_as_eager(ours, model, x)
            with torch.autocast("cpu", torch.bfloat16):
                assert_as_eager(ours, model, x, arithmetic=torch.bfloat16)
    assert ours.counts.packed == (3 if torch.bfloat16 in supported_dtypes() else 1)


class Mixed(nn.Module):
    """A model that computes in two dtypes, which needs autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(257, 515), nn.Linear(515, 515).bfloat16()

    def forward(self, x: Tensor, casts: bool) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.second(self.first(x))
            if casts:
                x = self.second(x.float())
        y: Tensor = x if casts else self.second(x.float())
        return y


def test_mixed_dtypes_need_autocast() -> None:
    model, alone = Mixed(), nn.Linear(1024, 1024).bfloat16()
    ours, x = Compiled(model), torch.randn(65, 257)
    with torch.no_grad():
        for _ in range(2):
            assert_as_eager(ours, model, x, True)
        assert ours.counts.packed == (3 if torch.bfloat16 in supported_dtypes() else 0)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="must have the same dtype"):
                ours(x, False)
            with pytest.raises(RuntimeError, match="must have the same dtype"):
                Compiled(alone)(torch.randn(64, 1024))


class Branching(nn.Module):
    """A model with a branch on a value, which ends a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(257, 515), nn.Linear(515, 515)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        if x.sum() > 1e6:
            return x
        y: Tensor = self.second(x)
        return y


def test_branches_on_values() -> None:
    model = Branching()
    ours, x = Compiled(model), torch.randn(65, 257)
    with torch.no_grad():
        for sample in (x, x + 1e4, x, x * 0):
            assert_as_eager(ours, model, sample)
    assert len(ours.plans) > 1


linear = nn.Linear(257, 515)
square = nn.Linear(515, 515)
conv = nn.Conv2d(3, 32, 3, padding=1).to(memory_format=LAST)


def writes_its_input(x: Tensor) -> Tensor:
    y = linear(x)
    x.add_(1)
    return y + linear(x)


def writes_between(x: Tensor) -> Tensor:
    y = conv(x)
    z = y.clone()
    product = conv(x)
    z.mul_(2)
    x.zero_()
    return product + z


def writes_a_view(x: Tensor) -> tuple[Tensor, Tensor]:
    y = linear(x)
    part = y[:, :3]
    part.mul_(5)
    torch.relu_(y)
    return y, part


def writes_items(x: Tensor) -> Tensor:
    y = linear(x)
    y[1:3] = 7
    y[0, ::2] += 1
    return F.gelu(y)


def returns_aliases(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y = linear(x)
    z = F.dropout(y, 0.5, training=False)
    return y, z, y.t(), x


def writes_an_alias_of_a_dropout(x: Tensor) -> tuple[Tensor, Tensor]:
    y = linear(x)
    z = F.dropout(y, 0.5, training=False)
    z.mul_(2)
    return y, z


def uses_a_product_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    y = linear(x)
    return torch.relu(y), y + 1


def adds_in_place_of_another_dtype(x: Tensor) -> Tensor:
    y = linear(x)
    y += torch.arange(515)
    y *= 2
    return y


def adds_with_broadcasting(x: Tensor) -> Tensor:
    y = linear(x[:1])
    return torch.relu(y + torch.ones(4, 515)) + linear(x[:4])


def adds_transposed(x: Tensor) -> Tensor:
    y = square(linear(x))
    return y.view(65, 515) + torch.arange(515.0 * 65).view(515, 65).t()


def views_a_convolution(x: Tensor) -> Tensor:
    return torch.relu(conv(x)).permute(0, 2, 3, 1).view(2, -1)


def pools_to_one(x: Tensor) -> Tensor:
    y = F.adaptive_avg_pool2d(torch.relu(conv(x)), 1)
    return F.conv_transpose2d(torch.sigmoid(y * 2), torch.ones(32, 4, 3, 3))


def maps(x: Tensor) -> Tensor:
    return torch.vmap(lambda row: linear(row) * 2)(x)


def differentiates(x: Tensor) -> Tensor:
    return torch.func.jvp(lambda v: F.gelu(linear(v)), (x,), (x,))[1]


def turns_gradients_on(x: Tensor) -> Tensor:
    with torch.enable_grad():
        y = linear(x).sum()
    return y.detach()


def draws(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return F.dropout(linear(x), 0.5, training=True) + torch.rand(515) + torch.zeros(515)


def has_no_tensors(x: Tensor) -> tuple[int, Tensor]:
    return x.shape[0], torch.zeros(3).add_(1)


def mixes(x: Tensor) -> Tensor:
    table = torch.full((65,), -1.0)
    table[::2] = 0
    bias = torch.stack([linear.bias, linear.bias.exp()]).sum(0)
    return (linear(x) + table[:, None]).softmax(-1) * bias


ROWS: list[Callable[..., Any]] = [
    *(writes_its_input, writes_a_view, writes_items, returns_aliases, uses_a_product_twice),
    *(writes_an_alias_of_a_dropout, adds_in_place_of_another_dtype, adds_with_broadcasting),
    *(adds_transposed, maps, differentiates, turns_gradients_on, draws, has_no_tensors, mixes),
]
IMAGES: list[Callable[..., Any]] = [writes_between, views_a_convolution, pools_to_one]


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # raised by torch.func.jvp
@pytest.mark.parametrize("function", [*ROWS, *IMAGES], ids=lambda f: f.__name__)
def test_order_and_aliases(function: Callable[..., Any]) -> None:
    ours = Compiled(function)
    for i in range(6):
        x = torch.randn(65, 257) if function in ROWS else torch.randn(2, 3, 9, 9)
        if function in IMAGES and i % 4 < 2:
            x = x.to(memory_format=LAST)
        with torch.no_grad():
            assert_as_eager(ours, function, x)
            results = ours(x.clone())
        with torch.inference_mode():
            assert_as_eager(ours, function, x)
        if function is returns_aliases:
            assert results[0].data_ptr() == results[1].data_ptr() == results[2].data_ptr()


def test_a_weight_given_as_an_input() -> None:
    model = nn.Linear(257, 515)

    def scaled(x: Tensor, into: Tensor) -> Tensor:
        into.mul_(2)
        return model(x)

    ours, x = Compiled(scaled), torch.randn(65, 257)
    with torch.no_grad():
        for _ in range(3):
            expected = F.linear(x, model.weight * 2, model.bias)
            torch.testing.assert_close(ours(x, model.weight.view(-1)), expected)
            model.weight.div_(2)


@torch.no_grad()
def test_views_of_parameters_require_gradients() -> None:
    class Views(nn.Conv2d):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), self.other.t()

    model = Views(16, 16, 3)
    model.other = nn.Parameter(torch.randn(8, 16))
    ours, x = Compiled(model), torch.randn(2, 16, 6, 6).to(memory_format=LAST)
    assert all(ours(x)[1].requires_grad for _ in range(3))


@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
def test_transforms_and_modes_around() -> None:
    model = nn.Sequential(nn.Linear(257, 515), nn.GELU()).eval()
    ours, x = Compiled(model), torch.randn(65, 257)
    with torch.no_grad():
        assert_as_eager(ours, model, x)
        torch.testing.assert_close(torch.vmap(ours)(x[:, None]), torch.vmap(model)(x[:, None]))
        with torch.backends.mkldnn.flags(enabled=False):
            assert_as_eager(ours, model, x)
        exported = torch.export.export(model, (x,)).module()
        torch.testing.assert_close(exported(x), model(x))


@pytest.mark.skipif(torch.bfloat16 not in supported_dtypes(), reason="attention stays torch's")
@pytest.mark.parametrize("has_tiles", [False, True])
def test_attention_where_the_processor_multiplies_tiles(
    monkeypatch: pytest.MonkeyPatch, has_tiles: bool
) -> None:
    monkeypatch.setattr(attention, "has_tiles", lambda: has_tiles)
    torch._dynamo.reset()
    run = torch.compile(F.scaled_dot_product_attention, backend=graph_backend, dynamic=False)
    inputs = [torch.randn(2, 3, 151, 16).bfloat16() for _ in range(3)]
    with torch.no_grad():
        run(*inputs)
        called = operators_called(lambda: run(*inputs))
    assert ("aten::baddbmm" in called) is not has_tiles
