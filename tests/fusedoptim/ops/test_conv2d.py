"""The operator of a convolution as a product: values, gradients of any order, tracing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fusedoptim.ops._conv2d import conv2d
from tests.compiling import assert_same_results, needs_compiler, quiet_compiler
from tests.fusedoptim.helpers import assert_within
from tests.tolerances import unit_roundoff

OP = torch.ops.fusedoptim.conv2d.default


class Case(NamedTuple):
    """The shape of an input, and of a weight without its channels."""

    x: tuple[int, int, int, int]
    weight: tuple[int, int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)


CASES = {
    "1x1": Case((3, 17, 4, 5), (9, 1, 1)),
    "1x1, strided": Case((3, 17, 5, 4), (9, 1, 1), (2, 3)),
    "1x1, padded": Case((2, 5, 3, 3), (7, 1, 1), (1, 1), (1, 2)),
    "one pixel": Case((5, 17, 1, 1), (9, 1, 1)),
    "3x3": Case((2, 17, 4, 5), (9, 3, 3), (1, 1), (1, 1)),
    "3x3, unpadded": Case((2, 5, 4, 3), (9, 3, 3)),
    "3x3, strided": Case((2, 17, 5, 6), (9, 3, 3), (2, 2), (1, 1)),
    "3x2": Case((2, 5, 4, 6), (7, 3, 2), (1, 1), (2, 0)),
    "3x3, padded widely": Case((2, 5, 3, 3), (7, 3, 3), (1, 1), (4, 3)),
    "one image, one output": Case((1, 3, 3, 3), (1, 3, 3)),
    "no images": Case((0, 3, 4, 4), (5, 3, 3), (1, 1), (1, 1)),
}
each_case = pytest.mark.parametrize("name", CASES)
each_layout = pytest.mark.parametrize(
    "layout", [torch.channels_last, torch.contiguous_format], ids=["channels last", "first"]
)
each_way = pytest.mark.parametrize("whole", [True, False], ids=["whole", "weight's gradient"])
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(case: Case, *, whole: bool = True) -> Function:
    return lambda x, weight, bias: conv2d(x, weight, bias, case.stride, case.padding, whole=whole)


def torchs(case: Case) -> Function:
    return lambda x, weight, bias: functional.conv2d(x, weight, bias, case.stride, case.padding)


def arguments(
    case: Case,
    dtype: torch.dtype = torch.float32,
    layout: torch.memory_format = torch.channels_last,
) -> tuple[Tensor, Tensor, Tensor]:
    """An input, a weight and a bias, which require gradients."""
    outputs, *taps = case.weight
    weight = torch.randn(outputs, case.x[1], *taps, dtype=dtype).contiguous(memory_format=layout)
    x = torch.randn(case.x, dtype=dtype).contiguous(memory_format=layout)
    bias = torch.randn(outputs, dtype=dtype)
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


def as_float64(given: tuple[Tensor, ...], *, sizes: bool = False) -> tuple[Tensor, ...]:
    wide = (each.detach().double() for each in given)
    return tuple((each.abs() if sizes else each).requires_grad_() for each in wide)


def first_order(given: tuple[Tensor, ...], grad: Tensor, function: Function) -> list[Tensor]:
    """The output and the gradients."""
    x, weight, bias = given
    output = function(x, weight, bias)
    return [output, *torch.autograd.grad(output, given, grad)]


def second_order(given: tuple[Tensor, ...], grad: Tensor, function: Function) -> list[Tensor]:
    """The gradients of a penalty on the gradients of the input and the weight."""
    x, weight, bias = given
    grad = grad.detach().requires_grad_()
    first = torch.autograd.grad(function(x, weight, bias), (x, weight), grad, create_graph=True)
    penalty = torch.stack([each.sum() for each in first]).sum()
    return list(torch.autograd.grad(penalty, (x, weight, grad)))


def assert_as_exact(
    results: Callable[[tuple[Tensor, ...], Tensor, Function], list[Tensor]],
    case: Case,
    given: tuple[Tensor, ...],
    grad: Tensor,
    *,
    whole: bool,
) -> None:
    """A sum of n products is off by at most n + 1 roundings; 16 bits are rounded to once each."""
    found = results(given, grad, ours(case, whole=whole))
    exact = results(as_float64(given), grad.double(), torchs(case))
    magnitudes = results(as_float64(given, sizes=True), grad.double().abs(), torchs(case))
    terms = 4 * (given[0].numel() + given[1].numel() + grad.numel() + 1)
    relative = terms * unit_roundoff(torch.float32)
    if given[0].dtype is not torch.float32:
        relative += 2 * unit_roundoff(given[0].dtype)
    for i, each in enumerate(found):
        assert each.dtype is given[0].dtype
        assert_within(each.detach(), exact[i].detach(), relative * magnitudes[i].detach(), str(i))


@each_way
@each_layout
@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_float64(
    name: str, dtype: torch.dtype, layout: torch.memory_format, whole: bool
) -> None:
    case = CASES[name]
    given = arguments(case, dtype, layout)
    shape = torchs(case)(*arguments(case)).shape
    for grad in (torch.randn(shape, dtype=dtype), torch.randn((), dtype=dtype).expand(shape)):
        assert_as_exact(first_order, case, given, grad, whole=whole)


@each_way
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.x[0]])
def test_second_derivatives_equal_float64(name: str, whole: bool) -> None:
    case = CASES[name]
    given = arguments(case)
    grad = torch.randn_like(torchs(case)(*given))
    assert_as_exact(second_order, case, given, grad, whole=whole)


@each_way
@each_layout
@each_case
def test_output_and_weights_gradient_are_in_channels_last(
    name: str, layout: torch.memory_format, whole: bool
) -> None:
    case = CASES[name]
    given = arguments(case, layout=layout)
    grad = torch.randn_like(torchs(case)(*given))
    output, _, of_weight, _ = first_order(given, grad, ours(case, whole=whole))
    for each in (output, of_weight):
        assert each.is_contiguous(memory_format=torch.channels_last)


@each_way
@each_case
def test_results_are_in_channels_last(name: str, whole: bool) -> None:
    case = CASES[name]
    given = arguments(case)
    output, of_x, of_weight, _ = first_order(
        given, torch.randn_like(torchs(case)(*given)), ours(case, whole=whole)
    )
    for each in (output, of_x, of_weight):
        assert each.is_contiguous(memory_format=torch.channels_last)


@each_way
@pytest.mark.parametrize("index", [0, 1, 2], ids=["input", "weight", "bias"])
@pytest.mark.parametrize("name", ["1x1", "3x3"])
def test_only_one_gradient(name: str, index: int, whole: bool) -> None:
    case = CASES[name]
    given = tuple(each.requires_grad_(i == index) for i, each in enumerate(arguments(case)))
    x, weight, bias = given
    output = ours(case, whole=whole)(x, weight, bias)
    output.sum().backward()  # type: ignore[no-untyped-call]  # untyped in torch
    assert [each.grad is not None for each in given] == [i == index for i in range(3)]
    twin = copy.deepcopy([each.detach() for each in given])
    twin[index].requires_grad_()
    torchs(case)(*twin).sum().backward()  # type: ignore[no-untyped-call]  # untyped in torch
    torch.testing.assert_close(given[index].grad, twin[index].grad)


def test_a_write_before_the_backward_pass_raises() -> None:
    case = CASES["3x3"]
    given = arguments(case)
    output = ours(case)(*given)
    with torch.no_grad():
        given[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()  # type: ignore[no-untyped-call]  # untyped in torch


@each_way
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.x[0] <= 2])
def test_gradcheck(name: str, whole: bool) -> None:
    case = CASES[name]
    small = case._replace(x=(*case.x[:1], 2, *case.x[2:]), weight=(2, *case.weight[1:]))
    given = arguments(small, torch.float64)
    assert torch.autograd.gradcheck(ours(small, whole=whole), given)
    assert torch.autograd.gradgradcheck(ours(small, whole=whole), given)


@each_way
class TestTracing:
    @pytest.mark.parametrize("name", ["1x1, strided", "3x3", "3x3, strided", "no images"])
    def test_opcheck(self, name: str, whole: bool) -> None:
        case = CASES[name]
        x, weight, bias = arguments(case)
        sizes = list(case.stride), list(case.padding)
        torch.library.opcheck(OP, (x, weight, bias, *sizes, whole))
        torch.library.opcheck(OP, (x.detach(), weight.detach(), None, *sizes, whole))

    @needs_compiler
    @quiet_compiler
    def test_compiled_equals_eager(self, whole: bool) -> None:
        case = CASES["3x3"]

        def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return ours(case, whole=whole)(x.sin(), weight, bias) * 2

        torch.compiler.reset()
        compiled = torch.compile(function, fullgraph=True)
        given = arguments(case)
        assert_same_results(compiled(*given), function(*given), given)
