"""The sample input, and whether a pass changes what the model returns for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree

from transforms.inputs.state import put_back

_OTHER_FORM = "the output for sample_input changed its shape or dtype"
_MOST_OTHER_INTEGERS = 0.01
"""The share of the integers in an output that rounding may change."""
_MOST_ROUNDS = 10
_LEAST_PASSES, _ENOUGH_SECONDS = 2, 0.5


@contextlib.contextmanager
def trial(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Run the block under autocast to ``dtype``, if any, and restore ``model`` at its end."""
    kind = _device_type(model)
    with put_back(model), torch.autocast(kind, dtype=dtype, enabled=dtype is not None):
        yield


def _device_type(model: nn.Module) -> str:
    """The kind of the device that the model is on."""
    return next((param.device.type for param in model.parameters() if not param.is_meta), "cpu")


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
        with torch.no_grad(), put_back(model):
            caller(model, sample_input)()
    except Exception as error:  # of any class: the model's own
        raise ValueError(
            f"sample_input: {type(model).__name__} fails with it ({error}); it must be a tensor, "
            "a tuple of arguments, or a dict of keyword arguments"
        ) from error
    if dtype is None:
        return
    try:
        with torch.no_grad(), trial(model, dtype):
            caller(model, sample_input)()
    except Exception as error:
        kind = _device_type(model)
        raise ValueError(
            f"dtype={dtype}: under torch.autocast({kind!r}, dtype={dtype}), {type(model).__name__} "
            f"fails with sample_input ({error}); pass dtype=None, or run the layer that fails "
            f"under torch.autocast({kind!r}, enabled=False)"
        ) from error


def caller(model: nn.Module, sample_input: Any) -> Callable[[], object]:
    """A function that calls ``model`` with a copy of the sample, into which it may write."""
    kind = _device_type(model)

    def call() -> object:
        given = _pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), sample_input)
        if isinstance(given, Tensor):
            given = (given,)
        output = model(**given) if isinstance(given, dict) else model(*given)
        if kind != "cpu":  # a call returns before its kernels have run, and may be timed
            torch.get_device_module(kind).synchronize()
        return output

    return call


def seconds(call: Callable[[], object]) -> float:
    """The time in seconds of the fastest of several forward passes; the first may pack weights."""
    with torch.no_grad():
        (fastest,) = shortest_times([call], _LEAST_PASSES, _ENOUGH_SECONDS)
    return fastest


def shortest_times(
    calls: Sequence[Callable[[], object]], least_rounds: int, enough_seconds: float
) -> list[float]:
    """The time in seconds of the fastest of several calls of each function; they take turns."""
    rounds: list[list[float]] = []
    while len(rounds) < least_rounds or (
        len(rounds) < _MOST_ROUNDS and sum(map(sum, rounds)) < enough_seconds
    ):
        rounds.append([_time(call) for call in calls])
    return [min(times) for times in zip(*rounds)]


