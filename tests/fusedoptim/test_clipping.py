"""max_grad_norm: clip_grad_norm_ inside the step, against torch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_

from tests.fusedoptim.helpers import (
    FEW_LAYOUTS,
    SideBySide,
    assert_same_bits,
    each_case,
    each_case_and_dtype,
    each_way_to_copy,
    few,
    make_params,
    new_scaler,
    params_of,
    refused,
    scale_gradients,
    single,
    step_alike,
    unchanged,
    widened,
)
from tests.optimizer_cases import ALL_CASES, OptimizerCase, configuration_id

LIMIT = 0.7
Kwargs = dict[str, Any]
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


def _clip_and_step(pair: SideBySide, limit: float | None = LIMIT, ours: Any = None) -> None:
    """Clip both: the reference's gradients before the step, ours in it."""
    pair.ours.max_grad_norm = limit
    if limit is not None:
        clip_grad_norm_(pair.references, limit)
    pair.step(ours)


def _train(pair: SideBySide, limit: float | None = LIMIT) -> None:
    """Step with new gradients, clipped, and compare."""
    pair.set_gradients()
    _clip_and_step(pair, limit)
    pair.assert_equal()


def _twins(case: OptimizerCase, dtype: torch.dtype, **own: Any) -> tuple[Any, Any]:
    """An optimizer, and one with the arguments ``own``, on equal parameters."""
    params = make_params(dtype, FEW_LAYOUTS)
    copies = [Parameter(p.detach().clone()) for p in params]
    return (
        case.make(params, **case.kwargs[-1]),
        case.make(copies, **case.kwargs[-1], **own),
    )


class TestParity:
    """A clipping step equals clip_grad_norm_ and a step."""

    @each_configuration
    def test_three_steps(self, case: OptimizerCase, kwargs: Kwargs, dtype: torch.dtype) -> None:
        pair = SideBySide(case, kwargs, make_params(dtype, FEW_LAYOUTS))
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
        pair = SideBySide(case, params=make_params(dtype, FEW_LAYOUTS))
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
        pair = SideBySide(case, params=params)
        for _ in range(2):
            _train(pair)

    @each_case
    def test_one_norm_for_groups_of_mixed_dtypes(self, case: OptimizerCase) -> None:
        dtypes = (torch.bfloat16,) if case.is_split else case.dtypes
        params = [Parameter(torch.randn(1000).to(dtype)) for dtype in dtypes * 3]
        pairs = [SideBySide(case, params=[p]) for p in params]
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
                pair.check(lambda: None)

    @each_case
    def test_limit_changed_between_steps(self, case: OptimizerCase) -> None:
        pair = few(case)
        for limit in (LIMIT, None, 0.1, 1e9, 2):
            _train(pair, limit)

    @each_case
    def test_gradients_of_another_layout_and_at_another_address(self, case: OptimizerCase) -> None:
        pair = SideBySide(case, params=make_params(torch.float32, ["channels_last", "17"]))
        for i in range(4):
            pair.set_gradients()
            if i % 2:
                pair.params[0].grad = pair.params[0].grad.contiguous()
            _clip_and_step(pair)
            pair.assert_equal()

    @each_case
    def test_with_grad_scaler(self, case: OptimizerCase) -> None:
        """The norm is that of the unscaled gradients."""
        pair = few(case)
        scaler = new_scaler(1024.0)
        for _ in range(3):
            pair.set_gradients()
            scale_gradients(pair, scaler)
            _clip_and_step(pair, ours=lambda: scaler.step(pair.ours))
            scaler.update()
            pair.assert_equal()

    @each_case
    def test_unscaled_by_hand(self, case: OptimizerCase) -> None:
        pair = few(case)
        scaler = new_scaler(1024.0)
        pair.set_gradients()
        scale_gradients(pair, scaler)
        scaler.unscale_(pair.ours)
        _clip_and_step(pair, ours=lambda: scaler.step(pair.ours))
        pair.assert_equal()


class TestNorms:
    """Small, zero and infinite norms."""

    @pytest.mark.parametrize("limit", [1e6, float("inf")])
    @each_case_and_dtype
    def test_below_the_limit_nothing_changes(
        self, case: OptimizerCase, dtype: torch.dtype, limit: float
    ) -> None:
        optimizer, clipping = _twins(case, dtype, max_grad_norm=limit)
        for _ in range(2):
            step_alike(optimizer, clipping)
        assert_same_bits(optimizer, clipping)

    @each_case
    def test_zero_gradients(self, case: OptimizerCase) -> None:
        optimizer, clipping = _twins(case, torch.float32, max_grad_norm=1e-3)
        zeros = [torch.zeros_like(p) for p in params_of(optimizer)]
        for _ in range(2):
            step_alike(optimizer, clipping, grads=zeros)
        assert_same_bits(optimizer, clipping)

    @each_case
    def test_no_gradients(self, case: OptimizerCase) -> None:
        optimizer = few(case).ours
        optimizer.max_grad_norm = LIMIT
        with unchanged(optimizer):
            optimizer.step()

    @each_case
    def test_only_empty_gradients(self, case: OptimizerCase) -> None:
        pair = SideBySide(case, params=make_params(torch.float32, ["empty", "3x0"]))
        _train(pair)

    @each_case
    @pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
    def test_not_finite(self, case: OptimizerCase, value: float) -> None:
        """An infinite norm turns finite gradients into 0 and others into NaN; NaN spreads."""
        pair = SideBySide(case, params=make_params(torch.float32, ["17", "0-d"]))
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
        pair = SideBySide(case, params=make_params(dtype, ["1000"]))
        for p in (pair.params[0], pair.references[0]):
            p.grad = torch.full_like(p, 61_440.0)
        _clip_and_step(pair)
        pair.assert_equal()


class TestArgument:
    """Values of the argument, and how it is copied and saved."""

    @each_case
    @pytest.mark.parametrize("value", [0, 0.0, -1.0, float("nan"), -float("inf")])
    def test_invalid(self, case: OptimizerCase, value: float) -> None:
        with pytest.raises(ValueError, match=f"Invalid max_grad_norm value: {value}"):
            case.make([Parameter(torch.ones(1))], max_grad_norm=value)

    @each_case
    @pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
    def test_invalid_later(self, case: OptimizerCase, value: float) -> None:
        _, optimizer = single(case)
        optimizer.step()
        optimizer.max_grad_norm = value
        with refused(optimizer, ValueError, "max_grad_norm"):
            optimizer.step()

    @each_case
    def test_default_is_none(self, case: OptimizerCase) -> None:
        optimizer = case.make([Parameter(torch.ones(1))])
        assert optimizer.max_grad_norm is None

    @each_case
    @each_way_to_copy
    def test_copies_keep_it(self, case: OptimizerCase, copied: Any) -> None:
        optimizer = case.make(
            make_params(torch.float32, FEW_LAYOUTS), **case.kwargs[-1], max_grad_norm=LIMIT
        )
        step_alike(optimizer)
        twin = copied(optimizer)
        assert twin.max_grad_norm == LIMIT
        step_alike(optimizer, twin)
        assert_same_bits(optimizer, twin)

    @each_case
    def test_state_dict_leaves_it_to_the_optimizer(self, case: OptimizerCase) -> None:
        unlimited, limited = _twins(case, torch.float32, max_grad_norm=LIMIT)
        assert "max_grad_norm" not in str(limited.state_dict())
        step_alike(unlimited)
        limited.load_state_dict(unlimited.state_dict())
        assert limited.max_grad_norm == LIMIT
