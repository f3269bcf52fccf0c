"""Memory stays until the queues that use it have finished, also if it is not the pool's own."""

from __future__ import annotations

import json
import textwrap

import pytest

import allocator
from allocator import Pool
from tests.allocator.helpers import MIB, DroppingDriver, FaultyDriver, OtherQueue, once_inside
from tests.running import run_script

PREAMBLE = """
import functools, gc, json, sys, time, torch, traceback, allocator
from allocator import Pool
from fusedoptim.raw import RawKernel

own = allocator.queue("cpu")
other = allocator.load_dpctl().SyclQueue(own.sycl_context, own.sycl_device, property="in_order")
SLOW = '''
kernel void slow(ulong memory, ulong progress) {
    volatile global int *x = (volatile global int *)memory;
    volatile global int *state = (volatile global int *)progress;
    state[0] = 1;
    for (ulong k = 0; k < 300000000; k++) x[k % 1024] = (int)k;
    state[0] = 2;
}
'''
state = torch.zeros(1, dtype=torch.int32)

@functools.cache
def slow(queue):
    kernel = RawKernel(SLOW, device=queue)
    kernel.compile()
    return kernel

def used(memory, queue):
    address = memory.data_ptr() if torch.is_tensor(memory) else memory.address
    slow(queue)(1, 1, (address, state.data_ptr()), wait=False)
    while state[0] == 0:
        time.sleep(0.001)
    return memory
"""

ENDS = {
    "the pool returns free memory": """
        pool = Pool("cpu")
        x = used(pool.allocate(64 << 20, queue=other), other)
        del x
        pool.empty_cache()
    """,
    "a limit makes it return free memory": """
        pool = Pool("cpu", limit="100MiB")
        x = used(pool.allocate(64 << 20, queue=other), other)
        del x
        pool.empty(15 << 20)
    """,
    "idle memory is returned": """
        pool = Pool("cpu", idle_seconds=0.05)
        x = used(pool.allocate(64 << 20, queue=other), other)
        del x
        while pool.memory_reserved():
            time.sleep(0.01)
    """,
    "the queue's memory grows": """
        pool = Pool("cpu")
        x = used(pool.allocate(64 << 20, queue=other), other)
        del x
        x = pool.allocate(128 << 20, queue=other)
    """,
    "the pool is closed": """
        pool = Pool("cpu")
        x = used(pool.empty(4 << 20), other)
        pool.record_queue(x, other)
        del x
        pool.close()
        assert pool.memory_reserved() == 0
    """,
    "the pool dies with recorded memory": """
        pool = Pool("cpu")
        x = used(pool.empty(4 << 20), other)
        pool.record_queue(x, other)
        del x
        pool.memory_allocated()
        del pool
        gc.collect()
    """,
    "the pool dies with memory just released": """
        pool = Pool("cpu")
        x = used(pool.allocate(16 << 20), own)
        del x, pool
        gc.collect()
    """,
    "the pool dies with memory just released that was recorded": """
        pool = Pool("cpu")
        x = used(pool.allocate(16 << 20), other)
        pool.record_queue(x, other)
        del x, pool
        gc.collect()
    """,
}


RUN = """
for name, end in json.loads(sys.argv[1]).items():
    state[0] = 0
    try:
        exec(compile(end, name, "exec"), dict(globals()))
        error = "" if state[0] == 2 else "the kernel still runs"
    except Exception:
        error = traceback.format_exc()
    print(json.dumps([name, error]), flush=True)
    own.wait(), other.wait()
"""
EXIT = "the process exits"


@pytest.fixture(scope="module")
def reports() -> dict[str, str]:
    """For each end, what was wrong right after it. All run in one process, which may crash."""
    ends = {name: textwrap.dedent(end) for name, end in ENDS.items()}
    done = run_script(PREAMBLE + RUN, json.dumps(ends), OMP_NUM_THREADS="1")
    found: dict[str, str] = dict(map(json.loads, done.stdout.splitlines()))
    found[EXIT] = f"{done.returncode}\n{done.stderr}" if done.returncode or done.stderr else ""
    return found


@pytest.mark.parametrize("end", [*ENDS, EXIT])
def test_driver_gets_memory_once_the_kernel_has_ended(end: str, reports: dict[str, str]) -> None:
    assert end in reports, "the process crashed here or before"
    assert reports[end] == ""


def test_memory_of_another_queue_that_the_pools_own_uses() -> None:
    """It is not reused before the pool's own queue has finished with it either."""
    own, pool = OtherQueue(), Pool(driver=FaultyDriver())
    pool.sycl_queue = own
    memory = pool.allocate(4096, queue=OtherQueue())
    pool.record_queue(memory, own)
    memory.release()
    assert pool.memory_stats()["active_bytes.all.current"] == 4096
    own.is_done = True
    assert pool.memory_stats()["active_bytes.all.current"] == 0


def test_memory_of_another_queue_allocated_inside_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, queue, kept = DroppingDriver(), OtherQueue(), []
    pool = Pool(driver=driver)
    once_inside(monkeypatch, lambda: kept.append(pool.allocate(MIB, queue=queue)))
    pool.allocate(MIB).release()
    held = len(driver.handles)
    kept.pop().release()
    pool.empty_cache()
    assert len(driver.handles) == held - 1  # the kept one stays
    queue.is_done = True
    pool.empty_cache()
    assert not driver.handles


def test_memory_of_nothing(pool: Pool) -> None:
    for memory in (pool.empty(0), pool.zeros((3, 0)), pool.array(0), pool.allocate(0)):
        for queue in (pool.sycl_queue, OtherQueue()):
            pool.record_queue(memory, queue)
        with pytest.raises(TypeError, match="queue=3"):
            pool.record_queue(memory, 3)
    assert pool.memory_reserved() == 0


def test_a_pool_of_real_queues_can_be_closed() -> None:
    own = allocator.queue("cpu")
    other = allocator.load_dpctl().SyclQueue(own.sycl_context, own.sycl_device)
    pool = Pool("cpu")
    x, y = pool.allocate(MIB), pool.allocate(MIB, queue=other)
    for memory in (x, y):
        pool.record_queue(memory, own)
        pool.record_queue(memory, other)
    del x, y, memory
    pool.close()
    assert pool.memory_reserved() == 0
