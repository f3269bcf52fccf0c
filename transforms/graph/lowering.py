"""Lowers a captured graph to the calls of its plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.fx import Graph, Node

from transforms.graph import operators
from transforms.graph.attention import split_attention
from transforms.graph.batch_norms import fold_batch_norms
from transforms.graph.bounds import CLAMPS, compare
from transforms.graph.constants import constant_nodes, with_placeholders, worth_keeping
from transforms.graph.in_place import overwrite
from transforms.graph.lookups import simplify_lookups
from transforms.graph.operators import is_tensor, is_writing, value
from transforms.graph.padding import fold_paddings, number_paddings
from transforms.graph.products import (
    Product,
    activation,
    cast,
    product,
    products,
    same_shape,
    same_strides,
)
from transforms.graph.recording import Layouts
from transforms.graph.simplify import drop_casts, drop_dropouts, drop_logging, purify, shorten
from transforms.rewrites.post_ops import NO_OP, PostOp


class Counts(NamedTuple):
    """How much of a graph was rewritten."""

    folded: int = 0
    """BatchNorms that went into a product."""
    paddings: int = 0
    """Paddings that convolutions add themselves."""
    packed: int = 0
    """Products with a packed weight."""
    activations: int = 0
    """Activations that oneDNN applies to a product."""
    additions: int = 0
    """Additions that oneDNN makes to a product."""
    in_place: int = 0
    """Functions that write over their input."""
    constants: int = 0
    """Constants that are kept, packed weights among them."""
    attentions: int = 0
    """Attention in 16 bits that became products."""
    lookups: int = 0
    """Lookups that became simpler ones."""


class Parts(NamedTuple):
    """Which optional parts of lowering are done."""

    fuses: bool = True
    """Whether products apply activations and additions."""
    folds_constants: bool = True
    """Whether constants other than packed, cast and folded weights and biases are kept."""


class Lowered(NamedTuple):
    """A graph that takes its constants as arguments, after those of the captured graph."""

    graph: Graph
    kept: list[Node]
    """The nodes of the constants, in :attr:`source`."""
    source: Graph
    """The graph that computes them."""
    counts: Counts


class Simplified(NamedTuple):
    """A copy of a captured graph that computes the same by torch's own functions."""

    graph: Graph
    constants: set[Node]
    folded: int
    paddings: int
    fuses: bool

    @property
    def products(self) -> list[Product]:
        """The products that may be packed."""
        return products(self.graph, self.constants)


def simplified(graph: Graph, sources: Sequence[int], folds: bool, parts: Parts) -> Simplified:
    """Copy a captured graph without Dropouts, with what can be folded, and with few writes.

    Args:
        graph: the graph that dynamo captured.
        sources: which arguments are parameters and buffers.
        folds: whether BatchNorms and paddings are folded.
        parts: what else is done.
    """
    copy = Graph()
    copy.output(copy.graph_copy(graph, {}))
    drop_logging(copy)
    drop_dropouts(copy)
    drop_casts(copy)
    purify(copy)
    number_paddings(copy)
    placeholders = [node for node in copy.nodes if node.op == "placeholder"]
    constants = constant_nodes(copy, [placeholders[i] for i in sources], parts.folds_constants)
    folded = fold_batch_norms(copy, constants) if folds else 0
    paddings = fold_paddings(copy, constants) if folds else 0
    return Simplified(copy, constants, folded, paddings, parts.fuses)


def lowered(
    given: Simplified,
    layouts: Layouts | None,
    packs: bool = True,
    compared: Sequence[str] | None = None,
) -> Lowered:
    """Pack the products, write in place, and separate the constants; ``given`` is used up.

    Args:
        given: the graph.
        layouts: the layouts recorded for the shape of its inputs; without it, no convolution is
            packed.
        packs: False for :mod:`transforms.graph.script`, where oneDNN Graph computes products and
            what follows them.
        compared: values from :mod:`transforms.graph.bounds`; their sizes are returned after the
            results.
    """
    graph, constants = given.graph, given.constants
    is_finite = compared is not None
    if compared is not None:
        compare(graph, compared)
    before = given.products
    has_convolutions = any(each.is_convolution for each in before)
    packing = _Packing(given, layouts, is_finite)
    for node in [each.node for each in before]:
        current = product(node, constants)  # read again: its input may have been replaced
        if current is not None and packs:
            packing.pack(current)

    attentions = split_attention(graph) if packs else 0
    lookups = simplify_lookups(graph, constants) if packs else 0

    def steady(node: Node, target: Node) -> bool:
        if layouts is not None:
            return _stands_for(node, target, layouts)
        return not has_convolutions and same_strides(node, target)

    in_place = overwrite(graph, constants, steady, None if packs else _hidden(is_finite))
    kept = worth_keeping(graph, constants)
    result = with_placeholders(graph, kept)
    shorten(result)
    folded = given.folded, given.paddings
    counts = Counts(*folded, *packing.counts, in_place, len(kept), attentions, lookups)
    return Lowered(result, kept, graph, counts)


