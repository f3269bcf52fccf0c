"""Releasing is always safe: at any moment, in any thread, twice, and at exit."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import random
import signal
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch

import allocator
from allocator import Hook, Pool
from allocator.exchange.exports import _DELETER
from allocator.pool.blocks import Heap
from tests.allocator.helpers import bytes_in_use
from tests.running import check_script, in_threads

both_sizes = pytest.mark.parametrize("n", [8, 100_000])
call_deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_DELETER)


@pytest.fixture
def pool() -> Iterator[Pool]:
    """A pool that must be empty and usable when the test ends."""
    pool = Pool("cpu")
    yield pool
    check_empty(pool)
    a, b = pool.zeros(1000), pool.full(100_000, 7.0)
    assert (a == 0).all()
    assert (b == 7).all()
    assert pool.memory_allocated() > 0
    del a, b
    check_empty(pool)


def check_empty(pool: Pool) -> None:
    """Check that neither the figures nor a recount of the blocks find memory in use."""
    assert pool.memory_allocated() == bytes_in_use(pool) == 0
    cached = {id(export.owner) for entry in pool._core.cache for export in entry.cached}
    blocks = [b for heap in pool._core.store.heaps.values() for b in heap.blocks()]
    assert all(block.is_free or id(block.tag) in cached for block in blocks)


class Cycle:
    def __init__(self, tensor: Any) -> None:
        self.tensor, self.myself = tensor, self


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect garbage inside each of the pool's calls, and list how much was found."""
    allocate, found = Heap.allocate, []

    def collecting(*args: Any) -> Any:
        found.append(gc.collect())
        block = allocate(*args)
        found.append(gc.collect())
        return block

    monkeypatch.setattr(Heap, "allocate", collecting)
    return found


@both_sizes
def test_collection_inside_a_call(pool: Pool, collections: list[int], n: int) -> None:
    kept = []
    for i in range(30):
        Cycle(pool.empty(n))
        x = pool.full(n + i, float(i))
        if i % 10 == 0:
            kept.append((i, x))
        del x
    assert all((x == i).all() for i, x in kept)
    assert sum(collections) >= 30
    kept.clear()
    gc.collect()


