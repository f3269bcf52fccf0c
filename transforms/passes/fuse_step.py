"""Pass: give an existing optimizer our fused step, in place, if that computes the same."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim import Optimizer

from fusedoptim.optimizer import FusedOptimizer
from transforms.inputs.arguments import refuse_replaced_methods
from transforms.inputs.options import FUSE_STEP, SPLIT
from transforms.passes.protocol import Job, Pass
from transforms.reports import Entry
from transforms.rewrites import fused_step
from transforms.rewrites.lamb_adapters import AdaptedLamb

# Constructors, which have already run, texts, and attributes that every class has.
_HARMLESS = {"__init__", "__repr__", "__str__", *vars(type("_", (), {"__annotations__": {}}))} | {
    *("__slots__", "__parameters__", "__orig_bases__", "__abstractmethods__", "_abc_impl"),
    *("__firstlineno__", "__static_attributes__", "__annotate_func__", "__annotations_cache__"),
}


class FuseStep(Pass):
    """Replaces the optimizer's step with our fused one, if there is one for its class."""

    knob = FUSE_STEP

    def run(self, job: Job) -> list[Entry]:
        """Fuse; an optimizer that an earlier call converted is not reported again."""
        optimizer = job.optimizer
        assert optimizer is not None
        if fused_step.is_converted(optimizer):
            return []
        job.undo.callback(fused_step.unfuse, optimizer)
        try:
            return [fuse_update_step(optimizer)]
        except (TypeError, ValueError, RuntimeError) as error:
            if job.options.knobs[SPLIT]:
                raise type(error)(
                    f"dtype=torch.bfloat16 needs a fused step: {error}; or omit dtype, and train "
                    "in float32 or under torch.autocast"
                ) from error
            told = f"{error}; or keep its own step with fuse_update_step=False"
            if FUSE_STEP in job.options.explicit:
                raise type(error)(told) from error
            return [Entry("optimizer", told, done=False)]

    def undo(self, model: object, optimizer: Optimizer | None) -> None:
        """Restore the optimizer's own class and step."""
        if optimizer is not None:
            fused_step.unfuse(optimizer)


def fuse_update_step(optimizer: Optimizer) -> Entry:
    """Give an optimizer our fused step, in place; one that is already fused is not changed.

    Raises:
        TypeError: no fused step for this class, or for a parameter's dtype or layout.
        RuntimeError: an option that asks for another step, a subclass or an object that overrides
            methods, or a parameter that no kernel can update. Nothing is changed in that case.
    """
    if isinstance(optimizer, FusedOptimizer):
        return Entry("optimizer", "its step is already fused", done=False)
    plain: type[Any] = type(optimizer)
    found = fused_step.implementation(plain)
    if found is None:
        known = ", ".join(f"torch.optim.{cls.__name__}" for cls in fused_step.OURS)
        raise TypeError(
            f"no fused step for {_name(plain)}; supported are {known} and the Lamb "
            "classes of timm, apex and torch_optimizer; use one of these classes or a class of "
            "fusedoptim"
        )
    base, ours = found
    _refuse_overrides(plain, base, ours)
    refuse_replaced_methods(optimizer)
    if taken := fused_step.own_attributes(ours) & vars(optimizer).keys():
        raise RuntimeError(
            "the optimizer has attributes that the fused step needs for itself: "
            f"{', '.join(sorted(taken))}; rename them"
        )
    options = [optimizer.defaults, *optimizer.param_groups]
    before = [dict(each) for each in options]
    try:
        added = _complete_options(optimizer, base)
        fused_step.fuse(optimizer)
    except BaseException:  # or an interrupt
        for each, original in zip(options, before):
            each.clear()
            each.update(original)
        raise
    name = "FusedLamb" if issubclass(ours, AdaptedLamb) else ours.__name__
    what = f"the step of {_name(plain)} is now that of {name}"
    if added:
        what += f"; missing options set to their defaults: {', '.join(sorted(added))}"
    return Entry("optimizer", what)


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _complete_options(optimizer: Optimizer, base: Any) -> set[str]:
    """Set the options that the groups and defaults of an optimizer lack; return their names.

    They lack some if the optimizer was unpickled from an older torch, or edited by a user.
    """
    known = optimizer.defaults
    if base in fused_step.OURS:
        known = base([torch.zeros(0)]).defaults | known
        if "fused" not in optimizer.defaults:
            for group in optimizer.param_groups:
                if group.get("fused") is False:  # set by SGD.__setstate__, not by the user
                    del group["fused"]
    added: set[str] = set()
    for options in (optimizer.defaults, *optimizer.param_groups):
        added |= known.keys() - options.keys()
        for name, value in known.items():
            options.setdefault(name, value)
    return added


def _refuse_overrides(
    plain: type[Optimizer], base: type[Optimizer], ours: type[FusedOptimizer]
) -> None:
    """Raise if ``plain`` overrides anything of its base class ``base``."""
    step = inspect.unwrap(base.step)
    if step.__module__ not in {cls.__module__ for cls in base.__mro__}:
        raise RuntimeError(
            f"{_name(base)}.step was replaced by a function of {step.__module__}, which a fused "
            "step would not call; undo that"
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
                f"step may differ; use {_name(base)} itself"
            )
