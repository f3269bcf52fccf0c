"""Traces record what happened, and can be saved, loaded, replayed and used for advice."""

from __future__ import annotations

import contextlib
import random
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from allocator import (
    Event,
    Hook,
    Memory,
    OutOfMemoryError,
    Pool,
    Rules,
    Trace,
    advise,
    load_dpctl,
    queue,
    replay,
)
from tests.allocator.helpers import KIB, MIB
from tests.conftest import SEED
from tests.running import in_threads

HEADER = "Thread,Time,Action,Pointer,Size,Stream"


def actions(trace: Trace) -> list[tuple[str, int]]:
    return [(event.action, event.size) for event in trace]


def trace_of(changes: list[tuple[int, int, int]]) -> Trace:
    """Make a trace of triples: an allocation's number, its bytes (0 frees it) and the stream."""
    sizes: dict[int, int] = {}
    trace = []
    for now, (number, size, stream) in enumerate(changes):
        action = "allocate" if size else "free"
        sizes[number] = size or sizes[number]
        trace.append(Event(1, now, action, (number + 1) << 40, sizes[number], stream))
    return Trace(trace)


@st.composite
def traces(draw: st.DrawFn, streams: int = 2) -> Trace:
    """Any order of allocations and releases."""
    sizes = st.one_of(st.integers(1, 4 * KIB), st.integers(1, 40 * MIB))
    live: list[int] = []
    changes = []
    for number in range(draw(st.integers(1, 40))):
        stream = draw(st.integers(0, streams - 1))
        changes.append((number, draw(sizes), stream))
        live.append(number)
        for _ in range(draw(st.integers(0, min(3, len(live))))):
            freed = live.pop(draw(st.integers(0, len(live) - 1)))
            changes.append((freed, 0, stream))
    return trace_of(changes)


def random_trace(streams: int = 1, count: int = 300) -> Trace:
    choose = random.Random(torch.initial_seed())
    changes, live = [], []
    for number in range(count):
        stream = choose.randrange(streams)
        changes.append((number, int(2 ** choose.uniform(0, 23)), stream))
        live.append(number)
        while (live and choose.random() < 0.5) or len(live) > 20:
            changes.append((live.pop(choose.randrange(len(live))), 0, stream))
    return trace_of(changes)


def test_recording(pool: Pool) -> None:
    before = pool.empty(10)
    with pool.record() as trace:
        x = pool.empty((100, 3))
        memory = pool.allocate(7)
        memory.release()
        del before, x
        kept = pool.array(5)
    pool.empty(1)
    assert actions(trace) == [
        ("allocate", 1200),
        ("allocate", 7),
        ("free", 7),
        ("free", 1200),
        ("allocate", 20),
    ]
    assert trace.ignored == 1
    assert trace.leaked == [trace[-1]]
    assert trace.leaked[0].pointer == kept.address
    assert trace.peak_requested == 1207
    assert {event.thread for event in trace} == {threading.get_native_id()}
    times = [event.time for event in trace]
    assert times == sorted(times)


def test_every_tensor_of_a_loop_is_recorded(pool: Pool) -> None:
    for _ in range(10):
        pool.empty(8)
    with pool.record() as trace:
        for _ in range(10):
            pool.empty(8)
    assert actions(trace) == [("allocate", 32), ("free", 32)] * 10
    assert trace.ignored == len(trace.leaked) == 0


def test_nothing_is_recorded_of_nothing(pool: Pool) -> None:
    with pool.record() as trace:
        pool.empty(0)
        pool.allocate(0).release()
    assert len(trace) == 0
    assert trace.replay().hit_rate == trace.replay().ratio == 1


def test_failures_are_recorded() -> None:
    pool = Pool("cpu", limit=MIB)
    with pool.record() as trace, pytest.raises(OutOfMemoryError):
        pool.empty(MIB)
    assert actions(trace) == [("allocate failure", 4 * MIB)]
    assert trace.replay().allocations == 0


