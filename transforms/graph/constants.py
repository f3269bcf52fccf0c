"""Finds what a graph computes from parameters, buffers and literals alone; computes it once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Graph, Node

from transforms.graph import operators
from transforms.graph.aliases import returned_roots, roots, written_roots
from transforms.graph.operators import is_pure, value

_MOST_BYTES = 1 << 24
"""The most bytes of a constant that is not a weight: a larger one is not worth its memory."""


def constant_nodes(graph: Graph, sources: Iterable[Node], folds: bool) -> set[Node]:
    """The nodes that depend on sources and literals only, and that nothing writes into.

    Args:
        graph: the graph.
        sources: the placeholders that are parameters and buffers.
        folds: False for sources and results of our own functions only.
    """
    of = roots(graph)
    writable = written_roots(graph, of)
    has_contexts = any(map(operators.is_context, graph.nodes))
    found = {each for each in sources if each not in writable}
    for node in graph.nodes:
        if not node.op.startswith("call") or of[node] & writable:
            continue
        # A context such as autocast may change what any function but ours computes.
        may_fold = folds and not has_contexts and _is_small(node)
        if not (operators.is_own(node) or may_fold):
            continue
        if is_pure(node) and all(each in found for each in node.all_input_nodes):
            found.add(node)
    return found


def _is_small(node: Node) -> bool:
    result = value(node)
    if not isinstance(result, Tensor):
        return True
    if result.device.type != "cpu" or not all(isinstance(n, int) for n in result.shape):
        return False
    return result.numel() * result.element_size() <= _MOST_BYTES


def worth_keeping(graph: Graph, constants: set[Node]) -> list[Node]:
    """The constants used by the rest of the graph that share no memory with an input or result.

    The other constants that the rest uses are removed from ``constants``.
    """
    of = roots(graph)
    returned = returned_roots(graph, of)
    kept = []
    for node in reversed(graph.nodes):
        if node not in constants or node.op == "placeholder":
            continue
        if all(user in constants for user in node.users):
            continue
        is_alone = not any(root.op == "placeholder" for root in of[node])
        is_tensor = operators.is_tensor(node) or operators.is_own(node)
        if is_alone and is_tensor and not of[node] & returned:
            kept.append(node)
        else:
            constants.discard(node)
    return kept[::-1]


def with_placeholders(graph: Graph, kept: Sequence[Node]) -> Graph:
    """The graph with arguments instead of the constants, and without the nodes that made them."""
    result = Graph()
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            copies[node] = result.node_copy(node, copies.__getitem__)
    for i, node in enumerate(kept):
        copies[node] = result.placeholder(f"constant_{i}")
    result.output(result.graph_copy(graph, copies))
    result.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or _acts(node))
    return result


def _acts(node: Node) -> bool:
    return not (is_pure(node) or operators.is_fresh(node))


def positions(graph: Graph) -> dict[Node, int]:
    """The position of each placeholder among the arguments."""
    placeholders = (node for node in graph.nodes if node.op == "placeholder")
    return {node: i for i, node in enumerate(placeholders)}


def inputs_of(graph: Graph, nodes: Iterable[Node]) -> list[int]:
    """The positions of the arguments on which some nodes of a graph depend."""
    needed = operators.dependencies(nodes)
    return sorted(i for node, i in positions(graph).items() if node in needed)


class Evaluator:
    """Computes constants from one set of arguments, each shared part once."""

    def __init__(self, graph: Graph, args: Sequence[Any]) -> None:
        self._done: dict[Node, Any] = {node: args[i] for node, i in positions(graph).items()}

    def evaluate(self, node: Node) -> Any:
        """The value of a constant."""
        if node not in self._done:
            args, kwargs = fx.map_arg((node.args, node.kwargs), self.evaluate)
            function: Callable[..., Any]
            if node.op == "call_method":
                function, args = getattr(args[0], str(node.target)), args[1:]
            else:
                function = node.target  # type: ignore[assignment]  # of call_function
            self._done[node] = function(*args, **kwargs)
        return self._done[node]


class Numbering:
    """Numbers constants; those that several graphs compute alike get equal numbers."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}

    def of(self, graph: Graph, nodes: Sequence[Node]) -> list[int]:
        """The numbers of constants of one graph."""
        found: dict[Node, int] = {}
        for node, position in positions(graph).items():
            found[node] = self._number((position,))
        return [self._visit(node, found) for node in nodes]

    def _visit(self, node: Node, found: dict[Node, int]) -> int:
        if node not in found:
            inputs = fx.map_arg(
                (node.args, node.kwargs), lambda each: ("constant", self._visit(each, found))
            )
            found[node] = self._number((node.op, node.target, repr(inputs)))
        return found[node]

    def _number(self, key: tuple[Any, ...]) -> int:
        return self._numbers.setdefault(key, len(self._numbers))


@torch.no_grad()
def computed(graph: Graph, nodes: Sequence[Node], args: Sequence[Any]) -> list[Tensor]:
    """The values of constants, which share no memory with a source."""
    with torch.inference_mode(False):
        evaluator = Evaluator(graph, args)
        return [evaluator.evaluate(node) for node in nodes]
