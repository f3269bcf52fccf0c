"""An existing optimizer with our fused step.

Only the object's class is replaced. The new class inherits the step from, say, FusedSGD and
everything else from the optimizer's own class. So ``isinstance`` holds, hooks run, GradScaler,
pickle and deepcopy work, and later calls of load_state_dict and add_param_group go to our class
too. A step function bound to the object would do none of this: IPEX's fused optimizers lost their
hooks that way. Nothing is copied: state, groups and hooks stay the same objects.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler

from fusedoptim import FusedAdagrad, FusedAdam, FusedAdamW, FusedSGD
from fusedoptim.optimizer import FusedOptimizer
from fusedoptim.step.tensors import state_dtype
from transforms.rewrites.lamb_adapters import AdaptedLamb, lamb_for

OURS: dict[type[Optimizer], type[FusedOptimizer]] = {
    torch.optim.SGD: FusedSGD,
    torch.optim.Adagrad: FusedAdagrad,
    torch.optim.Adam: FusedAdam,
    torch.optim.AdamW: FusedAdamW,
}


class _Converted:
    """A base class of all converted optimizers, in addition to our class and their own."""

    halves: Any
    _plain: type[Any]
    """The optimizer's own class."""
    _of_all_groups = ()
    """Empty: the optimizer's own class has no such arguments, so a group may use their names."""

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
    fused: type[Optimizer] = _class_for(plain)  # type: ignore[arg-type]  # classes are hashable
    return object.__new__(fused)


@functools.cache
def _class_for(plain: type[Any]) -> type[Any]:
    """The converted class of ``plain``."""
    found = implementation(plain)
    assert found is not None
    ours = found[1]
    bases = (_Converted, ours) if issubclass(ours, plain) else (_Converted, ours, plain)
    name = ours.__name__ if issubclass(ours, plain) else f"Fused{plain.__name__}"
    return type(name, bases, {"_plain": plain, "__module__": __name__, "__doc__": plain.__doc__})


def implementation(plain: type[Any]) -> tuple[type[Optimizer], type[FusedOptimizer]] | None:
    """The known class that ``plain`` is or derives from, and our class for it."""
    known = ((cls, OURS.get(cls) or lamb_for(cls)) for cls in plain.__mro__)
    return next(((cls, ours) for cls, ours in known if ours is not None), None)


def is_converted(optimizer: Optimizer) -> bool:
    """Whether :func:`fuse` has converted ``optimizer``."""
    return isinstance(optimizer, _Converted)


def fuse(optimizer: Optimizer) -> None:
    """Convert an optimizer of a known class; raise, changing nothing, if no kernel can step it."""
    plain, before = type(optimizer), dict(vars(optimizer))
    try:
        optimizer.__class__ = _class_for(plain)  # type: ignore[arg-type]  # classes are hashable
        assert isinstance(optimizer, FusedOptimizer)
        optimizer._set_up(optimizer.defaults.get("max_grad_norm"), split=False)
        optimizer._check_groups()
        vars(optimizer).update(_tracked_step(optimizer, type(optimizer)))
    except BaseException:  # or an interrupt
        _become(optimizer, plain, before)
        raise


def unfuse(optimizer: Optimizer) -> None:
    """Restore a converted optimizer's own class and step, and keep its state; ignore others.

    Raises:
        RuntimeError: parameters are split into two halves. Nothing is changed in that case.
    """
    this: Any = optimizer
    if not isinstance(this, _Converted):
        return
    if list(this.halves):
        raise RuntimeError(
            "parameters are split into two halves, which only a fused step can update; merge them "
            "first, as transforms.restore(model, optimizer) does"
        )
    for p, state in optimizer.state.items():
        if isinstance(state, dict):  # users may keep other things there
            _as_torchs(p, state)
    if isinstance(this, AdaptedLamb):
        this.give_back_steps()
    plain, added = this._plain, own_attributes(type(optimizer))
    kept = {name: value for name, value in vars(optimizer).items() if name not in added}
    _become(optimizer, plain, kept | _tracked_step(optimizer, plain))


def _become(optimizer: Optimizer, plain: type[Optimizer], attributes: dict[str, Any]) -> None:
    """Restore the optimizer's own class, with these attributes, wherever an interrupt comes."""
    replaced = vars(optimizer)
    # Python looks for no signal between two assignments.
    optimizer.__dict__ = attributes
    optimizer.__class__ = plain
    del replaced  # last: objects that it alone keeps alive may run code when they are freed


def own_attributes(fused: type[Any]) -> set[str]:
    """The attributes that our class ``fused`` adds to an object."""
    probe: Any = object.__new__(fused)
    probe._set_up(None, split=False)
    return set(vars(probe))


def _as_torchs(param: Tensor, state: dict[str, Any]) -> None:
    """Convert the state of ``param``, float32 if ``param`` has 16 bits, to torch's form."""
    for name, value in state.items():
        if name == "step":
            if isinstance(value, Tensor):
                state[name] = value.clone()  # ours is a view into one tensor
        elif isinstance(value, Tensor) and value.dtype == state_dtype(param) != param.dtype:
            state[name] = value.to(param.dtype)


def is_schedulers(optimizer: Optimizer, step: Any) -> bool:
    """Whether ``step`` is a learning-rate scheduler's wrapper, which checks that it is called."""
    return (
        isinstance(step, types.FunctionType)
        and hasattr(step, "_wrapped_by_lr_sched")
        and (step.__globals__ is vars(lr_scheduler) or step.__globals__ is globals())
        and inspect.unwrap(step)
        in [inspect.unwrap(vars(c)["step"]) for c in type(optimizer).__mro__ if "step" in vars(c)]
    )


def _tracked_step(optimizer: Optimizer, new: type[Any]) -> dict[str, Any]:
    """The attribute ``step`` if a scheduler has set it: a wrapper of the step of the new class."""
    if "step" not in vars(optimizer):
        return {}
    step = new.step
    reference = weakref.ref(optimizer)

    @functools.wraps(step)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        this: Any = reference()
        this._opt_called = True
        return step(this, *args, **kwargs)

    wrapper._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # torch's mark
    return {"step": wrapper}
