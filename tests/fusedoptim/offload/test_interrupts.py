"""An OffloadOptimizer whose construction, load or first step is interrupted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

import fusedoptim
from fusedoptim import FusedSGD
from fusedoptim.offload import OffloadOptimizer
from fusedoptim.offload._bucket import Bucket
from tests.conftest import SEED
from tests.fusedoptim.helpers import bits, refused, step_alike
from tests.fusedoptim.offload.models import SMALL
from tests.interrupts import InterruptAt, at, interrupt, polls_of, stopping_at


def new_params() -> list[Parameter]:
    """Two parameters that are the same at each call, for a bucket each."""
    values = torch.linspace(-3, 3, 80).split(40)
    params = [Parameter(v.clone()) for v in values]
    params[0].grad = torch.linspace(0, 1, 40)
    return params


def new_optimizer(params: list[Parameter], split: bool = True) -> OffloadOptimizer:
    return OffloadOptimizer(
        params, FusedSGD, bucket_cap_mb=SMALL, lr=0.1, momentum=0.9, split=split
    )


def interrupts(call: Callable[[], object], since: str, stride: int = 1) -> Iterator[InterruptAt]:
    """Interrupts at the places of a call from a function on, for calls that are like it.

    With a ``stride``, at other places in each run.
    """
    for place in polls_of(call, within=fusedoptim, since=since)[SEED % stride :: stride]:
        stop = InterruptAt(place, "polls", within=fusedoptim, since=since)
        yield stop
        assert stop.has_raised, f"another path was taken before {place}"


def assert_as_before(params: list[Parameter], grads: list[Any]) -> None:
    """Assert that parameters have the values of new ones and these gradients."""
    for p, expected, grad in zip(params, new_params(), grads, strict=True):
        assert p.dtype == torch.float32
        assert torch.equal(bits(p), bits(expected))
        assert p.grad is grad


def optimizers() -> tuple[OffloadOptimizer, dict[str, Any]]:
    """An optimizer after two steps, and the checkpoint of another after three."""
    first, second = new_optimizer(new_params()), new_optimizer(new_params())
    for optimizer, count in ((first, 2), (second, 3)):
        for _ in range(count):
            grads = [torch.full((40,), count, dtype=torch.bfloat16)] * 2
            step_alike(optimizer, grads=grads)
    second.param_groups[0]["lr"] = 0.5
    return first, copy.deepcopy(second.state_dict())


def assert_same_state(saved: dict[str, Any], expected: dict[str, Any]) -> None:
    assert saved["param_groups"] == expected["param_groups"]
    assert saved["state"].keys() == expected["state"].keys() == {0, 1}
    for i, state in expected["state"].items():
        assert state.keys() == saved["state"][i].keys() == {"momentum_buffer", "trail"}
        assert all(torch.equal(saved["state"][i][name], state[name]) for name in state)


class TestConstruction:
    def test_leaves_the_parameters_as_they_were(self) -> None:
        for stop in interrupts(lambda: new_optimizer(new_params()), since="_begin"):
            params = new_params()
            grads = [p.grad for p in params]
            with stop:
                new_optimizer(params)
            assert_as_before(params, grads)
            step_alike(new_optimizer(params))

    def test_of_a_group_leaves_the_optimizer_as_it_was(self) -> None:
        def new() -> OffloadOptimizer:
            return new_optimizer([Parameter(torch.ones(3))])

        sample = new()
        for stop in interrupts(
            lambda: sample.add_param_group({"params": new_params()}), since="_begin"
        ):
            optimizer, params = new(), new_params()
            grads = [p.grad for p in params]
            with stop:
                optimizer.add_param_group({"params": params})
            if len(optimizer.param_groups) == 1:
                assert_as_before(params, grads)
                optimizer.add_param_group({"params": params})
            step_alike(optimizer)

    @pytest.mark.parametrize("failing", range(2))
    def test_an_error_leaves_the_parameters_as_they_were(
        self, failing: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As when the device has no memory for the upper halves."""
        params = new_params()
        grads = [p.grad for p in params]
        attach, left = Bucket.attach, [failing]

        def fail(bucket: Bucket) -> None:
            attach(bucket)
            left[0] -= 1
            if left[0] < 0:
                raise torch.OutOfMemoryError("on purpose")

        monkeypatch.setattr(Bucket, "attach", fail)
        with pytest.raises(torch.OutOfMemoryError, match="on purpose"):
            new_optimizer(params)
        assert_as_before(params, grads)


