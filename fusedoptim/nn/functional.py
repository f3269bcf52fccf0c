"""Functions built on :mod:`fusedoptim.ops`: drop-ins for those of ``torch.nn.functional``."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fusedoptim import ops
from fusedoptim._torch_private import is_forward_mode, transform_level
from fusedoptim.ops._attention import attention
from fusedoptim.ops._autocast import autocast, autocast_dtype
from fusedoptim.ops._launching import is_served

__all__ = [
    "alpha_dropout",
    "cross_entropy",
    "dropout",
    "gelu",
    "scaled_dot_product_attention",
]

_REDUCTIONS = ("none", "mean", "sum")
MIN_FUSED = 1 << 20
"""From this many logits on, a kernel is quicker than torch, although its launch costs time."""
MIN_CLASSES = 256
"""From this many classes on: a kernel's work-group walks one row, and short ones leave it idle."""
MIN_ACTIVATED = 1 << 17
"""From this many elements on, GELU's kernel is quicker than torch."""


def _new_seed(device: torch.device) -> Tensor:
    """A random number from torch's default generator."""
    return torch.randint(2**63 - 1, (), device=device)


def is_ours(tensor: Tensor) -> bool:
    """Whether an operator accepts the tensor.

    torch has no rules for a library's operators in ``torch.func`` and forward-mode differentiation.
    torch.fx may trace torch's function instead, with all arguments as they are given.
    """
    if isinstance(tensor, torch.fx.Proxy):
        return False
    if not torch.compiler.is_dynamo_compiling() and (
        transform_level() is not None or is_forward_mode()
    ):
        return False
    return is_served(tensor)


