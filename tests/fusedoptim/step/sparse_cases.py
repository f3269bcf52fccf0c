"""Configurations, tables and pairs with torch's optimizers for the tests of sparse gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_

from fusedoptim import FusedAdagrad
from tests.fusedoptim.helpers import SideBySide, exact_values, upper_half, widened
from tests.optimizer_cases import (
    ADAGRAD,
    SGD,
    SPLIT_CASES,
    SPLIT_SGD,
    Kwargs,
    OptimizerCase,
    configuration_id,
)

SPLIT_ADAGRAD = next(case for case in SPLIT_CASES if case.cls is FusedAdagrad)
SGD_KWARGS: tuple[Kwargs, ...] = (
    {"lr": 0.1},
    {"lr": torch.tensor(0.1), "maximize": True},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    {"lr": 0.1, "momentum": 0.9, "maximize": True},
)
ADAGRAD_KWARGS: tuple[Kwargs, ...] = (
    {"lr": 0.1},
    {"lr": 0.1, "lr_decay": 0.1},
    {"lr": 0.1, "maximize": True, "initial_accumulator_value": 0.5, "eps": 1e-6},
)
WHOLE, SPLIT = (
    [(sgd, kwargs) for kwargs in SGD_KWARGS] + [(adagrad, kwargs) for kwargs in ADAGRAD_KWARGS]
    for sgd, adagrad in ((SGD, ADAGRAD), (SPLIT_SGD, SPLIT_ADAGRAD))
)
SOME = [WHOLE[3], WHOLE[7], SPLIT[3], SPLIT[7]]


def each_of(configurations: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("case", "kwargs"), configurations, ids=configuration_id)


def random_values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Multiples of 1/8 from -1 to 1: a sum of 32 of them is exact in every dtype."""
    eighths = torch.randint(-8, 9, (*shape, 2), dtype=torch.float64) / 8
    if dtype.is_complex:
        return torch.view_as_complex(eighths).to(dtype)
    return eighths[..., 0].to(dtype)


def new_gradient(table: Tensor, rows: list[int] | Tensor) -> Tensor:
    """A gradient of the named rows, which may occur more than once and in any order."""
    indices = torch.as_tensor(rows, dtype=torch.long).reshape(1, -1)
    values = random_values((indices.shape[1], *table.shape[1:]), table.dtype)
    return torch.sparse_coo_tensor(indices, values, table.shape)


def new_table(
    rows: int, *width: int, dtype: torch.dtype = torch.float32, case: OptimizerCase = SGD
) -> Parameter:
    dtype = torch.bfloat16 if case.is_split else dtype
    return Parameter(torch.randn(rows, *width, dtype=torch.float64).to(dtype))


class Pair(SideBySide):
    """An optimizer with sparse gradients, and torch's in float64 with sparse and dense ones."""

    def __init__(self, case: OptimizerCase, kwargs: Kwargs, params: list[Parameter]):
        super().__init__(case, kwargs, params)
        self.sparse = [Parameter(p.detach().clone()) for p in self.references]
        self.sparse_torchs = case.make_reference(self.sparse, **self.kwargs)
        # torch squares complex values in sparse gradients, and their parts in dense ones.
        self.takes_sparse = not (self.dtype.is_complex and case is ADAGRAD)

    def step_with(self, *grads: Tensor | None) -> None:
        """Step each optimizer with its form of these gradients."""
        for p, dense, sparse, grad in zip(self.params, self.references, self.sparse, grads):
            p.grad = grad
            wide = None if grad is None else widened(grad)
            sparse.grad = wide
            dense.grad = wide.to_dense() if wide is not None and wide.is_sparse else wide
        if self.ours.max_grad_norm is not None:
            clip_grad_norm_(self.references, self.ours.max_grad_norm)
        self.step()
        if self.takes_sparse:
            self.sparse_torchs.step()

    def check_with(self, *grads: Tensor | None) -> None:
        """Step with these gradients, and compare."""
        self.step_with(*grads)
        self.assert_equal()

    def check_rows(self, *steps: list[int] | Tensor) -> None:
        """Step once for each list of rows that have a gradient, and compare after each."""
        for rows in steps:
            self.check_with(new_gradient(self.params[0], rows))

    def assert_equal(self) -> None:
        """Compare values with the dense reference, and rows that have state with the sparse one."""
        super().assert_equal()
        values = exact_values(self.ours)
        for p, reference, sparse in zip(self.params, self.references, self.sparse):
            if self.case.is_split:
                assert torch.equal(p, upper_half(values[p]))
            if self.takes_sparse:
                torch.testing.assert_close(sparse, reference)
                state, expected = self.ours.state.get(p, {}), self.torchs.state.get(reference, {})
                for key, value in self.sparse_torchs.state.get(sparse, {}).items():
                    torch.testing.assert_close(value.to_dense(), expected[key])
                    if value.is_sparse and state[key].is_sparse:
                        rows = state[key].coalesce().indices()
                        assert torch.equal(rows, value.coalesce().indices())


def new_pair(case: OptimizerCase, kwargs: Kwargs, *shape: int) -> Pair:
    return Pair(case, kwargs, [new_table(*shape, case=case)])
