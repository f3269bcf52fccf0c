"""What torch.export and torch.jit.trace record of modules whose backward pass updates tables."""

from __future__ import annotations

import torch

from fusedoptim._torch_private import is_exported, tracing_state


def is_recorded(training: bool) -> bool:
    """Whether the call is recorded for other processes, where nothing can update the tables.

    Args:
        training: whether the module is in training mode.

    Raises:
        RuntimeError: it is recorded, and is in training mode.
    """
    recorder = _recorder()
    if recorder is not None and training:
        raise RuntimeError(
            f"MergedEmbeddingBag: the module is in training mode, and {recorder} cannot record "
            "that the backward pass updates its tables; call eval() of the model first, or record "
            "it under torch.no_grad()"
        )
    return recorder is not None


def _recorder() -> str | None:
    """What records the call, by the name of its function, if something does."""
    if torch.compiler.is_dynamo_compiling():
        # It traces for one thread at a time, and cannot trace what tells threads apart.
        return "torch.export" if torch.compiler.is_exporting() else None
    if is_exported():
        return "torch.export"
    return None if tracing_state() is None else "torch.jit.trace"
