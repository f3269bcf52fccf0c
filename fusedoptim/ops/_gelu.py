r"""GELU, approximated with a hyperbolic tangent: one kernel forward, one backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedoptim.ops._launching import DEVICES, DTYPE_NAMES, VARIANT_OF, in_order_of, launch

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


@torch.library.custom_op("fusedoptim::gelu_tanh", mutates_args=(), device_types=DEVICES)
def _gelu(x: Tensor) -> Tensor:
    y: Tensor = _like(x)
    if y.numel():
        launch("gelu_tanh", {"x": in_order_of(x, y), "y": y}, {})
    return y


@_gelu.register_fake
def _like(x: Tensor) -> Tensor:
    """The output, uninitialized; raise if the operator does not accept this input."""
    if x.dtype not in VARIANT_OF:
        raise TypeError(
            f"gelu_tanh: x has dtype {x.dtype}, and kernels compute with {DTYPE_NAMES}; convert it"
        )
    return torch.empty_like(x)


@torch.library.custom_op("fusedoptim::gelu_tanh_backward", mutates_args=(), device_types=DEVICES)
def _gradient(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of the input."""
    grad_x = torch.empty_like(x)
    if grad_x.numel():
        tensors = {"x": in_order_of(x, grad_x), "grad": in_order_of(grad, grad_x), "grad_x": grad_x}
        launch("gelu_tanh_backward", tensors, {})
    return grad_x


@_gradient.register_fake
def _gradient_like(grad: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    is_differentiable = torch.is_grad_enabled()  # of backward(create_graph=True)
    result: Tensor = (
        torch.ops.aten.gelu_backward(grad, x, approximate="tanh")
        if is_differentiable
        else _gradient(grad, x)
    )
    return result


_gelu.register_autograd(_backward, setup_context=_setup_context)
