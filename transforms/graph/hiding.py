"""Hides from oneDNN Graph what it would compute differently from torch.

It recognizes functions by their names in TorchScript. What replaces a hidden function computes the
same bits under names that it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node, map_arg

from transforms.graph import operators
from transforms.graph.bounds import CLAMPS, PRODUCTS, is_real


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


def _clamp(input: Tensor, min: Any = None, max: Any = None) -> Tensor:  # noqa: A002
    if min is not None:
        input = torch.clamp_min(input, min)  # noqa: A001
    return input if max is None else torch.clamp_max(input, max)


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


def _sigmoid(input: Tensor) -> Tensor:  # noqa: A002
    return torch.positive(torch.sigmoid(input))  # a group ends before what it does not know


def _quotient(input: Tensor, other: Tensor) -> Tensor:  # noqa: A002
    (result,) = torch._foreach_div([input], [other])
    return result


_HIDDEN: dict[str, Callable[..., Tensor]] = {
    "relu": _relu,
    "relu_": _relu_,
    "relu6": _relu6,
    "relu6_": _relu6_,
    "hardtanh": _hardtanh,
    "hardtanh_": _hardtanh_,
    "clamp": _clamp,
    "max_pool2d": _max_pool2d,
    "layer_norm": _layer_norm,
    "sigmoid": _sigmoid,
}
"""For functions that oneDNN Graph computes differently for NaN: equals that it does not know."""


def hide(graph: Graph, is_finite: bool) -> None:
    """Change a graph so that oneDNN Graph computes nothing in it differently from torch.

    Args:
        graph: the graph.
        is_finite: whether no value up to the last clamp is NaN or infinite.
    """
    uses = _uses(graph)
    for node in graph.nodes:
        called = operators.name(node) or ""
        if not operators.is_tensor(node) or (is_finite and called in CLAMPS):
            continue
        hidden = _HIDDEN.get(called)
        if called in _SUMS:
            hidden = _SUMS[called] if _is_unsafe(node, uses) else None
        elif called == "div":
            hidden = _quotient if _is_quotient_of_tensors(node) else None
        elif called == "sigmoid" and _is_of_product(node, uses):
            hidden = None
        if hidden is not None:
            node.op, node.target = "call_function", hidden


def can_be_hidden(graph: Graph) -> bool:
    """Whether :func:`hide` knows another name for all that oneDNN Graph computes differently."""
    uses = _uses(graph)
    for node in graph.nodes:
        given = operators.arguments(node)
        match operators.name(node):
            case "gelu":  # by erf, for a Linear without another user, infinite values are right
                x, is_by_erf = given["input"], given.get("approximate", "none") == "none"
                if not is_by_erf or operators.name(x) != "linear" or len(uses[x]) > 1:
                    return False
            case "leaky_relu" if given.get("negative_slope", 0.01) == 0:  # of NaN it makes numbers
                return False
            case "div" if not (_is_quotient_of_tensors(node) or _is_quotient_by_number(node)):
                return False  # it may convert or round, which oneDNN Graph does not
    return True


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


def _is_quotient_of_tensors(node: Node) -> bool:
    """Whether a node divides one tensor of its dtype by another."""
    terms = node.args
    return len(terms) == 2 and not node.kwargs and all(_is_alike(each, node) for each in terms)


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
    terms = node.all_input_nodes
    if len(terms) != 2 or not all(map(is_real, terms)):
        return False
    needed = operators.dependencies([node])
    return any(
        term.op != "placeholder" and _may_be_overwritten(uses[term], needed) for term in terms
    ) or any(
        _may_be_taken_twice(uses[each], needed)
        for product in _fused_products(terms)
        for each in product.all_input_nodes
    )


def _may_be_overwritten(users: Sequence[Node], needed: set[Node]) -> bool:
    """Whether a sum may be written over a term with these users before all have read it.

    oneDNN Graph writes the sum of a product and another of its values over the latter, and torch,
    which also reorders its groups, does not check who else uses that value. A term is safe if all
    that uses it is needed for the sum, or if a function of ours uses it: then it is an ordinary
    torch tensor.
    """
    return not any(map(operators.is_own, users)) and not needed.issuperset(users)


def _may_be_taken_twice(users: Sequence[Node], needed: set[Node]) -> bool:
    """Whether a product's input may also be an operand of what follows the sum in its group.

    torch ends the process then, as for ``(conv(x) + y) * x``.
    """
    return any(
        user not in needed and not operators.is_own(user) and not _is_product(user)
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
