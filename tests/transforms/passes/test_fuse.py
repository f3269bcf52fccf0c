"""Products apply activations only where nothing else reads their results, which stay the same."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from fusedoptim import transforms
from tests.tolerances import unit_roundoff
from tests.transforms.passes.test_pack_weights import images, linear
from transforms.rewrites.fused_activation import FusedActivation

KNOB = "fuse"
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "relu6": nn.ReLU6,
    "hardtanh": lambda: nn.Hardtanh(-0.5, 0.25),
    "leaky": lambda: nn.LeakyReLU(0.1),
    "leaky, no slope": lambda: nn.LeakyReLU(0.0),
    "gelu": nn.GELU,
    "gelu by tanh": lambda: nn.GELU("tanh"),
    "silu": nn.SiLU,
    "hardswish": nn.Hardswish,
    "hardsigmoid": nn.Hardsigmoid,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
}
STEEPEST = 1.5
"""The largest slope of all activations, which is hardswish's."""
PRODUCTS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "linear": linear,
    "conv2d": lambda: images(nn.Conv2d(3, 17, 3), 2, 3, 9, 11),
    "conv1d": lambda: (nn.Conv1d(6, 9, 11, padding=5), torch.randn(2, 6, 43)),
    "depthwise": lambda: images(nn.Conv2d(33, 33, 5, padding=2, groups=33), 1, 33, 9, 9),
    "transposed": lambda: images(nn.ConvTranspose2d(6, 4, 3, 2, 1, 1), 2, 6, 5, 7),
}


def fused(model: nn.Module, **arguments: Any) -> Any:
    return transforms.optimize(model.eval(), auto_channels_last=False, **arguments)


def error_bound(model: nn.Sequential, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Bound the rounding of a product, and of the formula of the activation after it."""
    exact = copy.deepcopy(model).double()
    magnitudes: Any = copy.deepcopy(exact[0])
    for p in magnitudes.parameters():
        p.detach().abs_()
    weight: Any = model[0].weight
    terms = weight.numel() // min(weight.size(0), weight.size(1))
    rounding = (terms + 1) * unit_roundoff(torch.float32) + unit_roundoff(dtype)
    wide = x.double()
    # A formula in float32 of about eight operations, the result rounded to the dtype.
    formula = (8 * unit_roundoff(torch.float32) + unit_roundoff(dtype)) * (1 + exact[0](wide).abs())
    return STEEPEST * magnitudes(wide.abs()) * rounding * 1.01 + formula


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_equals_float64(activation: str, product: str, dtype: torch.dtype) -> None:
    module, x = PRODUCTS[product]()
    model = nn.Sequential(module, ACTIVATIONS[activation]()).to(dtype).eval()
    x = x.to(dtype)
    ours = fused(model)
    assert [entry.where for entry in transforms.report(ours).done(KNOB)] == ["1"]
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        bound = error_bound(model, x, dtype)
        for _ in range(2):  # the first call packs
            assert bool(((ours(x).double() - exact).abs() <= bound).all())
        assert ours(x).stride() == model(x).stride()


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_keeps_infinities_and_nans(activation: str, product: str) -> None:
    module, x = PRODUCTS[product]()
    model = nn.Sequential(module, ACTIVATIONS[activation]()).eval()
    ours = fused(model)
    places = torch.randperm(x.numel())[:3]
    with torch.no_grad():
        ours(x)
        for values in ([math.nan], [math.inf], [-math.inf], [math.inf, math.nan, -math.inf]):
            spoilt = x.clone()
            spoilt.put_(places[: len(values)], torch.tensor(values))
            expected, actual = model(spoilt.clone()), ours(spoilt)
            assert torch.equal(expected.isnan(), actual.isnan())
            assert torch.equal(expected == math.inf, actual == math.inf)
            assert torch.equal(expected == -math.inf, actual == -math.inf)


class Shared(nn.Module):
    """One ReLU after a convolution, after another and after an addition, as in a residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.first(x))
        y = self.second(y) + x
        return self.relu(y)


class Reused(nn.Module):
    """A model whose product is also read by an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(8, 8, 3, padding=1), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.act(y) + y


class Branch(nn.Module):
    """A model whose activation depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(8, 8, 3, padding=1), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.act(y) if x.sum() > 0 else y


