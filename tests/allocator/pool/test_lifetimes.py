"""Memory lives as long as anything reads it, whatever becomes of the pool."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import allocator
from allocator import Pool, current_pool, default_pool
from allocator.exchange import exports
from tests.conftest import SEED
from tests.garbage import without_collections


@pytest.fixture
def pool() -> Pool:
    return Pool("cpu")


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "slice": lambda x: x[10:20],
    "element": lambda x: x[5],
    "reshape": lambda x: x.view(10, -1).t(),
    "detach": lambda x: x.detach(),
    "storage": lambda x: x.untyped_storage(),
    "numpy": lambda x: x.numpy()[3:],
    "dlpack": lambda x: torch.from_dlpack(x),
    "memoryview": lambda x: memoryview(x.numpy()),
    "parameter": lambda x: torch.nn.Parameter(x),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("n", [100, 100_000])
def test_views_keep_memory(pool: Pool, view: Callable[[Tensor], Any], n: int) -> None:
    x = pool.full(n, 3.0)
    used = pool.memory_allocated()
    kept = view(x)
    del x
    others = [pool.full(n, 4.0) for _ in range(5)]
    assert pool.memory_allocated() == 6 * used
    if isinstance(kept, Tensor | numpy.ndarray):
        assert (kept == 3).all()
    del kept, others
    assert pool.memory_allocated() == 0


def test_views_of_arrays_and_memory_keep_it(pool: Pool) -> None:
    memory = pool.allocate(4000)
    kept = [memory.array(1000, "float32"), memoryview(memory)[8:], torch.from_dlpack(memory)[7:]]
    del memory
    while kept:
        assert pool.memory_allocated() == 4096
        kept.pop()
    assert pool.memory_allocated() == 0


def test_autograd_keeps_what_it_saved(pool: Pool) -> None:
    x = pool.full(1000, 3.0).requires_grad_()
    y = (x * x).sum()
    gradient = torch.autograd.grad(y, x)[0]
    assert (gradient == 6).all()
    del x
    assert pool.memory_allocated() == 4096
    del y
    assert pool.memory_allocated() == 0


def saved_and_loaded(x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    loaded: Tensor = torch.load(file)
    return loaded


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "save": saved_and_loaded,
    "clone": lambda x: x.clone(),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
@pytest.mark.parametrize("n", [100, 100_000])
def test_copies(pool: Pool, copied: Callable[[Tensor], Tensor], n: int) -> None:
    x = pool.empty(n)
    torch.arange(n, out=x)
    y = copied(x)
    assert y.data_ptr() != x.data_ptr()
    x.zero_()
    del x
    assert pool.memory_allocated() == 0
    pool.close()
    assert torch.equal(y, torch.arange(n, dtype=torch.float32))


@pytest.mark.parametrize("n", [100, 100_000])
def test_shared_memory(pool: Pool, n: int) -> None:
    x = pool.full(n, 3.0)
    x.share_memory_()
    assert x.is_shared()
    others = pool.full(n, 4.0)
    assert (x == 3).all()
    assert (others == 4).all()
    del others
    assert pool.memory_allocated() == 0


@pytest.mark.parametrize("make", ["empty", "allocate", "array"])
@pytest.mark.parametrize("n", [100, 1_000_000])
def test_outlives_the_pool_object(make: str, n: int) -> None:
    pool = Pool("cpu")
    kept = getattr(pool, make)(n)
    seen = weakref.ref(pool)
    del pool
    gc.collect()
    assert seen() is not None
    x = kept if make == "empty" else torch.from_dlpack(kept)
    x.fill_(3)
    gc.collect()
    assert (x == 3).all()
    del kept, x
    gc.collect()
    gc.collect()
    assert seen() is None


def test_close_with_nothing_in_use(pool: Pool) -> None:
    for n in (100, 1_000_000):
        pool.empty(n)
    pool.close()
    assert pool.memory_reserved() == 0
    assert not pool.is_usable
    for give in (pool.empty, pool.zeros, pool.allocate, pool.array):
        for n in (0, 100, 1_000_000):
            with pytest.raises(RuntimeError, match="was closed"):
                give(n)
    pool.close()


def test_close_while_another_thread_is_inside(pool: Pool) -> None:
    is_inside = threading.Event()

    def work() -> None:
        with pool._core.lock:
            is_inside.set()
            time.sleep(0.1)

    tensor, thread = pool.empty(100), threading.Thread(target=work)
    thread.start()
    is_inside.wait()
    del tensor
    pool.close()
    thread.join()


@pytest.mark.parametrize("n", [100, 1_000_000])
def test_close_with_live_tensors(pool: Pool, n: int) -> None:
    x, y = pool.full(n, 3.0), pool.full(n, 4.0)
    with pytest.raises(RuntimeError, match=f"2 allocations in use.*B at {y.data_ptr():#x}"):
        pool.close()
    assert (pool.full(n, 5.0) == 5).all()  # still open
    pool.close(force=True)
    assert pool.memory_reserved() > 0
    assert (x == 3).all()
    assert (y == 4).all()
    with pytest.raises(RuntimeError, match="was closed"):
        pool.empty(n)
    del x
    gc.collect()
    assert (y == 4).all()
    del y
    gc.collect()
    assert pool._core.store.source.reserved == 0  # without a further call
    assert pool.memory_allocated() == 0


def walk(pool: Pool) -> list[Any]:
    """Allocate and release at random, the same in each call; return what is held at the end."""
    rng, kept = random.Random(SEED), []
    for _ in range(5_000):
        if len(kept) < 200 and (not kept or rng.random() < 0.5):
            n = int(2 ** rng.uniform(0, 18))
            kept.append(pool.empty(n) if rng.random() < 0.8 else pool.allocate(n))
        else:
            index = rng.randrange(len(kept))
            kept[index], kept[-1] = kept[-1], kept[index]
            kept.pop()
    return kept


def test_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeating a load needs no more memory each time: no fragment stays behind forever.

    A load whose live bytes are a random walk reaches new peaks, which says nothing about the pool.
    So one walk is repeated. Blocks are released in another order than they were allocated, which
    occasionally costs a segment of 2 MiB. Each release is noticed at the same moment every time:
    nothing is collected, and the exporter is new. An exporter of an earlier test may have so many
    exports that each call checks only some of them.
    """
    monkeypatch.setattr(exports, "_retired", [])
    pool, reserved = Pool("cpu"), []
    with without_collections():
        for _ in range(10):
            kept = walk(pool)
            reserved.append(pool.memory_reserved())
            kept.clear()
            assert pool.memory_allocated() == 0
    assert max(reserved) <= reserved[0] + (4 << 20), reserved
    pool.close()
    assert pool.memory_reserved() == 0


