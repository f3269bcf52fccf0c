"""Parameters of every shape that matters, and the float64 reference beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tests.optimizer_cases import OptimizerCase
from tests.tolerances import param_tolerance, state_tolerance

WIDE = {torch.complex64: torch.complex128, torch.complex128: torch.complex128}


def _strided(dtype: torch.dtype) -> Tensor:
    return torch.randn(34, 10, dtype=torch.float64).to(dtype)[::2, 1::3]


def _transposed(dtype: torch.dtype) -> Tensor:
    return torch.randn(5, 7, dtype=torch.float64).to(dtype).t()


def _channels_last(dtype: torch.dtype) -> Tensor:
    values = torch.randn(2, 3, 5, 7, dtype=torch.float64).to(dtype)
    return values.to(memory_format=torch.channels_last)


def _dense(*shape: int) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: torch.randn(shape, dtype=torch.float64).to(dtype)


# Around the SIMD width, beyond one chunk with a tail, empty, 0-d, and every kind of strides.
LAYOUTS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "1": _dense(1),
    "15": _dense(15),
    "16": _dense(16),
    "17": _dense(17),
    "1000": _dense(1000),
    "65537": _dense(65537),
    "3x4x5": _dense(3, 4, 5),
    "strided": _strided,
    "transposed": _transposed,
    "channels_last": _channels_last,
    "1x8x1x1 channels_last": lambda dtype: _dense(1, 8, 1, 1)(dtype).to(
        memory_format=torch.channels_last
    ),
    "empty": _dense(0),
    "3x0": _dense(3, 0),
    "0-d": _dense(),
}


def make_params(dtype: torch.dtype, layouts: Sequence[str] = tuple(LAYOUTS)) -> list[Parameter]:
    return [Parameter(LAYOUTS[layout](dtype)) for layout in layouts]


def widened(tensor: Tensor) -> Tensor:
    """A copy in float64 (or complex128)."""
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.detach().to(wide, copy=True)


class SideBySide:
    """An optimizer and torch's, in float64, on the same values and gradients."""

    def __init__(self, case: OptimizerCase, kwargs: dict[str, Any], params: list[Parameter]):
        self.kwargs = kwargs
        self.params = params
        self.dtype = params[0].dtype
        self.references = [Parameter(widened(p)) for p in params]
        self.ours = case.cls(params, **kwargs)
        self.torchs = case.reference(self.references, foreach=False, **kwargs)
        self.steps = 0
        self.scale = max((p.abs().max().item() for p in self.references if p.numel()), default=0.0)

    def set_gradients(self, skip: Sequence[int] = ()) -> None:
        for i, (p, reference) in enumerate(zip(self.params, self.references)):
            if i in skip:
                p.grad = reference.grad = None
            else:
                p.grad = torch.randn_like(p)
                reference.grad = widened(p.grad)

    def step(self, ours: Callable[[], None] | None = None) -> None:
        """Step both; ``ours``, if given, is a function that steps our optimizer."""
        (ours or self.ours.step)()
        self.torchs.step()
        self.steps += 1
        for p, state in self.torchs.state.items():
            tensors = [p, *(v for v in state.values() if torch.is_tensor(v))]
            self.scale = max([self.scale, *(t.abs().max().item() for t in tensors if t.numel())])
        for p in self.references:
            if p.numel():
                self.scale = max(self.scale, p.abs().max().item())

    def assert_equal(self) -> None:
        error = param_tolerance(self.dtype, self.steps, self.scale)
        for p, reference in zip(self.params, self.references):
            torch.testing.assert_close(widened(p), reference.detach(), rtol=0, atol=error)
            state, expected = self.ours.state.get(p, {}), self.torchs.state.get(reference, {})
            assert set(state) == set(expected)
            decay = self.kwargs.get("weight_decay", 0.0)
            allowed = state_tolerance(self.dtype, self.steps, self.scale, decay, error)
            for key, value in expected.items():
                torch.testing.assert_close(
                    widened(state[key]), widened(value), rtol=0, atol=allowed, check_stride=False
                )