def test_queues_are_streams(pool: Pool) -> None:
    other = load_dpctl().SyclQueue(queue("cpu").sycl_device)
    with pool.record() as trace:
        _kept = [pool.allocate(512, queue=q) for q in (other, None, pool.sycl_queue, other)]
    assert [event.stream for event in trace] == [1, 0, 0, 1]


def test_threads(pool: Pool) -> None:
    def work() -> None:
        for nbytes in range(1, 4000, 20):
            pool.allocate(nbytes).release()

    with pool.record() as trace:
        in_threads(work, count=4)
    assert Trace(trace).leaked == []
    assert len(trace) == 4 * 2 * 200
    assert len({event.thread for event in trace if event.action == "allocate"}) == 4
    assert trace.ignored == 0


def test_an_allocation_that_the_end_of_a_recording_overtakes(pool: Pool) -> None:
    """Another thread may end it in the middle of an allocation; here a hook does."""

    class Ends(Hook):
        def before_allocate(self, pool: Pool, nbytes: int) -> None:
            recording.close()
            if kept:
                kept.pop().release()

    kept: list[Memory] = []
    with contextlib.ExitStack() as recording:
        trace = recording.enter_context(pool.record())
        kept.append(pool.allocate(100))
        address = kept[0].address
        with pool.hook(Ends()):
            again = pool.allocate(100)
    assert again.address == address
    assert actions(trace) == [("allocate", 100)]


