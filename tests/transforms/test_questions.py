"""Where forward asks a layer what it is, the layer keeps its class, and forward does the same."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusedoptim import FusedSGD, transforms
from tests.transforms.asking_models import ASKING, Layers, Plain, PlainUntraceable
from tests.transforms.helpers import assert_right, randomise, tensors

ASKERS = pytest.mark.parametrize("make", ASKING, ids=lambda make: make.__name__)


def images() -> Tensor:
    return torch.randn(2, 3, 8, 8)


QUESTION = "depends on its class or tensors|may ask what"
NOTHING_LEFT = {"HasType", "UntraceableList", "HasModule", "UntraceableGenerator", "Exits"}
"""The models whose convolutions and Linears are all asked."""


class TestAnswersStay:
    @ASKERS
    def test_in_inference(self, make: Callable[[], nn.Module]) -> None:
        model, x = randomise(make()), images()
        optimized = transforms.optimize(model)
        assert_right(optimized, model, x)
        if make.__name__ == "DidNotRun":
            assert_right(optimized, model, [x])

    @ASKERS
    def test_in_graph_mode(self, make: Callable[[], nn.Module]) -> None:
        model = randomise(make())
        assert_right(transforms.optimize(model, graph_mode=True), model, images())

    @ASKERS
    def test_with_a_sample(self, make: Callable[[], nn.Module]) -> None:
        model, x = randomise(make()), images()
        assert_right(transforms.optimize(model, sample_input=x), model, x)

    @ASKERS
    def test_in_training_and_then_in_inference(self, make: Callable[[], nn.Module]) -> None:
        model = randomise(make()).train()
        optimized, _ = transforms.optimize(model, torch.optim.SGD(model.parameters()))
        assert_right(optimized.eval(), model.eval(), images())
        assert_right(transforms.optimize(optimized), model, images())

    @ASKERS
    def test_in_int8(self, make: Callable[[], nn.Module]) -> None:
        model, x = randomise(make()), images()
        loader: Any = [[x]] if make.__name__ == "DidNotRun" else [x]
        if make.__name__ in NOTHING_LEFT:
            with pytest.raises(ValueError, match=QUESTION):
                transforms.quantize(model, loader)
            return
        quantized = transforms.quantize(model, loader)
        with torch.no_grad():
            pairs = list(zip(tensors(quantized(x)), tensors(model(x)), strict=True))
        # Another answer changes their number, or doubles them; rounding does much less.
        assert all((a - b).norm() < b.norm() / 4 for a, b in pairs)


def left_for_a_question(model: nn.Module) -> list[str]:
    report = transforms.report(model)
    entries = [entry for knob in report.passes for entry in report.left(knob)]
    return [entry.where for entry in entries if re.search(QUESTION, entry.what)]


class TestOthersAreRewritten:
    @pytest.mark.parametrize("make", [Plain, PlainUntraceable])
    def test_where_nothing_is_asked(self, make: Callable[[], nn.Module]) -> None:
        optimized = transforms.optimize(randomise(make()))
        report = transforms.report(optimized)
        assert not left_for_a_question(optimized)
        knobs = ("conv_bn_folding", "fuse") if make is Plain else ()
        for knob in (*knobs, "replace_dropout_with_identity", "weights_prepack"):
            assert report.done(knob), knob

    def test_only_layers_of_the_kind_that_is_asked_for_are_left(self) -> None:
        class Model(Layers):
            def forward(self, x: Tensor) -> Any:
                y = self.layers(x)
                return y * 2 if isinstance(self.layers[3], nn.Dropout) else y

        optimized = transforms.optimize(randomise(Model()))
        assert set(left_for_a_question(optimized)) == {"layers.3"}

    def test_subclasses_pass_for_their_base(self) -> None:
        """A packed convolution is a Conv2d, so ``isinstance`` leaves it packed."""

        class Model(Layers):
            def asks(self, layer: nn.Module) -> bool:
                return isinstance(layer, nn.Conv2d)

        optimized = transforms.optimize(randomise(Model()))
        assert not left_for_a_question(optimized)


class TestTensorsThatForwardMakes:
    """They are compared between traces, where they can be."""

    @pytest.mark.filterwarnings("ignore:.*are deprecated and will be removed")
    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8).dequantize(),
            lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8).q_scale(),
            lambda: torch.ones(2, dtype=torch.complex64).conj().real.sum(),
            lambda: torch.ones(2, dtype=torch.complex64).conj().imag.sum(),
            lambda: torch.ones(2, 2).to_sparse().to_dense().sum(),
            lambda: torch.tensor(float("nan")).nan_to_num(),
            lambda: torch.ones(2, dtype=torch.bfloat16).sum().float(),
        ],
    )
    def test_of_every_kind(self, make: Callable[[], Any]) -> None:
        class Model(Plain):
            def forward(self, x: Tensor, scale: float | None = None) -> Any:
                return self.layers(x).sum() * made(make).sum()

        model = randomise(Model())
        optimized = transforms.optimize(model)
        assert not left_for_a_question(optimized)
        assert_right(optimized, model, images())

    @pytest.mark.filterwarnings("ignore:.*are deprecated and will be removed", "ignore:.*nested")
    @pytest.mark.parametrize("kind", ["quantized", "conjugate", "nested", "meta"])
    def test_returned(self, kind: str) -> None:
        tensors = {
            "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
            "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
            "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "meta": torch.ones(2, device="meta"),
        }

        class Model(Plain):
            def forward(self, x: Tensor, scale: float | None = None) -> Any:
                return self.layers(x), tensors[kind]

        model, x = randomise(Model()), images()
        assert transforms.report(transforms.optimize(model)).done("weights_prepack")
        assert transforms.optimize(model)(x)[1] is tensors[kind]


def made(make: Callable[[], Any]) -> Tensor:
    return torch.as_tensor(make())


class Registered(nn.Conv2d):
    """A class whose subclasses need an argument."""

    def __init_subclass__(cls, name: str, **kwargs: Any) -> None:
        raise AssertionError(f"{name} is no subclass of the user's")


def test_users_classes_get_no_subclasses() -> None:
    model = randomise(nn.Sequential(Registered(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU()))
    assert_right(transforms.optimize(model), model, images())


class TestTracesLeaveNoMark:
    def test_random_numbers(self) -> None:
        """Forward draws random numbers while it is traced; the user's sequences go on as before."""

        class Model(Plain):
            def forward(self, x: Tensor, scale: float | None = None) -> Any:
                return self.layers(x) * random.random() + torch.rand(1)

        def next_numbers() -> tuple[float, float]:
            return random.random(), torch.rand(()).item()

        model = Model().train()
        optimizer = FusedSGD(model.parameters(), lr=0.1)
        states = random.getstate(), torch.get_rng_state()
        expected = next_numbers()
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        transforms.optimize(model, optimizer)
        assert next_numbers() == expected

    def test_nothing_is_kept_of_a_question(self) -> None:
        model = randomise(ASKING[0]())
        keys = {name: set(vars(m)) for name, m in model.named_modules()}
        kinds = [type(m) for m in model.modules()]
        transforms.restore(transforms.optimize(model, inplace=True))
        assert {name: set(vars(m)) for name, m in model.named_modules()} == keys
        assert [type(m) for m in model.modules()] == kinds
