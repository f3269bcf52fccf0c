"""max_grad_norm: clip_grad_norm_ inside the step, against torch in float64."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_

from tests.fusedoptim.helpers import (
    SideBySide,
    assert_same_state,
    make_params,
    random_like,
    snapshot,
    widened,
)
from tests.optimizer_cases import ALL_CASES, OptimizerCase, configuration_id

LIMIT = 0.7
LAYOUTS = ("17", "1000", "strided", "channels_last", "empty", "0-d")
Kwargs = dict[str, Any]
each_case = pytest.mark.parametrize("case", ALL_CASES, ids=configuration_id)
# Each configuration in float32, and the last in all dtypes.
each_configuration = pytest.mark.parametrize(
    ("case", "kwargs", "dtype"),
    [
        (case, kwargs, dtype)
        for case in ALL_CASES
        for kwargs in case.kwargs
        for dtype in case.dtypes
        if kwargs is case.kwargs[-1] or dtype == torch.float32
    ],
    ids=configuration_id,
)
each_dtype = pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, dtype) for case in ALL_CASES for dtype in case.dtypes],
    ids=configuration_id,
)


def _pair(case: OptimizerCase, params: list[Parameter]) -> SideBySide:
    return SideBySide(case, case.kwargs[-1], params)


def _clip_and_step(pair: SideBySide, limit: float | None = LIMIT, ours: Any = None) -> None:
    """Clip both: the reference's gradients before the step, ours in it."""
    pair.ours.max_grad_norm = limit
    if limit is not None:
        clip_grad_norm_(pair.references, limit)
    pair.step(ours)


def _twins(case: OptimizerCase, dtype: torch.dtype, **own: Any) -> tuple[Any, Any]:
    """An optimizer, and one with the arguments ``own``, on equal parameters and gradients."""
    params = make_params(dtype, LAYOUTS)
    copies = [Parameter(p.detach().clone()) for p in params]
    optimizers = (
        case.make(params, **case.kwargs[-1]),
        case.make(copies, **case.kwargs[-1], **own),
    )
    for p, c in zip(params, copies):
        p.grad = random_like(p)
        c.grad = p.grad.clone()
    return optimizers


def _params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _assert_same_bits(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> None:
    for p, q in zip(_params(a), _params(b)):
        assert torch.equal(p, q)
        assert a.state.get(p, {}).keys() == b.state.get(q, {}).keys()
        for key, value in a.state.get(p, {}).items():
            assert torch.equal(value, b.state[q][key])


class TestParity:
    """Equal to clip_grad_norm_ and a step."""

    @each_configuration
    def test_three_steps(self, case: OptimizerCase, kwargs: Kwargs, dtype: torch.dtype) -> None:
        pair = SideBySide(case, kwargs, make_params(dtype, LAYOUTS))
        for i in range(3):
            pair.set_gradients(skip=[5] if i == 1 else [])
            before = [None if p.grad is None else p.grad.clone() for p in pair.params]
            _clip_and_step(pair)
            pair.assert_equal()
            for p, grad in zip(pair.params, before):
                assert (p.grad is None) if grad is None else torch.equal(p.grad, grad)

    @pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=configuration_id)
    @each_case
    def test_complex(self, case: OptimizerCase, dtype: torch.dtype) -> None:
        if not case.supports_complex:
            pytest.skip(f"{case.name} has no complex update")
        pair = _pair(case, make_params(dtype, LAYOUTS))
        for i in range(3):
            pair.set_gradients()
            if i == 1:
                for p, reference in zip(pair.params, pair.references):
                    p.grad = p.grad.conj()
                    reference.grad = widened(p.grad)
            _clip_and_step(pair)
            pair.assert_equal()

    @each_case
    def test_many_elements(self, case: OptimizerCase) -> None:
        params = [Parameter(torch.randn(n)) for n in (100_001, 1, 32_768, 65_537)]
        pair = _pair(case, params)
        for _ in range(2):
            pair.set_gradients()
            _clip_and_step(pair)
        pair.assert_equal()

    @each_case
    def test_one_norm_for_groups_of_mixed_dtypes(self, case: OptimizerCase) -> None:
        dtypes = (torch.bfloat16,) if case.is_split else case.dtypes
        params = [Parameter(torch.randn(1000).to(dtype)) for dtype in dtypes * 3]
        pairs = [SideBySide(case, case.kwargs[-1], [p]) for p in params]
        groups = [{"params": params[:2]}, {"params": params[2:]}]
        joint = case.make(groups, max_grad_norm=LIMIT, **case.kwargs[-1])
        for pair in pairs:
            pair.ours = joint
        for _ in range(3):
            for pair in pairs:
                pair.set_gradients()
            clip_grad_norm_([r for pair in pairs for r in pair.references], LIMIT)
            joint.step()
            for pair in pairs:
                pair.step(lambda: None)
                pair.assert_equal()

    @each_case
    def test_limit_changed_between_steps(self, case: OptimizerCase) -> None:
        pair = _pair(case, make_params(torch.float32, LAYOUTS))
        for limit in (LIMIT, None, 0.1, 1e9, 2):
            pair.set_gradients()
            _clip_and_step(pair, limit)
            pair.assert_equal()

    @each_case
    def test_gradients_of_another_layout_and_at_another_address(self, case: OptimizerCase) -> None:
        pair = _pair(case, make_params(torch.float32, ["channels_last", "17"]))
        for i in range(4):
            pair.set_gradients()
            if i % 2:
                pair.params[0].grad = pair.params[0].grad.contiguous()
            _clip_and_step(pair)
            pair.assert_equal()

    @each_case
    def test_with_grad_scaler(self, case: OptimizerCase) -> None:
        """The norm is that of the unscaled gradients."""
        pair = _pair(case, make_params(torch.float32, LAYOUTS))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(torch.ones(()))
        for _ in range(3):
            pair.set_gradients()
            for p in pair.params:
                p.grad.mul_(1024.0)
            _clip_and_step(pair, ours=lambda: scaler.step(pair.ours))
            scaler.update()
            pair.assert_equal()

    @each_case
    def test_unscaled_by_hand(self, case: OptimizerCase) -> None:
        pair = _pair(case, make_params(torch.float32, LAYOUTS))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(torch.ones(()))
        pair.set_gradients()
        for p in pair.params:
            p.grad.mul_(1024.0)
        scaler.unscale_(pair.ours)
        _clip_and_step(pair, ours=lambda: scaler.step(pair.ours))
        pair.assert_equal()


