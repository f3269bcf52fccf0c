"""Which parameters, gradients and options a step accepts; everything else raises here."""

from __future__ import annotations

import math
import operator
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from fusedoptim.launch.devices import BACKENDS
from fusedoptim.step.rule import Candidate, Numbers, UpdateRule
from fusedoptim.step.scalars import number
from fusedoptim.step.sharding import (
    describe_place,
    is_dtensor,
    is_partial,
    local_of,
    same_place,
)
from fusedoptim.step.step_counts import KEY
from fusedoptim.step.tensors import (
    PARAM_DTYPES,
    TRAIL,
    Group,
    State,
    has_memory,
    has_shared_elements,
)

OPTIONS = ("foreach", "differentiable", "capturable", "fused")
"""Options of a group that choose an implementation of the step."""
_AVERAGING = "torch.distributed.optim.post_localSGD_optimizer"
_globals_of = operator.attrgetter("f_globals")
_KINDS = {"dampening": "SGD", "lr_decay": "Adagrad", "amsgrad": "Adam", "trust_clip": "Lamb"}
"""Kinds of optimizer, by a hyper-parameter that no other kind has."""
_MOVABLE = (
    "a full state_dict by torch.distributed.checkpoint.state_dict.set_optimizer_state_dict with "
    "StateDictOptions(full_state_dict=True), or shards by torch.distributed.checkpoint.load"
)
"""What can be loaded into parameters that are sharded in another way."""


def named_params(groups: Sequence[Group], group: Group) -> Iterator[tuple[Tensor, str]]:
    """The parameters of ``group``, one of an optimizer's ``groups``, and their names in errors."""
    names = group.get("param_names") or []
    where = ""
    if len(groups) > 1:
        where = f" of group {[g is group for g in groups].index(True)}"
    for i, p in enumerate(group["params"]):
        # A parameter that was appended to the group has no name.
        yield p, names[i] if i < len(names) else f"parameter {i}{where}"


def describe(optimizer: str, candidate: Candidate) -> str:
    """How an error about a parameter begins."""
    param, _, name = candidate
    shape = "nested" if param.is_nested else f"shape {tuple(param.shape)}"
    return f"{optimizer}: {name} ({shape}, {param.dtype}, {param.device})"


def check_options(optimizer: str, group: Group, instead: str) -> None:
    """Raise if ``group`` asks for an implementation other than the fused one.

    The error ends with ``instead``, the advice.
    """
    refused = (
        ("differentiable", True, "opaque to autograd"),
        ("foreach", True, "always fused"),
        ("capturable", True, "not captured in graphs"),
        ("fused", False, "always fused"),
    )
    for option, value, why in refused:
        chosen = group.get(option)
        if chosen is not None and bool(chosen) is value:
            raise RuntimeError(f"{option}={value}: {optimizer}'s step is {why}; {instead}")


def check_not_of_group(optimizer: str, group: Group, arguments: Mapping[str, Any]) -> None:
    """Raise if ``group`` asks for another value of the constructor's ``arguments`` for all groups.

    The same value is accepted: ZeroRedundancyOptimizer puts all arguments into its groups.
    """
    for name, value in arguments.items():
        if name in group and group[name] != value:
            raise ValueError(
                f"{optimizer}: a group has {name}={group[name]!r}, and {name} is one for all "
                "groups; pass it to the constructor, or give these parameters to an optimizer of "
                "their own"
            )


