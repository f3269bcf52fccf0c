"""Registers an operator and its gradient with torch, for calls of few elements.

``torch.library.custom_op`` does the same with wrappers that look at all arguments and results in
each call: docs/design/dropout.md has what they cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusedoptim._torch_private import (
    BelowAutograd,
    any_requires_grad,
    disable_dynamo,
    keys_after_autograd,
)
from fusedoptim.ops._launching import DEVICES

_NAMESPACE = "fusedoptim"
_library: Any = torch.library.Library(_NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]  # untyped in torch


def register(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    setup_context: Callable[..., None],
    backward: Callable[..., Sequence[Any]],
    tags: Sequence[torch.Tag] = (),
) -> Any:
    """Register an operator.

    Args:
        schema: of the operator, which changes none of its arguments; no argument has a default.
        kernel: its implementation on all devices; the result shares no memory with an argument.
        fake: its implementation without values.
        setup_context: as :func:`torch.library.register_autograd` has it.
        backward: the gradients of all arguments; also as there.
        tags: of the operator.

    Returns:
        the operator.
    """
    _library.define(schema, tags=tags)
    name = schema.partition("(")[0]
    qualified = f"{_NAMESPACE}::{name}"
    torch.library.impl(qualified, DEVICES, func=disable_dynamo(kernel), lib=_library)
    torch.library.register_fake(qualified, fake, lib=_library)
    operator = getattr(getattr(torch.ops, _NAMESPACE), name).default

    def forward(ctx: Any, keys: Any, *inputs: Any) -> Any:
        with BelowAutograd():
            output = operator.redispatch(keys, *inputs)
        setup_context(ctx, inputs, output)
        return output

    def gradients(ctx: Any, *grads: Any) -> Any:
        return None, *backward(ctx, *grads)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(gradients)}
    recorded: Any = type(name, (torch.autograd.Function,), methods)

    def differentiable(keys: Any, *inputs: Any) -> Any:
        keys = keys & keys_after_autograd
        if torch.is_grad_enabled() and any_requires_grad(*inputs):
            return recorded.apply(keys, *inputs)
        with BelowAutograd():
            return operator.redispatch(keys, *inputs)

    _library.impl(name, differentiable, "Autograd", with_keyset=True)
    return operator
