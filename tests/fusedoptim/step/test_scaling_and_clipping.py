"""GradScaler and ``max_grad_norm``: the step itself unscales, skips and clips, as float64 does."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_

from tests.fusedoptim.helpers import (
    FEW_LAYOUTS,
    SideBySide,
    assert_same_bits,
    each_case,
    each_case_and_dtype,
    each_class,
    each_way_to_copy,
    few,
    make_params,
    new_scaler,
    params_of,
    random_like,
    refused,
    single,
    step_alike,
    unchanged,
    widened,
)
from tests.optimizer_cases import ALL_CASES, CASES, Kwargs, OptimizerCase, configuration_id

LIMIT = 0.7
WHOLE_CASES = [case for case in CASES if not case.is_split]
NOT_FINITE = [float("inf"), -float("inf"), float("nan")]
each_configuration = pytest.mark.parametrize(
    ("case", "kwargs"),
    [(case, kwargs) for case in ALL_CASES for kwargs in case.kwargs],
    ids=configuration_id,
)
each_limit = pytest.mark.parametrize("limit", [None, LIMIT], ids=["scaled", "scaled, clipped"])


def _twins(case: OptimizerCase, dtype: torch.dtype, **own: Any) -> tuple[Any, Any]:
    """Two optimizers on equal parameters; the second has the arguments ``own``."""
    params = make_params(dtype, FEW_LAYOUTS)
    copies = [Parameter(p.detach().clone()) for p in params]
    return (
        case.make(params, **case.kwargs[-1]),
        case.make(copies, **case.kwargs[-1], **own),
    )


class TestParity:
    """A step that unscales and clips equals unscale_, clip_grad_norm_ and a step in float64."""

    @staticmethod
    def _three_steps(pair: SideBySide, scaler: GradScaler | None, limit: float | None) -> None:
        for i in range(3):
            pair.set_gradients(skip=[5] if i == 1 else [])
            scale = scaler.get_scale() if scaler else 1.0
            before = [None if p.grad is None else p.grad * scale for p in pair.params]
            pair.check(scaler=scaler, limit=limit)
            for p, grad in zip(pair.params, before):
                assert (p.grad is None) if grad is None else torch.equal(p.grad, grad)

    @each_configuration
    def test_clipped(self, case: OptimizerCase, kwargs: Kwargs) -> None:
        for dtype in case.dtypes if kwargs is case.kwargs[-1] else (torch.float32,):
            pair = SideBySide(case, kwargs, make_params(dtype, FEW_LAYOUTS))
            self._three_steps(pair, None, LIMIT)

    @each_limit
    @each_case_and_dtype
    def test_scaled(self, case: OptimizerCase, dtype: torch.dtype, limit: float | None) -> None:
        """The norm is that of the unscaled gradients."""
        scaler = new_scaler(growth_interval=1)
        pair = SideBySide(case, params=make_params(dtype, FEW_LAYOUTS))
        self._three_steps(pair, scaler, limit)
        assert scaler.get_scale() == 2048.0

    @each_limit
    @each_case
    def test_unscaled_by_hand(self, case: OptimizerCase, limit: float | None) -> None:
        pair = few(case)
        scaler = new_scaler(1024.0)
        for _ in range(3):
            pair.set_gradients()
            pair.scale_gradients(scaler)
            scaler.unscale_(pair.ours)
            for p in (*pair.params, *pair.references):  # the usual reason to unscale first
                p.grad.clamp_(-0.5, 0.5)
            pair.check(lambda: scaler.step(pair.ours), limit=limit)
            scaler.update()

    @pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=configuration_id)
    @pytest.mark.parametrize("case", WHOLE_CASES, ids=configuration_id)
    def test_complex(self, case: OptimizerCase, dtype: torch.dtype) -> None:
        pair = SideBySide(case, params=make_params(dtype, FEW_LAYOUTS))
        for i in range(3):
            pair.set_gradients()
            if i == 1:
                for p, reference in zip(pair.params, pair.references):
                    p.grad = p.grad.conj()
                    reference.grad = widened(p.grad)
            pair.check(limit=LIMIT)

    @each_case
    def test_many_elements(self, case: OptimizerCase) -> None:
        params = [Parameter(torch.randn(n)) for n in (33_001, 1, 32_768, 65_537)]
        SideBySide(case, params=params).train(2, limit=LIMIT)

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
    def test_gradients_of_another_layout_and_at_another_address(self, case: OptimizerCase) -> None:
        pair = SideBySide(case, params=make_params(torch.float32, ["channels_last", "17"]))
        for i in range(4):
            pair.set_gradients()
            if i % 2:
                pair.params[0].grad = pair.params[0].grad.contiguous()
            pair.check(limit=LIMIT)

    @each_case
    def test_changed_between_steps(self, case: OptimizerCase) -> None:
        """What a GradScaler sets on the optimizer lasts for one step."""
        pair = few(case)
        for limit, scaler in (
            (LIMIT, None),
            (None, new_scaler()),
            (None, None),
            (0.1, new_scaler()),
            (None, new_scaler(enabled=False)),
            (1e9, None),
            (2, None),
        ):
            pair.ours.max_grad_norm = None
            pair.train(limit=limit, scaler=scaler)
            assert not hasattr(pair.ours, "grad_scale")
            assert not hasattr(pair.ours, "found_inf")


class TestScale:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=configuration_id)
    @pytest.mark.parametrize("case", WHOLE_CASES, ids=configuration_id)
    def test_no_power_of_two(self, case: OptimizerCase, dtype: torch.dtype) -> None:
        """A step has the same bits as after unscale_, which would round 16-bit gradients."""
        optimizers = _twins(case, dtype)
        scaler = new_scaler(1000.1)
        for _ in range(3):
            for p, twin in zip(*map(params_of, optimizers)):
                p.grad = random_like(p) * scaler.get_scale()
                twin.grad = p.grad.clone()
            scaler.unscale_(optimizers[1])
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        assert_same_bits(*optimizers)

    @each_case
    def test_the_users(self, case: OptimizerCase) -> None:
        """torch multiplies its scale by the optimizer's ``grad_scale``, if there is one."""
        pair = few(case)
        pair.ours.grad_scale = torch.tensor(4.0)
        pair.train(scaler=new_scaler(), also=4.0)

    @each_case
    def test_fused_true(self, case: OptimizerCase) -> None:
        """A step with infinities, which changes nothing, and then one without."""
        pair = SideBySide(case, {"lr": 0.1}, make_params(torch.float32, ["1000"]))
        pair.ours.param_groups[0]["fused"] = True
        scaler = new_scaler()
        (p,), (reference,) = pair.params, pair.references
        scaler.scale((p * float("inf")).sum()).backward()
        with unchanged(pair.ours):
            scaler.step(pair.ours)
        scaler.update()
        pair.ours.zero_grad()
        scaler.scale(p.sum()).backward()
        reference.grad = torch.ones_like(reference)
        pair.check(lambda: scaler.step(pair.ours))
        scaler.update()
        pair.train(scaler=scaler)

    @pytest.mark.parametrize(
        "case", [case for case in ALL_CASES if case.supports_sparse_gradients], ids=configuration_id
    )
    def test_sparse_gradients(self, case: OptimizerCase) -> None:
        params = [Parameter(torch.ones(20, 8).bfloat16()) for _ in range(2)]
        plain, scaled = (case.make([p], lr=0.1) for p in params)
        scaler = new_scaler()

        def gradient(rows: Any, values: Tensor) -> Tensor:
            return torch.sparse_coo_tensor(rows, values.bfloat16(), (20, 8), check_invariants=True)

        for _ in range(3):
            grad = gradient(torch.randint(20, (1, 8)), torch.randint(-8, 9, (8, 8)))
            params[0].grad, params[1].grad = grad, grad * scaler.get_scale()
            plain.step()
            scaler.step(scaled)
            scaler.update()
            assert torch.equal(*params)
        params[1].grad = gradient([[3]], torch.full((1, 8), float("inf")))
        with unchanged(scaled):
            scaler.step(scaled)


