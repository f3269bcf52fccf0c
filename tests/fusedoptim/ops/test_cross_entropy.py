"""The operator cross_entropy: values, gradients, tracing, errors."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fusedoptim.ops import cross_entropy
from tests.compiling import needs_compiler, quiet_compiler
from tests.fusedoptim.helpers import assert_within
from tests.optimizer_cases import FLOATS
from tests.running import at_each_thread_count
from tests.tolerances import cross_entropy_errors

OP = torch.ops.fusedoptim.cross_entropy.default
SHAPES = [(3, 1), (2, 15), (2, 16), (5, 17), (300, 33), (4, 1000), (2, 32 * 1024 + 3), (1, 50257)]


def inputs(rows: int, classes: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return (3 * torch.randn(rows, classes)).to(dtype), torch.randint(classes, (rows,))


def losses(logits: Tensor, target: Tensor, smoothing: float = 0.0) -> Tensor:
    return functional.cross_entropy(
        logits.double(), target, reduction="none", label_smoothing=smoothing
    )


def gradient(loss: Tensor, logits: Tensor, **kwargs: Any) -> Tensor:
    (grad,) = torch.autograd.grad(loss.sum(), logits, **kwargs)
    return grad


class TestValues:
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
    def test_loss_and_gradient(
        self, shape: tuple[int, int], dtype: torch.dtype, smoothing: float
    ) -> None:
        logits, target = inputs(*shape, dtype)
        exact = logits.double().requires_grad_()
        expected = losses(exact, target, smoothing)
        logits.requires_grad_()
        loss, log_sum = cross_entropy(logits, target, smoothing)
        allowed, of_gradient = cross_entropy_errors(exact.detach(), target, smoothing, dtype)
        assert loss.dtype == torch.promote_types(dtype, torch.float32)
        assert_within(loss, expected.detach(), allowed, "loss")
        bound = allowed + exact.detach().abs().max() * torch.finfo(loss.dtype).eps
        assert_within(log_sum, torch.logsumexp(exact.detach(), 1), bound, "log_sum")
        grad = gradient(loss, logits)
        assert grad.dtype == dtype
        assert_within(grad, gradient(expected, exact), of_gradient, "gradient")

    def test_ignored_rows(self) -> None:
        logits, target = inputs(64, 100)
        target[::3] = -100
        logits.requires_grad_()
        loss, _ = cross_entropy(logits, target)
        assert not loss[::3].any()
        assert (loss[1::3] > 0).all()
        grad = gradient(loss, logits)
        assert not grad[::3].any()
        assert grad[1::3].any(1).all()
        other, _ = cross_entropy(logits, torch.where(target == -100, 7, target), 0.0, 7)
        assert torch.equal(other[::3], loss[::3])

    def test_masked_infinite_and_nan_logits_as_torchs(self) -> None:
        logits, target = inputs(6, 50)
        logits[0, 3:] = -math.inf  # masked classes
        target[0] = 1
        logits[1] = -math.inf
        logits[2, 5] = math.inf
        logits[3, 7] = math.nan
        target[4] = 4
        logits[4, 4] = -math.inf
        expected = losses(logits, target).float()
        torch.testing.assert_close(cross_entropy(logits, target)[0], expected, equal_nan=True)
        exact = logits.double().requires_grad_()
        right = gradient(losses(exact, target), exact).float()
        logits.requires_grad_()
        grad = gradient(cross_entropy(logits, target)[0], logits)
        torch.testing.assert_close(grad, right, equal_nan=True)

    def test_large_logits_do_not_overflow(self) -> None:
        logits, target = inputs(4, 100)
        shifted = cross_entropy(logits + 1e4, target)[0]
        torch.testing.assert_close(shifted, losses(logits + 1e4, target).float())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_an_offset_of_all_logits_costs_smoothing_no_bits(self, dtype: torch.dtype) -> None:
        classes = 1 << 20
        logits = torch.randint(-300, 300, (2, classes)).to(dtype) / 64  # exact with the offset too
        target = torch.randint(classes, (2,))
        expected = losses(logits, target, 0.1)
        allowed, _ = cross_entropy_errors(logits.double(), target, 0.1, dtype)
        for offset in (0, 1000, 10_000, -10_000):
            loss, _ = cross_entropy(logits + offset, target, 0.1)
            assert_within(loss, expected, allowed, f"loss with offset {offset}")

    @pytest.mark.parametrize("smoothing", [0.1, 1.0])
    def test_infinite_logits_with_smoothing_as_torchs(self, smoothing: float) -> None:
        logits, target = inputs(5, 50)
        logits[:4, 3:] = -math.inf  # masked classes
        target[:2], target[2:4] = 1, 40
        logits[4, 7] = math.inf
        expected = losses(logits, target, smoothing).float()
        loss, _ = cross_entropy(logits, target, smoothing)
        torch.testing.assert_close(loss, expected, equal_nan=True)

    @pytest.mark.parametrize("how", ["transposed", "strided", "offset"])
    def test_strides(self, how: str) -> None:
        logits, target = inputs(40, 40)
        made = {"transposed": logits.t(), "strided": logits[:, ::2], "offset": logits[3:, 1:]}[how]
        target = target[: len(made)] % made.shape[1]
        made.requires_grad_()
        loss, _ = cross_entropy(made, target)
        plain = made.detach().contiguous().requires_grad_()
        expected, _ = cross_entropy(plain, target)
        assert torch.equal(loss, expected)
        assert torch.equal(gradient(loss, made), gradient(expected, plain))

    def test_no_rows(self) -> None:
        logits = torch.empty(0, 5, requires_grad=True)
        loss, _ = cross_entropy(logits, torch.empty(0, dtype=torch.int64))
        assert loss.shape == (0,)
        assert gradient(loss, logits).shape == (0, 5)

    def test_inputs_are_only_read(self) -> None:
        logits, target = inputs(9, 70)
        before = logits.clone(), target.clone()
        logits.requires_grad_()
        gradient(cross_entropy(logits, target, 0.1)[0], logits)
        assert torch.equal(logits, before[0])
        assert torch.equal(target, before[1])


def test_the_same_bits_whatever_the_number_of_threads() -> None:
    logits, target = inputs(300, 5000)
    logits.requires_grad_()

    def call() -> tuple[Tensor, Tensor]:
        loss, _ = cross_entropy(logits, target)
        return loss, gradient(loss, logits)

    first, *others = at_each_thread_count(call)
    for other in others:
        assert torch.equal(first[0], other[0])
        assert torch.equal(first[1], other[1])


class TestGradient:
    @pytest.mark.parametrize("smoothing", [0.0, 0.2])
    def test_gradcheck(self, smoothing: float) -> None:
        """Second derivatives are checked too, which come from torch's operations."""
        logits, target = inputs(5, 19, torch.float64)
        target[1] = -100
        logits.requires_grad_()

        def function(logits: Tensor) -> Tensor:
            return cross_entropy(logits, target, smoothing)[0]

        assert torch.autograd.gradcheck(function, logits)
        assert torch.autograd.gradgradcheck(function, logits)

    def test_no_probabilities_are_kept(self) -> None:
        kept: list[Tensor] = []
        logits, target = inputs(50, 70)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
        ):
            cross_entropy(logits.requires_grad_(), target)
        assert sorted(tensor.numel() for tensor in kept) == [50, 50, 50 * 70]
        assert sum(tensor.data_ptr() == logits.data_ptr() for tensor in kept) == 1


