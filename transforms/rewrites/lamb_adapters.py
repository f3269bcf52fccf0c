"""FusedLamb with the options and state of other libraries' Lamb classes.

timm and apex count steps by group and clip gradients themselves; torch_optimizer bounds the
parameter's norm and does not correct the moments' bias.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from fusedoptim import FusedLamb
from fusedoptim.step.rule import Numbers
from fusedoptim.step.step_counts import Steps
from fusedoptim.step.tensors import Group

_STEP = "step"


class AdaptedLamb(FusedLamb):
    """FusedLamb for optimizers of another library's class."""

    _required: ClassVar[frozenset[str]]
    """Options that an object of that class must have."""
    _known: ClassVar[frozenset[str]] = frozenset()
    """Optional options; one in neither set belongs to a newer version and is refused."""

    _number_attributes: ClassVar[tuple[str, ...]] = ()
    """Attributes to copy and pickle in addition; torch includes groups and state only."""

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {
            name: getattr(self, name) for name in self._number_attributes
        }

    def _check_options(self, group: Group) -> None:
        super()._check_options(group)
        # Schedulers and steps also add keys to groups, so look at the defaults.
        options = self.defaults.keys() - {"differentiable"}  # torch adds this one when loading
        name, instead = type(self).__name__, "use fusedoptim.FusedLamb"
        if missing := ", ".join(sorted(self._required - options)):
            raise RuntimeError(
                f"{name}: no option {missing}, which the class known by this name has; {instead}"
            )
        if unknown := ", ".join(sorted(options - self._required - self._known)):
            raise RuntimeError(f"{name}: the option {unknown} is not known here; {instead}")

    def _options(self, group: Group) -> Group:
        """The group's options under the names that FusedLamb uses."""
        return group

    def _numbers(self, group: Group) -> Numbers:
        return super()._numbers(self._options(group))

    def _row_numbers(self, group: Group, numbers: Numbers, steps: Steps) -> dict[str, Steps]:
        return super()._row_numbers(self._options(group), numbers, steps)

    def give_back_steps(self) -> None:
        """Convert the step counts to the form of the plain class."""
        raise NotImplementedError


class _CountingByGroup(AdaptedLamb):
    """Counts steps in ``group["step"]``, for all parameters of the group."""

    _clip_eps = 0.0
    _optional_state = frozenset({_STEP})

    def _first_count(self) -> Any:
        raise NotImplementedError

    def _before_launch(self) -> None:
        for group in self.param_groups:
            group.setdefault(_STEP, self._first_count())
            group[_STEP] += 1

    def _row_numbers(self, group: Group, numbers: Numbers, steps: Steps) -> dict[str, Steps]:
        count = group.get(_STEP) or 1  # the first launch sets it, after the numbers were checked
        return super()._row_numbers(group, numbers, np.float64(count))

    def _unsaved_state(self) -> set[str]:
        return super()._unsaved_state() | {_STEP}  # for each parameter; the plain class has none

    def give_back_steps(self) -> None:
        for p in self._params():
            self.state.get(p, {}).pop(_STEP, None)


class _TimmLamb(_CountingByGroup):
    """timm.optim.Lamb."""

    _required = frozenset(
        {"lr", "bias_correction", "betas", "eps", "weight_decay", "grad_averaging"}
        | {"max_grad_norm", "trust_clip", "always_adapt"}
    )
    _known = frozenset(
        {"caution", "decoupled_decay", "corrected_weight_decay", "max_lr_snapshot", "foreach"}
    )

    def _check_options(self, group: Group) -> None:
        super()._check_options(group)
        for name in ("caution", "corrected_weight_decay"):
            if group.get(name):
                raise RuntimeError(
                    f"{name}=True: {type(self).__name__}'s step does not support it; omit it"
                )

    def _options(self, group: Group) -> Group:
        # Older versions of timm have no decoupled decay.
        return {"decoupled_decay": False, "max_param_norm": None, **group}

    def _first_count(self) -> Any:
        return torch.zeros(())


class _ApexLamb(_CountingByGroup):
    """apex.optimizers.FusedLAMB."""

    adam_w_mode: int
    use_nvlamb: bool
    _required = _TimmLamb._required - {"trust_clip", "always_adapt"}
    _number_attributes = ("adam_w_mode", "use_nvlamb", "set_grad_none")

    def _check_options(self, group: Group) -> None:
        super()._check_options(group)
        if not self.adam_w_mode and group["weight_decay"] != 0:
            raise RuntimeError(
                f"adam_w_mode=False: {type(self).__name__}'s step has no L2 penalty; use "
                "weight_decay=0"
            )

    def _options(self, group: Group) -> Group:
        ours = {
            "trust_clip": False,
            "max_param_norm": None,
            "always_adapt": self.use_nvlamb,
            "decoupled_decay": False,
        }
        return group | ours

    def _first_count(self) -> Any:
        return 0


class _TorchOptimizerLamb(AdaptedLamb):
    """torch_optimizer.Lamb."""

    clamp_value: float
    adam: bool
    debias: bool
    _required = frozenset({"lr", "betas", "eps", "weight_decay"})
    _number_attributes = ("clamp_value", "adam", "debias")

    def _check_options(self, group: Group) -> None:
        super()._check_options(group)
        if self.adam:
            raise RuntimeError(
                f"adam=True: {type(self).__name__}'s step has a trust ratio; use torch.optim.AdamW"
            )
        if self.debias:
            raise RuntimeError(
                f"debias=True: {type(self).__name__}'s step corrects the moments, but this option "
                "corrects the learning rate; use fusedoptim.FusedLamb"
            )

    def _options(self, group: Group) -> Group:
        ours = {
            "bias_correction": False,
            "grad_averaging": True,
            "trust_clip": False,
            "max_param_norm": self.clamp_value,
            "always_adapt": True,
            "decoupled_decay": False,
        }
        return group | ours

    def give_back_steps(self) -> None:
        for state in map(self.state.get, self._params()):
            if state and _STEP in state:
                state[_STEP] = int(state[_STEP])


_CLASSES: dict[tuple[str, str], type[AdaptedLamb]] = {
    ("timm", "Lamb"): _TimmLamb,
    ("apex", "FusedLAMB"): _ApexLamb,
    ("torch_optimizer", "Lamb"): _TorchOptimizerLamb,
}


def lamb_for(cls: type) -> type[AdaptedLamb] | None:
    """Our class for a library's Lamb, recognized by name; its options are checked later."""
    return _CLASSES.get((cls.__module__.partition(".")[0], cls.__name__))
