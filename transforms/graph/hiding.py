"""Hides from oneDNN Graph what it would compute differently from torch.

It recognizes functions by their names in TorchScript, and computes groups of several functions, or
of a product alone. So a function is hidden by another name for the same bits, or isolated by names
that it does not know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node, map_arg

from transforms.graph import operators
from transforms.graph.bounds import CLAMPS, PRODUCTS, is_real


def _max_pool2d(
    input: Tensor,  # noqa: A002  # torch's name
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    pooled = torch._C._nn.max_pool2d_with_indices
    steps = stride or kernel_size
    return pooled(input, kernel_size, steps, padding, dilation, ceil_mode)[0]


def _avg_pool2d(
    input: Tensor,  # noqa: A002
    kernel_size: Any,
    stride: Any = None,
    *rest: Any,
    **named: Any,
) -> Tensor:
    return torch._C._nn.avg_pool2d(input, kernel_size, stride or kernel_size, *rest, **named)


def _clamp(input: Tensor, min: Any = None, max: Any = None) -> Tensor:  # noqa: A002
    if min is not None:
        input = torch.clamp_min(input, min)  # noqa: A001
    return input if max is None else torch.clamp_max(input, max)


def _layer_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    return torch.native_layer_norm(input, normalized_shape, weight, bias, eps)[0]


def _batch_norm(
    input: Tensor,  # noqa: A002
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    statistics = running_mean, running_var
    return torch.native_batch_norm(input, weight, bias, *statistics, training, momentum, eps)[0]


_OTHER_NAMES: dict[str, Callable[..., Tensor]] = {
    "avg_pool2d": _avg_pool2d,
    "clamp": _clamp,
    "max_pool2d": _max_pool2d,
    "layer_norm": _layer_norm,
    "batch_norm": _batch_norm,
}
"""For functions on which oneDNN Graph raises or never returns, their equals."""
_NEUTRAL = {"add": 0, "div": 1, "mul": 1, "sub": 0}
"""Literals with which these functions return their other argument."""
_ISOLATED = frozenset({"exp", "permute", "round", "softmax"})
"""Functions that oneDNN Graph computes differently from torch in some groups."""


def hide(graph: Graph, is_finite: bool) -> None:
    """Change a graph so that oneDNN Graph computes nothing in it differently from torch.

    Args:
        graph: the graph.
        is_finite: whether no value up to the last clamp is NaN or infinite.
    """
    uses = _uses(graph)
    isolated = [node for node in graph.nodes if _is_to_be_isolated(node, uses, is_finite)]
    for node in filter(operators.is_tensor, graph.nodes):
        if (other := _OTHER_NAMES.get(operators.name(node) or "")) is not None:
            node.op, node.target = "call_function", other
    for node in isolated:
        _isolate(node)


def can_be_hidden(graph: Graph, constants: Container[Node]) -> bool:
    """Whether TorchScript keeps the graph's meaning, and all that oneDNN Graph must not see."""
    return not any(_is_odd(node) or _may_be_dropped(node, constants) for node in graph.nodes)


def _is_odd(node: Node) -> bool:
    """Whether a node is a BatchNorm or a sum that would be computed differently.

    A BatchNorm that cannot be shortened to the function in C++, or has no elements; a sum with a
    factor, which TorchScript multiplies first, in the factor's dtype.
    """
    match operators.name(node):
        case "batch_norm":
            is_known = node.target is torch.nn.functional.batch_norm
            return not is_known or not operators.value(node).numel()
        case "add" | "add_":
            return len(node.args) > 2 or "alpha" in node.kwargs
    return False


def _may_be_dropped(node: Node, constants: Container[Node]) -> bool:
    """Whether TorchScript takes a node for its input, or a literal for another one.

    ``x * 1`` and ``x + 0`` would then be ``x`` itself, over which the next function may write; so
    may they with a size or a number in a tensor that the graph makes. And -0.0 would be 0.0.
    """
    given = *node.args, *node.kwargs.values()
    literals = [each for each in given if isinstance(each, int | float)]
    if any(each == 0 and math.copysign(1, each) < 0 for each in literals):
        return True
    neutral = _NEUTRAL.get((operators.name(node) or "").removesuffix("_"))
    return neutral is not None and (
        neutral in literals or any(_is_made(each, constants) for each in node.all_input_nodes)
    )


def _is_made(operand: Node, constants: Container[Node]) -> bool:
    """Whether an operand is a size, or a tensor of one element that depends on no input."""
    if not operators.is_tensor(operand):
        return True
    is_constant = operand in constants or not operand.all_input_nodes
    is_given = operand.op in ("placeholder", "get_attr")
    return is_constant and not is_given and operators.value(operand).numel() == 1