def check_numbers(
    optimizer: str, group: Group, defaults: Group | None = None, largest: float = math.inf
) -> None:
    """Raise if a hyper-parameter of ``group`` is NaN, or if kernels cannot take it.

    Args:
        optimizer: its name in errors.
        group: a group of the optimizer.
        defaults: the optimizer's; a hyper-parameter whose default is a number must be one.
        largest: the largest number of the kernels' arithmetic.
    """
    for name, value in group.items():
        if defaults is not None and name not in defaults:  # the user's own
            continue
        default = (defaults or {}).get(name)
        must_be_number = isinstance(default, tuple) or _as_number(default) is not None
        for item in value if isinstance(value, (tuple, list)) else (value,):
            found = _as_number(item)
            error: type[Exception] | None = None
            if found is None:
                error = TypeError if must_be_number else None
            elif math.isnan(found):
                error = ValueError
            elif largest < abs(found) < math.inf:
                error = OverflowError
            if error is not None:
                at_most = "" if largest == math.inf else f" of at most {largest:.4g}"
                raise error(
                    f"{optimizer}: {name} is {value}; set it to a number{at_most}, as in "
                    f"optimizer.param_groups[0][{name!r}] = ..."
                )


def checked_numbers(rule: UpdateRule, largest: float) -> Numbers:
    """The kernels' scalars and flags for the current hyper-parameters of a group.

    Args:
        rule: the group's rule.
        largest: the largest number of the kernels' arithmetic.

    Raises:
        TypeError, ValueError, OverflowError: kernels cannot take a hyper-parameter, or no step can
            be computed with it.
    """
    optimizer, group, defaults = rule.optimizer_name, rule.group, rule.defaults
    try:
        numbers = rule.numbers()
        # Those of later steps are computed when earlier groups may be updated already. What fails
        # then fails at the first step too.
        given = {**numbers, **rule.row_numbers(numbers, 1.0)}
        odd = [value for value in given.values() if not -largest <= value <= largest]
    except (TypeError, ArithmeticError, RuntimeError) as error:
        check_numbers(optimizer, group, defaults)
        values = ", ".join(f"{name}={group[name]!r}" for name in defaults if name in group)
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"{optimizer}: no step can be computed with {values}; set them to values that the "
            "constructor accepts, as in optimizer.param_groups[0]['lr'] = ..."
        ) from error
    if not all(map(math.isinf, odd)):
        check_numbers(optimizer, group, defaults, largest)
        if any(map(math.isfinite, odd)):
            raise OverflowError(f"{optimizer}: the hyper-parameters give {given}")
    return numbers


def check_norm(max_grad_norm: float | None) -> None:
    """Raise unless gradients can be scaled down to this norm."""
    if max_grad_norm is None:
        return
    check_above_zero("max_grad_norm", max_grad_norm, ", or None")


def check_above_zero(name: str, value: Any, otherwise: str = "") -> None:
    """Raise unless ``value`` is a number above 0; the error ends with what is also allowed."""
    if _as_number(value) is None:
        raise TypeError(f"{name} is {value!r}; pass a number above 0{otherwise}")
    if not value > 0:
        raise ValueError(f"Invalid {name} value: {value}; pass a number above 0{otherwise}")


def _as_number(value: Any) -> float | None:
    try:
        return None if isinstance(value, str) else float(number(value))
    except (TypeError, ValueError, RuntimeError):  # not a number, or a tensor of several elements
        return None


def check_saved_options(optimizer: str, groups: Iterable[Group], needed: Set[str]) -> None:
    """Raise unless each of a checkpoint's ``groups`` has the hyper-parameters ``needed``."""
    for group in groups:
        if missing := sorted(needed - group.keys()):
            raise ValueError(
                f"{optimizer}: the checkpoint is one of {_kind(group)}, and has no {missing[0]!r}; "
                "load one of the class that the optimizer has, or begin without one"
            )


def _kind(group: Group) -> str:
    """The kind of optimizer that has saved ``group``."""
    kind = next((kind for name, kind in _KINDS.items() if name in group), "another class")
    return "AdamW" if kind == "Adam" and group.get("decoupled_weight_decay") else kind


