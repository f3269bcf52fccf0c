"""INT8 layers apply the activation after them, and pass their codes to the next layer."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from fusedoptim import transforms
from transforms.rewrites import int8, int8_chain, int8_operators
from transforms.rewrites.fused_activation import FusedActivation
from transforms.rewrites.int8_operators import code_bits

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "ReLU": nn.ReLU,
    "ReLU in place": lambda: nn.ReLU(inplace=True),
    "ReLU6": nn.ReLU6,
    "Hardtanh": lambda: nn.Hardtanh(-0.25, 0.5),
    "SiLU": nn.SiLU,
    "Hardswish": nn.Hardswish,
    "Hardsigmoid": nn.Hardsigmoid,
    "Sigmoid": nn.Sigmoid,
    "Tanh": nn.Tanh,
    "LeakyReLU": lambda: nn.LeakyReLU(0.2),
    "GELU": nn.GELU,
    "GELU, tanh": lambda: nn.GELU("tanh"),
    "none": nn.Identity,
}
KINDS = {
    "linear": (lambda: (nn.Linear(33, 65), nn.Linear(65, 17)), (31, 33)),
    "conv": (
        lambda: (nn.Conv2d(17, 33, 3, padding=1), nn.Conv2d(33, 16, 3, 2, groups=1)),
        (2, 17, 9, 11),
    ),
    "conv1d": (lambda: (nn.Conv1d(5, 9, 3), nn.Conv1d(9, 4, 3)), (3, 5, 21)),
    "conv3d": (lambda: (nn.Conv3d(4, 6, 3, padding=1), nn.Conv3d(6, 5, 1)), (2, 4, 5, 6, 7)),
}
passes_codes = pytest.mark.skipif(code_bits() == 7, reason="codes of 7 bits are not handed on")


def pair(kind: str, activation: str) -> tuple[Any, Any, Tensor]:
    """Return an INT8 model, a copy whose hooks keep the layers apart, and an input."""
    make, shape = KINDS[kind]
    first, second = make()
    model = nn.Sequential(first, ACTIVATIONS[activation](), second).eval()
    if kind == "conv":
        model.to(memory_format=torch.channels_last)
    x = torch.randn(shape)
    chained = transforms.quantize(model, [x])
    return chained, kept_apart(chained), x


def kept_apart(model: nn.Module) -> nn.Module:
    """A copy whose layers apply no activations, because of hooks between them."""
    apart = copy.deepcopy(model)
    for layer in apart.children():
        layer.register_forward_hook(lambda *_: None)
    return apart


def step(model: Any) -> float:
    """How far a result moves if all codes of the last layer's input move by one."""
    grid = model[2]._fusedoptim_int8.grid
    weight = model[2].weight
    return grid.scale * weight.abs().flatten(1).sum(1).max().item()


