"""Finds the convolution or Linear that feeds an activation, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import fx, nn

from transforms.tracing.calls import Calls, describe
from transforms.tracing.modules import Kinds, has_hooks
from transforms.tracing.trace import reads_shape

_FUNCTIONS = {"relu", "relu6", "hardtanh", "leaky_relu", "gelu", "silu", "hardswish"}
_FUNCTIONS |= {"hardsigmoid", "sigmoid", "tanh"}
"""The names of torch's functions and methods that are activations, without a trailing "_"."""


class Activations(NamedTuple):
    """The activations of a model, and the modules that feed them."""

    after: dict[nn.Module, nn.Module]
    """For each module, the activation that is the only user of its output."""
    reasons: dict[nn.Module, str]
    """For each activation that follows no module, the reason."""
    functions: dict[nn.Module, str]
    """For each module that feeds an activation which is a function, its name."""


def find_activations(model: nn.Module, feeders: Kinds, kinds: Kinds) -> Activations:
    """Find what feeds each activation of these ``kinds``, in eval mode.

    An activation may be called in several places, after several modules.
    """
    activations = [m for m in model.modules() if isinstance(m, kinds)]
    found = Activations({}, {}, {})
    if not activations and not any(isinstance(m, feeders) for m in model.modules()):
        return found  # without tracing, which takes time
    calls = Calls(model, kinds)
    objections: dict[nn.Module, str] = {}
    for feeder in calls.of:
        if not isinstance(feeder, feeders):
            continue
        users = [user for node in calls.of[feeder] for user in _users(node)]
        followers = {calls.module_of.get(user) for user in users}
        functions = {describe(user, calls) for user in users if _name(user) in _FUNCTIONS}
        if functions:
            found.functions[feeder] = " and ".join(sorted(functions))
        for activation in followers & set(activations):
            assert activation is not None
            reason = _objection(feeder, activation, followers, calls)
            if reason is None:
                found.after[feeder] = activation
            else:
                objections[activation] = reason
    for activation in set(activations) - set(found.after.values()):
        found.reasons[activation] = objections.get(activation) or _what_precedes(activation, calls)
    return found


def _objection(
    feeder: nn.Module, activation: nn.Module, followers: set[nn.Module | None], calls: Calls
) -> str | None:
    """Why a module cannot apply the activation after it, if it cannot."""
    name = calls.name(feeder)
    for module in (feeder, activation):
        if has_hooks(module):
            return f"{calls.name(module)} has hooks, which would see different values"
    if len(followers) > 1:
        users = (user for node in calls.of[feeder] for user in _users(node))
        others = {describe(u, calls) for u in users if calls.module_of.get(u) is not activation}
        return f"{name} also feeds {' and '.join(sorted(others))}"
    if (reason := calls.escape(feeder, calls.of[feeder])) is not None:
        return reason
    if feeder in calls.doubtful:
        return f"{name}: {calls.doubtful[feeder]}"
    return None


def _name(node: fx.Node) -> str | None:
    """The name of the function or method that a node calls, without a trailing "_"."""
    if node.op == "call_method":
        return str(node.target).removesuffix("_")
    if node.op == "call_function":
        return getattr(node.target, "__name__", "").removesuffix("_")
    return None


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """All uses of a value, except reading its shape."""
    return (user for user in node.users if not reads_shape(user, node))


def _what_precedes(activation: nn.Module, calls: Calls) -> str:
    if activation not in calls.of:
        return calls.doubtful.get(activation, "forward does not call it")
    sources = (node.args[0] for node in calls.of[activation] if node.args)
    named = {describe(s, calls) for s in sources if isinstance(s, fx.Node)}
    return f"follows {' and '.join(sorted(named)) or 'no value'}, not a module with packed weights"