def test_an_allocation_that_is_interrupted_as_it_is_recorded(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool undoes it, and no hook hears of that; the block is recorded again later."""
    add = Trace._add

    def add_and_stop(trace: Trace, event: Event) -> None:
        add(trace, event)
        raise KeyboardInterrupt

    with pool.record() as trace:
        with monkeypatch.context() as patch:
            patch.setattr(Trace, "_add", add_and_stop)
            with pytest.raises(KeyboardInterrupt):
                pool.allocate(100)
        kept = [pool.allocate(100) for _ in range(2)]
        kept.clear()
    allocate, free = ("allocate", 100), ("free", 100)
    assert actions(trace) == [allocate, free, allocate, allocate, free, free]


def test_an_exception_in_the_block_leaves_a_trace(pool: Pool) -> None:
    with pytest.raises(TypeError), pool.record() as trace:
        pool.allocate(8), pool.allocate("8")
    assert actions(trace) == [("allocate", 8), ("free", 8)]
    pool.allocate(8)
    assert len(trace) == 2


@settings(max_examples=50, deadline=None, database=None)
@seed(SEED)
@given(trace=traces())
def test_a_saved_trace_loads_as_it_was(
    trace: Trace, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.csv"
    trace.save(path)
    assert list(Trace.load(path)) == list(trace)


def test_a_recorded_trace_loads_as_it_was(pool: Pool, tmp_path: Path) -> None:
    with pool.record() as trace:
        pool.empty(100)
    trace.save(tmp_path / "trace.csv")
    assert (tmp_path / "trace.csv").read_text().startswith(HEADER + "\n")
    assert list(Trace.load(str(tmp_path / "trace.csv"))) == list(trace)


def test_a_file_as_rmm_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "rmm.csv"
    lines = [
        HEADER,
        "140202,10:15:22:128345,allocate,0x7f35a8000000,1000,0x0",
        "140202,10:15:22.128350,allocate failure,(nil),99999999999,0x0",
        "140203,10:15:23.000001,allocate,(nil),0,0x55d0c0ffee",
        "140203,10:15:23.000002,free,(nil),0,0x55d0c0ffee",
        "140202,10:15:24.128345,free,0x7f35a8000000,1000,0x0",
    ]
    path.write_text("\n".join(lines) + "\n")
    trace = Trace.load(path)
    assert actions(trace) == [
        ("allocate", 1000),
        ("allocate failure", 99999999999),
        ("allocate", 0),
        ("free", 0),
        ("free", 1000),
    ]
    assert trace[0].pointer == 0x7F35A8000000
    assert trace[2].stream == 0x55D0C0FFEE
    assert trace[1].time - trace[0].time == 5
    assert trace.leaked == []
    assert trace.replay().allocations == 1


GOOD = "1,00:00:00.000000,allocate,0x200,100,0"


@pytest.mark.parametrize(
    ("lines", "line", "message"),
    [
        ([], 1, "the first line is not Thread"),
        (["Thread,Time,Action,Pointer,Size", GOOD], 1, "the first line is not Thread"),
        ([HEADER.lower()], 1, "the first line is not Thread"),
        ([HEADER, GOOD, GOOD + ",1"], 3, "7 columns"),
        ([HEADER, "1,2,3"], 2, "3 columns"),
        ([HEADER, "", GOOD], 2, "0 columns"),
        (
            [HEADER, GOOD.replace("allocate", "realloc")],
            2,
            "action 'realloc' is not one of allocate,",
        ),
        ([HEADER, GOOD.replace("allocate", "free")], 2, "0x200 is freed, but is not allocated"),
        ([HEADER, GOOD, GOOD], 3, "0x200 is allocated again before"),
        (
            [HEADER, GOOD, GOOD.replace("allocate", "free").replace(",100,", ",101,")],
            3,
            "101 bytes are freed at 0x200, where 100 were",
        ),
        ([HEADER, GOOD.replace("100", "-100")], 2, "Size '-100' is not a number"),
        ([HEADER, GOOD.replace("100", "1e2")], 2, "Size '1e2' is not a number"),
        ([HEADER, GOOD.replace("100", "1_0")], 2, "Size '1_0' is not a number"),
        ([HEADER, GOOD.replace("100", "")], 2, "Size '' is not a number"),
        ([HEADER, GOOD.replace("100", "²")], 2, "Size '²' is not a number"),
        ([HEADER, GOOD.replace("100", str(2**63))], 2, r"is not in \[0, 2\^63 - 1\]"),
        ([HEADER, GOOD.replace("100", "9" * 5000)], 2, "is not a number"),
        ([HEADER, GOOD.replace("0x200", "0xyz")], 2, "Pointer '0xyz' is not a number"),
        ([HEADER, GOOD.replace("0x200", "-0x200")], 2, "Pointer '-0x200' is not a number"),
        ([HEADER, GOOD.replace("1,00", "main,00")], 2, "Thread 'main' is not a number"),
        ([HEADER, GOOD[:-1] + "default"], 2, "Stream 'default' is not a number"),
        ([HEADER, GOOD.replace("00:00:00.000000", "noon")], 2, "Time 'noon' is not written as"),
        ([HEADER, "\0\udcff" + GOOD], 2, "is not a number|NUL"),
    ],
)
def test_bad_files(lines: list[str], line: int, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes("".join(text + "\n" for text in lines).encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=rf"bad\.csv, line {line}: .*({message})"):
        Trace.load(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Trace.load(tmp_path / "none.csv")


def test_events_that_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="is freed, but is not allocated"):
        Trace([Event(1, 0, "free", 512, 8, 0)])


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("rules", [Rules(), Rules(slack=0, over_reserve=0.0)])
def test_a_pool_and_a_simulation_count_alike(streams: int, rules: Rules) -> None:
    trace = random_trace(streams)
    pool = Pool("cpu", rules=rules)
    on_pool, simulated = trace.replay(pool), trace.replay(rules)
    assert on_pool._replace(seconds=0) == simulated._replace(seconds=0)
    assert pool.memory_allocated() == 0
    assert pool.max_memory_reserved() == on_pool.peak_reserved
    assert pool.max_memory_allocated() == on_pool.peak_live


@settings(max_examples=30, deadline=None, database=None)
@seed(SEED)
@given(trace=traces())
def test_replay_is_the_same_every_time(trace: Trace) -> None:
    first, second = trace.replay(), replay(trace, Rules())
    assert first._replace(seconds=0) == second._replace(seconds=0)
    assert first.peak_requested <= first.peak_live <= first.peak_reserved


def test_replay_of_a_recording_asks_for_the_same() -> None:
    trace = random_trace()
    pool = Pool("cpu")
    with pool.record() as again:
        trace.replay(pool)
    assert actions(again)[: len(trace)] == actions(trace)
    assert len(again) == len(trace) + len(trace.leaked)
    with pool.record() as third:
        again.replay(pool)
    assert actions(third) == actions(again)


def test_replay_of_what_it_records_ends(pool: Pool) -> None:
    with pool.record() as trace:
        _kept = pool.empty(8)
        assert trace.replay(pool).allocations == 1
    assert actions(trace) == [("allocate", 32), ("allocate", 32), ("free", 32)]


def test_counters_of_a_small_trace() -> None:
    trace = trace_of([(0, 100, 0), (1, 600, 0), (0, 0, 0), (2, 512, 0), (1, 0, 0)])
    figures = trace.replay()
    assert figures.peak_requested == 600 + 512
    assert figures.peak_live == 1024 + 512
    assert figures.peak_reserved == Rules().small_segment
    assert (figures.allocations, figures.hits, figures.driver_calls) == (3, 2, 1)
    assert figures.ratio == Rules().small_segment / 1536
    assert figures.hit_rate == 2 / 3


def test_touch(pool: Pool) -> None:
    trace = random_trace()
    touched = trace.replay(pool, touch=True)
    assert touched._replace(seconds=0) == trace.replay()._replace(seconds=0)
    with pytest.raises(ValueError, match="touch=True needs memory"):
        trace.replay(Rules(), touch=True)


def test_touch_writes_every_byte() -> None:
    pool = Pool("cpu")
    trace_of([(0, 100_000, 0)]).replay(pool, touch=True)
    assert pool.allocate(100_000).copy_to_host() == b"\1" * 100_000


def test_replay_beyond_the_limit_leaves_the_pool_empty() -> None:
    pool = Pool("cpu", limit="4MiB")
    trace = trace_of([(0, MIB, 0), (1, 8 * MIB, 0)])
    with pytest.raises(OutOfMemoryError):
        trace.replay(pool)
    assert pool.memory_allocated() == 0


def test_advice_on_a_recorded_trace(pool: Pool) -> None:
    with pool.record() as trace:
        for n in range(50):
            kept = [pool.empty(100_000 + 1000 * (7 * n % 11)) for _ in range(3)]
    del kept
    advice = advise(trace)
    assert advice.lower_bound == trace.peak_requested <= advice.best.replay.peak_reserved
    assert advice.best.replay.peak_reserved <= advice.default.replay.peak_reserved
    assert advice.best.replay.hit_rate >= advice.default.replay.hit_rate == advice.hit_rate
    figures = trace.replay(Pool("cpu", rules=advice.rules, limit=advice.limit))
    assert figures._replace(seconds=0) == advice.best.replay._replace(seconds=0)


def test_advice_takes_less_memory_where_fewer_hits_are_asked_for() -> None:
    trace = random_trace()
    peaks = [advise(trace, hit_rate=rate).best.replay.peak_reserved for rate in (0, 1)]
    assert peaks[0] <= peaks[1]


def test_advice_says_where_no_rules_suffice() -> None:
    trace = trace_of([(0, 100, 0)])
    assert "no rules reach 100.00% hits" in repr(advise(trace, hit_rate=1))
    assert "no rules reach" not in repr(advise(trace))


def test_advice_prints_as_a_table() -> None:
    advice = advise(random_trace())
    lines = repr(advice).splitlines()
    assert lines[0].startswith("allocations: 300; most in use at once: ")
    assert [line.split()[0] for line in lines[1:3]] == ["reserved", "default"]
    assert len({len(line) for line in lines[1:-1]}) == 1
    assert sum("(best)" in line for line in lines) == 1
    assert f"limit='{advice.limit // MIB}MiB'" in lines[-1]
    table = advice._repr_html_()
    assert table.count("<tr>") == table.count("</tr>") == len(lines) - 2


def test_bad_advice() -> None:
    with pytest.raises(ValueError, match="no allocation"):
        advise(Trace())
    with pytest.raises(ValueError, match=r"hit_rate=1.5 is not in \[0, 1\]"):
        advise(trace_of([(0, 1, 0)]), hit_rate=1.5)
