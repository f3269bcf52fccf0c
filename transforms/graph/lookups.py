"""Lookups by torch's simplest functions where a model calls more general ones, as a DLRM does.

An ``embedding_bag`` of bags that hold one index each becomes a lookup of rows, and indexing of
matrices by two constant tensors becomes an ``index_select``. Both give the same values; only a
NaN's bits may differ.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional

from transforms.graph import operators
from transforms.graph.operators import arguments, is_tensor, value

_NOT_GIVEN = ("offsets", "max_norm", "per_sample_weights", "padding_idx")
"""Arguments of ``embedding_bag`` without which a bag of one index is a row of the table."""
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MOST_LOOKED_UP = 1 << 15
"""Elements beyond which ``embedding_bag``, which writes its result once, is faster."""
_CHANGE_SHAPES = (
    *("as_strided_", "resize_", "set_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_"),
    "unsqueeze_",
)
"""Methods after which the shape of a value during capture is not that of its earlier uses."""


@operators.own
def bags_of_one(weight: Tensor, indices: Tensor) -> Tensor:
    """The sum, or the mean, of each bag if each has one index.

    Args:
        weight: the table, (rows, width).
        indices: the index of each bag, (B,).
    """
    if indices.numel() * weight.shape[1] <= _MOST_LOOKED_UP:
        try:
            return torch.embedding(weight, indices).add_(0)  # sums begin at 0, so none is -0.0
        except IndexError:  # the general function raises what the model's own call raises
            pass
    return functional.embedding_bag(indices.unsqueeze(1), weight, mode="sum")


@operators.own
def places_of(rows: Tensor, columns: Tensor, height: int, width: int) -> Tensor:
    """The places of a matrix's elements in the flattened matrix; its size for those outside."""
    inside = (-height <= rows) & (rows < height) & (-width <= columns) & (columns < width)
    return torch.where(inside, rows % height * width + columns % width, height * width)


@operators.own
def elements_at(matrices: Tensor, rows: Tensor, columns: Tensor, places: Tensor) -> Tensor:
    """Elements of each matrix.

    Args:
        matrices: (B, height, width).
        rows: the row of each element.
        columns: its column.
        places: :func:`places_of` them.
    """
    if matrices.stride(1) == matrices.shape[2] * matrices.stride(2):  # flattening copies nothing
        try:
            return matrices.flatten(1).index_select(1, places)
        except (IndexError, RuntimeError):  # as above
            pass
    return matrices[:, rows, columns]


def simplify_lookups(graph: Graph, constants: set[Node]) -> int:
    """Replace lookups by simpler ones; return how many were replaced.

    Args:
        graph: the graph, rewritten in place.
        constants: the nodes that depend on parameters, buffers and literals only.
    """
    if any(operators.name(node) in _CHANGE_SHAPES for node in graph.nodes):
        return 0
    count = 0
    for node in list(graph.nodes):
        if node in constants or not node.users or not is_tensor(node):
            continue
        if value(node).device.type != "cpu":
            continue
        if operators.name(node) == "embedding_bag":
            count += _simplify_bag(graph, node)
        elif operators.name(node) == "getitem":
            count += _simplify_index(graph, node, constants)
    return count


def _simplify_bag(graph: Graph, node: Node) -> bool:
    given = arguments(node)
    weight, indices = given["weight"], given["input"]
    if given["mode"] not in ("sum", "mean"):
        return False
    if any(given[name] is not None for name in _NOT_GIVEN):
        return False
    if not (is_tensor(weight) and is_tensor(indices)) or value(weight).dtype not in _DTYPES:
        return False
    of_table, of_indices = value(weight).shape, value(indices).shape
    if not all(isinstance(n, int) and n > 0 for n in of_table):
        return False
    if len(of_indices) != 2 or not isinstance(of_indices[1], int) or of_indices[1] != 1:
        return False
    with graph.inserting_before(node):
        flat = _before_unsqueeze(indices) or graph.call_method("flatten", (indices,))
        result = graph.call_function(bags_of_one, (weight, flat))
    operators.replace(node, result)
    return True


def _before_unsqueeze(indices: Node) -> Node | None:
    """The vector of which ``unsqueeze`` makes these indices, (B, 1)."""
    if indices.op != "call_method" or indices.target != "unsqueeze":
        return None
    vector = indices.args[0]
    assert isinstance(vector, Node)
    return vector


def _simplify_index(graph: Graph, node: Node, constants: set[Node]) -> bool:
    matrices, index = node.args
    if not isinstance(matrices, Node) or not isinstance(index, tuple) or not is_tensor(matrices):
        return False
    if len(index) != 3 or index[0] not in (slice(None), ...) or value(matrices).dim() != 3:
        return False
    rows, columns = index[1:]
    if not all(isinstance(each, Node) and each in constants for each in (rows, columns)):
        return False
    if any(value(each).dtype != torch.int64 or value(each).dim() != 1 for each in (rows, columns)):
        return False
    sizes: Any = value(matrices).shape[1:]
    if not all(isinstance(n, int) for n in sizes) or math.prod(sizes) == 0:
        return False
    if value(rows).shape != value(columns).shape:
        return False
    with graph.inserting_before(node):
        places = graph.call_function(places_of, (rows, columns, *sizes))
        result = graph.call_function(elements_at, (matrices, rows, columns, places))
    places.meta["example_value"] = value(rows)
    constants.add(places)
    operators.replace(node, result)
    return True