def is_ours_to_attend(tensor: Tensor) -> bool:
    """Whether our attention serves the tensor: torch's is slow with dropout on the CPU alone."""
    return tensor.device.type == "cpu" and is_ours(tensor)


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

    Forward and backward are one kernel each, and no probabilities are kept between them. Under
    ``torch.autocast`` the kernels read 16-bit logits directly and compute in float32, whereas torch
    first copies them to float32. The result is float32, as torch's is.

    Some calls go to torch's own function: those with class weights, with probabilities as targets,
    with inputs of more than two dimensions, inside a ``torch.func`` transform or forward-mode
    differentiation, and with fewer than a million logits or 256 classes, for which the launch and
    its short rows cost more than the kernel gains. As no probabilities are kept, the logits must
    stay unchanged until the backward pass, which otherwise raises.

    Args:
        input: the logits x, (N, C) or (C,).
        target: the classes t, (N,) or (), int64.
        weight: the weight of each class, (C,).
        size_average: deprecated in torch, in favor of ``reduction``.
        ignore_index: the target of rows that are ignored.
        reduce: deprecated in torch, in favor of ``reduction``.
        reduction: "mean" (over the rows that count), "sum" or "none".
        label_smoothing: :math:`\epsilon`, from 0 to 1. As in torch, values below 0 and NaN are 0.

    Returns:
        a 0-d tensor, or the loss of each row without a reduction.

    Raises:
        ValueError: shapes do not fit, or a reduction that does not exist.
        RuntimeError: label_smoothing is greater than 1.
        IndexError: on the CPU, a target is not a class. On a GPU the result is NaN.

    Example:
        >>> import torch
        >>> cross_entropy(torch.zeros(3, 4), torch.tensor([0, 3, -100]))
        tensor(1.3863)

    Semantics: ``torch.nn.functional.cross_entropy`` of torch 2.13.
    """
    is_fused = (
        weight is None
        and size_average is None
        and reduce is None
        and isinstance(input, Tensor)
        and isinstance(target, Tensor)
        and target.dtype == torch.int64
        and target.shape == input.shape[:-1]
        and input.dim() in (1, 2)
        and input.numel() >= MIN_FUSED
        and input.shape[-1] >= MIN_CLASSES
        and isinstance(label_smoothing, (int, float))
        and 0 <= label_smoothing <= 1
        and isinstance(ignore_index, int)
        and not isinstance(ignore_index, bool)
        and -(2**63) <= ignore_index < 2**63
        and reduction in _REDUCTIONS
        and is_ours(input)
    )
    if not is_fused:  # torch's errors are plain
        return torch.nn.functional.cross_entropy(
            input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    logits, classes = input.reshape(-1, input.shape[-1]), target.reshape(-1)
    loss, _ = ops.cross_entropy(logits, classes, label_smoothing, ignore_index)
    loss = loss.view(target.shape) if reduction == "none" else loss.sum()
    if reduction == "mean":
        loss = loss / (target != ignore_index).sum()
    return loss.to(input.dtype) if autocast_dtype(input.device) is None else loss


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
        input: a tensor of any shape. Where no kernel serves it (a device that is neither a CPU nor
            an Intel GPU, a nested tensor, inside a ``torch.func`` transform, forward-mode
            differentiation or a trace by ``torch.fx``), torch's own dropout does.
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
    return _drop(ops.dropout, torch.nn.functional.dropout, input, p, training, inplace)


def alpha_dropout(
    input: Tensor,  # noqa: A002 (torch's name)
    p: float = 0.5,
    training: bool = False,
    inplace: bool = False,
) -> Tensor:
    """Replace elements at random by SELU's lower limit, and restore mean and variance.

    The formula is that of :func:`fusedoptim.ops.alpha_dropout`, and the mask that of
    :func:`dropout`. 16-bit values are computed in float32 and rounded once.

    Args:
        input: a tensor of any shape. Where no kernel serves it, as in :func:`dropout`, torch's own
            alpha_dropout does.
        p: the probability of replacing an element.
        training: whether to do anything at all; False by default, as in torch.
        inplace: whether the result also replaces the values of ``input``.

    Returns:
        a new tensor with the input's strides, or ``input`` if ``inplace``, without ``training`` or
        for ``p=0``.

    Raises:
        ValueError: p is not between 0 and 1.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> y = alpha_dropout(torch.randn(10_000), 0.25, training=True)
        >>> abs(float(y.mean())) < 0.1, 0.9 < float(y.var()) < 1.1
        (True, True)

    Semantics: ``torch.nn.functional.alpha_dropout`` of torch 2.13.
    """
    return _drop(ops.alpha_dropout, torch.nn.functional.alpha_dropout, input, p, training, inplace)


def _drop(
    ours: Callable[[Tensor, Tensor, float], Tensor],
    torchs: Callable[[Tensor, float, bool, bool], Tensor],
    x: Tensor,
    p: float,
    training: bool,
    inplace: bool,
) -> Tensor:
    """Dropout by our operator, or by torch's function where none accepts the tensor."""
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not training or p == 0:
        return x
    if not is_ours(x):
        return torchs(x, p, training, inplace)
    output = ours(x, _new_seed(x.device), p)
    return x.copy_(output) if inplace else output


