"""Training runs of optimized models: each step, where they end, and checkpoints."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from fusedoptim import transforms
from tests.fusedoptim.helpers import SideBySide, widened
from tests.optimizer_cases import ADAM, ADAMW, TORCHS_CASES, OptimizerCase, configuration_id
from tests.transforms.helpers import (
    RATES,
    SEED,
    assert_same,
    autocast_loss,
    each_dtype,
    saved,
    task_and_kwargs,
)
from tests.transforms.models import TASKS, Task

STEPS = 10
each_pair = pytest.mark.parametrize(
    ("case", "task"),
    [
        pytest.param(case, name, id=f"{configuration_id(case)}-{name}")
        for name, task in TASKS.items()
        for case in TORCHS_CASES
        if (case is ADAMW or name in ("cnn", "bert") or task.has_sparse_gradients)
        and (case.supports_sparse_gradients or not task.has_sparse_gradients)
    ],
)
"""Each class with convolutions, with tied weights and, if it takes them, with sparse gradients.

One class has all models: what is done with modules does not depend on the class.
"""
each_kernel = pytest.mark.parametrize(
    "case", [case for case in TORCHS_CASES if case is not ADAM], ids=configuration_id
)
"""AdamW has Adam's code, and decay as well."""


def _train(
    model: nn.Module,
    optimizer: Any,
    task: Task,
    dtype: torch.dtype | None = None,
    steps: int = 2,
    seed: int = SEED,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        autocast_loss(model, task, generator, dtype).backward()
        optimizer.step()


def without_kinks(model: nn.Module) -> nn.Module:
    """Replace ReLUs, whose gradients jump: a rounding may decide between two.

    One of 500 runs of the GAN went 100 times as far from float64 as the others, from the step on in
    which a rounding changed the sign of a LeakyReLU's input. With SiLU none of 48 did.
    """
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, (nn.ReLU, nn.LeakyReLU)):
                setattr(module, name, nn.SiLU())
    return model


def _pair(case: OptimizerCase, task: str) -> tuple[nn.Module, Any, Task]:
    """Return a model in training, its optimizer, which has state, and the task."""
    chosen, kwargs = task_and_kwargs(task, case)
    torch.manual_seed(SEED)
    model = chosen.make()
    optimizer = case.reference(model.parameters(), **kwargs)
    _train(model, optimizer, chosen)
    return model, optimizer, chosen


class TestSteps:
    """Steps are compared with torch's in float64."""

    @each_pair
    @each_dtype
    @pytest.mark.parametrize("is_last", [False, True], ids=["as it was", "channels_last"])
    def test_each_step(
        self, case: OptimizerCase, task: str, dtype: torch.dtype | None, is_last: bool
    ) -> None:
        """Each step with the model's own gradients equals the reference's.

        The first makes the state and a plan, the second has state, and all later ones are alike.
        """
        if is_last and task not in ("cnn", "resnet", "gan"):
            pytest.skip("has no convolutions")
        chosen, kwargs = task_and_kwargs(task, case)
        torch.manual_seed(SEED)
        model = chosen.make()

        def optimized(params: Any, **kwargs: Any) -> Any:
            optimizer = case.reference(params, **kwargs)
            pair = transforms.optimize(
                model, optimizer, dtype=dtype, inplace=True, auto_channels_last=is_last
            )
            assert pair == (model, optimizer)
            return optimizer

        plain = [p.detach().clone() for p in model.parameters()]
        ours = dataclasses.replace(case, cls=optimized)
        pair = SideBySide(ours, kwargs, list(model.parameters()))
        for reference, value in zip(pair.references, plain):
            assert torch.equal(reference, value.double())
        generator = torch.Generator().manual_seed(SEED)
        for _ in range(5):
            pair.ours.zero_grad()
            autocast_loss(model, chosen, generator, dtype).backward()
            for p, reference in zip(pair.params, pair.references):
                if p.grad is not None:
                    if p.grad.is_sparse:
                        p.grad = p.grad.coalesce()
                    reference.grad = widened(p.grad).to_dense()
            pair.step()
            pair.assert_equal()

    @each_pair
    # torch's Adagrad warns of its own sparse tensors
    @pytest.mark.filterwarnings("ignore:Sparse invariant checks")
    def test_ends_as_near_to_float64_as_torch_does(self, case: OptimizerCase, task: str) -> None:
        """One scheduler is made before optimizing, where that is possible, and one later."""
        chosen, kwargs = task_and_kwargs(task, case)
        torch.manual_seed(SEED)
        start = without_kinks(chosen.make()) if task == "gan" else chosen.make()

        def trained(model: nn.Module, how: str = "") -> nn.Module:
            optimizer: Any = case.reference(model.parameters(), **kwargs)
            schedulers: list[Any] = [StepLR(optimizer, 3, gamma=0.5)]
            if how in ("copy", "in place"):
                model, optimizer = transforms.optimize(model, optimizer, inplace=how == "in place")
                assert optimizer.fused
            if how == "copy":
                schedulers = [StepLR(optimizer, 3, gamma=0.5)]
            generator = torch.Generator().manual_seed(SEED)
            for step in range(STEPS):
                if step == 4 and how == "fused at step 4":
                    transforms.optimize(model, optimizer, inplace=True)
                if step == STEPS // 2:
                    schedulers.append(CosineAnnealingLR(optimizer, T_max=STEPS))
                optimizer.zero_grad()
                chosen.loss(model, generator).backward()
                optimizer.step()
                for scheduler in schedulers:
                    scheduler.step()
            return model

        exact = trained(copy.deepcopy(start).double())
        off = _distance(trained(copy.deepcopy(start)), exact)
        for how in ("copy", "in place", "fused at step 4"):
            ours = trained(copy.deepcopy(start), how)
            assert _distance(ours, start) > 100 * _distance(ours, exact)  # it has moved
            # Most of the error comes from the roundings of forward and backward, which both runs
            # have; the factor of 3 is for the step's own roundings, which add up differently in
            # each.
            assert _distance(ours, exact) <= 3 * off, how