@both_sizes
def test_finalizer_that_allocates_and_releases(
    pool: Pool, collections: list[int], monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    kept: list[torch.Tensor] = []
    ran = []

    class Finalizer(Cycle):
        def __del__(self) -> None:
            a, b = pool.full(n, 1.0), pool.full(n + 1, 2.0)
            pool.allocate(1000).release()
            if len(ran) % 10 == 0:
                kept.append(a)
            del a
            assert (b == 2).all()
            ran.append(self.tensor.data_ptr())

    for i in range(30):
        Finalizer(pool.empty(n))
        x = pool.full(n + i % 3, 3.0)
        assert (x == 3).all()
    del x
    gc.collect()
    assert len(ran) == 30
    assert all((a == 1).all() for a in kept)
    assert pool.memory_allocated() >= 3 * n * 4
    kept.clear()
    monkeypatch.undo()


def test_in_another_thread(pool: Pool) -> None:
    in_threads(list.clear, [pool.full(n, 1.0) for n in (8, 1000, 100_000) for _ in range(20)])


@both_sizes
def test_exception_pending(pool: Pool, n: int) -> None:
    def fail(depth: int) -> None:
        kept = pool.empty(n), torch.from_dlpack(pool.allocate(n))
        if depth:
            fail(depth - 1)
        del kept
        raise KeyError("raised")

    def generator() -> Iterator[None]:
        kept = pool.empty(n)
        yield
        del kept
        raise KeyError("raised")

    for _ in range(50):
        with pytest.raises(KeyError, match="raised"):
            fail(3)
        with pytest.raises(KeyError, match="raised"):
            list(generator())


@pytest.mark.parametrize(
    "make",
    [
        lambda pool: pool.empty(8),
        lambda pool: pool.empty(100_000),
        lambda pool: torch.from_dlpack(pool.array(8)),
        lambda pool: pool.allocate(8),
        lambda pool: memoryview(pool.allocate(8)),
        lambda pool: memoryview(pool.array(8)),
        lambda pool: numpy.from_dlpack(pool.array(8)),
        lambda pool: pool.array(8).__dlpack__(),
    ],
)
def test_exception_pending_with_the_tensor_in_no_variable(
    pool: Pool, make: Callable[[Pool], Any]
) -> None:
    """The tensor dies while the interpreter unwinds, with the exception set in C."""

    def fail(*args: Any) -> None:
        raise AssertionError("called")

    for _ in range(50):
        with pytest.raises(ZeroDivisionError, match="division by zero"):
            fail(make(pool), 1 / 0)
        with pytest.raises(KeyError):
            fail(*(make(pool) if i < 3 else {}["x"] for i in range(9)))


def test_fork_while_other_threads_allocate() -> None:
    check_script("""
        import os, random, threading, torch
        from allocator import Pool
        pool, stop = Pool("cpu"), []
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
            assert os.waitpid(child, 0)[1] == 0
        stop.append(1)
        for thread in threads:
            thread.join()
        assert pool.memory_allocated() == 0
        assert (pool.full(1000, 7.0) == 7).all()
    """)


def test_fork_with_a_queue_of_the_parent() -> None:
    check_script("""
        import os, signal, threading, torch
        import allocator
        from allocator import Pool
        allocator.queue("cpu")
        own = allocator.load_dpctl().SyclQueue("cpu")
        of_own, stop = Pool(own), []
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
            assert os.waitpid(child, 0)[1] == 0
        stop.append(1)
        thread.join()
    """)


HELD_AT_EXIT = {
    "everywhere": """
        sys.tensors = pool.empty(8), pool.empty(100_000)
        sys.capsules = pool.array(8).__dlpack__(), pool.array(8).__dlpack__(max_version=(1, 0))
        sys.memory = pool.allocate(8), memoryview(pool.allocate(8)), pool.array(9)
        sys.views = memoryview(pool.array(8)), torch.empty(0).set_(pool.empty(8))
        torch.x = pool.empty(8)
        this = types.ModuleType("m")
        sys.modules["m"] = this
        this.x = pool.empty(100_000)
        debugged = Pool("cpu", debug=True)
        sys.debugged = debugged.allocate(8), debugged.empty(8), debugged.array(8).__dlpack__()
        debugged.empty(100)
        @atexit.register
        def late():
            sys.y = pool.full(9, 1.0), pool.full(100_000, 1.0)
            pool.full(8, 1.0)
    """,
    "by garbage": """
        class Cycle:
            def __init__(self, tensor):
                self.tensor, self.myself = tensor, self
        c, d = Cycle(pool.empty(8)), Cycle(pool.empty(100_000))
        del c, d
        class Finalizer:
            def __del__(self):
                self.x.fill_(1)
        sys.x = f = Finalizer()
        f.x = pool.empty(8)
    """,
    "without the pool": """
        sys.x = pool.empty(8)
        del pool
    """,
}


@pytest.mark.parametrize("hold", HELD_AT_EXIT.values(), ids=HELD_AT_EXIT.keys())
def test_exit(hold: str) -> None:
    preamble = "import atexit, sys, torch, types\nfrom allocator import Pool\npool = Pool('cpu')\n"
    check_script(preamble + textwrap.dedent(hold))


def test_exit_with_a_tensor_of_the_last_atexit_handler() -> None:
    """The handler is registered before the package's own, so it runs after them."""
    check_script("""
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
    """)


@pytest.mark.parametrize(
    "make", [lambda pool: pool.empty(100_000), lambda pool: torch.from_dlpack(pool.array(8))]
)
def test_deleter_called_twice(pool: Pool, make: Callable[[Pool], Any]) -> None:
    x = make(pool)
    (address,) = [e.address for e in pool._core.exporter.exports if e.owner is not None]
    del x
    call_deleter(address)
    a, b = make(pool), make(pool)
    assert a.data_ptr() != b.data_ptr()


@pytest.mark.parametrize("options", [{}, {"max_version": (1, 0)}])
@both_sizes
def test_capsule_that_nobody_took(pool: Pool, n: int, options: dict[str, Any]) -> None:
    memory = pool.allocate(4 * n)
    capsule = memory.__dlpack__(**options)
    with pytest.raises(BufferError):
        memory.release()
    x = pool.full(n, 1.0)
    del capsule
    memory.release()
    assert pool.memory_allocated() < 4 * n + 4096
    del x
    assert pool.memory_allocated() == 0
    capsules = [pool.array(n).__dlpack__(**options) for _ in range(20)]
    taken = [torch.from_dlpack(c) for c in capsules[:10]]
    del capsules
    assert pool.memory_stats()["allocation.all.current"] == len(taken)


@pytest.mark.parametrize("shape", [lambda: 8, lambda: random.randrange(1, 60_000)])
def test_signal_handler_that_allocates(pool: Pool, shape: Callable[[], int]) -> None:
    kept: list[torch.Tensor] = []
    mine: list[torch.Tensor] = []
    ran = 0

    def handle(number: int, frame: Any) -> None:
        nonlocal ran
        x = pool.full(shape(), 1.0)
        pool.allocate(1000).release()
        kept.append(x)
        if len(kept) > 20:
            kept.pop(0)
        ran += 1
        if ran < 300:  # armed once each, or a busy machine would run handlers back to back
            signal.setitimer(signal.ITIMER_REAL, 0.0005)

    previous = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005)
        while ran < 300:
            mine.append(pool.full(shape(), 2.0))
            if len(mine) > 20:
                assert (mine.pop(random.randrange(20)) == 2).all()
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert all((x == 1).all() for x in kept)
    assert all((x == 2).all() for x in mine)


