"""Plans agree with float64 for whole models and every kind of product."""

from __future__ import annotations

import copy
import itertools
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
    Squeezed,
    assert_as_eager,
    images,
)
from tests.transforms.helpers import assert_right, exactly, randomise
from tests.transforms.models import FOLDED
from tests.transforms.test_real_models import MODELS
from transforms.rewrites.packed import supported_dtypes

BLOCKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "residual": (Residual, lambda: torch.randn(2, 3, 17, 15)),
    "grouped residual": (lambda: Residual(groups=4), lambda: torch.randn(2, 3, 17, 15)),
    "squeezed": (Squeezed, lambda: torch.randn(33, 24, 9, 11)),
    "encoder": (Encoder, lambda: torch.randn(3, 31, 96)),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST], ids=["contiguous", "last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name: str, dtype: torch.dtype, layout: torch.memory_format) -> None:
    make, inputs = BLOCKS[name]
    x = inputs()
    if x.dim() != 4 and layout is LAST:
        pytest.skip("channels_last is for images")
    model = randomise(make()).to(memory_format=layout)
    ours, x = Compiled(model), x.to(memory_format=layout)
    right = model if dtype == torch.float64 else exactly(model, x, dtype=dtype)
    for _ in range(3):  # the first records, the second computes, the third reuses
        if dtype == torch.float64:
            double = copy.deepcopy(model).double()
            # A function: lightning's torch.compile copies a method's object.
            compiled = torch.compile(double, backend=lambda *given: ours._backend(*given))
            with torch.no_grad():
                assert_as_eager(compiled, double, x.double())
        else:
            assert_right(ours, right, x, dtype=dtype)
    assert ours.is_kept()
    if dtype in supported_dtypes() and (layout is LAST or x.dim() == 3):
        assert ours.counts.packed


def test_what_is_fused() -> None:
    model = randomise(Residual()).to(memory_format=LAST)
    ours, x = Compiled(model), torch.randn(2, 3, 16, 16).to(memory_format=LAST)
    with torch.no_grad():
        ours(x)
        ours(x)
    assert (ours.counts.folded, ours.counts.packed, ours.counts.additions) == (1, 4, 2)
    block, ours = randomise(Encoder()), None
    ours = Compiled(block)
    with torch.no_grad():
        ours(torch.randn(3, 31, 96))
    # GELU, both residuals over the Linears' results, and positions computed once.
    assert (ours.counts.packed, ours.counts.activations) == (3, 1)
    assert ours.counts.in_place == 2
    assert ours.counts.constants == 3 + 1


@pytest.mark.parametrize("kind", FOLDED)
def test_products_before_batch_norms(kind: str) -> None:
    layers, shape = FOLDED[kind]
    model = randomise(nn.Sequential(*layers()))
    ours = Compiled(model)
    for _ in range(2):
        assert_right(ours, model, torch.randn(shape))
    assert ours.counts.folded == 1


def test_batch_norm_called_with_keywords() -> None:
    class Normal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32)

        def forward(self, x: Tensor) -> Tensor:
            norm, y = self.norm, self.conv(x)
            of = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
            options = {"training": False, "momentum": 0.1, "cudnn_enabled": False}
            return torch.batch_norm(y, *of, eps=norm.eps, **options)

    model = randomise(Normal())
    ours = Compiled(model)
    for _ in range(2):
        assert_right(ours, model, torch.randn(2, 3, 9, 9))
    assert ours.counts.folded == 1


PRODUCTS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(257, 515), lambda: torch.randn(65, 257)),
    "linear-3d": (lambda: nn.Linear(129, 515, bias=False), lambda: torch.randn(2, 33, 129)),
    "linear-vector": (lambda: nn.Linear(1025, 1030), lambda: torch.randn(1025)),
    "linear-strided": (lambda: nn.Linear(257, 515), lambda: torch.randn(257, 65).t()),
    "linear-expanded": (lambda: nn.Linear(257, 515), lambda: torch.randn(257).expand(4, 65, 257)),
    "conv1d": (lambda: nn.Conv1d(3, 17, 3), lambda: torch.randn(2, 3, 19)),
    "conv2d": (lambda: nn.Conv2d(3, 17, 3), lambda: images(2, 3, 9, 11)),
    "conv2d-strided": (
        lambda: nn.Conv2d(4, 6, (3, 2), (2, 3), (1, 2), (2, 1)),
        lambda: images(2, 4, 15, 9),
    ),
    "conv2d-groups": (lambda: nn.Conv2d(12, 18, 3, groups=3), lambda: images(1, 12, 9, 9)),
    "conv2d-deep": (lambda: nn.Conv2d(33, 33, 5, groups=33), lambda: images(1, 33, 9, 9)),
    "conv2d-reflect": (
        lambda: nn.Conv2d(3, 5, 3, padding=1, padding_mode="reflect"),
        lambda: images(1, 3, 9, 9),
    ),
    "conv2d-same": (lambda: nn.Conv2d(3, 5, 3, padding="same"), lambda: images(1, 3, 9, 9)),
    "conv2d-one-image": (lambda: nn.Conv2d(3, 17, 3), lambda: torch.randn(3, 9, 11)),
    "conv3d": (lambda: nn.Conv3d(3, 5, 3, padding=1), lambda: images(1, 3, 5, 6, 7)),
    "transposed": (lambda: nn.ConvTranspose2d(6, 4, 3, 2, 1, 1), lambda: images(2, 6, 5, 7)),
    "transposed-padded": (
        lambda: nn.ConvTranspose2d(6, 4, 3, output_padding=1, dilation=2),
        lambda: images(2, 6, 5, 5),
    ),
    "transposed-wide": (
        lambda: nn.ConvTranspose2d(16, 16, 3, stride=2, padding=1),
        lambda: images(2, 16, 12, 12),
    ),
    "transposed-deep": (
        lambda: nn.ConvTranspose2d(4, 4, 3, padding=1, groups=4),
        lambda: images(2, 4, 12, 12),
    ),
    "transposed-groups": (
        lambda: nn.ConvTranspose2d(6, 4, 3, groups=2, dilation=2),
        lambda: images(2, 6, 5, 5),
    ),
}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "relu in place": lambda x: F.relu(x, inplace=True),
    "relu6": F.relu6,
    "hardtanh": lambda x: F.hardtanh(x, -0.3, 0.2),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.3),
    "leaky_relu of 0": lambda x: F.leaky_relu(x, 0.0),
    "sigmoid": torch.sigmoid,
    "tanh": Tensor.tanh,
    "elu": F.elu,
    "softplus": F.softplus,
    "added to itself": lambda x: x + x,
    "half of it": lambda x: 0.5 * x,
    "negative": lambda x: 1 - x,
}