def check_saved_state(
    optimizer: str,
    saved: Iterable[tuple[int, Tensor, State]],
    names: Set[str],
    optional: Set[str],
) -> None:
    """Raise if a parameter has state in a checkpoint, but not all, or placed unlike itself.

    Args:
        optimizer: its name in errors.
        saved: for each parameter its number, itself, and its state in the checkpoint.
        names: names of the state.
        optional: names of the state that may be missing.
    """
    placed = (names | optional | {TRAIL}) - {KEY}
    for i, p, state in saved:
        missing = sorted(names - optional - state.keys())
        if missing and state.keys() - {TRAIL}:  # lower halves are state before the first step too
            raise ValueError(
                f"{optimizer}: the checkpoint has no {missing[0]!r} of parameter {i} (shape "
                f"{tuple(p.shape)}), and other state of it; load a whole checkpoint of this class"
            )
        for name, value in state.items():
            if name in placed and isinstance(value, Tensor) and not same_place(value, p):
                raise ValueError(
                    f"{optimizer}: the {name!r} of parameter {i} (shape {tuple(p.shape)}) in the "
                    f"checkpoint is {describe_place(value)}, and the parameter "
                    f"{describe_place(p)}; load {_MOVABLE}"
                )


def check_candidate(optimizer: str, candidate: Candidate) -> None:
    """Raise unless a kernel can update the parameter with this gradient."""
    param, grad, _ = candidate
    what = describe(optimizer, candidate)
    check_param(what, param)
    if is_dtensor(param):
        _check_sharded_grad(what, param, grad)
    elif is_dtensor(grad):
        raise TypeError(f"{what} has a sharded gradient (DTensor), and is not sharded itself")
    if grad.layout not in (torch.strided, torch.sparse_coo):
        raise TypeError(f"{what} has a gradient of layout {grad.layout}; make it strided or COO")
    if grad.device.type != "meta" and not has_memory(local_of(grad)):
        raise TypeError(
            f"{what} has a gradient with no memory of its own; clone() it first, or compute it "
            "outside of FakeTensorMode and the like"
        )
    for fact in ("shape", "dtype", "device"):
        found = getattr(grad, fact)
        if found != getattr(param, fact):
            found = tuple(found) if fact == "shape" else found
            raise RuntimeError(
                f"{what} has a gradient whose {fact} differs: {found}; "
                "call zero_grad() after changing a parameter, and compute the gradient again"
            )


def _check_sharded_grad(what: str, param: Tensor, grad: Tensor) -> None:
    """Raise unless the gradient of a DTensor is strided and placed like it."""
    if not is_dtensor(grad):
        raise TypeError(
            f"{what} is sharded (DTensor), and its gradient is not; use a gradient of backward(), "
            "or DTensor.from_local(grad, param.device_mesh, param.placements)"
        )
    if local_of(grad).layout is not torch.strided:
        raise TypeError(
            f"{what} is sharded (DTensor) and has a sparse gradient, and only strided ones work "
            "there; construct the embedding with sparse=False"
        )
    if not same_place(param, grad):
        raise RuntimeError(
            f"{what} is {describe_place(param)}, and its gradient {describe_place(grad)}; call "
            "zero_grad() after changing a parameter, and compute the gradient again"
        )
    if grad.shape == param.shape and local_of(grad).shape != local_of(param).shape:
        raise RuntimeError(
            f"{what} has a shard of shape {tuple(local_of(param).shape)} here, and its gradient "
            f"one of shape {tuple(local_of(grad).shape)}; compute the gradient by backward()"
        )


