"""Release that is always safe: at any moment, in any thread, twice, and when all ends."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

PREAMBLE = """
import atexit, ctypes, faulthandler, gc, os, random, signal, sys, threading, time, types, weakref
import torch
from allocator import Pool
from allocator.exchange import exports
from allocator.pool.blocks import Heap

faulthandler.dump_traceback_later(90, exit=True)
pool = Pool("cpu")
gc.freeze()  # or each collection would walk all of torch


class Cycle:
    def __init__(self, tensor):
        self.tensor, self.myself = tensor, self


def recount(pool):
    blocks = [b for heap in pool._core.store.heaps.values() for b in heap.blocks() if not b.is_free]
    cached = {id(export.owner) for entry in pool._core.cache for export in entry.cached}
    return sum(b.size for b in blocks if id(b.tag) not in cached)


def recount_in_use(pool):
    return sum(allocation.size for allocation in pool._core.store.in_use.values())


def check(pool):
    n = pool.memory_allocated()
    assert n == recount(pool) == recount_in_use(pool), (n, recount(pool), recount_in_use(pool))


def works(pool):
    before = pool.memory_allocated()
    a, b = pool.zeros(1000), pool.full(100_000, 7.0)
    assert (a == 0).all() and (b == 7).all()
    assert pool.memory_allocated() > before
    del a, b
    assert pool.memory_allocated() == before, (pool.memory_allocated(), before)
"""


def run(script: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(script)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (found.returncode, found.stderr) == (0, ""), f"{found.returncode}\n{found.stderr}"


COLLECTING = """
allocate, runs = Heap.allocate, []
def collecting(self, *args, **options):
    runs.append(gc.collect())
    block = allocate(self, *args, **options)
    runs.append(gc.collect())
    return block
Heap.allocate = collecting
"""


@pytest.mark.parametrize("n", [8, 100_000])
def test_collection_inside_a_call(n: int) -> None:
    run(
        COLLECTING
        + f"""
kept = []
for i in range(30):
    Cycle(pool.empty({n}))
    x = pool.full({n} + i, float(i))
    if i % 10 == 0:
        kept.append((i, x))
    del x
assert all((x == i).all() for i, x in kept) and sum(runs) >= 30
del kept, i
gc.collect()
assert pool.memory_allocated() == 0
check(pool)
"""
    )


@pytest.mark.parametrize("n", [8, 100_000])
def test_finalizer_that_allocates_and_releases(n: int) -> None:
    run(
        COLLECTING
        + f"""
ran, kept = [], []
class Finalizer(Cycle):
    def __del__(self):
        a, b = pool.full({n}, 1.0), pool.full({n} + 1, 2.0)
        memory = pool.allocate(1000)
        memory.release()
        if len(ran) % 10 == 0:
            kept.append(a)
        del a
        assert (b == 2).all()
        ran.append(self.tensor.data_ptr())
for i in range(30):
    Finalizer(pool.empty({n}))
    x = pool.full({n} + i % 3, 3.0)
    assert (x == 3).all()
