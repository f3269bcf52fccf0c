"""Optimizers of torch that were given our step, for the tests that drive optimizers by a table."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import optimizer_cases
from tests.optimizer_cases import OptimizerCase, configuration_id
from tests.transforms.training_models import TASKS, Task
from transforms.passes.fuse_step import fuse_update_step

TORCHS = tuple(case for case in optimizer_cases.CASES if case.is_torchs and not case.is_split)
"""Our classes, by the classes of torch.optim that can be converted."""

RATES = {"FusedSGD": 0.01, "FusedAdagrad": 0.02, "FusedAdam": 0.002, "FusedAdamW": 0.002}
"""With which no model of the tests diverges."""

each_class = pytest.mark.parametrize("case", TORCHS, ids=configuration_id)


def converted(case: OptimizerCase) -> OptimizerCase:
    """The case with torch's own optimizer, converted, for ours."""

    class Converted:
        def __new__(cls, params: Any, **kwargs: Any) -> Any:
            optimizer = case.reference(params, **kwargs)
            fuse_update_step(optimizer)
            return optimizer

    return dataclasses.replace(case, cls=Converted)


def task_and_kwargs(name: str, case: OptimizerCase) -> tuple[Task, dict[str, Any]]:
    """What is to be trained, and with what options, as far as the optimizer can train it."""
    task = TASKS[name]
    if task.has_sparse_gradients:
        if not case.supports_sparse_gradients:
            pytest.skip(f"{case.name} takes no sparse gradients")
        return task, {"lr": RATES[case.name]}
    momentum = {"momentum": 0.9} if case.name == "FusedSGD" else {}
    return task, {"lr": RATES[case.name], "weight_decay": 0.01, **momentum}


def assert_same(a: Any, b: Any) -> None:
    """Two state_dicts, or parts of them, are equal in structure, dtypes and bits."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_same(x, y)
    elif isinstance(a, Tensor):
        assert (a.dtype, a.layout, a.shape) == (b.dtype, b.layout, b.shape)
        assert torch.equal(a.to_dense(), b.to_dense())
    else:
        assert a == b