class TestNotFinite:
    """A scaled step with an infinite gradient changes nothing, and the scaler backs off."""

    @each_configuration
    def test_first_and_later_step(self, case: OptimizerCase, kwargs: Kwargs) -> None:
        """Each value at one step, in random order: what finds them does not know the step."""
        pair = SideBySide(case, kwargs, make_params(torch.float32, ["17", "1000", "0-d"]))
        scaler = new_scaler()
        for i in torch.randperm(len(NOT_FINITE)):
            pair.set_gradients()
            pair.params[1].grad[-1] = NOT_FINITE[i]
            scale = scaler.get_scale()
            with unchanged(pair.ours):
                assert scaler.step(pair.ours) is None
            scaler.update()
            assert scaler.get_scale() == scale / 2
            pair.train(scaler=scaler)

    @each_case
    def test_in_any_group_and_dtype(self, case: OptimizerCase) -> None:
        params = [Parameter(torch.randn(100).to(dtype)) for dtype in case.dtypes * 2]
        groups = [{"params": params[:3]}, {"params": params[3:]}]
        optimizer = case.make(groups, **case.kwargs[-1])
        for bad in params:
            for p in params:
                p.grad = random_like(p)
            bad.grad[50] = float("inf")
            with unchanged(optimizer):
                new_scaler().step(optimizer)

    @pytest.mark.parametrize("by_hand", [False, True], ids=["", "unscaled by hand"])
    @each_limit
    @each_case
    def test_then_finite(self, case: OptimizerCase, limit: float | None, by_hand: bool) -> None:
        p, optimizer = single(case, "1000", max_grad_norm=limit, **case.kwargs[-1])
        for _ in range(2):
            scaler = new_scaler()
            p.grad = torch.full_like(p, float("inf"))
            if by_hand:
                p.grad[5] = float("nan")
                scaler.unscale_(optimizer)
            with unchanged(optimizer):
                scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 128.0
            p.grad = random_like(p)
            optimizer.step()

    @each_case
    def test_one_of_two_optimizers_skips(self, case: OptimizerCase) -> None:
        pairs = [few(case) for _ in range(2)]
        scaler = new_scaler()
        for i in range(4):
            for pair in pairs:
                pair.set_gradients()
                pair.scale_gradients(scaler)
            good, bad = pairs if i % 2 else reversed(pairs)
            bad.params[0].grad.fill_(float("inf"))
            with unchanged(bad.ours):
                scaler.step(bad.ours)
                good.step(lambda optimizer=good.ours: scaler.step(optimizer))
                scaler.update()
            for pair in pairs:
                pair.assert_equal()
        assert scaler.get_scale() == 256.0 / 2**4

    @each_case
    def test_scale_grows_and_backs_off_as_with_torchs(self, case: OptimizerCase) -> None:
        params = [Parameter(torch.ones(5)) for _ in range(2)]
        optimizers = [case.make(params[:1], lr=0.1), torch.optim.SGD(params[1:], lr=0.1)]
        scalers = [new_scaler(growth_interval=2, growth_factor=4.0) for _ in range(2)]
        history: list[list[float]] = []
        for good in (True, True, True, False, True, True, False, False, True):
            for optimizer, scaler in zip(optimizers, scalers):
                (p,) = params_of(optimizer)
                p.grad = torch.full_like(p, 1.0 if good else float("inf"))
                scaler.step(optimizer)
                scaler.update()
            history.append([scaler.get_scale() for scaler in scalers])
        assert [ours for ours, _ in history] == [torchs for _, torchs in history]
        assert len({ours for ours, _ in history}) > 2

    @each_case
    def test_without_a_gradient(self, case: OptimizerCase) -> None:
        """Two optimizers share a scaler, and the loss does not depend on the parameters of one."""
        idle, busy = (make_params(torch.float32, ["17"])[0] for _ in range(2))
        optimizers = [case.make([p], **case.kwargs[-1]) for p in (idle, busy)]
        scaler = new_scaler()
        busy.grad = torch.ones_like(busy)
        with unchanged(optimizers[0]):
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()


