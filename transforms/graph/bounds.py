r"""Shows that no infinity can arise in a graph, so that none of its values is NaN.

oneDNN's maximum turns NaN into a number, so ReLU and its like are left to it only where there is no
NaN. NaN arises from infinity or NaN alone. So each value gets a bound of its magnitude. That of a
product :math:`y_i = \sum_j w_{ij} x_j + b_i`, and of its partial sums, is

.. math::
    \max_i \sum_j |w_{ij}| \max_j |x_j| + \max_i |b_i|.

The bounds begin at the inputs, and anew where they become too large. What is assumed there is
compared with the values of each call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from transforms.graph import operators
from transforms.graph.operators import arguments, is_tensor, value

_ASSUMED = 1e6
"""The largest norm of what is compared in each call."""
_MOST = 1e37
_ROUNDING = 1.01
"""How much larger than in exact arithmetic what a function returns is at most."""
_MOST_COMPARED = 8
CLAMPS = ("relu", "relu6", "hardtanh")
"""What oneDNN computes as torch does where no value is NaN."""
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
PRODUCTS = (
    *("addmm", "linear", "conv1d", "conv2d", "conv3d"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
)


@operators.own
def size(x: Tensor) -> Tensor:
    """The norm, which no magnitude exceeds; NaN or infinite if an element is."""
    result: Tensor = torch.linalg.vector_norm(x)
    return result


def are_as_assumed(sizes: Sequence[Tensor]) -> bool:
    """Whether none is larger than was assumed."""
    return all(float(each) <= _ASSUMED for each in sizes)


def values_to_compare(
    graph: Graph, constants: set[Node], evaluate: Evaluate
) -> tuple[str, ...] | None:
    """The names of the values which show that all are finite if they are as small as assumed.

    All are those up to the last clamp. None if that cannot be shown, or does not matter.

    Args:
        graph: the graph.
        constants: the nodes that depend on parameters, buffers and literals only.
        evaluate: computes one of them; None for one whose changes are not seen.
    """
    nodes = list(graph.nodes)
    if not isinstance(nodes[-1].args[0], tuple | list):  # more can be returned beside several
        return None
    while nodes and operators.name(nodes[-1]) not in CLAMPS:  # what follows need not be finite
        nodes.pop()
    values = [node for node in nodes if node not in constants and _is_real(node)]
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
    """Let a graph return the sizes of some of its values, after its results."""
    *nodes, output = graph.nodes
    added = []
    for node in nodes:
        if node.name in names:
            with graph.inserting_after(node):
                added.append(graph.call_function(size, (node,)))
    output.args = ((*output.args[0], *added),)


def _is_real(node: Any) -> bool:
    return is_tensor(node) and bool(value(node).is_floating_point())


def _is_wide(node: Node) -> bool:
    return torch.finfo(value(node).dtype).max > 10 * _MOST


def _is_plain(node: Node, first: Any) -> bool:
    """Whether a function neither looks at bits nor fills up with infinity."""
    if operators.name(node) == "max_pool2d":  # a window may lie between the elements
        dilation = node.kwargs.get("dilation", node.args[4] if len(node.args) > 4 else 1)
        return dilation in (1, (1, 1), [1, 1])
    is_cast = operators.name(node) == "to"
    return is_cast or (_is_real(first) and value(first).dtype == value(node).dtype)


def _cuts(graph: Graph, values: Sequence[Node]) -> list[int]:
    """Which of the values are all that the rest of the graph uses of those before.

    What an activation follows is none, as a product that something else uses cannot apply it.
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
        """Take for a node's bound what is compared with it in each call."""
        self._known[node] = _ASSUMED * _ROUNDING

    def bound(self, node: Node) -> float:
        """The bound of a node, which is kept; infinity if none is known."""
        self._known[node] = self._bound(node) * _ROUNDING
        return self._known[node]

    def _bound(self, node: Node) -> float:
        called, given = operators.name(node) or "", arguments(node)
        first = given.get("input", node.args[0] if node.args else None)
        if called in PRODUCTS:
            return self._product(called, given)
        if called in _SHRINKING and _is_plain(node, first):
            return self._of(first)
        if called in _SUMMING and _is_real(first):
            count = value(first).numel()
            return self._of(first) * count if isinstance(count, int) and count > 0 else math.inf
        if called in (*_UP_TO_ONE, "hardtanh") and self._of(first) <= _MOST:
            limits = [abs(given[key]) for key in ("min_val", "max_val") if key in given]
            return max(limits, default=1.0)
        if called == "leaky_relu":
            return self._of(first) * max(1.0, self._of(given.get("negative_slope")))
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
        if given in self._constants and _is_real(given):
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


def _largest(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values.detach(), math.inf)) if values.numel() else 0.0


def _largest_sum(weight: Tensor, called: str) -> float:
    """Of the magnitudes by which an element of a product is computed."""
    # Of a transposed convolution, the channels with one number in all groups, together.
    channel = 1 if called == "addmm" or called.startswith("conv_transpose") else 0
    others = [i for i in range(weight.dim()) if i != channel]
    return _largest(torch.linalg.vector_norm(weight.detach(), 1, others, dtype=torch.float32))
