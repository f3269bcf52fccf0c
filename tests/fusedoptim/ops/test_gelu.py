"""The operator gelu_tanh: values, gradients, tracing, errors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fusedoptim.ops import gelu_tanh
from tests.compiling import needs_compiler, quiet_compiler
from tests.fusedoptim.helpers import assert_within
from tests.optimizer_cases import FLOATS
from tests.running import at_each_thread_count
from tests.tolerances import CHUNK, gelu_errors

OP = torch.ops.fusedoptim.gelu_tanh.default


def layouts() -> dict[str, Tensor]:
    """Tensors of all kinds of strides."""
    return {
        "chunks": 3 * torch.randn(2 * CHUNK + 77),
        "channels_last": torch.randn(2, 8, 5, 7).to(memory_format=torch.channels_last),
        "strided": torch.randn(20, 30)[:, ::2],
        "expanded": torch.randn(20, 1).expand(20, 30),
        "offset": torch.randn(101)[1:],
        "scalar": torch.randn(()),
        "empty": torch.randn(0, 3),
    }


def exact(x: Tensor) -> Tensor:
    """GELU without the cancellation of 1 + tanh."""
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


class TestValues:
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("layout", layouts())
    def test_value_and_gradient(self, layout: str, dtype: torch.dtype) -> None:
        x = layouts()[layout].to(dtype)
        wide = x.double().requires_grad_()
        expected, y = exact(wide), gelu_tanh(x.requires_grad_())
        of_value, of_slope = gelu_errors(wide.detach(), dtype)
        assert (y.dtype, y.stride()) == (dtype, torch.empty_like(x).stride())
        assert_within(y.detach(), expected.detach(), of_value, "value")
        for grad in (torch.ones_like(y), torch.ones(()).to(dtype).expand(y.shape)):
            (ours,) = torch.autograd.grad(y, x, grad, retain_graph=True)
            (theirs,) = torch.autograd.grad(expected, wide, grad.double(), retain_graph=True)
            assert ours.dtype == dtype
            assert_within(ours, theirs, of_slope, "gradient")

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_far_from_zero(self, dtype: torch.dtype) -> None:
        """Values and slopes are right where the exponential overflows or vanishes."""
        x = torch.tensor([-200.0, -30.0, -12.0, 12.0, 30.0, 200.0]).to(dtype).requires_grad_()
        y = gelu_tanh(x)
        (slope,) = torch.autograd.grad(y.sum(), x)
        positive = (x > 0).to(dtype)
        torch.testing.assert_close(y, x * positive)
        torch.testing.assert_close(slope, positive)

    def test_infinity_and_nan_as_torchs(self) -> None:
        x = torch.tensor([math.inf, -math.inf, math.nan])
        expected = functional.gelu(x, approximate="tanh")
        torch.testing.assert_close(gelu_tanh(x), expected, equal_nan=True)

    def test_inputs_are_only_read(self) -> None:
        x = torch.randn(100, requires_grad=True)
        grad, before = torch.randn(100), x.detach().clone()
        torch.autograd.grad(gelu_tanh(x), x, grad)
        assert torch.equal(x, before)


def test_the_same_bits_whatever_the_number_of_threads() -> None:
    x = torch.linspace(-9, 9, 300_000)
    first, *others = at_each_thread_count(lambda: gelu_tanh(x))
    assert all(torch.equal(first, other) for other in others)


def test_gradcheck() -> None:
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(gelu_tanh, x)
    assert torch.autograd.gradgradcheck(gelu_tanh, x)


class TestTracing:
    @pytest.mark.parametrize(
        ("layout", "dtype"),
        [
            *((layout, torch.float32) for layout in ("strided", "expanded", "empty")),
            *(("channels_last", dtype) for dtype in FLOATS),
        ],
    )
    def test_opcheck(self, layout: str, dtype: torch.dtype) -> None:
        x = layouts()[layout].to(dtype)
        grad = torch.randn_like(x)
        torch.library.opcheck(torch.ops.fusedoptim.gelu_tanh_backward.default, (x, grad))
        for value in (x.detach(), x.requires_grad_()):
            torch.library.opcheck(OP, (value,))

    @needs_compiler
    @quiet_compiler
    def test_compiled_equals_eager(self) -> None:
        def function(x: Tensor) -> Tensor:
            return gelu_tanh(x.sin()) * 2

        compiled = torch.compile(function, fullgraph=True, dynamic=True)
        for size in (9, 11):
            x = torch.randn(size, 30, requires_grad=True)
            ours, expected = compiled(x), function(x)
            torch.testing.assert_close(ours, expected)
            gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (ours, expected)]
            torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_dtypes_that_no_kernel_computes_with(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"x has dtype {dtype}, and kernels compute with float"):
        gelu_tanh(torch.ones(3, dtype=dtype))
