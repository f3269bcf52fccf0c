"""Traces of what torch's profiler recorded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from allocator import Trace, advise


def test_from_profiler() -> None:
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(3):
            loss = model(torch.randn(16, 20)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    trace = Trace.from_profiler(profiler)
    sizes = [event.size for event in trace if event.action == "allocate"]
    assert sizes.count(16 * 20 * 4) >= 3  # the batches
    # The momentum of each parameter and its last gradient are still allocated at the end.
    expected = 2 * sorted(p.nbytes for p in model.parameters())
    left = [event.size for event in trace.leaked]
    for size in expected:
        left.remove(size)
    assert 0 < trace.replay().peak_requested == trace.peak_requested
    assert trace[0].time == 0
    assert advise(trace).lower_bound == trace.peak_requested


def test_from_profiler_without_memory_or_unfinished() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.empty(10)
    with pytest.raises(ValueError, match="profile_memory=True"):
        Trace.from_profiler(profiler)
    unfinished = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with pytest.raises(ValueError, match="has not finished"):
        Trace.from_profiler(unfinished)
    with unfinished, pytest.raises(ValueError, match="has not finished"):
        Trace.from_profiler(unfinished)


def memory_event(now: int, pointer: int, size: int, device: str = "cpu") -> Any:
    """An allocation event as the profiler records it."""
    fields = SimpleNamespace(ptr=pointer, alloc_size=size, device=torch.device(device))
    return SimpleNamespace(
        tag=_EventType.Allocation, start_time_ns=now, start_tid=1, extra_fields=fields, children=[]
    )


def test_what_a_profiler_can_miss() -> None:
    events = [
        memory_event(9000, 512, 20),  # the same address again, so the first was released
        memory_event(1000, 512, 10),
        memory_event(2000, 1024, -10),  # allocated before the profile
        memory_event(3000, 2048, 99, "cuda"),
        memory_event(9000, 512, -20),
    ]
    finished = SimpleNamespace(experimental_event_tree=lambda: events)
    profiler: Any = SimpleNamespace(
        profile_memory=True, profiler=SimpleNamespace(kineto_results=finished)
    )
    trace = Trace.from_profiler(profiler)
    actions = [(event.action, event.size) for event in trace]
    assert actions == [("allocate", 10), ("free", 10), ("allocate", 20), ("free", 20)]
    assert [event.time for event in trace] == [0, 8, 8, 8]
    assert trace.ignored == 1
