"""Functions over :mod:`fusedoptim.ops`: drop-ins for their namesakes of ``torch.nn.functional``."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedoptim import ops
from fusedoptim.ops._launching import is_served

__all__ = ["dropout"]

_SEEDS = 2**63 - 1


def dropout(
    input: Tensor,  # noqa: A002 (torch's name)
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    """Zero elements at random, and divide the others by the probability of keeping them.

    The mask is a function of one random number from torch's default generator, so it follows
    ``torch.manual_seed``, ``torch.random.fork_rng`` and ``torch.utils.checkpoint``; it is not the
    mask that torch draws. Nothing but that number is kept for the backward pass.

    Args:
        input: of any shape. Where no kernel serves it (a device that is neither a CPU nor an Intel
            GPU, a nested tensor), torch's own dropout does.
        p: the probability of zeroing an element.
        training: whether to do anything at all.
        inplace: whether the result also replaces the values of ``input``.

    Returns:
        a new tensor with the input's strides, or ``input`` if ``inplace``, without ``training`` or
        for ``p=0``.

    Raises:
        ValueError: p is not between 0 and 1.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> y = dropout(torch.ones(1000), 0.25)
        >>> 200 < int((y == 0).sum()) < 300
        True

    Semantics: ``torch.nn.functional.dropout`` of torch 2.13.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not training or p == 0:
        return input
    if not is_served(input):
        return torch.nn.functional.dropout(input, p, training, inplace)
    seed = torch.randint(_SEEDS, (), device=input.device)
    output = ops.dropout(input, seed, p)
    return input.copy_(output) if inplace else output
