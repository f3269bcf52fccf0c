"""Marks for tests that compile, and threads that compile or export while a test goes on."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.running import LIMIT

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler"
)
needs_gpu_compiler = pytest.mark.skipif(
    shutil.which("spirv-val") is None or shutil.which("ocloc") is None,
    reason="apt install spirv-tools intel-opencl-icd",
)
quiet_compiler = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script",
    "ignore:.*autograd.function.Function.*instantiated:DeprecationWarning",  # by torch itself
)
each_compilation = pytest.mark.parametrize(
    ("dynamic", "sizes"), [(False, [9]), (True, [9, 11])], ids=["static", "dynamic"]
)
"""One size for a static graph, since another would only recompile it; two for a dynamic one."""


def assert_same_results(result: Tensor, expected: Tensor, given: Sequence[Tensor]) -> None:
    """Assert that two outputs, and the gradients of their sums, are close."""
    torch.testing.assert_close(result, expected)
    for each, other in zip(
        torch.autograd.grad(result.sum(), given), torch.autograd.grad(expected.sum(), given)
    ):
        torch.testing.assert_close(each, other)


@contextlib.contextmanager
def another_thread_compiles() -> Iterator[None]:
    """A block during which another thread is in the middle of torch.compile's work."""
    with _beside(
        lambda wait: torch.compile(lambda x: x + 1, backend=_waiting(wait))(torch.ones(1))
    ):
        yield


@contextlib.contextmanager
def another_thread_exports() -> Iterator[None]:
    """A block during which another thread is in the middle of torch.export."""

    class Module(torch.nn.Module):
        def __init__(self, wait: Callable[[], None]) -> None:
            super().__init__()
            self.wait = wait

        def forward(self, x: Tensor) -> Tensor:
            self.wait()
            return x + 1

    with _beside(lambda wait: torch.export.export(Module(wait), (torch.ones(1),))):
        yield


def _waiting(wait: Callable[[], None]) -> Any:
    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        wait()
        return graph.forward

    return backend


@contextlib.contextmanager
def _beside(work: Callable[[Callable[[], None]], object]) -> Iterator[None]:
    """A block that begins once ``work`` in another thread waits, and lets it go on at its end."""
    waits, goes_on = threading.Event(), threading.Event()

    def wait() -> None:
        waits.set()
        assert goes_on.wait(LIMIT)

    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(work, wait)
        try:
            while not waits.wait(0.1):
                assert not done.done(), done.exception()
            yield
        finally:
            goes_on.set()
        done.result()
