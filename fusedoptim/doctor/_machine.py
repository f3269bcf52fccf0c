"""The machine: its processors and their limits, its memory, and this process."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fusedoptim._processor import processor_facts
from fusedoptim.doctor._report import Problem, Section, error, warning

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_SHARED = Path("/dev/shm")
_INSTRUCTIONS = re.compile(r"sse4_2|avx|avx2|fma|f16c|avx512\w+|avx_vnni|avx10\w*|amx_\w+")
_MINIMUM_SHARED = 128 << 20  # containers get 64 MiB unless they ask for more


def check() -> Section:
    """Instruction sets, processors that this process may use, and memory that processes share."""
    model, instructions = _processor()
    available = len(os.sched_getaffinity(0))
    limit = cpu_limit()
    shared = shutil.disk_usage(_SHARED) if _SHARED.exists() else None
    facts: dict[str, Any] = {
        "processor": model,
        "instruction sets": instructions,
        "processors": f"{os.cpu_count()}, of which this process may use {available}",
        "limit of the control group": "none" if limit is None else f"{limit:g} processors",
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB",
        "/dev/shm": "none" if shared is None else f"{shared.free / 2**30:.2f} GiB free",
    }
    problems = [*_processor_problems(instructions), *_limit_problems(limit, available)]
    if shared is None or shared.free < _MINIMUM_SHARED:
        problems.append(
            warning(
                f"{_SHARED} has {0 if shared is None else shared.free >> 20} MiB free: workers of "
                "torch's DataLoader pass their batches through it, and fail with a bus error",
                "start the container with --shm-size=2g (or --ipc=host)",
            )
        )
    return Section("machine", facts, [*problems, *_fork_problems()])


def _processor() -> tuple[str, list[str]]:
    """The processor's name, and the instruction sets that matter here."""
    facts = processor_facts()
    flags = facts.get("flags", "").split()
    return facts.get("model name", "unknown"), sorted(filter(_INSTRUCTIONS.fullmatch, flags))


def _processor_problems(instructions: list[str]) -> Iterator[Problem]:
    if "sse4_2" not in instructions:
        yield error(
            "the processor has no SSE4.2, which the CPU driver needs",
            "use another machine; in a virtual machine, expose the host's processor",
        )
    elif "avx2" not in instructions:
        yield warning(
            "the processor has no AVX2: kernels run on vectors of 4 elements",
            "in a virtual machine, expose the host's processor (qemu: -cpu host)",
        )


def cpu_limit() -> float | None:
    """The processor time that the control groups allow, in processors; None without a limit."""
    limits = []
    for folder in _control_groups():
        file = folder / "cpu.max"  # the root of a machine has none
        quota, period = file.read_text().split() if file.exists() else ("max", "")
        if quota != "max":
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def _control_groups() -> Iterator[Path]:
    """The folders of this process's group and its ancestors; groups of version 1 are not read."""
    own = re.search(r"^0::/(.*)$", _MEMBERSHIP.read_text(), re.MULTILINE)
    folder = _CGROUPS / (own[1] if own else "")
    return (f for f in (folder, *folder.parents) if f == _CGROUPS or _CGROUPS in f.parents)


def _limit_problems(limit: float | None, available: int) -> Iterator[Problem]:
    if limit is None or math.ceil(limit) >= available:
        return
    workers = math.ceil(limit)
    yield warning(
        f"the control group allows {limit:g} processors' time, and the CPU driver starts "
        f"{available} threads, which then wait for their share",
        f"give the container processors of its own (--cpuset-cpus), or start the program with "
        f"taskset -c 0-{workers - 1}",
    )


def _fork_problems() -> Iterator[Problem]:
    allocator = sys.modules.get("fusedoptim.allocator")  # before its import nothing has run
    if allocator is not None and allocator.is_forked():
        yield error(
            "this process was forked after its parent used a SYCL device, and a driver's threads "
            "do not survive a fork",
            "multiprocessing.set_start_method('spawn')",
        )
