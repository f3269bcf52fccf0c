"""Convolutions take their geometry as torch does, and avoid the one with which oneDNN crashes."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from fusedoptim import transforms
from tests.transforms.passes.test_pack_weights import CASES, assert_as_in_float64
from transforms.rewrites.geometry import may_see_only_padding


@pytest.mark.parametrize("case", ["conv2d", "conv3d", "transposed-groups"])
@pytest.mark.parametrize(
    ("name", "numbers"),
    [*itertools.product(("stride", "padding", "dilation"), (2, [2])), ("padding", "valid")],
)
def test_geometry_is_read_in_each_call(case: str, name: str, numbers: Any) -> None:
    """torch's functions also take one number for all dimensions, and padding by name."""
    plain, x = CASES[case]()
    if case == "transposed-groups" and name == "padding":
        pytest.skip("torch takes a tuple only")
    ours = transforms.optimize(plain.eval(), auto_channels_last=False)
    with torch.no_grad():
        ours(x)
        ours(x)  # as of the last call
    setattr(plain, name, numbers)
    setattr(ours, name, numbers)
    for module in (ours, transforms.optimize(plain, auto_channels_last=False)):
        for _ in range(2):
            assert_as_in_float64(plain, module, x, torch.float32)


def test_geometry_with_which_onednn_may_crash_is_left_alone() -> None:
    """For one column, as below, both outputs of a row see only padding."""
    options: dict[str, Any] = {"stride": 3, "padding": (1, 0, 2), "dilation": (1, 2, 3)}
    model = nn.Sequential(nn.Conv3d(4, 4, 1), nn.Conv3d(4, 2, (5, 1, 1), **options)).eval()
    x = torch.randn(2, 4, 4, 1, 1)
    ours = transforms.optimize(model)
    report = transforms.report(ours)
    assert [entry.where for entry in report.done("weights_prepack")] == ["0"]
    assert not report.done("auto_channels_last")
    for entry in (*report.left("weights_prepack"), *report.left("auto_channels_last")):
        assert "padding alone" in entry.what
    with torch.no_grad():
        quantized = transforms.quantize(model, [x])
        assert [entry.where for entry in transforms.report(quantized).done("quantize")] == ["0"]
        compiled = torch.compile(copy.deepcopy(model), backend="fusedoptim")
        for module in (ours, ours, compiled, compiled):
            torch.testing.assert_close(module(x), model(x))


@pytest.mark.parametrize(
    ("numbers", "crashes"),
    [
        ((1, 3, 2, 3), True),
        ((2, 4, 3, 2), True),
        ((1, 3, 2, 1), False),
        ((1, 1, 1, 2), False),
        *(((3, stride, dilation, dilation), False) for stride in (1, 2, 3) for dilation in (1, 4)),
    ],
)
def test_rows_that_see_only_padding(numbers: tuple[int, int, int, int], crashes: bool) -> None:
    assert may_see_only_padding(*numbers) == crashes
