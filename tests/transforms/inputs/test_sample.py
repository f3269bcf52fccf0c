"""The output for the sample input is compared, whatever container a model returns it in."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fusedoptim import transforms
from transforms.inputs.sample import Comparison


@dataclasses.dataclass
class Output:
    logits: Tensor
    hidden: list[Tensor]


class Plain:
    def __init__(self, x: Tensor) -> None:
        self.itself, self.logits = self, x


class Slotted:
    __slots__ = ("logits",)

    def __init__(self, x: Tensor) -> None:
        self.logits = x


CONTAINERS: dict[str, Callable[[Tensor], object]] = {
    "tensor": lambda x: x,
    "list": lambda x: [torch.zeros(2), x],
    "nested tuple": lambda x: (None, ("text", (x,))),
    "dict": lambda x: {"zero": torch.zeros(2), "x": x},
    "dataclass": lambda x: Output(torch.zeros(2), [x]),
    "object": lambda x: [Plain(x)],
    "slots": Slotted,
}


class Scaled(nn.Module):
    """Returns its input times ``factor``, as ``kind``, in a container."""

    def __init__(self, container: Callable[[Tensor], object] = lambda x: x) -> None:
        super().__init__()
        self.container, self.factor, self.kind = container, 1.0, torch.float32

    def forward(self, x: Tensor) -> object:
        if self.factor == 0:
            raise ArithmeticError("no factor")
        return self.container((x * self.factor).to(self.kind))


@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
def test_containers(container: Callable[[Tensor], object]) -> None:
    model, x = Scaled(container), torch.randn(3, 2)
    comparison = Comparison(model, x)
    assert comparison.difference() is None
    model.factor = 1 + 1e-6  # rounding
    assert comparison.difference() is None
    model.factor = 1.01
    assert str(comparison.difference()).startswith("the output for sample_input changed by")


def test_other_differences() -> None:
    model = Scaled()
    comparison = Comparison(model, torch.tensor([1.0, torch.nan, torch.inf]))
    assert comparison.difference() is None
    model.kind = torch.float64
    assert comparison.difference() == "the output for sample_input changed its shape or dtype"
    model.factor = 0.0
    assert comparison.difference() == "the model failed with sample_input: no factor"


def test_another_number_of_tensors() -> None:
    model, x = Scaled(lambda x: [x, x]), torch.randn(3, 2)
    comparison = Comparison(model, x)
    model.container = lambda x: [x]
    assert comparison.difference() == "the output for sample_input changed its shape or dtype"
    assert comparison.error_of(Comparison(model, x)) is None
    calls = itertools.count(1)
    model.container = lambda x: [x] * next(calls)
    assert Comparison(model, x).objection() == "changes from call to call (1 of 1 tensors)"


def test_random_numbers_of_other_devices_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []
    for device in (torch.cuda, torch.xpu):
        monkeypatch.setattr(device, "manual_seed_all", seeded.append)
    before = torch.get_rng_state()
    assert Comparison(Scaled(torch.nn.functional.dropout), torch.ones(9)).objection() is None
    assert torch.equal(torch.get_rng_state(), before)
    assert not seeded


def test_a_tensor_without_elements() -> None:
    model = Scaled(lambda x: [x[:0], x])
    comparison = Comparison(model, torch.ones(3, 2))
    assert comparison.difference() is None
    model.factor = 2.0
    assert str(comparison.difference()).startswith("the output for sample_input changed by 1,")


def test_integers() -> None:
    """Rounding alone may change a predicted class where two are equally likely, but not many."""
    model, x = Scaled(lambda x: x.long()), torch.arange(1.0, 201.0)
    comparison = Comparison(model, x)
    model.factor = 2.0
    message = "200 of 200 integers in the output for sample_input changed"
    assert comparison.difference() == message
    assert comparison.error == 1
    model.factor = 1.0
    model.container = lambda x: (x + (x == 3)).long()
    assert comparison.difference() is None
    assert comparison.error == 0.005


def test_only_what_is_the_same_in_each_call_is_compared() -> None:
    steps = itertools.count()
    model = Scaled(lambda x: [x, torch.tensor(next(steps))])
    comparison = Comparison(model, torch.randn(3, 2))
    assert comparison.objection() == "changes from call to call (1 of 2 tensors)"
    assert comparison.difference() is None
    model.factor = 2.0
    assert str(comparison.difference()).startswith("the output for sample_input changed by")
    assert comparison.error == 1
    model.container = lambda x: x + next(steps)
    assert Comparison(model, torch.randn(3, 2)).difference() is None


@pytest.mark.parametrize(
    ("container", "why"),
    [
        (lambda x: x.tolist(), "holds no tensors"),
        (lambda x: x + rand(), "changes from call to call"),
    ],
)
def test_the_report_says_that_nothing_was_compared(
    container: Callable[[Tensor], object], why: str
) -> None:
    ours = transforms.optimize(Scaled(container).eval(), sample_input=torch.randn(3, 2))
    (entry,) = transforms.report(ours).left("sample_input")
    assert entry.what.startswith(f"was not compared: its output {why}")
    assert transforms.report(ours).errors == {}


def rand() -> float:
    """A random number that torch.manual_seed does not repeat."""
    return random.random()


def test_the_report_has_the_error_after_each_pass() -> None:
    class Cancelling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64, bias=False)
            nn.init.eye_(self.linear.weight).data.mul_(1.001)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x) - x
            return y

    model, x = Cancelling().eval(), torch.randn(3, 64)
    ours = transforms.optimize(model, sample_input=x, dtype=torch.bfloat16, weights_prepack=True)
    report = transforms.report(ours)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        cast = ours(x)
    with torch.no_grad():
        plain = model(x)
    expected = (cast.double() - plain.double()).abs().max() / plain.abs().max()
    assert report.errors["dtype"] == pytest.approx(expected.item())
    assert expected > 0.5  # the cast loses all digits here
    assert report.errors["weights_prepack"] < 1e-2
    line = f"relative error of the output for the sample: {expected:.2g} after dtype, "
    assert line in str(report)


def test_the_sample_is_unchanged_by_a_model_that_writes_into_its_input() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.conv(x.mul_(10))
            return y

    x = torch.randn(2, 3, 5, 5)
    before = x.clone()
    transforms.optimize(Writing().eval(), sample_input=x, graph_mode=True)
    assert torch.equal(x, before)
