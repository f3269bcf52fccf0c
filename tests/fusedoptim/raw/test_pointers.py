"""Expression kernels with a parameter for each argument, as a GPU takes them, here on the CPU."""

from __future__ import annotations

import pytest
import torch

from fusedoptim.raw import ElementwiseKernel, ReductionKernel, _expressions


@pytest.fixture(autouse=True)
def _no_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_expressions, "takes_frame", lambda device: False)


def test_one_parameter_for_each_argument() -> None:
    scaled = ElementwiseKernel("T x, T k, raw S r", "T y", "y = x * k", "scaled")
    scaled(torch.ones(3), 2.0, torch.ones(2, dtype=torch.bfloat16))
    (kernel,) = scaled._kernels.values()
    in_module = kernel._module._program.facts.entries["scaled"].parameters
    assert in_module == kernel.signature


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    either = ElementwiseKernel("T x, T k", "T y", "y = k != 0 ? k : x", "either")
    x = torch.randint(0, 2, (37,)).to(dtype)
    for k in (0, 1):
        k_of_dtype = bool(k) if dtype is torch.bool else k
        assert torch.equal(either(x, k_of_dtype), torch.where(torch.tensor(k > 0), k, x).to(dtype))


@pytest.mark.parametrize("n", [1, 17, 5000, 600_000])
def test_repeated(n: int) -> None:
    scaled = ElementwiseKernel("T x, T k", "T y", "y = x * k", "scaled")
    total = ReductionKernel("T x", "T y", "x", "a + b", "y = a", "0", "total")
    for _ in range(3):
        x = torch.randint(-100, 100, (n, 3)).t()
        assert torch.equal(scaled(x, 3), 3 * x)
        assert total(x) == x.sum()
        assert torch.equal(total(x, axis=1), x.sum(1))
