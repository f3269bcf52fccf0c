"""Private names of torch's Python code that this package uses, and why no public one will do.

``tests/fusedoptim/test_torch_private.py`` has a test for each, which fails when torch changes it.
Some names that explain themselves are used where they are needed, such as the operator
``torch._foreach_norm`` and a tensor's ``_version``; a list of them, with their tests, is in
``tests/packaging/test_torch_private_names.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _get_dispatch_mode, _TorchDispatchModeKey
from torch._C._autograd import _profiler_enabled as profiler_enabled
from torch._C._autograd import _top_saved_tensors_default_hooks as saved_tensors_hooks
from torch._C._dynamo.guards import TensorGuards
from torch.autograd import forward_ad
from torch.optim.optimizer import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks as global_post_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks as global_pre_hooks
from torch.utils._device import DeviceContext

__all__ = [
    "HOOKS",
    "BelowAutograd",
    "BypassModes",
    "BypassSubclasses",
    "DeviceContext",
    "TensorGuards",
    "active_ddp",
    "active_modes",
    "any_requires_grad",
    "autocast_operators",
    "backward_pass",
    "count_function_modes",
    "count_modes",
    "disable_dynamo",
    "function_mode_at",
    "global_post_hooks",
    "global_pre_hooks",
    "graph_function",
    "has_bfloat16_products",
    "has_onednn_graph",
    "increment_version",
    "is_batched",
    "is_exported",
    "is_flattened",
    "is_forward_mode",
    "is_plain_execution",
    "is_zero_tensor",
    "keys_after_autograd",
    "local_tensor",
    "mark_flattened",
    "pop_function_mode",
    "profiler_enabled",
    "proxy_mode",
    "remove_hooks",
    "saved_tensors_hooks",
    "set_grad_enabled",
    "shard_spec",
    "softmax_backward",
    "sparse_keys",
    "storage_use_count",
    "traced_graph",
    "tracing_state",
    "transform_level",
    "use_onednn_graph",
    "with_shard",
    "without_dynamo",
]

# profiler_enabled: torch.optim wraps every step in a profiler range; we do so only while a profiler
#     records.
# saved_tensors_hooks: the innermost torch.autograd.graph.saved_tensors_hooks, or None. Its argument
#     says whether to ignore whether torch.compile is tracing.
# TensorGuards: torch.compile's guard, which compares class, dtype, device, shape, strides and the
#     conjugate and negative bits of a list of tensors in one call.
# DeviceContext: the mode that torch.set_default_device and "with torch.device(...)" activate.
# global_pre_hooks, global_post_hooks: what register_optimizer_step_pre_hook has registered.

disable_dynamo: Any = torch._disable_dynamo  # type: ignore[attr-defined]  # torch does not export it
"""torch.optim's own decorator of its steps; torch.compiler.disable would import all of dynamo."""

_FLATTENED = "_fsdp_flattened"
_UNTRACED: dict[Any, Any] = {
    method: getattr(method, "__wrapped__", method)
    for method in (
        Optimizer.add_param_group,
        Optimizer.load_state_dict,
        Optimizer.state_dict,
        Optimizer.zero_grad,
    )
}
"""Methods that torch decorates with ``disable_dynamo``, and the undecorated functions."""