class TestTracing:
    @pytest.mark.parametrize(
        ("rows", "dtype"), [(0, torch.float32), *((12, dtype) for dtype in FLOATS)]
    )
    def test_opcheck(self, rows: int, dtype: torch.dtype) -> None:
        logits, target = inputs(rows, 20, dtype)
        for value in (logits.detach(), logits.requires_grad_()):
            torch.library.opcheck(OP, (value, target, 0.1, -100))

    @needs_compiler
    @quiet_compiler
    @pytest.mark.parametrize(("dynamic", "backend"), [(False, "aot_eager"), (True, "inductor")])
    def test_compiled_equals_eager(self, dynamic: bool, backend: str) -> None:
        def function(logits: Tensor, target: Tensor) -> Tensor:
            return cross_entropy(logits * 2, target)[0].mean()

        compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)
        for rows in (9, 11) if dynamic else (9,):
            logits, target = inputs(rows, 300)
            logits.requires_grad_()
            ours, expected = compiled(logits, target), function(logits, target)
            torch.testing.assert_close(ours, expected)
            torch.testing.assert_close(gradient(ours, logits), gradient(expected, logits))


class TestBadInput:
    def test_classes(self) -> None:
        logits, target = inputs(8, 5)
        for wrong in (5, -1, 2**62):
            target[3] = wrong
            with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds: there are 5"):
                cross_entropy(logits, target)

    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
    def test_dtype(self, dtype: torch.dtype) -> None:
        with pytest.raises(TypeError, match=f"logits have dtype {dtype}, and kernels compute"):
            cross_entropy(torch.ones(3, 4, dtype=dtype), torch.zeros(3, dtype=torch.int64))

    def test_target(self) -> None:
        logits, target = inputs(8, 5)
        with pytest.raises(TypeError, match=r"target has dtype torch.int32; pass class indices"):
            cross_entropy(logits, target.int())
        for wrong in (target[1:], target[None]):
            with pytest.raises(ValueError, match=re.escape(f"has {tuple(wrong.shape)}; pass (N,")):
                cross_entropy(logits, wrong)
        with pytest.raises(ValueError, match=r"shape \(8, 0\) and target"):
            cross_entropy(logits[:, :0], target)
        with pytest.raises(ValueError, match="target is on meta; move it to cpu"):
            cross_entropy(logits, target.to("meta"))

    @pytest.mark.parametrize("smoothing", [-0.1, 1.1, math.nan])
    def test_smoothing(self, smoothing: float) -> None:
        with pytest.raises(ValueError, match=f"label_smoothing={smoothing!r} is not in"):
            cross_entropy(*inputs(2, 3), smoothing)

    @pytest.mark.parametrize("ignored", [2.0, None, True, torch.tensor(0.5)])
    def test_ignored_class_of_another_type(self, ignored: Any) -> None:
        with pytest.raises(TypeError, match=r"ignore_index=.* is of type .*; pass an integer"):
            cross_entropy(*inputs(2, 3), 0.0, ignored)

    def test_ignored_class_of_more_than_64_bits(self) -> None:
        with pytest.raises(ValueError, match=f"ignore_index={2**63} is not an int64"):
            cross_entropy(*inputs(2, 3), 0.0, 2**63)

    def test_smoothing_that_requires_grad(self) -> None:
        smoothing: Any = torch.tensor(0.5, requires_grad=True)
        with pytest.raises(TypeError, match="label_smoothing is a tensor that requires grad; pass"):
            cross_entropy(*inputs(2, 3), smoothing)
