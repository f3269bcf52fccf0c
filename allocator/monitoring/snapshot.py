"""Snapshots: segments, blocks and history in the format of torch's memory_viz page."""

from __future__ import annotations

import dataclasses
from typing import Any

from allocator.monitoring.history import History, room_of
from allocator.pool.allocation import Allocation
from allocator.pool.blocks import Segment
from allocator.pool.core import Core


def snapshot(core: Core, history: History | None) -> dict[str, Any]:
    """A snapshot of a pool with the traces of a history; the caller holds the pool's lock."""
    store = core.store
    segments = [
        _segment(segment, heap.number) for heap in store.heaps.values() for segment in heap.segments
    ]
    active = [*store.in_use.values(), *(allocation for allocation, _ in store.awaiting)]
    segments += [_lone_segment(allocation) for allocation in active if allocation.block is None]
    traces: list[list[dict[str, Any]]] = [[]]
    if history is not None:
        traces = [history.trace()]
        for segment in segments:
            segment["frames"] = history.segment_frames.get(segment["address"], segment["frames"])
    settings = {
        "backend": "fusedoptim.allocator",
        "device": store.source.driver.name,
        "kind": core.kind,
        "pool": core.name,
        "limit": store.source.limit,
        "expandable_segments": False,
        "max_split_size": -1,
        **dataclasses.asdict(store.rules),
    }
    return {"segments": segments, "device_traces": traces, "allocator_settings": settings}


def _described(
    address: int, total: int, stream: int, is_small: bool, blocks: list[dict[str, Any]]
) -> dict[str, Any]:
    in_use = [block for block in blocks if block["state"] == "active_allocated"]
    active = [block for block in blocks if block["state"] != "inactive"]
    return {
        "device": 0,
        "address": address,
        "total_size": total,
        "allocated_size": sum(block["size"] for block in in_use),
        "active_size": sum(block["size"] for block in active),
        "requested_size": sum(block["requested_size"] for block in in_use),
        "stream": stream,
        "segment_type": "small" if is_small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def _segment(segment: Segment, stream: int) -> dict[str, Any]:
    blocks = [
        _block(block.address, block.size, None if block.is_free else block.tag)
        for block in segment.blocks()
    ]
    return _described(segment.address, segment.size, stream, segment.is_small, blocks)


def _lone_segment(allocation: Allocation) -> dict[str, Any]:
    """The driver's memory of an allocation without a block."""
    address, nbytes, room = allocation.address, allocation.nbytes, room_of(allocation)
    blocks = [_block(address, nbytes, allocation), _block(address + nbytes, room - nbytes, None)]
    return _described(address, room, 0, False, blocks) | {"frames": allocation.frames}


def _block(address: int, size: int, allocation: Allocation | None) -> dict[str, Any]:
    if allocation is None:
        state = "inactive"
    else:
        state = "active_allocated" if allocation.is_in_use else "active_pending_free"
    return {
        "address": address,
        "size": size,
        "requested_size": 0 if allocation is None else allocation.nbytes,
        "state": state,
        "frames": [] if allocation is None else allocation.frames,
    }