class Kept(nn.Module):
    """A model that keeps the product where others may read it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(8, 8, 3, padding=1), nn.SiLU()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        self.seen.append(y)
        return self.act(y)


@pytest.mark.parametrize("make", [Shared, Reused, Branch, Kept])
def test_computes_what_the_plain_model_does(make: Callable[[], nn.Module]) -> None:
    model = make().eval()
    ours = fused(model)
    assert bool(transforms.report(ours).done(KNOB)) == (make is Shared)
    with torch.no_grad():
        for x in (torch.rand(2, 8, 9, 9), -torch.rand(2, 8, 9, 9)):
            given = x.clone()
            torch.testing.assert_close(ours(x), model(x))
            assert torch.equal(x, given)


NORMALIZED: dict[str, tuple[Callable[[], nn.Module], type[nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(512, 8), nn.BatchNorm1d, (257, 512)),
    "conv1d": (lambda: nn.Conv1d(3, 8, 11), nn.BatchNorm1d, (2, 3, 43)),
    "conv2d": (lambda: nn.Conv2d(3, 8, 3), nn.BatchNorm2d, (2, 3, 9, 9)),
}


@pytest.mark.parametrize("name", NORMALIZED)
def test_norms_and_dropouts_between_are_looked_through(name: str) -> None:
    make, norm, shape = NORMALIZED[name]
    model = nn.Sequential(make(), norm(8), nn.Dropout(), nn.SiLU())
    ours = fused(model)
    assert [entry.what for entry in transforms.report(ours).done(KNOB)] == ["applied by 0"]
    x = torch.randn(shape)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), model(x))


def test_hooks_added_later_see_what_they_would() -> None:
    model, x = nn.Sequential(linear()[0], nn.GELU()).eval(), linear()[1]
    ours, seen = fused(model), []
    with torch.no_grad():
        ours(x)
        ours[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
        ours(x)
        torch.testing.assert_close(seen[0], model[0](x))


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_hooks_of_all_modules_see_what_they_would(activation: str) -> None:
    model, x = nn.Sequential(linear()[0], ACTIVATIONS[activation]()).eval(), linear()[1]
    ours = fused(model)
    outputs: list[list[Tensor]] = []
    with torch.no_grad():
        ours(x)
        for each in (ours, model):
            seen: list[Tensor] = []
            hook = register_module_forward_hook(lambda *args, to=seen: to.append(args[2].clone()))
            each(x)
            hook.remove()
            outputs.append(seen)
    for actual, expected in zip(*outputs, strict=True):
        torch.testing.assert_close(actual, expected)


def test_hooks_before_are_left_alone() -> None:
    model = nn.Sequential(linear()[0], nn.GELU()).eval()
    model[0].register_forward_hook(lambda module, args, output: None)
    (entry,) = transforms.report(fused(model)).left(KNOB)
    assert (entry.where, entry.what) == ("1", "0 has hooks, which would see different values")


def test_gradients_copies_scripts_and_restore() -> None:
    model, x = nn.Sequential(linear()[0], nn.GELU("tanh")).eval(), linear()[1]
    ours = fused(model)
    assert repr(ours[1]) == "FusedGELU(approximate='tanh')"
    with torch.no_grad():
        expected = model(x)
        for other in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            for _ in range(2):
                torch.testing.assert_close(other(x), expected)
            assert isinstance(other[1], FusedActivation)
        torch.testing.assert_close(torch.compile(ours, backend="eager")(x), expected)
    for each in (model, ours):
        each(x).square().sum().backward()
    assert torch.equal(ours[0].weight.grad, model[0].weight.grad)
    restored = transforms.restore(ours)
    assert [type(m) for m in restored] == [type(m) for m in model]
    assert [vars(m).keys() for m in restored] == [vars(m).keys() for m in model]


class PartlyEager(nn.Module):
    """A Linear that torch.compile does not compile, and one activation, called again later."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.first, self.second = linear()[0], nn.Linear(515, 9)
        self.activation = activation

    @torch.compiler.disable
    def features(self, x: Tensor) -> Tensor:
        features: Tensor = self.first(x)
        return features

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.features(x))
        result: Tensor = self.second(self.activation(y))
        return result


@torch.no_grad()
@pytest.mark.parametrize("graph_mode", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "hardswish"])
def test_compiled_after_an_eager_product(activation: str, graph_mode: bool) -> None:
    x = linear()[1]
    model = PartlyEager(ACTIVATIONS[activation]())
    ours = fused(model, graph_mode=graph_mode)
    assert [entry.where for entry in transforms.report(ours).done(KNOB)] == ["activation"]
    compiled = ours if graph_mode else torch.compile(ours, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_scripts() -> None:
    model, x = nn.Sequential(linear()[0], nn.GELU()).eval(), linear()[1]
    ours = fused(model)
    with torch.no_grad():
        torch.jit.script(ours[1])
        torch.testing.assert_close(ours(x), model(x))
        torch.testing.assert_close(torch.jit.script(ours)(x), model(x))


def test_twice_changes_nothing_more_and_needs_packed_weights() -> None:
    model = nn.Sequential(linear()[0], nn.GELU()).eval()
    ours = fused(fused(model))
    assert len(transforms.report(ours).done(KNOB)) == 1
    (entry,) = transforms.report(fused(model, weights_prepack=False)).left(KNOB)
    assert entry.what == "no module has packed weights (weights_prepack)"


def test_an_activation_with_code_of_its_own_is_left_alone() -> None:
    class Own(nn.GELU):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return super().forward(input) + 1

    model, x = nn.Sequential(linear()[0], Own()).eval(), linear()[1]
    ours = fused(model)
    assert not transforms.report(ours).done(KNOB)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), model(x))