def gelu(
    input: Tensor,  # noqa: A002 (torch's name)
    approximate: str = "none",
) -> Tensor:
    r"""GELU; the tanh approximation is one kernel forward and one backward.

    .. math::
        y = \tfrac12 x \Big(1 + \tanh\big(\sqrt{2/\pi}\,(x + 0.044715\,x^3)\big)\Big)

    16-bit values are computed in float32 and rounded once. Some calls go to torch's own function:
    calls of the exact GELU, calls inside a ``torch.func`` transform or forward-mode
    differentiation, and calls with fewer than 131,072 elements, for which a launch costs more than
    the kernel gains.

    Args:
        input: x, of any shape.
        approximate: "tanh" as above, or "none": exact, by torch.

    Returns:
        a new tensor of the same dtype.

    Raises:
        RuntimeError: another ``approximate``.

    Example:
        >>> import torch
        >>> gelu(torch.tensor([-1.0, 1.0]), approximate="tanh")
        tensor([-0.1588,  0.8412])

    Semantics: ``torch.nn.functional.gelu`` of torch 2.13.
    """
    if approximate == "tanh" and is_ours(input) and input.numel() >= MIN_ACTIVATED:
        return ops.gelu_tanh(input)
    return torch.nn.functional.gelu(input, approximate=approximate)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Attention whose weights are dropped with a mask that is drawn on all cores.

    .. math::
        y = \operatorname{dropout}\big(\operatorname{softmax}(s\,q k^T + m)\big)\, v

    With ``dropout_p > 0`` on the CPU, torch does not use its fast kernels, but a path of single
    operations that draws the dropout mask on one thread and multiplies 16-bit matrices in float32.
    Here the mask is that of :func:`dropout`. Scores and their softmax are float32 (float64 for
    float64). For bfloat16, weights and gradients are multiplied in bfloat16, as in torch's fast
    kernels.

    All other calls go to torch's own function: those without dropout, on devices other than the
    CPU, with batches that broadcast, with empty or nested tensors, and inside a ``torch.func``
    transform or forward-mode differentiation.

    Args:
        query: q, of shape (..., L, E): float32, float64, bfloat16 or float16.
        key: k, (..., S, E), of q's dtype.
        value: v, (..., S, V), of q's dtype.
        attn_mask: m, which broadcasts to (..., L, S): numbers that are added, or a bool tensor
            that is true where a weight takes part.
        dropout_p: the probability of zeroing a weight.
        is_causal: whether row i has weights only for the first i + 1 columns; not with attn_mask.
        scale: s; :math:`1/\sqrt{E}` if None.
        enable_gqa: whether key and value may have fewer heads, in dimension -3: each serves several
            of the query's.

    Returns:
        (..., L, V), of v's dtype.

    Raises:
        RuntimeError: shapes, dtypes or arguments that do not fit, as in torch.

    Example:
        >>> import torch
        >>> q, k, v = torch.ones(3, 2, 4, 8).unbind()
        >>> scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True).shape
        torch.Size([2, 4, 8])

    Semantics: ``torch.nn.functional.scaled_dot_product_attention`` of torch 2.13.
    """
    q, k, v, mask = query, key, value, attn_mask
    is_dropped = (
        0 < dropout_p <= 1
        # torch's errors for other types are plain.
        and isinstance(is_causal, bool)
        and isinstance(enable_gqa, bool)
        and all(isinstance(x, Tensor) for x in (q, k, v, q if mask is None else mask))
        and is_ours_to_attend(q)
    )
    if is_dropped:
        q, k, v = autocast(q), autocast(k), autocast(v)
        mask = None if mask is None else autocast(mask)
        if enable_gqa and _has_groups(q, k, v):
            repeats = q.shape[-3] // k.shape[-3]
            k, v = k.repeat_interleave(repeats, -3), v.repeat_interleave(repeats, -3)
    if not (is_dropped and _is_attention(q, k, v, mask, is_causal)):
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if mask is not None and mask.dtype == torch.bool:
        mask = additive_mask(~mask, q.dtype)
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1])
    return attention(q, k, v, mask, is_causal, _new_seed(q.device), dropout_p, scale)


def additive_mask(left_out: Tensor, dtype: torch.dtype) -> Tensor:
    """What to add to scores so that those ``left_out``, a bool tensor, do not count."""
    return torch.zeros_like(left_out, dtype=dtype).masked_fill_(left_out, -math.inf)


def _has_groups(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether each head of key and value serves the same number of the query's."""
    if min(query.dim(), key.dim(), value.dim()) < 3 or not key.shape[-3]:
        return False
    return key.shape[-3] == value.shape[-3] and query.shape[-3] % key.shape[-3] == 0


def _is_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
) -> bool:
    """Whether our attention accepts these arguments."""
    tensors, batch = (query, key, value), query.shape[:-2]
    if not all(t.dim() >= 3 and is_ours_to_attend(t) for t in tensors):
        return False
    if not all(t.dtype == query.dtype and t.shape[:-2] == batch and t.numel() for t in tensors):
        return False
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        return False
    if mask is None:
        return True
    scores = (*batch, query.shape[-2], key.shape[-2])
    is_addable = mask.dtype in (torch.bool, torch.float32, query.dtype)
    broadcasts = all(own in (1, full) for own, full in zip(mask.shape[::-1], scores[::-1]))
    is_plain = mask.device == query.device and mask.layout is torch.strided and not mask.is_nested
    fits = 2 <= mask.dim() <= len(scores) and broadcasts
    return not is_causal and is_plain and is_addable and fits