@pytest.mark.usefixtures("_many_switches")
@pytest.mark.parametrize("ends", ["close", "hook"])
def test_close_and_hooks_are_seen_by_threads_that_allocate(ends: str) -> None:
    class Counts(Hook):
        seen = 0

        def allocated(self, pool: Pool, allocation: Any) -> None:
            self.seen += 1

    def close() -> None:
        pool.close(force=True)

    def hook() -> None:
        counts = Counts()
        pool.add_hook(counts)
        before = made
        while made < before + 50:
            time.sleep(0)
        done.set()
        assert counts.seen >= 49

    def work() -> None:
        nonlocal made
        with contextlib.suppress(RuntimeError):
            while not done.is_set():
                pool.empty(64)
                made += 1

    for _ in range(150):
        pool, made, done = Pool("cpu"), 0, threading.Event()
        in_threads(lambda function: function(), work, close if ends == "close" else hook)


@pytest.mark.usefixtures("_many_switches")
def test_threads_with_a_tracer(pool: Pool) -> None:
    def trace(frame: Any, event: str, argument: Any) -> Any:
        return trace

    def work(k: int) -> None:
        for _ in range(500):
            x, y = pool.empty(64), pool.empty(64)
            x.fill_(k), y.fill_(k)
            assert (x == k).all()
            assert (y == k).all()
            del x, y

    before = threading.gettrace()
    threading.settrace(trace)
    try:
        in_threads(work, *range(4))
    finally:
        threading.settrace(before)


def test_finalizer_that_asks_for_the_default_pool() -> None:
    class Node(Cycle):
        def __del__(self) -> None:
            allocator.memory_allocated()

    before = gc.get_threshold()
    gc.set_threshold(20)
    try:
        for kind in ("device", "host", "shared") * 5:
            for _ in range(50):
                Node(None)
            allocator.default_pool("cpu", kind).close(force=True)
    finally:
        gc.set_threshold(*before)
