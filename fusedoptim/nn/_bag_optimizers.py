"""The optimizers of merged embedding bags, whose tables are updated in the backward pass."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fusedoptim._torch_private import active_ddp
from fusedoptim.adagrad import FusedAdagrad
from fusedoptim.nn._single_bags import check_apart, check_trainable
from fusedoptim.ops._bag_checks import check_contiguous
from fusedoptim.ops._bag_rows import ROWWISE
from fusedoptim.ops._updated_bags import numbered
from fusedoptim.optimizer import FusedOptimizer
from fusedoptim.sgd import FusedSGD
from fusedoptim.step.checks import OPTIONS, check_numbers
from fusedoptim.step.hooks import with_hooks
from fusedoptim.step.scalars import number
from fusedoptim.step.step_counts import KEY
from fusedoptim.step.tensors import PARAM_DTYPES, TRAIL, Group, State, state_dtype

_LR = 0.01
_SUM, _FIRST_SUM = "sum", "initial_accumulator_value"
"""The names of Adagrad's state and of its initial value."""


class BagOptimizer(FusedOptimizer):
    """What the optimizers of merged embedding bags have in common."""

    kernel: str
    """The kernel that updates the rows that occur."""
    _hyper_parameters: tuple[str, ...]
    """The hyper-parameters that the kernel gets."""
    number: int
    """The number by which the operator finds this object."""
    updated_in: int
    """See :class:`fusedoptim.ops._updated_bags.Rule`."""
    _unlisted: Mapping[str, float] = {}
    """Options of the groups that ``defaults`` lack, as torch's schedulers set what is there."""
    _absent: Sequence[tuple[str, Any]]
    """The options that the kernel does not get, with the only value that each may have."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._become_rule()
        self._trails: list[Tensor] = []
        """The lower halves of split tables."""
        self._awaits_update = False
        """Whether tables may get other values, to which their lower halves do not belong."""

    def _split(self, groups: list[Group]) -> None:
        """Leave it to :meth:`split_tables`."""

    def split_tables(self) -> None:
        """Split the tables, if they are to be split; an error or an interrupt splits none.

        This is the last thing that a constructor does: an interrupt after it would lose the object,
        and the lower halves with it.
        """
        if self.split:
            self.halves.split_all(self._params(), self._note_trails)

    def _become_rule(self) -> None:
        """Set what the operator needs, in a new object or in a copy."""
        self.number = numbered(self)
        self.updated_in = -1
        self._allowed: weakref.ref[DistributedDataParallel] | None = None
        options = {**self.defaults, **self._unlisted}
        for name in self._unlisted:
            self.defaults.pop(name, None)
        taken = {*self._hyper_parameters, *OPTIONS, _FIRST_SUM}
        self._absent = [item for item in sorted(options.items()) if item[0] not in taken]

    def __setstate__(self, state: dict[str, Any]) -> None:
        if self._to_restore:
            # torch's class takes all over by one store, so an interrupt leaves no mixture.
            trails = [
                self.halves.trail(weight) if trail is None else trail  # raises if it is lost
                for weight, _, trail in self._to_restore
                if self.split
            ]
            state = state | {"_trails": trails, "_awaits_update": self.split}
        super().__setstate__(state)
        if not hasattr(self, "number"):  # copied or unpickled
            self._become_rule()
            self._note_trails()

    def _to_load(self, saved: Any) -> Any:
        """A table's state without strides, which kernels do not read."""
        saved = super()._to_load(saved)
        if not isinstance(saved, dict):
            return saved
        arrays = {name: saved.get(name) for name in (_SUM, TRAIL)}
        return saved | {k: v.contiguous() for k, v in arrays.items() if isinstance(v, Tensor)}

    def _states(self) -> list[State]:
        """The states of the tables; users may keep other things beside them."""
        return [self.state[weight] for weight in self._params() if weight in self.state]

    def _note_trails(self) -> None:
        """Note the lower halves, which SGD's state lacks before the first update."""
        self._trails = [self.halves.trail(weight) for weight in self._params() if self.split]
        self._awaits_update = bool(self._trails)

    def _show_trails(self) -> None:
        """Move the lower halves to the state, as the first step of other optimizers does."""
        self.halves.begin_step(self._params())
        for weight, trail in zip(self._params(), self._trails):
            self.state[weight][TRAIL] = trail
        self.halves.settle(self._params())
        self._awaits_update = False

    def _check_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super()._check_checkpoint(state_dict)
        for group in state_dict["param_groups"]:
            self._check_absent(group, "the checkpoint has", "load one without it")
        if _SUM in self._saved_state:
            self._check_saved_sums(state_dict)

    def _check_absent(self, group: Mapping[str, Any], what: str, cure: str) -> None:
        """Raise if a group has an option that the kernel does not get."""
        for option, default in self._absent:
            if group.get(option, default) != default:
                raise ValueError(
                    f"{type(self).__name__}: {what} {option}={group[option]}, which the update in "
                    f"the backward pass lacks; {cure}"
                )

    def _check_saved_sums(self, state_dict: dict[str, Any]) -> None:
        """Raise unless Adagrad's sums have the shapes of those that are here."""
        for i, (weight, saved) in enumerate(self._saved(state_dict)):
            shape = tuple(self.state[weight][_SUM].shape)
            found = tuple(saved[_SUM].shape) if _SUM in saved else None
            if found != shape:
                raise ValueError(
                    f"{type(self).__name__}: the {_SUM!r} of table {i} has shape {found} in the "
                    f"checkpoint, and here {shape}; load one with the same tables and optimizer"
                )

    def numbers(self) -> Mapping[str, float]:
        """See :class:`fusedoptim.ops._updated_bags.Rule`."""
        (group,) = self.param_groups
        self._check_absent(group, "param_groups have", "set its default there")
        taken = {name: group[name] for name in self._hyper_parameters}
        largest = PARAM_DTYPES[group["params"][0].dtype].largest
        check_numbers(type(self).__name__, taken, self.defaults, largest)
        numbers = {name: number(value) for name, value in taken.items()}
        if self._awaits_update:
            self._show_trails()
        return numbers

    def begin_pass(self) -> None:
        """See :class:`fusedoptim.ops._updated_bags.Rule`."""
        ddp = active_ddp()
        if ddp is None or (self._allowed is not None and self._allowed() is ddp):
            return
        if ddp.process_group.size() > 1:
            own = set(self.param_groups[0]["params"])
            for name, param in ddp.module.named_parameters():
                if param in own and name not in ddp.parameters_to_ignore:
                    raise RuntimeError(
                        f"{type(self).__name__}: the table {name!r} is in a "
                        "DistributedDataParallel, and its update in the backward pass would use "
                        "the batch of this process alone, so that the processes' tables would "
                        "diverge; make a MergedEmbeddingBag without an optimizer, or, if each "
                        "process has tables of its own, keep it outside"
                    )
        self._allowed = weakref.ref(ddp)

    def check_own(self, weights: Sequence[Tensor]) -> None:
        """Raise unless these are the tables."""
        (group,) = self.param_groups
        are_own = list(map(operator.is_, weights, group["params"]))
        if not all(are_own):
            table = are_own.index(False)
            raise RuntimeError(
                f"MergedEmbeddingBag: the weight of table {table} is not the one that the "
                "optimizer updates, as after load_state_dict(assign=True), to_empty() of a module "
                "on the meta device, or in torch.func.functional_call; construct the "
                "MergedEmbeddingBag, or merge the model, when the bags have their final weights"
            )

    def state_lists(self, chosen: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        """See :class:`fusedoptim.ops._updated_bags.Rule`."""
        sums: list[Tensor] = []
        if _SUM in self._saved_state:
            state, params = self.state, self.param_groups[0]["params"]
            sums = [state[params[t]][_SUM] for t in chosen]
        return sums, [self._trails[t] for t in chosen if self._trails]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise: the tables are one group, and nothing else can be updated in the backward pass.

        Args:
            param_group: the group.

        Raises:
            RuntimeError: always, except within the constructor.
        """
        if self._is_complete:
            raise RuntimeError(
                f"{type(self).__name__}: add_param_group() was called, and this optimizer updates "
                "only its tables; give other parameters to an optimizer of their own"
            )
        super().add_param_group(param_group)

    @with_hooks
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Count a step: the backward pass has updated the tables.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            what ``closure`` returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        states = [state for state in self._states() if KEY in state]
        counts = [state[KEY] for state in states]
        if states and all(isinstance(count, Tensor) for count in counts):
            torch._foreach_add_(counts, 1)
        else:
            for state in states:
                state[KEY] += 1
        return loss


class InBackwardSGD(BagOptimizer, FusedSGD):
    """SGD in the backward pass."""

    kernel = "sgd_rows"
    _hyper_parameters = ("lr", "weight_decay")
    _unlisted: Mapping[str, float] = {"momentum": 0}


class InBackwardAdagrad(BagOptimizer, FusedAdagrad):
    """Adagrad in the backward pass."""

    kernel = "adagrad_rows"
    _hyper_parameters = ("lr", "weight_decay", "eps")


class InBackwardRowwiseAdagrad(BagOptimizer):
    """Adagrad with one sum for each row of a table, in the backward pass."""

    kernel = ROWWISE
    _hyper_parameters = InBackwardAdagrad._hyper_parameters
    _saved_options, _saved_state = FusedAdagrad._saved_options, FusedAdagrad._saved_state

    def __init__(self, params: Sequence[Tensor], *, split: bool, **options: Any) -> None:
        # For its defaults and checks. Given the tables, it would make a sum for each element.
        adagrad = FusedAdagrad([torch.empty(0)], **options)
        super().__init__(params, adagrad.defaults, split=split)
        for weight in params:
            sums = torch.zeros(len(weight), dtype=state_dtype(weight), device=weight.device)
            self.state[weight].update({KEY: torch.zeros((), dtype=torch.float32), _SUM: sums})

    def share_memory(self) -> None:
        """Move the sums to shared memory, as torch's Adagrad does."""
        for state in self._states():
            state[_SUM].share_memory_()


OPTIMIZERS: Mapping[str, type[BagOptimizer]] = {
    "sgd": InBackwardSGD,
    "adagrad": InBackwardAdagrad,
    "rowwise_adagrad": InBackwardRowwiseAdagrad,
}
"""The class for each name that users give."""


def new_optimizer(
    name: str, weights: Sequence[Tensor], split: bool, options: Mapping[str, float]
) -> BagOptimizer:
    """An optimizer of tables; raises if it does not accept the options or the tables' memory."""
    _check_options(name, options)
    for t, weight in enumerate(weights):
        where = f"MergedEmbeddingBag: the weight of table {t}"
        check_trainable(where, weight)
        if weight.grad is not None:
            raise ValueError(
                f"{where} has a gradient (.grad), which an optimizer of the table would apply "
                "later, too; call zero_grad() of that optimizer or of the bags first"
            )
    for t, weight in enumerate(weights):
        check_contiguous(t, weight)
    check_apart(weights, lambda t: f"MergedEmbeddingBag: table {t}")
    return OPTIMIZERS[name](list(weights), **{"lr": _LR, **options}, split=split)


def _check_options(name: str, options: Mapping[str, float]) -> None:
    if name not in OPTIMIZERS:
        raise ValueError(
            f"MergedEmbeddingBag: optimizer={name!r} is not one of "
            f"{', '.join(map(repr, OPTIMIZERS))}"
        )
    taken = OPTIMIZERS[name]._hyper_parameters
    for option in options:
        if option not in taken:
            takers = [repr(n) for n, cls in OPTIMIZERS.items() if option in cls._hyper_parameters]
            raise ValueError(
                f"MergedEmbeddingBag: {option} is for optimizer={' and '.join(takers)}, and "
                f"{name!r} takes {', '.join(taken)}; leave it out"
            )
