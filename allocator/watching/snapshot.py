"""A pool's segments and blocks, in the format that torch's memory_viz page opens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from allocator.pool.blocks import Block, Segment

if TYPE_CHECKING:
    from allocator.pool.allocation import Allocation
    from allocator.pool.store import Store


def snapshot(store: Store) -> dict[str, Any]:
    """What torch calls a snapshot; no history is recorded, so there are no traces."""
    segments = [
        _described(segment, stream)
        for stream, heap in enumerate(store.heaps.values())
        for segment in heap.segments
    ]
    return {"segments": segments, "device_traces": [[]], "allocator_settings": {}}


def _described(segment: Segment, stream: int) -> dict[str, Any]:
    blocks = [_block(block) for block in _chain(segment)]
    in_use = [block for block in blocks if block["state"] == "active_allocated"]
    active = [block for block in blocks if block["state"] != "inactive"]
    return {
        "device": 0,
        "address": segment.address,
        "total_size": segment.size,
        "allocated_size": sum(block["size"] for block in in_use),
        "active_size": sum(block["size"] for block in active),
        "requested_size": sum(block["requested_size"] for block in in_use),
        "stream": stream,
        "segment_type": "small" if segment.is_small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def _chain(segment: Segment) -> Iterator[Block]:
    block: Block | None = segment.first
    while block is not None:
        yield block
        block = block.next


def _block(block: Block) -> dict[str, Any]:
    allocation: Allocation | None = block.tag
    if block.is_free or allocation is None:
        state = "inactive"
    else:
        state = "active_allocated" if allocation.is_in_use else "active_pending_free"
    return {
        "address": block.address,
        "size": block.size,
        "requested_size": 0 if allocation is None else allocation.nbytes,
        "state": state,
        "frames": [] if allocation is None else allocation.frames,
    }
