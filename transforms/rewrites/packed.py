"""Convolutions and Linears that compute with a copy of their weight in oneDNN's own layout.

oneDNN computes fastest with weights in blocks whose form depends on the processor. torch reorders
a plain weight in every call, or computes a Linear with another library. A packed module keeps the
reordered copy. Its Parameters stay plain: they are saved, loaded, moved and written to as before,
and a change is seen before the next call.

Whatever needs the plain weight computes as torch does: gradients, forward derivatives,
``torch.func``, tracing and compilation, other devices and dtypes, and subclasses of Tensor.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from fusedoptim._torch_private import (
    has_bfloat16_products,
    is_plain_execution,
)
from transforms.rewrites.fused_activation import mark_activated, mark_free, may_apply
from transforms.rewrites.geometry import all_expanded, padding_of
from transforms.rewrites.packed_copy import Geometry, Pack, Packed
from transforms.rewrites.post_ops import NO_OP, PostOp, post_op
from transforms.rewrites.schemas import changed
from transforms.rewrites.scripting import ScriptedAsOwn

if TYPE_CHECKING:
    from typing import Self  # from Python 3.11 on

LEAST_PRODUCTS = 1 << 20
"""oneDNN is faster for Linears with at least this many multiplications
(docs/design/packed-weights.md)."""
_LEAST_CONVOLUTION = 1 << 23
"""The same for convolutions that torch computes without oneDNN."""
_MOST_VALUES = 20480
"""torch convolves one float32 image of at most this many values without oneDNN, if there are no
groups and one side of the kernel is at most _MOST_TAPS."""
_MOST_TAPS = 3
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class PackedModule(ScriptedAsOwn):
    """The base class of all packed modules."""

    _fusedoptim_pack: Pack

    def packed_parameters(self) -> tuple[Tensor, ...]:
        """The weights of which the module keeps packed copies."""
        weight = self._parameters.get("weight")
        return () if weight is None else (weight,)

    def train(self, mode: bool = True) -> Self:
        """Set the mode as torch's module does; warn that training uses no packed weights."""
        if mode and not self.training:
            warnings.warn(
                "the model was optimized for inference, and is set to training mode: call "
                "transforms.restore(model) before training",
                stacklevel=2,
            )
        return super().train(mode)


def is_packed(module: nn.Module) -> bool:
    """Whether a module has packed its weight, and keeps the copy now."""
    return isinstance(module, PackedModule) and not module._fusedoptim_pack.is_empty


def product_dtype(inputs: Sequence[Tensor], params: Sequence[Tensor]) -> torch.dtype | None:
    """The dtype of a product in a plain call that may use packed weights; None if it may not.

    Args:
        inputs: the tensors that the module is called with.
        params: its weights and biases; the first is a weight.
    """
    # Loops, because each product pays for this: a generator would cost more than a few tensors.
    for t in inputs:
        if not _is_strided(t):
            return None
    weight, records = params[0], torch.is_grad_enabled()
    is_cast = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if is_cast else weight.dtype
    for t in (*inputs, *params):
        if not t.is_cpu or (records and t.requires_grad) or not (is_cast or t.dtype == dtype):
            return None
    if is_cast:
        for t in (*inputs, weight):
            if t.dtype not in _DTYPES:
                return None
    return dtype if dtype in supported_dtypes() else None


def _is_strided(x: object) -> bool:
    """Whether a value is a Tensor with strides: neither sparse nor nested nor of a subclass."""
    return type(x) is Tensor and x.layout is torch.strided and not x.is_nested


