"""A layer in INT8 that is called again notices whatever has changed since its previous call."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusedoptim import transforms

pytestmark = pytest.mark.usefixtures("gradients_off")


def _written(layer: Any) -> None:
    layer.weight.mul_(2)


def _bias_written(layer: Any) -> None:
    layer.bias.add_(1)


def _bias_written_through_data(layer: Any) -> None:
    layer.bias.data.add_(1)


def _replaced(layer: Any) -> None:
    layer.weight = nn.Parameter(-layer.weight.detach())


def _without_bias(layer: Any) -> None:
    layer.bias = None


def _other_stride(layer: Any) -> None:
    layer.stride = (2, 2)


def _other_padding(layer: Any) -> None:
    layer.padding = (1, 1)


CHANGES: list[Callable[[Any], None]] = [
    _written,
    _bias_written,
    _bias_written_through_data,
    _replaced,
    _without_bias,
    _other_stride,
    _other_padding,
]


def _called_twice() -> tuple[Any, Tensor]:
    x = torch.randn(2, 16, 9, 9).to(memory_format=torch.channels_last)
    layer: Any = transforms.quantize(nn.Sequential(nn.Conv2d(16, 16, 3)).eval(), [x])[0]
    for _ in range(2):
        layer(x)
    return layer, x


def assert_as_new(layer: Any, x: Tensor) -> Tensor:
    """Assert that a layer computes what its copy does, which has checked and packed nothing.

    The copy is made last, as it uses the data of the parameters, and is noticed.
    """
    actual = layer(x)
    expected = copy.deepcopy(layer)(x)
    assert (actual.dtype, actual.stride()) == (expected.dtype, expected.stride())
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    result: Tensor = actual
    return result


@pytest.mark.parametrize("change", CHANGES)
def test_layers(change: Callable[[Any], None]) -> None:
    layer, x = _called_twice()
    before = layer(x)
    change(layer)
    after = assert_as_new(layer, x)
    assert after.shape != before.shape or not torch.equal(after, before)
    assert_as_new(layer, x)


def test_a_list_that_changes_in_place() -> None:
    layer, x = _called_twice()
    layer.stride = [1, 1]
    for _ in range(2):
        layer(x)
    layer.stride[0] = 2
    assert_as_new(layer, x)


def test_inputs() -> None:
    layer, x = _called_twice()
    for other in (x.contiguous(), x[:1], x[..., :8], x[:0], x.bfloat16().float(), x * torch.inf, x):
        for _ in range(3):
            assert_as_new(layer, other)
    with pytest.raises(RuntimeError, match="channels"):
        layer(x[:, :8])
    with pytest.raises(RuntimeError, match="type"):
        layer(x.bfloat16())


def test_nested_tensors() -> None:
    layer: Any = transforms.quantize(nn.Sequential(nn.Linear(16, 16)).eval())[0]
    parts = [torch.randn(n, 16) for n in (3, 2)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype")
        nested = torch.nested.nested_tensor(parts)
    for _ in range(2):
        layer(parts[0])
        torch.testing.assert_close(
            layer(nested).unbind(), nn.Linear.forward(layer, nested).unbind(), rtol=0, atol=0
        )


@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
def test_modes() -> None:
    layer, x = _called_twice()
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            assert layer(x).dtype == torch.bfloat16
    with torch.backends.mkldnn.flags(enabled=False):
        torch.testing.assert_close(layer(x), nn.Conv2d.forward(layer, x), rtol=0, atol=0)
    with torch.inference_mode():
        assert_as_new(layer, x)
    with torch.enable_grad(), pytest.raises(RuntimeError, match="no gradients"):
        layer(x)
    assert_as_new(layer, x)
