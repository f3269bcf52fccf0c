"""The output for the sample input is compared, whatever container a model returns it in."""

from __future__ import annotations

import dataclasses
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


CONTAINERS: dict[str, Callable[[Tensor], object]] = {
    "tensor": lambda x: x,
    "list": lambda x: [torch.zeros(2), x],
    "nested tuple": lambda x: (None, ("text", (x,))),
    "dict": lambda x: {"zero": torch.zeros(2), "x": x},
    "dataclass": lambda x: Output(torch.zeros(2), [x]),
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


def test_integers_are_not_compared() -> None:
    """Rounding alone may change a predicted class where two are equally likely."""
    model = Scaled(lambda x: x.long())
    comparison = Comparison(model, torch.tensor([1.0, 2.0]))
    model.factor = 2.0
    assert comparison.difference() is None


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
