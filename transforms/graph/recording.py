"""Runs a graph once, and records the strides that its plan must keep.

Results of oneDNN, and of functions that write over their input, may have other strides than torch's
results, and later code may depend on strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx
from torch.fx import GraphModule, Node

from transforms.graph.products import Product, cast
from transforms.rewrites.post_ops import NO_OP


class Layouts(NamedTuple):
    """The layouts recorded for one shape of the inputs."""

    shapes: dict[str, tuple[int, ...]]
    """The shape of the input of each convolution that may be packed, by its name."""
    steady: frozenset[tuple[str, str]]
    """Names of functions and of their inputs with equal strides."""


class Recorder(fx.Interpreter):
    """Runs a graph unchanged, and records shapes and strides."""

    def __init__(self, graph: GraphModule, products: Sequence[Product]) -> None:
        super().__init__(graph)
        self._convolutions = {each.node: each for each in products if each.is_convolution}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._steady: set[tuple[str, str]] = set()

    @property
    def layouts(self) -> Layouts:
        """The layouts that the run showed."""
        return Layouts(self._shapes, frozenset(self._steady))

    def run_node(self, n: Node) -> Any:
        """Run a node, and compare strides."""
        result = super().run_node(n)
        if n in self._convolutions and isinstance(result, Tensor):
            self._pack(self._convolutions[n], result)
        if isinstance(result, Tensor):
            for each in n.all_input_nodes:
                given = self.env.get(each)
                if isinstance(given, Tensor) and given.stride() == result.stride():
                    self._steady.add((n.name, each.name))
        return result

    def _pack(self, product: Product, expected: Tensor) -> None:
        x: Tensor = self.env[product.x]
        if x.numel() == 0:
            return
        bias = None if product.bias is None else cast(self.env[product.bias], product.dtype)
        pack, args = product.packing(self.env[product.weight], x.shape)
        try:
            operator, args = product.call(x.to(product.dtype), pack(*args), bias, NO_OP)
            result = operator(*args)
        except RuntimeError:  # torch computes some geometries that oneDNN does not
            return
        if result.stride() == expected.stride():
            self._shapes[product.node.name] = tuple(x.shape)
