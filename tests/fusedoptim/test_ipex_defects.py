"""Defects of Intel Extension for PyTorch 2.8's fused optimizers, each shown to be absent here.

Two of its defects are of ``ipex.optimize``, which rewrites models, and have no counterpart in an
optimizer: it accepts an optimizer of another model's parameters and trains a copy of them, and it
changes the memory format of the user's own model although told ``inplace=False``.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from fusedoptim import FusedAdagrad, FusedLamb, FusedSGD, SplitSGD
from tests.fusedoptim.helpers import (
    LAYOUTS,
    SideBySide,
    each_case,
    make_params,
    random_like,
    single,
    step_alike,
)
from tests.optimizer_cases import ALL_CASES, OptimizerCase, configuration_id

each_size = pytest.mark.parametrize("size", [1, 7, 15, 16, 17, 31, 32, 33, 63, 65, 32_769])


def _case(cls: type[Any], **always: Any) -> OptimizerCase:
    return next(case for case in ALL_CASES if case.cls is cls and case.always == always)


SPLIT_ADAGRAD = _case(FusedAdagrad, split=True)
SPLIT_LAMB = _case(FusedLamb, split=True)


def _assert_steps_equal(case: OptimizerCase, kwargs: dict[str, Any], params: Any) -> SideBySide:
    pair = SideBySide(case, kwargs, params)
    pair.train(4)
    return pair


@each_size
def test_01_adagrads_last_elements(size: int) -> None:
    """IPEX's Adagrad with bfloat16 weights rebuilds the last ``size % 32`` of them wrongly."""
    _assert_steps_equal(SPLIT_ADAGRAD, {"lr": 0.1}, [Parameter(torch.randn(size))])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        params = [Parameter(torch.randn(size).to(dtype))]
        _assert_steps_equal(_case(FusedAdagrad), {"lr": 0.1}, params)


@each_size
def test_02_adagrads_last_elements_with_weight_decay(size: int) -> None:
    """IPEX's split Adagrad decays the last elements by their upper halves alone."""
    kwargs = {"lr": 0.1, "weight_decay": 0.5}
    _assert_steps_equal(SPLIT_ADAGRAD, kwargs, [Parameter(torch.randn(size))])


@pytest.mark.parametrize("kwargs", [{}, {"momentum": 0.9}], ids=configuration_id)
def test_03_sparse_gradients_reach_the_weight_of_the_forward_pass(kwargs: Any) -> None:
    """IPEX updates the float32 master, and the bfloat16 weight that the model uses never."""
    table = torch.nn.Embedding(4, 3, sparse=True)
    optimizer = SplitSGD(table.parameters(), lr=0.5, **kwargs)
    (expected,) = optimizer.master_params()
    rows = torch.tensor([1, 1])
    table(rows).sum().backward()
    optimizer.step()
    expected[1] -= 1
    (master,) = optimizer.master_params()
    assert torch.equal(master, expected)
    upper = (expected[rows].view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(table(rows), upper)


@pytest.mark.parametrize(
    ("case", "kwargs"),
    [
        (_case(SplitSGD), {}),
        (_case(SplitSGD), {"momentum": 0.5}),
        (SPLIT_ADAGRAD, {"initial_accumulator_value": 1.0}),
    ],
    ids=configuration_id,
)
def test_04_sparse_gradients_reach_the_lower_halves(case: OptimizerCase, kwargs: Any) -> None:
    """IPEX's split with momentum, or Adagrad, loses what a sparse gradient adds below bfloat16."""
    p, q = (Parameter(torch.ones(4, 3, dtype=torch.bfloat16)) for _ in range(2))
    sparse, dense = (case.make([param], lr=2.0**-12, **kwargs) for param in (p, q))
    for _ in range(50):
        values = torch.ones(1, 3).bfloat16()
        p.grad = torch.sparse_coo_tensor([[2]], values, (4, 3), check_invariants=True)
        q.grad = p.grad.to_dense()
        sparse.step()
        dense.step()
    (ours,), (expected,) = sparse.master_params(), dense.master_params()
    assert torch.equal(ours, expected)
    assert (ours[2] < 1 - 2.0**-9).all()
    assert (sparse.state[p]["trail"][2] != 0).all()


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, dtype) for case in ALL_CASES for dtype in case.dtypes if dtype.itemsize == 2],
    ids=configuration_id,
)
def test_05_float16_without_a_scaler(case: OptimizerCase, dtype: torch.dtype) -> None:
    """IPEX's fused step silently does nothing for float16 parameters without a GradScaler."""
    pair = SideBySide(case, {"lr": 0.5}, make_params(dtype, ["1000", "17", "1"]))
    before = [p.detach().clone() for p in pair.params]
    pair.train()
    for p, old in zip(pair.params, before):
        assert not torch.equal(p, old)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_06_norms_of_split_parameters(dtype: torch.dtype) -> None:
    """IPEX's Lars refuses split bfloat16, as its norm kernel wants float32; Lamb has norms here."""
    params = [Parameter(torch.randn(size).to(dtype)) for size in (1, 33, 40_001)]
    _assert_steps_equal(SPLIT_LAMB, {"lr": 0.1, "weight_decay": 0.1}, params)