def test_weights_made_in_inference_mode_are_tracked() -> None:
    model, x = nn.Sequential(linear()[0], nn.GELU()).eval(), linear()[1]
    with torch.inference_mode():
        ours = fused(model)
        torch.testing.assert_close(ours(x), model(x))
    assert not ours[0].weight.is_inference()


def test_tracing_copies_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []
    original = torch.Tensor.__deepcopy__

    def deepcopy(tensor: torch.Tensor, memo: dict[int, object]) -> torch.Tensor:
        if id(tensor) not in memo:
            copied.append(tensor)
        return original(tensor, memo)

    model = nn.Sequential(nn.Conv2d(256, 256, 3), nn.BatchNorm2d(256), nn.ReLU()).eval()
    monkeypatch.setattr(torch.Tensor, "__deepcopy__", deepcopy)
    transforms.optimize(model, inplace=True)
    assert transforms.report(model).kept_bytes > 256 * 256 * 9 // 4  # two bits of each
    assert not copied


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(300, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.nn.functional.relu(self.first(x))).sigmoid_()


def test_activations_that_are_functions_are_reported() -> None:
    left = {e.where: e.what for e in transforms.report(fused(Functional())).left(KNOB)}
    what = "is followed by {}(), a function: only graph mode fuses functions"
    assert left == {"first": what.format("relu"), "second": what.format("sigmoid_")}


def _written(conv: nn.Module, act: nn.Module, x: Tensor) -> Tensor:
    return act(conv(x).mul_(2))  # type: ignore[no-any-return]


def _written_by_a_view(conv: nn.Module, act: nn.Module, x: Tensor) -> Tensor:
    y = conv(x)
    y[:, 0] = 5.0
    return act(y)  # type: ignore[no-any-return]


def _written_as_out(conv: nn.Module, act: nn.Module, x: Tensor) -> Tensor:
    y = conv(x)
    torch.add(y, 1, out=y)
    return act(y)  # type: ignore[no-any-return]


def _written_afterwards(conv: nn.Module, act: nn.Module, x: Tensor) -> list[Tensor]:
    y = conv(x)
    z = act(y)
    kept = z.clone()
    y.add_(1)
    return [z, kept, y]


def _view_of_the_product(conv: nn.Module, act: nn.Module, x: Tensor) -> list[Tensor]:
    y = conv(x)
    view = y[:, :4]
    return [act(y), view]


def _view_activated(conv: nn.Module, act: nn.Module, x: Tensor) -> list[Tensor]:
    y = conv(x)
    return [act(y.transpose(0, 1)), y]


def _view_of_the_result(conv: nn.Module, act: nn.Module, x: Tensor) -> Tensor:
    z = act(conv(x))
    z[:, :4].add_(1)
    return z


class Writing(nn.Module):
    """A convolution and an activation, and code that writes into the product, or views it."""

    def __init__(self, code: Callable[..., Any], act: nn.Module) -> None:
        super().__init__()
        self.conv, self.act, self.code = nn.Conv2d(8, 8, 3, padding=1), act, code

    def forward(self, x: Tensor) -> Any:
        return self.code(self.conv, self.act, x)


@pytest.mark.parametrize("activation", ["relu", "relu in place", "silu"])
@pytest.mark.parametrize(
    "code",
    [
        *(_written, _written_by_a_view, _written_as_out, _written_afterwards),
        *(_view_of_the_product, _view_activated, _view_of_the_result),
    ],
)
def test_writes_into_products_and_views_of_them(code: Callable[..., Any], activation: str) -> None:
    model = Writing(code, ACTIVATIONS[activation]()).eval()
    ours = fused(model)
    is_fused = bool(transforms.report(ours).done(KNOB))
    assert is_fused == (code is _view_of_the_result)
    x = torch.randn(2, 8, 9, 11)
    with torch.no_grad():
        for _ in range(3):  # the first call packs
            torch.testing.assert_close(ours(x), model(x))
