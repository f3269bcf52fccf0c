"""``restore`` undoes what ``optimize`` did; ``finalize`` makes it permanent."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from transforms.inputs.arguments import (
    check_halves,
    check_no_wrapper,
    check_optimizer,
    check_same_parameters,
)
from transforms.passes import INFERENCE, TRAINING
from transforms.reports import attach, find
from transforms.reports import report as report_of
from transforms.rewrites import exchanged_class, int8, merged_bags, plain_tensors, stand_ins
from transforms.rewrites.fused_step import is_converted

__all__ = ["finalize", "restore"]

_Model = TypeVar("_Model", bound=nn.Module)


@torch.inference_mode(False)  # otherwise the plain tensors could not be trained
def restore(model: nn.Module, optimizer: Optimizer | None = None) -> Any:
    """Undo all that :func:`transforms.optimize` and :func:`transforms.quantize` did, bit for bit.

    This also undoes :func:`transforms.merge_embedding_bags`. Values that were loaded, written or
    trained since are kept. After an interrupt, such as KeyboardInterrupt, call it again if the
    model still has a report: that restores the rest.

    Args:
        model: the model that ``optimize`` returned.
        optimizer: the optimizer that it returned with the model, if there was one.

    Returns:
        the model; with an optimizer, a tuple of the model and the optimizer.

    Raises:
        TypeError: ``model`` is not a module, or ``optimizer`` is not an optimizer.
        ValueError: the model was not optimized, or has been finalized; the optimizer belongs to
            another model; or weights are split, and the optimizer with their lower halves is not
            given.
        RuntimeError: a folded or rounded weight was pruned, parametrized or given another shape
            since, or another rewritten module was parametrized; or split weights are in a
            DistributedDataParallel. Whatever of these is raised, nothing was changed.

    Example:
        >>> import torch
        >>> from fusedoptim import transforms
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).eval()
        >>> weight = model[0].weight.clone()
        >>> _ = transforms.optimize(model, inplace=True)
        >>> _ = transforms.restore(model)
        >>> torch.equal(model[0].weight, weight), type(model[1]).__name__
        (True, 'BatchNorm1d')
    """
    check_optimizer(optimizer)
    # The model may have lost its report when it was restored with another optimizer.
    if optimizer is None or not is_converted(optimizer):
        report_of(model)
    if (report := find(model)) is not None and report.is_final:
        raise ValueError("the model was finalized, which freed the tensors that restore() needs")
    if optimizer is not None:
        check_same_parameters(model, optimizer)
    check_halves(model, optimizer)
    check_no_wrapper(model, optimizer)
    plain_tensors.check_all(model)
    exchanged_class.check_all(model)
    int8.revert_all(model)  # first, because quantization came last
    for passes in (INFERENCE, TRAINING):  # a model is not optimized for training after inference
        for each in reversed(passes):
            each.undo(model, optimizer)
    merged_bags.revert_all(model)
    attach(model, None)
    return model if optimizer is None else (model, optimizer)


def finalize(model: _Model) -> _Model:
    """Free the plain model's tensors that are kept for :func:`restore` and ``state_dict()``.

    Afterwards the model saves and loads the tensors that it computes with: folded, in 16 bits,
    without the BatchNorms. It is for inference only, and stays finalized when it is optimized or
    quantized again. Inside a larger model it keeps what was folded when that model is restored.

    Args:
        model: a model that :func:`transforms.optimize` returned for inference.

    Raises:
        ValueError: the model was not optimized.

    Example:
        >>> import torch
        >>> from fusedoptim import transforms
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).eval()
        >>> model = transforms.finalize(transforms.optimize(model))
        >>> list(model.state_dict())
        ['0.weight', '0.bias']
    """
    report = report_of(model)
    plain_tensors.discard(model)
    stand_ins.keep_all(model)
    attach(model, report._replace(kept_bytes=0, is_final=True))
    return model
