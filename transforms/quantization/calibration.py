"""Finds the ranges of activations, and the error and the time of each layer in INT8."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from transforms.inputs.sample import shortest_times
from transforms.quantization.ranges import Observer
from transforms.quantization.samples import Run, finding, run_all
from transforms.rewrites.finite import is_finite
from transforms.rewrites.int8 import Int8, Range

Layers = Mapping[str, nn.Module]
"""The modules that may compute in INT8, by name."""
_LEAST_TURNS, _ENOUGH_SECONDS = 3, 0.02


class Times(NamedTuple):
    """The seconds that a layer takes."""

    int8: float
    plain: float
    """In floating point."""


def calibrate(
    model: nn.Module,
    layers: Layers,
    loader: Iterable[Any],
    run: Run,
    observer: Callable[[], Observer],
    most: int | None,
    progress: bool | None,
) -> tuple[dict[str, Range], list[Any]]:
    """Run the model on the batches, and observe the inputs of each layer.

    Returns:
        the ranges of the layers that were called, and copies of the first batches.
    """
    observers: dict[str, Observer] = {}

    def observe(name: str, x: Any) -> None:
        if not isinstance(x, Tensor) or x.numel() == 0:
            return
        if x.requires_grad and torch.is_grad_enabled():
            raise finding(
                f"loader: the model records gradients in {name}, and INT8 has none: pass "
                f"keep=[{name!r}]"
            )
        if not is_finite(x):
            raise finding(
                f"loader: the input of {name} is infinite or NaN in calibration, and INT8 has no "
                f"such values: fix the data, or pass keep=[{name!r}]"
            )
        if name not in observers:
            observers[name] = observer()
        observers[name].add(x)

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.callback(_before(layer, name, observe).remove)
        first = run_all(model, loader, run, most, progress)
    return {name: found.range() for name, found in observers.items()}, first


def _before(layer: nn.Module, name: str, see: Callable[[str, Any], None]) -> Any:
    """Let a function see the input of a layer's calls, after all other hooks."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        see(name, args[0] if args else kwargs.get("input"))

    return layer.register_forward_pre_hook(hook, with_kwargs=True)


def errors(
    model: nn.Module,
    layers: Layers,
    computations: Mapping[str, Int8],
    batches: Sequence[Any],
    run: Run,
) -> dict[str, float]:
    """How much each layer in INT8 differs from the one in floating point, for the same input.

    Returns:
        for each layer that was called, by name: the norm of the difference of the outputs, divided
        by the norm of the output.
    """
    sums: dict[str, tuple[float, float]] = {}

    def compare(layer: nn.Module, name: str, x: Any, output: Any) -> None:
        if not isinstance(x, Tensor) or (product := computations[name].product(layer, x)) is None:
            return
        difference = torch.linalg.vector_norm((product - output).double()).item()
        norm = torch.linalg.vector_norm(output.double()).item()
        before = sums.get(name, (0.0, 0.0))
        sums[name] = before[0] + difference**2, before[1] + norm**2

    _run_watched(model, layers, compare, batches, run)
    return {name: _ratio(*both) ** 0.5 for name, both in sums.items()}


def times(
    model: nn.Module,
    layers: Layers,
    computations: Mapping[str, Int8],
    batches: Sequence[Any],
    run: Run,
) -> dict[str, Times]:
    """How long each layer takes in INT8 and in floating point, for all its calls together.

    Returns:
        the times of each layer that was called, by name.
    """
    sums: dict[str, Times] = {}

    def measure(layer: nn.Module, name: str, x: Any, _: Any) -> None:
        computation = computations[name]
        if not isinstance(x, Tensor) or computation.product(layer, x) is None:
            return
        found = fastest(lambda: computation.product(layer, x), lambda: layer.forward(x))
        before = sums.get(name, Times(0.0, 0.0))
        sums[name] = Times(before.int8 + found.int8, before.plain + found.plain)

    _run_watched(model, layers, measure, batches, run)
    return sums


def fastest(int8: Callable[[], object], plain: Callable[[], object]) -> Times:
    """The times of the fastest of several calls of each; the two take turns."""
    return Times(*shortest_times([int8, plain], _LEAST_TURNS, _ENOUGH_SECONDS))


def _run_watched(
    model: nn.Module,
    layers: Layers,
    see: Callable[[nn.Module, str, Any, Any], None],
    batches: Sequence[Any],
    run: Run,
) -> None:
    """Run the model on the batches, and let a function see the calls of each layer."""
    with ExitStack() as hooks, torch.no_grad():
        for name, layer in layers.items():
            hooks.callback(_after(layer, name, see).remove)
        for batch in batches:
            run(model, batch)


def _after(layer: nn.Module, name: str, see: Callable[[nn.Module, str, Any, Any], None]) -> Any:
    """Let a function see the input and the output of a layer's calls, before all other hooks."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        see(layer, name, args[0] if args else kwargs.get("input"), output)

    return layer.register_forward_hook(hook, with_kwargs=True, prepend=True)


def _ratio(noise: float, signal: float) -> float:
    if noise == 0:
        return 0.0
    return noise / signal if signal > 0 else torch.inf
