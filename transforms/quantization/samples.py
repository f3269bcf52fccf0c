"""Runs a model on the batches of a loader."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import sys
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from transforms.inputs.sample import caller

Run = Callable[[nn.Module, Any], object]
"""Calls a model with a batch."""

_LONG = 8
"""Batches from which progress is shown."""
_KEPT = 2
"""Batches on which the layers are compared with those in floating point."""


def run_batch(model: nn.Module, batch: Any) -> object:
    """Call ``model`` with a tensor, a sequence of arguments or a mapping of keyword arguments."""
    if isinstance(batch, Mapping | UserDict):  # the latter is what transformers' tokenizers return
        batch = dict(batch)
    if isinstance(batch, Tensor | dict | list | tuple):
        return caller(model, batch)()
    raise TypeError(
        f"a batch is of type {type(batch).__name__}, not a tensor, a tuple, a list or a dict"
    )


def run_all(
    model: nn.Module, loader: Iterable[Any], run: Run, most: int | None, progress: bool | None
) -> list[Any]:
    """Run the model on each batch, and return copies of the first ones.

    Args:
        model: a model in eval mode.
        loader: yields the batches.
        run: calls the model.
        most: the largest number of batches to use; None for all.
        progress: whether to show progress; None if there are many batches and a terminal.

    Raises:
        ValueError: the loader has no batch, or the model fails with one.
    """
    first: list[Any] = []
    count = 0
    with _shown(loader, most, progress) as advance:
        for batch in itertools.islice(loader, most):
            if count < _KEPT:
                # The loader may write the next batch into the same memory.
                first.append(_pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), batch))
            _run_one(model, batch, run, count)
            advance()
            count += 1
    if count == 0:
        raise ValueError(
            "loader has no batches: pass at least one; a generator that was used up must be made "
            "again"
        )
    return first


def _run_one(model: nn.Module, batch: Any, run: Run, number: int) -> None:
    try:
        with torch.no_grad():
            run(model, batch)
    except _FindingError as error:
        raise ValueError(*error.args) from None
    except Exception as error:  # of any class: the model's own
        if run is not run_batch:
            raise ValueError(
                f"run={run!r} fails with batch {number} ({type(error).__name__}: {error}); it is "
                "called as run(model, batch)"
            ) from error
        raise ValueError(
            f"loader: {type(model).__name__} fails with batch {number} ({error}); a batch is a "
            "tensor, a tuple or list of arguments, or a dict of keyword arguments; for others, "
            "such as images with labels, pass run=lambda model, batch: model(batch[0])"
        ) from error


class _FindingError(ValueError):
    """An error about what a batch does in the model, not about how the model is called."""


def finding(message: str) -> ValueError:
    """An error that a hook raises; the caller gets a plain ValueError with this message."""
    return _FindingError(message)


@contextlib.contextmanager
def _shown(
    loader: Iterable[Any], most: int | None, progress: bool | None
) -> Iterator[Callable[[], object]]:
    """Show progress; yields the function to call after each batch."""
    sizes = [len(loader)] if isinstance(loader, Sized) else []
    total = min([*sizes, *([] if most is None else [most])], default=None)
    if progress is None:
        progress = sys.stderr.isatty() and (total is None or total >= _LONG)
    if not progress:
        yield lambda: None
    elif importlib.util.find_spec("tqdm") is not None:
        from tqdm import tqdm  # type: ignore[import-untyped]  # it has no types

        with tqdm(total=total, desc="calibrating", unit="batch", ncols=88) as bar:
            yield bar.update
    else:  # a line that counts
        numbers = itertools.count(1)
        of = "" if total is None else f"/{total}"

        def advance() -> None:
            text = f"\rcalibrating: {next(numbers)}{of} batches"
            print(text, end="", file=sys.stderr, flush=True)

        try:
            yield advance
        finally:
            print(file=sys.stderr)