def without_dynamo(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of torch.optim.Optimizer without its decorator, while nothing can be traced.

    The decorator imports torch._dynamo to tell it not to trace the method. The import takes longer
    than the first step of a process (docs/benchmarks/steps.md). As long as nothing else has
    imported torch._dynamo, nothing can trace, and the decorator is not needed.
    """
    untraced = _UNTRACED.get(getattr(method, "__func__", None))
    if untraced is None or "torch._dynamo" in sys.modules:
        return method
    return functools.partial(untraced, method.__self__)  # type: ignore[attr-defined]  # a bound method


set_grad_enabled = torch._C._set_grad_enabled
"""One C call. An interrupt in the Python code of torch.no_grad() leaves gradients disabled."""

increment_version = torch._C._increment_version
"""Tells autograd of writes that it did not see: torch.autograd.graph.increment_version without its
Python wrapper, which would be a large part of a small step."""

backward_pass = torch._C._current_graph_task_id
"""The number of the backward pass that the thread is in, or -1. Those of later ones are larger."""

storage_use_count: Any = getattr(torch._C, "_storage_Use_Count", None)
"""How many tensors share a storage, by its address; None if this torch cannot tell."""

count_modes = torch._C._len_torch_dispatch_stack
"""How many of the user's dispatch modes are active."""

count_function_modes = torch._C._len_torch_function_stack
"""How many modes of ``__torch_function__`` are active."""

pop_function_mode: Any = torch._C._pop_torch_function_stack
"""Ends the innermost of them; an interrupt in the Python code of its ``__exit__`` leaves it
active."""

function_mode_at = torch._C._get_function_stack_at
"""The mode of ``__torch_function__`` with this number, of those that are active."""

is_zero_tensor = torch.Tensor._is_zerotensor
"""Whether a tensor is zeros without memory, which autograd may pass on as a gradient."""

is_batched = torch._C._functorch.is_legacy_batchedtensor
"""Whether a tensor is many at once, without memory of its own: a gradient in
``torch.autograd.grad(..., is_grads_batched=True)`` and ``jacobian(..., vectorize=True)``."""

tracing_state = torch._C._get_tracing_state
"""What torch.jit.trace records into, or None."""

traced_graph: Any = getattr(torch._C, "_create_graph_by_tracing", None)
"""Traces a function into a TorchScript graph, the only way to oneDNN Graph; None where torch lacks
one of these four names. torch.jit.trace does the same, but warns that it is deprecated, and its
result is never freed."""

graph_function: Any = getattr(torch._C, "_create_function_from_graph", None)
"""Makes a function from a TorchScript graph, which the function then owns."""

has_onednn_graph: Any = getattr(torch._C, "_jit_llga_enabled", None)
"""Whether TorchScript uses oneDNN Graph: torch.jit.onednn_fusion_enabled."""

use_onednn_graph: Any = getattr(torch._C, "_jit_set_llga_enabled", None)
"""Turns oneDNN Graph on or off: torch.jit.enable_onednn_fusion."""
if graph_function is None or has_onednn_graph is None or use_onednn_graph is None:
    traced_graph = None

autocast_operators: Any = functools.partial(
    torch._C._dispatch_get_registrations_for_dispatch_key, "AutocastCPU"
)
"""Names the operators for which autocast for the CPU has rules, with namespace and overload."""

softmax_backward = torch._softmax_backward_data
"""The gradient of softmax's input, from its output and that output's gradient: one kernel, which
sums 16-bit numbers in float32, and is differentiable."""

has_bfloat16_products: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""Whether oneDNN multiplies bfloat16 matrices on this CPU; torch's own product goes element by
element."""

local_tensor = operator.attrgetter("_local_tensor")
"""A DTensor's local shard, in one C call. For a parameter, ``to_local()`` would make a view and
record it for autograd."""

shard_spec = operator.attrgetter("_spec")
"""A DTensor's mesh, placements, shape, strides and dtype as one object, compared by ``==``."""


def with_shard(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A DTensor with the mesh, placements and global shape of ``tensor``, and this local shard.

    ``DTensor.from_local`` would move the shard to the mesh's device, which is not where FSDP2's
    CPUOffloadPolicy keeps parameters.
    """
    spec = shard_spec(tensor)
    meta = spec.tensor_meta._replace(dtype=local.dtype)
    cls: Any = type(tensor)
    result: torch.Tensor = cls(
        local, dataclasses.replace(spec, tensor_meta=meta), requires_grad=False
    )
    return result


transform_level = torch._C._functorch.maybe_current_level
"""The number of the innermost active torch.func transform, or None."""

BelowAutograd: Any = torch._C._AutoDispatchBelowAutograd
"""A context manager in which operators do not record gradients; torch.library's use it."""

keys_after_autograd: Any = torch._C._after_autograd_keyset
"""The dispatch keys that come after autograd's."""

any_requires_grad: Any = torch._C._any_requires_grad
"""Whether one of several arguments is a tensor that requires grad."""

BypassModes = torch._C._DisableTorchDispatch
"""A context manager in C, which an interrupt cannot leave half done."""

BypassSubclasses = torch._C.DisableTorchFunctionSubclass
"""A context manager in C. Inside it, torch reads a tensor's ``grad``, version or address without
looking for ``__torch_function__`` in its class, which takes longer than the read itself."""


def is_plain_execution() -> bool:
    """Whether torch runs operators itself: no compiler, tracer, transform or mode is active.

    The mode that makes the CPU the default device changes nothing, and does not count.
    """
    return (
        not torch.compiler.is_compiling()
        and tracing_state() is None
        and transform_level() is None
        and not is_forward_mode()
        and count_modes() == 0
        and (count_function_modes() == 0 or _only_set_cpu())
    )


def _only_set_cpu() -> bool:
    """Whether all function modes are those of a default device, which is the CPU anyway."""
    modes = map(function_mode_at, range(count_function_modes()))
    return all(type(mode) is DeviceContext and mode.device.type == "cpu" for mode in modes)


def active_ddp() -> torch.nn.parallel.DistributedDataParallel | None:
    """The DistributedDataParallel whose forward runs; no hook tells a submodule that it is in one.

    torch.compile reads the same attribute.
    """
    return torch.nn.parallel.DistributedDataParallel._active_ddp_module


def is_flattened(param: torch.Tensor) -> bool:
    """Whether a parameter is this process's piece of a FullyShardedDataParallel flat parameter."""
    return getattr(param, _FLATTENED, False)


def mark_flattened(copy: torch.Tensor) -> None:
    """Make :func:`is_flattened` true for the copy of such a parameter."""
    setattr(copy, _FLATTENED, True)


def is_forward_mode() -> bool:
    """Whether a level of forward-mode differentiation is active."""
    return forward_ad._current_level >= 0


def proxy_mode() -> Any:
    """What make_fx records operators with, as torch.compile and torch.export do; or None."""
    return _get_dispatch_mode(_TorchDispatchModeKey.PROXY)


def sparse_keys(device_type: str) -> list[str]:
    """The dispatch keys of sparse tensors on a type of device: those that torch.library accepts.

    For other types it has such keys, but refuses their names. No operator can have a kernel there.
    """
    dense = torch._C._dispatch_key_for_device(device_type)  # "PrivateUse1" for a renamed type
    names = [f"{layout}{dense}" for layout in ("Sparse", "SparseCsr")]
    return [name for name in names if _is_accepted(name)]


def _is_accepted(dispatch_key: str) -> bool:
    try:
        torch._C._dispatch_key_parse(dispatch_key)
    except RuntimeError:
        return False
    return True


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The attributes with a module's hooks. torch's module for modules has those of all modules, whose
names begin with ``_global``."""


def remove_hooks(model: torch.nn.Module, first: int) -> None:
    """Remove the hooks that were registered since torch's handles had the number ``first``.

    An interrupt may have lost the handle of the latest one.
    """
    for module in model.modules():
        for name, hooks in vars(module).items():
            if "_hooks" in name and isinstance(hooks, dict):  # also those of hooks' options
                for number in [number for number in hooks if number >= first]:
                    del hooks[number]


def is_exported() -> bool:
    """Whether torch.export records this thread; torch's own flag is one for all threads."""
    return torch.compiler.is_exporting() and bool(active_modes())


def active_modes() -> list[Any]:
    """The tracing modes that are active: fake, functional and proxy ones."""
    modes = map(_get_dispatch_mode, _TorchDispatchModeKey.__members__.values())
    return [mode for mode in modes if mode is not None]
