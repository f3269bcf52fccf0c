"""A 2-d convolution as products of matrices, for small images with many channels.

oneDNN copies a convolution's weight into a layout of its own in each call, and the weight's
gradient back, and its kernels for a few pixels are slow. docs/design/convolutions.md says how long
each takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fusedoptim._torch_private import is_batched, transform_level
from fusedoptim.ops._registering import needed, register


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    *,
    whole: bool = True,
) -> Tensor:
    r""":math:`Y = P W^T + b`, where the rows of P are the patches of x.

    The gradient of W is :math:`G^T P`, where G is that of Y.

    Args:
        x: (N, C, H, W), best in channels_last, where a patch of one pixel is a view.
        weight: (K, C, h, w), of the same dtype, best in channels_last.
        bias: (K,), or None.
        stride: vertical and horizontal.
        padding: zeros above and below, and on both sides.
        whole: whether Y and the gradient of x are products too; if not, torch convolves.

    Returns:
        (N, K, H', W') in channels_last.
    """
    result: Tensor = _conv2d(x, weight, bias, list(stride), list(padding), whole)
    return result


def output_size(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]
) -> list[int]:
    """Height and width of the output; not positive where the weight exceeds the padded input."""
    sides = zip(x.shape[2:], weight.shape[2:], stride, padding)
    return [(size + 2 * pad - taps) // step + 1 for size, taps, step, pad in sides]


def _compute(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    whole: bool,
) -> Tensor:
    if not whole:
        convolved = functional.conv2d(x, weight, bias, stride, padding)
        return convolved.contiguous(memory_format=torch.channels_last)
    patches = _patches(x, weight.shape[2:], stride, padding).flatten(0, 2)
    output = _like(x, weight, bias, stride, padding, whole)
    # Written in place: torch refuses writes into a view that an operator returns, as by a ReLU.
    rows = _channels_last(output).flatten(0, 2)
    if bias is None:
        torch.mm(patches, _matrix(weight).t(), out=rows)
    else:
        torch.addmm(bias, patches, _matrix(weight).t(), out=rows)
    return output


def _like(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    whole: bool,
) -> Tensor:
    shape = (x.shape[0], weight.shape[0], *output_size(x, weight, stride, padding))
    layout = torch.channels_last
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, ctx.stride, ctx.padding, ctx.whole = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    wanted = needed(ctx)[:3]
    # torch's gradients can be differentiated again, and computed for many vectors at once.
    if torch.is_grad_enabled() or is_batched(grad) or transform_level() is not None:
        found = _torchs_gradients(grad, x, weight, ctx.stride, ctx.padding, wanted)
    else:
        with torch.autocast(x.device.type, enabled=False):  # as torch's gradient, it casts nothing
            of_input = _of_input if ctx.whole else _of_input_by_torch
            found = (
                of_input(grad, x, weight, ctx.stride, ctx.padding) if wanted[0] else None,
                _of_weight(grad, x, weight, ctx.stride, ctx.padding) if wanted[1] else None,
                grad.sum((0, 2, 3)) if wanted[2] else None,
            )
    return (*found, None, None, None)


def _of_input(
    grad: Tensor, x: Tensor, weight: Tensor, stride: list[int], padding: list[int]
) -> Tensor:
    """The gradient of the input: that of the output, convolved with the reversed weight."""
    taps = weight.permute(2, 3, 0, 1).flatten(0, 1)  # (hw, K, C)
    if len(taps) == 1 and padding == [0, 0]:
        rows = _channels_last(grad) @ taps[0]
        for dim, step in enumerate(stride, start=1):
            rows = _spread(rows, dim, step, x.shape[dim + 1])
        return _channels_first(rows)
    around = [size - 1 - pad for size, pad in zip(weight.shape[2:], padding)]
    if stride == [1, 1] and min(around) >= 0:
        patches = _patches(grad, weight.shape[2:], stride, around)
        return _channels_first(patches @ torch.cat(taps.unbind()[::-1]))
    return _of_input_by_torch(grad, x, weight, stride, padding)


def _of_input_by_torch(
    grad: Tensor, x: Tensor, weight: Tensor, stride: list[int], padding: list[int]
) -> Tensor:
    of_input, *_ = _torchs_gradients(grad, x, weight, stride, padding, [True, False, False])
    assert of_input is not None
    return of_input


def _of_weight(
    grad: Tensor, x: Tensor, weight: Tensor, stride: list[int], padding: list[int]
) -> Tensor:
    """The gradient of the weight, in channels_last."""
    outputs, channels, height, width = weight.shape
    patches = _patches(x, weight.shape[2:], stride, padding).flatten(0, 2)
    rows = _channels_last(grad).flatten(0, 2)
    return _channels_first((rows.t() @ patches).view(outputs, height, width, channels))


def _torchs_gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    found: tuple[Tensor | None, ...] = torch.ops.aten.convolution_backward(
        grad, x, weight, [weight.shape[0]], stride, padding, [1, 1], False, [0, 0], 1, list(wanted)
    )
    return found


def _patches(
    x: Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """For each pixel of the output, what the weight is multiplied with: (N, H', W', hwC)."""
    rows = _channels_last(x)
    if any(padding):
        above, beside = padding
        rows = functional.pad(rows, (0, 0, beside, beside, above, above))
    windows = rows.unfold(1, size[0], stride[0]).unfold(2, size[1], stride[1])
    return windows.permute(0, 1, 2, 4, 5, 3).flatten(3)  # they were (N, H', W', C, h, w)


def _spread(rows: Tensor, dim: int, step: int, size: int) -> Tensor:
    """Zeros of this size along ``dim``, with the rows in each ``step``-th place."""
    if rows.shape[dim] == size:
        return rows
    shape = list(rows.shape)
    shape[dim] = size
    return rows.new_zeros(shape).slice_scatter(rows, dim, step=step)


def _matrix(weight: Tensor) -> Tensor:
    """(K, hwC): a view if the weight is in channels_last."""
    return _channels_last(weight).flatten(1)


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.permute(0, 2, 3, 1)


def _channels_first(tensor: Tensor) -> Tensor:
    return tensor.permute(0, 3, 1, 2)


_conv2d = register(
    "conv2d(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, bool whole)"
    " -> Tensor",
    kernel=_compute,
    fake=_like,
    setup_context=_setup_context,
    backward=_backward,
)