class TestLoad:
    def test_leaves_the_state_before_or_that_of_the_checkpoint(self) -> None:
        """From the first change on."""
        sample, of_sample = optimizers()

        def load() -> None:
            sample.load_state_dict(of_sample)

        for stop in interrupts(load, since="__setstate__", stride=3):
            optimizer, saved = optimizers()
            before = copy.deepcopy(optimizer.state_dict())
            with stop:
                optimizer.load_state_dict(saved)
            step_alike(optimizer, grads=[torch.zeros(40, dtype=torch.bfloat16)] * 2)
            for expected in (before, saved):
                for state in expected["state"].values():
                    state["momentum_buffer"] *= 0.9
                    del state["trail"]
            found = copy.deepcopy(optimizer.state_dict())
            for state in found["state"].values():
                del state["trail"]
            lr = found["param_groups"][0]["lr"]
            expected = before if lr == 0.1 else saved
            assert lr == expected["param_groups"][0]["lr"]
            for i, state in expected["state"].items():
                torch.testing.assert_close(found["state"][i], state)

    @pytest.mark.parametrize("cls", [FusedSGD, OffloadOptimizer])
    def test_another_after_an_interrupt_in_its_cleanup(self, cls: Any) -> None:
        """The hook of the first load may be there still."""
        loaded: Any
        loaded, first = optimizers()
        other = new_optimizer(new_params())
        step_alike(other)
        saved = other.state_dict()
        if cls is FusedSGD:
            loaded = FusedSGD(new_params(), momentum=0.9, split=True)
        with pytest.raises(KeyboardInterrupt), stopping_at(at(RemovableHandle.remove, "call")):
            loaded.load_state_dict(first)
        loaded.load_state_dict(copy.deepcopy(saved))
        assert_same_state(loaded.state_dict(), saved)

    def test_interrupted_twice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The second time while the state before is put back."""
        optimizer, saved = optimizers()
        host = optimizer._buckets[1].optimizer

        def interrupt_both(_: object) -> None:
            monkeypatch.setattr(host, "__setstate__", lambda _: interrupt())
            interrupt()

        handle = optimizer.register_load_state_dict_post_hook(interrupt_both)
        with pytest.raises(KeyboardInterrupt):
            optimizer.load_state_dict(copy.deepcopy(saved))
        handle.remove()
        monkeypatch.undo()
        with refused(optimizer, RuntimeError, "load a checkpoint of model and optimizer"):
            optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(saved))
        assert_same_state(optimizer.state_dict(), saved)
        step_alike(optimizer)

    def test_a_hook_may_ask_for_the_new_state_dict(self) -> None:
        optimizer, saved = optimizers()
        seen: list[dict[str, Any]] = []
        optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.state_dict()))
        optimizer.load_state_dict(copy.deepcopy(saved))
        for found in (*seen, optimizer.state_dict()):
            assert_same_state(found, saved)


def test_a_first_step_that_is_interrupted_at_its_end_keeps_its_state() -> None:
    """Some of the new state is in ``optimizer.state``, and the rest must not look deleted."""
    optimizer = new_optimizer(new_params(), split=False)
    left = [2]

    def at_the_second_bucket(frame: FrameType, event: str) -> bool:
        if at(Bucket.states, "call")(frame, event):
            left[0] -= 1
        return left[0] == 0

    grads = [torch.ones(40)] * 2
    with pytest.raises(KeyboardInterrupt), stopping_at(at_the_second_bucket):
        step_alike(optimizer, grads=grads)
    step_alike(optimizer, grads=grads)
    for state in optimizer.state.values():
        torch.testing.assert_close(state["momentum_buffer"], torch.full((40,), 1.9))
    assert len(optimizer.state) == 2