@pytest.mark.parametrize("case", WHOLE_CASES, ids=configuration_id)
class TestFloat16:
    """Parameters of float16, whose gradients torch's unscale_ refuses."""

    def test_a_gradient_that_would_underflow(self, case: OptimizerCase) -> None:
        """2^-30 is zero in float16; scaled by 2^20 it is not, and is unscaled in float32."""
        p = Parameter(torch.zeros(100, dtype=torch.float16))
        optimizer = case.make([p], lr=2.0**10)
        p.grad = torch.full_like(p, 2.0**-10)
        new_scaler(2.0**20).step(optimizer)
        assert p.isfinite().all()
        assert (p < 0).all()

    def test_overflow_backs_off(self, case: OptimizerCase) -> None:
        p = Parameter(torch.ones(3, dtype=torch.float16))
        optimizer = case.make([p], lr=0.1)
        scaler = new_scaler(2.0**17)
        taken = []
        for _ in range(4):
            p.grad = None
            before = p.detach().clone()
            scaler.scale((p * 2).sum()).backward()  # 2^18, 2^17, 2^16, then 2^15
            scaler.step(optimizer)
            scaler.update()
            taken.append(not torch.equal(p, before))
        assert taken == [False, False, False, True]
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            scaler.unscale_(optimizer)  # as with torch's optimizers


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
    def test_no_gradients_and_empty_ones(self, case: OptimizerCase) -> None:
        pair = SideBySide(case, params=make_params(torch.float32, ["empty", "3x0"]))
        pair.ours.max_grad_norm = LIMIT
        with unchanged(pair.ours):
            pair.ours.step()
        pair.train(limit=LIMIT)

    @each_case
    @pytest.mark.parametrize("value", NOT_FINITE)
    def test_not_finite(self, case: OptimizerCase, value: float) -> None:
        """An infinite norm turns finite gradients into 0 and others into NaN; NaN spreads."""
        pair = SideBySide(case, params=make_params(torch.float32, ["17", "0-d"]))
        pair.set_gradients()
        for p in (pair.params[0], pair.references[0]):
            p.grad[3] = value
        pair.ours.max_grad_norm = LIMIT
        clip_grad_norm_(pair.references, LIMIT)
        pair.step()
        for p, reference in zip(pair.params, pair.references):
            assert torch.equal(p.isnan(), reference.isnan())
        if value == value:
            assert pair.params[1].isfinite()

    @each_case
    def test_squares_beyond_the_range_of_float16(self, case: OptimizerCase) -> None:
        for dtype in {torch.float16, torch.bfloat16}.intersection(case.dtypes):
            pair = SideBySide(case, params=make_params(dtype, ["1000"]))
            for p in (pair.params[0], pair.references[0]):
                p.grad = torch.full_like(p, 61_440.0)
            pair.check(limit=LIMIT)


