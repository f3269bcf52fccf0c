r"""GELU, approximated with a hyperbolic tangent: one kernel forward, one backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedoptim.ops._launching import DTYPE_NAMES, VARIANT_OF, in_order_of, launch
from fusedoptim.ops._registering import directly, register, register_without_gradient

__all__ = ["gelu_tanh"]


def gelu_tanh(x: Tensor) -> Tensor:
    r"""GELU, approximated with a hyperbolic tangent.

    .. math::
        y_i = \tfrac12 x_i \Big(1 + \tanh\big(\sqrt{2/\pi}\,(x_i + 0.044715\,x_i^3)\big)\Big)

    Args:
        x: float32, float64, bfloat16 or float16, of any shape. The result has its strides, or dense
            ones in the same order. 16-bit values are computed in float32.

    Returns:
        a new tensor.

    Raises:
        TypeError: x has a dtype that no kernel computes with.

    Example:
        >>> import torch
        >>> gelu_tanh(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([-0.1588,  0.0000,  0.8412])

    Semantics: ``torch.nn.functional.gelu`` of torch 2.13 with ``approximate="tanh"``.
    """
    result: Tensor = _gelu(x)
    return result


def _compute(x: Tensor) -> Tensor:
    y = _like(x)
    if y.numel():
        launch("gelu_tanh", {"x": in_order_of(x, y), "y": y}, {})
    return y


def _like(x: Tensor) -> Tensor:
    """The output, uninitialized; raise if the operator does not accept this input."""
    if x.dtype not in VARIANT_OF:
        raise TypeError(
            f"gelu_tanh: x has dtype {x.dtype}, and kernels compute with {DTYPE_NAMES}; convert it"
        )
    return torch.empty_like(x)


def _compute_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of the input."""
    grad_x = _gradient_like(grad, x)
    if grad_x.numel():
        tensors = {"x": in_order_of(x, grad_x), "grad": in_order_of(grad, grad_x), "grad_x": grad_x}
        launch("gelu_tanh_backward", tensors, {})
    return grad_x


def _gradient_like(grad: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor]:
    (x,) = ctx.saved_tensors
    if torch.is_grad_enabled():  # of backward(create_graph=True)
        return (torch.ops.aten.gelu_backward(grad, x, approximate="tanh"),)
    return (_gradient(grad, x),)


_gelu = register(
    "gelu_tanh(Tensor x) -> Tensor",
    kernel=_compute,
    fake=_like,
    setup_context=_setup_context,
    backward=_backward,
    direct=directly(_compute),
)
_gradient = register_without_gradient(
    "gelu_tanh_backward(Tensor grad, Tensor x) -> Tensor", _compute_gradient, _gradient_like
)
