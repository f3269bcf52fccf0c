"""Autocast and GradScaler: the step itself unscales, and skips if a gradient is not finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Parameter

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
    random_like,
    scale_gradients,
    scaled_step,
    single,
    unchanged,
    widened,
)
from tests.optimizer_cases import ALL_CASES, OptimizerCase, configuration_id

Kwargs = dict[str, Any]
each_configuration = pytest.mark.parametrize(
    ("case", "kwargs"),
    [(case, kwargs) for case in ALL_CASES for kwargs in case.kwargs],
    ids=configuration_id,
)
each_sparse_case = pytest.mark.parametrize(
    "case", [case for case in ALL_CASES if case.supports_sparse_gradients], ids=configuration_id
)
NOT_FINITE = [float("inf"), -float("inf"), float("nan")]


def _train_scaled(pair: SideBySide, scaler: GradScaler, skip: Sequence[int] = ()) -> None:
    """Step with new gradients, ours scaled, and compare."""
    pair.set_gradients(skip)
    scale_gradients(pair, scaler)
    scaled_step(pair, scaler)
    pair.assert_equal()


class TestScaledGradients:
    """A scaled step equals unscaling in float64 and a step."""

    @each_case_and_dtype
    def test_three_steps(self, case: OptimizerCase, dtype: torch.dtype) -> None:
        pair = SideBySide(case, params=make_params(dtype, FEW_LAYOUTS))
        scaler = new_scaler(growth_interval=1)
        for i in range(3):
            _train_scaled(pair, scaler, skip=[5] if i == 1 else [])
        assert scaler.get_scale() == 2048.0

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=configuration_id)
    @each_case
    def test_scale_that_is_no_power_of_two(self, case: OptimizerCase, dtype: torch.dtype) -> None:
        """The same bits as after unscale_; of 16-bit gradients, that would round."""
        if dtype not in case.dtypes or case.is_split:
            pytest.skip(f"{case.name} has no gradients of {dtype}")
        params = make_params(dtype, FEW_LAYOUTS)
        twins = [Parameter(p.detach().clone()) for p in params]
        optimizers = [case.make(each, **case.kwargs[-1]) for each in (params, twins)]
        scaler = new_scaler(1000.1)
        for _ in range(3):
            for p, twin in zip(params, twins):
                p.grad = random_like(p) * scaler.get_scale()
                twin.grad = p.grad.clone()
            scaler.unscale_(optimizers[1])
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        assert_same_bits(*optimizers)

    @each_case
    def test_gradients_keep_their_values(self, case: OptimizerCase) -> None:
        pair = few(case)
        scaler = new_scaler()
        pair.set_gradients()
        scale_gradients(pair, scaler)
        before = [p.grad.clone() for p in pair.params]
        scaled_step(pair, scaler)
        for p, grad in zip(pair.params, before):
            assert torch.equal(p.grad, grad)

    @each_case
    def test_plain_and_scaled_steps_in_turn(self, case: OptimizerCase) -> None:
        """What a GradScaler sets on the optimizer lasts for one step."""
        pair = few(case)
        scaler = new_scaler()
        for i in range(4):
            pair.set_gradients()
            if i % 2:
                pair.step()
            else:
                scale_gradients(pair, scaler)
                scaled_step(pair, scaler)
            pair.assert_equal()
            assert not hasattr(pair.ours, "grad_scale")
            assert not hasattr(pair.ours, "found_inf")

    @each_case
    def test_unscaled_by_hand(self, case: OptimizerCase) -> None:
        pair = few(case)
        scaler = new_scaler()
        for _ in range(3):
            pair.set_gradients()
            scale_gradients(pair, scaler)
            scaler.unscale_(pair.ours)
            for p in (*pair.params, *pair.references):  # the usual reason to do so
                p.grad.clamp_(-0.5, 0.5)
            scaled_step(pair, scaler)
            pair.assert_equal()

    @each_case
    def test_scale_of_the_users(self, case: OptimizerCase) -> None:
        """torch multiplies its scale by the attribute ``grad_scale``, if there is one."""
        pair = few(case)
        scaler = new_scaler()
        pair.set_gradients()
        scale_gradients(pair, scaler, also=4.0)
        pair.ours.grad_scale = torch.tensor(4.0)
        scaled_step(pair, scaler)
        pair.assert_equal()

    @each_case
    def test_disabled_scaler(self, case: OptimizerCase) -> None:
        pair = few(case)
        scaler = new_scaler(enabled=False)
        for _ in range(2):
            pair.set_gradients()
            scaled_step(pair, scaler)
            pair.assert_equal()

    @each_case
    @each_way_to_copy
    def test_copies_unscale_too(self, case: OptimizerCase, copied: Any) -> None:
        p, optimizer = single(case, "1000")
        twin = copied(optimizer)
        (q,) = params_of(twin)
        q.grad = p.grad * 256
        optimizer.step()
        new_scaler().step(twin)
        assert torch.equal(p, q)

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
        scaled_step(pair, scaler)
        pair.assert_equal()
        _train_scaled(pair, scaler)

    @each_sparse_case
    def test_sparse_gradients(self, case: OptimizerCase) -> None:
        params = [Parameter(torch.ones(20, 8).bfloat16()) for _ in range(2)]
        plain, scaled = (case.make([p], lr=0.1) for p in params)
        scaler = new_scaler()
        for _ in range(3):
            grad = torch.sparse_coo_tensor(
                torch.randint(20, (1, 8)),
                torch.randint(-8, 9, (8, 8)).bfloat16(),
                (20, 8),
                check_invariants=True,
            )
            params[0].grad, params[1].grad = grad, grad * scaler.get_scale()
            plain.step()
            scaler.step(scaled)
            scaler.update()
            assert torch.equal(*params)

    @each_sparse_case
    def test_infinite_sparse_gradient(self, case: OptimizerCase) -> None:
        p = Parameter(torch.ones(20, 8).bfloat16())
        optimizer = case.make([p], lr=0.1)
        values = torch.full((1, 8), float("inf")).bfloat16()
        p.grad = torch.sparse_coo_tensor([[3]], values, (20, 8), check_invariants=True)
        with unchanged(optimizer):
            new_scaler().step(optimizer)


class TestNotFinite:
    """A step with an infinite gradient changes nothing, and the scaler backs off."""

    @pytest.mark.parametrize("value", NOT_FINITE)
    @each_configuration
    def test_first_and_later_step(self, case: OptimizerCase, kwargs: Kwargs, value: float) -> None:
        pair = SideBySide(case, kwargs, make_params(torch.float32, ["17", "1000", "0-d"]))
        scaler = new_scaler()
        for _ in range(2):
            pair.set_gradients()
            pair.params[1].grad[-1] = value
            scale = scaler.get_scale()
            with unchanged(pair.ours):
                assert scaler.step(pair.ours) is None
            scaler.update()
            assert scaler.get_scale() == scale / 2
            _train_scaled(pair, scaler)

    @each_case
    def test_in_any_group_and_dtype(self, case: OptimizerCase) -> None:
        params = [Parameter(torch.randn(100).to(dtype)) for dtype in case.dtypes * 2]
        groups = [{"params": params[:3]}, {"params": params[3:]}]
        optimizer = case.make(groups, **case.kwargs[-1])
        for bad in params:
            scaler = new_scaler()
            for p in params:
                p.grad = random_like(p)
            bad.grad[50] = float("inf")
            with unchanged(optimizer):
                scaler.step(optimizer)

    @each_case
    def test_unscaled_by_hand(self, case: OptimizerCase) -> None:
        p, optimizer = single(case, "1000")
        scaler = new_scaler()
        p.grad[5] = float("nan")
        scaler.unscale_(optimizer)
        with unchanged(optimizer):
            scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 128.0

    @each_case
    def test_with_max_grad_norm(self, case: OptimizerCase) -> None:
        p, optimizer = single(case, "1000", max_grad_norm=1.0, **case.kwargs[-1])
        for _ in range(2):
            p.grad = torch.full_like(p, float("inf"))
            with unchanged(optimizer):
                new_scaler().step(optimizer)
            p.grad = random_like(p)
            optimizer.step()

    @each_case
    def test_one_of_two_optimizers_skips(self, case: OptimizerCase) -> None:
        pairs = [few(case) for _ in range(2)]
        scaler = new_scaler()
        for i in range(4):
            for pair in pairs:
                pair.set_gradients()
                scale_gradients(pair, scaler)
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
                (p,) = optimizer.param_groups[0]["params"]
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


@pytest.mark.parametrize(
    "case", [case for case in ALL_CASES if torch.float16 in case.dtypes], ids=configuration_id
)
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

    def test_unscaling_by_hand_is_refused_as_torch_does(self, case: OptimizerCase) -> None:
        p = Parameter(torch.ones(3, dtype=torch.float16))
        optimizer = case.make([p], lr=0.1)
        p.grad = torch.ones_like(p)
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            new_scaler().unscale_(optimizer)

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


class TestAutocast:
    """Training under torch.amp.autocast("cpu", dtype=torch.bfloat16)."""

    @staticmethod
    def _train(
        pair: SideBySide, model: Callable[[Tensor], Tensor], scaler: GradScaler | None
    ) -> list[float]:
        x, losses = torch.randn(64, 8), []
        target = x.square().sum(1, keepdim=True) / 8
        for _ in range(8):
            pair.ours.zero_grad()
            with torch.amp.autocast("cpu", dtype=torch.bfloat16):
                loss = (model(x) - target).square().mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
            scale = 1.0 if scaler is None else scaler.get_scale()
            for p, reference in zip(pair.params, pair.references):
                reference.grad = widened(p.grad) / scale
            if scaler is None:
                pair.step()
            else:
                scaled_step(pair, scaler)
            pair.assert_equal()
            losses.append(loss.item())
        return losses

    @pytest.mark.usefixtures("one_thread")
    @each_case
    @pytest.mark.parametrize("scaled", [False, True])
    def test_training(self, case: OptimizerCase, scaled: bool) -> None:
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.LayerNorm(32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
        )
        pair = SideBySide(case, {"lr": 0.01}, list(model.parameters()))
        losses = self._train(pair, model, new_scaler() if scaled else None)
        assert losses[-1] < losses[0]
