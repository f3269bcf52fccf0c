r"""Cross-entropy from class indices, without a matrix of probabilities.

Forward and backward read the logits in their own dtype and compute in float32 (float64 for
float64), so autocast needs no wider copy of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedoptim.launch.devices import is_on_host
from fusedoptim.ops._arguments import as_int64, check_constant
from fusedoptim.ops._launching import ARITHMETIC_OF, DTYPE_NAMES, VARIANT_OF, launch_rows
from fusedoptim.ops._registering import directly, register, register_without_gradient

__all__ = ["cross_entropy"]


def cross_entropy(
    logits: Tensor, target: Tensor, label_smoothing: float = 0.0, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    r"""The loss of each row of logits, and the logarithm of the sum of their exponentials.

    .. math::
        s_i &= \log \sum_j e^{x_{ij}} \\
        \ell_i &= (1-\epsilon)\,(s_i - x_{i t_i}) +
            \epsilon\,\Big(s_i - \frac{1}{C} \sum_j x_{ij}\Big)

    Args:
        logits: :math:`x`, of shape (N, C): float32, float64, bfloat16 or float16.
        target: :math:`t`, of shape (N,): the class of each row, int64.
        label_smoothing: :math:`\epsilon`.
        ignore_index: the target of rows that have no loss and no gradient.

    Returns:
        the loss of each row and the logarithm of its sum, as above, of shape (N,), float32, or
        float64 for float64 logits. Only the first has a gradient.

    Raises:
        TypeError: logits have a dtype that no kernel computes with, targets are not int64,
            ignore_index is not an integer, or label_smoothing is a tensor that requires grad.
        ValueError: a shape or device does not fit, label_smoothing is not between 0 and 1, or
            ignore_index is not an int64.
        IndexError: on the CPU, a target is not a class. On a GPU its loss is NaN.

    Example:
        >>> import torch
        >>> loss, _ = cross_entropy(torch.zeros(2, 4), torch.tensor([1, 3]))
        >>> loss
        tensor([1.3863, 1.3863])

    Semantics: ``torch.nn.functional.cross_entropy`` of torch 2.13 with ``reduction="none"``.
    """
    check_constant("cross_entropy", "label_smoothing", label_smoothing)
    ignored = as_int64("cross_entropy", "ignore_index", ignore_index)
    loss, log_sum = _cross_entropy(logits, target, label_smoothing, ignored)
    return loss, log_sum


def _compute(
    logits: Tensor, target: Tensor, label_smoothing: float, ignore_index: int
) -> tuple[Tensor, Tensor]:
    loss, log_sum = _like(logits, target, label_smoothing, ignore_index)
    if is_on_host(target.device):  # on a GPU it would wait for the device
        _check_classes(target, logits.shape[1], ignore_index)
    if logits.numel():
        tensors = {"logits": logits, "target": target, "loss": loss, "log_sum": log_sum}
        numbers = {"smoothing": label_smoothing, "ignore_index": ignore_index}
        launch_rows("cross_entropy", _contiguous(tensors), numbers)
    return loss, log_sum


def _like(
    logits: Tensor, target: Tensor, label_smoothing: float, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """The outputs, uninitialized; raise if the operator does not accept these arguments."""
    if logits.dtype not in VARIANT_OF:
        raise TypeError(
            f"cross_entropy: logits have dtype {logits.dtype}, and kernels compute with "
            f"{DTYPE_NAMES}; convert them"
        )
    if target.dtype != torch.int64:
        raise TypeError(
            f"cross_entropy: target has dtype {target.dtype}; pass class indices, int64"
        )
    if logits.dim() != 2 or target.shape != logits.shape[:1] or not logits.shape[1]:
        raise ValueError(
            f"cross_entropy: logits have shape {tuple(logits.shape)} and target has "
            f"{tuple(target.shape)}; pass (N, C), with C at least 1, and (N,)"
        )
    if target.device != logits.device:
        raise ValueError(
            f"cross_entropy: target is on {target.device}; move it to {logits.device}, the logits'"
        )
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"cross_entropy: label_smoothing={label_smoothing!r} is not in [0, 1]")
    real = ARITHMETIC_OF[logits.dtype]
    return target.new_empty(target.shape, dtype=real), target.new_empty(target.shape, dtype=real)


def _check_classes(target: Tensor, classes: int, ignore_index: int) -> None:
    wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if bool(wrong.any()):
        first = target[wrong][0].item()
        raise IndexError(
            f"Target {first} is out of bounds: there are {classes} classes, numbered from 0, and "
            f"ignore_index={ignore_index}"
        )


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _compute_gradient(
    grad_loss: Tensor,
    logits: Tensor,
    target: Tensor,
    log_sum: Tensor,
    label_smoothing: float,
    ignore_index: int,
) -> Tensor:
    """The gradient of the logits, in their dtype."""
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if grad.numel():
        tensors = {"logits": logits, "target": target, "log_sum": log_sum, "grad_loss": grad_loss}
        numbers = {"smoothing": label_smoothing, "ignore_index": ignore_index}
        rows = {**_contiguous(tensors), "grad_logits": grad}
        launch_rows("cross_entropy_backward", rows, numbers)
    return grad


def _gradient_like(grad_loss: Tensor, logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, *ctx.numbers = inputs
    ctx.save_for_backward(logits, target, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    logits, target, log_sum = ctx.saved_tensors
    if torch.is_grad_enabled():  # of backward(create_graph=True)
        grad = _differentiable_gradient(grad_loss, logits, target, *ctx.numbers)
    else:
        grad = _gradient(grad_loss, logits, target, log_sum, *ctx.numbers)
    return grad, None, None, None


def _differentiable_gradient(
    grad_loss: Tensor, logits: Tensor, target: Tensor, label_smoothing: float, ignore_index: int
) -> Tensor:
    """The gradient of the logits by torch's operations, which are differentiable."""
    kept = target != ignore_index
    classes = logits.shape[1]
    one_hot = torch.nn.functional.one_hot(torch.where(kept, target, 0), classes)
    wanted = (1 - label_smoothing) * one_hot + label_smoothing / classes
    probabilities = torch.softmax(logits, 1, dtype=grad_loss.dtype)
    factor = torch.where(kept, grad_loss, 0.0).unsqueeze(1)
    return (factor * (probabilities - wanted)).to(logits.dtype)


_cross_entropy = register(
    "cross_entropy(Tensor logits, Tensor target, float label_smoothing, int ignore_index) -> "
    "(Tensor loss, Tensor log_sum)",
    kernel=_compute,
    fake=_like,
    setup_context=_setup_context,
    backward=_backward,
    direct=directly(_compute),
)
_gradient = register_without_gradient(
    "cross_entropy_backward(Tensor grad_loss, Tensor logits, Tensor target, Tensor log_sum, "
    "float label_smoothing, SymInt ignore_index) -> Tensor",
    _compute_gradient,
    _gradient_like,
)
