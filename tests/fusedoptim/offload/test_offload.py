"""OffloadOptimizer takes the step of its class on the host, bit for bit.

The device is the CPU, whose weights are then separate copies; links.py stands in for a device with
streams. ``python -m benchmarks.offload --check`` compares on a real one.
"""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from fusedoptim import FusedAdamW, FusedLamb, FusedSGD, SplitSGD
from fusedoptim.offload import OffloadOptimizer
from fusedoptim.offload._link import Link
from tests.fusedoptim.helpers import (
    FEW_LAYOUTS,
    assert_same_bits,
    each_case_and_dtype,
    make_params,
    new_scaler,
    params_of,
    random_like,
    step_alike,
    through_a_file,
)
from tests.fusedoptim.offload.links import Counted, Late, Short, Staged
from tests.fusedoptim.offload.models import (
    BF16,
    SMALL,
    assert_equal_models,
    backward,
    network,
    networks,
)
from tests.optimizer_cases import OptimizerCase


@pytest.fixture(params=[Link, Late, Staged, Short])
def link(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Link]:
    monkeypatch.setattr("fusedoptim.offload._optimizer.Link", request.param)
    chosen: type[Link] = request.param
    return chosen


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[Counted]:
    monkeypatch.setattr("fusedoptim.offload._optimizer.Link", Counted)
    Counted.fetched = Counted.sent = 0
    return Counted


def pair(params: list[Parameter], cls: Callable[..., Any], **kwargs: Any) -> tuple[Any, Any]:
    """An optimizer of ``params`` that steps on the host, and an ordinary one of copies."""
    own = {
        name: kwargs.pop(name) for name in ("bucket_cap_mb", "copy_in_backward") if name in kwargs
    }
    expected = cls(
        [Parameter(p.detach().clone(memory_format=torch.contiguous_format)) for p in params],
        **kwargs,
    )
    return OffloadOptimizer(params, cls, **own, **kwargs), expected