def check_param(what: str, param: Tensor) -> None:
    """Raise unless a kernel can update ``param``, which errors call ``what``."""
    instead = "leave it out of the optimizer, or use the torch.optim class"
    if param.layout is not torch.strided:
        raise TypeError(f"{what} has layout {param.layout} and only strided ones work; {instead}")
    if param.is_nested:
        raise TypeError(f"{what} has no strides, and only strided ones work; {instead}")
    if param.device.type not in BACKENDS:
        raise RuntimeError(
            f"{what} is on a device that SYCL does not serve; move it to "
            f"{' or '.join(map(repr, BACKENDS))}, or {instead}"
        )
    if param.dtype not in PARAM_DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in PARAM_DTYPES)
        raise TypeError(f"{what} has a dtype that is not one of {known}; convert it, or {instead}")
    if is_partial(param):
        raise TypeError(
            f"{what} is {describe_place(param)}: it holds partial sums that were not reduced; "
            "call redistribute() with Replicate() or Shard() first"
        )
    param = local_of(param)
    if not has_memory(param):
        raise TypeError(f"{what} is a {type(param).__name__} with no memory of its own; {instead}")
    if has_shared_elements(param):
        raise RuntimeError(
            f"{what} has elements that share memory (strides {param.stride()}); clone() it first"
        )


def check_half(optimizer: str, candidate: Candidate) -> None:
    """Raise unless a split parameter is still a bfloat16 half."""
    if candidate.param.dtype != torch.bfloat16:
        raise TypeError(
            f"{describe(optimizer, candidate)} was converted after it was split, which loses its "
            "lower half; convert a model before constructing its optimizer"
        )


def is_called_from(module: str) -> bool:
    """Whether a function of a module is among the callers."""
    # By C functions: the tests of interrupts need the same bytecodes, however deep the call is.
    frames = map(operator.itemgetter(0), traceback.walk_stack(None))
    callers = map(operator.methodcaller("get", "__name__"), map(_globals_of, frames))
    return module in sys.modules and module in callers


def check_not_averaged(optimizer: str) -> None:
    """Raise if torch's PostLocalSGDOptimizer takes a step of split parameters.

    Nothing that it does is visible in the optimizer that it wraps, except that it calls ``step()``.
    """
    if is_called_from(_AVERAGING):
        raise RuntimeError(
            f"{optimizer}: PostLocalSGDOptimizer would average only the upper halves of split "
            "parameters; pass it an optimizer of float32 parameters, without split"
        )


def check_state_shape(
    rule: UpdateRule, owner: str, name: str, state: Tensor, shape: torch.Size
) -> None:
    """Raise unless the state ``name`` has its parameter's shape."""
    if state.shape != shape:
        raise ValueError(
            f"{rule.optimizer_name}: the state {name!r} of {owner} has shape "
            f"{tuple(state.shape)} and the parameter {tuple(shape)}; load the "
            "state_dict of the same model, or delete optimizer.state[parameter]"
        )


def check_state_place(
    rule: UpdateRule, owner: str, name: str, state: Tensor, param: Tensor
) -> None:
    """Raise unless the state ``name`` of a DTensor is sharded like it."""
    if not same_place(state, param):
        raise ValueError(
            f"{rule.optimizer_name}: the state {name!r} of {owner} is {describe_place(state)}, and "
            f"the parameter {describe_place(param)}; delete optimizer.state[parameter], and to "
            f"restore it load {_MOVABLE}"
        )
    check_state_shape(rule, owner, name, state, param.shape)


def check_state_whole(rule: UpdateRule, owner: str, state: State, names: Sequence[str]) -> None:
    """Raise if some but not all state of these names is missing, or if some has no memory."""
    needed = set(names) - {TRAIL}
    lost = sorted(needed - state.keys() - rule.optional_state)
    if lost and not needed.isdisjoint(state):
        raise KeyError(
            f"{rule.optimizer_name}: the state of {owner} has no {lost[0]!r}, and other state of "
            "earlier steps; load a whole state_dict, or delete optimizer.state[parameter] to "
            "restart it"
        )
    for name in names:
        value = state.get(name)
        if isinstance(value, Tensor) and not has_memory(value):
            raise TypeError(
                f"{rule.optimizer_name}: the state {name!r} of {owner} is a "
                f"{type(value).__name__} with no memory of its own; make or load it outside of "
                "FakeTensorMode and the like"
            )