@each_case
def test_07_gradients_are_no_workspace(case: OptimizerCase) -> None:
    """IPEX's Lamb overwrites float32 gradients with the update."""
    for dtype in case.dtypes:
        params = make_params(dtype)
        optimizer = case.make(params, **case.kwargs[-1])
        grads = [random_like(p) for p in params]
        for _ in range(2):
            step_alike(optimizer, grads=grads)
            assert all(torch.equal(p.grad, grad) for p, grad in zip(params, grads))


@each_case
def test_08_step_hooks(case: OptimizerCase) -> None:
    """IPEX replaces ``step`` by a bare function, after which no step hook is called."""
    _, optimizer = single(case)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    for _ in range(2):
        optimizer.step()
    assert seen == ["before", "after"] * 2


@each_case
def test_09_scheduler_made_before_anything_else(case: OptimizerCase) -> None:
    """IPEX's replaced ``step`` makes an earlier scheduler warn that it was overridden."""
    pair = SideBySide(case, {"lr": 0.5}, make_params(torch.float32, ["1000"]))
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        for optimizer in (pair.ours, pair.torchs)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(3):
            assert pair.ours.param_groups[0]["lr"] == 0.5 ** (i + 1)
            pair.train()
            for scheduler in schedulers:
                scheduler.step()


class Test10:
    """IPEX's Lamb on GPUs stores a bfloat16's update as the master, and divides 0 by 0."""

    def test_the_master_keeps_its_precision(self) -> None:
        p = Parameter(torch.full((100,), 1.0 + 2.0**-12))
        _assert_steps_equal(SPLIT_LAMB, {"lr": 2.0**-14}, [p])

    @pytest.mark.parametrize("case", [_case(FusedLamb), SPLIT_LAMB], ids=configuration_id)
    @pytest.mark.parametrize("zero", ["parameter", "gradient", "both"])
    def test_norms_of_zero(self, case: OptimizerCase, zero: str) -> None:
        pair = SideBySide(case, {"lr": 0.1}, make_params(torch.float32, ["1000", "1"]))
        for _ in range(2):
            pair.set_gradients()
            p, reference = pair.params[0], pair.references[0]
            with torch.no_grad():
                if zero != "gradient":
                    pair.ours.state.get(p, {}).get("trail", p).zero_()
                    p.zero_()
                    reference.zero_()
                if zero != "parameter":
                    p.grad.zero_()
                    reference.grad.zero_()
            pair.step()
            assert all(p.isfinite().all() for p in pair.params)
            pair.assert_equal()

    @pytest.mark.parametrize("case", [_case(FusedLamb), SPLIT_LAMB], ids=configuration_id)
    def test_nothing_to_do_changes_nothing(self, case: OptimizerCase) -> None:
        p = Parameter(torch.randn(100))
        optimizer = case.make([p], lr=0.1)
        before = next(optimizer.master_params()).clone()
        p.grad = torch.zeros_like(p)
        optimizer.step()
        assert torch.equal(next(optimizer.master_params()), before)


@pytest.mark.parametrize(
    ("cls", "dtype"),
    [(FusedSGD, torch.bfloat16), (FusedSGD, torch.float16), (SplitSGD, torch.bfloat16)],
)
def test_11_momentum_of_16_bit_parameters(cls: type[Any], dtype: torch.dtype) -> None:
    """IPEX's SGD on GPUs reads the float32 momentum of bfloat16 weights as if it were bfloat16."""
    pair = _assert_steps_equal(
        _case(cls), {"lr": 0.1, "momentum": 0.9}, make_params(dtype, list(LAYOUTS))
    )
    for p in pair.params:
        buffer: Tensor = pair.ours.state[p]["momentum_buffer"]
        assert buffer.dtype == torch.float32
        assert p.numel() < 100 or not torch.equal(buffer, buffer.to(dtype).float())


class Test14:
    """IPEX silently leaves alone what its dtype tests do not know: integers, float64."""

    @each_case
    @pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool])
    def test_integers_are_refused(self, case: OptimizerCase, dtype: torch.dtype) -> None:
        p = torch.ones(3, dtype=dtype)
        p.grad = torch.ones_like(p)
        with pytest.raises(TypeError, match=str(dtype)):
            case.make([p], lr=0.1).step()
        assert torch.equal(p, torch.ones_like(p))

    @each_case
    def test_float64_is_updated_or_refused(self, case: OptimizerCase) -> None:
        if case.is_split:
            with pytest.raises(TypeError, match=r"torch\.float64; split"):
                case.make(make_params(torch.float64, ["17"]))
        else:
            _assert_steps_equal(case, case.kwargs[-1], make_params(torch.float64, ["1000"]))
