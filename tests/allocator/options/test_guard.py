"""The debug mode finds invalid writes and their origin, and raises no false alarms."""

from __future__ import annotations

import ctypes
import gc
import pickle
import random
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from allocator import (
    MemoryCorruptionError,
    OutOfMemoryError,
    Pool,
    current_pool,
    load_dpctl,
    queue,
)
from allocator import empty as current_empty
from allocator.exchange.exports import _DELETER, Export
from allocator.options.guard import IN_REDZONE, ON_ALLOCATION, ON_RELEASE, QUARANTINE, REDZONE
from fusedoptim import FusedAdam
from tests.allocator.helpers import (
    MIB,
    DroppingDriver,
    FaultyDriver,
    bytes_of_blocks,
    check,
    once_inside,
)
from tests.conftest import SEED
from tests.garbage import without_collections
from tests.running import check_script, run_script

call_deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_DELETER)


@pytest.fixture
def pool(driver: FaultyDriver) -> Pool:
    return Pool(driver=driver, name="mine", debug=True)


def write(address: int, value: int = 0, nbytes: int = 1) -> None:
    ctypes.memset(address, value, nbytes)


def allocated_here(pool: Pool, nbytes: int, **options: Any) -> Any:
    return pool.allocate(nbytes, **options)


def released_here(pool: Pool) -> None:
    pool.tally()


