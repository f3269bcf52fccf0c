"""Functions over :mod:`fusedoptim.ops`: drop-ins for their namesakes of ``torch.nn.functional``."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedoptim import ops
from fusedoptim._torch_private import is_forward_mode, transform_level
from fusedoptim.ops._launching import is_served

__all__ = ["cross_entropy", "dropout"]

_SEEDS = 2**63 - 1
_REDUCTIONS = ("none", "mean", "sum")
MIN_FUSED = 1 << 20
"""Logits from which a kernel is quicker than torch, in spite of what its launch costs."""


def _is_ours(tensor: Tensor) -> bool:
    """Whether an operator takes the tensor.

    torch has no rules for a library's operators in ``torch.func`` and forward-mode differentiation.
    """
    if not torch.compiler.is_compiling() and (transform_level() is not None or is_forward_mode()):
        return False
    return is_served(tensor)


def cross_entropy(
    input: Tensor,  # noqa: A002 (torch's name)
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""The cross-entropy between logits and classes.

    .. math::
        \ell_i = -(1-\epsilon) \log p_{i t_i} - \frac{\epsilon}{C} \sum_j \log p_{ij},
        \qquad p_i = \operatorname{softmax}(x_i)

    Forward and backward are a kernel each, and no probabilities are kept between them. Under
    ``torch.autocast`` the kernels read 16-bit logits as they are and compute in float32, where
    torch first copies them to float32; the result is float32 as torch's is.

    Class weights, probabilities as targets, inputs of more than two dimensions, calls inside a
    ``torch.func`` transform or forward-mode differentiation, and fewer than a million logits, for
    which a launch costs more than the kernel gains, go to torch's own function.

    Args:
        input: the logits x, (N, C) or (C,).
        target: the classes t, (N,) or (), int64.
        weight: of each class, (C,).
        size_average: deprecated in torch, in favour of ``reduction``.
        ignore_index: the target of rows that count for nothing.
        reduce: deprecated in torch, in favour of ``reduction``.
        reduction: "mean" (over the rows that count), "sum" or "none".
        label_smoothing: :math:`\epsilon`, from 0 to 1.

    Returns:
        a 0-d tensor, or the loss of each row without a reduction.

    Raises:
        ValueError: shapes do not fit, or a reduction that does not exist.
        IndexError: on the CPU, a target is no class. On a GPU the result is NaN.

    Example:
        >>> import torch
        >>> cross_entropy(torch.zeros(3, 4), torch.tensor([0, 3, -100]))
        tensor(1.3863)

    Semantics: ``torch.nn.functional.cross_entropy`` of torch 2.13.
    """
    is_plain = weight is None and size_average is None and reduce is None
    has_classes = target.dtype == torch.int64 and target.shape == input.shape[:-1]
    is_fused = is_plain and has_classes and input.dim() in (1, 2) and input.numel() >= MIN_FUSED
    is_valid = reduction in _REDUCTIONS and 0 <= label_smoothing <= 1  # torch's errors are plain
    if not (is_fused and _is_ours(input) and is_valid):
        return torch.nn.functional.cross_entropy(
            input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    logits, classes = input.reshape(-1, input.shape[-1]), target.reshape(-1)
    loss, _ = ops.cross_entropy(logits, classes, label_smoothing, ignore_index)
    loss = loss.view(target.shape) if reduction == "none" else loss.sum()
    if reduction == "mean":
        loss = loss / (target != ignore_index).sum()
    return loss if torch.is_autocast_enabled(input.device.type) else loss.to(input.dtype)


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
            GPU, a nested tensor, inside a ``torch.func`` transform or forward-mode
            differentiation), torch's own dropout does.
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
    if not _is_ours(input):
        return torch.nn.functional.dropout(input, p, training, inplace)
    seed = torch.randint(_SEEDS, (), device=input.device)
    output = ops.dropout(input, seed, p)
    return input.copy_(output) if inplace else output
