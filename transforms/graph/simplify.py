"""Removes what does nothing in eval mode, and calls torch's functions without their wrappers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from transforms.graph import operators
from transforms.graph.operators import arguments, is_fresh, is_tensor, value

_F = torch.nn.functional
_NN = torch._C._nn
_DROPOUTS = (
    *("dropout", "dropout1d", "dropout2d", "dropout3d"),
    *("alpha_dropout", "feature_alpha_dropout"),
)
WAS_IN_PLACE = "fusedoptim_was_in_place"
"""In the metadata of a node that wrote its result over its first argument."""
_LOGGING = "_log_api_usage_once"
_PURE: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    torch.relu_: torch.relu,
    torch.sigmoid_: torch.sigmoid,
    torch.tanh_: torch.tanh,
}
_PURE_NAMES = (
    *("add_", "div_", "mul_", "sub_"),
    *("elu_", "hardsigmoid_", "hardswish_", "hardtanh_", "leaky_relu_", "mish_"),
    *("relu6_", "relu_", "sigmoid_", "silu_", "tanh_"),
)


def drop_dropouts(graph: Graph) -> None:
    """Remove Dropouts that return their input."""
    for node in list(graph.nodes):
        called = operators.name(node)
        if called is None or called.removesuffix("_") not in _DROPOUTS:
            continue
        given = arguments(node)
        if given.get("training") is False and isinstance(given["input"], Node):
            node.replace_all_uses_with(given["input"])
            graph.erase_node(node)


def drop_logging(graph: Graph) -> None:
    """Remove torchvision's calls that count uses of its functions, as it would not while traced."""
    for node in list(graph.nodes):
        if getattr(node.target, "__name__", "") == _LOGGING and not node.users:
            graph.erase_node(node)


_CASTS = {
    "to": None,
    "bfloat16": torch.bfloat16,
    "double": torch.float64,
    "float": torch.float32,
    "half": torch.float16,
}
"""Methods that convert to a dtype, which is the argument of ``to``."""


def drop_casts(graph: Graph) -> None:
    """Remove conversions of tensors to the dtype that they have, which return them unchanged."""
    for node in list(graph.nodes):
        if node.op != "call_method" or node.target not in _CASTS or node.kwargs:
            continue
        tensor, *given = node.args
        dtype = _CASTS[node.target]
        wanted = given if dtype is None else [dtype, *given]
        if isinstance(tensor, Node) and is_tensor(tensor) and wanted == [value(tensor).dtype]:
            node.replace_all_uses_with(tensor)
            graph.erase_node(node)


def purify(graph: Graph) -> None:
    """Replace in-place functions by pure ones where nothing else can see the overwritten value.

    The remaining writes are those whose order matters.
    """
    for node in list(graph.nodes):
        called = operators.name(node)
        if called in _PURE_NAMES and _overwrites_its_own(node):
            _make_pure(node)


def _overwrites_its_own(node: Node) -> bool:
    target = node.args[0] if node.args else None
    if not isinstance(target, Node) or not is_tensor(target) or len(target.users) != 1:
        return False
    others = [each for each in node.all_input_nodes if each is not target]
    before = value(target)
    return (
        is_fresh(target)
        and before.is_floating_point()
        and sum(each is target for each in (*node.args, *node.kwargs.values())) == 1
        and all(is_tensor(each) and value(each).dtype == before.dtype for each in others)
        and not any(isinstance(each, complex) for each in node.args)
    )


def _make_pure(node: Node) -> None:
    if node.op == "call_method":
        node.target = str(node.target).removesuffix("_")
    elif node.target in _PURE:
        node.target = _PURE[node.target]
    else:
        given = arguments(node)
        if not given.pop("inplace", False):
            return
        node.args, node.kwargs = (given.pop("input"),), given
    node.meta[WAS_IN_PLACE] = True


def _batch_norm(a: dict[str, Any]) -> tuple[Any, ...]:
    stats = (a["running_mean"], a["running_var"])
    numbers = (a["training"], a["momentum"], a["eps"], torch.backends.cudnn.enabled)
    return torch.batch_norm, a["input"], a["weight"], a["bias"], *stats, *numbers


def _layer_norm(a: dict[str, Any]) -> tuple[Any, ...]:
    affine = (a["weight"], a["bias"])
    return torch.layer_norm, a["input"], a["normalized_shape"], *affine, a["eps"]


def _embedding(a: dict[str, Any]) -> tuple[Any, ...]:
    none = -1  # padding_idx matters for gradients only
    options = (none, a["scale_grad_by_freq"], a["sparse"])
    return torch.embedding, a["weight"], a["input"], *options


_SHORT: dict[Any, Callable[[dict[str, Any]], tuple[Any, ...]]] = {
    _F.relu: lambda a: (torch.relu, a["input"]),
    _F.relu6: lambda a: (_NN.relu6, a["input"]),
    _F.silu: lambda a: (_NN.silu, a["input"]),
    _F.hardswish: lambda a: (_NN.hardswish, a["input"]),
    _F.hardsigmoid: lambda a: (_NN.hardsigmoid, a["input"]),
    _F.layer_norm: _layer_norm,
    _F.batch_norm: _batch_norm,
    _F.embedding: _embedding,
}
"""For functions in Python, the function in C++ that they call, and its arguments."""


def shorten(graph: Graph) -> None:
    """Call functions in C++ where torch's wrappers in Python would only check their arguments."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _SHORT or operators.is_writing(node):
            continue
        given = arguments(node)
        if given.get("inplace") or given.get("max_norm") is not None:
            continue
        node.target, *args = _SHORT[node.target](given)
        node.args, node.kwargs = tuple(args), {}