def test_copy_of_a_pool(pool: Pool) -> None:
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="make another"):
            copied(pool)


def test_blocks_of_pools_that_end_in_another_order(pool: Pool) -> None:
    other = Pool("cpu")

    def generator() -> Any:
        with pool:
            yield

    running = generator()
    next(running)
    with other:
        running.close()
        assert current_pool() is other
    assert current_pool() is default_pool()


def test_memory_that_its_owner_brings_back(pool: Pool) -> None:
    kept = []

    class Owner:
        def __init__(self) -> None:
            self.me = self
            self.memory = pool.allocate(4096)

        def __del__(self) -> None:
            kept.append(self)

    Owner()
    gc.collect()
    memory = kept[0].memory
    assert memory.is_released
    with pytest.raises(RuntimeError, match="was released"):
        memory.array(8)


def test_queue_of_a_tensor_in_the_middle_of_memory(pool: Pool) -> None:
    tensor = torch.from_dlpack(pool.allocate(4096).array(16, "float32", offset=512))
    pool.record_queue(tensor, allocator.load_dpctl().SyclQueue("cpu"))


def test_many_tensors(pool: Pool) -> None:
    """With more exports than one call checks, releases are found round robin or on demand."""
    tensors = [pool.full(10 + i % 3, float(i)) for i in range(6000)]
    assert all((x == i).all() for i, x in enumerate(tensors))
    reserved = pool.memory_reserved()
    for _ in range(3):
        tensors = tensors[::2]
        tensors += [pool.full(13, -1.0) for _ in range(6000 - len(tensors))]
        assert pool.memory_allocated() == 512 * 6000
    assert pool.memory_reserved() <= reserved * 1.1 + (2 << 20)
    del tensors
    assert pool.memory_allocated() == 0
