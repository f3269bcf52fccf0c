"""The optimizers of merged embedding bags, whose tables are updated in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedoptim.adagrad import FusedAdagrad
from fusedoptim.ops._embedding_bags import ROWWISE
from fusedoptim.ops._updated_bags import numbered
from fusedoptim.optimizer import FusedOptimizer
from fusedoptim.sgd import FusedSGD
from fusedoptim.step.hooks import with_hooks
from fusedoptim.step.scalars import number
from fusedoptim.step.tensors import TRAIL, update_order

_LR = 0.01


class BagOptimizer(FusedOptimizer):
    """What the optimizers of merged embedding bags have in common."""

    kernel: str
    """Updates the rows that occur."""
    _hyper_parameters: tuple[str, ...]
    """What the kernel gets of them."""
    number: int
    """By which the operator finds this object."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.number = numbered(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not hasattr(self, "number"):  # a copy, or out of a file
            self.number = numbered(self)

    def numbers(self) -> Mapping[str, float]:
        """See :class:`fusedoptim.ops._updated_bags.Rule`."""
        (group,) = self.param_groups
        return {name: number(group[name]) for name in self._hyper_parameters}

    def state_lists(self, weights: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Adagrad's sums and the lower halves of split tables, as far as there are any."""
        trails = [self.state[weight][TRAIL] for weight in weights] if self.split else []
        return [], trails

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
        states = [state for state in self.state.values() if "step" in state]
        counts = [state["step"] for state in states]
        if states and all(isinstance(count, Tensor) for count in counts):
            torch._foreach_add_(counts, 1)
        else:
            for state in states:
                state["step"] += 1
        return loss


class InBackwardSGD(BagOptimizer, FusedSGD):
    """SGD in the backward pass."""

    kernel = "sgd_rows"
    _hyper_parameters = ("lr", "weight_decay")


class InBackwardAdagrad(BagOptimizer, FusedAdagrad):
    """Adagrad in the backward pass."""

    kernel = "adagrad_rows"
    _hyper_parameters = ("lr", "weight_decay", "eps")

    def state_lists(self, weights: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Adagrad's sums and the lower halves of split tables, if they are split."""
        return [self.state[weight]["sum"] for weight in weights], super().state_lists(weights)[1]


class InBackwardRowwiseAdagrad(InBackwardAdagrad):
    """Adagrad with one sum for each row of a table, in the backward pass."""

    kernel = ROWWISE

    def __init__(self, params: Sequence[Tensor], **options: Any) -> None:
        super().__init__(params, **options)
        for weight in params:
            self.state[weight]["sum"] = self.state[weight]["sum"].new_zeros(len(weight))


OPTIMIZERS: Mapping[str, Callable[..., BagOptimizer]] = {
    "sgd": InBackwardSGD,
    "adagrad": InBackwardAdagrad,
    "rowwise_adagrad": InBackwardRowwiseAdagrad,
}
"""By the name that users give."""


def new_optimizer(
    name: str, weights: Sequence[Tensor], split: bool, options: Mapping[str, float]
) -> BagOptimizer:
    """An optimizer of tables, whose memory it checks."""
    for t, weight in enumerate(weights):
        if not weight.is_contiguous():
            raise ValueError(
                f"MergedEmbeddingBag: table {t} has strides {weight.stride()}; the update takes "
                "contiguous ones: use weight.data = weight.data.contiguous()"
            )
    turns = update_order(list(weights))
    if any(turns) or len(set(weights)) < len(weights):
        t = next((t for t, turn in enumerate(turns) if turn), len(weights) - 1)
        raise ValueError(
            f"MergedEmbeddingBag: table {t} shares memory with an earlier one, and both would be "
            "updated at once; merge them without an optimizer"
        )
    return OPTIMIZERS[name](list(weights), **{"lr": _LR, **options}, split=split)
