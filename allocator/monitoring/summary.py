"""Summaries of a pool: its counters as a table, its segments as bars."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from allocator.pool.counters import FACTS, METRICS, TIERS, Counters
from allocator.runtime.formatting import escaped, size_text

if TYPE_CHECKING:
    from allocator.monitoring.statistics import Health

_CELLS = 120
"""resolution of a segment's bar."""
_MOST_BARS = 40
_TABLE_STYLE = "border-collapse:collapse;font-variant-numeric:tabular-nums"


def summary(title: str, counters: Counters, *, abbreviated: bool) -> str:
    """The counters as a table of plain text; if abbreviated, only for all blocks together."""
    lines = [title, f"{'metric':<28}" + "".join(f"{fact:>14}" for fact in FACTS)]
    for metric in sorted(METRICS, key=lambda metric: not metric.endswith("bytes")):
        text = size_text if metric.endswith("bytes") else str
        for tier, level in zip(TIERS[: 1 if abbreviated else None], counters.levels[metric]):
            facts = "".join(f"{text(getattr(level, fact)):>14}" for fact in FACTS)
            lines.append(f"{metric + ' ' + tier.removesuffix('_pool'):<28}{facts}")
    lines.append(f"{counters.ooms} allocations failed, {counters.retries} were retried")
    return "\n".join(lines)


def summary_html(title: str, health: Health, segments: Sequence[dict[str, Any]]) -> str:
    """Figures and a bar for each segment, for Jupyter."""
    figures = {
        "allocated": size_text(health.allocated_bytes),
        "reserved": size_text(health.reserved_bytes),
        "free": size_text(health.free_bytes),
        "largest free": size_text(health.largest_free_bytes),
        "fragmentation": f"{health.fragmentation:.2f}",
        "hit rate": f"{health.hit_rate:.1%}",
    }
    heads = "".join(f"<th>{name}</th>" for name in figures)
    cells = "".join(f"<td>{value}</td>" for value in figures.values())
    largest = sorted(segments, key=lambda segment: -segment["total_size"])[:_MOST_BARS]
    bars = "".join(_bar(segment, largest[0]["total_size"]) for segment in largest)
    hidden = len(segments) - len(largest)
    more = f"<div>and {hidden} smaller segments</div>" if hidden else ""
    return (
        f"<div><b>{escaped(title)}</b>"
        f'<table style="{_TABLE_STYLE}"><tr>{heads}</tr><tr>{cells}</tr></table>{bars}{more}</div>'
    )


def _bar(segment: dict[str, Any], longest: int) -> str:
    """A bar as long as a segment is large, filled where it is in use."""
    size = segment["total_size"]
    rects = []
    start = 0
    for part, run in groupby(_used_parts(segment)):
        width = len(list(run))
        if part:
            rects.append(
                f'<rect x="{start}" width="{width}" height="10" fill="#1f77b4" '
                f'fill-opacity="{0.3 + 0.7 * part:.2f}"/>'
            )
        start += width
    used = size_text(segment["active_size"])
    label = f"{segment['segment_type']} segment of {size_text(size)}, {used} in use"
    return (
        f'<svg viewBox="0 0 {_CELLS} 10" preserveAspectRatio="none" height="12" '
        f'style="display:block;margin:2px 0;width:{max(100 * size / longest, 2):.1f}%">'
        f'<title>{label}</title><rect width="{_CELLS}" height="10" fill="#ddd"/>'
        f"{''.join(rects)}</svg>"
    )


def _used_parts(segment: dict[str, Any]) -> list[float]:
    """The used share of each cell of a segment."""
    cell = segment["total_size"] / _CELLS
    used = [0.0] * _CELLS
    start = 0
    for block in segment["blocks"]:
        end = start + block["size"]
        if block["state"] != "inactive":
            for i in range(int(start / cell), min(int(end / cell) + 1, _CELLS)):
                used[i] += max(min(end, (i + 1) * cell) - max(start, i * cell), 0) / cell
        start = end
    return [round(part, 1) for part in used]