@torch.no_grad()
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_chained_as_apart(kind: str, activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chained, apart, x = pair(kind, activation)
    codes: list[Tensor] = []

    def watched(given: Tensor, grid: Any) -> Any:
        codes.append(int8_operators_quantized(given, grid))
        return codes[-1]

    int8_operators_quantized = int8_operators.quantized_activation
    monkeypatch.setattr(int8_operators, "quantized_activation", watched)
    for _ in range(2):
        codes.clear()
        expected = apart(x)
        assert len(codes) == 2
        codes.clear()
        actual = chained(x)
        own = (
            int8_operators.OF_LINEARS
            if kind == "linear"
            else int8_operators.OF_CONVOLUTIONS[x.dim() - 2]
        )
        post = int8_chain.activation_of(chained[0])
        name = None if post is None else post.attribute or post.of_numbers
        is_passed = (activation == "none" or name in own) and code_bits() == 8
        if activation != "none":  # an Identity is a function of the model's
            assert len(codes) == (1 if is_passed else 2)
        # Where a number lies between two codes, the two ways may choose either.
        assert (actual - expected).abs().max() <= step(chained)
        assert actual.stride() == expected.stride()
        assert actual.dtype == torch.float32


@passes_codes
@torch.no_grad()
def test_codes_differ_by_one_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    chained, apart, x = pair("conv", "ReLU")
    found: list[Tensor] = []
    monkeypatch.setattr(
        int8_operators, "convolution", _seeing(int8_operators.convolution, found.append)
    )
    apart(x)
    chained(x)
    expected, actual = found[1], found[3]
    assert actual.dtype == torch.uint8
    assert (expected.int() - actual.int()).abs().max() <= 1


def _seeing(function: Callable[..., Any], see: Callable[[Tensor], object]) -> Callable[..., Any]:
    def called(x: Tensor, *args: Any) -> Any:
        see(x)
        return function(x, *args)

    return called


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity(kind: str, number: float) -> None:
    chained, _, x = pair(kind, "ReLU")
    plain = transforms.restore(copy.deepcopy(chained))
    x[0, 0] = number
    for _ in range(2):
        assert torch.equal(chained(x).isnan(), plain(x).isnan())
    x[0, 0] = 0
    for layer in (0, 2):
        for model in (chained, plain):
            model[layer].bias[3] = number
        assert torch.equal(chained(x).isnan(), plain(x).isnan())
        assert torch.equal(chained(x).isinf(), plain(x).isinf())
        for model in (chained, plain):
            model[layer].bias[3] = 0
    assert chained(x).isfinite().all()


@torch.no_grad()
def test_every_change_of_a_bias_is_seen() -> None:
    chained, apart, x = pair("linear", "ReLU")
    chained(x)
    changes: tuple[Callable[[Any], object], ...] = (
        lambda m: m[0].bias.add_(1),
        lambda m: m[0].bias.data.add_(1),
        lambda m: setattr(m[2].bias, "data", m[2].bias.data + 1),
        lambda m: setattr(m[2], "bias", nn.Parameter(m[2].bias + 1)),
        lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
    )
    for change in changes:
        before = chained(x)
        for model in (chained, apart):
            change(model)
        assert not torch.equal(chained(x), before)
        assert (chained(x) - apart(x)).abs().max() <= step(chained)


@torch.no_grad()
def test_hooks_see_values() -> None:
    for i, register in (
        (0, "register_forward_hook"),
        (1, "register_forward_pre_hook"),
        (1, "register_forward_hook"),
        (2, "register_forward_pre_hook"),
    ):
        chained, apart, x = pair("conv", "ReLU")
        seen: list[Any] = []
        getattr(chained[i], register)(lambda *args, to=seen: to.append(args[-1]))
        assert torch.equal(chained(x), apart(x))
        (value,) = seen[0] if isinstance(seen[0], tuple) else seen
        assert value.dtype == torch.float32


@torch.no_grad()
@pytest.mark.parametrize("activation", ["ReLU", "SiLU"])
def test_hooks_of_all_modules_see_values(activation: str) -> None:
    chained, apart, x = pair("conv", activation)
    outputs: list[list[Tensor]] = []
    for model in (chained, apart):
        seen: list[Tensor] = []
        hook = register_module_forward_hook(lambda *args, to=seen: to.append(args[2].clone()))
        model(x)
        hook.remove()
        outputs.append(seen)
    for actual, expected in zip(*outputs, strict=True):
        assert torch.equal(actual, expected)


class Branching(nn.Module):
    """A module with a value that is read twice, and an activation that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(16, 16) for _ in range(3))
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.first(x))
        z = self.activation(self.second(y))
        result: Tensor = self.third(y + z)
        return result


def test_values_with_other_users_stay_values() -> None:
    x = torch.randn(5, 16)
    model = transforms.quantize(Branching().eval(), [x])
    assert type(model.activation) is FusedActivation
    assert all(
        vars(layer)[int8_chain.FOLLOWER] is None
        for layer in (model.first, model.second, model.third)
    )


class ActivationFirst(nn.Module):
    """A model whose activation has a lower place among its children than the layer before it."""

    def __init__(self) -> None:
        super().__init__()
        self.activation = nn.SiLU()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.activation(self.first(x)))
        return result


@pytest.mark.filterwarnings("ignore:`torch.jit")
@torch.no_grad()
def test_a_refused_script_leaves_the_results() -> None:
    """torch.jit.script comes to the activation before it comes to a layer in INT8."""
    x = torch.randn(5, 16)
    model = transforms.quantize(ActivationFirst().eval())
    expected = model(x)
    with pytest.raises(RuntimeError, match=r"Int8Linear .* scripted: call transforms\.restore"):
        torch.jit.script(model)
    assert torch.equal(model(x), expected)


@torch.no_grad()
def test_copies_pickles_and_autocast() -> None:
    chained, apart, x = pair("linear", "GELU")
    for other in (copy.deepcopy(chained), pickle.loads(pickle.dumps(chained))):
        assert torch.equal(other(x), chained(x))
        assert vars(other[0])[int8_chain.FOLLOWER] is other[2]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert chained(x).dtype == torch.bfloat16
        assert (chained(x) - apart(x)).abs().max() <= step(chained) + apart(x).abs().max() * (
            torch.finfo(torch.bfloat16).eps
        )


@torch.no_grad()
@pytest.mark.parametrize("activation", ["SiLU", "GELU", "ReLU6", "Hardswish"])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_activations_are_applied_once(kind: str, activation: str) -> None:
    chained, _, x = pair(kind, activation)
    compiled = torch.compile(chained, backend="eager")
    expected = chained(x)
    for _ in range(2):
        assert torch.equal(compiled(x), expected)


@passes_codes
@torch.no_grad()
def test_a_follower_that_must_compute_in_floating_point() -> None:
    chained, _, x = pair("linear", "ReLU")
    chained(x)
    chained[2].weight[0, 0] = float("inf")  # has no codes
    plain = transforms.restore(copy.deepcopy(chained))
    assert torch.equal(chained(x).isfinite(), plain(x).isfinite())
    assert isinstance(chained[2], int8.Int8Module)


@torch.no_grad()
def test_dynamic_layers_apply_activations() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).eval()
    quantized = transforms.quantize(model)
    apart, x = copy.deepcopy(quantized), torch.randn(9, 64)
    apart[0].register_forward_hook(lambda *_: None)
    scale = apart[0](x).abs().max().item() / 255
    weight = model[2].weight.abs().sum(1).max().item()
    assert (quantized(x) - apart(x)).abs().max() <= 2 * scale * weight
