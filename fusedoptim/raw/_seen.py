"""Refuses calls that torch records or differentiates: it does not see what a kernel does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusedoptim._torch_private import is_exported, is_forward_mode, proxy_mode, tracing_state
from fusedoptim.step.tensors import has_tangent


def check_seen(kernel: str, args: Sequence[Any]) -> None:
    """Raise if torch would miss what ``kernel``, as errors name it, does to ``args``."""
    if tracing_state() is not None:
        raise _recorded(kernel, "torch.jit.trace")
    if is_exported():
        raise _recorded(kernel, "torch.export")
    if proxy_mode() is not None:
        raise _recorded(kernel, "make_fx")
    if is_forward_mode():
        for value in args:
            if isinstance(value, Tensor) and has_tangent(value):
                raise RuntimeError(
                    f"{kernel}: an argument has a tangent, and forward-mode differentiation does "
                    "not see a kernel; pass torch.autograd.forward_ad.unpack_dual(tensor).primal, "
                    "or call it in a torch.autograd.Function that has a jvp"
                )


def _recorded(kernel: str, by: str) -> RuntimeError:
    return RuntimeError(
        f"{kernel}: called inside {by}, which does not see what a kernel does to memory; call it "
        "in a function of torch.library.custom_op, which is recorded as a whole"
    )