del x
gc.collect()
assert len(ran) == 30 and all((a == 1).all() for a in kept)
assert pool.memory_allocated() >= 3 * {n} * 4
kept.clear()
Heap.allocate = allocate
assert pool.memory_allocated() == 0, pool.memory_allocated()
check(pool)
works(pool)
"""
    )


def test_in_another_thread() -> None:
    run("""
    tensors = [pool.full(n, 1.0) for n in (8, 1000, 100_000) for _ in range(20)]
    def drop():
        while tensors:
            tensors.pop()
    thread = threading.Thread(target=drop)
    thread.start()
    thread.join()
    assert pool.memory_allocated() == 0
    works(pool)
    """)


@pytest.mark.parametrize("n", [8, 100_000])
def test_exception_pending(n: int) -> None:
    run(f"""
    def fail(depth):
        x, y = pool.empty({n}), pool.allocate({n})
        z = torch.from_dlpack(y)
        if depth:
            fail(depth - 1)
        raise KeyError("raised")
    for _ in range(50):
        try:
            fail(3)
        except KeyError as error:
            assert error.args == ("raised",)
    def generator():
        x = pool.empty({n})
        yield
        raise KeyError("raised")
    for _ in range(50):
        try:
            list(generator())
        except KeyError:
            pass
    assert pool.memory_allocated() == 0
    works(pool)
    """)


@pytest.mark.parametrize(
    "make",
    [
        "pool.empty(8)",
        "pool.empty(100_000)",
        "torch.from_dlpack(pool.array(8))",
        "pool.allocate(8)",
        "memoryview(pool.allocate(8))",
        "memoryview(pool.array(8))",
        "numpy.from_dlpack(pool.array(8))",
        "pool.array(8).__dlpack__()",
    ],
)
def test_exception_pending_with_the_tensor_in_no_variable(make: str) -> None:
    """It dies while the interpreter unwinds, with the exception set in C."""
    run(f"""
    import numpy
    def fail(*args):
        raise AssertionError("called")
    for _ in range(50):
        try:
            fail({make}, 1 / 0)
        except ZeroDivisionError as error:
            assert error.args == ("division by zero",)
        try:
            fail(*({make} if i < 3 else {{}}["x"] for i in range(9)))
        except KeyError:
            pass
    assert pool.memory_allocated() == 0
    works(pool)
    """)


def test_interrupts() -> None:
    """Wherever KeyboardInterrupt comes, the pool works on, and no memory is lost."""
    run("""
    from tests.interrupts import interrupted
    kept = []
    def step(choose):
        kept.append(pool.empty(choose.choice([8, 8, 8, 100, 200_000])))
        if len(kept) > 20:
            kept.pop(choose.randrange(20))
    interrupts = interrupted(step, seconds=5, most=2e-3)
    assert interrupts > 100
    kept.clear()
    assert pool.memory_allocated() == 0, (interrupts, pool.memory_allocated())
    check(pool)
    tensors = [pool.full(1000, float(i)) for i in range(200)]
    assert all((x == i).all() for i, x in enumerate(tensors))
    """)


def test_fork() -> None:
    run("""
    x, y, memory = pool.full(8, 1.0), pool.full(100_000, 2.0), pool.allocate(1000)
    used = pool.memory_allocated()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert (x == 1).all()
            del x, y, memory
            gc.collect()
            for give in (lambda: pool.empty(8), lambda: pool.allocate(8), lambda: pool.zeros(0)):
                try:
                    give()
                except RuntimeError as error:
                    assert "'spawn'" in str(error)
                else:
                    raise AssertionError("given")
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    assert (x == 1).all() and (y == 2).all() and pool.memory_allocated() == used
    del x, y, memory
    assert pool.memory_allocated() == 0
    works(pool)
    """)


def test_fork_while_other_threads_allocate() -> None:
    run("""
    stop = []
    def work():
        while not stop:
            pool.empty(random.choice([8, 100_000, 3 * 10**6]))
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        child = os.fork()
        if child == 0:
            try:
                pool.empty(8)
            except RuntimeError:
                os._exit(0)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert status == 0, status
    stop.append(1)
    for thread in threads:
        thread.join()
    assert pool.memory_allocated() == 0
    works(pool)
    """)


HELD_AT_EXIT = {
    "sys": "sys.x = pool.empty(8), pool.empty(100_000)",
    "module": "torch.x = pool.empty(8)\nthis = types.ModuleType('m')\nsys.modules['m'] = this\n"
    "this.x = pool.empty(100_000)",
    "cycle": "c = Cycle(pool.empty(8))\nd = Cycle(pool.empty(100_000))\ndel c, d",
    "capsule": "sys.x = pool.array(8).__dlpack__(), pool.array(8).__dlpack__(max_version=(1, 0))",
    "memory": "sys.x = pool.allocate(8), memoryview(pool.allocate(8)), pool.array(9)",
    "no pool": "sys.x = pool.empty(8)\ndel pool",
    "view": "sys.x = memoryview(pool.allocate(8)), memoryview(pool.array(8)), "
    "torch.empty(0).set_(pool.empty(8))",
    "finalizer": "class F:\n    def __del__(self):\n        self.x.fill_(1)\n"
    "sys.x = f = F()\nf.x = pool.empty(8)",
}


@pytest.mark.parametrize("hold", HELD_AT_EXIT.values(), ids=HELD_AT_EXIT.keys())
def test_exit(hold: str) -> None:
    run(hold)


def test_exit_with_a_tensor_of_an_atexit_handler() -> None:
    run("""
    @atexit.register
    def late():
        sys.y = pool.full(9, 1.0), pool.full(100_000, 1.0)
        pool.full(8, 1.0)
    import weakref
    sys.x = pool.empty(8)
    """)


def test_exit_with_a_tensor_of_the_last_atexit_handler() -> None:
    """Registered before the package's own, so it runs after them."""
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent("""
            import atexit, sys
            @atexit.register
            def late():
                sys.y = [pool.full(n, 1.0) for n in (8, 8, 9, 100_000)]
                del sys.y[1]
                sys.y.append(pool.array(8).__dlpack__())
                pool.full(8, 1.0)
            from allocator import Pool
            pool = Pool("cpu")
            sys.x = pool.empty(8)
            """),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (found.returncode, found.stderr) == (0, ""), f"{found.returncode}\n{found.stderr}"


def test_memory_released_twice() -> None:
    run("""
    memory = pool.allocate(1000)
    memory.release()
    for _ in range(2):
        try:
            memory.release()
        except ValueError as error:
            assert "double free" in str(error)
        else:
            raise AssertionError("released twice")
    assert pool.memory_allocated() == 0
    del memory
    works(pool)
    assert pool.memory_allocated() == 0
    """)


TWICE = """
Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
export = next(e for e in pool._core.exporter.exports if e.owner is not None)
call, address = Deleter(exports._DELETER), export.address
del export
"""


