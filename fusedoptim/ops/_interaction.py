"""DLRM's feature interaction, one kernel forward and one backward; features may lie apart."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fusedoptim._torch_private import is_batched
from fusedoptim.kernels.language import VECTOR
from fusedoptim.launch.block import row_addresses
from fusedoptim.ops._arguments import check_tensors
from fusedoptim.ops._autocast import autocast_dtype
from fusedoptim.ops._launching import ARITHMETIC_OF, DTYPE_NAMES, VARIANT_OF, launch_table
from fusedoptim.ops._registering import register, register_without_gradient

__all__ = ["interaction"]

_LEAST_SAMPLES = 16  # of a row: each begins with clearing its part of the scratch memory
_MOST_ROWS = 1024  # each has such a part


def interaction(*features: Tensor) -> Tensor:
    r"""The first of each sample's features, and the dot products of all pairs, as in DLRM.

    .. math::
        y = (x_0,\; x_1 \cdot x_0,\; x_2 \cdot x_0,\; x_2 \cdot x_1,\; x_3 \cdot x_0, \dots)

    Args:
        features: float32, float64, bfloat16 or float16. The first is :math:`x_0` of each sample,
            (B, d), such as the bottom MLP's output. Each other tensor is the next feature, (B, d),
            or the next k features, (B, k d) or (B, k, d), such as the output of merged embedding
            bags. Features of different dtypes are converted to the widest of them, and under
            ``torch.autocast`` to its dtype. Sums of 16-bit products are float32.

    Returns:
        a new tensor, (B, d + n (n - 1) / 2) for n features, of their dtype.

    Raises:
        TypeError: features have a dtype that no kernel computes with, or are not tensors, or there
            are none.
        ValueError: a shape or device does not fit that of the first.

    Example:
        >>> import torch
        >>> dense, sparse = torch.ones(1, 2), torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
        >>> interaction(dense, sparse)
        tensor([[ 1.,  1.,  3.,  7., 11.]])

    Semantics: ``interact_features`` with "dot" of Facebook's DLRM; Naumov et al., "Deep Learning
    Recommendation Model for Personalization and Recommendation Systems" (2019).
    """
    result: Tensor = _interaction(_of_one_dtype(features))
    return result


def _of_one_dtype(features: Sequence[Tensor]) -> list[Tensor]:
    if not features:
        raise TypeError("interaction: there are no features; pass tensors, of shape (B, d) first")
    if not all(isinstance(feature, Tensor) for feature in features):
        check_tensors("interaction", **{f"feature {i}": x for i, x in enumerate(features)})
    dtypes = {feature.dtype for feature in features}
    dtype = functools.reduce(torch.promote_types, dtypes)
    if dtype != torch.float64 and dtype in VARIANT_OF:
        dtype = autocast_dtype(features[0].device) or dtype
    if dtypes == {dtype}:
        return list(features)
    return [feature.to(dtype) for feature in features]


class _Shape(NamedTuple):
    """The sizes of a call: samples, features of a sample, and numbers in a feature."""

    samples: int
    features: int
    width: int

    @property
    def columns(self) -> int:
        """Columns of the output."""
        return self.width + self.features * (self.features - 1) // 2


def _checked(features: Sequence[Tensor]) -> _Shape:
    """The shape; raise if the operator does not accept these arguments."""
    first = features[0]
    if first.dtype not in VARIANT_OF:
        raise TypeError(
            f"interaction: features have dtype {first.dtype}, and kernels compute with "
            f"{DTYPE_NAMES}; convert them"
        )
    if first.dim() != 2 or not first.shape[1]:
        raise ValueError(
            f"interaction: feature 0 has shape {tuple(first.shape)}; pass (B, d), with d at least 1"
        )
    samples, width = first.shape
    count = 0
    for i, feature in enumerate(features):
        shape = feature.shape
        is_matrix = len(shape) == 2 and shape[0] == samples and shape[1] % width == 0
        is_stack = len(shape) == 3 and shape[0] == samples and shape[2] == width
        if not (is_matrix or is_stack):
            raise ValueError(
                f"interaction: feature {i} has shape {tuple(shape)} and feature 0 "
                f"{(samples, width)}; pass ({samples}, {width}) for one feature, or "
                f"({samples}, k * {width}) or ({samples}, k, {width}) for k features"
            )
        if feature.device != first.device:
            raise ValueError(
                f"interaction: feature {i} is on {feature.device}; move it to {first.device}, "
                "that of feature 0"
            )
        if feature.dtype != first.dtype:
            raise TypeError(
                f"interaction: feature {i} has dtype {feature.dtype}; convert it to {first.dtype}, "
                "that of feature 0"
            )
        count += shape[1] // width if is_matrix else shape[1]
    return _Shape(samples, count, width)


def _like(features: Sequence[Tensor]) -> Tensor:
    """The output, uninitialized."""
    shape = _checked(features)
    return features[0].new_empty(shape.samples, shape.columns)


def _interact(features: Sequence[Tensor]) -> Tensor:
    shape = _checked(features)
    output = features[0].new_empty(shape.samples, shape.columns)
    if shape.samples:
        places = [_places(features, shape.width)]
        _launch("interaction", shape, {"output": output}, places, width_step=VECTOR, copies=1)
    return output


def _gradients_like(grad: Tensor, features: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of the features, uninitialized."""
    return [feature.new_empty(feature.shape) for feature in features]


