"""Finds what follows each layer in INT8: an activation that it applies, a layer that it feeds."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from torch import nn

from transforms.rewrites.fused_activation import objection
from transforms.rewrites.int8 import CLASSES
from transforms.rewrites.post_ops import activations, post_op
from transforms.tracing.activations import find_activations
from transforms.tracing.asked import Asked


class Following(NamedTuple):
    """The only users of a layer's output."""

    activation: nn.Module | None = None
    layer: nn.Module | None = None
    """The next one in INT8, after the activation if there is one."""


def find_following(
    model: nn.Module, layers: Collection[nn.Module], asked: Asked
) -> dict[nn.Module, Following]:
    """What follows each of the layers that will compute in INT8.

    Args:
        model: a model in eval mode, with the layers' own classes.
        layers: the layers that will compute in INT8.
        asked: the modules that must keep their classes.
    """
    kinds, chosen = tuple(CLASSES), set(layers)
    known = activations(model)
    activated = find_activations(model, kinds, known).after
    fed = find_activations(model, (*kinds, *known), kinds).after
    found = {}
    for layer in layers:
        activation = activated.get(layer)
        if activation is not None and (post_op(activation) is None or objection(activation, asked)):
            activation = None
        following = fed.get(layer if activation is None else activation)
        found[layer] = Following(activation, following if following in chosen else None)
    return found
