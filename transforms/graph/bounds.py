r"""Shows that no infinity can arise in a graph, so that none of its values is NaN.

oneDNN's maximum turns NaN into a number, so it may compute ReLU, ReLU6 and Hardtanh only where
there is no NaN. NaN arises from infinity or NaN alone. So each value gets a bound of its magnitude.
The bound of a product :math:`y_i = \sum_j w_{ij} x_j + b_i`, and of its partial sums, is

.. math::
    \max_i \sum_j |w_{ij}| \max_j |x_j| + \max_i |b_i|.

The inputs start with an assumed bound. Where a bound becomes too large, a new assumption starts.
Each call compares its values with what was assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from transforms.graph import operators
from transforms.graph.aliases import is_repeatable
from transforms.graph.operators import CONVOLUTIONS, TRANSPOSED, arguments, is_tensor, value
from transforms.rewrites.watched_parameter import detached

_ASSUMED = 1e6
"""The largest norm of the values that are compared in each call."""
_MOST = 1e37
"""The largest bound of a value that counts as finite."""
_ROUNDING = 1.01
"""The factor by which a function's rounded result may exceed the exact one."""
_MOST_COMPARED = 8
"""The most assumptions that start where a bound becomes too large: each costs time in each call."""
CLAMPS = ("relu", "relu6", "hardtanh")
"""Functions that oneDNN computes as torch does if no value is NaN."""
Evaluate = Callable[[Node], Tensor | None]
"""Computes a constant of a graph; None for one that may change unseen."""
_ACTIVATIONS = (
    *("gelu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "relu", "relu6"),
    *("sigmoid", "silu", "tanh"),
)
_SHRINKING = frozenset(
    (
        *("gelu", "hardswish", "relu", "relu6", "silu", "max_pool2d"),
        *("contiguous", "expand", "flatten", "getitem", "permute", "reshape", "squeeze"),
        *("to", "transpose", "unsqueeze", "view"),
    )
)
"""Functions that return nothing larger than their first argument."""
_SUMMING = ("adaptive_avg_pool2d", "avg_pool2d", "mean")
_UP_TO_ONE = ("hardsigmoid", "sigmoid", "softmax", "tanh")
PRODUCTS = ("addmm", "linear", *CONVOLUTIONS, *TRANSPOSED)


@operators.own
def size(x: Tensor) -> Tensor:
    """A norm that bounds all magnitudes; NaN or infinite if an element is."""
    result: Tensor = torch.linalg.vector_norm(x)
    return result


def are_as_assumed(sizes: Sequence[Tensor]) -> bool:
    """Whether no size exceeds the assumed bound."""
    return all(float(each) <= _ASSUMED for each in sizes)


def values_to_compare(
    graph: Graph, constants: set[Node], evaluate: Evaluate
) -> tuple[str, ...] | None:
    """The names of values which, if as small as assumed, show that all values are finite.

    Only values up to the last clamp count. None if it cannot be shown, does not matter, or if the
    graph must not run twice in one call.

    Args:
        graph: the graph.
        constants: the nodes that depend on parameters, buffers and literals only.
        evaluate: computes one of these; returns None for one whose changes are not noticed.
    """
    nodes = list(graph.nodes)
    if not isinstance(nodes[-1].args[0], tuple | list):  # values can be added to a tuple only
        return None
    if not is_repeatable(graph):  # it runs again if a value is larger than assumed
        return None
    while nodes and operators.name(nodes[-1]) not in CLAMPS:  # later values need not be finite
        nodes.pop()
    values = [node for node in nodes if node not in constants and is_real(node)]
    if not values or any(map(operators.is_writing, nodes)) or not all(map(_is_wide, values)):
        return None
    cuts = _cuts(graph, values)
    rules = _Rules(constants, evaluate)
    compared: list[Node] = []
    i = began = 0
    while i < len(values):
        node = values[i]
        if node.op == "placeholder":
            if any(user <= nodes[-1] for user in node.users):
                compared.append(node)
            rules.assume(node)
        elif not rules.bound(node) <= _MOST:  # it may be NaN
            began, before = max((cut for cut in cuts if cut < i), default=0), began
            if began <= before or len(compared) == _MOST_COMPARED:
                return None
            i = began
            compared.append(values[i])
            rules.assume(values[i])
        i += 1
    return tuple(node.name for node in compared)


def compare(graph: Graph, names: Container[str]) -> None:
    """Make a graph return the sizes of some of its values, after its results."""
    *nodes, output = graph.nodes
    added = []
    for node in nodes:
        if node.name in names:
            with graph.inserting_after(node):
                added.append(graph.call_function(size, (node,)))
    output.args = ((*output.args[0], *added),)


def is_real(node: Any) -> bool:
    """Whether a node's result is a tensor of floating-point numbers."""
    return is_tensor(node) and bool(value(node).is_floating_point())


def _is_wide(node: Node) -> bool:
    return torch.finfo(value(node).dtype).max > 10 * _MOST


def _is_plain(node: Node, first: Any) -> bool:
    """Whether a function neither reinterprets bits nor pads with infinity."""
    if operators.name(node) == "max_pool2d":  # a dilated window may miss all elements
        dilation = node.kwargs.get("dilation", node.args[4] if len(node.args) > 4 else 1)
        return dilation in (1, (1, 1), [1, 1])
    is_cast = operators.name(node) == "to"
    return is_cast or (is_real(first) and value(first).dtype == value(node).dtype)


def _cuts(graph: Graph, values: Sequence[Node]) -> list[int]:
    """The positions of cuts: values that are the only ones the rest of the graph still uses.

    A value that goes to an activation is not a cut: comparing it is a second use, and a product
    with a second use cannot apply the activation.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    found, used = [], -1
    for i, node in enumerate(values):
        is_activated = any(operators.name(user) in _ACTIVATIONS for user in node.users)
        if used <= place[node] and node.op != "placeholder" and not is_activated:
            found.append(i)
        used = max([used, *(place[user] for user in node.users)])
    return found


class _Rules:
    """The bounds of functions, from those of their arguments."""

    def __init__(self, constants: set[Node], evaluate: Evaluate) -> None:
        self._constants = constants
        self._evaluate = evaluate
        self._known: dict[Node, float] = {}
        """The bounds so far."""
        self._sums: dict[Node, float] = {}

    def assume(self, node: Node) -> None:
        """Give a node the bound that each call compares it with."""
        self._known[node] = _ASSUMED * _ROUNDING

    def bound(self, node: Node) -> float:
        """The bound of a node, which is remembered; infinity if none is known."""
        self._known[node] = self._bound(node) * _ROUNDING
        return self._known[node]

    def _bound(self, node: Node) -> float:
        called, given = operators.name(node) or "", arguments(node)
        first = given.get("input", node.args[0] if node.args else None)
        if called in PRODUCTS:
            return self._product(called, given)
        if called in _SHRINKING and _is_plain(node, first):
            return self._of(first)
        if called in _SUMMING and is_real(first):
            count = value(first).numel()
            return self._of(first) * count if isinstance(count, int) and count > 0 else math.inf
        if called in (*_UP_TO_ONE, "hardtanh") and self._of(first) <= _MOST:
            limits = [self._of(given[key]) for key in ("min_val", "max_val") if key in given]
            return _largest_of(limits, 1.0)
        if called == "cat":
            return _largest_of(map(self._of, node.all_input_nodes), math.inf)
        if called == "pad" and given.get("mode", "constant") == "constant":
            return _largest_of(map(self._of, (first, given.get("value") or 0)), math.inf)
        if called == "leaky_relu":
            slope = self._of(given.get("negative_slope"))
            return self._of(first) * _largest_of((1.0, slope), math.inf)
        if called in ("add", "sub", "mul") and len(node.args) == 2 and not node.kwargs:
            a, b = map(self._of, node.args)
            return a * b if called == "mul" else a + b
        return math.inf

    def _of(self, given: Any) -> float:
        """The bound of an argument."""
        if isinstance(given, int | float):
            return abs(given)
        if not isinstance(given, Node):
            return math.inf
        if given in self._constants and is_real(given):
            constant = self._evaluate(given)
            return math.inf if constant is None else _largest(constant)
        return self._known.get(given, math.inf)

    def _product(self, called: str, given: dict[str, Any]) -> float:
        names = ("mat1", "mat2", "input") if called == "addmm" else ("input", "weight", "bias")
        x, weight, bias = map(given.get, names)
        has_factors = called == "addmm" and not given.keys() <= set(names)
        if weight not in self._constants or has_factors:
            return math.inf
        if weight not in self._sums:
            constant = self._evaluate(weight)
            self._sums[weight] = math.inf if constant is None else _largest_sum(constant, called)
        return self._sums[weight] * self._of(x) + (0.0 if bias is None else self._of(bias))


def _largest_of(bounds: Iterable[float], default: float) -> float:
    """The largest bound, or NaN if one is: ``max`` may ignore it."""
    found = list(bounds)
    return math.nan if any(map(math.isnan, found)) else max(found, default=default)


def _largest(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(detached(values), math.inf)) if values.numel() else 0.0


def _largest_sum(weight: Tensor, called: str) -> float:
    """The largest sum of weight magnitudes that contribute to one element of a product."""
    # In a transposed convolution this adds up the channels of the same number in all groups.
    channel = 1 if called == "addmm" or called in TRANSPOSED else 0
    others = [i for i in range(weight.dim()) if i != channel]
    return _largest(torch.linalg.vector_norm(detached(weight), 1, others, dtype=torch.float32))
