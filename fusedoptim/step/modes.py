"""What torch may have put around a step: tracing, transforms, and other dispatch modes.

A step works on memory. Tracing and functorch's transforms hand out tensors that have none, and
record operations: of a step they would see nothing, so it refuses to run there. Any other dispatch
mode may exchange what an operation returns; a step's own operations bypass it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedoptim._torch_private import active_modes, transform_level


def check_not_traced(what: str) -> None:
    """Raise if torch traces or transforms the running code.

    torch.optim's own classes have no common behaviour to follow there: inside FakeTensorMode, they
    update real parameters, or raise halfway, or leave fake state behind, by class and by step.

    Args:
        what: the error's name for the call.

    Raises:
        RuntimeError: a tracing mode, such as FakeTensorMode, or a functorch transform is active.
    """
    found = [type(mode).__name__ for mode in active_modes()]
    if transform_level() is not None:
        found.append("a torch.func transform")
    if found:
        raise RuntimeError(
            f"{what} was called inside {found[0]}, which cannot see what it does to memory; call "
            "it outside, or use the torch.optim class"
        )


def has_memory(tensor: Tensor) -> bool:
    """Whether the elements, if there are any, lie in memory that the tensor itself holds.

    Those of fake tensors, of wrappers around other tensors, and of functorch's tensors do not.
    """
    try:
        if tensor.layout is torch.sparse_coo:
            return has_memory(tensor._values())
        storage = tensor.untyped_storage()
        is_meta = storage.device.type == "meta"  # a fake tensor's too, which warns of data_ptr()
        return not is_meta and (tensor.numel() == 0 or storage.data_ptr() != 0)
    except RuntimeError:  # it has no storage, or one whose address must not be taken
        return False