class TestValues:
    @each_case_and_dtype
    def test_are_those_of_the_class_on_the_host(
        self, case: OptimizerCase, dtype: torch.dtype
    ) -> None:
        params = make_params(dtype, FEW_LAYOUTS)
        offload, expected = pair(params, case.make, bucket_cap_mb=SMALL, **case.kwargs[-1])
        for _ in range(3):
            step_alike(offload, expected)
        assert_same_bits(offload, expected)

    @pytest.mark.parametrize("dtype", [torch.float32, BF16])
    @pytest.mark.parametrize(
        ("cls", "options"),
        [
            (torch.optim.AdamW, {"fused": True}),
            (torch.optim.AdamW, {"foreach": True}),
            (torch.optim.Adagrad, {"foreach": False}),
            (torch.optim.SGD, {"foreach": True}),
        ],
    )
    def test_of_torchs_classes(
        self, cls: type[Any], options: dict[str, bool], dtype: torch.dtype
    ) -> None:
        offload, expected = pair(make_params(dtype, FEW_LAYOUTS[:3]), cls, lr=0.1, **options)
        for _ in range(3):
            step_alike(offload, expected)
        assert_same_bits(offload, expected)

    def test_of_a_class_that_refuses_vectors(self) -> None:
        offload, expected = pair([Parameter(torch.randn(4, 3))], torch.optim.Muon, lr=0.1)
        for _ in range(3):
            step_alike(offload, expected)
        assert_same_bits(offload, expected)

    @pytest.mark.parametrize(
        ("cls", "options"),
        [
            (FusedAdamW, {"split": True}),
            (FusedAdamW, {"state_dtype": "float8"}),
            (torch.optim.AdamW, {}),
        ],
    )
    def test_with_other_defaults_of_torch(self, cls: type[Any], options: dict[str, Any]) -> None:
        """The copies are on the CPU whatever the default device is, for which "meta" stands."""
        params = [Parameter(torch.randn(4, dtype=BF16))]
        grads = [torch.randn(4, dtype=BF16)]
        peers = copy.deepcopy(params)
        with torch.device("meta"):
            torch.set_default_dtype(torch.float64)
            try:
                offload = OffloadOptimizer(params, cls, **options)
            finally:
                torch.set_default_dtype(torch.float32)
            for _ in range(2):
                step_alike(offload, grads=grads)
        expected = cls(peers, **options)
        for _ in range(2):
            step_alike(expected, grads=grads)
        assert_same_bits(offload, expected)

    @pytest.mark.parametrize("in_backward", [True, False])
    @pytest.mark.parametrize("cls", [FusedAdamW, FusedLamb])
    def test_of_a_training(self, link: type[Link], cls: type[Any], in_backward: bool) -> None:
        """Train with accumulation, clipping, both kinds of zero_grad, and a missing gradient."""
        both = networks(BF16, cls, lr=0.05, split=True, copy_in_backward=in_backward)
        for step in range(6):
            for model, optimizer in both:
                optimizer.zero_grad(set_to_none=step != 4)
                for seed in range(1 + step % 2):
                    backward(model, 10 * step + seed)
                if step == 2:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                if step == 3:
                    model[0].weight.grad = None
                optimizer.step()
            assert_equal_models(*both)

    def test_with_a_scheduler_and_groups(self) -> None:
        both = []
        torch.manual_seed(0)
        models = network(), network()
        models[1].load_state_dict(models[0].state_dict())
        for model, make in zip(models, (OffloadOptimizer, lambda p, cls, **kw: cls(p, **kw))):
            groups = [
                {"params": list(model[0].named_parameters()), "weight_decay": 0.5},
                {"params": list(model[2].named_parameters())},
            ]
            optimizer = make(groups, FusedAdamW, lr=0.1)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
            both.append((model, optimizer))
            for step in range(5):
                if step == 2:
                    optimizer.add_param_group(
                        {"params": list(model[4].named_parameters()), "lr": 0.3}
                    )
                    scheduler.base_lrs.append(0.3)
                    optimizer.param_groups[-1].update(
                        {
                            k: v
                            for k, v in optimizer.param_groups[0].items()
                            if "lr" in k and k != "lr"
                        }
                    )
                optimizer.zero_grad()
                backward(model, step)
                optimizer.step()
                scheduler.step() if step < 2 else None
        assert_equal_models(*both)
        first, second = (optimizer.state_dict() for _, optimizer in both)
        assert first["param_groups"] == second["param_groups"]

    @pytest.mark.parametrize("cls", [FusedAdamW, torch.optim.AdamW])
    def test_after_changes_of_state_and_groups(self, cls: type[Any]) -> None:
        params = [Parameter(torch.randn(3)) for _ in range(3)]
        peers = copy.deepcopy(params)
        grads = [[random_like(p) for p in params] for _ in range(9)]
        for some, make in ((params, OffloadOptimizer), (peers, lambda g, cls, **k: cls(g, **k))):
            groups = [{"params": some[:1], "lr": 0.5}, {"params": some[1:]}]
            optimizer = make(groups, cls, lr=0.1)
            for taken in range(9):
                if taken == 1:
                    removed = optimizer.param_groups.pop(0)
                elif taken == 2:
                    optimizer.add_param_group(removed)
                elif taken == 3:
                    optimizer.state.clear()
                elif taken == 4:
                    del optimizer.state[some[1]]
                elif taken == 5:
                    optimizer.state[some[0]]["exp_avg"] = torch.full((3,), 0.25)
                elif taken == 6:
                    optimizer.state[some[2]] = copy.deepcopy(optimizer.state[some[2]])
                elif taken == 7:
                    optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
                elif taken == 8:
                    del (
                        optimizer.param_groups[0],
                        optimizer.state[some[1]],
                        optimizer.state[some[2]],
                    )
                for p, grad in zip(some, grads[taken]):
                    p.grad = grad.clone()
                optimizer.step()
            assert optimizer.state.keys() == {some[0]}
        assert all(map(torch.equal, params, peers))

    @pytest.mark.parametrize("split", [False, True])
    @pytest.mark.parametrize("steps", [1, 2])
    def test_a_removed_group_may_change_and_come_back(self, split: bool, steps: int) -> None:
        """The head of a model gets other classes, in place, and some steps are taken without it."""
        body, head = nn.Linear(4, 4), nn.Linear(4, 2)
        larger = torch.randn(5, 4), torch.randn(5)
        batch = torch.randn(3, 4)
        values = []
        for make in (FusedAdamW, functools.partial(OffloadOptimizer, optimizer_class=FusedAdamW)):
            parts = copy.deepcopy([body, head])
            model = nn.Sequential(*parts)
            groups = [{"params": list(part.parameters())} for part in parts]
            optimizer = make(groups, lr=0.1, split=split)
            for step in range(4):
                if step == 1:
                    for p, value in zip(optimizer.param_groups.pop()["params"], larger):
                        del optimizer.state[p]
                        p.data, p.grad = value.to(p.dtype, copy=True), None
                model.zero_grad()
                model(batch.to(parts[0].weight.dtype)).float().square().sum().backward()
                optimizer.step()
                if step == steps:
                    assert len(list(optimizer.master_params())) == 2
                    optimizer.add_param_group({"params": parts[1].parameters()})
            values.append(list(optimizer.master_params()))
        assert all(map(torch.equal, *values))

    def test_state_that_was_moved(self) -> None:
        old, new = (Parameter(torch.ones(3)) for _ in range(2))
        optimizer = OffloadOptimizer([old, new], FusedAdamW)
        old.grad = torch.ones(3)
        optimizer.step()
        optimizer.state[new] = optimizer.state.pop(old)
        old.grad, new.grad = None, torch.ones(3)
        optimizer.step()
        assert optimizer.state.keys() == {new}
        assert optimizer.state[new]["step"] == 2

    def test_what_is_no_state_of_a_parameter(self) -> None:
        """torch lets users keep anything in the state."""
        (_, optimizer), _ = networks(torch.float32, FusedAdamW)
        optimizer.state["epoch"] = 0
        step_alike(optimizer)
        checkpoint = through_a_file(optimizer.state_dict())
        assert checkpoint["state"]["epoch"] == 0
        optimizer.state["epoch"] = 1
        optimizer.load_state_dict(checkpoint)
        step_alike(optimizer)
        assert optimizer.state["epoch"] == 0

    @pytest.mark.parametrize("cls", [FusedSGD, torch.optim.SGD])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, BF16])
    def test_max_grad_norm(self, dtype: torch.dtype, cls: type[Any]) -> None:
        params = [Parameter(torch.zeros(shape, dtype=dtype)) for shape in (17, 1000, (3, 4))]
        grads = [random_like(p) for p in params]
        norm = torch.linalg.vector_norm(torch.cat([g.double().flatten() for g in grads]))
        optimizer = OffloadOptimizer(params, cls, lr=1.0, max_grad_norm=0.5)
        step_alike(optimizer, grads=grads)
        for p, grad in zip(params, grads):
            expected = -grad.double() * 0.5 / (norm + 1e-6)
            torch.testing.assert_close(p.detach(), expected.to(dtype))
            assert p.grad is not None
            assert torch.equal(p.grad, grad)

    def test_rounded_state_is_the_same_in_each_run(self) -> None:
        results = []
        for _ in range(2):
            torch.manual_seed(0)
            both = networks(BF16, FusedAdamW, split=True, state_dtype="float8", lr=0.1)
            for step in range(3):
                backward(both[0][0], step)
                both[0][1].step()
            results.append(both[0])
        assert_equal_models(*results)


