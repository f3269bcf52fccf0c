"""Reports settings of threads, cores, malloc and huge pages, and recommends some; changes none."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fusedoptim.doctor import _machine
from fusedoptim.doctor._report import Problem, Section, warning
from fusedoptim.doctor._workers import Outcome
from fusedoptim.runtime import huge_pages, memory
from fusedoptim.runtime._cores import listed, nodes, process_cores

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_OF_TORCH = "THP_MEM_ALLOC_ENABLE"
"""With 1, torch asks for huge pages for its tensors of 2 MiB and more."""


class _Found(NamedTuple):
    """The facts that decide which settings may pay."""

    cores: frozenset[int]
    nodes: Mapping[int, frozenset[int]]
    """The process's cores on each NUMA node, without nodes that have none of them."""
    threads: int | None
    """torch's threads, or None if torch cannot be imported."""
    malloc: str | None
    """The library that serves malloc, or None if that is glibc."""
    is_kept: bool
    """Whether freed memory stays with the process."""
    huge_pages: str | None
    """Linux's choice: "always", "madvise", "never", or None if it has none."""


def sections(outcomes: Sequence[Outcome]) -> Iterator[Section]:
    """The present settings, and the recommended ones.

    Args:
        outcomes: the outcomes of the workers, which know how many threads there are.
    """
    found = _found(outcomes)
    by_driver = [device["units"] for device in _said(outcomes, "devices") if device["on_host"]]
    facts: dict[str, Any] = {
        "cores": listed(found.cores),
        "NUMA nodes": {f"node {number}": listed(own) for number, own in found.nodes.items()},
        "torch's threads": found.threads,
        "the CPU driver's threads": max(by_driver, default=None),
        "malloc": found.malloc or "glibc",
        "freed memory is kept": found.is_kept,
        "transparent huge pages": found.huge_pages,
    }
    yield Section("settings", facts, list(_too_many(found)))
    wished = _wished(found)
    yield Section("recommended settings", dict(wished) or {"settings": "none"}, [])


def _found(outcomes: Sequence[Outcome]) -> _Found:
    cores = process_cores()
    own = {number: its & cores for number, its in nodes().items()}
    return _Found(
        cores=cores,
        nodes={number: its for number, its in own.items() if its},
        threads=max(_said(outcomes, "threads"), default=None),
        malloc=memory.other_malloc(),
        is_kept=memory.is_kept(),
        huge_pages=_chosen(_HUGE_PAGES.read_text()) if _HUGE_PAGES.exists() else None,
    )


def _said(outcomes: Sequence[Outcome], key: str) -> list[Any]:
    """The values that the workers report under this key, with lists flattened."""
    values = [line[key] for outcome in outcomes for line in outcome.said if key in line]
    return [part for v in values for part in (v if isinstance(v, list) else [v])]


def _chosen(text: str) -> str:
    """The word in brackets, as in ``always [madvise] never``."""
    return text.partition("[")[2].partition("]")[0]


def _too_many(found: _Found) -> Iterator[Problem]:
    """A warning if threads wait for each other's cores."""
    if found.threads is not None and found.threads > len(found.cores):
        name = "OMP_NUM_THREADS"
        yield warning(
            f"torch starts {found.threads} threads for the cores {listed(found.cores)}: each of "
            "its operations waits until all of them have had a core",
            f"unset {name}" if name in os.environ else f"export {name}={len(found.cores)}",
        )


def _wished(found: _Found) -> Iterator[tuple[str, str]]:
    """Each setting that may pay, and why."""
    most = min(len(found.cores), math.ceil(_machine.cpu_limit() or len(found.cores)))
    if found.threads is not None and found.threads > most:
        yield f"OMP_NUM_THREADS={most}", f"there is processor time for {most}, not {found.threads}"
    if found.malloc is None and not found.is_kept:
        yield (
            "fusedoptim.runtime.keep_memory()",
            (
                "in the program, before the first iteration: glibc returns activations and "
                "gradients to Linux when they are freed, which clears new pages in every iteration "
                "(docs/runtime.md)"
            ),
        )
    if found.huge_pages == "madvise" and os.environ.get(_OF_TORCH) != "1":
        reason = "embedding tables of hundreds of MiB: rows in pages of 2 MiB are found faster"
        if huge_pages.can_move_pages():
            yield (
                "fusedoptim.runtime.use_huge_pages(model, optimizer)",
                f"in the program, for {reason} (docs/runtime.md)",
            )
        else:
            yield (
                f"{_OF_TORCH}=1",
                f"in the environment, with keep_memory() only, for {reason} (docs/runtime.md)",
            )
    if len(found.nodes) > 1:
        first, *_ = found.nodes
        yield (
            f"fusedoptim.runtime.pin(CPUPool(node_id={first}))",
            (
                f"or a process for each node: the cores are on {len(found.nodes)} NUMA nodes, and "
                "another node's memory takes longer to read (docs/runtime.md)"
            ),
        )
