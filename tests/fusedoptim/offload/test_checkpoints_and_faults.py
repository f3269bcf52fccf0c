"""Checkpoints of an OffloadOptimizer, and what is left after an error, an interrupt or a kill."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from fusedoptim import FusedAdam, FusedAdamW, FusedSGD
from fusedoptim.offload import OffloadOptimizer
from tests.fusedoptim.helpers import (
    assert_same_bits,
    bits,
    new_scaler,
    params_of,
    refused,
    run_script,
    step_alike,
    through_a_file,
)
from tests.fusedoptim.offload.models import (
    BF16,
    SMALL,
    assert_equal_models,
    backward,
    network,
    networks,
)


def new_training() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = network(BF16)
    options: dict[str, Any] = {"lr": 0.1, "split": True, "state_dtype": "float8"}
    params = model.parameters()
    return model, OffloadOptimizer(params, FusedAdamW, bucket_cap_mb=SMALL, **options)


def steps(model: Any, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def train(file: str | None = None) -> list[Tensor]:
    """Take six steps. With a file, save after the third, and get killed after the fourth."""
    model, optimizer = new_training()
    steps(model, optimizer, 0, 3)
    if file is not None:
        torch.save([model.state_dict(), optimizer.state_dict()], file)
    steps(model, optimizer, 3, 4)
    if file is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    steps(model, optimizer, 4, 6)
    return list(optimizer.master_params())


def resume(file: Path) -> list[Tensor]:
    model, optimizer = new_training()
    for part, saved in zip((model, optimizer), torch.load(file)):
        part.load_state_dict(saved)
    steps(model, optimizer, 3, 6)
    return list(optimizer.master_params())


class Nested(FusedAdamW):
    """An optimizer whose step is interrupted before its kernels run."""

    meanwhile: Callable[[], Any] | None = None

    def _before_launch(self) -> None:  # type: ignore[override]  # a method in place of a callable
        if Nested.meanwhile is not None:
            Nested.meanwhile()


class TestCheckpoints:
    @pytest.mark.parametrize("cls", [FusedAdamW, torch.optim.AdamW])
    def test_move_both_ways(self, cls: type[Any]) -> None:
        options: dict[str, Any] = {"split": True} if cls is FusedAdamW else {}
        both = networks(BF16, cls, lr=0.05, **options)
        for step in range(4):
            if step == 2:
                (_, offload), (_, plain) = both
                saved = through_a_file(offload.state_dict()), through_a_file(plain.state_dict())
                assert saved[0].keys() == saved[1].keys()
                assert saved[0]["param_groups"] == saved[1]["param_groups"]
                assert saved[0]["state"].keys() == saved[1]["state"].keys()
                offload.load_state_dict(saved[1])
                plain.load_state_dict(saved[0])
            for model, optimizer in both:
                optimizer.zero_grad()
                backward(model, step)
                optimizer.step()
        assert_equal_models(*both)
        assert_same_bits(both[0][1], both[1][1])

    def test_of_torchs_class(self) -> None:
        both = networks(torch.float32, FusedAdam)
        (_, offload), (other, _) = both
        peer = torch.optim.Adam(other.parameters(), lr=0.5, foreach=True)
        backward(other)
        peer.step()
        offload.load_state_dict(peer.state_dict())
        assert offload.param_groups[0]["lr"] == 0.5
        assert offload.param_groups[0]["foreach"] is None
        backward(both[0][0])
        offload.step()
        assert offload.state[params_of(offload)[0]]["step"] == 2

    def test_resumed_after_a_kill(self, tmp_path: Path) -> None:
        """The first run is killed one step after its checkpoint."""
        file = tmp_path / "checkpoint"
        run_script(
            "import sys; from tests.fusedoptim.offload.test_checkpoints_and_faults import *; "
            "train(sys.argv[1])",
            str(file),
            returncode=-signal.SIGKILL,
        )
        assert all(map(torch.equal, train(), resume(file)))

    def test_that_do_not_fit_change_nothing(self) -> None:
        (model, optimizer), _ = networks(BF16, FusedAdamW, split=True)
        backward(model)
        optimizer.step()
        saved = through_a_file(optimizer.state_dict())
        lost = copy.deepcopy(saved)
        del lost["state"][5]["trail"]
        with refused(optimizer, ValueError, "the checkpoint has lost the 'trail' of parameter 5"):
            optimizer.load_state_dict(lost)
        misshapen = copy.deepcopy(saved)
        misshapen["state"][0]["trail"] = torch.zeros(3, dtype=torch.int16)
        with refused(optimizer, ValueError, "'trail' of parameter 0"):
            optimizer.load_state_dict(misshapen)
        fewer = copy.deepcopy(saved)
        fewer["param_groups"][0]["params"].pop()
        with refused(optimizer, ValueError, "doesn't match the size"):
            optimizer.load_state_dict(fewer)
        backward(model)
        optimizer.step()

    def test_an_error_in_a_later_bucket_changes_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (model, optimizer), _ = networks(torch.float32, FusedAdamW)
        backward(model)
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        for state in saved["state"].values():
            state["exp_avg"].fill_(9)
        host = optimizer._buckets[-1].optimizer
        monkeypatch.setattr(host, "load_state_dict", _fail)
        with refused(optimizer, OSError, "on purpose"):
            optimizer.load_state_dict(saved)

    @pytest.mark.parametrize("stepped", [False, True])
    def test_that_are_refused_leave_the_lower_halves(self, stepped: bool) -> None:
        """The first buckets have loaded theirs when a later one, or a hook, raises."""
        (_, optimizer), (_, other) = networks(torch.float32, FusedAdamW, split=True)
        if stepped:
            step_alike(optimizer)
        step_alike(other)
        before = list(optimizer.master_params())
        saved = copy.deepcopy(other.state_dict())
        handle = optimizer.register_load_state_dict_post_hook(_fail)
        with refused(optimizer, OSError, "on purpose"):
            optimizer.load_state_dict(saved)
        handle.remove()
        del saved["state"][5]["exp_avg_sq"]
        with refused(optimizer, ValueError, "no 'exp_avg_sq' of parameter"):
            optimizer.load_state_dict(saved)
        assert all(map(torch.equal, optimizer.master_params(), before))
        step_alike(optimizer)

    @pytest.mark.parametrize("is_first", [False, True])
    def test_of_a_frozen_bucket(self, is_first: bool) -> None:
        """Its lower halves are those of the checkpoint, whichever of the two is loaded first."""
        pairs = []
        for _ in range(2):
            torch.manual_seed(0)
            model = network()
            optimizer = OffloadOptimizer(
                model.parameters(), FusedAdamW, split=True, bucket_cap_mb=SMALL
            )
            model[0].requires_grad_(False)
            pairs.append((model, optimizer))
        (model, optimizer), (other, loaded) = pairs
        backward(model)
        optimizer.step()
        parts = [(optimizer, loaded), (model, other)]
        for saved, part in parts if is_first else parts[::-1]:
            part.load_state_dict(copy.deepcopy(saved.state_dict()))
        assert all(map(torch.equal, loaded.master_params(), optimizer.master_params()))

    def test_of_torchs_class_loaded_after_the_model(self) -> None:
        """The lower halves of the weights before do not stay with the new ones."""
        model, other = network(BF16), network()
        theirs = torch.optim.AdamW(model.parameters())
        backward(model)
        theirs.step()
        optimizer = OffloadOptimizer(other.parameters(), FusedAdamW, split=True)
        other.load_state_dict(model.state_dict())
        optimizer.load_state_dict(theirs.state_dict())
        exact = [p.float() for p in model.parameters()]
        assert all(map(torch.equal, optimizer.master_params(), exact))


class TestFaults:
    def test_an_error_between_two_buckets_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        (model, optimizer), (other, expected) = networks(BF16, FusedAdamW, split=True)
        for m, o in ((model, optimizer), (other, expected)):
            backward(m)
            o.step()
        weights, saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        with monkeypatch.context() as context:
            context.setattr(optimizer._buckets[0].optimizer, "step", _fail)  # the step's last
            with pytest.raises(RuntimeError, match=r"failed after \d+ of \d+ buckets \(OSError\)"):
                optimizer.step()
        with refused(optimizer, RuntimeError, "weights may be of two different steps"):
            optimizer.step()
        model.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        for m, o in ((model, optimizer), (other, expected)):
            o.zero_grad()
            backward(m, 1)
            o.step()
        assert_equal_models((model, optimizer), (other, expected))

    @pytest.mark.parametrize("bucket", [0, -1])
    def test_an_interrupt_is_raised_and_remembered(
        self, bucket: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (model, optimizer), _ = networks(torch.float32, FusedAdamW)
        backward(model)

        def interrupt() -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as context:
            context.setattr(optimizer._buckets[bucket].optimizer, "step", interrupt)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        with refused(optimizer, RuntimeError, r"buckets \(KeyboardInterrupt\)"):
            optimizer.step()

    def test_an_error_before_the_first_bucket_changes_nothing(self) -> None:
        (_, optimizer), _ = networks(torch.float32, FusedAdamW)
        optimizer.add_param_group({"params": [Parameter(torch.ones(3))]})
        step_alike(optimizer)
        optimizer.param_groups[0]["lr"] = float("nan")
        with refused(optimizer, ValueError, "lr"):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()

    def test_a_group_that_was_changed_in_place(self) -> None:
        first, second, other = (Parameter(torch.ones(3)) for _ in range(3))
        optimizer = OffloadOptimizer([first, second], FusedAdamW)
        step_alike(optimizer)
        params = optimizer.param_groups[0]["params"]
        params.append(other)
        with refused(optimizer, RuntimeError, r"add it by optimizer\.add_param_group\(\)"):
            optimizer.step()
        del params[1:]
        with refused(optimizer, RuntimeError, "remove and add whole groups"):
            optimizer.step()
        params.append(second)
        step_alike(optimizer)

    @pytest.mark.parametrize(
        ("value", "error"), [(None, TypeError), ("x", TypeError), (1e39, OverflowError)]
    )
    def test_a_wrong_number_of_a_later_bucket_changes_nothing(
        self, value: object, error: type[Exception]
    ) -> None:
        """The last bucket is updated first."""
        groups = [{"params": [Parameter(torch.ones(3))]} for _ in range(2)]
        optimizer = OffloadOptimizer(groups, FusedAdamW)
        step_alike(optimizer)
        optimizer.param_groups[0]["lr"] = value
        with refused(optimizer, error, "lr"):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()

    def test_numbers_of_torchs_classes_and_of_users(self) -> None:
        """Adafactor's default eps has a None; eps may be larger than float32 in torch's AdamW."""
        for cls, options in ((torch.optim.Adafactor, {}), (torch.optim.AdamW, {"eps": 1e39})):
            group = {"params": [Parameter(torch.ones(3))], "best_loss": float("nan")}
            step_alike(OffloadOptimizer([group], cls, **options))

    def test_none_for_a_number_of_a_users_class(self) -> None:
        groups = [{"params": [Parameter(torch.ones(3))]} for _ in range(2)]
        optimizer = OffloadOptimizer(groups, _Clipping)
        optimizer.param_groups[1]["clip"] = None
        step_alike(optimizer)
        assert optimizer.defaults["clip"] == 1.0

    @pytest.mark.parametrize("limit", [None, 1.0])
    def test_gradients_are_scaled_once_if_a_step_is_tried_again(self, limit: float | None) -> None:
        """torch's class divides them before it raises for its options."""
        both = networks(torch.float32, torch.optim.AdamW, lr=1.0, eps=1.0)
        for model, optimizer in both:
            scaler = new_scaler()
            scaler.scale(model(torch.ones(1, 6)).sum()).backward()
            optimizer.max_grad_norm = limit
            if optimizer is both[0][1]:
                optimizer.param_groups[0]["betas"] = (0.9,)
                with refused(optimizer, ValueError, "not enough values"):
                    scaler.step(optimizer)
                optimizer.param_groups[0]["betas"] = (0.9, 0.999)
                del optimizer.grad_scale, optimizer.found_inf
            elif limit is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            scaler.step(optimizer)
        for p, q in zip(*(model.parameters() for model, _ in both)):
            torch.testing.assert_close(p, q)

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            (lambda values: values.double(), r"has become one of .*torch\.float64"),
            (lambda values: values[:3], r"has become one of shape \(3, 6\)"),
            (lambda values: values.clone(), "on cpu; move and convert the model before"),
        ],
    )
    def test_a_parameter_that_was_moved_or_changed(
        self, change: Callable[[Tensor], Tensor], match: str
    ) -> None:
        (model, optimizer), _ = networks(torch.float32, FusedAdamW)
        backward(model)
        optimizer.step()
        if "on cpu" in match:
            optimizer._buckets[0].link.device = torch.device("meta")
        model[0].weight.data = change(model[0].weight.data)
        before = [bits(p) for p in params_of(optimizer)[1:]]
        with pytest.raises(RuntimeError, match=match):
            optimizer.step()
        assert all(map(torch.equal, [bits(p) for p in params_of(optimizer)[1:]], before))

    def test_a_sparse_gradient_in_place_of_a_dense_one(self) -> None:
        p, q = (Parameter(torch.zeros(4)) for _ in range(2))
        for param, optimizer in (
            (p, OffloadOptimizer([p], FusedSGD, lr=1.0)),
            (q, FusedSGD([q], lr=1.0)),
        ):
            (param * torch.arange(4.0)).sum().backward()
            assert param.grad is not None
            param.grad = torch.where(param.grad > 1, param.grad, 0.0).to_sparse()
            optimizer.step()
        assert torch.equal(p, q)
        assert p.tolist() == [0, 0, -2, -3]

    @pytest.mark.parametrize("call", ["step", "state_dict", "load_state_dict"])
    @pytest.mark.parametrize("offload", [False, True])
    def test_calls_in_the_middle_of_a_step(self, offload: bool, call: str) -> None:
        """A signal handler may come between the updates of two groups."""
        groups = [{"params": [Parameter(torch.ones(3))]} for _ in range(2)]
        optimizer: Any = OffloadOptimizer(groups, Nested) if offload else Nested(groups)
        step_alike(optimizer)
        arguments = (optimizer.state_dict(),) if call.startswith("load") else ()
        Nested.meanwhile = partial(getattr(optimizer, call), *arguments)
        try:
            with pytest.raises(
                RuntimeError, match=rf"{call}\(\) was called in the middle of a step"
            ):
                step_alike(optimizer)
        finally:
            Nested.meanwhile = None


class _Clipping(torch.optim.SGD):
    def __init__(self, params: Any, clip: float | None = 1.0) -> None:
        super().__init__(params)
        self.defaults["clip"] = clip
        for group in self.param_groups:
            group.setdefault("clip", clip)


def _fail(*_: object, **__: object) -> None:
    raise OSError("on purpose")
