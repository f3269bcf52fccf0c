"""What torch may have put around a step: tracing, transforms, and other dispatch modes.

A step works on memory. Tracing and functorch's transforms hand out tensors that have none, and
record what is called: of a step they would see nothing, so it refuses to run there. Any other
dispatch mode may exchange what an operation returns; a step's own operations bypass it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _get_dispatch_mode, _TorchDispatchModeKey

count_modes = torch._C._len_torch_dispatch_stack
"""How many dispatch modes are active."""

transform_level = torch._C._functorch.maybe_current_level
"""The number of the innermost torch.func transform that is active, or None."""

BypassModes = torch._C._DisableTorchDispatch
"""A context manager of C, which an interrupt cannot leave half done."""


def check_not_traced(what: str) -> None:
    """Raise if torch traces or transforms what runs now.

    torch.optim's own classes have no common behavior to follow there: inside FakeTensorMode, they
    update real parameters, or raise halfway, or leave fake state behind, by class and by step.

    Args:
        what: was called, as the error says it.

    Raises:
        RuntimeError: a tracing mode, such as FakeTensorMode, or a functorch transform is active.
    """
    modes = map(_get_dispatch_mode, _TorchDispatchModeKey.__members__.values())
    found = [type(mode).__name__ for mode in modes if mode is not None]
    if transform_level() is not None:
        found.append("a torch.func transform")
    if found:
        raise RuntimeError(
            f"{what} was called inside {found[0]}, which cannot see what it does to memory; call "
            "it outside, or use the torch.optim class"
        )


def has_memory(tensor: Tensor) -> bool:
    """Whether the elements, if there are any, lie in memory that the tensor itself holds.

    Those of fake tensors, of wrappers around other tensors, and of functorch's do not.
    """
    try:
        if tensor.layout is torch.sparse_coo:
            return has_memory(tensor._values())
        storage = tensor.untyped_storage()
        is_meta = storage.device.type == "meta"  # a fake tensor's too, which warns of data_ptr()
        return not is_meta and (tensor.numel() == 0 or storage.data_ptr() != 0)
    except RuntimeError:  # has no storage, or one whose address must not be taken
        return False
