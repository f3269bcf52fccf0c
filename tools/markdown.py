"""The anchors that the forge generates for Markdown headings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator


def anchors(headings: Iterable[str]) -> Iterator[str]:
    """Yield the anchor of each heading of a page, as GitHub names it.

    Args:
        headings: the headings' text without markup, in the order of the page.

    Example:
        >>> list(anchors(["What works where?", "Pool.empty", "What works where?"]))
        ['what-works-where', 'poolempty', 'what-works-where-1']
    """
    met: Counter[str] = Counter()
    for heading in headings:
        anchor = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        yield f"{anchor}-{met[anchor]}" if met[anchor] else anchor
        met[anchor] += 1
