"""Runs the plan of one shape in C++: in TorchScript, with convolutions computed by oneDNN Graph.

torch's oneDNN operators describe their tensors again in each call, which takes longer than a small
convolution. oneDNN Graph compiles each chain of convolutions, with the operations that follow them,
once. torch makes it available through TorchScript only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node, map_arg

from fusedoptim import _torch_private as private
from fusedoptim.runtime.memory import return_free_memory
from transforms.graph import operators
from transforms.graph.bounds import CLAMPS, PRODUCTS
from transforms.graph.operators import is_fresh, is_pure, value
from transforms.graph.products import Product
from transforms.inputs.sample import agrees

_GROUP = "prim::oneDNNFusionGroup"
_CONVOLUTIONS = frozenset({"aten::_convolution", "aten::conv2d", "aten::conv3d"})
_RIGHT = frozenset(
    f"aten::{name}"
    for name in (
        *("_convolution", "conv2d", "conv3d", "linear", "addmm", "matmul", "mm"),
        *("add", "mul", "sigmoid", "tanh", "hardswish", "leaky_relu", "cat", "avg_pool2d"),
    )
)
"""Functions that oneDNN Graph computes as torch does, including NaN and infinity."""
_RIGHT_IF_FINITE = _RIGHT | {f"aten::{name}" for name in CLAMPS}
_WARM_UP = 3  # one to see shapes, one to compile, and one to pack the weights
_compiling = threading.Lock()


class Script(NamedTuple):
    """A compiled plan."""

    run: Callable[..., Any]
    inputs: list[int]
    """Positions of the captured graph's arguments that it takes; the others are part of it."""

    def __call__(self, args: Sequence[Any]) -> Any:
        """Compute what the captured graph computes."""
        return self.run(*[_detached(args[i]) for i in self.inputs])


def _detached(tensor: Tensor) -> Tensor:
    # For a parameter, TorchScript would prepare for gradients.
    return tensor.detach() if isinstance(tensor, nn.Parameter) else tensor


def can_be_scripted(graph: Graph, products: Sequence[Product]) -> bool:
    """Whether a graph may run in C++: its functions are known, and none writes or is random."""
    return (
        private.traced_graph is not None
        and all(each.dtype == torch.float32 for each in products)
        and all(
            not node.op.startswith("call") or is_pure(node) or is_fresh(node)
            for node in graph.nodes
        )
    )


def script(
    module: nn.Module,
    graph: Graph,
    args: Sequence[Any],
    fixed: Container[int],
    expected: Any,
    is_finite: bool,
) -> Script | None:
    """Compile a plan; None if oneDNN Graph does not take it, or would compute something else.

    Args:
        module: the captured module.
        graph: the plan's graph, with constants as its last arguments; it is changed.
        args: the arguments of the graph, constants included.
        fixed: which of them are constants.
        expected: what the graph returns for them.
        is_finite: whether all values are finite unless the graph's additional results, the sizes,
            show otherwise.
    """
    if not _is_plain(expected) or torch.is_autocast_enabled("cpu"):
        return None
    _hide(graph, is_finite)
    forward = GraphModule(module, graph, "Plan").forward
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    inputs = [
        i
        for i, (node, given) in enumerate(zip(nodes, args, strict=True))
        if node.users and isinstance(given, Tensor) and i not in fixed
    ]
    constants = [given.detach() if isinstance(given, Tensor) else given for given in args]
    for i in inputs:
        constants[i] = None

    def traced(*given: Tensor) -> Any:
        values = list(constants)
        for i, each in zip(inputs, given):
            values[i] = each
        return forward(*values)

    given = [_detached(args[i]) for i in inputs]
    try:
        found = _compiled(traced, given)
        actual = found(*given)[: len(expected)]
        is_right = _is_right(found, is_finite) and _are_close(actual, expected)
    except RuntimeError:  # of oneDNN Graph or TorchScript
        is_right = False
    if not is_right:
        _forget_packed_weights()
        return None
    return Script(found, inputs)


def _compiled(function: Callable[..., Any], given: Sequence[Tensor]) -> Any:
    """A function compiled by TorchScript, for inputs like these."""
    names = [f"input_{i}" for i in range(len(given))]
    unknown: Callable[[Any], str] = lambda _: ""  # noqa: E731  # names of values
    with torch.no_grad(), _compiling:
        # Tracing runs the function once, which writes to none of the inputs.
        graph, _ = private.traced_graph(function, tuple(given), unknown, False, False, None, names)
        found = private.graph_function("plan", graph)
        was_on = private.has_onednn_graph()
        private.use_onednn_graph(True)
        try:
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


def _are_close(actual: Any, expected: Any) -> bool:
    """Whether results are the same up to rounding, and laid out alike."""
    return len(actual) == len(expected) and all(map(_is_close, actual, expected))


def _is_close(actual: Tensor, expected: Tensor) -> bool:
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    if actual.stride() != expected.stride():
        return False
    if not expected.is_floating_point():
        return torch.equal(actual, expected)
    return agrees(actual, expected)


def _relu(input: Tensor, inplace: bool = False) -> Tensor:  # noqa: A002  # torch's name
    return torch.clamp_min(input, 0)