class TestContract:
    def test_two_bytes_a_weight_each_way(self, counted: type[Counted]) -> None:
        (model, optimizer), _ = networks(BF16, FusedAdamW, split=True)
        size = 2 * sum(p.numel() for p in model.parameters())
        backward(model)
        assert (counted.fetched, counted.sent) == (size, 0)
        optimizer.step()
        assert (counted.fetched, counted.sent) == (size, size)
        optimizer.zero_grad()
        optimizer.step()  # there is no gradient, so nothing to do
        assert (counted.fetched, counted.sent) == (size, size)
        optimizer.copy_in_backward = False
        backward(model)
        assert (counted.fetched, counted.sent) == (size, size)
        optimizer.step()
        assert (counted.fetched, counted.sent) == (2 * size, 2 * size)

    def test_copies_in_backward_beside_frozen_parameters(self, counted: type[Counted]) -> None:
        (model, optimizer), _ = networks(torch.float32, FusedAdamW)
        model[0].bias.requires_grad_(False)
        optimizer.step()  # which notices that
        backward(model)
        assert counted.fetched == sum(p.nbytes for p in model.parameters() if p.requires_grad)

    @pytest.mark.parametrize("cls", [FusedAdamW, torch.optim.AdamW])
    def test_gradients_are_freed_with_zero_grad(self, cls: type[Any]) -> None:
        """Also those that no step has used, or that a GradScaler's step has skipped."""
        (model, optimizer), _ = networks(torch.float32, cls)
        for skipped in (False, True):
            backward(model)
            grads = [weakref.ref(p.grad) for p in model.parameters()]
            if skipped:
                optimizer.found_inf = torch.ones(())
                optimizer.step()
                del optimizer.found_inf
                model.zero_grad()
            else:
                optimizer.zero_grad()
            assert not any(grad() is not None for grad in grads)

    def test_split_parameters_on_the_cpu_keep_their_strides_and_share_no_memory(self) -> None:
        """A saved layer has no more bytes than its own."""
        layers = nn.Conv2d(3, 4, 2), nn.Linear(2, 2)
        model: Any = nn.Sequential(*layers).to(memory_format=torch.channels_last)
        OffloadOptimizer(model.parameters(), FusedAdamW, split=True)
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        assert [p.untyped_storage().nbytes() for p in model.parameters()] == [96, 8, 8, 4]

    def test_state_is_on_the_host_and_gradients_stay(self) -> None:
        (model, optimizer), _ = networks(torch.float32, FusedAdamW)
        assert len(optimizer.state) == 0
        backward(model)
        grads = [(p.grad, p.grad._version) for p in model.parameters()]
        optimizer.step()
        assert [(p.grad, p.grad._version) for p in model.parameters()] == grads
        assert optimizer.state[model[0].weight].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert params_of(optimizer) == list(model.parameters())

    def test_closure_and_hooks(self) -> None:
        (model, optimizer), _ = networks(torch.float32, FusedSGD, lr=0.1)
        calls: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))

        def closure() -> float:
            backward(model)
            calls.append("closure")
            return 3.0

        before = model[0].weight.detach().clone()
        assert optimizer.step(closure) == 3.0
        assert calls == ["before", "closure", "after"]
        assert not torch.equal(model[0].weight, before)

    @pytest.mark.parametrize(("unscale", "clip"), [(False, False), (True, False), (True, True)])
    @pytest.mark.parametrize("cls", [FusedSGD, torch.optim.SGD])
    def test_grad_scaler_unscales_and_skips(
        self, cls: type[Any], unscale: bool, clip: bool
    ) -> None:
        both = networks(torch.float32, cls, lr=0.1)
        for model, optimizer in both:
            scaler = new_scaler()
            for step in range(3):
                optimizer.zero_grad()
                loss = model(torch.ones(1, 6)).sum()
                scaler.scale(loss * (torch.inf if step == 1 else 1.0)).backward()
                if unscale:
                    scaler.unscale_(optimizer)
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                scaler.step(optimizer)
                scaler.update()
            assert scaler.get_scale() == 128
        assert_equal_models(*both)

    def test_grad_scaler_and_max_grad_norm(self) -> None:
        both = networks(torch.float32, FusedSGD, lr=0.1)
        both[0][1].max_grad_norm = both[1][1].max_grad_norm = 0.01
        for model, optimizer in both:
            scaler = new_scaler()
            scaler.scale(model(torch.ones(1, 6)).sum()).backward()
            scaler.step(optimizer)
        for p, q in zip(*(model.parameters() for model, _ in both)):
            torch.testing.assert_close(p, q)

    def test_sparse_gradients(self) -> None:
        tables = [nn.Embedding(10, 3, sparse=True) for _ in range(2)]
        tables[1].load_state_dict(tables[0].state_dict())
        offload = OffloadOptimizer(tables[0].parameters(), FusedSGD, lr=0.1, max_grad_norm=9.0)
        for table, optimizer in zip(tables, (offload, FusedSGD(tables[1].parameters(), lr=0.1))):
            table(torch.tensor([1, 3, 3])).sum().backward()
            optimizer.step()
        assert torch.equal(*(t.weight for t in tables))

    def test_the_host_waits_for_its_copies(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An update waits for gradients, and for weights still on their way to the device."""
        monkeypatch.setattr("fusedoptim.offload._optimizer.Link", Late)
        calls: list[Any] = []
        monkeypatch.setattr(Late, "wait", staticmethod(calls.append))
        p = Parameter(torch.ones(3))
        optimizer = OffloadOptimizer([p], FusedSGD, lr=0.1)
        (bucket,) = optimizer._buckets
        bucket.optimizer.register_step_pre_hook(lambda *_: calls.append("update"))
        step_alike(optimizer)
        sent = bucket._end_of_send
        step_alike(optimizer)
        assert sent is not None
        second = calls[calls.index("update") + 1 :]
        assert second[:-1] == [sent, bucket._end_of_fetch]
        assert second[-1] == "update"

    def test_weights_written_by_others_count(self) -> None:
        both = networks(BF16, FusedAdamW, lr=0.05, split=True)
        for step in range(4):
            for model, optimizer in both:
                optimizer.zero_grad()
                backward(model, step)
                optimizer.step()
                if step == 1:
                    with torch.no_grad():
                        model[0].weight.mul_(0.5)
                if step == 2:
                    model[2].weight.data = torch.ones_like(model[2].weight)
        assert_equal_models(*both)

    @pytest.mark.parametrize("cls", [FusedAdamW, torch.optim.AdamW])
    def test_weights_written_unseen_count_when_told(self, cls: type[Any]) -> None:
        both = networks(torch.float32, cls, lr=0.05)
        for step in range(3):
            for model, optimizer in both:
                optimizer.zero_grad()
                backward(model, step)
                optimizer.step()
                for p in model.parameters():
                    p.data.clamp_(-0.01, 0.01)
            both[0][1].weights_changed()
        assert_equal_models(*both)

    def test_gradients_written_unseen_count_if_copied_in_the_step(self) -> None:
        """After ``unscale_``, users may call the step themselves."""
        both = networks(torch.float32, FusedSGD, lr=0.1)
        for model, optimizer in both:
            scaler = new_scaler()
            scaler.scale(model(torch.ones(1, 6)).sum()).backward()
            scaler.unscale_(optimizer)
            optimizer.copy_in_backward = False  # also copies those again that backward has copied
            optimizer.step()
        assert_equal_models(*both)

    def test_master_params(self) -> None:
        both = networks(torch.float32, SplitSGD, lr=1e-3)
        for model, optimizer in both:
            backward(model)
            optimizer.step()
        first, second = (list(optimizer.master_params()) for _, optimizer in both)
        assert all(map(torch.equal, first, second))
        (_, plain), _ = networks(torch.float32, torch.optim.SGD)
        assert all(map(torch.equal, plain.master_params(), params_of(plain)))
        at_the_call = both[0][1].master_params()
        both[0][1].step()
        assert all(map(torch.equal, at_the_call, first))

    def test_is_freed_with_its_hooks(self) -> None:
        (model, optimizer), _ = networks(torch.float32, FusedSGD)
        backward(model)
        optimizer.step()
        found = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert found() is None
        assert not model[0].weight._post_accumulate_grad_hooks

    def test_the_model_can_be_copied_and_the_optimizer_not(self) -> None:
        (model, optimizer), _ = networks(torch.float32, FusedSGD)
        copied, unpickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for other in (copied, unpickled):
            backward(other)
        for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="load the state_dict of this one"):
                attempt(optimizer)
