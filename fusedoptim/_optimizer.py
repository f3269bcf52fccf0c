"""What all fused optimizers share: torch's contract around one launch for each bucket."""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.optim.optimizer import (
    Optimizer,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

from fusedoptim._bucket import Bucket
from fusedoptim._openmp import WORTH_RELEASING, release_spinning_threads
from fusedoptim._tensors import Candidate, check_candidate, state_dtype, turns

Group = dict[str, Any]
_OPTIONS = ("foreach", "differentiable", "fused")
_Step = TypeVar("_Step", bound=Callable[..., Any])


def _with_hooks(step: _Step) -> _Step:
    """Put torch's hooks and profiler range around ``step``, when there are any.

    torch wraps every ``step`` so, and for an optimizer of one small tensor the wrapper's profiler
    range alone takes 4 us, where the whole of FusedSGD's step takes 12 us. ``hooked`` tells
    torch that this one is wrapped already.

    torch.compile must not trace into a step: it would take the addresses for constants.
    """
    hooked = Optimizer.profile_hook_step(step)
    untraced = torch._disable_dynamo(hooked)  # type: ignore[attr-defined]

    @functools.wraps(step)
    def wrapper(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return untraced(self, *args, **kwargs)
        if (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            or _profiler_enabled()
        ):
            return hooked(self, *args, **kwargs)
        return step(self, *args, **kwargs)

    wrapper.hooked = True  # type: ignore[attr-defined]
    return cast(_Step, wrapper)


def _options(group: Group) -> tuple[Any, ...]:
    """What the group says of how its step is to be computed."""
    return tuple(map(group.get, _OPTIONS))


class _Plan:
    """One group's parameters as they were at some step, sorted into buckets."""

    def __init__(self, group: Group, kernel: str, optimizer: FusedOptimizer) -> None:
        self._kernel = kernel
        self._options = _options(group)
        self._ids = list(map(id, group["params"]))
        self._idle = [p for p in group["params"] if p.grad is None]
        self.apart: list[Tensor] = []
        fused: list[Candidate] = []
        for candidate in optimizer._candidates(group):
            sparse = candidate.grad.layout is not torch.strided
            if sparse and candidate.param.layout is torch.strided:
                self.apart.append(candidate.param)
            else:
                check_candidate(type(optimizer).__name__, candidate)
                fused.append(candidate)
        by_key: dict[Any, list[Candidate]] = {}
        for candidate, turn in zip(fused, turns([candidate.param for candidate in fused])):
            key = (turn, candidate.param.device, candidate.param.dtype)
            by_key.setdefault(key, []).append(candidate)
        self.buckets = [
            Bucket(type(optimizer).__name__, kernel, by_key[key], optimizer.state)
            for key in sorted(by_key, key=operator.itemgetter(0))
        ]
        self.elements = sum(bucket.elements for bucket in self.buckets)

    def refresh(self, group: Group, kernel: str) -> bool:
        """Read this step's gradients; False if the plan no longer fits the group."""
        if kernel != self._kernel or _options(group) != self._options or self.apart:
            return False
        if list(map(id, group["params"])) != self._ids:
            return False
        for p in self._idle:
            if p.grad is not None:
                return False
        return all(bucket.refresh() for bucket in self.buckets)


class FusedOptimizer(Optimizer):
    """Base of the optimizers whose step is one kernel launch for each group, device and dtype.

    A subclass names its kernel and the kernel's scalars. The kernel's State arguments are keys of
    ``optimizer.state[param]``, made at a parameter's first step.
    """

    _plans: list[_Plan]
    _elements: int
    _state_ids: list[int] | None
    """Of the dicts in ``state``, when last seen; a load or a reset makes new ones."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._lock = threading.RLock()
        self._forget_plans()
        super().__init__(*args, **kwargs)
        # A GradScaler shall unscale and look for infinities itself, before the step.
        self._step_supports_amp_scaling = False

    def _kernel(self, group: Group) -> str:
        """The name of the kernel that updates ``group``."""
        raise NotImplementedError

    def _scalars(self, group: Group) -> dict[str, float]:
        """The kernel's scalars and flags for this step of ``group``."""
        raise NotImplementedError

    def _update_apart(self, group: Group, params: list[Tensor]) -> None:
        """Update parameters whose gradients are sparse."""
        raise NotImplementedError

    @_with_hooks
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single optimization step.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            what ``closure`` returned.

        Raises:
            TypeError: a parameter of a dtype or layout that cannot be updated.
            RuntimeError: a parameter on a device that SYCL does not serve, or a gradient that
                does not fit its parameter. Nothing was written then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._lock:
            self._update()
        return loss

    def _update(self) -> None:
        plans = self._current_plans()
        if self._elements >= WORTH_RELEASING:
            release_spinning_threads()
        scalars = [self._scalars(group) for group in self.param_groups]
        launched: list[Bucket] = []
        try:
            for plan, values in zip(plans, scalars):
                for bucket in plan.buckets:
                    if bucket.copies:
                        self._finish(launched)
                    launched.append(bucket)
                    bucket.launch(values)
                    if bucket.copies:
                        self._finish(launched)
        finally:
            self._finish(launched)
        for group, plan in zip(self.param_groups, plans):
            if plan.apart:
                with torch.no_grad():
                    self._update_apart(group, plan.apart)
        if self._state_ids is None:
            self._state_ids = list(map(id, self.state.values()))

    def _finish(self, buckets: list[Bucket]) -> None:
        """Finish every bucket, whatever happens to one of them."""
        error: BaseException | None = None
        for bucket in buckets:
            try:
                bucket.finish(self.state)
            except BaseException as raised:  # an interrupt too
                error = error or raised
        if error is not None:
            raise error

    def _current_plans(self) -> list[_Plan]:
        """The plan of each group, made anew where it no longer fits; writes no user's tensor."""
        if list(map(id, self.state.values())) != self._state_ids:
            self._forget_plans()
        for i, group in enumerate(self.param_groups):
            kernel = self._kernel(group)
            if i == len(self._plans) or not self._plans[i].refresh(group, kernel):
                self._check_options(group)
                self._state_ids = None  # the step will make state
                with torch.no_grad():
                    self._plans[i : i + 1] = [_Plan(group, kernel, self)]
        del self._plans[len(self.param_groups) :]
        if self._state_ids is None:
            self._elements = sum(plan.elements for plan in self._plans)
        return self._plans

    def _forget_plans(self) -> None:
        with self._lock:
            self._plans = []
            self._state_ids = None

    def _candidates(self, group: Group) -> Iterator[Candidate]:
        """The group's parameters that have a gradient, with what an error would call them."""
        names = group.get("param_names")
        where = ""
        if len(self.param_groups) > 1:
            where = f" of group {[g is group for g in self.param_groups].index(True)}"
        for i, p in enumerate(group["params"]):
            if p.grad is not None:
                yield Candidate(p, p.grad, names[i] if names else f"parameter {i}{where}")

    def _check_options(self, group: Group) -> None:
        """Raise if ``group`` asks for another implementation of the step than the fused one."""
        name = type(self).__name__
        instead = f"use torch.optim.{name.removeprefix('Fused')} for that"
        if group.get("differentiable"):
            raise RuntimeError(
                f"differentiable=True: {name}'s step is opaque to autograd; {instead}"
            )
        if group.get("foreach"):
            raise RuntimeError(f"foreach=True: {name}'s step is always fused; {instead}")
        if group.get("fused") is False:
            raise RuntimeError(f"fused=False: {name}'s step is always fused; {instead}")

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters, as ``torch.optim.Optimizer.add_param_group`` does.

        Raises:
            RuntimeError: the group asks for ``foreach``, ``differentiable`` or ``fused=False``.
        """
        if isinstance(param_group, dict):
            self._check_options(self.defaults | param_group)
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not hasattr(self, "_lock"):
            self._lock = threading.RLock()
        self._forget_plans()
        self._step_supports_amp_scaling = False
        # A checkpoint brings hyper-parameters; which implementation runs is the class's choice.
        for group in self.param_groups:
            for option in _OPTIONS:
                if option in self.defaults:
                    group[option] = self.defaults[option]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of this class or of the torch.optim class that it stands for.

        torch.optim casts the state to the parameter's dtype; ours is float32 for 16-bit parameters,
        and a float32 checkpoint is loaded without losing a bit.
        """
        loaded: dict[str, Any] = {}

        def remember(_: Optimizer, final: dict[str, Any]) -> None:
            loaded.update(final)

        def restore_dtypes(_: Optimizer) -> None:
            saved_ids = [i for group in loaded["param_groups"] for i in group["params"]]
            params = [p for group in self.param_groups for p in group["params"]]
            for saved_id, p in zip(saved_ids, params):
                self._restore_state(p, loaded["state"].get(saved_id, {}))

        # Last before torch reads the dict, first after: users' hooks see the right state.
        before = self.register_load_state_dict_pre_hook(remember)
        after = self.register_load_state_dict_post_hook(restore_dtypes, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _restore_state(self, param: Tensor, saved: dict[str, Any]) -> None:
        for key, value in saved.items() if isinstance(saved, dict) else ():
            if isinstance(value, Tensor) and key != "step" and value.is_floating_point():
                dtype = state_dtype(param)
                if dtype != param.dtype:
                    self.state[param][key] = value.to(param.device, dtype, copy=True)
