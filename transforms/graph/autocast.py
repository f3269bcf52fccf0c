"""Makes a graph independent of autocast, by the conversions that autocast makes.

TorchScript specializes its code for autocast, and then converts by rules of its own.
"""

from __future__ import annotations

import functools

import torch
from torch.fx import Graph, Node

from fusedoptim import _torch_private as private
from transforms.graph import operators
from transforms.graph.operators import ATTENTION, CONVOLUTIONS, TRANSPOSED, is_tensor, value
from transforms.graph.products import cast, product

_CONVERTED = frozenset(
    (
        *("addmm", "baddbmm", "bmm", "linear", "matmul", "mm", ATTENTION),
        *(*CONVOLUTIONS, *TRANSPOSED),
        *("cat", "stack"),
    )
)
"""Functions whose tensors autocast converts to the dtype of their result."""


def cast_explicitly(graph: Graph, constants: set[Node]) -> bool:
    """Convert what autocast converts; return False if the graph needs autocast nevertheless.

    Args:
        graph: the graph, captured under autocast for the CPU.
        constants: its constants. Converted weights and biases of products are added, because only
            these are compared in each call.
    """
    for node in list(graph.nodes):
        if not node.op.startswith("call") or operators.is_own(node):
            continue
        called = operators.name(node)
        if called is not None and called.removesuffix("_") not in _changed():
            if _calls_changed(node, called):
                return False
            continue
        if called not in _CONVERTED or not is_tensor(node):
            return False
        tensors = [each for each in node.all_input_nodes if is_tensor(each)]
        if any(value(each).dtype == torch.float64 for each in tensors):  # autocast leaves these
            return False
        packed = product(node, constants)
        kept = () if packed is None else (packed.weight, packed.bias)
        for each in tensors:
            if value(each).is_floating_point() and value(each).dtype != value(node).dtype:
                result = _cast(each, node, each in kept)
                if each in kept:
                    constants.add(result)
    return True


def _cast(tensor: Node, user: Node, is_kept: bool) -> Node:
    """Convert a tensor to the dtype of its user's result, for this user only."""
    dtype = value(user).dtype
    with user.graph.inserting_before(user):
        if is_kept:
            result = user.graph.call_function(cast, (tensor, dtype))
        else:
            result = user.graph.call_method("to", (tensor, dtype))
    result.meta["example_value"] = value(tensor).to(dtype)
    user.replace_input_with(tensor, result)
    return result


def _calls_changed(node: Node, called: str) -> bool:
    """Whether a function consists of others for which autocast has rules."""
    match called:
        case "einsum":  # of products of matrices
            return True
        case "pad":  # of reflection_pad1d and others like it
            mode = operators.arguments(node).get("mode", "constant")
            return mode not in ("constant", "circular")
        case "interpolate":  # of adaptive_avg_pool3d
            return bool(operators.arguments(node).get("mode") == "area")
    return False


@functools.cache
def _changed() -> frozenset[str]:
    """The functions of torch for which autocast for the CPU does something."""
    return frozenset(
        each.removeprefix("aten::").partition(".")[0] for each in private.autocast_operators()
    )
