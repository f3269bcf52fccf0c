"""pin(): which threads run where, in it and after it; forks, interrupts, another OpenMP."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import textwrap
import threading
import types
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch

from fusedoptim import FusedSGD, runtime
from fusedoptim.runtime import CPUPool, _threads, pin
from tests.fusedoptim.runtime.observing import CORES, compute, masks, ran
from tests.interrupts import InterruptAt
from tests.running import check_script, in_threads

several_cores = pytest.mark.skipif(len(CORES) < 2, reason="a core is all that there is")
FIRST, LAST = CORES[0], CORES[-1]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Give torch two threads in each thread that starts, and restore the tests' own number."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def in_a_fresh_thread(test: Callable[[int], None]) -> Callable[[], None]:
    """Run a test in a thread without OpenMP threads so far; it gets the thread's Linux number.

    Afterwards, all threads have the cores that they had before, and new ones have all.
    """

    def run() -> None:
        before = masks()
        in_threads(lambda: test(threading.get_native_id()), count=1)
        after = masks()
        assert after == {thread: before.get(thread, CORES) for thread in after}

    run.__doc__ = test.__doc__
    return run


@several_cores
@in_a_fresh_thread
def test_all_that_computes_runs_on_the_cores(me: int) -> None:
    """Threads run on the cores of a pin, of another pin, and on all cores afterwards."""
    with pin(CPUPool([FIRST, LAST])):
        assert len(found := ran()) == 2
        assert me in found
        assert list(found.values()) == [[FIRST, LAST]] * 2
    with pin(CPUPool([LAST])):
        assert torch.get_num_threads() == 1
        assert ran() == {me: [LAST]}
    assert torch.get_num_threads() == 2
    assert list(ran().values()) == [CORES] * 2


@several_cores
@in_a_fresh_thread
def test_threads_that_exist_are_moved_and_get_their_own_cores_back(me: int) -> None:
    """Each of the threads had other cores before."""
    (other,) = ran().keys() - {me}
    os.sched_setaffinity(me, {FIRST})
    os.sched_setaffinity(other, {LAST})
    with pin(CPUPool([FIRST, LAST])):
        assert ran() == {me: [FIRST, LAST], other: [FIRST, LAST]}
    found = masks()
    assert (found[me], found[other]) == ([FIRST], [LAST])
    os.sched_setaffinity(me, CORES)
    os.sched_setaffinity(other, CORES)


@several_cores
@in_a_fresh_thread
def test_threads_that_a_pin_started_do_not_keep_its_cores(me: int) -> None:
    """A pin within a pin starts the first OpenMP thread, and both are left."""
    with pin(CPUPool([LAST])):
        with pin(CPUPool([FIRST, LAST])):
            assert len(ran()) == 2
        assert masks()[me] == [LAST]
        assert torch.get_num_threads() == 1


@several_cores
@in_a_fresh_thread
def test_threads_that_were_there_before_three_pins(me: int) -> None:
    before = ran()
    with pin(CPUPool([LAST])), pin(CPUPool([FIRST, LAST])), pin(CPUPool([FIRST])):
        assert ran() == {me: [FIRST]}
    assert ran() == before


@several_cores
@in_a_fresh_thread
def test_another_number_of_threads_is_set_within(me: int) -> None:
    torch.set_num_threads(1)
    with pin(CPUPool([LAST])):
        torch.set_num_threads(3)
        assert list(ran().values()) == [[LAST]] * 3
    assert torch.get_num_threads() == 1
    assert ran() == {me: CORES}


@several_cores
@in_a_fresh_thread
def test_numbers_of_mkl_and_of_openmp_that_differ(me: int) -> None:
    """A program may set the number of MKL or of OpenMP alone; both are restored."""
    openmp = _threads._openmp()
    torch.get_num_threads()  # torch sets both when a thread first asks
    for count in (0, 2):
        openmp.set_mkl_threads(count)
        with pin(CPUPool([LAST])):
            assert openmp.set_mkl_threads(1) == 1
        assert openmp.set_mkl_threads(count) == count


@several_cores
@in_a_fresh_thread
def test_other_threads_are_left_alone(me: int) -> None:
    """Other threads keep their number of threads, including those that start later."""

    def check() -> None:
        assert torch.get_num_threads() == 2

    with pin(CPUPool([LAST])):
        in_threads(check, count=1)
    in_threads(check, count=1)


@several_cores
def test_two_threads_at_once() -> None:
    barrier = threading.Barrier(2, timeout=60)

    def work(core: int) -> None:
        try:
            for _ in range(3):
                with pin(CPUPool([core])):
                    barrier.wait()
                    compute()
                    assert masks()[threading.get_native_id()] == [core]
                    barrier.wait()
                assert os.sched_getaffinity(0) == set(CORES)
        except BaseException:
            barrier.abort()
            raise

    in_threads(work, FIRST, LAST)


@several_cores
@in_a_fresh_thread
def test_our_kernels(me: int) -> None:
    p = torch.zeros(1 << 22, requires_grad=True)
    p.grad = torch.ones_like(p)
    optimizer = FusedSGD([p], lr=0.1)

    def steps() -> None:
        for _ in range(3):
            optimizer.step()

    with pin(CPUPool([LAST])):
        assert ran(steps) == {me: [LAST]}
    assert set(map(tuple, ran(steps).values())) == {tuple(CORES)}


SCRIPT = """
import os, torch
from fusedoptim.runtime import CPUPool, pin
from tests.fusedoptim.runtime.observing import CORES, compute, masks, ran
"""


def run(script: str) -> None:
    """Run a script in which torch has two threads that sleep when idle."""
    text = SCRIPT + textwrap.dedent(script)
    check_script(text, OMP_NUM_THREADS="2", OMP_WAIT_POLICY="passive")


@several_cores
def test_the_drivers_threads_start_in_a_pin() -> None:
    """The driver's threads, which run a user's raw kernels, have the cores of the pin."""
    run("""
        from fusedoptim.raw import RawKernel
        with pin(CPUPool(CORES[-1:])):
            kernel = RawKernel('''kernel void count(global float *y) {
                for (int k = 0; k < 500; k++) y[get_global_id(0)] += k;
            }''')
            y = torch.zeros(1 << 18)
            found = ran(lambda: (kernel(len(y), 16, (y,)), y.sum().item()))
            assert found and set(map(tuple, found.values())) == {(CORES[-1],)}, found
    """)


def test_a_decorator_and_an_exception() -> None:
    pool = CPUPool([CORES[0]])
    before, count = masks(), torch.get_num_threads()

    @pin(pool)
    def factorial(n: int) -> int:
        assert os.sched_getaffinity(0) == {CORES[0]}
        assert torch.get_num_threads() == 1
        return n * factorial(n - 1) if n else 1

    assert factorial(4) == 24
    with pytest.raises(ZeroDivisionError), pin(pool):
        _ = 1 / 0
    assert masks() == before
    assert torch.get_num_threads() == count


def test_functions_that_run_later_are_refused() -> None:
    """A call only makes a generator or a coroutine, whose body would run unpinned."""

    def generator() -> Iterator[int]:
        yield 1

    async def coroutine() -> None: ...

    async def both() -> AsyncIterator[int]:
        yield 1

    class Called:
        async def __call__(self) -> None: ...

    partial = functools.partial(generator)
    methods: list[Any] = [staticmethod(coroutine), classmethod(coroutine), Called()]
    for function in (generator, coroutine, both, partial, *methods):
        with pytest.raises(TypeError, match=r"its body runs after the call has returned; pin the"):
            pin(CPUPool())(function)


def test_entered_without_a_with_statement() -> None:
    """An ExitStack and a call of ``__exit__`` leave a pin; dropping the object does not."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(pin(CPUPool(CORES[:1])))
        assert os.sched_getaffinity(0) == set(CORES[:1])
    assert os.sched_getaffinity(0) == set(CORES)
    pinned = pin(CPUPool(CORES[:1]))
    pin.__enter__(pinned)
    assert callable(pinned.__exit__)
    assert os.sched_getaffinity(0) == set(CORES[:1])
    pinned.__exit__(None, None, None)
    assert os.sched_getaffinity(0) == set(CORES)