def _hidden(is_finite: bool) -> Sequence[str]:
    """Functions that are not passed to oneDNN Graph, and that may write over their input."""
    return ("hardsigmoid",) if is_finite else ("hardsigmoid", *CLAMPS)


_BEFORE = "fusedoptim_before"
"""In the metadata of a packed product: the names of the nodes that it computes."""


def _stands_for(node: Node, target: Node, layouts: Layouts) -> bool:
    names = target.meta.get(_BEFORE, (target.name,))
    return any((node.name, name) in layouts.steady for name in names)


class _Packing:
    """Replaces products, and what follows them, by oneDNN's operators."""

    def __init__(self, given: Simplified, layouts: Layouts | None, is_finite: bool) -> None:
        self._is_finite = is_finite
        self._graph = given.graph
        self._constants = given.constants
        self._fuses = given.fuses
        self._layouts = layouts
        self._packed = self._activations = self._additions = 0

    @property
    def counts(self) -> tuple[int, int, int]:
        """Packed products, activations, additions."""
        return self._packed, self._activations, self._additions

    def pack(self, given: Product) -> None:
        shape: tuple[int, ...] = ()
        if given.is_convolution:
            known = None if self._layouts is None else self._layouts.shapes.get(given.node.name)
            if known is None:
                return
            shape = known
        self._packed += 1
        applied = self._activation(given)
        other = None if applied else self._addend(given)
        done = [given.node]  # the nodes that the operator computes
        if applied or other is not None:
            done += given.node.users
        if other is not None:
            applied = self._relu(done[-1], given)
            done += done[-1].users if applied else ()
        last = done[-1]
        with self._graph.inserting_before(last if other is not None else given.node):
            x, weight, bias = self._operands(given, shape)
            if other is None:
                target, args = given.call(x, weight, bias, applied or NO_OP)
            else:
                target, args = given.call_and_add(x, other, weight, bias, applied or NO_OP)
            result = self._graph.call_function(target, args)
        result.meta[_BEFORE] = tuple(node.name for node in done)
        self._activations += applied is not None
        self._additions += other is not None
        operators.replace(last, result)
        for node in reversed(done[:-1]):
            self._graph.erase_node(node)

    def _operands(self, given: Product, shape: Sequence[int]) -> tuple[Any, Node, Any]:
        x, bias = given.x, given.bias
        if value(x).dtype != given.dtype:
            x = self._graph.call_method("to", (x, given.dtype))
        pack, args = given.packing(given.weight, shape)
        weight = self._graph.call_function(pack, args)
        self._constants.add(weight)
        is_fit = bias is None or (value(bias).dtype == given.dtype and value(bias).is_contiguous())
        if not is_fit:  # oneDNN's operators do not look at a bias's strides
            bias = self._graph.call_function(cast, (bias, given.dtype))
            self._constants.add(bias)
        return x, weight, bias

    def _user(self, node: Node, of: Product) -> Node | None:
        """The only function that uses a product or its sum, if it may become part of it."""
        if not self._fuses or len(node.users) != 1:
            return None
        (user,) = node.users
        if not is_tensor(user) or value(user).dtype != of.dtype or is_writing(user):
            return None
        if of.is_convolution:
            assert self._layouts is not None
            if (user.name, node.name) not in self._layouts.steady:
                return None
        return user

    def _activation(self, given: Product) -> PostOp | None:
        user = self._user(given.node, given)
        return None if user is None else activation(user, given, self._is_finite)

    def _relu(self, added: Node, of: Product) -> PostOp | None:
        """The ReLU of a sum, which oneDNN applies as it does to the product alone."""
        user = self._user(added, of)
        if user is None or operators.name(user) != "relu":
            return None
        return activation(user, of, self._is_finite)

    def _addend(self, given: Product) -> Node | None:
        """The tensor that is added to a product, if nothing is written in between."""
        user = self._user(given.node, given)
        if user is None or not given.takes_addition or operators.name(user) != "add":
            return None
        if len(user.args) != 2 or user.kwargs:
            return None
        first, second = user.args
        other = second if first is given.node else first
        if not isinstance(other, Node) or other is given.node or not is_tensor(other):
            return None
        if value(other).dtype != given.dtype or not same_shape(other, user):
            return None
        assert self._layouts is not None
        if not _stands_for(user, other, self._layouts):
            return None
        return None if operators.is_written_between(given.node, user) else other
