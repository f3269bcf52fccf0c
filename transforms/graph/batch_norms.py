"""Folds a BatchNorm of the graph into the product before it, as functions of the parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from transforms.graph import operators
from transforms.graph.operators import CONVOLUTIONS, TRANSPOSED, arguments, value
from transforms.rewrites.finite import is_finite
from transforms.rewrites.fold_arithmetic import PlainPair, folded

_DTYPES = (torch.float32, torch.float64)


class NotFinite(Exception):
    """A weight or bias that folding needs finite is infinite or NaN."""


@operators.own
def folded_weight(*pair: Any) -> Tensor:
    """The folded weight of a product and the BatchNorm after it, from a PlainPair's fields."""
    return finite_in(folded(PlainPair(*pair))[0], pair[0].dtype)


@operators.own
def folded_bias(*pair: Any) -> Tensor:
    """The folded bias of a product and the BatchNorm after it, from a PlainPair's fields."""
    return finite_in(folded(PlainPair(*pair))[1], pair[0].dtype)


def finite_in(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The values in a dtype; raise :class:`NotFinite` if one is infinite or NaN there."""
    result = values.to(dtype)
    if not is_finite(result):
        raise NotFinite
    return result


def fold_batch_norms(graph: Graph, constants: set[Node]) -> int:
    """Fold BatchNorms whose product feeds nothing else; return how many were folded.

    Args:
        graph: the graph, rewritten in place.
        constants: the nodes that depend on parameters, buffers and literals only.
    """
    count = 0
    for norm in list(graph.nodes):
        if operators.name(norm) == "batch_norm" and not operators.is_writing(norm):
            count += _fold(graph, norm, constants)
    return count


def _fold(graph: Graph, norm: Node, constants: set[Node]) -> bool:
    of_norm = arguments(norm)
    product = of_norm["input"]
    if not isinstance(product, Node) or len(product.users) != 1:
        return False
    of_product = arguments(product)
    pair: list[Any] = [of_product.get("weight"), of_product.get("bias")]
    pair += [of_norm[key] for key in ("running_mean", "running_var", "weight", "bias")]
    if not _takes(product, norm) or not all(p is None or p in constants for p in pair):
        return False
    if any(pair[i] is None for i in (0, 2, 3)):
        return False
    if not all(p is None or p < product for p in pair):  # a literal that is computed only later
        return False
    if not isinstance(of_norm["eps"], float):  # with dynamic=True it is a value of the graph
        return False
    dtypes = {value(p).dtype for p in pair if p is not None}
    if len(dtypes) != 1 or not dtypes <= set(_DTYPES):
        return False
    if value(norm).dtype != value(product).dtype:
        return False
    is_transposed = operators.name(product) in TRANSPOSED
    pair += [of_norm["eps"], of_product.get("groups", 1) if is_transposed else None]
    with graph.inserting_before(product):
        weight = graph.call_function(folded_weight, tuple(pair))
        bias = graph.call_function(folded_bias, tuple(pair))
    weight.meta["example_value"], bias.meta["example_value"] = value(pair[0]), value(pair[2])
    constants |= {weight, bias}
    operators.set_arguments(product, {**of_product, "weight": weight, "bias": bias})
    norm.replace_all_uses_with(product)
    graph.erase_node(norm)
    return True


def _takes(product: Node, norm: Node) -> bool:
    """Whether the channels that the BatchNorm scales are rows of the product's weight."""
    called, dimensions = operators.name(product), value(norm).dim()
    if called == "linear":
        return bool(dimensions == 2)
    if called not in (*CONVOLUTIONS, *TRANSPOSED):
        return False
    return bool(dimensions == int(called.removesuffix("d")[-1]) + 2)
