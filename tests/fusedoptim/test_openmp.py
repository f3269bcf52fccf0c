"""torch's OpenMP threads sleep while a long kernel runs, and are torch's own again afterwards."""

from __future__ import annotations

import ctypes
import functools
import os
import random
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from torch.nn import Parameter

from fusedoptim import FusedSGD
from fusedoptim._openmp import WORTH_SLEEPING, call_with_threads_asleep
from tests.allocator.interrupts import interrupted
from tests.fusedoptim.test_interrupts import InterruptAt

SEVEN = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 7)


def is_in_region() -> bool:
    return bool(ctypes.CDLL(None).omp_in_parallel())


def long_step(lr: float = 0.5) -> tuple[Parameter, FusedSGD]:
    param = Parameter(torch.zeros(4, WORTH_SLEEPING // 3))
    param.grad = torch.ones_like(param)
    return param, FusedSGD([param], lr=lr)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: nothing spins")
def test_threads_sleep_meanwhile() -> None:
    script = """
    import ctypes, functools, os, time, torch
    from fusedoptim._openmp import call_with_threads_asleep
    before = set(os.listdir("/proc/self/task"))
    torch.ones(1_000_000).add(1)
    threads = set(os.listdir("/proc/self/task")) - before

    def states():
        lines = [open(f"/proc/self/task/{thread}/stat").read() for thread in threads]
        return [line.rpartition(")")[2].split()[0] for line in lines]

    @ctypes.CFUNCTYPE(ctypes.c_int)
    def look():
        end = time.monotonic() + 60
        while states() != ["S"] and time.monotonic() < end:
            time.sleep(0.001)
        seen.extend(states())
        return 7

    seen = states()
    assert call_with_threads_asleep(functools.partial(look)) == 7
    assert torch.ones(1_000_000).sum() == 1_000_000
    seen += states()
    print(*seen)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=os.environ | {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "active"},  # spins for ever
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("R S R\n", "", 0)


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_any_number_of_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(20):
            assert call_with_threads_asleep(functools.partial(SEVEN)) == 7
            assert torch.ones(1_000_000).sum() == 1_000_000
    finally:
        torch.set_num_threads(before)
    assert not is_in_region()


def test_a_call_within_a_call() -> None:
    """A finalizer may run in the middle, and use torch or take a step."""
    ran = []

    @ctypes.CFUNCTYPE(ctypes.c_int)
    def work() -> int:
        ran.append(float(torch.ones(1_000_000).sum()))
        ran.append(call_with_threads_asleep(functools.partial(SEVEN)))
        return 3

    assert call_with_threads_asleep(functools.partial(work)) == 3
    assert ran == [1_000_000, 7]
    assert not is_in_region()


def test_steps_in_threads_of_their_own() -> None:
    """Threads that never ran a region before, and end."""
    made = [long_step() for _ in range(4)]

    def train(optimizer: FusedSGD) -> None:
        for _ in range(20):
            optimizer.step()

    threads = [threading.Thread(target=train, args=(optimizer,)) for _, optimizer in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for param, _ in made:
        assert (param == -10).all()


def test_interrupted_wherever_python_looks_for_it() -> None:
    param, optimizer = long_step()
    optimizer.step()
    for n in range(1000):
        before = float(param.detach()[0, 0])
        interrupt = InterruptAt(n, "call_with_threads_asleep")
        try:
            with interrupt:
                optimizer.step()
        except KeyboardInterrupt:
            pass
        assert not is_in_region()
        assert (param == before - 0.5).all()  # what was launched is taken
        if not interrupt.has_raised:
            break
    assert 3 < n < 1000


def test_interrupted_at_any_moment() -> None:
    param, optimizer = long_step(lr=0.0)

    def step(choose: random.Random) -> None:
        assert not is_in_region()
        optimizer.step()

    assert interrupted(step, seconds=2, most=1e-3) > 100
    assert not is_in_region()
    optimizer.step()
    assert (param == 0).all()
