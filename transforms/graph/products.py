"""Convolutions and Linears of a graph, as oneDNN's operators with packed weights.

oneDNN applies an activation, or adds another tensor, to a product that is still in the cache. It
gets only activations for which it treats NaN and infinity as torch does. Its ReLU, ReLU6 and
Hardsigmoid return a number for NaN, its sigmoid does so after a transposed convolution, and its
GELU by erf returns one for an infinite result of a convolution. Where a product is shown to be
finite, oneDNN also computes ReLU, ReLU6 and Hardtanh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from transforms.graph import operators
from transforms.graph.bounds import CLAMPS
from transforms.graph.operators import CONVOLUTIONS, arguments, is_writing, value
from transforms.rewrites.geometry import expanded, may_see_only_padding, window_of
from transforms.rewrites.packed import LEAST_PRODUCTS, reorder_linear, supported_dtypes
from transforms.rewrites.post_ops import NO_OP, OF_FUNCTIONS, RELU, PostOp, clamp, gelu, leaky_relu
from transforms.rewrites.schemas import changed
from transforms.rewrites.watched_parameter import detached

_OPS = torch.ops.mkldnn
_DIMENSIONS = {"conv2d": 2, "conv3d": 3, "conv_transpose2d": 2}


@operators.own
def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in this dtype; contiguous if the tensor is a strided vector."""
    return detached(tensor).to(dtype, copy=True)


