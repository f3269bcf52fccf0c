"""What torch.export records of modules whose backward pass updates their tables."""

from __future__ import annotations

import torch

from fusedoptim._torch_private import is_exported


def is_recorded(training: bool) -> bool:
    """Whether the call is recorded for other processes, where nothing can update the tables.

    Args:
        training: whether the module is in training mode.

    Raises:
        RuntimeError: it is recorded, and is in training mode.
    """
    # Dynamo traces for one thread at a time, and cannot trace what tells threads apart.
    is_traced = torch.compiler.is_dynamo_compiling()
    if not (torch.compiler.is_exporting() if is_traced else is_exported()):
        return False
    if training:
        raise RuntimeError(
            "MergedEmbeddingBag: the module is in training mode, and torch.export cannot record "
            "that the backward pass updates its tables; call eval() of the model first, or export "
            "it under torch.no_grad()"
        )
    return True