def _relu_(input: Tensor) -> Tensor:  # noqa: A002
    return torch.clamp_min_(input, 0)


def _hardtanh(
    input: Tensor,  # noqa: A002
    min_val: float = -1.0,
    max_val: float = 1.0,
    inplace: bool = False,
) -> Tensor:
    return torch.clamp_max_(torch.clamp_min(input, min_val), max_val)


def _hardtanh_(input: Tensor, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:  # noqa: A002
    return torch.clamp_max_(torch.clamp_min_(input, min_val), max_val)


def _relu6(input: Tensor, inplace: bool = False) -> Tensor:  # noqa: A002
    return _hardtanh(input, 0.0, 6.0)


def _relu6_(input: Tensor) -> Tensor:  # noqa: A002
    return _hardtanh_(input, 0.0, 6.0)


def _max_pool2d(
    input: Tensor,  # noqa: A002
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    pooled = torch._C._nn.max_pool2d_with_indices
    return pooled(input, kernel_size, stride, padding, dilation, ceil_mode)[0]


def _layer_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    return torch.native_layer_norm(input, normalized_shape, weight, bias, eps)[0]


_HIDDEN: dict[str, Callable[..., Tensor]] = {
    "relu": _relu,
    "relu_": _relu_,
    "relu6": _relu6,
    "relu6_": _relu6_,
    "hardtanh": _hardtanh,
    "hardtanh_": _hardtanh_,
    "max_pool2d": _max_pool2d,
    "layer_norm": _layer_norm,
}
"""Functions that oneDNN Graph would compute otherwise for NaN, as others that it does not know."""


def _hide(graph: Graph, is_finite: bool) -> None:
    uses = _uses(graph)
    for node in graph.nodes:
        called = operators.name(node) or ""
        if is_finite and called in CLAMPS:
            continue
        hidden = _HIDDEN.get(called)
        if hidden is None and _is_unsafe(node, uses):
            hidden = _SUMS[called]
        if hidden is not None and operators.is_tensor(node):
            node.op, node.target = "call_function", hidden


def _sum(input: Tensor, other: Tensor, alpha: float = 1) -> Tensor:  # noqa: A002
    return torch.sub(input, other, alpha=-alpha)


def _sum_(input: Tensor, other: Tensor, alpha: float = 1) -> Tensor:  # noqa: A002
    return input.sub_(other, alpha=-alpha)


_SUMS = {"add": _sum, "add_": _sum_}
"""Sums with the same bits that oneDNN Graph does not know."""


def _uses(graph: Graph) -> dict[Node, list[Node]]:
    """What uses each value, or the value of a node that computes the same: torch merges these."""
    first: dict[tuple[Any, ...], Node] = {}
    same: dict[Node, Node] = {}
    found: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        given = map_arg((node.args, node.kwargs), same.__getitem__)
        same[node] = first.setdefault((node.op, node.target, repr(given)), node)
        found.setdefault(same[node], []).extend(node.users)
    return {node: found[each] for node, each in same.items()}


def _is_unsafe(node: Node, uses: Mapping[Node, Sequence[Node]]) -> bool:
    """Whether oneDNN Graph may not compute a sum: the result may be wrong, or the process end."""
    if operators.name(node) not in _SUMS or not operators.is_tensor(node):
        return False
    terms = node.all_input_nodes
    if len(terms) != 2 or not all(value(each).is_floating_point() for each in terms):
        return False
    return any(
        term.op != "placeholder" and _may_be_overwritten(uses[term], node) for term in terms
    ) or any(
        _may_be_taken_twice(uses[each], node)
        for product in _fused_products(terms)
        for each in product.all_input_nodes
    )


def _may_be_overwritten(users: Sequence[Node], result: Node) -> bool:
    """Whether a sum may be written over a term with these users before all have read it.

    oneDNN Graph writes the sum of a product and another of its values over the latter, and torch,
    which also reorders its groups, does not check who else uses that value. A term is safe if all
    that uses it is needed for the sum, or if a function of ours uses it: then it is an ordinary
    torch tensor.
    """
    if any(map(operators.is_own, users)):
        return False
    return not all(user is result or _is_needed(user, result) for user in users)


def _may_be_taken_twice(users: Sequence[Node], result: Node) -> bool:
    """Whether a product's input may also be an operand of what follows the sum in its group.

    torch ends the process then, as for ``(conv(x) + y) * x``.
    """
    return any(
        not (operators.is_own(user) or _is_product(user) or _is_needed(user, result))
        for user in users
    )


def _fused_products(terms: Sequence[Node]) -> Iterator[Node]:
    """The products that may be in one group with the sum of these terms."""
    pending, seen = list(terms), set()
    while pending:
        node = pending.pop()
        if _is_product(node):
            yield node
        elif node not in seen and not any(map(_is_product, node.users)):
            seen.add(node)
            pending += node.all_input_nodes


def _is_product(node: Node) -> bool:
    return operators.name(node) in (*PRODUCTS, "matmul", "mm", "bmm")


def _is_needed(node: Node, result: Node) -> bool:
    """Whether a result depends on a node."""
    pending, seen = [result], set()
    while pending:
        each = pending.pop()
        if each is node:
            return True
        if each not in seen and node < each:
            seen.add(each)
            pending += each.all_input_nodes
    return False
