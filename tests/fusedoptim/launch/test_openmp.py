"""torch's OpenMP threads sleep while the driver's run a kernel, and are torch's own afterwards."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch

from allocator import queue
from fusedoptim.launch import opencl, openmp
from fusedoptim.launch.opencl import driver_of
from fusedoptim.launch.openmp import call_and_wake, put_to_sleep, wake
from tests.fusedoptim.helpers import run_script
from tests.fusedoptim.launch.long_steps import is_in_region, long_step

SEVEN = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 7)


@pytest.fixture(autouse=True)
def by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches run on the driver's threads, as they do where torch's cannot run them."""
    monkeypatch.setattr(opencl, "team", lambda: None)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: nothing spins")
def test_threads_sleep_meanwhile() -> None:
    script = """
    import os, time, torch
    from fusedoptim.launch.openmp import put_to_sleep, wake
    before = set(os.listdir("/proc/self/task"))
    torch.ones(1_000_000).add(1)
    threads = set(os.listdir("/proc/self/task")) - before

    def states():
        lines = [open(f"/proc/self/task/{thread}/stat").read() for thread in threads]
        return [line.rpartition(")")[2].split()[0] for line in lines]

    seen = states()
    put_to_sleep()
    end = time.monotonic() + 60
    while states() != ["S"] and time.monotonic() < end:
        time.sleep(0.001)
    seen += states()
    assert torch.ones(1_000_000).sum() == 1_000_000  # by this thread alone
    seen += states()
    wake()
    assert torch.ones(1_000_000).sum() == 1_000_000
    seen += states()
    print(*seen)
    """
    done = run_script(script, OMP_NUM_THREADS="2", OMP_WAIT_POLICY="active")  # spins forever
    assert (done.stdout, done.stderr) == ("R S S R\n", "")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: nothing spins")
@pytest.mark.parametrize("policy", ["active", "passive"])
def test_threads_that_sleep_already_are_left_alone(policy: str) -> None:
    script = """
    import os, time, torch
    from fusedoptim.launch import opencl, openmp
    opencl.team = lambda: None
    from tests.fusedoptim.launch.long_steps import long_step
    before = set(os.listdir("/proc/self/task"))
    torch.ones(1_000_000).add(1)
    (thread,) = set(os.listdir("/proc/self/task")) - before

    def sleeps():
        lines = open(f"/proc/self/task/{thread}/status").read().splitlines()
        (line,) = [line for line in lines if line.startswith("voluntary_ctxt_switches")]
        return int(line.split()[1])

    param, optimizer = long_step()
    optimizer.step()
    time.sleep(0.01)
    before = sleeps()
    for _ in range(20):
        print(openmp._team.worker.spins())
        optimizer.step()
        time.sleep(0.01)
    # Where other processes have the cores, a step may end before the thread has noticed it.
    end = time.monotonic() + 60
    while sleeps() == before and os.environ["OMP_WAIT_POLICY"] == "active":
        assert time.monotonic() < end
        optimizer.step()
        time.sleep(0.01)
    print("put to sleep" if sleeps() > before else "left alone")
    """
    done = run_script(script, OMP_NUM_THREADS="2", OMP_WAIT_POLICY=policy)
    expected = {
        "active": 20 * "True\n" + "put to sleep\n",
        "passive": 20 * "False\n" + "left alone\n",
    }
    assert (done.stdout, done.stderr) == (expected[policy], "")


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_any_number_of_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise, threads that sleep by themselves would be left alone.
    monkeypatch.setattr(openmp._Worker, "spins", lambda worker: True)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(20):
            put_to_sleep()
            assert is_in_region() == (threads > 1)
            assert call_and_wake(SEVEN) == 7
            assert not is_in_region()
            assert torch.ones(1_000_000).sum() == 1_000_000
    finally:
        torch.set_num_threads(before)
    assert not is_in_region()


def test_a_step_while_the_threads_sleep() -> None:
    """A finalizer may run while the threads sleep, and use torch or take a step."""
    param, optimizer = long_step()
    torch.ones(1_000_000).add(1)  # from here on the threads spin
    put_to_sleep()
    optimizer.step()
    assert not is_in_region()
    wake()
    assert call_and_wake(SEVEN) == 7
    assert (param == -0.5).all()


def test_refused_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp._Worker, "spins", lambda worker: True)
    _, optimizer = long_step()
    optimizer.step()

    def refused(*arguments: object) -> int:
        assert is_in_region() == (torch.get_num_threads() > 1)
        return -5  # out of resources

    driver = driver_of(queue("cpu").sycl_device)
    assert driver is not None
    with monkeypatch.context() as patch:
        patch.setattr(driver.opencl, "enqueue", refused)
        with pytest.raises(RuntimeError, match="clEnqueueNDRangeKernel failed"):
            optimizer.step()
    assert not is_in_region()
    optimizer.step()