def _time(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


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
        self._is_repeated = _are_equal(self._before, self._run(), self._precision)
        self.error: float | None = None
        """The largest relative error in the latest comparison; None if nothing was compared."""

    @property
    def _precision(self) -> float:
        return 0.0 if self._dtype is None else torch.finfo(self._dtype).eps

    def objection(self) -> str | None:
        """Why the output, or a part of it, cannot be compared; None if all of it can be."""
        if not self._before:
            return "holds no tensors"
        if all(self._is_repeated):
            return None
        return (
            f"changes from call to call ({self._is_repeated.count(False)} of "
            f"{len(self._before)} tensors)"
        )

    def difference(self) -> str | None:
        """How the model's output differs from before; None if it does not, or is random."""
        self.error = None
        if not any(self._is_repeated):
            return None
        try:
            after = self._run()
        except Exception as error:  # of any class: the model's own
            return f"the model failed with sample_input: {error}"
        if len(after) != len(self._before):
            return _OTHER_FORM
        pairs = [
            pair for pair, is_same in zip(zip(self._before, after), self._is_repeated) if is_same
        ]
        if any((old.shape, old.dtype) != (new.shape, new.dtype) for old, new in pairs):
            return _OTHER_FORM
        self.error = max(_error(new, old) for old, new in pairs)
        return next((_change(*p) for p in pairs if not _is_equal(*p, self._precision)), None)

    def error_of(self, other: Comparison) -> float | None:
        """The largest error of another model's outputs, of any dtype; None if there is none."""
        if len(self._before) != len(other._before):
            return None
        outputs = zip(self._before, other._before, self._is_repeated, other._is_repeated)
        errors = [
            _error(new, old)
            for old, new, *is_repeated in outputs
            if all(is_repeated) and old.shape == new.shape and _is_real(old) == _is_real(new)
        ]
        return max(errors, default=None)

    def _run(self) -> list[Tensor]:
        with torch.no_grad(), trial(self._model, self._dtype), _seeded(self._model):
            output = caller(self._model, self._sample)()
            return [t.detach().clone() for t in _tensors(output, set())]


@contextlib.contextmanager
def _seeded(model: nn.Module) -> Iterator[None]:
    """Seed the random numbers of the CPU, and of the kind of device that the model is on."""
    kind = _device_type(model)
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would seed all devices for good
        if kind == "cpu":
            yield
            return
        module = torch.get_device_module(kind)
        with torch.random.fork_rng(range(module.device_count()), device_type=kind):
            module.manual_seed_all(0)
            yield


def _tensors(output: object, seen: set[int]) -> Iterator[Tensor]:
    """The tensors in what a model returned, also in attributes of objects of any class."""
    if isinstance(output, Tensor):
        if output.layout is torch.strided and not output.is_meta:
            yield output
    elif isinstance(output, ModuleType) or callable(output) or id(output) in seen:
        return  # code, such as the model itself, or the end of a cycle
    else:
        seen.add(id(output))
        for value in _contents(output):
            yield from _tensors(value, seen)


def _contents(output: object) -> Iterable[object]:
    """What a container holds, or the attributes of any other object."""
    if isinstance(output, Mapping):
        return output.values()
    return output if isinstance(output, list | tuple) else _attributes(output)


def _attributes(output: object) -> Iterator[object]:
    """The attributes of an object, in ``__dict__`` or in slots."""
    yield from getattr(output, "__dict__", {}).values()
    for kind in type(output).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name != "__dict__" and hasattr(output, name):
                yield getattr(output, name)


def _are_equal(before: list[Tensor], after: list[Tensor], precision: float) -> list[bool]:
    """For each output, whether it came again in a second call."""
    if len(before) != len(after):
        return [False] * len(before)
    return [
        (old.shape, old.dtype) == (new.shape, new.dtype) and _is_equal(old, new, precision)
        for old, new in zip(before, after)
    ]


def _is_equal(expected: Tensor, actual: Tensor, precision: float) -> bool:
    """Whether outputs of one shape and dtype differ by no more than rounding."""
    if _is_real(expected):
        return agrees(actual, expected, precision)
    # Rounding alone may change a predicted class where two are equally likely.
    return _error(actual, expected) <= _MOST_OTHER_INTEGERS


def _change(expected: Tensor, actual: Tensor) -> str:
    """How outputs of one shape and dtype differ."""
    if not _is_real(expected):
        count = int((actual != expected).sum())
        return f"{count} of {expected.numel()} integers in the output for sample_input changed"
    distance = (actual - expected).abs().max().item()
    return (
        f"the output for sample_input changed by {distance:.3g}, where its largest value is "
        f"{_largest(expected):.3g}"
    )


def _is_real(t: Tensor) -> bool:
    """Whether the elements are real or complex numbers, not integers or bools."""
    return t.is_floating_point() or t.is_complex()


def _error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference divided by the largest value; of integers, the share that differs."""
    if expected.numel() == 0:
        return 0.0
    if not _is_real(expected):
        return (actual != expected).double().mean().item()
    wide = torch.complex128 if expected.is_complex() else torch.float64
    actual, expected = actual.to(wide), expected.to(wide)
    is_same = (actual == expected) | (actual.isnan() & expected.isnan())
    distances = (actual - expected).abs().masked_fill(is_same, 0.0)
    distance = distances.nan_to_num(torch.inf, torch.inf).max().item()
    largest = _largest(expected)
    return distance / largest if largest else (torch.inf if distance else 0.0)


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
