"""Launches run in parts on torch's threads: all of each, once, on as many as torch may use."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import Optimizer

import fusedoptim
from allocator import queue
from fusedoptim import FusedAdamW, FusedLamb
from fusedoptim.launch import opencl, parts
from fusedoptim.launch.modules import ModuleError
from fusedoptim.launch.opencl import driver_of
from fusedoptim.launch.parts import parts_of
from fusedoptim.nn.functional import dropout
from fusedoptim.raw import ElementwiseKernel, ReductionKernel
from tests.fusedoptim.helpers import SideBySide, each_class, run_script
from tests.fusedoptim.launch.long_steps import MANY, long_step, many_params
from tests.interrupts import InterruptAt
from tests.optimizer_cases import OptimizerCase


@pytest.fixture(params=[1, 2, 7, 16])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Numbers of threads; 16 have over 64 parts, the later of which belong to no thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make parts of a few groups each, so that launches over few elements have many."""
    monkeypatch.setattr(parts, "_LEAST", 1)
    monkeypatch.setattr(parts, "_MANY", 1)


@pytest.mark.parametrize(
    ("elements", "threads", "of_step", "of_light"),
    [
        (10_000, 16, 1, 1),
        (10_000_000, 1, 1, 1),
        (100_000, 16, 3, 1),
        (256 << 10, 2, 2, 2),
        (256 << 10, 16, 8, 2),
        (1 << 20, 16, 16, 5),
        (4 << 20, 16, 32, 16),
        (16 << 20, 16, 128, 64),
        (1 << 30, 16, 128, 128),
    ],
)
def test_number_of_parts(elements: int, threads: int, of_step: int, of_light: int) -> None:
    assert parts_of(1000, elements, threads, is_light=False) == of_step
    assert parts_of(1000, elements, threads, is_light=True) == of_light


def test_no_more_parts_than_groups() -> None:
    assert parts_of(groups=3, elements=10_000_000, threads=16, is_light=False) == 3


@pytest.mark.usefixtures("threads", "small_parts")
@each_class
def test_steps(case: OptimizerCase) -> None:
    """Steps are right in all parts, including a last one that is shorter."""
    sizes = (1, 15, 17, 1023, 1025, 4097, 33_000, 70_001)
    SideBySide(case, params=[Parameter(torch.randn(n)) for n in sizes]).train(3)