class PackedProduct(PackedModule):
    """A convolution or Linear."""

    _fusedoptim_activation: nn.Module | None = None
    """:data:`transforms.rewrites.post_ops.ACTIVATION`; None if no activation follows."""
    _operator: ClassVar[str]
    """oneDNN's operator with a packed weight."""

    def _product(self, x: Tensor) -> Tensor | None:
        """The product with a packed weight; None if the plain one must be used."""
        own = self._parameters
        if "bias" not in own:  # since it became computed: pruned, or given a parametrization
            return None
        weight, bias = own.get("weight"), own["bias"]
        if weight is None or not is_plain_call():
            return None
        params = (weight,) if bias is None else (weight, bias)
        pack, geometry = self._fusedoptim_pack, self._geometry()
        packed = pack.of_last_call(x, params, geometry)
        if packed is None:
            if geometry is None or not _is_strided(x) or not self._pays(x, weight, bias):
                return None
            dtype = product_dtype((x,), params)
            packed = None if dtype is None else self._packed(x, weight, bias, geometry, dtype)
            if packed is None:
                return None
            pack.remember(x, params, packed)
        dtype = packed.signature.dtype
        return self._activated(_cast(x, dtype), packed, _dense(bias, dtype))

    def _pays(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether oneDNN takes this shape, and packing saves more time than its call costs."""
        raise NotImplementedError

    def _packed(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, dtype: torch.dtype
    ) -> Packed | None:
        """The packed copy for a product of ``dtype``; None if the plain weight must be used."""
        raise NotImplementedError

    def _geometry(self) -> Geometry | None:
        """The operator's arguments between the bias and the activation; None if it has others."""
        return ()

    def _compute(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, post: PostOp
    ) -> Tensor:
        """The product with a packed weight, activated by oneDNN."""
        operator = getattr(torch.ops.mkldnn, self._operator).default
        how = post.attribute, post.scalars, post.algorithm
        result: Tensor = operator(x, weight, bias, *geometry, *how)
        return result

    def _activated(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        """The product, activated or marked for the activation, if there is one."""
        activation, geometry = self._fusedoptim_activation, packed.signature.geometry
        is_alone = activation is None or not may_apply(self, activation)
        post = None if activation is None or is_alone else post_op(activation)
        if post is None:
            return self._compute(x, packed.weight, bias, geometry, NO_OP)
        if post.attribute is not None and self._is_right(x, packed, bias, post):
            result = self._compute(x, packed.weight, bias, geometry, post)
            mark_activated(result)
        else:
            result = self._compute(x, packed.weight, bias, geometry, NO_OP)
            mark_free(result)
        return result

    def _is_right(self, x: Tensor, packed: Packed, bias: Tensor | None, post: PostOp) -> bool:
        """Whether oneDNN's activation gives torch's infinities and NaNs; tried once."""
        key = post.attribute, post.algorithm, x.dtype, x.numel() > x.size(-1)
        if key not in packed.trials:
            packed.trials[key] = all(
                self._agree(_spoilt(x, values), packed, bias, post) for values in _SPOILERS
            )
        return packed.trials[key]

    def _agree(self, x: Tensor, packed: Packed, bias: Tensor | None, post: PostOp) -> bool:
        operands = x, packed.weight, bias, packed.signature.geometry
        expected = post.in_place(self._compute(*operands, NO_OP))
        actual = self._compute(*operands, post)
        special = ~expected.isfinite()
        return torch.equal(special, ~actual.isfinite()) and torch.allclose(
            expected[special], actual[special], equal_nan=True
        )


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)


def _dense(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The bias made contiguous, as oneDNN's operators ignore its strides."""
    return None if bias is None else _cast(bias, dtype).contiguous()


_SPOILERS = ((math.nan,), (math.inf, -math.inf))


def _spoilt(x: Tensor, values: Sequence[float]) -> Tensor:
    """A copy of ``x`` with some special values, far from each other."""
    result = x.clone()
    flat = result.as_strided((x.numel(),), (1,))  # of dense memory, in its order
    for i, value in enumerate(values):
        flat[i * x.numel() // len(values)] = value
    return result


def _packed_product(module: PackedProduct, x: Tensor) -> Tensor | None:
    """The result of a module's ``forward``; None if torch's class must compute it.

    For each module and call, torch.compile checks again what every method and ``super()`` in its
    ``forward`` resolved to. So ``forward`` uses neither, and calls torch's classes by name.
    """
    return None if torch.compiler.is_compiling() else module._product(x)


class PackedLinear(PackedProduct, nn.Linear):
    """:math:`y = x W^T + b` with a packed weight."""

    _operator = "_linear_pointwise"

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        """Compute as ``torch.nn.Linear`` does."""
        product = _packed_product(self, input)
        return nn.Linear.forward(self, input) if product is None else product

    def _pays(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        outputs, columns = weight.shape
        if x.dim() == 0 or x.size(-1) != columns or not x.is_contiguous():
            return False
        if not (bias is None or bias.shape == (outputs,)):  # torch expands others
            return False
        return x.numel() // max(columns, 1) * weight.numel() >= LEAST_PRODUCTS

    def _packed(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, dtype: torch.dtype
    ) -> Packed | None:
        return self._fusedoptim_pack.of((weight,), dtype, geometry, (), _reorder_linear)


def _reorder_linear(weights: Sequence[Tensor]) -> list[Tensor]:
    return [reorder_linear(weight) for weight in weights]


def reorder_linear(weight: Tensor) -> Tensor:
    """The weight of a Linear in oneDNN's layout, good for any number of rows."""
    # No number of rows is given: a copy packed for one row is slow for many.
    result: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return result


class _PackedConvolution(PackedProduct):
    """The base class of convolutions. Like oneDNN's layouts, a copy is for inputs of one shape."""

    _reorder: ClassVar[str]
    """oneDNN's operator that packs a weight."""

    def _pays(self: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        numel = x.numel()
        if x.dim() != weight.dim() or numel == 0:
            return False
        is_float32 = x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        is_small = numel <= _MOST_VALUES and x.size(0) == 1
        if is_float32 and is_small and self.groups == 1 and min(weight.shape[2:]) <= _MOST_TAPS:
            return numel // x.size(1) * weight.numel() >= _LEAST_CONVOLUTION
        return True

    def _packed(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, dtype: torch.dtype
    ) -> Packed | None:
        def reorder(weights: Sequence[Tensor]) -> list[Tensor] | None:
            (weight,), x_cast, dense = weights, x.to(dtype), _dense(bias, dtype)
            expected = self._plain(x_cast, weight, dense, geometry)  # first: its errors are torch's
            operator = getattr(torch.ops.mkldnn, self._reorder)
            try:
                images = self._as_images(x)
                packed: Tensor = operator(self._as_images(weight), *geometry, list(images.shape))
                product = self._compute(x_cast, packed, dense, geometry, NO_OP)
            except RuntimeError:  # torch computes some geometries that oneDNN does not
                return None
            # Later code may read strides: only a copy that keeps torch's is used.
            return [packed] if product.stride() == expected.stride() else None

        layout = (*x.shape, *x.stride())
        return self._fusedoptim_pack.of((weight,), dtype, geometry, layout, reorder)

    def _plain(self, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
        """The product with a plain weight."""
        raise NotImplementedError

    def _as_images(self, x: Tensor) -> Tensor:
        """An input or weight with the dimensions that oneDNN's operators take."""
        return x


class _PackedForward(_PackedConvolution):
    _operator = "_convolution_pointwise"
    _reorder = "_reorder_convolution_weight"

    _dimensions: ClassVar[int]

    def _geometry(self: Any) -> Geometry | None:
        found = all_expanded(self._dimensions, padding_of(self), self.stride, self.dilation)
        return None if found is None else (*found, self.groups)

    def _plain(self, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
        padding, stride, dilation, groups = geometry
        none = [0] * len(padding)
        return torch.convolution(x, weight, bias, stride, padding, dilation, False, none, groups)


class PackedConv2d(_PackedForward, nn.Conv2d):
    """A convolution of images with a packed weight."""

    _dimensions = 2

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        """Compute as ``torch.nn.Conv2d`` does."""
        product = _packed_product(self, input)
        return nn.Conv2d.forward(self, input) if product is None else product


class PackedConv1d(_PackedForward, nn.Conv1d):
    """A convolution of sequences with a packed weight, as one of images of one row.

    oneDNN returns the result with channels last, and torch does not, so the result is copied.
    """

    _dimensions = 1

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        """Compute as ``torch.nn.Conv1d`` does."""
        product = _packed_product(self, input)
        return nn.Conv1d.forward(self, input) if product is None else product

    def _pays(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        if x.dim() != weight.dim():
            return False
        return super()._pays(x.unsqueeze(2), weight.unsqueeze(2), bias)

    def _geometry(self) -> Geometry | None:
        found = all_expanded(1, padding_of(self), self.stride, self.dilation)
        if found is None:
            return None
        padding, stride, dilation = found
        return (0, *padding), (1, *stride), (1, *dilation), self.groups

    def _as_images(self, x: Tensor) -> Tensor:
        return x.unsqueeze(2)

    def _compute(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, post: PostOp
    ) -> Tensor:
        result = super()._compute(x.unsqueeze(2), weight, bias, geometry, post)
        return result.squeeze(2).contiguous()

    def _plain(self, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
        return super()._plain(x.unsqueeze(2), weight.unsqueeze(2), bias, geometry).squeeze(2)


class PackedConv3d(_PackedForward, nn.Conv3d):
    """A convolution of volumes with a packed weight."""

    _dimensions = 3

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        """Compute as ``torch.nn.Conv3d`` does."""
        product = _packed_product(self, input)
        return nn.Conv3d.forward(self, input) if product is None else product


class PackedConvTranspose2d(_PackedConvolution, nn.ConvTranspose2d):
    """A transposed convolution of images with a packed weight."""

    _operator = "_convolution_transpose_pointwise"
    _reorder = "_reorder_convolution_transpose_weight"

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:  # noqa: A002  # torch's name
        """Compute as ``torch.nn.ConvTranspose2d`` does."""
        product = _packed_product(self, input) if output_size is None else None
        return nn.ConvTranspose2d.forward(self, input, output_size) if product is None else product

    def _geometry(self) -> Geometry | None:
        found = all_expanded(2, self.padding, self.output_padding, self.stride, self.dilation)
        return None if found is None else (*found, self.groups)

    def _plain(self, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
        padding, output_padding, stride, dilation, groups = geometry
        return nn.functional.conv_transpose2d(
            x, weight, bias, stride, padding, output_padding, groups, dilation
        )


CLASSES: dict[type[nn.Module], type[PackedModule]] = {
    nn.Linear: PackedLinear,
    nn.Conv1d: PackedConv1d,
    nn.Conv2d: PackedConv2d,
    nn.Conv3d: PackedConv3d,
    nn.ConvTranspose2d: PackedConvTranspose2d,
}
"""Our class for each of torch's."""


def is_plain_call() -> bool:
    """Whether torch simply runs operators now, including oneDNN's."""
    return bool(torch.backends.mkldnn.enabled) and is_plain_execution()


@functools.cache
def supported_dtypes() -> tuple[torch.dtype, ...]:
    """The dtypes that oneDNN computes in on this processor."""
    dtypes = [torch.float32]
    if has_bfloat16_products:
        dtypes.append(torch.bfloat16)
    if torch.ops.mkldnn._is_mkldnn_fp16_supported():
        dtypes.append(torch.float16)
    return tuple(dtypes)


def missing_operators() -> list[str]:
    """The operators that this torch lacks, or has with another signature."""
    return changed("mkldnn", _SCHEMAS)


_SCHEMAS = {
    "_linear_pointwise": (
        "mkldnn::_linear_pointwise(Tensor X, Tensor W, Tensor? B, str attr, Scalar?[] scalars, "
        "str? algorithm) -> Tensor Y"
    ),
    "_reorder_linear_weight": (
        "mkldnn::_reorder_linear_weight(Tensor self, int? batch_size=None) -> Tensor Y"
    ),
    "_convolution_pointwise": (
        "mkldnn::_convolution_pointwise(Tensor X, Tensor W, Tensor? B, int[] padding, "
        "int[] stride, int[] dilation, int groups, str attr, Scalar?[] scalars, str? algorithm) "
        "-> Tensor Y"
    ),
    "_reorder_convolution_weight": (
        "mkldnn::_reorder_convolution_weight(Tensor self, int[2] padding=0, int[2] stride=1, "
        "int[2] dilation=1, int groups=1, int[]? input_size=None) -> Tensor Y"
    ),
    "_convolution_transpose_pointwise": (
        "mkldnn::_convolution_transpose_pointwise(Tensor X, Tensor W, Tensor? B, int[] padding, "
        "int[] output_padding, int[] stride, int[] dilation, int groups, str attr, "
        "Scalar?[] scalars, str? algorithm) -> Tensor Y"
    ),
    "_reorder_convolution_transpose_weight": (
        "mkldnn::_reorder_convolution_transpose_weight(Tensor self, int[2] padding=0, "
        "int[2] output_padding=0, int[2] stride=1, int[2] dilation=1, int groups=1, "
        "int[]? input_size=None) -> Tensor Y"
    ),
}
"""The schemas as in torch 2.13. An operator that a newer torch changes is not called."""
