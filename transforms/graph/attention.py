"""Attention in 16 bits as two products of oneDNN and a softmax, where that is faster.

torch's attention kernel for CPUs multiplies block by block, which makes little use of 16-bit
instructions, except by tiles (AMX): there it takes half the time of the products. Here the scores
are rounded to 16 bits, as in a model that computes attention by single operations. With an infinite
key, torch's kernel for 16 bits returns numbers. This module returns NaN, as torch's kernel for
float32 does.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fusedoptim._processor import has_tiles
from transforms.graph import operators
from transforms.graph.operators import is_tensor, value
from transforms.rewrites.packed import supported_dtypes

_NAMES = operators.PARAMETERS[operators.ATTENTION]
_LEAST_SCORES, _MOST_KEYS = 1 << 17, 512
"""The fewest scores and the most keys for which the products are faster than torch's kernel."""


@operators.own
def attention(query: Tensor, key: Tensor, values: Tensor, scale: float) -> Tensor:
    r""":math:`\mathrm{softmax}(\mathrm{scale}\, Q K^T)\, V`, laid out as torch's result is.

    Args:
        query: (batch, heads, queries, width).
        key: (batch, heads, keys, width).
        values: (batch, heads, keys, width).
        scale: the factor of the scores.
    """
    batch, heads, rows, width = query.shape
    q, k, v = (t.flatten(0, 1) for t in (query, key, values))
    unused = q.new_empty(())  # as beta is 0
    scores = torch.baddbmm(unused, q, k.transpose(1, 2), beta=0, alpha=scale)
    products = torch.bmm(torch.softmax(scores, -1), v)
    result = q.new_empty(batch, rows, heads, width).transpose(1, 2)
    return result.copy_(products.view(result.shape))


def split_attention(graph: Graph) -> int:
    """Replace calls of attention in 16 bits by products; return how many were replaced."""
    count = 0
    for node in list(graph.nodes):
        if operators.name(node) == operators.ATTENTION:
            count += _split(graph, node)
    return count


def _split(graph: Graph, node: Node) -> bool:
    given: dict[str, Any] = {**dict(zip(_NAMES, node.args)), **node.kwargs}
    inputs = [given.pop(name, None) for name in _NAMES[:3]]
    scale = given.pop("scale", None)
    if len(node.args) > len(_NAMES) or any(given.values()) or not _fits(node, inputs):
        return False
    width = value(inputs[0]).shape[-1]
    if scale is None and isinstance(width, int):
        scale = 1 / math.sqrt(width)
    if not isinstance(scale, float):
        return False
    with graph.inserting_before(node):
        result = graph.call_function(attention, (*inputs, scale))
    operators.replace(node, result)
    return True


def _fits(node: Node, inputs: list[Any]) -> bool:
    """Whether the tensors are of a kind for which products are faster."""
    if not all(map(is_tensor, (node, *inputs))):
        return False
    tensors = [value(each) for each in inputs]
    q, k, v = tensors
    sizes = *q.shape, *k.shape, *v.shape
    dtype = value(node).dtype
    if dtype == torch.float32 or dtype not in supported_dtypes() or has_tiles():
        return False
    if any(t.dim() != 4 or t.dtype != dtype or t.device.type != "cpu" for t in tensors):
        return False
    if any(t.shape[:2] != q.shape[:2] for t in tensors):
        return False
    if not all(isinstance(n, int) for n in sizes):
        return False
    if v.shape[3] != q.shape[3]:  # torch computes it by single operations
        return False
    scores = math.prod(q.shape[:3]) * k.shape[2]
    return bool(k.shape[2] <= _MOST_KEYS and scores >= _LEAST_SCORES)