class TestArgument:
    """Values of ``max_grad_norm``, and how it is copied and saved."""

    @each_case
    @pytest.mark.parametrize("value", [0, 0.0, -1.0, float("nan"), -float("inf")])
    def test_invalid(self, case: OptimizerCase, value: float) -> None:
        with pytest.raises(ValueError, match=f"Invalid max_grad_norm value: {value}"):
            case.make([Parameter(torch.ones(1))], max_grad_norm=value)
        _, optimizer = single(case)
        assert optimizer.max_grad_norm is None
        optimizer.step()
        optimizer.max_grad_norm = value
        with refused(optimizer, ValueError, "max_grad_norm"):
            optimizer.step()

    @each_class
    @pytest.mark.parametrize("value", ["1", [1.0], {}])
    def test_no_number(self, case: OptimizerCase, value: Any) -> None:
        message = re.escape(f"max_grad_norm is {value!r}; pass a number above 0, or None")
        with pytest.raises(TypeError, match=message):
            case.make([Parameter(torch.ones(1))], max_grad_norm=value)
        _, optimizer = single(case)
        optimizer.max_grad_norm = value
        with refused(optimizer, TypeError, message):
            optimizer.step()

    @each_case
    @each_way_to_copy
    def test_copies_clip_and_unscale_too(self, case: OptimizerCase, copied: Any) -> None:
        optimizer, _ = _twins(case, torch.float32)
        optimizer.max_grad_norm = LIMIT
        step_alike(optimizer)
        twin = copied(optimizer)
        assert twin.max_grad_norm == LIMIT
        for p, q in zip(params_of(optimizer), params_of(twin)):
            p.grad = random_like(p)
            q.grad = p.grad * 256
        optimizer.step()
        new_scaler().step(twin)
        assert_same_bits(optimizer, twin)

    @each_case
    def test_state_dict_leaves_it_to_the_optimizer(self, case: OptimizerCase) -> None:
        unlimited, limited = _twins(case, torch.float32, max_grad_norm=LIMIT)
        assert "max_grad_norm" not in str(limited.state_dict())
        step_alike(unlimited)
        limited.load_state_dict(unlimited.state_dict())
        assert limited.max_grad_norm == LIMIT


class TestAutocast:
    """Training under torch.amp.autocast("cpu", dtype=torch.bfloat16)."""

    @pytest.mark.usefixtures("one_thread")
    @each_case
    @pytest.mark.parametrize("scaled", [False, True])
    def test_training(self, case: OptimizerCase, scaled: bool) -> None:
        model: Callable[[Tensor], Tensor] = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.LayerNorm(32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
        )
        pair = SideBySide(case, {"lr": 0.01}, list(model.parameters()))
        scaler = new_scaler(enabled=scaled)
        x, losses = torch.randn(64, 8), []
        target = x.square().sum(1, keepdim=True) / 8
        for _ in range(8):
            pair.ours.zero_grad()
            with torch.amp.autocast("cpu", dtype=torch.bfloat16):
                loss = (model(x) - target).square().mean()
            scaler.scale(loss).backward()
            for p, reference in zip(pair.params, pair.references):
                reference.grad = widened(p.grad) / scaler.get_scale()
            pair.check(lambda: scaler.step(pair.ours))
            scaler.update()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
