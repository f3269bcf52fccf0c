"""Registers an operator and its gradient with torch, for calls of few elements.

``torch.library.custom_op`` does the same with wrappers that look at all arguments and results in
each call. docs/design/dropout.md says what they cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusedoptim._torch_private import (
    BelowAutograd,
    TensorGuards,
    any_requires_grad,
    disable_dynamo,
    is_batched,
    is_forward_mode,
    is_plain_execution,
    is_zero_tensor,
    keys_after_autograd,
    profiler_enabled,
    sparse_keys,
)
from fusedoptim.ops._arguments import check_tensors
from fusedoptim.ops._launching import DEVICES
from fusedoptim.step.tensors import has_tangent
from fusedoptim.step.unchanged import may_be_compared

_NAMESPACE = "fusedoptim"
_NO_LIST = -1
_NOT_DENSE = ("MkldnnCPU", *(key for kind in DEVICES for key in sparse_keys(kind)))
"""The dispatch keys of tensors without addresses that kernels could read."""
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_OTHERS = frozenset((list, tuple, bool, int, float, type(None)))
"""Types, besides tensors, that torch's dispatcher does not treat specially."""
_MOST_LISTS = 256
_lists: dict[Any, TensorGuards] = {}
"""Checks, in one call, that a list is like an earlier one whose tensors were memory. Looking at
each tensor of a long list takes longer."""
_library: Any = torch.library.Library(_NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]  # untyped in torch


def register(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    setup_context: Callable[..., None],
    backward: Callable[..., Sequence[Any]],
    tags: Sequence[torch.Tag] = (),
    direct: Callable[..., Any] | None = None,
) -> Any:
    """Register an operator.

    Args:
        schema: the operator's schema. The operator changes none of its arguments, and none has a
            default. It may take lists of tensors, and return one.
        kernel: its implementation on all devices; no result shares memory with an argument, nor
            with another result. It refuses tensors of different devices: plain calls
            (:func:`is_plain`) go around torch's dispatcher, which takes longer than a short kernel.
            Tensors that are not dense are refused for it, by the names that the schema gives them.
        fake: its implementation without values.
        setup_context: as :func:`torch.library.register_autograd` has it.
        backward: the gradients of all arguments, as :func:`torch.library.register_autograd` has it:
            for a list of tensors a list, or None if none of them requires grad. The gradient of an
            unused result is None. :func:`needed` says what to compute.
        tags: the operator's tags.
        direct: what plain calls run instead of ``kernel``. Its first argument is the context of the
            backward pass, to keep what that can reuse, or None. Autograd records no gradients
            there, but does track views: results must not be views, or must be made within
            :data:`BelowAutograd`, which takes longer than making a small tensor.

    Returns:
        a function that calls the operator or its kernel.
    """
    operator = register_without_gradient(schema, kernel, fake, tags)
    name = schema.partition("(")[0]
    takes_lists = "Tensor[]" in schema.partition("->")[0]
    returns_list = schema.endswith("[]")

    def run(ctx: Any, keys: Any, *inputs: Any) -> Any:
        if keys is None and direct is not None:
            return direct(ctx, *inputs)
        with BelowAutograd():
            return kernel(*inputs) if keys is None else operator.redispatch(keys, *inputs)

    recorded = _recorded(name, run, setup_context, backward, returns_list)

    def recorded_if_needed(keys: Any, *inputs: Any) -> Any:
        if torch.is_grad_enabled() and any_requires_grad(*inputs):
            if not takes_lists:
                return recorded.apply(keys, None, *inputs)
            # A list of which no tensor requires grad is passed as one value: each tensor that
            # autograd looks at takes time.
            sizes = [
                len(x) if _is_list_of_tensors(x) and any_requires_grad(*x) else _NO_LIST
                for x in inputs
            ]
            outputs = recorded.apply(keys, sizes, *_flat(inputs, sizes))
            return list(outputs) if returns_list else outputs
        return run(None, keys, *inputs)

    def differentiable(keys: Any, *inputs: Any) -> Any:
        if is_forward_mode():
            _refuse_tangents(name, inputs)
        return recorded_if_needed(keys & keys_after_autograd, *inputs)

    def call(*inputs: Any) -> Any:
        if is_plain(*inputs):
            return recorded_if_needed(None, *inputs)
        return operator(*inputs)

    _library.impl(name, differentiable, "Autograd", with_keyset=True)
    return call


def _recorded(
    name: str,
    run: Callable[..., Any],
    setup_context: Callable[..., None],
    backward: Callable[..., Sequence[Any]],
    returns_list: bool,
) -> Any:
    """The autograd function of an operator.

    Its arguments are the dispatch keys for ``run``, the sizes by which :func:`_flat` has flattened
    the inputs, or None if it has not, and the inputs.
    """

    def forward(ctx: Any, keys: Any, sizes: Sequence[int] | None, *flat: Any) -> Any:
        inputs = flat if sizes is None else _in_lists(flat, sizes)
        output = run(ctx, keys, *inputs)
        ctx.sizes = sizes
        ctx.set_materialize_grads(False)
        setup_context(ctx, inputs, output)
        return tuple(output) if returns_list else output

    def gradients(ctx: Any, *grads: Any) -> Any:
        if grads[0] is None and all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        found = backward(ctx, *grads)
        return None, None, *(found if ctx.sizes is None else _flat(found, ctx.sizes))

    methods = {"forward": staticmethod(forward), "backward": staticmethod(gradients)}
    return type(name, (torch.autograd.Function,), methods)


