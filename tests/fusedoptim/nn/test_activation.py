"""GELU compared with torch's."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fusedoptim import ops
from fusedoptim.nn import GELU
from fusedoptim.nn.functional import MIN_ACTIVATED, gelu


def is_ours(x: Tensor, approximate: str = "tanh") -> bool:
    with mock.patch.object(ops, "gelu_tanh", wraps=ops.gelu_tanh) as called:
        y = gelu(x, approximate=approximate)
    torch.testing.assert_close(y, nn.functional.gelu(x, approximate=approximate))
    return called.called


def test_what_is_ours_and_what_is_torchs() -> None:
    x = torch.randn(MIN_ACTIVATED)
    assert is_ours(x)
    assert is_ours(x.bfloat16())
    assert not is_ours(x[1:])
    assert not is_ours(x, approximate="none")
    with pytest.raises(RuntimeError, match="approximate"):
        gelu(x, approximate="sin")
    wrong: Any = [1.0]
    with pytest.raises(TypeError, match="must be Tensor, not list"):
        gelu(wrong, approximate="tanh")


def test_func_transforms_are_torchs() -> None:
    x = torch.randn(2, MIN_ACTIVATED)
    expected = nn.functional.gelu(x, approximate="tanh")
    torch.testing.assert_close(torch.vmap(GELU("tanh"))(x), expected)


def test_autocast_keeps_the_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16):
            assert GELU("tanh")(torch.ones(MIN_ACTIVATED, dtype=dtype)).dtype == dtype


def test_is_torchs_in_all_but_its_kernel() -> None:
    assert inspect.signature(GELU) == inspect.signature(nn.GELU)
    for twin in (copy.deepcopy(GELU("tanh")), pickle.loads(pickle.dumps(GELU("tanh")))):
        assert (type(twin), twin.approximate) == (GELU, "tanh")