@operators.own
def pack_linear(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight of a Linear in oneDNN's layout, good for any number of rows."""
    return reorder_linear(detached(weight).to(dtype))


@operators.own
def pack_columns(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The second matrix of ``torch.addmm`` in oneDNN's layout."""
    return pack_linear(weight.t(), dtype)


@operators.own
def pack_convolution(weight: Tensor, dtype: torch.dtype, *geometry: Any) -> Tensor:
    """The weight of a convolution, packed for its geometry.

    The geometry is: padding, stride, dilation, groups and an input's shape.
    """
    result: Tensor = _OPS._reorder_convolution_weight(detached(weight).to(dtype), *geometry)
    return result


@operators.own
def pack_transposed(weight: Tensor, dtype: torch.dtype, *geometry: Any) -> Tensor:
    """The weight of a transposed convolution; the output's padding follows the input's."""
    weight = detached(weight).to(dtype)
    result: Tensor = _OPS._reorder_convolution_transpose_weight(weight, *geometry)
    return result


class Product(NamedTuple):
    """A product of the graph that oneDNN may compute with a packed weight."""

    node: Node
    x: Node
    weight: Node
    bias: Node | None
    geometry: tuple[Any, ...]
    """The numbers between the bias and the activation of a convolution; empty for a Linear."""

    @property
    def is_convolution(self) -> bool:
        """Whether the packed weight depends on the shape of the input."""
        return bool(self.geometry)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which it is computed: autocast's, or the inputs'."""
        result: torch.dtype = value(self.node).dtype
        return result

    def packing(self, weight: Any, shape: Sequence[int]) -> tuple[Callable[..., Tensor], Any]:
        """The function that packs a weight, and its arguments, for an input of this shape."""
        if not self.is_convolution:
            is_linear = operators.name(self.node) == "linear"
            return (pack_linear if is_linear else pack_columns), (weight, self.dtype)
        is_transposed = operators.name(self.node) == "conv_transpose2d"
        function = pack_transposed if is_transposed else pack_convolution
        return function, (weight, self.dtype, *self.geometry, list(shape))

    def call(self, x: Any, weight: Any, bias: Any, post: PostOp) -> tuple[Any, Any]:
        """The operator that takes a packed weight, and its arguments."""
        args = (x, weight, bias, *self.geometry, post.attribute, post.scalars, post.algorithm)
        return self._operator.default, args

    def call_and_add(
        self, x: Any, other: Any, weight: Any, bias: Any, post: PostOp
    ) -> tuple[Any, Any]:
        """The operator that adds ``other`` to a convolution, and its arguments.

        ``post`` is applied to the sum: ReLU or nothing.
        """
        unary = None if post is NO_OP else post.attribute
        args = (x, other, weight, bias, *self.geometry, "add", None, unary, [], None)
        return _OPS._convolution_pointwise.binary, args

    @property
    def takes_addition(self) -> bool:
        """Whether oneDNN adds to it; oneDNN could for Linears too, but slowly.

        For groups the operator adds by torch's own functions, and in bfloat16 its ReLU raises.
        """
        return operators.name(self.node) in ("conv2d", "conv3d") and self.geometry[-1] == 1

    @property
    def _operator(self) -> Any:
        if not self.is_convolution:
            return _OPS._linear_pointwise
        if operators.name(self.node) == "conv_transpose2d":
            return _OPS._convolution_transpose_pointwise
        return _OPS._convolution_pointwise


def products(graph: Graph, constants: set[Node]) -> list[Product]:
    """The products of a graph that have a constant weight and gain from packing it."""
    found = (product(node, constants) for node in graph.nodes)
    return [each for each in found if each is not None]


def product(node: Node, constants: set[Node]) -> Product | None:
    """The product that a node computes, if its weight is constant and worth packing."""
    called = operators.name(node)
    if called not in ("linear", "addmm", *_DIMENSIONS) or is_writing(node):
        return None
    a = arguments(node)
    if called == "addmm":
        if not a.keys() <= {"input", "mat1", "mat2"}:
            return None
        x, weight, bias = a.get("mat1"), a.get("mat2"), a.get("input")
    else:
        x, weight, bias = a.get("input"), a.get("weight"), a.get("bias")
    if not all(operators.is_tensor(each) for each in (node, x, weight)):
        return None
    assert isinstance(x, Node)
    assert isinstance(weight, Node)
    if weight not in constants or not (bias is None or bias in constants):
        return None
    of = [value(each) for each in (x, weight, bias) if each is not None]
    if any(t.device.type != "cpu" or not t.is_floating_point() for t in of):
        return None
    if value(node).dtype not in supported_dtypes():
        return None
    if any(t.dtype != of[0].dtype for t in of) and not _is_cast(node):  # torch raises
        return None
    if called in ("linear", "addmm"):
        is_fit = _pays(called, x, weight, bias)
        return Product(node, x, weight, bias, ()) if is_fit else None
    geometry = _geometry(called, a, x, weight)
    return None if geometry is None else Product(node, x, weight, bias, geometry)


def _is_cast(node: Node) -> bool:
    """Whether a function gets its inputs in the dtype of autocast."""
    ended: set[Any] = set()
    each = node.prev
    while each.op != "root":
        called = getattr(each.target, "__name__", "") if each.op == "call_function" else ""
        if called == "_exit_autocast":
            ended.add(each.args[0])
        elif called == "_enter_autocast" and each not in ended and each.args[0] == "cpu":
            return each.args[2] is not False
        each = each.prev
    return torch.is_autocast_enabled("cpu")


def _pays(called: str, x: Node, weight: Node, bias: Node | None) -> bool:
    """Whether a matrix product is that of a Linear, and large enough for oneDNN."""
    if value(weight).dim() != 2 or (bias is not None and value(bias).dim() != 1):
        return False
    first, second = (int(size) for size in value(weight).shape)
    outputs, columns = (first, second) if called == "linear" else (second, first)
    if bias is not None and int(value(bias).shape[0]) != outputs:  # torch expands it
        return False
    rows = _likely(value(x).numel()) // max(columns, 1)
    return rows * int(value(weight).numel()) >= LEAST_PRODUCTS


def _likely(size: Any) -> int:
    """A size; if it is symbolic, its value when the graph was captured."""
    return size if isinstance(size, int) else int(size.node.hint or 0)


def _geometry(called: str, a: Mapping[str, Any], x: Node, weight: Node) -> tuple[Any, ...] | None:
    count = _DIMENSIONS[called]
    if value(x).dim() != count + 2 or value(weight).dim() != count + 2:
        return None
    window, output_padding = window_of(a, count), expanded(a.get("output_padding", 0), count)
    groups = a.get("groups", 1)
    if window is None or output_padding is None or not isinstance(groups, int):
        return None
    middle = (output_padding,) if called == "conv_transpose2d" else ()
    return (window.padding, *middle, window.stride, window.dilation, groups)


def may_crash(node: Node) -> bool:
    """Whether oneDNN may crash in a convolution, packed or in oneDNN Graph."""
    called, a = operators.name(node), arguments(node)
    if called not in CONVOLUTIONS or not operators.is_tensor(a.get("weight")):
        return False
    size, window = value(a["weight"]).shape[-1], window_of(a, 1)
    if not isinstance(size, int) or window is None:
        return False
    padding, stride, dilation = (numbers[-1] for numbers in window)
    return may_see_only_padding(size, stride, padding, dilation)


def activation(node: Node, of: Product, is_finite: bool) -> PostOp | None:
    """The activation of a node, if oneDNN computes it as torch does.

    Args:
        node: the node that uses the product.
        of: the product.
        is_finite: whether no value is NaN or infinite.
    """
    called, given = operators.name(node), arguments(node)
    post = OF_FUNCTIONS.get(called or "")
    if called == "gelu":
        kind = given.get("approximate", "none")
        post = None if kind == "none" and of.is_convolution else gelu(kind)
    elif called == "leaky_relu":
        slope = given.get("negative_slope", 0.01)
        post = leaky_relu(slope) if isinstance(slope, float) else None
    elif called == "sigmoid" and operators.name(of.node) == "conv_transpose2d":
        post = post if is_finite else None
    elif called in CLAMPS and is_finite:
        post = clamp_of(node)
    return None if post is None or post.attribute is None else post


def clamp_of(node: Node) -> PostOp | None:
    """How oneDNN computes ReLU, ReLU6 or Hardtanh where no value is NaN.

    None if a limit is a value of the graph.
    """
    given = arguments(node)
    limits = given.get("min_val", 0.0), given.get("max_val", 6.0)
    if any(isinstance(limit, Node) for limit in limits):
        return None
    post = RELU if operators.name(node) == "relu" else clamp(*limits)
    return post._replace(attribute=post.of_numbers)


def same_shape(a: Node, b: Node) -> bool:
    """Whether two tensors have the same shape for every input of the graph."""
    return _are_equal(tuple(value(a).shape), tuple(value(b).shape))


def same_strides(a: Node, b: Node) -> bool:
    """Whether two tensors had the same strides in the capture, for every input."""
    return _are_equal(value(a).stride(), value(b).stride())


def _are_equal(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    # Not at the top: the import is slow, and torch.compile has already done it here.
    from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

    return len(a) == len(b) and bool(statically_known_true(sym_eq(a, b)))


def absent_operators() -> list[str]:
    """The operators, besides those of :mod:`packed`, that are absent or different in this torch."""
    return changed("mkldnn", {"_convolution_pointwise.binary": _BINARY})


_BINARY = (
    "mkldnn::_convolution_pointwise.binary(Tensor X, Tensor other, Tensor W, Tensor? B, "
    "int[] padding, int[] stride, int[] dilation, int groups, str binary_attr, Scalar? alpha, "
    "str? unary_attr, Scalar?[] unary_scalars, str? unary_algorithm) -> Tensor Y"
)
"""The schema as in torch 2.13."""