def test_results_are_those_of_unpinned_threads() -> None:
    inputs, layer = torch.randn(37, 129), torch.nn.Linear(129, 65)
    expected = layer.double()(inputs.double())
    for cores in (CORES[:1], CORES):
        with pin(CPUPool(cores)):
            torch.testing.assert_close(layer(inputs.double()), expected)


def test_one_pin_for_several_threads() -> None:
    pinned = pin(CPUPool([CORES[-1]]))

    def work() -> None:
        for _ in range(50):
            with pinned, pinned:
                assert os.sched_getaffinity(0) == {CORES[-1]}
            assert os.sched_getaffinity(0) == set(CORES)

    in_threads(work, count=4)


def test_the_process_has_its_cores_in_a_pin_too() -> None:
    """A pool is made of the process's cores, not of those of the innermost pin."""
    with pin(CPUPool([CORES[0]])), pin(CPUPool(CORES[-1:])):
        assert CPUPool().core_ids == tuple(CORES)


def test_no_pool() -> None:
    with pytest.raises(TypeError, match=r"pool=\[0\] is not a CPUPool; pass CPUPool\(\[0\]\)"):
        pin([0])  # type: ignore[arg-type]


@pytest.mark.parametrize("only", [False, True])
def test_a_core_that_is_lost(only: bool) -> None:
    """A container may be given other cores: the error says so, and nothing has changed."""
    pool = CPUPool(CORES[:1])
    pool.core_ids = (4095,) if only else (*CORES[:1], 4095)
    before, count = masks(), torch.get_num_threads()
    with pytest.raises(ValueError, match="may no longer use core 4095; make another CPUPool"):
        pin(pool).__enter__()
    assert masks() == before
    assert torch.get_num_threads() == count