def _gradients(grad: Tensor, features: Sequence[Tensor]) -> list[Tensor]:
    shape = _checked(features)
    grads = _gradients_like(grad, features)
    if shape.samples:
        places = [_places(features, shape.width), _places(grads, shape.width, "grad_")]
        tensors = {"grad": grad.contiguous()}
        _launch("interaction_backward", shape, tensors, places, width_step=2 * VECTOR, copies=2)
    return grads


class _Places(NamedTuple):
    """Where features are, as arguments of a kernel."""

    columns: dict[str, int]
    """Addresses, by the names of the arguments."""
    tensors: Sequence[Tensor]
    """The tensors with that memory, kept until the launch has ended."""


def _places(features: Sequence[Tensor], width: int, prefix: str = "") -> _Places:
    """Where features are: the address of the first, and the distance of each from there.

    Distances, and those between the samples of a feature, are in elements.
    """
    features = [_dense_last(feature) for feature in features]
    size = features[0].element_size()
    starts = [feature.data_ptr() for feature in features]
    if any((start - starts[0]) % size for start in starts):  # memory that is not torch's
        features = [feature.clone(memory_format=torch.contiguous_format) for feature in features]
        starts = [feature.data_ptr() for feature in features]
    first = starts[0]
    offsets: list[int] = []
    strides: list[int] = []
    for feature, start in zip(features, starts):
        of_sample, *between, _ = feature.stride()
        of_feature = between[0] if between else width
        count = feature.shape[1] if between else feature.shape[1] // width
        before = (start - first) // size
        offsets += [before + k * of_feature for k in range(count)]
        strides += [of_sample] * count
    numbers = torch.tensor([offsets, strides], device=features[0].device)
    of_offsets, of_strides = row_addresses(numbers).tolist()
    columns = {"features": first, "offsets": of_offsets, "strides": of_strides}
    named = {prefix + name: address for name, address in columns.items()}
    return _Places(named, [*features, numbers])


def _dense_last(feature: Tensor) -> Tensor:
    """The feature with its numbers side by side."""
    return feature if feature.stride(-1) == 1 else feature.contiguous()


def _launch(
    name: str,
    shape: _Shape,
    tensors: Mapping[str, Tensor],
    places: Sequence[_Places],
    *,
    width_step: int,
    copies: int,
) -> None:
    """Run a kernel over runs of samples.

    Args:
        name: the kernel's name.
        shape: the shape of the call.
        tensors: the tensors, by the names of arguments; each run has its own part of them.
        places: the places of features and their gradients, the same for all runs.
        width_step: the kernel pads the features' width to a multiple of this.
        copies: copies of the features in the kernel's scratch memory.
    """
    each = max(_LEAST_SAMPLES, -(-shape.samples // _MOST_ROWS))
    firsts = np.arange(0, shape.samples, each)
    samples = np.minimum(shape.samples - firsts, each)
    count, width = (
        -(-size // step) * step for size, step in ((shape.features, 8), (shape.width, width_step))
    )
    size = count * (copies * width + count)
    like = next(iter(tensors.values()))
    scratch = like.new_empty(len(firsts), size, dtype=ARITHMETIC_OF[like.dtype])
    columns: dict[str, Any] = {
        "length": samples * (count * width),
        "scratch": row_addresses(scratch),
        "first": firsts,
        "samples": samples,
        "count": shape.features,
        "width": shape.width,
        "padded_count": count,
        "padded_width": width,
        **{key: row_addresses(tensor, firsts) for key, tensor in tensors.items()},
    }
    for place in places:
        columns |= place.columns
    launch_table(name, like.device, VARIANT_OF[like.dtype], columns, {})


def _setup_context(ctx: Any, inputs: tuple[list[Tensor]], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[0])


def _backward(ctx: Any, grad: Tensor) -> tuple[list[Tensor]]:
    features = list(ctx.saved_tensors)
    # Grad is enabled in backward(create_graph=True). torch calls no operator with a list of tensors
    # for many gradients at once.
    if torch.is_grad_enabled() or is_batched(grad):
        return (_differentiable_gradients(grad, features),)
    return (_interaction_backward(grad, features),)


def _differentiable_gradients(grad: Tensor, features: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of the features by torch's operations, which are differentiable."""
    samples, count, width = _checked(features)
    counts = [feature.shape[1:].numel() // width for feature in features]
    stacks = [feature.reshape(samples, k, width) for k, feature in zip(counts, features)]
    of_first, of_products = grad[:, :width], grad[:, width:]
    i, j = torch.tril_indices(count, count, -1, device=grad.device)
    factors = grad.new_zeros(samples, count, count)
    factors = factors.index_put(
        (torch.arange(samples, device=grad.device)[:, None], i, j), of_products
    )
    result = torch.bmm(factors + factors.mT, torch.cat(stacks, 1))
    result = torch.cat([result[:, :1] + of_first.unsqueeze(1), result[:, 1:]], 1)
    parts = torch.split_with_sizes(result, counts, 1)
    return [part.reshape(feature.shape) for part, feature in zip(parts, features)]


_interaction = register(
    "interaction(Tensor[] features) -> Tensor",
    kernel=_interact,
    fake=_like,
    setup_context=_setup_context,
    backward=_backward,
)
_interaction_backward = register_without_gradient(
    "interaction_backward(Tensor grad, Tensor[] features) -> Tensor[]",
    kernel=_gradients,
    fake=_gradients_like,
)
