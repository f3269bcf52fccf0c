"""The backend of torch.compile: makes a plan of a captured graph, or says why not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from transforms.graph.lowering import Parts
from transforms.graph.operators import records_gradients, value
from transforms.graph.plan import Plan
from transforms.graph.products import absent_operators, may_crash
from transforms.graph.sources import can_be_source
from transforms.rewrites.packed import missing_operators
from transforms.rewrites.schemas import difference
from transforms.rewrites.watched_parameter import WATCHABLE

__all__ = ["graph_backend"]

_PLAIN = (Tensor, *WATCHABLE)


def graph_backend(
    graph: GraphModule, example_inputs: Sequence[Any], **options: Any
) -> Callable[..., Any]:
    """Compile a graph for inference on the CPU: the backend "fusedoptim" of ``torch.compile``.

    It needs no C++ compiler. Convolutions and Linears compute with packed weights, and also apply
    the activation that follows, convolutions an addition too. BatchNorms are folded. Values that
    depend on parameters and buffers alone are computed once. Results are written over values that
    are no longer needed. Graphs with convolutions, in float32 or bfloat16, run in C++ from the
    second call with one shape on, and so do graphs with bfloat16 Linears, for their first shape;
    oneDNN Graph compiles their products. All other operators are torch's. Where gradients are
    recorded, the graph runs unchanged. Changes of the parameters are noticed before the next call,
    except direct collectives and writes past torch, as through NumPy arrays of them
    (docs/transforms.md).

    Args:
        graph: the graph that torch.compile captured.
        example_inputs: its inputs.
        **options: ``mode`` and ``options`` of ``torch.compile``, which this backend does not have.

    Returns:
        a function of the graph's inputs.

    Raises:
        ValueError: a mode or options.

    Example:
        >>> import torch
        >>> from fusedoptim import transforms
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU()).eval()
        >>> compiled = torch.compile(model, backend=transforms.graph_backend)
        >>> with torch.inference_mode():
        ...     compiled(torch.zeros(2, 3)).shape
        torch.Size([2, 4])

    ``backend="fusedoptim"`` is the same.
    """
    for name, given in options.items():
        raise ValueError(
            f"{name}={given!r}: the backend 'fusedoptim' has no {name}; omit it in torch.compile"
        )
    absent = why_absent()
    if absent is not None:
        warnings.warn(f"the backend 'fusedoptim' does nothing: {absent}", stacklevel=2)
        return graph.forward
    return plan(graph, example_inputs, Parts()) or graph.forward


def why_absent() -> str | None:
    """Why this torch cannot be used, if it cannot."""
    return difference([*missing_operators(), *absent_operators()])


def plan(graph: GraphModule, example_inputs: Sequence[Any], parts: Parts) -> Plan | None:
    """A plan for a captured graph; None if the graph has to run unchanged."""
    nodes = graph.graph.nodes
    if any(records_gradients(node) or _is_unsized(node) or may_crash(node) for node in nodes):
        return None
    tensors = [each for each in example_inputs if isinstance(each, Tensor)]
    if not all(type(each) in _PLAIN and each.layout == torch.strided for each in tensors):
        return None
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        return None
    placeholders = [node for node in nodes if node.op == "placeholder"]
    sources = [
        i
        for i, (node, given) in enumerate(zip(placeholders, example_inputs, strict=True))
        if _is_owned(node) and can_be_source(given)
    ]
    _detach_unnoticed(graph)
    return Plan(graph, sources, parts)


def _detach_unnoticed(graph: GraphModule) -> None:
    """Call the function for the method ``detach``, which a watched Parameter takes for a use."""
    for node in graph.graph.nodes:
        if node.op == "call_method" and node.target == "detach":
            node.op, node.target = "call_function", torch.detach
    graph.recompile()


def _is_unsized(node: Node) -> bool:
    """Whether a shape depends on values, and so cannot be told from the inputs' shapes."""
    result = value(node)
    sizes = result.shape if isinstance(result, Tensor) else (result,)
    if not any(isinstance(size, torch.SymInt) for size in sizes):
        return False
    # Not at the top: the import is slow, and torch.compile has already done it here.
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(result))


def _is_owned(node: Node) -> bool:
    """Whether dynamo marks an input as a parameter or buffer of a module."""
    return "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})