@pytest.mark.parametrize("make", ["pool.empty(100_000)", "torch.from_dlpack(pool.array(8))"])
def test_deleter_called_twice(make: str) -> None:
    run(
        f"x = {make}\n"
        + TWICE
        + f"""
del x
call(address)
a, b = {make}, {make}
assert a.data_ptr() != b.data_ptr()
del a, b
assert pool.memory_allocated() == 0
works(pool)
"""
    )


@pytest.mark.parametrize("options", ["", "max_version=(1, 0)"])
def test_capsule_that_nobody_took(options: str) -> None:
    run(f"""
    for n in (8, 100_000):
        capsule = pool.array(n).__dlpack__({options})
        assert pool.memory_allocated() >= n * 4
        x = pool.full(n, 1.0)
        del capsule
        assert pool.memory_allocated() < 2 * n * 4 + 4096
        del x
        assert pool.memory_allocated() == 0
        capsules = [pool.array(n).__dlpack__({options}) for _ in range(20)]
        taken = [torch.from_dlpack(c) for c in capsules[:10]]
        del capsules
        assert len(pool._core.store.in_use) == 10 or pool.memory_allocated()
        del taken
        assert pool.memory_allocated() == 0
    works(pool)
    """)


@pytest.mark.parametrize("shape", ["8", "random.randrange(1, 60_000)"])
def test_signal_handler_that_allocates(shape: str) -> None:
    run(f"""
    kept, ran = [], []
    def handle(number, frame):
        x = pool.full({shape}, 1.0)
        memory = pool.allocate(1000)
        memory.release()
        kept.append(x)
        if len(kept) > 20:
            kept.pop(0)
        ran.append(1)
        arm()
    def arm():  # once, as on a busy machine handlers would come faster than they end
        signal.setitimer(signal.ITIMER_REAL, 0.0005)
    signal.signal(signal.SIGALRM, handle)
    arm()
    end = time.monotonic() + 2
    mine = []
    while time.monotonic() < end:
        mine.append(pool.full({shape}, 2.0))
        if len(mine) > 20:
            assert (mine.pop(random.randrange(20)) == 2).all()
    def arm():  # a handler that was pending as the timer is stopped must not start it again
        pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    time.sleep(0.01)
    assert len(ran) > 100 and all((x == 1).all() for x in kept)
    assert all((x == 2).all() for x in mine)
    kept.clear()
    mine.clear()
    assert pool.memory_allocated() == 0, pool.memory_allocated()
    check(pool)
    works(pool)
    """)


def test_close_and_hooks_are_seen_by_threads_that_allocate() -> None:
    run("""
    from allocator import Hook
    class Counts(Hook):
        seen = 0
        def allocated(self, pool, allocation):
            self.seen += 1
    sys.setswitchinterval(1e-5)
    for i in range(300):
        pool, made, done = Pool("cpu"), [0], []
        def work():
            try:
                while not done:
                    pool.empty(64)
                    made[0] += 1
            except RuntimeError:
                pass
        thread = threading.Thread(target=work)
        thread.start()
        if i % 2:
            pool.close(force=True)
            thread.join(5)
            assert not thread.is_alive()
        else:
            counts = Counts()
            pool.add_hook(counts)
            before = made[0]
            while made[0] < before + 50:
                time.sleep(0)
            done.append(1)
            thread.join()
            assert counts.seen >= 49, counts.seen
    """)


def test_threads_with_a_tracer() -> None:
    run("""
    def tracer(frame, event, argument):
        return tracer
    wrong = []
    def work(k):
        for _ in range(500):
            x, y = pool.empty(64), pool.empty(64)
            x.fill_(k), y.fill_(k)
            if not ((x == k).all() and (y == k).all()):
                wrong.append(k)
            del x, y
    sys.setswitchinterval(1e-6)
    threading.settrace(tracer)
    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pool.memory_allocated() == 0
    """)


def test_finalizer_that_asks_for_the_default_pool() -> None:
    run("""
    import allocator
    class Node:
        def __init__(self):
            self.me = self
        def __del__(self):
            allocator.memory_allocated()
    gc.set_threshold(20)
    for kind in ("device", "host", "shared") * 5:
        for _ in range(50):
            Node()
        allocator.default_pool("cpu", kind).close(force=True)
    """)


def test_fork_with_a_queue_of_the_parent() -> None:
    run("""
    import allocator
    own = allocator.load_dpctl().SyclQueue("cpu")
    of_own = Pool(own)
    stop = []
    def work():
        while not stop:
            allocator.default_pool(own)
    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(10):
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            for give in (lambda: allocator.default_pool(own), lambda: Pool(own)):
                try:
                    give().empty(8)
                except RuntimeError as error:
                    assert "'spawn'" in str(error)
                else:
                    os._exit(1)
            os._exit(0 if allocator.is_forked() else 2)
        _, status = os.waitpid(child, 0)
        assert status == 0, status
    stop.append(1)
    thread.join()
    """)
