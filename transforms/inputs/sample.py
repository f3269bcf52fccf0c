"""The sample input, and whether a pass changes what the model returns for it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree

_LEAST_PASSES, _MOST_PASSES, _ENOUGH_SECONDS = 2, 10, 0.5


def check_sample(model: nn.Module, sample_input: Any, dtype: torch.dtype | None) -> None:
    """Raise TypeError or ValueError unless the model accepts the sample, also under autocast."""
    if model.training:
        raise ValueError(
            "sample_input is for a model in eval mode, and this one is in training mode: call "
            "model.eval() first, or omit it"
        )
    if not isinstance(sample_input, Tensor | dict | list | tuple):
        cure = "torch.from_numpy makes a tensor of it; " * isinstance(sample_input, np.ndarray)
        raise TypeError(
            f"sample_input is of type {type(sample_input).__name__}; {cure}pass a tensor, a "
            "tuple of arguments, or a dict of keyword arguments"
        )
    try:
        with torch.no_grad():
            caller(model, sample_input)()
    except Exception as error:  # of any class: the model's own
        raise ValueError(
            f"sample_input: {type(model).__name__} fails with it ({error}); it must be a tensor, "
            "a tuple of arguments, or a dict of keyword arguments"
        ) from error
    if dtype is None:
        return
    try:
        with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
            caller(model, sample_input)()
    except Exception as error:
        raise ValueError(
            f"dtype={dtype}: under torch.autocast('cpu', dtype={dtype}), {type(model).__name__} "
            f"fails with sample_input ({error}); pass dtype=None, or run the layer that fails "
            "under torch.autocast('cpu', enabled=False)"
        ) from error


def caller(model: nn.Module, sample_input: Any) -> Callable[[], object]:
    """A function that calls ``model`` with a copy of the sample, into which it may write."""

    def call() -> object:
        given = _pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), sample_input)
        if isinstance(given, Tensor):
            return model(given)
        return model(**given) if isinstance(given, dict) else model(*given)

    return call


def seconds(call: Callable[[], object]) -> float:
    """The time in seconds of the fastest of several forward passes; the first may pack weights."""
    times: list[float] = []
    with torch.no_grad():
        while len(times) < _LEAST_PASSES or (
            len(times) < _MOST_PASSES and sum(times) < _ENOUGH_SECONDS
        ):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return min(times)


class Comparison:
    """The outputs of a model in eval mode for a sample, to be compared with its later outputs.

    With a dtype of 16 bits the model runs under autocast, which a model with cast weights needs.
    """

    def __init__(
        self, model: nn.Module, sample_input: Any, dtype: torch.dtype | None = None
    ) -> None:
        self._model = model
        self._sample = sample_input
        self._dtype = dtype
        self._before = self._run()
        self._is_repeatable = self._to(self._run()) is None

    def difference(self) -> str | None:
        """How the model's output differs from before; None if it does not, or is random."""
        if not self._is_repeatable:
            return None
        try:
            after = self._run()
        except Exception as error:  # of any class: the model's own
            return f"the model failed with sample_input: {error}"
        return self._to(after)

    def _to(self, after: list[Tensor]) -> str | None:
        precision = 0.0 if self._dtype is None else torch.finfo(self._dtype).eps
        return _difference(self._before, after, precision)

    def _run(self) -> list[Tensor]:
        others = {p.device for p in self._model.parameters() if p.device.type != "cpu"}
        kind = next(iter(others)).type if others else "cuda"
        with torch.no_grad(), torch.random.fork_rng(others, device_type=kind):
            torch.manual_seed(0)
            with torch.autocast("cpu", dtype=self._dtype, enabled=self._dtype is not None):
                output = caller(self._model, self._sample)()
        return [t.detach().clone() for t in _tensors(output)]


def _tensors(output: object) -> Iterator[Tensor]:
    """The tensors in what a model returned."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(output):
        for field in dataclasses.fields(output):
            yield from _tensors(getattr(output, field.name))


def _difference(before: list[Tensor], after: list[Tensor], precision: float) -> str | None:
    """How the outputs differ, if they differ by more than rounding."""
    if [(t.shape, t.dtype) for t in before] != [(t.shape, t.dtype) for t in after]:
        return "the output for sample_input changed its shape or dtype"
    for expected, actual in zip(before, after):
        if not expected.is_floating_point() and not expected.is_complex():
            continue
        if not agrees(actual, expected, precision):
            distance = (actual - expected).abs().max().item()
            return (
                f"the output for sample_input changed by {distance:.3g}, where its largest value "
                f"is {_largest(expected):.3g}"
            )
    return None


def agrees(actual: Tensor, expected: Tensor, precision: float = 0.0) -> bool:
    """Whether floating-point tensors of one shape and dtype differ by no more than rounding.

    Rewrites change roundings, and later layers may amplify them. So half of the digits must agree,
    relative to the tensor's largest value. If the tensors have more digits than ``precision``, half
    of the digits of ``precision`` must agree.
    """
    tolerance = max(torch.finfo(expected.dtype).eps, precision) ** 0.5 * _largest(expected)
    return torch.allclose(actual, expected, rtol=0, atol=tolerance, equal_nan=True)


def _largest(values: Tensor) -> float:
    """The largest magnitude among the finite values."""
    finite = values[values.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0