def directly(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel whose results are new tensors, not views, as ``direct`` of :func:`register`."""
    return lambda _, *inputs: kernel(*inputs)


def is_plain(*inputs: Any) -> bool:
    """Whether torch would only record gradients and run the kernel, on tensors that are memory.

    All tensors of a list must be on one device.
    """
    if not is_plain_execution() or profiler_enabled():
        return False
    for value in inputs:
        kind = type(value)
        if kind in _TENSORS:
            # is_cpu, which decides nothing, takes a quarter of the time of device.type.
            if not value.is_cpu and value.device.type not in DEVICES:
                return False
            if value.is_neg() or is_zero_tensor(value) or is_batched(value):
                return False
            if value.layout is not torch.strided:
                return False
        elif _is_list_of_tensors(value):
            if not _are_memory(value):
                return False
        elif kind not in _OTHERS:
            return False
    return True


def _are_memory(tensors: Sequence[torch.Tensor]) -> bool:
    if not may_be_compared(tensors):
        return False
    first = tensors[0]
    key = len(tensors), type(first), first.dtype, first.dim(), first.requires_grad
    guards = _lists.get(key)
    if guards is not None and guards.check(*tensors):
        return True
    are_memory = (
        _TENSORS.issuperset(map(type, tensors))
        and first.device.type in DEVICES
        and all(tensor.layout is torch.strided for tensor in tensors)
        and not any(map(torch.Tensor.is_neg, tensors))
        and not any(map(is_zero_tensor, tensors))
        and not any(map(is_batched, tensors))
    )
    if are_memory and guards is None and len(_lists) < _MOST_LISTS:
        _lists[key] = _guards_of_kinds(tensors)
    return are_memory


def _guards_of_kinds(tensors: Sequence[torch.Tensor]) -> TensorGuards:
    """A check that tensors are like these, except for sizes and strides."""
    any_sizes: Any = [[None] * tensor.dim() for tensor in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=any_sizes, dynamic_dims_strides=any_sizes)


def _refuse_tangents(name: str, inputs: Sequence[Any]) -> None:
    """Raise if forward-mode differentiation would lose a tangent: operators have no such rule."""
    for value in inputs:
        for tensor in value if _is_list_of_tensors(value) else (value,):
            if isinstance(tensor, torch.Tensor) and has_tangent(tensor):
                raise NotImplementedError(
                    f"{_NAMESPACE}::{name} has no forward-mode derivative, as torch.func.jvp needs "
                    "it; use backward() or torch.func.vjp, or call torch's own function"
                )


def needed(ctx: Any) -> list[Any]:
    """Whether each argument needs a gradient; for a list a list, or False if none of it does."""
    are_needed = ctx.needs_input_grad[2:]
    return list(are_needed) if ctx.sizes is None else _in_lists(are_needed, ctx.sizes)


def register_without_gradient(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    tags: Sequence[torch.Tag] = (),
) -> Any:
    """Register an operator that autograd does not see, such as one that a backward pass calls.

    Args:
        schema: the operator's schema, which says which arguments change.
        kernel: the operator's implementation, as for :func:`register`.
        fake: its implementation without values.
        tags: the operator's tags.

    Returns:
        the operator.
    """
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    name = schema.partition("(")[0]
    qualified = f"{_NAMESPACE}::{name}"
    torch.library.impl(qualified, DEVICES, func=disable_dynamo(kernel), lib=_library)
    torch.library.register_fake(qualified, fake, lib=_library)
    operator = getattr(getattr(torch.ops, _NAMESPACE), name).default

    def refuse(*inputs: Any) -> None:
        for argument, value in zip(operator._schema.arguments, inputs):
            if isinstance(value, torch.Tensor):
                check_tensors(name, **{argument.name: value})
            elif _is_list_of_tensors(value):
                check_tensors(name, **{f"{argument.name}[{k}]": x for k, x in enumerate(value)})

    for key in _NOT_DENSE:
        _library.impl(name, refuse, key)
    return operator


def _is_list_of_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], torch.Tensor)


def _flat(values: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
    """Values whose lists have these sizes, one after the other; None may stand for a list."""
    flat: list[Any] = []
    for value, size in zip(values, sizes):
        if size == _NO_LIST:
            flat.append(value)
        else:
            flat += [None] * size if value is None else value
    return flat


def _in_lists(flat: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
    """The inverse of :func:`_flat`."""
    values: list[Any] = []
    start = 0
    for size in sizes:
        stop = start + (1 if size == _NO_LIST else size)
        values.append(flat[start] if size == _NO_LIST else list(flat[start:stop]))
        start = stop
    return values
