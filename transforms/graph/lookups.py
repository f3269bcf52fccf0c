"""Lookups by torch's simplest functions where a model calls more general ones, as a DLRM does.

An ``embedding_bag`` of bags that hold one index each becomes a lookup of rows, and indexing of
matrices by two constant tensors becomes an ``index_select``. Both give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional

from transforms.graph import operators
from transforms.graph.operators import arguments, is_tensor, value

_WHOLE = slice(None)
_NONE = ("offsets", "max_norm", "per_sample_weights", "padding_idx")


@operators.own
def bags_of_one(weight: Tensor, indices: Tensor) -> Tensor:
    """The sum, or the mean, of each bag if each has one index.

    Args:
        weight: the table, (rows, width).
        indices: the index of each bag, (B,).
    """
    try:
        rows = torch.embedding(weight, indices)
    except IndexError:  # raise what the model's own call raises
        return functional.embedding_bag(indices.unsqueeze(1), weight, mode="sum")
    return rows.add_(0)  # sums begin at 0, so that none is -0.0


@operators.own
def places(rows: Tensor, columns: Tensor, height: int, width: int) -> Tensor:
    """Where elements of a matrix are in its flattened memory."""
    every = torch.arange(height * width).view(1, height, width)
    return every[:, rows, columns].flatten()  # raises torch's error for a place outside


@operators.own
def elements(matrices: Tensor, where: Tensor) -> Tensor:
    """Elements of each matrix, (B, height, width), at its :func:`places`."""
    return matrices.flatten(1).index_select(1, where)


def simplify_lookups(graph: Graph, constants: set[Node]) -> int:
    """Replace lookups by simpler ones; return how many were replaced.

    Args:
        graph: the graph, rewritten in place.
        constants: the nodes that depend on parameters, buffers and literals only.
    """
    count = 0
    for node in list(graph.nodes):
        if node in constants or not is_tensor(node) or value(node).device.type != "cpu":
            continue
        if operators.name(node) == "embedding_bag":
            count += _simplify_bag(graph, node)
        elif operators.name(node) == "getitem":
            count += _simplify_index(graph, node, constants)
    return count


def _simplify_bag(graph: Graph, node: Node) -> bool:
    given = arguments(node)
    weight, indices = given["weight"], given["input"]
    if given["mode"] not in ("sum", "mean") or any(given[name] is not None for name in _NONE):
        return False
    if not (is_tensor(weight) and is_tensor(indices)):
        return False
    shape = value(indices).shape
    if len(shape) != 2 or not isinstance(shape[1], int) or shape[1] != 1:
        return False
    if not value(weight).is_floating_point() or value(indices).is_floating_point():
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
    if len(index) != 3 or index[0] not in (_WHOLE, ...) or value(matrices).dim() != 3:
        return False
    rows, columns = index[1:]
    if not all(isinstance(each, Node) and each in constants for each in (rows, columns)):
        return False
    if any(value(each).dtype != torch.int64 or value(each).dim() != 1 for each in (rows, columns)):
        return False
    sizes: Any = value(matrices).shape[1:]
    if value(rows).shape != value(columns).shape or not all(isinstance(n, int) for n in sizes):
        return False
    with graph.inserting_before(node):
        where = graph.call_function(places, (rows, columns, *sizes))
        result = graph.call_function(elements, (matrices, where))
    where.meta["example_value"] = value(rows)
    constants.add(where)
    operators.replace(node, result)
    return True
