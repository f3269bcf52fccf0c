"""Snapshots can be read by torch's reader and its memory_viz page."""

from __future__ import annotations

import pickle
import pickletools
from pathlib import Path

import pytest
from torch.cuda import _memory_viz

from allocator import Memory, Pool
from tests.allocator.helpers import blocks_of, once_inside, random_use

# The opcodes that torch/utils/viz/MemoryViz.js reads; it throws at any other.
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
    _kept = random_use(pool, 300)
    pool.trim()
    _kept += random_use(pool, 300)
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


def test_a_file_for_the_page(pool: Pool, tmp_path: Path) -> None:
    _kept = random_use(pool, 300)
    path = tmp_path / "snapshot.pickle"
    pool.dump_snapshot(path)
    data = path.read_bytes()
    assert {opcode.name for opcode, _, _ in pickletools.genops(data)} <= {*PAGE_READS.split()}
    assert pickle.loads(data)["segments"] == pool.snapshot()["segments"]


def test_the_trace_leads_to_the_segments(pool: Pool) -> None:
    """Replaying the trace's events ends in the state that the snapshot shows."""
    _kept = random_use(pool, 300)
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
    shown = [block for block in blocks_of(snapshot) if block["state"] != "inactive"]
    assert blocks == {block["address"]: block["requested_size"] for block in shown}
    assert segments == {s["address"]: s["total_size"] for s in snapshot["segments"]}
    assert sum(segments.values()) == pool.memory_reserved()


def test_memory_that_is_of_no_heap(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer that interrupts the pool's own work gets memory directly from the driver."""
    alone: list[Memory] = []
    once_inside(monkeypatch, lambda: alone.append(pool.allocate(5000)))
    pool.allocate(100).release()
    reserved = pool.memory_reserved()
    snapshot = pool.snapshot()
    assert reserved == sum(s["total_size"] for s in snapshot["segments"])
    _memory_viz.segsum(snapshot)
    sizes = {s["address"]: s["requested_size"] for s in snapshot["segments"]}
    assert sizes[alone[0].address] == 5000
    alone.clear()
    after = pool.snapshot()
    assert len(after["segments"]) == len(snapshot["segments"]) - 1
    assert after["device_traces"][0][-1]["action"] == "segment_free"


def test_settings_say_how_the_pool_works() -> None:
    settings = Pool("cpu", limit="1GiB").snapshot()["allocator_settings"]
    assert settings["limit"] == 1 << 30
    assert settings["kind"] == "device"


def test_html_escapes_the_name_and_draws_a_bar_for_each_segment(pool: Pool) -> None:
    assert "<svg" not in pool._repr_html_()
    _kept = random_use(pool, 300)
    text = pool._repr_html_()
    assert "a &lt;b&gt;&quot;pool&quot; &amp; &#x27;more&#x27;&lt;/b&gt;" in text
    assert '<b>"pool"' not in text
    assert text.count("<svg") == min(len(pool.snapshot()["segments"]), 40)


def test_html_of_many_segments_is_short() -> None:
    pool = Pool("cpu")
    _kept = [pool.allocate(40 << 20) for _ in range(45)]  # never touched, so no memory is used
    text = pool._repr_html_()
    assert f"and {len(pool.snapshot()['segments']) - 40} smaller segments" in text
