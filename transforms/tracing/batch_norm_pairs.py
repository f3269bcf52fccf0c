"""Finds the convolution or Linear that feeds a BatchNorm, and nothing else.

Two modules are a pair only if every use of either is a call of both: see docs/design/folding.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from transforms.tracing.calls import Calls, describe
from transforms.tracing.modules import (
    BATCH_NORMS,
    COMPUTED,
    NO_PARAMETER,
    Kinds,
    computes_like,
    frozen_batch_norms,
    has_computed_tensors,
    has_hooks,
    has_own_parameters,
    is_batch_norm,
)
from transforms.tracing.trace import reads_shape


class Pairs(NamedTuple):
    """The BatchNorms of a model, and the modules that feed them."""

    feeders: dict[nn.Module, nn.Module]
    """For each BatchNorm, the module whose output goes to it and nowhere else."""
    reasons: dict[nn.Module, tuple[nn.Module | None, str]]
    """For each BatchNorm without such a module, the module before it, if known, and the reason."""


def find_batch_norm_pairs(model: nn.Module, kinds: Kinds) -> Pairs:
    """Find the module of these ``kinds`` that feeds each BatchNorm of ``model``, in eval mode."""
    norms = [m for m in model.modules() if is_batch_norm(m)]
    pairs = Pairs({}, {})
    if norms:
        calls = Calls(model, frozen_batch_norms())
        for norm in norms:
            feeder, reason = _feeder(norm, calls, kinds)
            if reason is None and feeder is not None:
                pairs.feeders[norm] = feeder
            else:
                pairs.reasons[norm] = (feeder, reason or "nothing feeds it")
    return pairs


def _feeder(norm: nn.Module, calls: Calls, kinds: Kinds) -> tuple[nn.Module | None, str | None]:
    """The module that feeds ``norm``, and why the two are not a pair, if they are not."""
    if not computes_like(norm, (*BATCH_NORMS, *frozen_batch_norms())):
        return None, f"{type(norm).__name__} overrides its methods"
    if norm not in calls.of:
        return None, calls.doubtful.get(norm, "forward does not call it")
    sources = [_source(node) for node in calls.of[norm]]
    feeders = {calls.module_of.get(source) for source in sources if source is not None}
    feeder = feeders.pop() if len(feeders) == 1 and None not in sources else None
    if feeder is None or not isinstance(feeder, kinds):
        follows = {describe(source, calls) for source in sources}
        return None, f"follows {' and '.join(sorted(follows))}, not a convolution or Linear"
    return feeder, _objection(norm, feeder, calls, kinds)


def _objection(norm: nn.Module, feeder: nn.Module, calls: Calls, kinds: Kinds) -> str | None:
    """Why ``norm`` and the module before it are not a pair, if they are not."""
    if has_computed_tensors(feeder):
        return f"{calls.name(feeder)} {COMPUTED}"
    if not has_own_parameters(feeder):
        return f"{calls.name(feeder)} {NO_PARAMETER}"
    if not computes_like(feeder, kinds):
        return f"{calls.name(feeder)} ({type(feeder).__name__}) overrides its methods"
    for module in (norm, feeder):
        if has_hooks(module):
            return f"{calls.name(module)} has hooks, which would see different values"
        if module in calls.read:
            return f"{calls.name(module)} has tensors that forward reads directly"
    if not isinstance(feeder, nn.Linear) and any(
        _inputs(n)[0] is not _source(n) for n in calls.of[norm]
    ):
        return f"{calls.name(feeder)}'s output is flattened, including its channels"
    for node in calls.of[feeder]:
        for user in _users(node):
            if calls.module_of.get(user) is not norm:
                return f"{calls.name(feeder)} also feeds {describe(user, calls)}"
    values = [between for node in calls.of[feeder] for between in _same_rows(node)]
    if (reason := calls.escape(feeder, values)) is not None:
        return reason
    for module in (norm, feeder):
        if module in calls.doubtful:
            return f"{calls.name(module)}: {calls.doubtful[module]}"
    return None


def _source(call: fx.Node) -> fx.Node | None:
    """The node that feeds a BatchNorm's call, directly or through flattening."""
    inputs = _inputs(call)
    node = inputs[0] if len(inputs) == 1 else None
    while isinstance(node, fx.Node) and _flattens(node):
        node = node.args[0]
    return node if isinstance(node, fx.Node) else None


def _inputs(call: fx.Node) -> list[Any]:
    return [*call.args, *call.kwargs.values()]


def _same_rows(node: fx.Node) -> Iterator[fx.Node]:
    """``node``, and the nodes that only flatten it."""
    yield node
    for user in node.users:
        if _flattens(user) and user.args[0] is node:
            yield from _same_rows(user)


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """All uses of the values of ``node``, except flattening and reading the shape."""
    for same in _same_rows(node):
        for user in same.users:
            if not _flattens(user) and not reads_shape(user, same):
                yield user


def _flattens(node: fx.Node) -> bool:
    """Whether the node is a flattening such as ``flatten(0, 1)`` that keeps the last dimension.

    Flattening two dimensions would leave one, for which a BatchNorm raises.
    """
    if node.target not in ("flatten", torch.flatten) or len(node.args) != 3 or node.kwargs:
        return False
    return tuple(node.args[1:]) in ((0, 1), (0, -2))