@several_cores
def test_a_process_that_was_given_fewer_cores() -> None:
    """Pools that were made before do not widen its affinity."""
    run("""
        pools = CPUPool(CORES), CPUPool(CORES[-1:])
        for pool in pools:
            os.sched_setaffinity(0, CORES[:1])
            for call in (pin(pool).__enter__, pool.submit(compute).result):
                try:
                    call()
                except ValueError as error:
                    assert "may no longer use core" in str(error), error
                else:
                    raise AssertionError
            assert os.sched_getaffinity(0) == set(CORES[:1])
        with pin(CPUPool(CORES[:1])), pin(CPUPool()):
            assert os.sched_getaffinity(0) == set(CORES[:1])
    """)


def test_pins_left_out_of_order() -> None:
    outer, inner = pin(CPUPool(CORES[:1])), pin(CPUPool(CORES[-1:]))
    with outer:
        with inner, pytest.raises(RuntimeError, match="is not the one that the thread entered"):
            outer.__exit__()
        with pytest.raises(RuntimeError, match="in the thread that entered them"):
            in_threads(outer.__exit__, count=1)
        assert os.sched_getaffinity(0) == set(CORES[:1])
    assert os.sched_getaffinity(0) == set(CORES)


@several_cores
@pytest.mark.parametrize("when", ["before", "within"])
def test_forked(when: str) -> None:
    """A child's OpenMP threads have not survived: it says so, and does not wait for them."""
    run(f"""
        compute()
        pinned = pin(CPUPool(CORES))
        if {when == "within"}:
            pinned.__enter__()
        child = os.fork()
        if not child:
            if {when == "within"}:
                pinned.__exit__()
            else:
                try:
                    pinned.__enter__()
                except RuntimeError as error:
                    assert "this process was forked" in str(error), error
                else:
                    os._exit(1)
            assert CPUPool().core_ids == tuple(CORES)
            with pin(CPUPool(CORES[-1:])):
                assert torch.ones(1 << 20).sum() == 1 << 20
            assert os.sched_getaffinity(0) == set(CORES)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """)


@pytest.mark.parametrize("cores", [CORES, CORES[:1]])
def test_interrupted_anywhere(cores: list[int]) -> None:
    """After an interrupt while entering or leaving pins, all settings are restored."""
    before, count = masks(), torch.get_num_threads()
    pinned = pin(CPUPool(cores))
    for n in itertools.count():
        with InterruptAt(n, "polls", within=runtime) as interrupt, pinned, pinned:
            pass
        assert os.sched_getaffinity(0) == set(CORES)
        assert torch.get_num_threads() == count
        assert CPUPool().core_ids == tuple(CORES)
        if not interrupt.has_raised:
            break
    assert n > 10
    kept = masks()
    assert {thread: kept[thread] for thread in before if thread in kept}.items() <= before.items()


def test_without_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    _threads._openmp.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: types.SimpleNamespace())
    pinned = pin(CPUPool(CORES[:1]))
    with pytest.raises(RuntimeError, match="built without OpenMP"):
        pinned.__enter__()
    monkeypatch.undo()
    _threads._openmp.cache_clear()
    assert os.sched_getaffinity(0) == set(CORES)
    with pytest.raises(RuntimeError, match="is not the one that the thread entered last"):
        pinned.__exit__(None, None, None)
