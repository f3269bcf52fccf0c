"""Which values of a graph may share memory, and which may be written to."""

from __future__ import annotations

from torch.fx import Graph, Node

from transforms.graph.operators import is_fresh, is_number, is_random, written

Roots = dict[Node, frozenset[Node]]
"""For each node, the nodes whose memory its value may share: placeholders and fresh results."""


def roots(graph: Graph) -> Roots:
    """The roots of all values, for every way in which they may share memory."""
    found: Roots = {}
    for node in graph.nodes:
        if is_number(node):  # such as a size, which dynamo may hand over as an input
            found[node] = frozenset()
        elif is_fresh(node) or not node.all_input_nodes:
            found[node] = frozenset({node})
        else:
            found[node] = frozenset().union(*(found[each] for each in node.all_input_nodes))
    return found


def written_roots(graph: Graph, of: Roots) -> frozenset[Node]:
    """The roots into whose memory the graph may write."""
    return frozenset().union(
        *(of[target] for node in graph.nodes for target in written(node)), frozenset()
    )


def returned_roots(graph: Graph, of: Roots) -> frozenset[Node]:
    """The roots whose memory the graph may return."""
    return of[graph.output_node()]


def is_repeatable(graph: Graph) -> bool:
    """Whether a graph may run twice in one call: it writes to no input and draws no numbers."""
    if any(map(is_random, graph.nodes)):
        return False
    return all(each.op.startswith("call") for each in written_roots(graph, roots(graph)))
