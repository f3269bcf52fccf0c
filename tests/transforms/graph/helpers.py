"""Shared by the tests of graph mode: compiled models with their plans, and small models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests.transforms.helpers import needs_bfloat16_products
from transforms.graph import backend
from transforms.graph.plan import Plan

LAST = torch.channels_last
each_packed_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_bfloat16_products)]
)


def images(*shape: int) -> Tensor:
    """Random images or volumes with their channels last."""
    layout = LAST if len(shape) == 4 else torch.channels_last_3d
    return torch.randn(*shape).to(memory_format=layout)


class Compiled:
    """A model compiled by our backend, and the plans that were made."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.plans: list[Plan] = []
        self._call = torch.compile(model, backend=self._backend, **options)

    def _backend(self, graph: Any, example_inputs: Any) -> Callable[..., Any]:
        made = backend.graph_backend(graph, example_inputs)
        if isinstance(made, Plan):
            self.plans.append(made)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    @property
    def counts(self) -> Any:
        """The counts of the last plan."""
        return self.plans[-1].counts

    def is_kept(self) -> bool:
        """Whether the last plan's last call used its constants."""
        return self.plans[-1]._kept is not None

    def is_computed(self) -> bool:
        """Whether the last plan keeps anything that it computed from the current parameters."""
        kept = self.plans[-1]._kept
        return kept is not None and bool(kept.values or kept.scripts)

    def is_scripted(self) -> bool:
        """Whether the last plan computes in C++."""
        kept = self.plans[-1]._kept
        return kept is not None and any(each is not None for each in kept.scripts.values())


def assert_as_eager(
    ours: Any, plain: Any, *args: Any, arithmetic: torch.dtype | None = None
) -> None:
    """Assert equal structures, dtypes, shapes, strides, NaNs and infinities, and close values.

    Values agree in half of the digits of ``arithmetic``, or else of the result's dtype. Other tests
    compare with float64 how exact they are.
    """
    mine, theirs = copy.deepcopy(args), copy.deepcopy(args)
    actual, expected = ours(*mine), plain(*theirs)
    for a, b in zip(tree_leaves((actual, mine)), tree_leaves((expected, theirs)), strict=True):
        if not isinstance(b, Tensor):
            assert a == b
            continue
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert bool((a.isnan() == b.isnan()).all())
        eps = torch.finfo(arithmetic or b.dtype).eps if b.is_floating_point() else 0.0
        finite = b[b.isfinite()]
        largest = finite.abs().max().item() if finite.numel() else 0.0
        torch.testing.assert_close(a, b, rtol=0, atol=eps**0.5 * largest, equal_nan=True)


def agreeing(model: nn.Module, *shape: int) -> Compiled:
    """A compiled model that agreed with eager for several images of a shape."""
    model = model.to(memory_format=LAST)
    ours = Compiled(model)
    for _ in range(4):
        assert_as_eager(ours, model, images(*shape))
    return ours


class Residual(nn.Module):
    """Convolutions with BatchNorms, ReLU in place, and additions both ways."""

    def __init__(self, channels: int = 32, groups: int = 1) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 1, groups=groups)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.stem(x))
        y = self.second(self.relu(self.norm(self.first(x))))
        y += x
        z = self.second(self.relu(y))
        return self.relu(x + z)


class Squeezed(nn.Module):
    """A block like those of MobileNetV3, and a head."""

    def __init__(self, channels: int = 24) -> None:
        super().__init__()
        self.deep = nn.Conv2d(channels, channels, 5, padding=2, groups=channels, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.down, self.up = nn.Conv2d(channels, 8, 1), nn.Conv2d(8, channels, 1)
        self.act, self.gate, self.relu = nn.Hardswish(), nn.Hardsigmoid(), nn.ReLU6()
        self.point = nn.Conv2d(channels, 40, 1)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(40, 1000), nn.SiLU(), nn.Dropout())

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.deep(x)))
        x = x * self.gate(self.up(self.relu(self.down(self.pool(x)))))
        x = self.act(self.point(x))
        y: Tensor = self.head(self.pool(x))
        return y


class Encoder(nn.Module):
    """A block of a transformer, with positions from a buffer and a computed bias."""

    positions: Tensor

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.table = nn.Embedding(64, width)
        self.scale = nn.Parameter(torch.randn(width))
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout()
        self.register_buffer("positions", torch.arange(64)[None])

    def forward(self, x: Tensor) -> Tensor:
        n, words, width = x.shape
        x = x + self.table(self.positions[:, :words]) * (self.scale.exp() / 8)
        q, k, v = self.project(x).view(n, words, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        y = self.dropout(self.out(y.transpose(1, 2).reshape(n, words, width)))
        x = self.first(y + x)
        y = self.narrow(nn.functional.gelu(self.wide(x)))
        z: Tensor = self.second(x + self.dropout(y))
        return z
