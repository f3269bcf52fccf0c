"""torch.optim's contract around a fused step: hooks, groups, checkpoints, splitting."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from fusedoptim._locks import between_steps, new_lock, refuse_nested
from fusedoptim._torch_private import BypassModes, count_modes, transform_level, without_dynamo
from fusedoptim.allocator import check_not_forked, is_forked
from fusedoptim.split.checkpoints import (
    changes_nothing,
    check_saved_halves,
    has_trail,
    saved_states,
    with_trails_of_frozen,
)
from fusedoptim.split.halves import LOST, Halves, check_splittable
from fusedoptim.split.hooks import check_no_hooks
from fusedoptim.step import commit
from fusedoptim.step.checks import (
    OPTIONS,
    check_norm,
    check_not_of_group,
    check_numbers,
    check_options,
    check_param,
    check_saved_options,
    check_saved_state,
    describe,
    named_params,
)
from fusedoptim.step.hooks import call_with_hook, with_hooks
from fusedoptim.step.modes import check_not_traced
from fusedoptim.step.plan import StepPlan
from fusedoptim.step.rule import Candidate, UpdateDefinition, UpdateRule
from fusedoptim.step.scalars import CLIP_EPS, TakesScale, common_factor
from fusedoptim.step.sharding import Layout, Spread, is_dtensor, like_param, local_of, over_meshes
from fusedoptim.step.state import numbers_in, restore_state, without_gaps, without_trails
from fusedoptim.step.step_counts import KEY
from fusedoptim.step.tensors import TRAIL, Group, has_memory, state_dtype


class FusedOptimizer(UpdateDefinition):
    """Base of the optimizers whose step is one kernel launch for each group, device and dtype.

    A subclass names its kernels and computes their scalars. The names of the kernels' State
    arguments are keys of ``optimizer.state[param]``, made at a parameter's first step.
    """

    max_grad_norm: float | None
    """Gradients are scaled down, inside the step, to this norm over all parameters."""
    halves: Halves
    """The parameters that are split."""

    fused = True
    """IPEX sets the same attribute on its fused optimizers."""
    _step_supports_amp_scaling = TakesScale()
    _of_all_groups: tuple[str, ...] = ("max_grad_norm", "split")
    """The constructor's arguments that no group can have, each an attribute of the same name."""
    _clip_eps = CLIP_EPS
    """Added to the norm that ``max_grad_norm`` is divided by."""
    _to_restore: Sequence[tuple[Tensor, Group, Tensor | None]] = ()
    """While a checkpoint is loaded: each parameter, its state there, and its coming trail."""
    _before_launch: Callable[[], None] | None = None
    """What a subclass does once all checks have passed, before anything is launched."""
    _is_between_steps = False
    """Whether a thread holds the lock, but not for a step."""
    _plan: StepPlan

    def __init__(
        self,
        *args: Any,
        max_grad_norm: float | None = None,
        split: bool = False,
        **kwargs: Any,
    ) -> None:
        check_norm(max_grad_norm)
        if split not in (True, False):
            raise TypeError(f"{type(self).__name__}: split is {split!r}; pass True or False")
        self._set_up(max_grad_norm, split)
        self._is_complete = False
        super().__init__(*args, **kwargs)
        self._convert_state()
        self._split(self.param_groups)
        self._is_complete = True

    def _set_up(self, max_grad_norm: float | None, split: bool) -> None:
        """Set the attributes that this class adds, in a new object or in one that becomes ours."""
        self._lock = new_lock()
        # Not forgotten with the plans: a process that loads a checkpoint may be the only one.
        self._agreed: dict[Any, Layout] = {}
        self._forget_plans()
        self.max_grad_norm = max_grad_norm
        vars(self)["split"] = split
        self.halves = Halves(self)
        self._is_complete = True

    @property
    def split(self) -> bool:
        """Whether all parameters are bfloat16 halves, whose lower halves are the state "trail"."""
        value: bool = self.__dict__["split"]
        return value

    @split.setter
    def split(self, value: bool) -> NoReturn:
        raise AttributeError(
            f"{type(self).__name__}: split cannot be changed; construct an optimizer with "
            f"split={value!r}, or use split_params() and merge_params()"
        )

    def _initial_state(self, group: Group, name: str, target: Tensor, dtype: torch.dtype) -> Tensor:
        """The state ``name`` of a parameter that has taken no step, laid out like ``target``."""
        if name == TRAIL:
            raise ValueError(f"{type(self).__name__}: {LOST}")
        return super()._initial_state(group, name, target, dtype)

    @with_hooks
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single optimization step.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            what ``closure`` returned.

        Raises:
            TypeError: a parameter of a dtype or layout that cannot be updated, a tensor with no
                memory of its own, or a hyper-parameter that is not a number.
            ValueError: a hyper-parameter is NaN.
            OverflowError: a hyper-parameter is too large for the arithmetic of the parameters.
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
        # Not by is_held(), which would be one more call in each step.
        if self._lock._is_owned():  # type: ignore[attr-defined]  # typeshed lacks it
            refuse_nested(self, "step")
        with self._lock:
            is_taken = False
            try:
                if count_modes() or transform_level() is not None:
                    check_not_traced(f"{type(self).__name__}: step()")
                    with BypassModes():
                        is_taken = self._update()
                else:
                    is_taken = self._update()
            finally:
                if not is_taken:
                    self._plan.release()
        return loss

    def _update(self) -> bool:
        """Take the step, unless a GradScaler skips it; say whether it was taken."""
        state = self.state
        self._plan.update(state, self.param_groups, self._rule)
        plans = self._plan.groups
        found_inf: Tensor | int | None = getattr(self, "found_inf", None)  # a GradScaler's
        mesh_sums = self._plan.mesh_sums
        if found_inf is not None and not mesh_sums and found_inf:
            return False
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)  # a GradScaler's
        if grad_scale is not None and not has_memory(grad_scale):
            raise TypeError(
                f"{type(self).__name__}: grad_scale is a {type(grad_scale).__name__} with no "
                "memory of its own; make the GradScaler, and call its first scale(), outside "
                "of FakeTensorMode"
            )
        squares: list[tuple[Spread | None, Tensor]] = []
        if self.max_grad_norm is not None:
            check_norm(self.max_grad_norm)
            squares = [square for plan in plans for square in plan.sums_of_squares()]
        if mesh_sums and (found_inf is not None or self.max_grad_norm is not None):
            squares, found_inf = over_meshes(mesh_sums, squares, found_inf)
            if found_inf is not None and found_inf:
                return False
        if self._plan.joint is not None:  # not before the norms, which others may take first
            self._plan.joint.agree(self._agreed)
        common: Tensor | None = None
        if grad_scale is not None or self.max_grad_norm is not None:
            own = [square for _, square in squares]
            common = common_factor(grad_scale, own, self.max_grad_norm, self._clip_eps)
        if self._before_launch is not None:
            self._before_launch()
        if self._plan.state_seen is None:
            self.halves.begin_step(p for p in self.halves if p.grad is not None)
        commit.run(self._plan.all, common, state)
        for plan in self._plan.keeping:
            plan.release()
        if self._plan.state_seen is None:
            self._plan.see_state(state)
            self.halves.settle(self._params())
        return True

    def _rule(self, group: Group) -> UpdateRule:
        return UpdateRule(self, group)

    def _forget_plans(self) -> None:
        with self._lock:
            self._plan = StepPlan()

    def _check_groups(self) -> None:
        """Raise if there is a parameter or an option for which no step can be taken."""
        for group in self.param_groups:
            self._check_options(group)
            for p, name in named_params(self.param_groups, group):
                check_param(describe(type(self).__name__, Candidate(p, p, name)), p)

    def _check_options(self, group: Group) -> None:
        """Raise if ``group`` asks for an implementation of the step other than the fused one."""
        peers = [cls for cls in type(self).__mro__ if cls.__module__.startswith("torch.optim.")]
        instead = "omit the option"
        if peers[0] is not Optimizer:
            instead += f", or use plain torch.optim.{peers[0].__name__}"
        check_options(type(self).__name__, group, instead)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters, as ``torch.optim.Optimizer.add_param_group`` does.

        Args:
            param_group: a dict with ``params`` and the options that differ from the defaults.

        Raises:
            RuntimeError: the group asks for ``foreach``, ``differentiable``, ``capturable`` or
                ``fused=False``.
            ValueError: a hyper-parameter is NaN, or the group has an argument of the constructor
                that is one for all groups, such as ``max_grad_norm``, with another value.
            TypeError: with ``split``, a parameter is neither float32 nor bfloat16.
        """
        if isinstance(param_group, dict):
            for_all = {n: getattr(self, n) for n in self._of_all_groups if n not in self.defaults}
            check_not_of_group(type(self).__name__, param_group, for_all)
            whole = self.defaults | param_group
            self._check_options(whole)
            check_numbers(type(self).__name__, {name: whole[name] for name in self.defaults})
        before = len(self.param_groups)
        try:
            without_dynamo(super().add_param_group)(param_group)
            self._check_options(self.param_groups[-1])  # its parameters are a list now
            if self.split:
                check_splittable(type(self).__name__, self._params())
            if self._is_complete:
                self._split(self.param_groups[before:])
        except BaseException:
            del self.param_groups[before:]
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as ``torch.optim.Optimizer.zero_grad`` does.

        Args:
            set_to_none: drop them instead of filling them with zeros.
        """
        without_dynamo(super().zero_grad)(set_to_none)

    def _convert_state(self) -> None:
        """Recreate, in our dtype, the state that the constructor of torch's class created."""
        for group in self.param_groups:
            for p in group["params"]:
                dtype = state_dtype(p)
                for name, value in self.state.get(p, {}).items():
                    if name != KEY and value.dtype != dtype:
                        initial = self._initial_state(group, name, local_of(p), dtype)
                        self.state[p][name] = like_param(initial, p)

    def _split(self, groups: list[Group]) -> None:
        """With ``split``, split the parameters of new groups."""
        if self.split:
            self.halves.split_all(p for group in groups for p in group["params"])

    def is_split(self, param: Tensor) -> bool:
        """Whether a parameter is the upper half of float32 values.

        Args:
            param: a parameter of this optimizer.
        """
        return self.split or param in self.halves

    def split_params(self, params: Iterable[Tensor]) -> None:
        """Keep some parameters in two halves from now on, as ``split=True`` keeps all.

        Args:
            params: parameters of this optimizer. Float32 ones become bfloat16, and stay the same
                objects. The lower halves of bfloat16 ones begin at zero. Those already split stay
                unchanged.

        Raises:
            ValueError: a parameter is not of this optimizer.
            TypeError: a parameter is neither float32 nor bfloat16, or not strided.
            RuntimeError: parameters share memory or are in a DistributedDataParallel, a gradient
                does not fit, or the call is inside a tracing mode. Nothing was converted then.

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
            raise ValueError(f"{name}: a parameter of shape {shape} is not one of the optimizer's")
        check_splittable(name, chosen, own)
        with self._lock:
            self._forget_plans()
            self.halves.split_all(chosen)

    def merge_params(self, params: Iterable[Tensor]) -> None:
        """Make split parameters float32 again, without losing a bit; the inverse of a split.

        Args:
            params: parameters that :meth:`split_params` has split. They become float32, and stay
                the same objects.

        Raises:
            ValueError: a parameter is not split; or ``split=True`` has split it, which holds for
                the whole optimizer; or its lower half is lost.
            TypeError: a parameter is sharded.
            RuntimeError: a parameter is in a DistributedDataParallel, or the call is inside a
                tracing mode. Nothing was converted then.
        """
        chosen = list(dict.fromkeys(params))
        name = type(self).__name__
        check_not_traced(f"{name}: merge_params()")
        for p in chosen:
            if self.split or p not in self.halves:
                why = "all of the optimizer's are split" if self.split else "it is not split"
                raise ValueError(f"{name}: cannot merge one of shape {tuple(p.shape)}: {why}")
            if is_dtensor(p):
                raise TypeError(
                    f"{name}: a sharded parameter (DTensor) stays split; do not merge it"
                )
        for p in chosen:
            self.halves.trail(p)  # raises if it is lost
        check_no_hooks(name, chosen)
        with self._lock:
            self._forget_plans()
            self.halves.merge_all(chosen)

    def master_params(self) -> Iterator[Tensor]:
        """Copies of the parameters' exact values, float32 for split ones, in the groups' order.

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
        names = ("halves", "max_grad_norm", "split")  # halves first: it may zero trails in state
        return {name: getattr(self, name) for name in names} | super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        for p, saved, trail in self._to_restore:  # before torch's class takes the state over
            restore_state(state["state"], p, saved, trail)
        if self._to_restore:
            coming = [(p, t, has_trail(s)) for p, s, t in self._to_restore if t is not None]
            self.halves.expect_state(state["state"], coming)
        defaults = (vars(self) | state)["defaults"]
        # A checkpoint brings hyper-parameters; which implementation runs is the class's choice.
        for group in state["param_groups"]:
            for option in OPTIONS:
                if option in defaults:
                    group[option] = defaults[option]
            # The checkpoint's class may lack some of our options.
            for name in defaults.keys() - set(OPTIONS):
                group.setdefault(name, defaults[name])
        super().__setstate__(state)
        if not hasattr(self, "_lock"):  # copied or unpickled
            halves = self.halves
            self._set_up(self.max_grad_norm, self.split)
            self.halves = halves
        self.halves.belong_to(self)
        self._forget_plans()

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim's, but without lower halves if a model's state_dict has the exact values.

        8-bit state is saved as bfloat16, which represents all its values exactly. Within a process
        group, lower halves are saved as int32, because processes cannot exchange 16-bit integers.
        """
        unsaved = self._unsaved_state()

        def as_saved(_: Optimizer, state_dict: dict[str, Any]) -> None:
            params = list(zip(numbers_in(state_dict), self._params()))
            state_dict["state"] = saved_states(self.halves, state_dict["state"], params, unsaved)

        # The lock, as torch iterates over the hooks, which another thread's call changes.
        with between_steps(self, "state_dict"):
            register = functools.partial(self.register_state_dict_post_hook, prepend=True)
            return call_with_hook(register, as_saved, without_dynamo(super().state_dict))

    def _unsaved_state(self) -> set[str]:
        """The names of the state that :meth:`state_dict` leaves out."""
        return {TRAIL} if self.halves.in_model else set()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of this class or of the torch.optim class that it replaces.

        torch.optim casts the state to the parameter's dtype. Here, the state of 16-bit parameters
        is float32, and a float32 checkpoint loads without losing a bit. If the checkpoint is
        torch's and has no lower halves, split parameters keep theirs. If it lacks only those of
        frozen parameters, which torch.distributed.checkpoint does not load, these become zeros,
        with a warning.

        Args:
            state_dict: what :meth:`state_dict` of either class returned.

        Raises:
            ValueError: the checkpoint does not fit the groups, is of another kind of optimizer or
                sharded otherwise, or has lost some of its state or of its lower halves. Nothing
                was changed then.
        """

        def check(_: Optimizer, final: dict[str, Any]) -> None:
            states = {i: self._to_load(state) for i, state in final["state"].items()}
            split = [(i, p) for i, p in zip(numbers_in(final), self._params()) if self.is_split(p)]
            final["state"] = with_trails_of_frozen(type(self).__name__, states, split)
            self._check_checkpoint(final)
            saved = self._saved(final)
            # torch's class would cast the trails, and take each for the state of an earlier step.
            final["state"] = without_trails(final["state"])
            if changes_nothing(self.halves, self.state, saved):
                saved = self._saved(final)
            self._to_restore = [(p, s, self._trail_after_load(p, s)) for p, s in saved]

        load = functools.partial(without_dynamo(super().load_state_dict), state_dict)
        with between_steps(self, "load_state_dict"):  # torch iterates over the hooks here too
            try:
                # It is the last before torch reads the checkpoint.
                call_with_hook(self.register_load_state_dict_pre_hook, check, load)
            finally:
                self._to_restore = ()  # an interrupt may come in the call below
                vars(self).pop("_to_restore", None)

    def _to_load(self, saved: Any) -> Any:
        """What is loaded of a parameter's state in a checkpoint."""
        return without_gaps(saved)

    def _trail_after_load(self, param: Tensor, saved: Any) -> Tensor | None:
        """The trail that a parameter will have once its ``saved`` state is loaded."""
        if not self.is_split(param):
            return None
        if has_trail(saved):
            trail: Tensor = saved[TRAIL].to(param.device, torch.int16, copy=True)
            return trail
        return self.halves.find(param)

    def _check_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """Raise unless a state_dict is of this kind of optimizer, and whole."""
        name = type(self).__name__
        check_saved_options(name, state_dict["param_groups"], self._saved_options)
        saved = [(i, p, state) for i, (p, state) in enumerate(self._saved(state_dict))]
        check_saved_state(name, saved, self._saved_state, self._optional_state)
        check_saved_halves(name, [entry for entry in saved if self.is_split(entry[1])])

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _saved(self, state_dict: dict[str, Any]) -> list[tuple[Tensor, dict[str, Any]]]:
        """Each parameter with the state that a state_dict has for it."""
        ids = numbers_in(state_dict)
        return [(p, state_dict["state"].get(i, {})) for i, p in zip(ids, self._params())]
