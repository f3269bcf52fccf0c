"""``OffloadOptimizer``: torch.optim's contract for parameters whose step is taken on the host."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from fusedoptim._locks import between_steps, is_held, new_lock, refuse_nested
from fusedoptim.offload._bucket import Bucket, own_options, remove_all
from fusedoptim.offload._checkpoints import load_states, with_states
from fusedoptim.offload._checks import check_arguments, check_no_bucket_views, check_param
from fusedoptim.offload._link import Link
from fusedoptim.step.checks import check_norm, check_not_of_group
from fusedoptim.step.hooks import with_hooks
from fusedoptim.step.plan import PIECES
from fusedoptim.step.scalars import CLIP_EPS, TakesScale, common_factor
from fusedoptim.step.sharding import is_piece
from fusedoptim.step.tensors import Group, State, state_dtype, update_order
from fusedoptim.step.unchanged import are_same_objects

__all__ = ["OffloadOptimizer"]

_HALF_LOADED = (
    "OffloadOptimizer: load_state_dict() was interrupted, and so was the return to the state "
    "before; load a checkpoint of model and optimizer before the next step"
)


class OffloadOptimizer(Optimizer):
    r"""An optimizer for parameters on a device, with its state and its step on the host.

    The host has a copy of each parameter, and an ordinary optimizer of these copies. Gradients are
    copied to the host while backward computes the others. A step updates one bucket after another,
    and copies the weights of one back while it updates the next. Each gradient and each weight
    crosses the bus once a step, in the parameter's dtype.

    With ``split=True`` and bfloat16 parameters, the device has the upper halves of float32 weights,
    and the host the lower ones: 2 bytes a weight go each way, and no update is rounded.

    Args:
        params: parameters on any device that torch has, or on several. Those on the CPU are copied
            too.
        optimizer_class: any class of this package, or one of torch.optim that works on the CPU.
        max_grad_norm: clip the gradients' norm, over all parameters, to this first. It is computed
            on the device.
        bucket_cap_mb: MiB of weights that are copied at once; a larger parameter is copied whole.
        copy_in_backward: copy gradients as backward makes them. False copies them in ``step()``,
            for when something changes them after backward that torch does not count, as
            DistributedDataParallel does and ``torch.distributed.all_reduce(p.grad)``. May be
            changed at any time, for example to False for all but the last of several backward
            passes.
        **kwargs: arguments of ``optimizer_class``.

    Raises:
        TypeError: a parameter is sharded (DTensor) or has no memory, or ``optimizer_class`` does
            not take it, or an argument is of a wrong type.
        ValueError: an argument is out of range, or a group has one that is for all groups.
        RuntimeError: parameters, or elements of one, share memory.

    If the constructor raises or is interrupted, no parameter was converted.

    Example:
        >>> import torch
        >>> from fusedoptim import FusedAdamW
        >>> from fusedoptim.offload import OffloadOptimizer
        >>> device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
        >>> model = torch.nn.Linear(3, 1).to(device)
        >>> optimizer = OffloadOptimizer(model.parameters(), FusedAdamW, lr=1e-3, split=True)
        >>> x = torch.ones(2, 3, dtype=torch.bfloat16, device=device)
        >>> model(x).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["exp_avg"].device
        device(type='cpu')

    ``param_groups`` has the device's parameters; changed options take effect at the next step. A
    state_dict has the form of ``optimizer_class``'s, and each class loads the other's.
    """

    _step_supports_amp_scaling = TakesScale()
    _is_between_steps = False
    """Whether a thread holds the lock, but not for a step."""

    def __init__(
        self,
        params: ParamsT,
        optimizer_class: Callable[..., Optimizer],
        *,
        max_grad_norm: float | None = None,
        bucket_cap_mb: float = 100,
        copy_in_backward: bool = True,
        **kwargs: Any,
    ) -> None:
        check_arguments(optimizer_class, max_grad_norm, bucket_cap_mb, copy_in_backward)
        self.max_grad_norm = max_grad_norm
        """Gradients are scaled down to this norm over all parameters."""
        self.copy_in_backward = copy_in_backward
        """Whether gradients are copied as backward makes them; if not, every step copies all."""
        self._bucket_cap_mb = bucket_cap_mb
        self._make = functools.partial(optimizer_class, **kwargs)
        self._links: dict[torch.device, Link] = {}
        self._buckets: list[Bucket] = []
        self._lock = new_lock()
        self._seen_groups: list[tuple[int, ...]] = []
        """Identities of the groups and their parameters when the buckets' groups were found."""
        self._shown: dict[Tensor, State] = {}
        """``state`` when it last showed what the host has."""
        self._shown_count = 0
        self._is_known_unwrapped = False
        """Whether backward's hooks were seen to be the last to change gradients."""
        self._torn: str | None = None
        """Why weights are of two different steps, if they are."""
        # Has the defaults, and raises for wrong arguments before any parameter is copied. It has no
        # parameter, as classes refuse some dtypes and shapes.
        defaults = self._make([{"params": []}]).defaults
        self._is_complete = False
        super().__init__(params, defaults)
        self.register_state_dict_post_hook(with_states)
        self._load_hook = self.register_load_state_dict_pre_hook(load_states)
        # Once all groups are accepted. It is the last call, as it undoes only its own interrupts.
        self._begin(self._buckets)
        self._is_complete = True

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters, as ``torch.optim.Optimizer.add_param_group`` does.

        Args:
            param_group: a dict with ``params`` and the options that differ from the defaults.

        Raises:
            TypeError, ValueError, RuntimeError: as the constructor. Nothing was added then.
        """
        own = {
            "max_grad_norm": self.max_grad_norm,
            "bucket_cap_mb": self._bucket_cap_mb,
            "copy_in_backward": self.copy_in_backward,
        }
        own = {name: value for name, value in own.items() if name not in self.defaults}
        if isinstance(param_group, dict):
            check_not_of_group(type(self).__name__, param_group, own)
        number = len(self.param_groups)
        try:
            super().add_param_group(param_group)
            group = self.param_groups[number]
            for p in group["params"]:
                check_param(p)
            if any(update_order([p for g in self.param_groups for p in g["params"]])):
                raise RuntimeError(
                    "OffloadOptimizer: parameters share memory, and their copies on the host would "
                    "not; clone() one first, or give one Parameter to both modules"
                )
            options = {n: value for n, value in own_options(group).items() if n not in own}
            chosen = set(group["params"])
            self._take_states()
            kept = [b for b in self._buckets if chosen.isdisjoint(b.params) or b.is_whole()]
            known = {p for bucket in kept for p in bucket.params}  # of a removed group
            new = [
                Bucket(self._link(params[0].device), params, options, self._make)
                for params in self._cut([p for p in group["params"] if p not in known])
            ]
            for bucket in new:
                bucket.group = group
                # Of a removed group whose parameters have changed: what the user has not deleted.
                left = {p: self.state[p] for p in bucket.params if self.state.get(p)}
                bucket.take_states(dict(bucket.states()) | left)
            if self._is_complete:
                self._begin(new)
            self._buckets = kept + new
        except BaseException:
            del self.param_groups[number:]
            raise
        self._show_states()

    def _begin(self, buckets: list[Bucket]) -> None:
        """Convert the parameters of new buckets, and let backward tell of their gradients.

        An error or an interrupt changes nothing. The exact values are those of the host, as the
        device may not have the memory to keep the old ones too.
        """
        before = [(b, b.params[0].dtype, [p.grad for p in b.params]) for b in buckets]
        try:
            for bucket in buckets:
                bucket.attach()
                self._register(bucket)
        except BaseException:
            for bucket, dtype, grads in before:
                bucket.detach(dtype, grads)
            raise

    def _cut(self, params: list[Tensor]) -> Iterator[list[Tensor]]:
        """The parameters of each bucket."""
        most = self._bucket_cap_mb * 2**20
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for p in params:
            bucket = kinds.setdefault((p.device, p.dtype), [])
            if bucket and sum(other.nbytes for other in bucket) + p.nbytes > most:
                yield bucket
                bucket = kinds[p.device, p.dtype] = []
            bucket.append(p)
        yield from kinds.values()

    def _find_groups(self) -> None:
        """Give each bucket its group, as users and checkpoints may remove and replace groups.

        Raises:
            RuntimeError: a parameter of a group has no bucket, or not all of a bucket are in one
                group.
        """
        seen = [(id(group), *map(id, group["params"])) for group in self.param_groups]
        if seen == self._seen_groups:
            return
        groups = {p: group for group in self.param_groups for p in group["params"]}
        if groups.keys() - {p for bucket in self._buckets for p in bucket.params}:
            raise RuntimeError(
                "OffloadOptimizer: a parameter was put into the list of a group; add it by "
                "optimizer.add_param_group()"
            )
        found = [[groups.get(p) for p in bucket.params] for bucket in self._buckets]
        if any(group is not each[0] for each in found for group in each):
            raise RuntimeError(
                "OffloadOptimizer: parameters of one group are no longer together; remove and add "
                "whole groups, or construct the optimizer again"
            )
        for bucket, each in zip(self._buckets, found):
            bucket.group = each[0]
        self._seen_groups = seen

    def _link(self, device: torch.device) -> Link:
        if device not in self._links:
            self._links[device] = Link(device)
        return self._links[device]

    def _register(self, bucket: Bucket) -> None:
        """Let backward tell ``bucket`` of gradients, for as long as this optimizer exists."""
        this, found = weakref.ref(self), weakref.ref(bucket)

        def hook(index: int, _: Tensor) -> None:
            optimizer, bucket = this(), found()
            if optimizer is None or bucket is None or bucket.group is None:
                return
            if optimizer.copy_in_backward:
                bucket.arrive(index)

        # Before the first hook, so that an interrupt leaves no hook forever.
        weakref.finalize(self, remove_all, bucket.hooks).atexit = False
        for i, p in enumerate(bucket.params):
            if p.requires_grad:
                register: Any = p.register_post_accumulate_grad_hook
                bucket.hooks.append(register(functools.partial(hook, i)))

    @with_hooks
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step on the host.

        The device's later work waits for the new weights; this call does not.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            what ``closure`` returned.

        Raises:
            RuntimeError: a parameter was moved or converted; or DistributedDataParallel averages
                gradients after backward has copied them; or an earlier call failed halfway,
                so weights may be of two different steps; or a load and the return to the state
                before it were interrupted.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if is_held(self._lock):
            refuse_nested(self, "step")
        with self._lock:
            self._update()
        return loss

    def _update(self) -> None:
        if self._torn is not None:
            raise RuntimeError(self._torn)
        if self.copy_in_backward and not self._is_known_unwrapped:
            check_no_bucket_views(p for bucket in self._buckets for p in bucket.params)
            self._is_known_unwrapped = True
        found_inf: Tensor | None = getattr(self, "found_inf", None)  # a GradScaler's
        if found_inf is not None and found_inf:
            self._distrust_copies()  # which would keep the gradients
            return
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)  # a GradScaler's
        # unscale_() does not change the gradients' versions.
        if not self.copy_in_backward or (found_inf is not None and grad_scale is None):
            self._distrust_copies()
        self._find_groups()
        self._check_all_options()
        self._take_states()
        # Backward reaches the last parameters first.
        active = [b for b in reversed(self._buckets) if b.group is not None and b.prepare()]
        scale = self._divisor(active, grad_scale)
        for link in self._links.values():
            link.begin()
        updated = 0
        try:
            for bucket in active:
                bucket.update(scale)
                updated += 1
                bucket.send()
        except BaseException as error:
            # An interrupt in the first update may have come before or after the update itself.
            if updated or not isinstance(error, Exception):
                self._torn = (
                    f"OffloadOptimizer: step() failed after {updated} of {len(active)} buckets "
                    f"({type(error).__name__}), so weights may be of two different steps; load a "
                    "checkpoint of model and optimizer before the next step"
                )
                if isinstance(error, Exception):
                    raise RuntimeError(self._torn) from error
            raise
        finally:
            for link in self._links.values():
                link.finish()
            if self._count_states() != self._shown_count:
                self._show_states()

    def _distrust_copies(self) -> None:
        for bucket in self._buckets:
            bucket.distrust_copies()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as ``torch.optim.Optimizer.zero_grad`` does.

        Args:
            set_to_none: drop them instead of filling them with zeros.
        """
        super().zero_grad(set_to_none)
        self._distrust_copies()  # which would keep gradients that no step has used

    def _check_all_options(self) -> None:
        """Raise if an option is wrong, before a bucket is updated."""
        check_norm(self.max_grad_norm)
        numbers = {name: value for name, value in self.defaults.items() if _is_number(value)}
        kinds = {(id(bucket.group), bucket.host[0].dtype): bucket for bucket in self._buckets}
        for bucket in kinds.values():
            bucket.check_options(type(self).__name__, numbers)

    def _divisor(self, active: list[Bucket], grad_scale: Tensor | None) -> Tensor | None:
        """What gradients are divided by to unscale them, and to clip their norm."""
        if grad_scale is not None:
            grad_scale = grad_scale.detach().to("cpu").reshape(())
        if self.max_grad_norm is None or not active:
            return grad_scale
        if any(map(is_piece, (p for bucket in active for p in bucket.params))):
            raise RuntimeError(f"{type(self).__name__}: max_grad_norm {PIECES}")
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for bucket in active:
            for grad in bucket.grads:
                kinds.setdefault((grad.device, grad.dtype), []).append(_values(grad))
        norms = []
        for (_, dtype), grads in kinds.items():
            wide = state_dtype(grads[0])
            each = torch._foreach_norm(grads, 2, dtype=None if wide == dtype else wide)
            norms.append(torch.linalg.vector_norm(torch.stack(each)))
        squares = [norm.to("cpu", torch.float64).square() for norm in norms]
        return common_factor(grad_scale, squares, self.max_grad_norm, CLIP_EPS).reciprocal()

    def _show_states(self) -> None:
        """Show in ``state`` what the host has for the device's parameters."""
        states = {p: state for bucket in self._buckets for p, state in bucket.states()}
        # All at once: if an interrupt left some out, the next step would take them for deleted.
        self.state.update(states)
        self._shown, self._shown_count = dict(self.state), self._count_states()

    def _take_states(self) -> None:
        """Use what a user has made of ``state``."""
        if self._torn is _HALF_LOADED:  # a hook of the load asks for a state_dict
            return
        state, shown = self.state, self._shown
        if not (
            are_same_objects(state.values(), shown.values())
            and are_same_objects(state.keys(), shown.keys())
        ):
            for bucket in self._buckets:
                bucket.take_states(self.state)
            self._show_states()

    def _take_weights(self) -> None:
        """Take weights that others have written: lower halves belong to the upper ones."""
        for bucket in self._buckets:
            if bucket.group is not None and bucket.fits:
                bucket.take_weights()

    def _count_states(self) -> int:
        """For how many parameters the host has state."""
        return sum(len(bucket.optimizer.state) for bucket in self._buckets)

    def state_dict(self) -> dict[str, Any]:
        """The state_dict of ``optimizer_class`` for these groups, with all state on the host."""
        with between_steps(self, "state_dict"):
            self._find_groups()
            self._take_states()
            self._take_weights()
            return super().state_dict()  # with_states adds the state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of this class, or any that ``optimizer_class`` can load.

        Args:
            state_dict: the result of :meth:`state_dict`; load the model's too.

        Raises:
            ValueError: it does not fit the groups, or has lost some lower halves of split weights.
                Nothing was changed then, nor after any other error or an interrupt.
        """
        with between_steps(self, "load_state_dict"):
            self._find_groups()
            self._take_states()
            self._take_weights()
            names = ("state", "param_groups", "_shown", "_shown_count", "_torn")
            before = {name: getattr(self, name) for name in names} | {"_seen_groups": []}
            on_host = [(bucket.optimizer, bucket.contents()) for bucket in self._buckets]
            # It must be the last to run, and there once, though an interrupt may come here too.
            self._load_hook.remove()
            self._load_hook = self.register_load_state_dict_pre_hook(load_states)
            try:
                self._torn = _HALF_LOADED
                super().load_state_dict(state_dict)
                self._find_groups()
                for bucket in self._buckets:  # a class sets some options itself
                    if bucket.group is not None:
                        bucket.group.update(own_options(bucket.optimizer.param_groups[0]))
                self._show_states()
                self._torn = None
            except BaseException:
                # This optimizer last: unless all is put back, it stays half loaded.
                for optimizer, contents in [*on_host, (self, before)]:
                    optimizer.__setstate__(contents)
                raise

    def weights_changed(self) -> None:
        """Make the next step take all weights from the device.

        A step notices weights that torch's operations have written, but not those that were
        written through ``p.data``, as by ``p.data.clamp_()``, by ``torch.distributed.broadcast``,
        or by a kernel of your own. Call this after such a write.

        Example:
            >>> import torch
            >>> from fusedoptim import FusedSGD
            >>> from fusedoptim.offload import OffloadOptimizer
            >>> p = torch.nn.Parameter(torch.full((2,), 5.0))
            >>> optimizer = OffloadOptimizer([p], FusedSGD, lr=1.0)
            >>> _ = p.data.clamp_(-2, 2)
            >>> optimizer.weights_changed()
            >>> p.sum().backward()
            >>> optimizer.step()
            >>> p.detach()
            tensor([1., 1.])
        """
        with self._lock:
            for bucket in self._buckets:
                bucket.distrust_weights()

    def master_params(self) -> Iterator[Tensor]:
        """The parameters' exact values, on the host, float32 if split, in the groups' order."""
        found: dict[Tensor, Tensor] = {}
        with between_steps(self, "master_params"):
            self._find_groups()
            for bucket in self._buckets:
                if bucket.group is not None:
                    bucket.take_weights()
                    found.update(zip(bucket.params, bucket.exact_values()))
        return iter([found[p] for group in self.param_groups for p in group["params"]])

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "OffloadOptimizer cannot be copied or pickled, as its hooks are on the parameters; "
            "construct one for the copied model, and load the state_dict of this one"
        )


def _is_number(default: Any) -> bool:
    """Whether a hyper-parameter with this default is a number, or several."""
    items = default if isinstance(default, tuple) else (default,)
    return all(isinstance(i, (int, float, Tensor)) and not isinstance(i, bool) for i in items)


def _values(grad: Tensor) -> Tensor:
    """What the norm of a gradient is computed from."""
    return grad if grad.layout is torch.strided else grad.coalesce().values()
