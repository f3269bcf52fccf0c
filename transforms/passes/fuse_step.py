"""Pass: give an existing optimizer our fused step, in place.

Only the object's class is replaced. The new class inherits the step from, say, FusedSGD and
everything else from the optimizer's own class. So ``isinstance`` holds, hooks run, GradScaler,
pickle and deepcopy work, and later calls of load_state_dict and add_param_group are ours too. A
step function bound to the object would affect none of these, which is how IPEX's fused optimizers
lost their hooks. Nothing is copied: state, groups and hooks stay the same objects.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from fusedoptim import FusedAdagrad, FusedAdam, FusedAdamW, FusedSGD
from fusedoptim.optimizer import FusedOptimizer
from fusedoptim.step.tensors import state_dtype
from transforms.inputs.options import FUSE, SPLIT
from transforms.passes.others_lamb import OthersLamb, lamb_for
from transforms.passes.protocol import Job, Pass
from transforms.reports import Entry

__all__ = [
    "fuse_update_step",
    "is_converted",
    "is_fused",
    "refuse_replaced_methods",
    "unfuse_update_step",
]

_OURS: dict[type[Optimizer], type[FusedOptimizer]] = {
    torch.optim.SGD: FusedSGD,
    torch.optim.Adagrad: FusedAdagrad,
    torch.optim.Adam: FusedAdam,
    torch.optim.AdamW: FusedAdamW,
}
_INSTEAD = "or keep its own step with fuse_update_step=False"
# Constructors, which have already run, texts, and attributes that every class has.
_HARMLESS = {"__init__", "__repr__", "__str__", *vars(type("_", (), {"__annotations__": {}}))} | {
    *("__slots__", "__parameters__", "__orig_bases__", "__abstractmethods__", "_abc_impl"),
    *("__firstlineno__", "__static_attributes__", "__annotate_func__", "__annotations_cache__"),
}


class _Converted:
    """A base class of all converted optimizers, beside our class and their own."""

    halves: Any
    _plain: type[Any]
    """The optimizer's own class."""

    @property
    def _original_step(self) -> Callable[..., Any]:
        """The step of the optimizer's own class, bound to this object."""
        if list(self.halves):
            raise RuntimeError(
                f"{type(self).__name__}: parameters are split into two halves, and the original "
                "step would update only one; merge them first, as transforms.restore does"
            )
        return types.MethodType(self._plain.step, self)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _blank, (self._plain,), self.__getstate__()


def _blank(plain: type[Any]) -> Optimizer:
    """An empty object of the converted class of ``plain``, for pickle to fill."""
    fused: type[Optimizer] = _class_for(plain)
    return object.__new__(fused)


_classes: dict[type[Any], type[Any]] = {}


def _class_for(plain: type[Any]) -> type[Any]:
    """The converted class of ``plain``, created once."""
    if plain not in _classes:
        _classes[plain] = _make_class(plain)
    return _classes[plain]


def _make_class(plain: type[Any]) -> type[Any]:
    _, ours = _implementation(plain)
    bases = (_Converted, ours) if issubclass(ours, plain) else (_Converted, ours, plain)
    name = ours.__name__ if issubclass(ours, plain) else f"Fused{plain.__name__}"
    return type(name, bases, {"_plain": plain, "__module__": __name__, "__doc__": plain.__doc__})


def _implementation(plain: type[Any]) -> tuple[type[Optimizer], type[FusedOptimizer]]:
    """The known class that ``plain`` is or derives from, and our class for it."""
    for cls in plain.__mro__:
        ours = _OURS.get(cls) or lamb_for(cls)
        if ours is not None:
            return cls, ours
    known = ", ".join(f"torch.optim.{cls.__name__}" for cls in _OURS)
    raise TypeError(
        f"no fused step for {_name(plain)}: there are those of {known}, and of the Lamb classes of "
        "timm, apex and torch_optimizer; use one of these classes or a class of fusedoptim, "
        f"{_INSTEAD}"
    )


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _ours_name(ours: type[FusedOptimizer]) -> str:
    return "FusedLamb" if issubclass(ours, OthersLamb) else ours.__name__


