"""Kernels run on the threads and the cores that a rank is given, and on no others."""

from __future__ import annotations

import json
import os

import pytest

from tests.running import ONE_CORE, check_fresh, check_script

RAN = """
import json, os, sys, time
from pathlib import Path
import torch
from fusedoptim import FusedAdamW
from fusedoptim.raw import RawModule

def cpu_times():
    tasks = Path("/proc/self/task").iterdir()
    return {task.name: (task / "schedstat").read_text().split()[0] for task in tasks}

def count(call):
    for _ in range(3):
        call()
    before, now = {}, cpu_times()
    while [name for name in now if now[name] != before.get(name)] != [str(os.getpid())]:
        time.sleep(0.05)  # a thread of the last call may not sleep yet
        before, now = now, cpu_times()
    before = cpu_times()
    for _ in range(5):
        call()
    return sum(spent != before.get(name) for name, spent in cpu_times().items())

x = torch.randn(2 << 20).requires_grad_()
x.grad = torch.randn(2 << 20)
step = FusedAdamW([x]).step
found = [count(step)]
for threads in map(int, sys.argv[1:]):
    torch.set_num_threads(threads)
    found.append(count(step))
"""
"""Counts the threads that ran at all during steps: at first, and with each number of threads."""
RAW = """
kernel = RawModule("kernel void twice(global float *x) { x[get_global_id(0)] *= 2; }")["twice"]
kernel(1 << 20, None, (x.detach(),))
tasks = [int(task.name) for task in Path("/proc/self/task").iterdir()]
found.append(sorted(set().union(*map(os.sched_getaffinity, tasks))))
"""
"""Finds the cores on which threads may run, including the driver's, which run users' kernels."""


PRINT = "print(json.dumps(found))"
SLEEPING = {"OMP_WAIT_POLICY": "passive"}
"""A spinning OpenMP thread would run without taking part in a step."""


def test_threads_as_torchrun_sets_them_and_as_the_program_does() -> None:
    found = check_script(RAN + PRINT, "3", "1", OMP_NUM_THREADS="1", **SLEEPING)
    assert json.loads(found) == [1, 3, 1]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_affinity() -> None:
    """OpenMP's default is a thread for each core of the process; torch reads it at import."""
    script = ONE_CORE + 'import os; os.environ.pop("OMP_NUM_THREADS")\n' + RAN + RAW
    found = json.loads(check_fresh(script + PRINT, **SLEEPING))
    assert found == [1, [min(os.sched_getaffinity(0))]]
