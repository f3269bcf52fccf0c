"""The queue and the memory pool of a torch device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedoptim.allocator import borrowed_queue, current_pool, queue

SERVED = ("cpu", "xpu")
"""types of devices that SYCL serves."""


def queue_of(device: torch.device) -> Any:
    """The queue on which the tensors of ``device`` are updated."""
    if device.type == "cpu":
        return queue("cpu")
    # torch's own stream keeps the order with the work around the step.
    return borrowed_queue(torch.xpu.current_stream(device).sycl_queue)


def new_state(target: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for a state of ``target``, laid out like it, with whatever values are there.

    It comes from the pool, where the states of one parameter start at different offsets within
    their pages: a kernel that reads one array and writes another is slow if both lie at one
    address modulo 4 KiB, as all large tensors of torch do.
    """
    if target.device.type not in SERVED:  # a step will say so
        return torch.empty_like(target, dtype=dtype, requires_grad=False)
    return current_pool(queue_of(target.device)).empty_like(target, dtype)
