"""Writes results over values that nothing else needs, to save memory and page faults."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
from torch.fx import Graph, Node

from transforms.graph import operators
from transforms.graph.operators import arguments, is_fresh, is_tensor, value
from transforms.graph.products import same_shape
from transforms.graph.simplify import WAS_IN_PLACE

_NN = torch._C._nn
_UNARY: dict[str, Callable[..., Any]] = {
    "relu": torch.relu_,
    "sigmoid": torch.sigmoid_,
    "tanh": torch.tanh_,
    "relu6": _NN.relu6_,
    "hardtanh": _NN.hardtanh_,
    "hardsigmoid": _NN.hardsigmoid_,
    "hardswish": _NN.hardswish_,
    "silu": _NN.silu_,
    "leaky_relu": _NN.leaky_relu_,
}
_OPTIONS = {"hardtanh": ("min_val", "max_val"), "leaky_relu": ("negative_slope",)}
_BINARY = {"add": "add_", "mul": "mul_", "sub": "sub_", "div": "div_"}
_COMMUTATIVE = ("add", "mul")

Steady = Callable[[Node, Node], bool]
"""Whether the result of a node has the strides of one of its inputs."""


def overwrite(
    graph: Graph, constants: set[Node], steady: Steady, only: Container[str] | None = None
) -> int:
    """Let functions write over an input that only they use; return how many do.

    Args:
        graph: the graph.
        constants: its constants, over which nothing writes.
        steady: whether the result has the strides of the input.
        only: the names of the functions that may do so; None for all.
    """
    count = 0
    for node in reversed(graph.nodes):  # a result written over an input is not fresh
        called = operators.name(node)
        if only is not None and called not in only:
            continue
        if called in _UNARY:
            count += _overwrite_by_unary(node, called, constants, steady)
        elif called in _BINARY:
            count += _overwrite_by_binary(node, called, constants, steady)
    return count


def _overwrite_by_unary(node: Node, called: str, constants: set[Node], steady: Steady) -> bool:
    given = arguments(node)
    target = given.get("input", node.args[0] if node.args else None)
    if not _is_free(node, target, constants, steady):
        return False
    options = [given[key] for key in _OPTIONS.get(called, ()) if key in given]
    node.op, node.target = "call_function", _UNARY[called]
    node.args, node.kwargs = (target, *options), {}
    return True


def _overwrite_by_binary(node: Node, called: str, constants: set[Node], steady: Steady) -> bool:
    if len(node.args) != 2 or node.kwargs:
        return False
    pairs = [node.args, node.args[::-1]] if called in _COMMUTATIVE else [node.args]
    for target, other in pairs:
        if _is_free(node, target, constants, steady) and _fits(other, target):
            node.op, node.target = "call_method", _BINARY[called]
            node.args = (target, other)
            return True
    return False


def _fits(other: Any, target: Any) -> bool:
    """Whether the other operand changes neither dtype nor shape of the result."""
    if isinstance(other, Node):
        return is_tensor(other) and value(other).dtype == value(target).dtype
    return isinstance(other, int | float)


def _is_free(node: Node, target: Any, constants: set[Node], steady: Steady) -> bool:
    """Whether ``node`` may write over ``target``."""
    if not isinstance(target, Node) or not (is_tensor(node) and is_tensor(target)):
        return False
    return (
        is_fresh(target)
        and target not in constants
        and len(target.users) == 1
        and [*node.args, *node.kwargs.values()].count(target) == 1
        and value(target).is_floating_point()
        and value(target).dtype == value(node).dtype
        and same_shape(target, node)
        and (WAS_IN_PLACE in node.meta or steady(node, target))
    )
