"""Gives convolutions all of their padding as numbers, also what a function adds before them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from transforms.graph import operators
from transforms.graph.batch_norms import finite_in, folded_weight
from transforms.graph.operators import CONVOLUTIONS, arguments, is_tensor, value
from transforms.rewrites.geometry import may_see_only_padding, named_padding, window_of
from transforms.rewrites.watched_parameter import detached


@operators.own
def finite(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of a weight that is finite in ``dtype``: infinity times a zero around it is NaN."""
    copy = detached(weight).clone()
    finite_in(copy, dtype)
    return copy


def number_paddings(graph: Graph) -> None:
    """Give convolutions the numbers for which ``"same"`` and ``"valid"`` stand."""
    for node in graph.nodes:
        given = arguments(node) if operators.name(node) in CONVOLUTIONS else {}
        named, weight = given.get("padding"), given.get("weight")
        if not isinstance(named, str) or not is_tensor(weight):
            continue
        padding = named_padding(named, value(weight).shape[2:], given.get("dilation", 1))
        if padding is not None:
            operators.set_arguments(node, {**given, "padding": padding})


def fold_paddings(graph: Graph, constants: set[Node]) -> int:
    """Let convolutions pad their input themselves; return for how many functions they do.

    Args:
        graph: the graph, rewritten in place.
        constants: the nodes that depend on parameters, buffers and literals only.
    """
    count = 0
    for node in reversed(graph.nodes):
        ends = _ends(node) if operators.name(node) == "pad" else None
        if ends is None or not all(_fold(each, node, ends, constants) for each in [*node.users]):
            continue
        graph.erase_node(node)
        count += 1
    return count


def _ends(node: Node) -> list[int] | None:
    """How many zeros are added at both ends, from the last dimension on; None if others are."""
    given = arguments(node)
    ends = given.get("pad")
    if given.get("mode", "constant") != "constant" or given.get("value") not in (None, 0):
        return None
    if not isinstance(ends, tuple | list) or not all(isinstance(n, int) and n >= 0 for n in ends):
        return None
    return list(ends[::2]) if ends[::2] == ends[1::2] else None


def _fold(node: Node, padded: Node, ends: list[int], constants: set[Node]) -> bool:
    """Let a convolution read the input of the function that pads, if it can."""
    given = arguments(node)
    x, weight = arguments(padded)["input"], given.get("weight")
    if operators.name(node) not in CONVOLUTIONS or given.get("input") is not padded:
        return False
    if weight not in constants or not (is_tensor(x) and is_tensor(weight)):
        return False
    if operators.is_written_between(padded, node) or _is_empty(value(x)):
        return False
    padding = _padding(given, ends, value(weight))
    if padding is None or value(x).dim() != value(weight).dim():
        return False
    dtype = value(node).dtype
    is_checked = weight.target in (folded_weight, finite) and value(weight).dtype == dtype
    if not is_checked:
        with node.graph.inserting_before(node):
            plain, weight = weight, node.graph.call_function(finite, (weight, dtype))
        weight.meta["example_value"] = value(plain)
        constants.add(weight)
    operators.set_arguments(node, {**given, "input": x, "weight": weight, "padding": padding})
    return True


def _is_empty(x: Tensor) -> bool:
    """Whether an image has no pixels; torch's convolutions raise then, unless they are padded."""
    return any(isinstance(size, int) and size == 0 for size in x.shape[2:])


def _padding(given: Mapping[str, Any], ends: list[int], weight: Tensor) -> tuple[int, ...] | None:
    """The padding of a convolution that adds zeros itself; None if it cannot."""
    count = weight.dim() - 2
    window = window_of(given, count)
    if window is None or any(ends[count:]):
        return None
    ends = [*ends, *[0] * count][:count]
    padding = tuple(a + b for a, b in zip(window.padding, reversed(ends)))
    last = weight.shape[-1], window.stride[-1], padding[-1], window.dilation[-1]
    return None if may_see_only_padding(*last) else padding
