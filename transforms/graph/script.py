"""Runs the plan of one shape in C++: in TorchScript, with convolutions computed by oneDNN Graph.

torch's oneDNN operators describe their tensors again in each call, which takes longer than a small
convolution. oneDNN Graph compiles each chain of convolutions, with the operations that follow them,
once. torch makes it available through TorchScript only.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from fusedoptim import _torch_private as private
from fusedoptim._locks import new_lock
from fusedoptim.runtime.memory import return_free_memory
from transforms.graph.aliases import returned_roots, roots
from transforms.graph.bounds import CLAMPS
from transforms.graph.hiding import can_be_hidden, hide
from transforms.graph.operators import dependencies, is_fresh, is_pure
from transforms.graph.products import Product
from transforms.inputs.sample import agrees
from transforms.rewrites.watched_parameter import detached

_GROUP = "prim::oneDNNFusionGroup"
_CONVOLUTIONS = frozenset({"aten::_convolution", "aten::conv2d", "aten::conv3d"})
_RIGHT = frozenset(
    f"aten::{name}"
    for name in (
        *("_convolution", "conv2d", "conv3d", "linear", "addmm", "matmul", "mm", "bmm"),
        *("abs", "elu", "log", "sqrt", "square"),
        *("add", "mul", "div", "sigmoid", "tanh", "hardswish", "leaky_relu", "cat", "avg_pool2d"),
    )
)
"""Functions that oneDNN Graph computes as torch does, including NaN and infinity."""
_RIGHT_IF_FINITE = _RIGHT | {f"aten::{name}" for name in CLAMPS}
_DTYPES = ({torch.float32}, {torch.bfloat16})
_WARM_UP = 3  # one to see shapes, one to compile, and one to pack the weights
_compiling = new_lock()


class Script(NamedTuple):
    """A compiled plan."""

    run: Callable[..., Any]
    inputs: list[int]
    """Positions of the captured graph's arguments that it takes; the others are part of it."""

    def __call__(self, args: Sequence[Any]) -> Any:
        """Compute what the captured graph computes."""
        given = [_detached(args[i]) for i in self.inputs]
        if not torch.is_autocast_enabled("cpu"):
            return self.run(*given)
        with _without_autocast():
            return self.run(*given)


def _detached(tensor: Tensor) -> Tensor:
    # For a parameter, TorchScript would prepare for gradients.
    return detached(tensor) if isinstance(tensor, nn.Parameter) else tensor


def can_be_scripted(graph: Graph, constants: Container[Node], products: Sequence[Product]) -> bool:
    """Whether a graph may run in C++: its functions are known, and none writes or is random.

    What oneDNN Graph computes differently from torch must have a name that it does not know.
    """
    return (
        private.traced_graph is not None
        and {each.dtype for each in products} in _DTYPES
        and all(
            not node.op.startswith("call")
            or ((is_pure(node) or is_fresh(node)) and not _is_nameless(node))
            for node in graph.nodes
        )
        and can_be_hidden(graph, constants)
    )


def _is_nameless(node: Node) -> bool:
    """Whether a node calls an aten operator, which ``operators.name`` does not know, by itself."""
    target: Any = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"


def script(
    module: nn.Module,
    graph: Graph,
    args: Sequence[Any],
    fixed: Container[int],
    expected: Any,
    dtype: torch.dtype,
    is_finite: bool,
) -> Script | None:
    """Compile a plan; None if oneDNN Graph does not take it, or would compute something else.

    Args:
        module: the captured module.
        graph: the plan's graph, with constants as its last arguments; it is changed.
        args: the arguments of the graph, constants included.
        fixed: which of them are constants.
        expected: what the graph returns for them.
        dtype: that of its products, to which ``expected`` is exact.
        is_finite: whether all values are finite unless the graph's additional results, the sizes,
            show otherwise.
    """
    if not _is_plain(expected):
        return None
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    inputs = [
        i
        for i, (node, given) in enumerate(zip(nodes, args, strict=True))
        if node.users and isinstance(given, Tensor) and i not in fixed
    ]
    if not _are_computed(graph, {nodes[i] for i in inputs}):
        return None
    hide(graph, is_finite)
    forward = GraphModule(module, graph, "Plan").forward
    constants = [detached(given) if isinstance(given, Tensor) else given for given in args]
    for i in inputs:
        constants[i] = None

    def traced(*given: Tensor) -> Any:
        values = list(constants)
        for i, each in zip(inputs, given):
            values[i] = each
        return forward(*values)

    given = [_detached(args[i]) for i in inputs]
    with _without_autocast():
        try:
            found = _compiled(traced, given)
            actual = found(*given)[: len(expected)]
            is_right = (
                _is_right(found, is_finite)
                and _are_close(actual, expected, dtype)
                and _sharing(actual, given) == _sharing(expected, given)
            )
        except RuntimeError:  # of oneDNN Graph or TorchScript
            is_right = False
        if not is_right:
            _forget_packed_weights()
            return None
    return Script(found, inputs)


