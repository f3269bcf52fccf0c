"""A pool's memory over time."""

from __future__ import annotations

import sys
import xml.dom.minidom

import pytest

from allocator import Pool
from allocator.monitoring.timeline import Timeline
from allocator.pool.core import Core
from tests.interrupts import Condition, at, at_call_from, stopping_at


def test_rows_follow_the_pool(pool: Pool) -> None:
    with pool.timeline() as timeline:
        x = pool.empty(1000)
        y = pool.empty(2000)
        del x
        pool.memory_allocated()
        del y
    rows = timeline.rows()
    allocated = [row.allocated for row in rows]
    assert [n for i, n in enumerate(allocated) if i == 0 or n != allocated[i - 1]] == [
        0,
        4096,
        4096 + 8192,
        8192,
        0,
    ]
    assert rows[0].reserved == 0
    assert {row.reserved for row in rows[1:]} == {pool.memory_reserved()}
    seconds = [row.seconds for row in rows]
    assert seconds == sorted(seconds)
    assert seconds[0] >= 0


def test_the_peak_is_the_pools(pool: Pool) -> None:
    with pool.timeline() as timeline:
        for n in (10, 5000, 400_000, 20):
            pool.empty(n)
    assert max(row.allocated for row in timeline.rows()) == pool.max_memory_allocated()


def test_nothing_is_recorded_after_the_block(pool: Pool) -> None:
    with pool.timeline() as timeline:
        pass
    before = timeline.rows()
    _x = pool.empty(100)
    assert timeline.rows() == before
    assert not pool._core.bypasses_cache


@pytest.mark.parametrize(
    "place",
    [at(Core.add_hook, "return"), at_call_from(Timeline.__exit__)],
    ids=["at the start", "at the end"],
)
def test_nothing_is_recorded_after_an_interrupt(pool: Pool, place: Condition) -> None:
    with pytest.raises(KeyboardInterrupt), stopping_at(place), pool.timeline():
        pool.empty(100)
    assert not pool._core.bypasses_cache


def test_the_last_rows_are_kept(pool: Pool) -> None:
    with pool.timeline(max_entries=4) as timeline:
        for _ in range(100):
            pool.empty(100)
    assert len(timeline.rows()) == 4


def test_the_picture_needs_no_matplotlib(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pool.timeline() as timeline:
        kept = [pool.empty(n) for n in range(1, 3000, 7)]
        kept.clear()
    text = timeline._repr_html_()
    xml.dom.minidom.parseString(text)  # every tag is closed
    assert "a &lt;b&gt;" in text
    assert text.count("<path") == 2
    assert len(text) < 100_000
    xml.dom.minidom.parseString(pool.timeline()._repr_html_())  # an empty timeline
    with pytest.raises(ImportError, match="pip install matplotlib"):
        timeline.plot()


def test_plot(pool: Pool) -> None:
    pytest.importorskip("matplotlib").use("agg")
    from matplotlib import pyplot
    from matplotlib.figure import Figure

    with pool.timeline() as timeline:
        _x = pool.empty(1 << 20)
    axes = Figure().subplots()
    assert timeline.plot(axes) is axes
    reserved, allocated = axes.get_lines()
    assert max(allocated.get_ydata()) == 4 + 4096 / (1 << 20) - 512 / (1 << 20)
    assert max(reserved.get_ydata()) == pool.memory_reserved() / (1 << 20)
    own = timeline.plot()
    assert len(own.get_lines()) == 2
    pyplot.close(own.figure)
