"""Snapshots are what torch's reader and its memory_viz page take."""

from __future__ import annotations

import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

from allocator import Allocation, Hook, Pool
from tests.allocator.helpers import random_use

# What torch/utils/viz/MemoryViz.js reads; it throws at any other.
PAGE_READS = """
    APPEND APPENDS BINFLOAT BINGET BININT BININT1 BININT2 BINPUT BINUNICODE DICT EMPTY_DICT
    EMPTY_LIST EMPTY_TUPLE FRAME LIST LONG1 LONG_BINGET LONG_BINPUT MARK MEMOIZE NEWFALSE NEWTRUE
    NONE PROTO SETITEM SETITEMS SHORT_BINUNICODE STOP TUPLE TUPLE1 TUPLE2 TUPLE3
"""


@pytest.fixture
def pool(pool: Pool) -> Pool:
    pool.record_history()
    return pool


def test_torchs_reader_takes_it(pool: Pool) -> None:
    kept = random_use(pool, 300)
    pool.trim()
    kept += random_use(pool, 300)
    snapshot = pool.snapshot()
    assert f"segments: {len(snapshot['segments'])}" in _memory_viz.segsum(snapshot)
    trace = _memory_viz.trace(snapshot)
    assert "cudaMalloc" in trace
    assert "del " in trace
    lines: list[str] = []
    _memory_viz.memory(snapshot, format_flamegraph=lines.append)
    assert "helpers.py" in lines[0]
    _memory_viz.segments(snapshot, format_flamegraph=lines.append)
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "<html>" in plot(pool.snapshot())
    del kept


def test_a_file_for_the_page(pool: Pool, tmp_path: Path) -> None:
    kept = random_use(pool, 300)
    path = tmp_path / "snapshot.pickle"
    pool.dump_snapshot(path)
    data = path.read_bytes()
    assert {opcode.name for opcode, _, _ in pickletools.genops(data)} <= {*PAGE_READS.split()}
    assert pickle.loads(data)["segments"] == pool.snapshot()["segments"]
    del kept


def test_the_trace_leads_to_the_segments(pool: Pool) -> None:
    """Its events, replayed, leave what the snapshot shows."""
    kept = random_use(pool, 300)
    pool.trim()
    snapshot = pool.snapshot()
    blocks: dict[int, int] = {}
    segments: dict[int, int] = {}
    for entry in snapshot["device_traces"][0]:
        address, size = entry["addr"], entry["size"]
        if entry["action"] == "segment_alloc":
            segments[address] = size
        elif entry["action"] == "segment_free":
            assert segments.pop(address) == size
        elif entry["action"] == "alloc":
            assert any(start <= address < start + size for start, size in segments.items())
            assert address not in blocks
            blocks[address] = size
        elif entry["action"] == "free_completed":
            assert blocks.pop(address) == size
    shown = [b for s in snapshot["segments"] for b in s["blocks"] if b["state"] != "inactive"]
    assert blocks == {block["address"]: block["requested_size"] for block in shown}
    assert segments == {s["address"]: s["total_size"] for s in snapshot["segments"]}
    assert sum(segments.values()) == pool.memory_reserved()
    del kept


class Reentrant(Hook):
    """Allocates in the middle of the pool's own call, as a finalizer may."""

    def __init__(self) -> None:
        self.memory: list[Any] = []

    def released(self, pool: Pool, allocation: Allocation) -> None:
        if not self.memory:
            self.memory.append(pool.allocate(5000))


def test_memory_that_is_of_no_heap(pool: Pool) -> None:
    reentrant = Reentrant()
    with pool.hook(reentrant):
        del (memory := [pool.allocate(100)])[:]
        reserved = pool.memory_reserved()
    assert not memory
    snapshot = pool.snapshot()
    assert reserved == sum(s["total_size"] for s in snapshot["segments"])
    _memory_viz.segsum(snapshot)
    alone = next(s for s in snapshot["segments"] if s["address"] == reentrant.memory[0].address)
    assert alone["requested_size"] == 5000
    reentrant.memory.clear()
    after = pool.snapshot()
    assert len(after["segments"]) == len(snapshot["segments"]) - 1
    assert after["device_traces"][0][-1]["action"] == "segment_free"


def test_settings_say_how_the_pool_works() -> None:
    settings = Pool("cpu", limit="1GiB").snapshot()["allocator_settings"]
    assert settings["limit"] == 1 << 30
    assert settings["kind"] == "device"


def test_html_escapes_the_name_and_draws_a_bar_for_each_segment(pool: Pool) -> None:
    kept = random_use(pool, 300)
    text = pool._repr_html_()
    assert "a &lt;b&gt;&quot;pool&quot; &amp; &#x27;more&#x27;&lt;/b&gt;" in text
    assert '<b>"pool"' not in text
    assert text.count("<svg") == min(len(pool.snapshot()["segments"]), 40)
    del kept


def test_html_of_an_empty_pool() -> None:
    assert "<svg" not in Pool("cpu")._repr_html_()


def test_html_of_many_segments_is_short() -> None:
    pool = Pool("cpu")
    kept = [pool.allocate(40 << 20) for _ in range(45)]  # nobody touches it: no memory is used
    text = pool._repr_html_()
    assert f"and {len(pool.snapshot()['segments']) - 40} smaller segments" in text
    del kept