class FuseStep(Pass):
    """Replaces the optimizer's step with our fused one, if there is one for its class."""

    knob = FUSE

    def run(self, job: Job) -> list[Entry]:
        """Fuse; an optimizer that an earlier call converted is not reported again."""
        optimizer = job.optimizer
        assert optimizer is not None
        if is_converted(optimizer):
            return []
        job.undo.callback(unfuse_update_step, optimizer)
        try:
            return [fuse_update_step(optimizer)]
        except (TypeError, ValueError, RuntimeError) as error:
            if job.options.knobs[SPLIT]:
                raise type(error)(
                    f"dtype=torch.bfloat16 needs a fused step: {error} and no dtype, in float32 "
                    "or under torch.autocast"
                ) from error
            if FUSE in job.options.explicit:
                raise
            return [Entry("optimizer", str(error), done=False)]

    def undo(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Restore the optimizer's own class and step."""
        if optimizer is not None:
            unfuse_update_step(optimizer)


def is_fused(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` has our step, by conversion or because it is of our class."""
    return isinstance(optimizer, FusedOptimizer)


def is_converted(optimizer: Optimizer) -> bool:
    """Whether :func:`fuse_update_step` has converted ``optimizer``."""
    return isinstance(optimizer, _Converted)


def fuse_update_step(optimizer: Optimizer) -> Entry:
    """Give an existing optimizer our fused step, in place.

    The object stays the same, with its state, groups and hooks. Schedulers created before or
    after, GradScaler, pickle, deepcopy, ``load_state_dict`` and ``add_param_group`` keep working.
    It remains an instance of its own class, and becomes one of ours. ``optimizer.fused`` is True,
    and ``optimizer._original_step`` is the step of its own class. Options that a group lacks, for
    example after loading from an older torch, are set to the optimizer's or the class's defaults.

    Args:
        optimizer: of torch.optim's SGD, Adagrad, Adam or AdamW, of the Lamb of timm or
            torch_optimizer, of apex's FusedLAMB, or of a subclass that overrides nothing but the
            constructor. One that is already fused is not changed.

    Returns:
        an entry for the report.

    Raises:
        TypeError: no fused step for this class, or for a parameter's dtype or layout.
        RuntimeError: an option that asks for another step, a subclass or an object that overrides
            methods, or a parameter that no kernel can update. Nothing is changed in that case.

    Example:
        >>> import torch
        >>> from transforms.passes.fuse_step import fuse_update_step
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> fuse_update_step(optimizer).what
        'the step of torch.optim.sgd.SGD is now that of FusedSGD'
        >>> optimizer.fused, isinstance(optimizer, torch.optim.SGD)
        (True, True)
    """
    if is_fused(optimizer):
        return Entry("optimizer", "its step is already fused", done=False)
    plain: type[Any] = type(optimizer)
    base, ours = _implementation(plain)
    _refuse_overrides(plain, base, ours)
    refuse_replaced_methods(optimizer)
    if taken := _own_attributes(ours) & vars(optimizer).keys():
        raise RuntimeError(
            "the optimizer has attributes that the fused step needs for itself: "
            f"{', '.join(sorted(taken))}; rename them, {_INSTEAD}"
        )
    added = _complete_options(optimizer, base)
    optimizer.__class__ = _class_for(plain)
    assert isinstance(optimizer, FusedOptimizer)
    try:
        optimizer._set_up(optimizer.defaults.get("max_grad_norm"), split=False)
        optimizer._check_groups()
    except (TypeError, ValueError, RuntimeError) as error:
        _become(optimizer, plain)
        for options, name in added:
            del options[name]
        raise type(error)(f"{error}; {_INSTEAD}") from None
    _track_calls_again(optimizer)
    what = f"the step of {_name(plain)} is now that of {_ours_name(ours)}"
    if names := sorted({name for _, name in added}):
        what += f"; missing options set to their defaults: {', '.join(names)}"
    return Entry("optimizer", what)


def unfuse_update_step(optimizer: Optimizer) -> Entry:
    """Restore a converted optimizer's own class and step; the inverse of a conversion.

    State from fused steps is kept. State of 16-bit parameters, float32 in ours, is cast to the
    parameter's dtype, as in torch's classes.

    Args:
        optimizer: one that :func:`fuse_update_step` has converted. Others are not changed.

    Returns:
        an entry for the report.

    Raises:
        RuntimeError: parameters are split into two halves, which only a fused step can update.
            Nothing is changed in that case.

    Example:
        >>> import torch
        >>> from transforms.passes.fuse_step import fuse_update_step, unfuse_update_step
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> done = fuse_update_step(optimizer)
        >>> unfuse_update_step(optimizer).what
        'its step is again that of torch.optim.adamw.AdamW'
        >>> type(optimizer)
        <class 'torch.optim.adamw.AdamW'>
    """
    this: Any = optimizer
    if not isinstance(this, _Converted):
        return Entry("optimizer", "its step was not converted", done=False)
    if list(this.halves):
        raise RuntimeError(
            "parameters are split into two halves, which only a fused step can update; merge them "
            "first, as transforms.restore(model, optimizer) does"
        )
    plain = this._plain
    for p, state in optimizer.state.items():
        _as_torchs(p, state)
    if isinstance(this, OthersLamb):
        this.give_back_steps()
    _become(optimizer, plain)
    _track_calls_again(optimizer)
    return Entry("optimizer", f"its step is again that of {_name(plain)}")


def _defaults_of(base: type[Any]) -> dict[str, Any]:
    """The defaults of a class of torch.optim."""
    defaults: dict[str, Any] = base([torch.zeros(0)]).defaults
    return defaults


def _complete_options(
    optimizer: Optimizer, base: type[Optimizer]
) -> list[tuple[dict[str, Any], str]]:
    """Set the options that the optimizer's groups and defaults lack.

    Args:
        optimizer: unpickled from an older torch, or edited by a user; or complete.
        base: the class that ours stands for.

    Returns:
        each dict that was completed with each name that was added.
    """
    known = optimizer.defaults
    if base in _OURS:
        known = _defaults_of(base) | known
    incomplete = (optimizer.defaults, *optimizer.param_groups)
    added = [(options, name) for options in incomplete for name in known.keys() - options.keys()]
    for options, name in added:
        options[name] = known[name]
    return added


def _become(optimizer: Optimizer, plain: type[Optimizer]) -> None:
    """Restore the optimizer's own class, and remove the attributes that ours added."""
    for name in _own_attributes(type(optimizer)):
        vars(optimizer).pop(name, None)
    optimizer.__class__ = plain


def _own_attributes(fused: type[Any]) -> set[str]:
    """The attributes that the class ``fused`` adds to an object."""
    probe: Any = object.__new__(fused)
    probe._set_up(None, split=False)
    return set(vars(probe))


def _as_torchs(param: Tensor, state: dict[str, Any]) -> None:
    """Convert the state of ``param`` to the form of torch's classes."""
    for name, value in state.items():
        if name == "step":
            if isinstance(value, Tensor):
                state[name] = value.clone()  # ours is a view into one tensor
        elif isinstance(value, Tensor) and value.dtype == state_dtype(param) != param.dtype:
            state[name] = value.to(param.dtype)


def _refuse_overrides(
    plain: type[Optimizer], base: type[Optimizer], ours: type[FusedOptimizer]
) -> None:
    """Raise if ``plain`` overrides anything of its base class ``base``."""
    step = inspect.unwrap(base.step)
    if step.__module__ not in {cls.__module__ for cls in base.__mro__}:
        raise RuntimeError(
            f"{_name(base)}.step was replaced by a function of {step.__module__}, which a fused "
            f"step would not call; undo that, {_INSTEAD}"
        )
    for cls in plain.__mro__:
        if cls in base.__mro__:
            continue
        changed = [
            name
            for name in vars(cls).keys() - _HARMLESS
            if hasattr(base, name) or hasattr(ours, name)
            # torch itself wraps the step of a class when it first creates an object.
            if not (name == "step" and inspect.unwrap(vars(cls)[name]) is step)
        ]
        if changed:
            raise RuntimeError(
                f"{_name(cls)} overrides {', '.join(sorted(changed))} of {base.__name__}, so its "
                f"step may be another; use {_name(base)} itself, {_INSTEAD}"
            )


def refuse_replaced_methods(optimizer: Optimizer) -> None:
    """Raise if a method was replaced on the object itself, except by a scheduler.

    Raises:
        RuntimeError: it was; the replacement refers to the object and its present class.
    """
    for name, value in vars(optimizer).items():
        if callable(getattr(type(optimizer), name, None)) and not _is_schedulers(optimizer, value):
            raise RuntimeError(
                f"optimizer.{name} was replaced on this object by "
                f"{getattr(value, '__qualname__', value)!r}, which would keep calling the original "
                "method; call transforms.optimize first and wrap its result, or pass "
                "fuse_update_step=False and inplace=True"
            )


def _is_schedulers(optimizer: Optimizer, step: Any) -> bool:
    """Whether ``step`` is a learning-rate scheduler's wrapper, which checks that it is called."""
    return (
        isinstance(step, types.FunctionType)
        and hasattr(step, "_wrapped_by_lr_sched")
        and (step.__globals__ is vars(lr_scheduler) or step.__globals__ is globals())
        and inspect.unwrap(step) in _unwrapped_steps(optimizer)
    )


def _unwrapped_steps(optimizer: Optimizer) -> Iterator[Any]:
    for cls in type(optimizer).__mro__:
        if "step" in vars(cls):
            yield inspect.unwrap(vars(cls)["step"])


def _track_calls_again(optimizer: Optimizer) -> None:
    """If a scheduler has wrapped the step, wrap the new class's step instead.

    torch's wrapper refers to the step of the class that the object had before.
    """
    if "step" not in vars(optimizer):
        return
    step = type(optimizer).step
    reference = weakref.ref(optimizer)

    @functools.wraps(step)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        this: Any = reference()
        this._opt_called = True
        return step(this, *args, **kwargs)

    wrapper._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = wrapper  # type: ignore[method-assign]
