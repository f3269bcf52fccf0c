"""What only FusedSGD does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from fusedoptim import FusedSGD
from tests.fusedoptim.helpers import values_after
from tests.optimizer_cases import configuration_id
from tests.tolerances import by_hand


def _parameter(values: list[float], grad: list[float]) -> Parameter:
    p = Parameter(torch.tensor(values, dtype=torch.float64))
    p.grad = torch.tensor(grad, dtype=torch.float64)
    return p


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        # 1 - 0.1 * 0.5 = 0.95; 0.95 - 0.1 * 0.25 = 0.925
        ({}, [0.95, 0.925]),
        # b = 0.5; p = 0.95
        # b = 0.9 * 0.5 + 0.25 = 0.7; p = 0.95 - 0.07 = 0.88
        ({"momentum": 0.9}, [0.95, 0.88]),
        # Dampening starts at the second step: b = 0.5; p = 0.95
        # b = 0.9 * 0.5 + 0.6 * 0.25 = 0.6; p = 0.95 - 0.06 = 0.89
        ({"momentum": 0.9, "dampening": 0.4}, [0.95, 0.89]),
        # b = 0.5; p = 1 - 0.1 * (0.5 + 0.9 * 0.5) = 0.905
        # b = 0.9 * 0.5 + 0.25 = 0.7; p = 0.905 - 0.1 * (0.25 + 0.9 * 0.7) = 0.817
        ({"momentum": 0.9, "nesterov": True}, [0.905, 0.817]),
        # g = -0.5 + 0.2 * 1 = -0.3; p = 1.03
        # g = -0.25 + 0.2 * 1.03 = -0.044; p = 1.0344
        ({"weight_decay": 0.2, "maximize": True}, [1.03, 1.0344]),
    ],
    ids=configuration_id,
)
def test_by_hand(kwargs: dict[str, Any], expected: list[float]) -> None:
    """Two steps from 1.0 with gradients 0.5 and 0.25."""
    assert values_after(FusedSGD, [1.0], ([0.5], [0.25]), **kwargs) == by_hand(expected, 7)


def test_without_momentum_there_is_no_buffer() -> None:
    p = _parameter([1.0], [0.5])
    optimizer = FusedSGD([p], lr=0.1)
    optimizer.step()
    assert not optimizer.state


def test_momentum_switched_off_leaves_the_buffer_alone() -> None:
    p = _parameter([1.0], [0.5])
    optimizer = FusedSGD([p], lr=0.1, momentum=0.9)
    optimizer.step()
    buffer = optimizer.state[p]["momentum_buffer"]
    before = buffer.clone()
    optimizer.param_groups[0]["momentum"] = 0
    optimizer.step()
    assert optimizer.state[p]["momentum_buffer"] is buffer
    assert torch.equal(buffer, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 7, 8, 31, 32, 33, 1000, 65536])
def test_every_element_of_16_bit_parameters_moves(dtype: torch.dtype, size: int) -> None:
    p = Parameter(torch.ones(size, dtype=dtype))
    p.grad = torch.ones_like(p)
    FusedSGD([p], lr=0.5).step()
    assert torch.equal(p, torch.full_like(p, 0.5))


def test_torchs_fused_sgd_skips_16_bit_parameters() -> None:
    """torch's fused SGD updates the last partial block alone (pytorch#191763), unlike FusedSGD.

    Should torch update all of them, the documentation's statements about it are out of date.
    """
    p = Parameter(torch.ones(1000, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    torch.optim.SGD([p], lr=0.5, fused=True).step()
    blocks = (16, 32)  # a SIMD register's elements, at each of torch's instruction sets
    assert int((p == 0.5).sum()) in {1000 % block for block in blocks}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_conversions_of_all_16_bit_values(dtype: torch.dtype) -> None:
    """Loading and storing preserves the value of each of the 65,536 bit patterns."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    p = Parameter(values.clone())
    p.grad = torch.zeros_like(p)
    FusedSGD([p], lr=0.5).step()
    torch.testing.assert_close(p.detach(), values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_to_nearest_even(dtype: torch.dtype) -> None:
    """A store rounds as torch does, including ties, subnormals and overflow."""
    magnitudes = torch.exp2(torch.empty(20_000, dtype=torch.float64).uniform_(-26, 17))
    grads = (magnitudes * torch.randn(20_000, dtype=torch.float64).sign()).to(dtype)
    halves = torch.tensor([0.5, 1.5, 2.5, 0.25, 0.75], dtype=torch.float64)
    lr = float(halves[torch.randint(5, ())])
    p = Parameter(torch.randn(20_000).to(dtype))
    # In float64, p - lr * g is exact here up to far below float32's rounding; the kernel rounds
    # it to float32 first, as fma does, and then to the dtype.
    expected = torch.addcmul(
        p.detach().double(), grads.double(), torch.tensor(-lr, dtype=torch.float64)
    )
    expected = expected.float().to(dtype)
    p.grad = grads
    FusedSGD([p], lr=lr).step()
    torch.testing.assert_close(p.detach(), expected, rtol=0, atol=0)


def test_infinite_parameter_without_weight_decay_stays_infinite() -> None:
    """IPEX multiplies by a weight decay of 0, which makes NaN of it."""
    p = _parameter([float("inf"), 1.0], [1.0, 1.0])
    FusedSGD([p], lr=0.5, momentum=0.9).step()
    assert p.tolist() == [float("inf"), 0.5]
