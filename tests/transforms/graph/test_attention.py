"""Attention in 16 bits runs as products, as exact as single operations; the rest is left alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fusedoptim import _processor, transforms
from tests.tolerances import assert_as_exact
from tests.transforms.helpers import needs_bfloat16_products, operators_called
from transforms.graph import attention

pytestmark = [
    needs_bfloat16_products,
    pytest.mark.skipif(_processor.has_tiles(), reason="torch's own attention is faster by tiles"),
]
SHAPES = {
    "square": ((2, 3, 151, 17), (2, 3, 151, 17)),
    "other-keys": ((1, 12, 129, 64), (1, 12, 97, 64)),
    "one-head": ((1, 1, 512, 8), (1, 1, 512, 8)),
}


def tensors(case: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """Make tensors laid out like those of projections: heads lie next to each other."""
    query, key = SHAPES[case]

    def made(batch: int, heads: int, rows: int, width: int) -> Tensor:
        return torch.randn(batch, rows, heads, width).to(dtype).transpose(1, 2)

    return made(*query), made(*key), made(*key)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend=transforms.graph_backend, dynamic=False)


def is_split(function: Callable[..., Any], *args: Any, dtype: torch.dtype | None = None) -> bool:
    run = compiled(function)
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype is not None):
        run(*args)
        return "aten::baddbmm" in operators_called(lambda: run(*args))


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("case", SHAPES)
def test_is_as_exact_as_single_operations(case: str, scale: float | None) -> None:
    q, k, v = tensors(case)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, scale=scale)

    def exact() -> list[Tensor]:
        factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        scores = (q.double() @ k.double().transpose(-1, -2)) * factor
        return [torch.softmax(scores, -1) @ v.double()]

    assert is_split(attend, q, k, v)
    with torch.no_grad():
        actual, expected = compiled(attend)(q, k, v), attend(q, k, v)
    assert (actual.dtype, actual.stride()) == (expected.dtype, expected.stride())
    assert_as_exact([actual], exact, torch.bfloat16)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", range(3))
def test_keeps_special_values(which: int, value: float) -> None:
    given = tensors("square")
    given[which][0, 1, 5, 3] = value
    with torch.no_grad():
        actual = compiled(scaled_dot_product_attention)(*given)
        expected = scaled_dot_product_attention(*(t.float() for t in given))
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.isinf(), expected.isinf())


def test_what_is_left_alone() -> None:
    q, k, v = tensors("square")
    mask = torch.zeros(151, 151, dtype=torch.bfloat16)
    attend = scaled_dot_product_attention
    assert not is_split(lambda q, k, v: attend(q, k, v, mask), q, k, v)
    assert not is_split(lambda q, k, v: attend(q, k, v, is_causal=True), q, k, v)
    assert not is_split(attend, *(t.float() for t in (q, k, v)))
    assert not is_split(attend, *(t[:, :, :9] for t in (q, k, v)))
    assert not is_split(lambda q, k, v: attend(q, k, v, enable_gqa=True), q, k[:, :1], v[:, :1])
    assert not is_split(attend, q, k, v[..., :9])
    assert not is_split(attend, *(t[0] for t in (q, k, v)))
    assert not is_split(attend, q, k[:1], v[:1])
    long = torch.randn(1, 2, attention._MOST_KEYS + 1, 8).bfloat16()
    assert not is_split(attend, long, long, long)


def test_a_model_under_autocast_says_so() -> None:
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projections = torch.nn.Linear(64, 192)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.projections(x).unflatten(-1, (3, 4, 16)).movedim(-3, 0)
            return scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))

    x = torch.randn(2, 151, 64)
    model = Attention().eval()
    ours = transforms.optimize(model, dtype=torch.bfloat16, graph_mode=True, sample_input=x)
    (entry,) = transforms.report(ours).done("graph_mode")
    assert "attentions as products: 1" in entry.what
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(ours(x), model(x), rtol=0.03, atol=0.03)