def _distance(model: nn.Module, other: nn.Module) -> float:
    """The norm of the difference of all parameters."""
    pairs = zip(model.parameters(), other.parameters())
    return sum((p.double() - q.double()).square().sum().item() for p, q in pairs) ** 0.5


@each_pair
@each_dtype
# torch's Adagrad warns of its own sparse tensors
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_checkpoints_and_undoing(case: OptimizerCase, task: str, dtype: torch.dtype | None) -> None:
    """Checkpoints and restored pairs equal the plain pair's bit for bit, in both directions."""
    model, optimizer, chosen = _pair(case, task)
    before = saved(model, optimizer)
    new, its = transforms.optimize(model, optimizer, dtype=dtype)
    assert_same(saved(new, its), before)
    assert_same(saved(model, optimizer), before)
    _train(new, its, chosen, dtype, seed=1)
    states = saved(new, its)
    assert_same(saved(model, optimizer), before)
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    assert_same(saved(model, optimizer), states)
    _train(model, optimizer, chosen, seed=2)  # torch's own step takes the state that ours made
    states = saved(model, optimizer)
    its.load_state_dict(states[1])  # in either order: test_split_weights.py loads the model first
    new.load_state_dict(states[0])
    assert_same(saved(new, its), states)
    _train(new, its, chosen, dtype, seed=3)
    states = saved(new, its)
    assert transforms.restore(new, its) == (new, its)
    assert_same(saved(new, its), states)
    assert _kinds(new, its) == _kinds(model, optimizer)
    assert all(p.dtype == torch.float32 for p in new.parameters())
    _train(new, its, chosen, seed=4)


def _kinds(model: nn.Module, optimizer: Any) -> list[Any]:
    """Classes, attributes and strides."""
    modules = [(name, type(m), sorted(vars(m))) for name, m in model.named_modules()]
    own = type(optimizer), sorted(vars(optimizer))
    return [modules, own, [p.stride() for p in model.parameters()]]


EPOCHS = 8
TESTED = 360
LAYERS = 3
"""The number of layers whose weights are split."""


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


@functools.cache
def _digits() -> tuple[Tensor, Tensor]:
    bundle = load_digits()
    images = torch.from_numpy(bundle.images).float().div(16).unsqueeze(1)
    return images, torch.from_numpy(bundle.target).long()


def _trained_on_digits(case: OptimizerCase, *, autocast: bool, split: bool) -> tuple[float, float]:
    """The loss over all images, and the accuracy over those that were not trained on."""
    torch.manual_seed(SEED)
    images, labels = _digits()
    test, train = torch.randperm(len(labels)).split([TESTED, len(labels) - TESTED])
    model = _network()
    momentum = {"momentum": 0.9} if case.name == "FusedSGD" else {}
    optimizer = case.reference(model.parameters(), lr=RATES[case.name], **momentum)
    scheduler = CosineAnnealingLR(optimizer, T_max=EPOCHS)
    if split:
        transforms.optimize(model, optimizer, dtype=torch.bfloat16, inplace=True)
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
    return cross_entropy(logits, labels).item(), right.float().mean().item()


@each_kernel
def test_halves_train_as_float32_does(case: OptimizerCase) -> None:
    exact = _trained_on_digits(case, autocast=False, split=False)
    rounded = _trained_on_digits(case, autocast=True, split=False)
    split = _trained_on_digits(case, autocast=True, split=True)
    # Under autocast the plain network rounds its weights to bfloat16 for each pass, and the split
    # one's are truncated: in each layer they, and so the outputs, differ by less than the spacing
    # of bfloat16. From float32, both also differ by the roundings of inputs and outputs.
    spacing = LAYERS * torch.finfo(torch.bfloat16).eps
    assert split[0] == pytest.approx(rounded[0], rel=spacing)
    assert split[0] == pytest.approx(exact[0], rel=3 * spacing)
    for other in (rounded, exact):
        assert split[1] == pytest.approx(other[1], abs=1.01 / TESTED)
    assert split[1] > 0.96
