"""CPUPool: its cores, and the calls that its thread runs."""

from __future__ import annotations

import concurrent.futures
import gc
import os
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from fusedoptim.runtime import CPUPool, _cores, pin
from fusedoptim.runtime.cpu_pool import _BINDING
from tests.fusedoptim.runtime.observing import CORES, masks
from tests.running import check_script, in_fork, in_threads

FIRST, LAST = CORES[0], CORES[-1]


def where() -> tuple[str, set[int], int]:
    """The calling thread's name, cores and number of OpenMP threads."""
    name = threading.current_thread().name
    return name, os.sched_getaffinity(0), torch.get_num_threads()


class TestCores:
    def test_given(self) -> None:
        for given in (CORES, set(CORES), iter(CORES), torch.tensor(CORES), CORES[::-1], None):
            assert CPUPool(given).core_ids == tuple(CORES)
        assert CPUPool(core_ids=[LAST]).core_ids == (LAST,)
        assert CPUPool(range(FIRST, FIRST + 1)).core_ids == (FIRST,)
        assert repr(CPUPool([FIRST])) == f"CPUPool(core_ids=[{FIRST}])"

    @pytest.mark.parametrize(
        ("given", "error", "message"),
        [
            (4, TypeError, "core_ids=4 is not an iterable of integers; pass"),
            ("0", TypeError, "core_ids='0' is not an iterable of integers; pass"),
            ([0.0], TypeError, r"core_ids=\[0\.0\] is not an iterable of integers; pass"),
            ([], ValueError, "core_ids is empty; pass at least one"),
            ([FIRST, FIRST], ValueError, f"has core {FIRST} twice; pass each core once"),
            ([-1], ValueError, "this process may not use core -1, only"),
            ([FIRST, 4095, 70], ValueError, "this process may not use core 70, 4095, only"),
        ],
    )
    def test_refused(self, given: object, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            CPUPool(given)  # type: ignore[arg-type]

    def test_what_is_refused_is_said_with_the_cure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in _BINDING:
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(
            ValueError, match=f"only {_cores.listed(CORES)} .*or start .*taskset -c"
        ):
            CPUPool([4095])
        monkeypatch.setenv("OMP_PROC_BIND", "true")
        with pytest.raises(ValueError, match="or unset OMP_PROC_BIND, start "):
            CPUPool([4095])

    @pytest.mark.skipif(len(CORES) < 2, reason="a core is all that there is")
    def test_a_process_with_fewer_cores(self) -> None:
        """A process may have fewer cores than the machine, such as one that taskset has started."""
        check_script(f"""
            import os
            os.sched_setaffinity(0, {{{LAST}}})
            from fusedoptim.runtime import CPUPool
            assert CPUPool().core_ids == ({LAST},)
            try:
                CPUPool([{FIRST}])
            except ValueError as error:
                assert "this process may not use core {FIRST}, only {LAST} " in str(error)
            else:
                raise AssertionError
        """)


class TestNodes:
    @pytest.fixture(autouse=True)
    def _machine(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Two nodes, each with two cores of two hardware threads, of which the process has six."""
        for node, own in enumerate(("0-1,4-5", "2-3,6-7")):
            (tmp_path / f"node{node}").mkdir()
            (tmp_path / f"node{node}" / "cpulist").write_text(f"{own}\n")
        (tmp_path / "node2").mkdir()
        (tmp_path / "node2" / "cpulist").write_text("\n")
        for core in range(8):
            folder = tmp_path / f"cpu{core}" / "topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}\n")
        monkeypatch.setattr(_cores, "_NODES", tmp_path)
        monkeypatch.setattr(_cores, "_CORES", tmp_path)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 3, 4, 6, 7})

    def test_one_hardware_thread_of_each_core(self) -> None:
        assert CPUPool(node_id=0).core_ids == (0, 1)
        assert CPUPool(node_id=1).core_ids == (3, 6)

    def test_refused(self) -> None:
        with pytest.raises(ValueError, match=r"node_id=3 is not a NUMA node .* one of \[0, 1, 2\]"):
            CPUPool(node_id=3)
        with pytest.raises(ValueError, match=r"node_id=2: this process may use none of its cores"):
            CPUPool(node_id=2)
        with pytest.raises(TypeError, match=r"node_id='0' is not an integer; pass 0"):
            CPUPool(node_id="0")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"core_ids=\[0\] and node_id=0 both say"):
            CPUPool([0], node_id=0)

    def test_linux_names_no_node(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(_cores, "_NODES", tmp_path / "none")
        monkeypatch.setattr(_cores, "_CORES", tmp_path / "none")
        assert CPUPool(node_id=0).core_ids == (0, 1, 3, 4, 6, 7)


def test_lists_of_numbers() -> None:
    for text, numbers in (("", []), ("3", [3]), ("0-2,5,7-8", [0, 1, 2, 5, 7, 8])):
        assert _cores.parsed(text) == set(numbers)
        assert _cores.listed(numbers) == text


class TestCalls:
    def test_run_on_the_cores(self) -> None:
        """Calls run on their pool's cores, and those of one pool on the same thread."""
        with CPUPool([FIRST]) as first, CPUPool([LAST]) as last, CPUPool() as both:
            found = [pool.submit(where).result() for pool in (first, last, both)]
            again = first.submit(where).result()
        assert [f[1:] for f in found] == [({FIRST}, 1), ({LAST}, 1), (set(CORES), len(CORES))]
        assert all(name.startswith("CPUPool") for name, *_ in found)
        assert again == found[0]
        assert where()[1:] == (set(CORES), torch.get_num_threads())

    def test_several_pools_run_at_once(self) -> None:
        """Each call waits for the other pool's, even if the pools have the same cores."""
        barrier = threading.Barrier(2, timeout=60)
        with CPUPool([FIRST]) as a, CPUPool([FIRST]) as b:
            futures = [pool.submit(barrier.wait) for pool in (a, b)]
            assert sorted(future.result() for future in futures) == [0, 1]

    def test_in_order_with_arguments(self) -> None:
        seen: list[int] = []
        with CPUPool([FIRST]) as pool:
            futures = [pool.submit(seen.append, n) for n in range(100)]
            assert pool.submit(dict, fn=1, self=2).result() == {"fn": 1, "self": 2}
            assert list(pool.map(pow, [2, 3], [3, 2])) == [8, 9]
        assert seen == list(range(100))
        assert all(future.done() for future in futures)

    def test_an_exception(self) -> None:
        with CPUPool([FIRST]) as pool:
            future = pool.submit(int, "no number")
            assert pool.submit(int, "3").result() == 3
            with pytest.raises(ValueError, match="no number"):
                future.result()

    def test_a_model(self) -> None:
        model, inputs = torch.nn.Linear(33, 17).double(), torch.randn(5, 33).double()
        with CPUPool([FIRST]) as a, CPUPool([LAST]) as b:
            futures = [p.submit(model, part) for p, part in zip((a, b), inputs.split(3))]
            output = torch.cat([future.result() for future in futures])
        torch.testing.assert_close(output, inputs @ model.weight.T + model.bias)

    def test_cancelled(self) -> None:
        begun, go_on = threading.Event(), threading.Event()
        pool = CPUPool([FIRST])
        running = pool.submit(lambda: (begun.set(), go_on.wait(60)))
        waiting, last = pool.submit(int), pool.submit(int)
        assert begun.wait(60)
        assert waiting.cancel()
        assert not running.cancel()
        pool.shutdown(wait=False, cancel_futures=True)
        assert last.cancelled()
        go_on.set()
        assert running.result()[1]
        with pytest.raises(concurrent.futures.CancelledError):
            waiting.result()

    def test_shut_down(self) -> None:
        pool = CPUPool([FIRST])
        future = pool.submit(time.sleep, 0.05)
        pool.shutdown()
        assert future.done()
        pool.shutdown()
        with pytest.raises(RuntimeError, match="after shutdown"):
            pool.submit(int)
        with pin(pool):
            assert where()[1] == {FIRST}

    def test_no_function(self) -> None:
        with CPUPool([FIRST]) as pool, pytest.raises(TypeError, match="fn=3 cannot be called"):
            pool.submit(3)  # type: ignore[arg-type]

    def test_no_thread_before_the_first_call(self) -> None:
        before = masks()
        with CPUPool() as pool, pin(CPUPool([FIRST])):
            assert masks().keys() == before.keys()
            pool.submit(int).result()
            assert len(masks()) > len(before)

    def test_a_core_that_is_lost(self) -> None:
        """A call fails and says so if a core is lost, and so do those after it."""
        with CPUPool([FIRST]) as pool:
            pool.core_ids = (4095,)
            for _ in range(2):
                with pytest.raises(ValueError, match="may no longer use core 4095"):
                    pool.submit(int).result()
            pool.core_ids = (FIRST,)
            assert pool.submit(where).result()[1] == {FIRST}

    def test_submitted_by_several_threads(self) -> None:
        with CPUPool([FIRST]) as pool:

            def work() -> None:
                for n in range(100):
                    assert pool.submit(pow, n, 2).result() == n * n

            in_threads(work, count=4)

    def test_a_pool_that_is_dropped(self) -> None:
        """A pool that is dropped runs what was submitted; then its thread ends."""
        done: list[int] = []
        go_on = threading.Event()
        pool = CPUPool([FIRST])
        pool.submit(go_on.wait, 60)
        last = pool.submit(done.append, 1)
        thread = pool.submit(threading.current_thread)
        dropped = weakref.ref(pool)
        del pool
        gc.collect()
        assert dropped() is None
        go_on.set()
        last.result()
        thread.result().join(60)
        assert done == [1]
        assert not thread.result().is_alive()

    def test_the_interpreters_exit_waits_for_pending_calls(self) -> None:
        printed = check_script(f"""
            import time
            from fusedoptim.runtime import CPUPool
            pool = CPUPool([{FIRST}])
            pool.submit(time.sleep, 0.2)
            pool.submit(print, "done")
        """)
        assert printed == "done\n"

    def test_forked(self) -> None:
        """The child's pool gets its own thread, and the parent's pool goes on."""
        with CPUPool() as pool, CPUPool([FIRST]) as ended:
            ended.shutdown()
            pool.submit(torch.ones, 1 << 20).result()

            def in_child() -> None:
                assert pool.submit(where).result(60)[1:] == (set(CORES), len(CORES))
                assert pool.submit(lambda: torch.ones(1 << 20).sum()).result(60) == 1 << 20
                with pytest.raises(RuntimeError, match="after shutdown"):
                    ended.submit(int)

            in_fork(in_child)
            assert pool.submit(pow, 2, 5).result() == 32