class TestOverflow:
    @pytest.mark.parametrize("nbytes", [1, 511, 512, 4000, 100_000, 3 * MIB])
    @pytest.mark.parametrize("where", ["first before", "last before", "first after", "last after"])
    def test_one_byte(self, pool: Pool, nbytes: int, where: str) -> None:
        memory = allocated_here(pool, nbytes)
        pool.check()
        start, end = memory.address, memory.address + nbytes
        address = {
            "first before": start - REDZONE,
            "last before": start - 1,
            "first after": end,
            "last after": end + REDZONE - 1,
        }[where]
        write(address)
        with pytest.raises(MemoryCorruptionError) as caught:
            pool.check()
        error = caught.value
        assert error.kind == f"overflow {where.split()[1]}"
        assert (error.address, error.nbytes, error.offset) == (start, nbytes, address - start)
        assert "test_guard.py" in error.allocated_at[0]
        assert "(allocated_here)" in error.allocated_at[0]
        assert "(test_one_byte)" in error.allocated_at[1]
        assert error.released_at == []
        pool.check()  # each error is raised once

    def test_next_call_raises(self, pool: Pool) -> None:
        memory = pool.allocate(100)
        for give in (lambda: pool.empty(8), lambda: pool.array(8), pool.trim, pool.check):
            write(memory.address - 1)
            memory.release() if give is pool.trim else pool._core.debugger.check(pool._core)
            with pytest.raises(MemoryCorruptionError, match="overflow before the 100 B"):
                give()
            if memory.is_released:
                memory = pool.allocate(100)

    def test_found_at_the_release(self, pool: Pool) -> None:
        x = pool.empty(100)
        write(x.data_ptr() + 400)
        del x
        released_here(pool)
        with pytest.raises(MemoryCorruptionError, match="overflow after") as caught:
            pool.empty(8)
        assert "(test_found_at_the_release)" in caught.value.allocated_at[0]
        assert "(released_here)" in caught.value.released_at[0]
        assert "release seen at" in str(caught.value)

    def test_memory_release_raises(self, pool: Pool) -> None:
        memory = pool.allocate(100)
        write(memory.address + 100)
        with pytest.raises(MemoryCorruptionError):
            memory.release()
        assert memory.is_released
        assert pool.memory_allocated() == 0

    def test_of_a_tensor(self, pool: Pool) -> None:
        x = pool.zeros(10)
        (ctypes.c_float * 11).from_address(x.data_ptr())[10] = 1.0
        with pytest.raises(MemoryCorruptionError, match="overflow after the 40 B"):
            pool.check()

    def test_each_is_found(self, pool: Pool) -> None:
        kept = [pool.allocate(100) for _ in range(10)]
        for memory in kept[::2]:
            write(memory.address + 100)
        found = set()
        for _ in range(5):
            with pytest.raises(MemoryCorruptionError) as caught:
                pool.check()
            found.add(caught.value.address)
        assert found == {memory.address for memory in kept[::2]}
        pool.check()

    def test_memory_of_the_driver_alone(self, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
        """A finalizer that interrupts the pool's own work gets memory directly from the driver."""
        held: list[Any] = []
        once_inside(monkeypatch, lambda: held.append(pool.allocate(100)))
        _x = pool.allocate(100)
        assert held[0].allocation.block is None
        pool.check()
        write(held[0].address - 1)
        with pytest.raises(MemoryCorruptionError, match="before"):
            pool.check()
        write(held[0].address + 100)
        held[0].copy_from_host(bytes(100))
        with pytest.raises(MemoryCorruptionError, match="after"):
            held.pop().release()


class TestUseAfterRelease:
    @pytest.mark.parametrize("nbytes", [1, 4000, 3 * MIB])
    def test_stale_pointer(self, pool: Pool, nbytes: int) -> None:
        memory = allocated_here(pool, nbytes)
        address = memory.address
        memory.release()
        write(address + nbytes - 1)
        with pytest.raises(MemoryCorruptionError) as caught:
            pool.check()
        error = caught.value
        assert (error.kind, error.offset) == ("use after release", nbytes - 1)
        assert "(allocated_here)" in error.allocated_at[0]
        assert "(test_stale_pointer)" in error.released_at[0]
        pool.check()

    def test_tensor(self, pool: Pool) -> None:
        x = pool.full(1000, 1.0)
        address = x.data_ptr()
        del x
        released_here(pool)
        write(address)
        with pytest.raises(MemoryCorruptionError, match="use after release") as caught:
            pool.trim()
        assert "(released_here)" in caught.value.released_at[0]

    def test_found_when_it_leaves_the_quarantine(self, pool: Pool, driver: FaultyDriver) -> None:
        memory = pool.allocate(100)
        address = memory.address
        memory.release()
        write(address + 50)

        def allocate() -> None:
            for _ in range(2 * QUARANTINE // MIB):
                pool.allocate(MIB)

        with pytest.raises(MemoryCorruptionError, match="use after release of the 100 B"):
            allocate()
        allocate()
        assert bytes_of_blocks(pool) <= QUARANTINE + 2 * MIB
        check(pool, driver)

    def test_memory_is_not_given_again_at_once(self, pool: Pool) -> None:
        addresses = set()
        for _ in range(20):
            x = pool.empty(1000)
            addresses.add(x.data_ptr())
            del x
        assert len(addresses) == 20

    def test_reads_see_the_paint(self, pool: Pool) -> None:
        x = pool.empty(4)
        assert x.isnan().all()
        for dtype in (torch.float64, torch.bfloat16, torch.float16):
            assert pool.empty(4, dtype).isnan().all()
        address = x.data_ptr()
        assert ctypes.string_at(address - 8, 8) == bytes([IN_REDZONE]) * 8
        del x
        pool.tally()
        assert ctypes.string_at(address, 16) == bytes([ON_RELEASE]) * 16
        memory = pool.allocate(7)
        assert memory.copy_to_host() == bytes([ON_ALLOCATION]) * 7

    def test_quarantine_is_left_when_memory_is_short(self, driver: FaultyDriver) -> None:
        pool = Pool(driver=driver, limit="16MiB", debug=True)
        for i in range(20):
            x = pool.full(MIB, float(i))
            assert (x == i).all()
            del x
        with pytest.raises(OutOfMemoryError):
            pool.allocate(17 * MIB)
        check(pool, driver)


class TestDoubleRelease:
    @pytest.mark.parametrize(
        "make",
        [
            lambda pool: pool.empty(1000),
            lambda pool: torch.from_dlpack(pool.array(1000)),
            lambda pool: torch.utils.dlpack.from_dlpack(pool.array(1000).__dlpack__()),
        ],
    )
    def test_deleter_called_twice(self, pool: Pool, make: Callable[[Pool], Any]) -> None:
        x = make(pool)
        (address,) = [e.address for e in pool._core.exporter.exports if e.owner is not None]
        del x
        released_here(pool)
        pool.check()
        call_deleter(address)
        with pytest.raises(MemoryCorruptionError, match="double release of") as caught:
            pool.check()
        error = caught.value
        assert (error.kind, error.nbytes, error.offset) == ("double release", 4000, None)
        assert "(<lambda>)" in error.allocated_at[0]
        assert "(released_here)" in error.released_at[0]
        pool.check()
        assert pool.memory_allocated() == 0


class TestNoFalseAlarm:
    def test_kinds_of_use(self, pool: Pool) -> None:
        for n in (1, 100, 300_000):
            x = pool.full(n, 1.0)
            y = torch.from_dlpack(pool.array(n)).fill_(2)
            z = numpy.asarray(pool.array(n, "int32"))
            z[:] = 3
            memory = pool.allocate(n)
            memory.copy_from_host(bytes(n))
            view = memoryview(pool.allocate(n))
            view[:] = bytes(n)
            strided = pool.empty_strided((n, 2), (3, 1)).zero_()
            like = pool.zeros_like(strided)
            pool.check()
            assert x.sum() == n
            x.add_(y).mul_(2).sqrt_()
            x = x.view(1, -1).t().contiguous()
            pool.empty((0, n))
            pool.allocate(0).release()
            del y, z, memory, view, like
            pool.check()
        pool.trim()
        pool.check()

    def test_random_use(self, pool: Pool, driver: FaultyDriver) -> None:
        choose, held = random.Random(SEED), []
        for i in range(2000):
            n = choose.choice([1, 8, 100, 1000, choose.randrange(1, 100_000)])
            held.append((float(i), pool.full(n, float(i))))
            while len(held) > 15 or (held and choose.random() < 0.4):
                value, x = held.pop(choose.randrange(len(held)))
                assert (x == value).all()
                del x
            if i % 100 == 0:
                pool.check()
                check(pool, driver)
            if choose.random() < 0.01:
                pool.trim()
        held.clear()
        pool.trim()
        assert driver.reserved == 0

    def test_training(self) -> None:
        """Parameters, gradients and tensors made in a ``with`` block come from the pool."""
        pool = Pool("cpu", debug=True)
        with pool:
            assert current_pool() is pool
            weight = torch.nn.Parameter(current_empty((64, 32)).normal_())
            bias = torch.nn.Parameter(current_empty(64).zero_())
            for cls in (torch.optim.Adam, FusedAdam):
                optimizer = cls([weight, bias], lr=1e-2)
                for state in (0, 1, 2, 3):
                    inputs = current_empty((16, 32)).normal_()
                    loss = torch.nn.functional.linear(inputs, weight, bias).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    if state:
                        weight.grad = pool.empty_like(weight).copy_(weight.grad)
                    optimizer.step()
                    for each in optimizer.state.values():
                        for key, value in each.items():
                            if torch.is_tensor(value) and value.dim():
                                each[key] = pool.empty_like(value).copy_(value)
                    pool.check()
                restored = pickle.loads(pickle.dumps(optimizer.state_dict()))
                optimizer.load_state_dict(restored)
                del optimizer, inputs, loss, each, value, restored
        assert weight.isfinite().all()
        del weight, bias
        gc.collect()
        pool.check()
        pool.close()

    @pytest.mark.parametrize("queue_of", ["the pool", "the allocation", "a later use"])
    def test_kernels_in_flight(self, queue_of: str) -> None:
        """Memory is released while commands still write to it."""
        pool, dpctl = Pool("cpu", debug=True), load_dpctl()
        other = dpctl.SyclQueue(queue("cpu").sycl_device, property="in_order")
        used = pool.sycl_queue if queue_of == "the pool" else other
        options = {"queue": other} if queue_of == "the allocation" else {}
        for _ in range(20):
            memory, source = (pool.allocate(4 * MIB, **options) for _ in range(2))
            a, b = (dpctl.memory.as_usm_memory(each) for each in (memory, source))
            event = used.memcpy_async(a, b, 4 * MIB)
            if queue_of == "a later use":
                pool.record_queue(memory, other)
                pool.record_queue(source, other)
            del memory, source, a, b
            pool.tally()
            del event
        pool.check()
        other.wait()
        pool.close()

    def test_interrupt_before_a_tensor_is_given(
        self, pool: Pool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The export meant for the tensor has carried another one before."""
        pool.empty(8)
        pool.tally()

        def give(export: Export, owner: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(Export, "give", give)
        with pytest.raises(KeyboardInterrupt):
            pool.empty(8)
        monkeypatch.undo()
        pool.check()


def test_device_memory_that_python_cannot_read(driver: FaultyDriver) -> None:
    driver.is_host_accessible = False
    with pytest.raises(RuntimeError, match="debug=True, but Python cannot"):
        Pool(driver=driver, debug=True)


def test_check_without_debug(driver: FaultyDriver) -> None:
    with pytest.raises(RuntimeError, match="debug=True"):
        Pool(driver=driver).check()


def test_error_can_be_pickled(pool: Pool) -> None:
    memory = pool.allocate(8)
    write(memory.address - 1)
    with pytest.raises(MemoryCorruptionError) as caught:
        pool.check()
    vars(caught.value)["__notes__"] = ["rank 3"]  # as add_note does, from Python 3.11 on
    restored = pickle.loads(pickle.dumps(caught.value))
    assert type(restored) is MemoryCorruptionError
    assert vars(restored) == vars(caught.value)
    assert str(restored) == str(caught.value)


def test_pool_and_memory_die_without_a_collection() -> None:
    driver = DroppingDriver()
    pool = Pool(driver=driver, debug=True)
    pool.allocate(100).release()
    seen = weakref.ref(pool)
    with without_collections():
        del pool
        assert seen() is None
    gc.collect()  # segments and their blocks form cycles
    assert not driver.handles


def test_found_when_the_pool_dies(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", reports.append)
    own = Pool(driver=FaultyDriver(), debug=True)
    memory = own.allocate(100)
    address = memory.address
    memory.release()
    write(address)
    del memory, own
    gc.collect()
    (report,) = reports
    assert report.exc_type is MemoryCorruptionError
    assert report.exc_value.kind == "use after release"


PREAMBLE = """
import ctypes, os, sys
from allocator import Pool
from tests.allocator.helpers import FaultyDriver
pool = Pool(driver=FaultyDriver(), name="mine", debug=True)
"""


@pytest.mark.parametrize("end", ["", "raise KeyError('mine')", "sys.exit(3)", "del pool"])
def test_report_at_exit(end: str) -> None:
    found = run_script(
        f"""{PREAMBLE}
def make():
    return pool.allocate(100)
sys.held = make()
stale = make()
ctypes.memset(sys.held.address + 100, 0, 1)
address = stale.address
stale.release()
ctypes.memset(address, 0, 1)
{end}
"""
    )
    assert found.returncode == {"": 0, "del pool": 0, "sys.exit(3)": 3}.get(end, 1)
    assert found.stderr.count("Found by the debug mode of mine") == 2
    for part in ("overflow after the 100 B", "use after release of the 100 B", "(make)"):
        assert part in found.stderr
    assert found.stderr.count("allocated at") == 2
    assert found.stderr.count("release seen at") == 1


def test_fork() -> None:
    """The child neither checks nor reports, although the parent's memory is damaged."""
    check_script(
        f"""{PREAMBLE}
def kind_of_error():
    try:
        pool.check()
    except RuntimeError as error:
        return getattr(error, "kind", str(error))
held = pool.allocate(100)
ctypes.memset(held.address - 1, 0, 1)
child = os.fork()
if child == 0:
    sys.exit("spawn" not in kind_of_error())
assert os.waitpid(child, 0)[1] == 0
assert kind_of_error() == "overflow before"
"""
    )
