"""What all fused optimizers share: torch's contract around one launch for each bucket."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.optim.optimizer import (
    Optimizer,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

from fusedoptim import _split
from fusedoptim._bucket import Bucket
from fusedoptim._device import new_state
from fusedoptim._gradients import multiplier
from fusedoptim._modes import (
    BypassModes,
    check_not_traced,
    count_modes,
    has_memory,
    transform_level,
)
from fusedoptim._plan import OPTIONS, Later, Numbers, Plan
from fusedoptim._sparse import SparseBucket
from fusedoptim._steps import Steps
from fusedoptim._tensors import (
    TRAIL,
    Candidate,
    Group,
    are_same_objects,
    check_param,
    describe,
    set_grad_enabled,
    state_dtype,
)
from fusedoptim.allocator import check_not_forked, is_forked

_Step = TypeVar("_Step", bound=Callable[..., Any])


def _with_hooks(step: _Step) -> _Step:
    """Put torch's hooks and profiler range around ``step``, when there are any.

    torch wraps every ``step`` so, and for an optimizer of one small tensor the wrapper's profiler
    range alone takes 4 us, where the whole of FusedSGD's step takes 9 us. ``hooked`` tells
    torch that this one is wrapped already.

    torch.compile must not trace into a step: it would take the addresses for constants. It finds
    the question only by its whole name.
    """
    hooked = Optimizer.profile_hook_step(step)
    untraced = torch._disable_dynamo(hooked)  # type: ignore[attr-defined]  # as torch's steps do

    @functools.wraps(step)
    def wrapper(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return untraced(self, *args, **kwargs)
        if (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            or _profiler_enabled()
        ):
            return hooked(self, *args, **kwargs)
        if args or kwargs:
            return step(self, *args, **kwargs)
        return step(self)  # to unpack nothing takes 0.8 us, between other work

    wrapper.hooked = True  # type: ignore[attr-defined]  # functions have no such one to mypy
    return cast(_Step, wrapper)


def number(value: Any) -> float:
    """A hyper-parameter, which may be a tensor, as a Python number."""
    return value.item() if isinstance(value, Tensor) else value


def _check_norm(max_grad_norm: float | None) -> None:
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"Invalid max_grad_norm value: {max_grad_norm}")


class FusedOptimizer(Optimizer):
    """Base of the optimizers whose step is one kernel launch for each group, device and dtype.

    A subclass names its kernels and computes their scalars. The kernels' State arguments are keys
    of ``optimizer.state[param]``, made at a parameter's first step.
    """

    max_grad_norm: float | None
    """Gradients are scaled down, inside the step, to this norm over all parameters."""
    split: bool
    """Whether all parameters are bfloat16 halves, whose lower halves are the state "trail"."""
    halves: _split.Halves
    """The parameters that are."""

    fused = True
    """As IPEX tells of its own."""
    _step_supports_amp_scaling = True
    """GradScaler leaves it to the step to unscale, and to skip a step with infinities."""
    _clip_eps = 1e-6
    """Added to the norm that ``max_grad_norm`` is divided by."""
    _sparse_state: tuple[str, ...] = ()
    """Names of the state that a sparse gradient makes, and that is sparse then, as torch's."""
    _optional_state: frozenset[str] = frozenset()
    """Names of the state that a parameter may lack though it has other state of earlier steps."""
    _to_restore: Sequence[tuple[Tensor, Group, Tensor | None]] = ()
    """While a checkpoint is loaded: each parameter's state in it, and the trail that it has."""
    _number_attributes: ClassVar[tuple[str, ...]] = ()
    """What of the optimizer itself its numbers depend on."""
    _plans: list[Plan]
    _state_seen: list[object]
    """The keys and dicts of ``state`` when last seen; a load or a reset makes new ones."""
    _seen: list[object]
    """Those and what the groups held when the plans last fitted; empty if what they hold may change
    in place."""

    def __init__(
        self,
        *args: Any,
        max_grad_norm: float | None = None,
        split: bool = False,
        **kwargs: Any,
    ) -> None:
        _check_norm(max_grad_norm)
        self._set_up(max_grad_norm, split)
        self._is_complete = False
        super().__init__(*args, **kwargs)
        self._convert(self.param_groups)
        self._is_complete = True

    def _set_up(self, max_grad_norm: float | None, split: bool) -> None:
        """Give an object what ours has beyond torch's: at first, or when it becomes ours."""
        self._lock = threading.RLock()
        self._forget_plans()
        self.max_grad_norm = max_grad_norm
        self.split = split
        self.halves = _split.Halves(self)
        self._is_complete = True

    # What raises here each subclass has, but for _row_numbers where no kernel has a ROW_SCALAR, as
    # in SGD; an ABC would ask for that too.
    def _kernels(self, group: Group) -> tuple[str, ...]:
        """The names of the kernels that update ``group``, in order."""
        raise NotImplementedError

    def _numbers(self, group: Group) -> Numbers:
        """The kernels' scalars and flags for a step of ``group`` while it is as it is."""
        raise NotImplementedError

    def _row_numbers(self, group: Group, steps: Steps) -> dict[str, Steps]:
        """The scalars that depend on how many ``steps`` a parameter has taken, this one too."""
        raise NotImplementedError

    def _initial_state(self, group: Group, name: str, target: Tensor, dtype: torch.dtype) -> Tensor:
        """The state ``name`` of a parameter that has taken no step, laid out like ``target``."""
        if name == TRAIL:
            raise ValueError(f"{type(self).__name__}: {_split.LOST}")
        return new_state(target, dtype).zero_()

    def _check_sparse(self, group: Group, candidate: Candidate) -> None:
        """Raise if a sparse gradient cannot be applied as ``group`` asks."""
        raise NotImplementedError

    @_with_hooks
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single optimization step.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            what ``closure`` returned.

        Raises:
            TypeError: a parameter of a dtype or layout that cannot be updated, or a tensor with no
                memory of its own.
            ValueError: a hyper-parameter is NaN.
            RuntimeError: a parameter on a device that SYCL does not serve, a gradient that does
                not fit its parameter, or a call in the middle of another, inside a tracing mode
                such as FakeTensorMode, or inside a torch.func transform. Nothing was written then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if is_forked():  # before the lock, which a thread of the parent may have held
            check_not_forked()  # raises
        if self._lock._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks
            raise RuntimeError(
                f"{type(self).__name__}: step() was called in the middle of a step of the same "
                "optimizer, as by a signal handler; call it when that has returned"
            )
        with self._lock:
            if count_modes() or transform_level() is not None:
                check_not_traced(f"{type(self).__name__}: step()")
                with BypassModes():
                    self._update()
            else:
                self._update()
        return loss

    def _update(self) -> None:
        plans = self._current_plans()
        if getattr(self, "found_inf", False):  # a GradScaler's, a tensor
            return
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)  # a GradScaler's
        common: Tensor | None = None
        if grad_scale is not None or self.max_grad_norm is not None:
            common = self._common_multiplier(plans, grad_scale)
        launched: list[Bucket | SparseBucket] = []
        try:
            try:
                self._launch_all(plans, common, launched)
            finally:
                self._finish(launched)
        except BaseException:
            self._finish(launched)  # an interrupt may have kept it from some of them
            raise
        if not self._state_seen:
            self._state_seen = [*self.state, *self.state.values()]

    def _launch_all(
        self, plans: list[Plan], common: Tensor | None, launched: list[Bucket | SparseBucket]
    ) -> None:
        """Start all updates, each of which then is one of the ``launched``."""
        row_numbers = self._row_numbers
        for group, plan in zip(self.param_groups, plans):
            for bucket in plan.together:
                launched.append(bucket)
                bucket.launch(plan.settings, common, row_numbers, group)
            for made in plan.in_turn:
                self._finish(launched)  # a later one is made from what these have updated
                bucket = made.bucket(self, group) if isinstance(made, Later) else made
                launched.append(bucket)
                bucket.launch(plan.settings, common, row_numbers, group)
                self._finish(launched)

    def _common_multiplier(self, plans: list[Plan], grad_scale: Tensor | None) -> Tensor:
        """What a GradScaler and ``max_grad_norm`` want all gradients multiplied by."""
        squares = []
        if self.max_grad_norm is not None:
            _check_norm(self.max_grad_norm)
            for plan in plans:
                squares += [bucket.sum_of_squares() for bucket in plan.buckets]
                squares += [
                    later.planned.sum_of_squares() for later in plan.later if not later.is_repeated
                ]
        if grad_scale is not None and not has_memory(grad_scale):
            raise TypeError(
                f"{type(self).__name__}: grad_scale is a {type(grad_scale).__name__} with no "
                "memory of its own; make the GradScaler, and call its first scale(), outside of "
                "FakeTensorMode"
            )
        return multiplier(grad_scale, squares, self.max_grad_norm, self._clip_eps)

    def _finish(self, buckets: list[Bucket | SparseBucket]) -> None:
        """Finish every bucket, whatever happens to one of them."""
        error: BaseException | None = None
        for bucket in buckets:
            try:
                bucket.finish(self.state)
            except BaseException as raised:  # an interrupt too
                error = error or raised
        if error is not None:
            raise error

    def _current_plans(self) -> list[Plan]:
        """The plan of each group, made anew where it no longer fits; writes no user's tensor."""
        seen: list[object] = [*self.state, *self.state.values()]
        for group in self.param_groups:  # in one list, as short lists take most of their time each
            seen += group.values()
            seen += group["params"]
        if not (are_same_objects(seen, self._seen) and all(map(Plan.refresh, self._plans))):
            self._seen = []  # whatever is revised if this is interrupted
            if self._revise_plans() and all(plan.is_final for plan in self._plans):
                self._seen = seen
        return self._plans

    def _revise_plans(self) -> bool:
        """Make those plans anew that do not fit; False if there were any, as they make state."""
        if not are_same_objects([*self.state, *self.state.values()], self._state_seen):
            self._forget_plans()
        all_fit = True
        given_before: list[set[int]] = []
        for i, group in enumerate(self.param_groups):
            plan = self._plans[i] if i < len(self._plans) else None
            if plan is None or not (plan.read(self, group) and plan.refresh()):
                all_fit = False
                self._state_seen = []  # the step will make state
                given_before = given_before or self._given_before()
                is_grad_enabled = torch.is_grad_enabled()
                try:
                    set_grad_enabled(False)
                    self._plans[i : i + 1] = [Plan(self, group, given_before[i])]
                finally:
                    set_grad_enabled(is_grad_enabled)
                if any(given_before):  # perhaps by this group now
                    del self._plans[i + 1 :]
        del self._plans[len(self.param_groups) :]
        return all_fit

    def _given_before(self) -> list[set[int]]:
        """For each group, the ids of its parameters that a group before it has too.

        torch refuses to make such groups, but they may be edited.
        """
        met: set[int] = set()
        repeated = []
        for group in self.param_groups:
            params = set(map(id, group["params"]))
            repeated.append(params & met)
            met |= params
        return repeated

    def _forget_plans(self) -> None:
        with self._lock:
            self._plans = []
            self._state_seen = []
            self._seen = []

    def _candidates(self, group: Group) -> Iterator[Candidate]:
        """The group's parameters that have a gradient, with what an error would call them."""
        for p, name in self._named(group):
            grad = p.grad  # once: another thread's zero_grad() may take it away
            if grad is not None:
                yield Candidate(p, grad, name)

    def _named(self, group: Group) -> Iterator[tuple[Tensor, str]]:
        """The group's parameters with what an error would call them."""
        names = group.get("param_names")
        where = ""
        if len(self.param_groups) > 1:
            where = f" of group {[g is group for g in self.param_groups].index(True)}"
        for i, p in enumerate(group["params"]):
            yield p, names[i] if names else f"parameter {i}{where}"

    def _check_groups(self) -> None:
        """Raise if there is a parameter or an option for which no step can be taken."""
        for group in self.param_groups:
            self._check_options(group)
            for p, name in self._named(group):
                check_param(describe(type(self).__name__, Candidate(p, p, name)), p)

    def _check_options(self, group: Group) -> None:
        """Raise if ``group`` asks for another implementation of the step than the fused one."""
        name = type(self).__name__
        peers = [cls for cls in type(self).__mro__ if cls.__module__.startswith("torch.optim.")]
        instead = f"use torch.optim.{peers[0].__name__} for that"
        if peers[0] is Optimizer:
            instead = "leave the option away"
        if group.get("differentiable"):
            raise RuntimeError(
                f"differentiable=True: {name}'s step is opaque to autograd; {instead}"
            )
        if group.get("foreach"):
            raise RuntimeError(f"foreach=True: {name}'s step is always fused; {instead}")
        if group.get("capturable"):
            raise RuntimeError(
                f"capturable=True: {name}'s step is not captured in graphs; {instead}"
            )
        if group.get("fused") is False:
            raise RuntimeError(f"fused=False: {name}'s step is always fused; {instead}")

    def _check_numbers(self, group: Group) -> None:
        """Raise if a hyper-parameter of ``group`` is NaN."""
        for name, value in group.items():
            values = value if isinstance(value, tuple) else (value,)
            if any(isinstance(v, float | Tensor) and bool(v != v) for v in values):
                raise ValueError(
                    f"{type(self).__name__}: {name} is {value}; set it to a number, as in "
                    f"optimizer.param_groups[0][{name!r}] = ..."
                )

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters, as ``torch.optim.Optimizer.add_param_group`` does.

        Args:
            param_group: a dict with ``params`` and what is to differ from the defaults.

        Raises:
            RuntimeError: the group asks for ``foreach``, ``differentiable``, ``capturable`` or
                ``fused=False``.
            ValueError: a hyper-parameter is NaN.
            TypeError: with ``split``, a parameter is neither float32 nor bfloat16.
        """
        if isinstance(param_group, dict):
            whole = self.defaults | param_group
            self._check_options(whole)
            self._check_numbers({k: v for k, v in whole.items() if k != "params"})
        before = len(self.param_groups)
        try:
            super().add_param_group(param_group)
            if self.split:
                _split.check(type(self).__name__, self._params())
            if self._is_complete:
                self._convert(self.param_groups[before:])
        except BaseException:
            del self.param_groups[before:]
            raise

    def _convert(self, groups: list[Group]) -> None:
        """Bring new parameters, and the state that torch made for them, into our form."""
        for group in groups:
            for p in group["params"]:
                dtype = state_dtype(p)
                for name, value in self.state.get(p, {}).items():
                    if name not in (TRAIL, "step") and value.dtype != dtype:
                        self.state[p][name] = self._initial_state(group, name, p, dtype)
        if self.split:
            self._split_all(p for group in groups for p in group["params"])

    def _split_all(self, params: Iterable[Tensor]) -> None:
        """Split all that are not yet or, where there is no memory for that, none."""
        chosen = [p for p in dict.fromkeys(params) if p not in self.halves]
        whole = {p for p in chosen if p.dtype == torch.float32}
        try:
            for p in chosen:
                self.halves.split(p)
        except BaseException:  # torch's is a RuntimeError
            for p in chosen:
                if p in self.halves and p in whole:
                    self.halves.merge(p)
                else:
                    self.halves.forget(p)
            raise

    def is_split(self, param: Tensor) -> bool:
        """Whether a parameter is the upper half of float32 values.

        Args:
            param: of this optimizer.
        """
        return self.split or param in self.halves

    def split_params(self, params: Iterable[Tensor]) -> None:
        """Keep some parameters in two halves from now on, as ``split=True`` keeps all.

        Args:
            params: of this optimizer, float32, or bfloat16, whose lower halves begin at zero; the
                same objects become bfloat16. Those that are split already stay as they are.

        Raises:
            ValueError: a parameter is not of this optimizer.
            TypeError: a parameter is neither float32 nor bfloat16, or not strided.
            RuntimeError: parameters share memory, a gradient does not fit, or the call is inside a
                tracing mode. Nothing was converted then.

        Example:
            >>> import torch
            >>> from fusedoptim import FusedAdam
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = FusedAdam(model.parameters())
            >>> optimizer.split_params([model.weight])
            >>> model.weight.dtype, model.bias.dtype
            (torch.bfloat16, torch.float32)
            >>> optimizer.merge_params([model.weight])
            >>> model.weight.dtype
            torch.float32
        """
        own = self._params()
        name = type(self).__name__
        chosen = [p for p in dict.fromkeys(params) if not self.is_split(p)]
        if strangers := set(chosen).difference(own):
            shape = tuple(strangers.pop().shape)
            raise ValueError(f"{name}: a parameter of shape {shape} is none of the optimizer's")
        _split.check(name, chosen, own)
        with self._lock:
            self._forget_plans()
            self._split_all(chosen)

    def merge_params(self, params: Iterable[Tensor]) -> None:
        """Make split parameters float32 again, without losing a bit; the inverse of a split.

        Args:
            params: that :meth:`split_params` has split; the same objects become float32.

        Raises:
            ValueError: a parameter is not split, or was made so by ``split=True``, which holds for
                the whole optimizer; or its lower half is lost.
            RuntimeError: the call is inside a tracing mode. Nothing was converted then.
        """
        chosen = list(dict.fromkeys(params))
        name = type(self).__name__
        check_not_traced(f"{name}: merge_params()")
        for p in chosen:
            if self.split or p not in self.halves:
                why = "all of the optimizer's are split" if self.split else "it is not split"
                raise ValueError(f"{name}: cannot merge one of shape {tuple(p.shape)}: {why}")
        for p in chosen:
            self.halves.trail(p)  # raises if it is lost
        with self._lock:
            self._forget_plans()
            try:
                for p in chosen:
                    self.halves.merge(p)
            except BaseException:
                self._split_all(chosen)  # those that are merged already
                raise

    def master_params(self) -> Iterator[Tensor]:
        """The parameters' exact values, as float32 copies of the split ones; in order of groups.

        Example:
            >>> import torch
            >>> from fusedoptim import SplitSGD
            >>> model = torch.nn.Linear(2, 1, bias=False)
            >>> before = model.weight.detach().clone()
            >>> optimizer = SplitSGD(model.parameters(), lr=0.1)
            >>> model.weight.dtype
            torch.bfloat16
            >>> (master,) = optimizer.master_params()
            >>> torch.equal(master, before)
            True
        """
        for p in self._params():
            yield self.halves.exact(p) if p in self.halves else p.detach().clone()

    def __getstate__(self) -> dict[str, Any]:
        names = ("max_grad_norm", "split", "halves")
        return super().__getstate__() | {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for p, saved, trail in self._to_restore:  # before it is the optimizer's
            _restore_state(state["state"], p, saved, trail)
        # torch's classes take all state for that of a parameter that has taken a step.
        unstepped = {p: s for p, s in state["state"].items() if s.keys() == {TRAIL}}
        for p in unstepped:
            del state["state"][p]
        super().__setstate__(state)
        self.state.update(unstepped)
        if not hasattr(self, "_lock"):  # a copy, or out of a file
            halves = self.halves
            self._set_up(self.max_grad_norm, self.split)
            self.halves = halves
        self.halves.belong_to(self)
        self._forget_plans()
        # A checkpoint brings hyper-parameters; which implementation runs is the class's choice.
        for group in self.param_groups:
            for option in OPTIONS:
                if option in self.defaults:
                    group[option] = self.defaults[option]
            # The class of the checkpoint may not have all of ours.
            for name in self.defaults.keys() - set(OPTIONS):
                group.setdefault(name, self.defaults[name])

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim's; without the lower halves where a model's state_dict has the values."""
        unsaved = self._unsaved_state()
        if not unsaved:
            return super().state_dict()

        def leave_out(_: Optimizer, state_dict: dict[str, Any]) -> None:
            states = {
                key: {name: value for name, value in state.items() if name not in unsaved}
                for key, state in state_dict["state"].items()
            }
            state_dict["state"] = {key: state for key, state in states.items() if state}

        handle = self.register_state_dict_post_hook(leave_out, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def _unsaved_state(self) -> set[str]:
        """The names of the state that :meth:`state_dict` leaves out."""
        return {TRAIL} if self.halves.in_model else set()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of this class or of the torch.optim class that it stands for.

        torch.optim casts the state to the parameter's dtype; ours is float32 for 16-bit parameters,
        and a float32 checkpoint is loaded without losing a bit. Split parameters keep their lower
        halves where the checkpoint, one of torch's, has none.

        Args:
            state_dict: what :meth:`state_dict` of either class returned.

        Raises:
            ValueError: the checkpoint does not fit the groups, or has lost some of its lower
                halves. Nothing was changed then.
        """
        trails = {p: self.state[p][TRAIL] for p in self._params() if TRAIL in self.state.get(p, {})}

        def check(_: Optimizer, final: dict[str, Any]) -> None:
            saved = self._saved(final)
            halves = [(i, p, s) for i, (p, s) in enumerate(saved) if self.is_split(p)]
            _split.check_checkpoint(type(self).__name__, halves)
            self._to_restore = [(p, s, trails.get(p)) for p, s in saved]

        handle = self.register_load_state_dict_pre_hook(check)  # the last before torch reads it
        try:
            super().load_state_dict(state_dict)
        finally:
            vars(self).pop("_to_restore", None)
            handle.remove()

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _saved(self, state_dict: dict[str, Any]) -> list[tuple[Tensor, dict[str, Any]]]:
        """Each parameter with the state that a state_dict has for it."""
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        return [(p, state_dict["state"].get(i, {})) for i, p in zip(ids, self._params())]


def _restore_state(
    states: dict[Tensor, Any], param: Tensor, saved: Group, trail: Tensor | None
) -> None:
    """Put into ``states`` as it was ``saved`` what torch has cast to the parameter's dtype.

    Args:
        states: about to be an optimizer's.
        param: one of its parameters.
        saved: the parameter's state in a checkpoint.
        trail: the parameter's, which it keeps if the checkpoint has none.
    """
    if trail is not None and TRAIL not in saved:
        states[param][TRAIL] = trail
    for key, value in saved.items() if isinstance(saved, dict) else ():
        if key == TRAIL:
            states[param][key] = value.to(param.device, torch.int16, copy=True)
        elif isinstance(value, Tensor) and key != "step" and value.is_floating_point():
            dtype = state_dtype(param)
            if dtype != param.dtype:
                states[param][key] = value.to(param.device, dtype, copy=True)