def _is_to_be_isolated(node: Node, uses: Mapping[Node, Sequence[Node]], is_finite: bool) -> bool:
    """Whether torch must compute a node, as oneDNN Graph would do it differently for NaN."""
    if not is_real(node):
        return False
    given = operators.arguments(node)
    match (operators.name(node) or "").removesuffix("_"):
        case "add":
            return _is_unsafe(node, uses)
        case "div":  # it may convert or round, which oneDNN Graph does not
            return not _is_quotient_by_number(node)
        case "gelu":  # by erf, for a Linear without another user, infinite values are right
            x, is_by_erf = given["input"], given.get("approximate", "none") == "none"
            return not is_by_erf or operators.name(x) != "linear" or len(uses[x]) > 1
        case "leaky_relu":
            return bool(given.get("negative_slope", 0.01) == 0)
        case "sigmoid":
            return not _is_of_product(node, uses)
        case called:
            return called in _ISOLATED or (called in CLAMPS and not is_finite)


def _isolate(node: Node) -> None:
    """Put a function that returns its input, and that oneDNN Graph does not know, around a node.

    It does not compute a single function other than a product.
    """
    graph = node.graph
    with graph.inserting_before(node):
        for term in filter(is_real, node.all_input_nodes):
            node.replace_input_with(term, graph.call_function(torch.positive, (term,)))
    with graph.inserting_after(node):
        result = graph.call_function(torch.positive, (node,))
    node.replace_all_uses_with(result, lambda user: user is not result)


def _is_of_product(node: Node, uses: Mapping[Node, Sequence[Node]]) -> bool:
    """Whether a sigmoid has the result of a product to itself, or multiplies it, as SiLU does.

    Of other values, oneDNN Graph makes numbers of NaN in some groups.
    """
    x = node.all_input_nodes[0]
    if operators.name(x) not in ("linear", "addmm", *operators.CONVOLUTIONS):
        return False
    return all(
        user is node or (operators.name(user) == "mul" and {*user.args} == {x, node})
        for user in uses[x]
    )


def _is_quotient_by_number(node: Node) -> bool:
    """Whether a node divides a tensor of its dtype by a number, or a number by such a tensor."""
    if len(node.args) != 2 or node.kwargs:
        return False
    first, second = node.args
    return any(
        isinstance(number, int | float) and _is_alike(tensor, node)
        for number, tensor in ((first, second), (second, first))
    )


def _is_alike(given: Any, node: Node) -> bool:
    """Whether an argument is a tensor of floating-point numbers in the dtype of the result."""
    return is_real(given) and bool(operators.value(given).dtype == operators.value(node).dtype)


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
    terms = node.all_input_nodes
    if len(terms) != 2 or not all(map(is_real, terms)):
        return False
    needed = operators.dependencies([node])
    fused = _fused_with(terms)
    taken = {each for other in (node, *fused) for each in other.all_input_nodes if fused}
    return any(
        term.op != "placeholder" and _may_be_overwritten(uses[term], needed) for term in terms
    ) or any(_may_be_taken_twice(uses[each], needed) for each in taken)


def _may_be_overwritten(users: Sequence[Node], needed: set[Node]) -> bool:
    """Whether a sum may be written over a term with these users before all have read it.

    oneDNN Graph writes the sum of a product and another of its values over the latter, and torch,
    which also reorders its groups, does not check who else uses that value. A term is safe if all
    that uses it is needed for the sum, or if a function of ours uses it: then it is an ordinary
    torch tensor.
    """
    return not any(map(operators.is_own, users)) and not needed.issuperset(users)


def _may_be_taken_twice(users: Sequence[Node], needed: set[Node]) -> bool:
    """Whether what enters a group before its sum may also be an operand of what follows the sum.

    torch ends the process then, as for ``(conv(x) + y) * x``, ``(conv(x) * p + y) * p`` and
    ``(linear(x) + p) + p``.
    """
    return any(
        user not in needed and not operators.is_own(user) and not _is_product(user)
        for user in users
    )


def _fused_with(terms: Sequence[Node]) -> set[Node]:
    """The nodes that may be in one group with the sum of these terms, if a product is."""
    pending, found = list(terms), set()
    while pending:
        node = pending.pop()
        if node not in found and (_is_product(node) or not any(map(_is_product, node.users))):
            found.add(node)
            pending += [] if _is_product(node) else node.all_input_nodes
    return found if any(map(_is_product, found)) else set()


def _is_product(node: Node) -> bool:
    return operators.name(node) in (*PRODUCTS, "matmul", "mm", "bmm")
