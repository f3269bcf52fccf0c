"""Training steps of embedding tables: ``_fresh`` starts a process for huge_pages.py."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch.nn import EmbeddingBag

from fusedoptim.runtime import keep_memory, use_huge_pages

_TABLES, _ROWS, _WIDTH, _BATCH = 26, 200_000, 64, 2048
_WARM_UP, _STEPS = 5, 30


def step(rows_a_bag: int, is_kept: bool, is_moved: bool) -> dict[str, object]:
    """Seconds of forward and backward and of the update, and MiB in huge pages."""
    if is_kept:
        keep_memory()
    tables = [
        EmbeddingBag.from_pretrained(
            torch.full((_ROWS, _WIDTH), 0.5), freeze=False, mode="sum", sparse=True
        )
        for _ in range(_TABLES)
    ]
    optimizer = torch.optim.SGD([table.weight for table in tables], lr=0.01)
    if is_moved:
        use_huge_pages(*tables)
    passes, updates = [], []
    for _ in range(_WARM_UP + _STEPS):
        indices = [torch.randint(_ROWS, (_BATCH, rows_a_bag)) for _ in tables]
        optimizer.zero_grad()
        start = time.perf_counter()
        outputs = [table(rows) for table, rows in zip(tables, indices)]
        torch.stack(outputs).sum().backward()
        middle = time.perf_counter()
        optimizer.step()
        passes.append(middle - start)
        updates.append(time.perf_counter() - middle)
    return {
        "forward and backward": passes[_WARM_UP:],
        "update": updates[_WARM_UP:],
        "huge": _huge_pages(),
    }


def _huge_pages() -> float:
    """MiB of this process in huge pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (huge,) = (line.split()[1] for line in lines if line.startswith("AnonHugePages:"))
    return int(huge) / 1024