def _without_autocast() -> torch.autocast:
    """TorchScript keeps other code for autocast, with conversions of its own."""
    return torch.autocast("cpu", enabled=False)


def _are_computed(graph: Graph, inputs: Set[Node]) -> bool:
    """Whether each call computes all results: TorchScript keeps what depends on no input."""
    returned = returned_roots(graph, roots(graph))
    return all(dependencies([root]) & inputs for root in returned)


def _compiled(function: Callable[..., Any], given: Sequence[Tensor]) -> Any:
    """A function compiled by TorchScript, for inputs like these."""
    names = [f"input_{i}" for i in range(len(given))]
    unknown: Callable[[Any], str] = lambda _: ""  # noqa: E731  # names of values
    with torch.no_grad(), _compiling:
        # Tracing runs the function once, which writes to none of the inputs.
        graph, _ = private.traced_graph(function, tuple(given), unknown, False, False, None, names)
        found = private.graph_function("plan", graph)
        was_on = private.has_onednn_graph()
        try:
            private.use_onednn_graph(True)
            for _ in range(_WARM_UP):
                return_free_memory()  # of activations: the packed weights may not fit into it
                found(*given)
        finally:
            private.use_onednn_graph(was_on)
    return found


def _forget_packed_weights() -> None:
    """Free what oneDNN Graph has packed so far; the functions in use pack their weights again.

    It keeps packed weights when the function is gone, but forgets them with each compilation.
    """
    _compiled(lambda x: x + 1, [torch.zeros(1)])


def _is_right(found: Any, is_finite: bool) -> bool:
    """Whether oneDNN Graph computes some of it, and only functions that it computes as torch."""
    groups = list(_groups(found))
    right = _RIGHT_IF_FINITE if is_finite else _RIGHT
    return bool(groups) and all(_is_right_group(group, right) for group in groups)


def _groups(found: Any) -> Iterator[set[str]]:
    """The operators in each group that oneDNN Graph computes."""
    for plan in found.get_debug_state().execution_plans.values():
        for node in _nodes(plan.graph):
            if node.kind() == _GROUP:
                kinds = (each.kind() for each in node.g("Subgraph").nodes())
                yield {kind for kind in kinds if kind.startswith("aten::")}


def _is_right_group(group: set[str], right: Set[str]) -> bool:
    if "aten::gelu" in group and not group & _CONVOLUTIONS:
        group = group - {"aten::gelu"}
    return group <= right


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


def _is_plain(result: Any) -> bool:
    """Whether a graph returned tensors only."""
    return isinstance(result, tuple) and all(type(each) is Tensor for each in result)


def _are_close(actual: Any, expected: Any, dtype: torch.dtype) -> bool:
    """Whether results are the same up to the rounding of a dtype, and laid out alike."""
    return len(actual) == len(expected) and all(
        _is_close(*pair, torch.finfo(dtype).eps) for pair in zip(actual, expected)
    )


def _sharing(results: Sequence[Tensor], given: Sequence[Tensor]) -> list[int]:
    """For each input and result, which of them is the first in the same memory."""
    addresses = [each.untyped_storage().data_ptr() for each in (*given, *results)]
    return [addresses.index(each) for each in addresses]


def _is_close(actual: Tensor, expected: Tensor, precision: float) -> bool:
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    if actual.stride() != expected.stride() or actual.requires_grad != expected.requires_grad:
        return False  # a view of a parameter requires gradients
    if not expected.is_floating_point():
        return torch.equal(actual, expected)
    return agrees(actual, expected, precision)
