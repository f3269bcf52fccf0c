"""Repeated calls of expression kernels: they compute, check and refuse as first calls do."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedoptim.raw import ElementwiseKernel, ReductionKernel
from fusedoptim.raw._repeat import Repeat

pytestmark = pytest.mark.usefixtures("launches")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each attempt to repeat a launch has succeeded."""
    seen: list[bool] = []
    launch = Repeat.launch

    def noted(self: Repeat, arguments: tuple[object, ...]) -> bool:
        seen.append(launch(self, arguments))
        return seen[-1]

    monkeypatch.setattr(Repeat, "launch", noted)
    return seen


@pytest.fixture
def total() -> ReductionKernel:
    return ReductionKernel("T x", "T y", "x", "a + b", "y = a", "0", "total")


@pytest.fixture
def scaled() -> ElementwiseKernel:
    return ElementwiseKernel("T x, T k", "T y", "y = x * k", "scaled")


@pytest.mark.parametrize("n", [1, 17, 5000, 600_000])
def test_sums_of_other_tensors(n: int, total: ReductionKernel, launches: list[bool]) -> None:
    """Sums of several chunks count their groups in memory that the calls share."""
    y = torch.empty((), dtype=torch.int64)
    for _ in range(4):
        x = torch.randint(-100, 100, (n,))
        assert total(x) == x.sum()
        assert total(x, y) is y
        assert y == x.sum()
    assert launches == [True] * 6


def test_options_and_shapes(total: ReductionKernel) -> None:
    """More options and shapes are used than are remembered."""
    for _ in range(3):
        for rows in range(2, 14):
            x = torch.randint(-100, 100, (rows, 5))
            for axis in (0, 1, None):
                expected = x.sum() if axis is None else x.sum(axis)
                assert torch.equal(total(x, axis=axis), expected)
            assert torch.equal(total(x.t(), axis=1, keepdims=True), x.sum(0).view(5, 1))


def test_numbers_and_tensors_twice(scaled: ElementwiseKernel, launches: list[bool]) -> None:
    for k in (2.0, -0.0, 0.0, 3):
        x = torch.randn(100)
        expected, squares = x * k, x * x
        assert torch.equal(scaled(x, k).view(torch.int32), expected.view(torch.int32))
        assert scaled(x, x, x) is x
        assert torch.equal(x, squares)
    assert launches.count(True) == 5


def test_strided(scaled: ElementwiseKernel, launches: list[bool]) -> None:
    for _ in range(3):
        x, y = torch.randn(40, 30).t(), torch.zeros(30, 80)[:, ::2]
        scaled(x, 2.0, y)
        assert torch.equal(y, 2 * x)
    assert launches == [True] * 2


def test_autograd_is_told(scaled: ElementwiseKernel) -> None:
    x, y = torch.randn(5), torch.empty(5)
    before = y._version
    for _ in range(3):
        scaled(x, 2.0, y)
    assert y._version == before + 3


class TestBadInput:
    def test_gradient(self, scaled: ElementwiseKernel) -> None:
        """Gradients are refused even where the same call was allowed under no_grad."""
        x = torch.randn(5, requires_grad=True)
        for _ in range(2):
            with torch.no_grad():
                scaled(x, 2.0)
            with pytest.raises(RuntimeError, match="autograd does not see"):
                scaled(x, 2.0)

    def test_freed_memory(self, total: ReductionKernel, launches: list[bool]) -> None:
        x = torch.randn(5)
        total(x)
        total(x)
        x.untyped_storage().resize_(0)
        with pytest.raises(TypeError, match="with no memory of its own"):
            total(x)
        assert launches == [True, False]

    def test_number_that_does_not_fit(self) -> None:
        add = ElementwiseKernel("int32 x, int32 k", "int32 y", "y = x + k", "add")
        x = torch.arange(5, dtype=torch.int32)
        for _ in range(2):
            assert torch.equal(add(x, 3), x + 3)
            with pytest.raises(OverflowError, match="int"):
                add(x, 1 << 40)

    def test_fake_outputs(self, total: ReductionKernel) -> None:
        x = torch.ones(5)
        total(x)
        with FakeTensorMode(), pytest.raises(TypeError, match="has no memory of its own"):
            total(x)
        assert total(x) == 5