@pytest.mark.usefixtures("threads", "small_parts")
@pytest.mark.parametrize("n", [1, 16, 1023, 32 * 1024 + 1, 1_000_003])
def test_expressions(n: int) -> None:
    twice = ElementwiseKernel("T x", "T y", "y = 2 * x", "twice")
    total = ReductionKernel("T x", "T y", "x", "a + b", "y = a", "0", "total")
    x = torch.randint(-100, 100, (n,))
    assert torch.equal(twice(x), 2 * x)
    assert total(x) == x.sum()
    rows = torch.randint(-100, 100, (n // 7 + 1, 7))
    assert torch.equal(total(rows, axis=0), rows.sum(0))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    "make",
    [
        lambda params: FusedLamb(params, max_grad_norm=1.0),
        lambda params: FusedAdamW(params, state_dtype=torch.bfloat16),
        lambda params: FusedAdamW(params, state_dtype="float8"),
    ],
    ids=["sums", "bfloat16 state", "float8 state"],
)
def test_same_bits_on_any_number_of_threads(make: Callable[[list[Parameter]], Optimizer]) -> None:
    """Random numbers, and sums over chunks of several threads, have the same bits as well."""
    start = [torch.randn(n) for n in (33_000, 7, 100_003)]
    gradients = [[torch.randn_like(x) for x in start] for _ in range(3)]
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        params = [Parameter(x.clone()) for x in start]
        optimizer = make(params)
        torch.manual_seed(0)
        for grads in gradients:
            for p, grad in zip(params, grads):
                p.grad = grad.clone()
            optimizer.step()
        torch.manual_seed(0)
        results.append([*params, dropout(start[-1], 0.5)])
    torch.set_num_threads(before)
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


@pytest.mark.usefixtures("threads", "small_parts")
@each_class
@pytest.mark.parametrize("n", [0, 3, 1000])
def test_writes_of_many_tensors_are_counted_once(case: OptimizerCase, n: int) -> None:
    """Writes are counted while the kernel runs, or without a kernel if tensors are empty."""
    params = [Parameter(torch.randn(n)) for _ in range(MANY)]
    optimizer = case.make(params)
    for _ in range(2):
        for p in params:
            p.grad = torch.randn_like(p)
        before = [p._version for p in params]
        optimizer.step()
        assert [p._version for p in params] == [version + 1 for version in before]


def test_no_interrupt_comes_between_a_launch_and_its_count_of_writes() -> None:
    params, optimizer = many_params()
    optimizer.step()
    for n in range(1000):
        p = params[-1]
        value, version = p.detach()[0].item(), p._version
        with InterruptAt(n, "polls", within=fusedoptim, since="submit") as interrupt:
            optimizer.step()
        assert p._version - version == (p.detach()[0].item() != value)
        if not interrupt.has_raised:
            break
    assert 3 < n < 1000


def test_no_more_threads_than_torch_may_use() -> None:
    """Neither other threads of torch's nor the driver's take part in a step."""
    script = """
    import os, time, torch
    from tests.fusedoptim.launch.long_steps import long_step

    def times():
        return {t: open(f"/proc/self/task/{t}/stat").read().rpartition(")")[2].split()[11:13]
                for t in os.listdir("/proc/self/task") if int(t) != os.getpid()}

    param, optimizer = long_step()
    optimizer.step()
    time.sleep(0.1)
    before = times()
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        optimizer.step()
    after = times()
    print({t for t in after if after[t] != before.get(t)} or "none")
    """
    assert run_script(script, OMP_NUM_THREADS="1").stdout == "none\n"


Enqueue = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 9)


@pytest.mark.parametrize("has_run", [0, 1])
def test_refused(has_run: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If nothing has run, the step is not taken; otherwise the error tells to load a checkpoint."""
    driver = driver_of(queue("cpu").sycl_device)
    assert driver is not None
    enqueue = Enqueue(driver.opencl.enqueue_address)
    answers = itertools.repeat(True)

    def refusing(*arguments: Any) -> int:
        return enqueue(*arguments) if next(answers) else -5  # out of resources

    replaced = Enqueue(refusing)
    address = ctypes.cast(replaced, ctypes.c_void_p).value
    monkeypatch.setattr(driver.opencl, "enqueue_address", address)
    monkeypatch.setattr(opencl, "parts_of", lambda *_: 4)
    param, optimizer = long_step()
    optimizer.step()
    answers = itertools.chain([True] * has_run, itertools.repeat(False))
    what = "part of its results; load a checkpoint" if has_run else "OpenCL's error -5"
    with pytest.raises(RuntimeError, match=what):
        optimizer.step()
    answers = itertools.repeat(True)
    assert bool((param == -0.5).all()) == (not has_run)
    param.detach().fill_(0)
    optimizer.step()
    assert (param == -0.5).all()


class TestCode:
    @pytest.fixture
    def code(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        copy = tmp_path / "code"
        copy.write_bytes(parts.CODE.read_bytes())
        monkeypatch.setattr(parts, "CODE", copy)
        parts.team.cache_clear()
        yield copy
        parts.team.cache_clear()

    def test_damaged(self, code: Path) -> None:
        """Code that is not the shipped one is not run."""
        code.write_bytes(code.read_bytes()[:-1] + b"\0")
        _, optimizer = long_step()
        with pytest.raises(ModuleError, match="not what was shipped; reinstall"):
            optimizer.step()

    def test_missing(self, code: Path) -> None:
        """Where the code is missing or cannot be run, the driver's threads run steps."""
        code.unlink()
        assert parts.team() is None
        param, optimizer = long_step()
        optimizer.step()
        assert (param == -0.5).all()
