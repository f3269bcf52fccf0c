"""Whole trainings: fused beside plain, and halves beside float32."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from tests.optimizer_cases import OptimizerCase
from tests.transforms.training_helpers import RATES, each_class, task_and_kwargs
from tests.transforms.training_models import TASKS, Task
from transforms.passes.fuse_step import fuse_update_step
from transforms.passes.split_weights import split_master_weights

STEPS = 20
SEED = 0
each_task = pytest.mark.parametrize("task", TASKS)


def _train(model: nn.Module, optimizer: Any, task: Task, fuse_at: int | None) -> None:
    """A scheduler is made first, and another when the step is fused, if it ever is."""
    generator = torch.Generator().manual_seed(SEED)
    schedulers: list[Any] = [StepLR(optimizer, 5, gamma=0.5)]
    for step in range(STEPS):
        if step == fuse_at:
            fuse_update_step(optimizer)
        if step == STEPS // 2:
            schedulers.append(CosineAnnealingLR(optimizer, T_max=STEPS))
        optimizer.zero_grad()
        task.loss(model, generator).backward()
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()


@each_task
@each_class
@pytest.mark.parametrize("fuse_at", [0, 7])
# torch's Adagrad, of its own sparse tensors
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_ends_as_near_to_float64_as_torch_does(
    case: OptimizerCase, task: str, fuse_at: int
) -> None:
    chosen, kwargs = task_and_kwargs(task, case)
    torch.manual_seed(SEED)
    start = chosen.make()
    errors = []
    exact = copy.deepcopy(start).double()
    optimizer = case.reference(exact.parameters(), **kwargs)
    _train(exact, optimizer, chosen, None)
    for when in (None, fuse_at):
        model = copy.deepcopy(start)
        optimizer = case.reference(model.parameters(), **kwargs)
        _train(model, optimizer, chosen, when)
        errors.append(_error(model, exact))
        assert _error(model, start) > 100 * errors[-1]  # it has moved
    # Roundings of forward and backward, which both have, make most of the error; the factor of 3 is
    # for the step's own, which add up differently in each.
    assert errors[1] <= 3 * errors[0]


def _error(model: nn.Module, exact: nn.Module) -> float:
    """The norm of the difference of all parameters."""
    pairs = zip(model.parameters(), exact.parameters())
    return sum((p.double() - q.double()).square().sum().item() for p, q in pairs) ** 0.5


EPOCHS = 8
TESTED = 360
LAYERS = 3
"""Of those whose weights are split."""


def _network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


class Result(NamedTuple):
    """Of a whole training on handwritten digits."""

    loss: float
    """over all images."""
    accuracy: float
    """over those that were not trained on."""


def _trained_on_digits(case: OptimizerCase, *, autocast: bool, split: bool) -> Result:
    torch.manual_seed(SEED)
    bundle = load_digits()
    images = torch.from_numpy(bundle.images).float().div(16).unsqueeze(1)
    labels = torch.from_numpy(bundle.target).long()
    test, train = torch.randperm(len(labels)).split([TESTED, len(labels) - TESTED])
    model = _network()
    momentum = {"momentum": 0.9} if case.name == "FusedSGD" else {}
    optimizer = case.reference(model.parameters(), lr=RATES[case.name], **momentum)
    scheduler = CosineAnnealingLR(optimizer, T_max=EPOCHS)
    if split:
        fuse_update_step(optimizer)
        split_master_weights(model, optimizer)
    precision = torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast)
    for _ in range(EPOCHS):
        for batch in train[torch.randperm(len(train))].split(64):
            optimizer.zero_grad()
            with precision:
                logits = model(images[batch])
            cross_entropy(logits.float(), labels[batch]).backward()
            optimizer.step()
        scheduler.step()
    model.eval()
    with torch.no_grad(), precision:
        logits = model(images).float()
    right = (logits.argmax(dim=1) == labels)[test]
    return Result(cross_entropy(logits, labels).item(), right.float().mean().item())


@each_class
def test_halves_train_as_float32_does(case: OptimizerCase) -> None:
    exact = _trained_on_digits(case, autocast=False, split=False)
    rounded = _trained_on_digits(case, autocast=True, split=False)
    split = _trained_on_digits(case, autocast=True, split=True)
    # Under autocast the plain network rounds its weights to bfloat16 for each pass, and the split
    # one's are truncated: in each layer they, and so the outputs, differ by less than the spacing
    # of bfloat16. From float32 both differ by the roundings of inputs and outputs besides.
    spacing = LAYERS * torch.finfo(torch.bfloat16).eps
    assert split.loss == pytest.approx(rounded.loss, rel=spacing)
    assert split.loss == pytest.approx(exact.loss, rel=3 * spacing)
    for other in (rounded, exact):
        assert split.accuracy == pytest.approx(other.accuracy, abs=1.01 / TESTED)
    assert split.accuracy > 0.96