class TestNorms:
    """Small, zero, infinite."""

    @pytest.mark.parametrize("limit", [1e6, float("inf")])
    @each_dtype
    def test_below_the_limit_nothing_changes(
        self, case: OptimizerCase, dtype: torch.dtype, limit: float
    ) -> None:
        optimizer, clipping = _twins(case, dtype, max_grad_norm=limit)
        for _ in range(2):
            optimizer.step()
            clipping.step()
        _assert_same_bits(optimizer, clipping)

    @each_case
    def test_zero_gradients(self, case: OptimizerCase) -> None:
        optimizer, clipping = _twins(case, torch.float32, max_grad_norm=1e-3)
        for p in (*_params(optimizer), *_params(clipping)):
            p.grad.zero_()
        for _ in range(2):
            optimizer.step()
            clipping.step()
        _assert_same_bits(optimizer, clipping)

    @each_case
    def test_no_gradients(self, case: OptimizerCase) -> None:
        untouched, clipping = _twins(case, torch.float32, max_grad_norm=LIMIT)
        clipping.zero_grad()
        clipping.step()
        _assert_same_bits(untouched, clipping)

    @each_case
    def test_only_empty_gradients(self, case: OptimizerCase) -> None:
        pair = _pair(case, make_params(torch.float32, ["empty", "3x0"]))
        pair.set_gradients()
        _clip_and_step(pair)
        pair.assert_equal()

    @each_case
    @pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
    def test_not_finite(self, case: OptimizerCase, value: float) -> None:
        """An infinite norm makes 0 of every finite gradient, NaN of the others; NaN spreads."""
        pair = _pair(case, make_params(torch.float32, ["17", "0-d"]))
        pair.set_gradients()
        for p in (pair.params[0], pair.references[0]):
            p.grad[3] = value
        _clip_and_step(pair)
        for p, reference in zip(pair.params, pair.references):
            assert torch.equal(p.isnan(), reference.isnan())
        if value == value:
            assert pair.params[1].isfinite()

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=configuration_id)
    @each_case
    def test_squares_beyond_the_range_of_float16(
        self, case: OptimizerCase, dtype: torch.dtype
    ) -> None:
        if dtype not in case.dtypes:
            pytest.skip(f"{case.name} takes no {dtype}")
        pair = _pair(case, make_params(dtype, ["1000"]))
        for p in (pair.params[0], pair.references[0]):
            p.grad = torch.full_like(p, 61_440.0)
        _clip_and_step(pair)
        pair.assert_equal()


class TestArgument:
    """Its values, and where it goes."""

    @each_case
    @pytest.mark.parametrize("value", [0, 0.0, -1.0, float("nan"), -float("inf")])
    def test_invalid(self, case: OptimizerCase, value: float) -> None:
        with pytest.raises(ValueError, match=f"Invalid max_grad_norm value: {value}"):
            case.make([Parameter(torch.ones(1))], max_grad_norm=value)

    @each_case
    @pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
    def test_invalid_later(self, case: OptimizerCase, value: float) -> None:
        (p,) = make_params(torch.float32, ["17"])
        optimizer = case.make([p], **case.kwargs[-1])
        p.grad = torch.ones_like(p)
        optimizer.step()
        before, state = p.detach().clone(), snapshot(optimizer)
        optimizer.max_grad_norm = value
        with pytest.raises(ValueError, match="max_grad_norm"):
            optimizer.step()
        assert torch.equal(p, before)
        assert_same_state(optimizer, state)

    @each_case
    def test_default_is_none(self, case: OptimizerCase) -> None:
        optimizer = case.make([Parameter(torch.ones(1))])
        assert optimizer.max_grad_norm is None

    @each_case
    @pytest.mark.parametrize("how", ["deepcopy", "pickle"])
    def test_copies_keep_it(self, case: OptimizerCase, how: str) -> None:
        _, optimizer = _twins(case, torch.float32, max_grad_norm=LIMIT)
        optimizer.step()
        if how == "deepcopy":
            twin = copy.deepcopy(optimizer)
        else:
            twin = pickle.loads(pickle.dumps(optimizer))
        assert twin.max_grad_norm == LIMIT
        for p, q in zip(_params(optimizer), _params(twin)):
            p.grad = random_like(p)
            q.grad = p.grad.clone()
        optimizer.step()
        twin.step()
        _assert_same_bits(optimizer, twin)

    @each_case
    def test_state_dict_leaves_it_to_the_optimizer(self, case: OptimizerCase) -> None:
        unlimited, limited = _twins(case, torch.float32, max_grad_norm=LIMIT)
        assert "max_grad_norm" not in str(limited.state_dict())
        unlimited.step()
        limited.load_state_dict(unlimited.state_dict())
        assert limited.max_grad_norm == LIMIT
