"""The operator of a Linear's product by oneDNN: values, gradients of any order, tracing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fusedoptim.ops import _linear
from fusedoptim.ops._linear import linear
from tests.compiling import assert_same_results, needs_compiler, quiet_compiler
from tests.fusedoptim.helpers import assert_within
from tests.tolerances import unit_roundoff

OP = torch.ops.fusedoptim.linear.default
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "wide": ((33, 40), 70),
    "narrow": ((33, 70), 40),
    "square": ((17, 17), 17),
    "4-d": ((2, 3, 5, 40), 70),
    "one row": ((1, 40), 70),
    "one output": ((33, 40), 1),
    "one input": ((33, 1), 40),
    "no rows": ((0, 40), 70),
    "no inputs": ((33, 0), 70),
    "no outputs": ((33, 40), 0),
}
each_shape = pytest.mark.parametrize("shape", SHAPES)
each_weight = pytest.mark.parametrize("is_transposed", [False, True], ids=["plain", "transposed"])


@pytest.fixture(autouse=True)
def _small_gradients_by_onednn_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_linear, "LEAST_COLUMNS", 1)


def arguments(shape: str, is_transposed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """An input, a weight and a bias, which require gradients."""
    inputs, outputs = SHAPES[shape]
    weight = torch.randn(outputs, inputs[-1])
    if is_transposed:
        weight = weight.t().contiguous().t()
    tensors = torch.randn(inputs), weight, torch.randn(outputs)
    return tensors[0].requires_grad_(), tensors[1].requires_grad_(), tensors[2].requires_grad_()


def results(given: tuple[Tensor, ...], grad: Tensor, function: object) -> list[Tensor]:
    """The output, the gradients, and the gradients of a penalty on the gradients."""
    assert callable(function)
    output = function(*given)
    first = torch.autograd.grad(output, given, grad, create_graph=True)
    penalty = torch.stack([each.sum() for each in first]).sum()
    second = torch.autograd.grad(penalty, given[:2], create_graph=True)
    return [output, *first, *second]


def strides(tensor: Tensor) -> list[int]:
    """The strides that matter: those of dimensions with more than one element."""
    pairs = zip(tensor.shape, tensor.stride())
    return [stride for size, stride in pairs if size > 1 and tensor.numel()]


@each_weight
@each_shape
def test_equals_float64_with_torchs_strides(shape: str, is_transposed: bool) -> None:
    """A sum of n products is off by at most n + 1 roundings of its terms' magnitudes."""
    given = arguments(shape, is_transposed)
    output = functional.linear(*given)
    for grad in (torch.randn(output.shape), torch.randn(()).expand(output.shape)):
        ours = results(given, grad, linear)
        theirs = results(given, grad, functional.linear)
        wide = tuple(each.detach().double().requires_grad_() for each in given)
        sizes = tuple(each.detach().double().abs().requires_grad_() for each in given)
        exact = results(wide, grad.double(), functional.linear)
        magnitudes = results(sizes, grad.double().abs(), functional.linear)
        # All of a penalty's terms are sums of sums of products.
        terms = 2 * (sum(given[0].shape) + given[1].numel() + grad.numel() + 1)
        relative = terms * unit_roundoff(torch.float32)
        for i, (each, other) in enumerate(zip(ours, theirs)):
            assert i > len(given) or strides(each) == strides(other)
            assert_within(each.detach(), exact[i].detach(), relative * magnitudes[i], str(i))


@pytest.mark.filterwarnings("ignore:Input #:UserWarning")  # that it is not float64
@each_weight
def test_gradcheck(is_transposed: bool) -> None:
    """The product is linear in each argument: a large step has the exact difference."""
    weight = torch.randn(5, 4)
    if is_transposed:
        weight = weight.t().contiguous().t()
    given = tuple(each.requires_grad_() for each in (torch.randn(3, 4), weight, torch.randn(5)))
    bounds = {"eps": 0.5, "atol": 64 * unit_roundoff(torch.float32), "rtol": 0.0}
    assert torch.autograd.gradcheck(linear, given, **bounds)
    assert torch.autograd.gradgradcheck(linear, given, **bounds)


def test_bias_of_any_strides() -> None:
    """A bias may have strides, although oneDNN's operator reads it as contiguous."""
    x, weight, _ = arguments("wide")
    for bias in (torch.randn(140)[::2], torch.randn(1).expand(70)):
        torch.testing.assert_close(linear(x, weight, bias), functional.linear(x, weight, bias))


@pytest.mark.parametrize("needed", [(True, False), (False, True)], ids=["input", "weight"])
def test_keeps_only_what_gradients_need(needed: tuple[bool, bool]) -> None:
    x, weight, _ = arguments("wide")
    x.requires_grad_(needed[0])
    weight.requires_grad_(needed[1])
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        output = linear(x, weight, None)
    (one,) = kept
    assert one is (weight if needed[0] else x)
    output.sum().backward()  # type: ignore[no-untyped-call]  # untyped in torch
    assert [x.grad is not None, weight.grad is not None] == list(needed)


def test_a_write_before_the_backward_pass_raises() -> None:
    x, weight, bias = arguments("wide")
    output = linear(x, weight, bias)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()  # type: ignore[no-untyped-call]  # untyped in torch


class TestTracing:
    @each_weight
    @pytest.mark.parametrize("shape", ["wide", "narrow", "4-d", "no rows"])
    def test_opcheck(self, shape: str, is_transposed: bool) -> None:
        x, weight, bias = arguments(shape, is_transposed)
        torch.library.opcheck(OP, (x, weight, bias))
        torch.library.opcheck(OP, (x.detach(), weight.detach(), None))

    @needs_compiler
    @quiet_compiler
    @pytest.mark.parametrize(
        ("dynamic", "shapes"),
        [(False, ["narrow"]), (True, ["wide", "narrow"])],
        ids=["static", "dynamic"],
    )
    def test_compiled_equals_eager(self, dynamic: bool, shapes: list[str]) -> None:
        def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return linear(x.sin(), weight.t().contiguous().t(), bias) * 2

        torch.compiler.reset()
        compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
        for shape in shapes:
            given = arguments(shape)
            assert_same_results(compiled(*given), function(*given), given)