class Activated(nn.Module):
    def __init__(self, product: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.product = product
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.product(x))


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@pytest.mark.parametrize("name", PRODUCTS)
def test_every_product(name: str) -> None:
    make, inputs = PRODUCTS[name]
    for function in ("none", "gelu tanh", "half of it"):
        model = Activated(make(), ACTIVATIONS[function]).eval()
        ours, x = Compiled(model), inputs()
        right = exactly(model, x)
        for _ in range(2):
            assert_right(ours, right, x)
            with torch.no_grad():
                assert_as_eager(ours, model, x)


@pytest.mark.parametrize(
    "name",
    [
        *("linear", "conv2d", "conv2d-deep", "conv3d"),
        *("transposed", "transposed-wide", "transposed-deep"),
    ],
)
def test_every_activation_of_nan_and_infinity(name: str) -> None:
    make, inputs = PRODUCTS[name]
    x = torch.cat([inputs() for _ in range(4)])
    special = x.clone()
    for i, number in enumerate((float("nan"), float("inf"), -float("inf"))):
        special[i].select(0, 0).fill_(number)
    for label, function in ACTIVATIONS.items():
        model = Activated(make(), function).eval()
        if x.dim() == 4:
            model.to(memory_format=LAST)
        torch.compiler.reset()  # beyond a number of models of a class, dynamo captures no more
        ours = Compiled(model)
        with torch.no_grad():
            for _ in range(2):
                assert_as_eager(ours, model, x)
                assert_as_eager(ours, model, special), label
        assert ours.plans, label


@pytest.mark.parametrize("name", ["ResNet", "MobileNetV2", "BERT", "GPT-2", "LeViT", "DLRM"])
def test_real_models(name: str) -> None:
    case = MODELS[name]
    model, inputs = randomise(case.make()), case.inputs()
    ours, right = Compiled(model), exactly(model, **inputs)
    for _ in range(2):
        assert_right(ours, right, **inputs)
    assert ours.is_kept()


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_other_shapes_ranks_and_dtypes(dynamic: bool | None) -> None:
    model = randomise(Residual()).to(memory_format=LAST)
    ours = Compiled(model, dynamic=dynamic)
    with torch.no_grad():
        for size in (9, 9, 12, 9, 12, 12, 30, 1):
            assert_as_eager(ours, model, images(2, 3, size, size))
        assert_as_eager(ours, model, torch.randn(0, 3, 9, 9))
    linear = nn.Linear(257, 515).eval()
    ours = Compiled(linear, dynamic=dynamic)
    with torch.no_grad():
        for shape in ((65, 257), (3, 257), (2, 65, 257), (257,), (0, 257), (66, 257), (1, 257)):
            assert_as_eager(ours, linear, torch.randn(shape))
        assert_as_eager(ours, linear.double(), torch.randn(65, 257).double())


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_view_of_any_size_given_to_a_function_that_may_write(dynamic: bool | None) -> None:
    """The size is an input of the graph, as the tensor is, but has no memory to write into."""

    def spectrum(x: Tensor) -> Tensor:
        return torch.fft.rfft(x.view(x.shape[0], 2, 4)).abs()

    ours = Compiled(spectrum, dynamic=dynamic)
    with torch.no_grad():
        for rows in (4, 5, 6, 4):
            assert_as_eager(ours, spectrum, torch.randn(rows, 8))
    assert ours.plans


def test_shapes_in_turn_are_laid_out_ever_less_often() -> None:
    ours = Compiled(randomise(Residual()).to(memory_format=LAST), dynamic=True)
    inputs, keys = [images(2, 3, size, size) for size in (9, 12)], []
    with torch.no_grad():
        for _ in range(16):
            for x in (inputs[0], inputs[0], inputs[1], inputs[1]):
                ours(x)
                (plan,) = ours.plans
                keys.append(plan._laid_out and plan._laid_out.key)
    assert 1 < sum(a != b for a, b in itertools.pairwise(keys)) < 7  # of 31


class Gpt(nn.Module):
    """``torch.addmm`` with a matrix of columns, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(257, 515)), nn.Parameter(torch.randn(515))

    def forward(self, x: Any) -> Any:
        return torch.addmm(self.bias, x, self.weight)


def test_addmm() -> None:
    model = Gpt()
    ours = Compiled(model)
    assert_right(ours, model, torch.randn(65, 257))
    assert ours.counts.packed == 1
