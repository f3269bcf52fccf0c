"""Losses whose forward and backward pass are one kernel each."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedoptim.nn import functional
from fusedoptim.nn._scripting import refuse_script
from fusedoptim.nn._tracing import traced_call

__all__ = ["CrossEntropyLoss"]


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """``torch.nn.CrossEntropyLoss`` without a matrix of probabilities.

    For class indices without class weights, forward and backward are one kernel each, which reads
    16-bit logits directly. For anything else, torch's own code runs.

    Args:
        weight: the weight of each class, (C,).
        size_average: deprecated in torch, in favor of ``reduction``.
        ignore_index: the target of rows that are ignored.
        reduce: deprecated in torch, in favor of ``reduction``.
        reduction: "mean" (over the rows that count), "sum" or "none".
        label_smoothing: the share of the target that is spread over all classes, from 0 to 1. As in
            torch, values below 0 and NaN are 0.

    Raises:
        RuntimeError: label_smoothing is greater than 1, in the call.

    Example:
        >>> import torch
        >>> CrossEntropyLoss()(torch.zeros(2, 4), torch.tensor([1, 3]))
        tensor(1.3863)

    Semantics: ``torch.nn.CrossEntropyLoss`` of torch 2.13; see
    :func:`fusedoptim.nn.functional.cross_entropy` for what kernels compute.
    """

    __prepare_scriptable__ = refuse_script

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        """The loss.

        Args:
            input: the logits.
            target: the classes, or their probabilities.
        """
        traced: Tensor | None = traced_call(self, input, target)
        if traced is not None:
            return traced
        return functional.cross_entropy(
            input,
            target,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )
