"""The Lamb classes of other libraries get our step."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from tests.fusedoptim.helpers import (
    SideBySide,
    make_params,
    new_scaler,
    params_of,
    random_like,
    step_alike,
)
from tests.optimizer_cases import LAMB, Kwargs, configuration_id
from tests.transforms.helpers import assert_no_fused_step, assert_same
from tests.transforms.passes.others_lamb import Apexs, Timms, TorchOptimizers
from transforms.passes.fuse_step import fuse_update_step
from transforms.rewrites.fused_step import unfuse

# A class, its options, and the equivalent ones of tests.references.lamb; without clipping.
CONFIGURATIONS: list[tuple[Any, Kwargs, Kwargs]] = [
    (Timms, {}, {"weight_decay": 0.01, "always_adapt": False}),
    (Timms, {"weight_decay": 0.0}, {"always_adapt": False}),
    (Timms, {"always_adapt": True, "weight_decay": 0.0}, {}),
    (Timms, {"trust_clip": True}, {"weight_decay": 0.01, "trust_clip": True}),
    (Timms, {"decoupled_decay": True}, {"weight_decay": 0.01, "decoupled_decay": True}),
    (Timms, {"bias_correction": False}, {"weight_decay": 0.01, "bias_correction": False}),
    (Timms, {"grad_averaging": False}, {"weight_decay": 0.01, "grad_averaging": False}),
    (Apexs, {}, {"weight_decay": 0.01, "always_adapt": False}),
    (Apexs, {"weight_decay": 0.0}, {"always_adapt": False}),
    (Apexs, {"weight_decay": 0.0, "use_nvlamb": True}, {}),
    (TorchOptimizers, {}, {"bias_correction": False, "max_param_norm": 10.0}),
    (
        TorchOptimizers,
        {"clamp_value": 0.5, "weight_decay": 0.1},
        {"bias_correction": False, "max_param_norm": 0.5, "weight_decay": 0.1},
    ),
]
each_class = pytest.mark.parametrize("cls", [Timms, Apexs, TorchOptimizers])


def _without_clipping(cls: Any) -> Kwargs:
    return {} if cls is TorchOptimizers else {"max_grad_norm": None}


def _pair(cls: Any, theirs: Kwargs, references: Kwargs, params: list[Parameter]) -> SideBySide:
    """Pair a library's class, converted, with the equivalent reference."""

    def make(params: Any, **_: Any) -> Any:
        optimizer = cls(params, lr=0.1, **theirs)
        fuse_update_step(optimizer)
        return optimizer

    case = dataclasses.replace(LAMB, cls=make)
    return SideBySide(case, {"lr": 0.1, "eps": 1e-6, **references}, params)


def _twins(cls: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> tuple[Any, Any]:
    """Make two optimizers on equal parameters."""
    params = [Parameter(torch.randn(8, 5, dtype=dtype)), Parameter(torch.randn(7, dtype=dtype))]
    twins = [Parameter(p.detach().clone()) for p in params]
    return cls(params, lr=0.1, **kwargs), cls(twins, lr=0.1, **kwargs)


@pytest.mark.parametrize(("cls", "theirs", "references"), CONFIGURATIONS, ids=configuration_id)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_parity(cls: Any, theirs: Kwargs, references: Kwargs, dtype: torch.dtype) -> None:
    theirs = theirs | _without_clipping(cls)
    pair = _pair(cls, theirs, references, make_params(dtype, ["17", "1000", "channels_last"]))
    for _ in range(4):
        pair.set_gradients()
        pair.step()
        for group in pair.torchs.param_groups:
            for p in group["params"]:
                steps = pair.torchs.state[p]["step"]
                assert steps == float(pair.ours.param_groups[0].get("step", steps))
        pair.assert_equal()


def test_attribute_changed_between_steps() -> None:
    """torch_optimizer's class keeps an option outside of its groups."""
    ours, theirs = _twins(TorchOptimizers)
    fuse_update_step(ours)
    for clamp_value in (10, 10, 0.5, 0.5):
        ours.clamp_value = theirs.clamp_value = clamp_value
        step_alike(ours, theirs)
        torch.testing.assert_close(params_of(ours), params_of(theirs))


@pytest.mark.parametrize(("cls", "theirs", "references"), CONFIGURATIONS, ids=configuration_id)
def test_stand_in(cls: Any, theirs: Kwargs, references: Kwargs) -> None:
    """The class itself agrees with the reference in float64."""
    params = make_params(torch.float64, ["17", "3x4x5"])
    twins = [Parameter(p.detach().clone()) for p in params]
    optimizer = cls(params, lr=0.1, **theirs, **_without_clipping(cls))
    reference = LAMB.reference(twins, lr=0.1, eps=1e-6, **references)
    for _ in range(4):
        step_alike(optimizer, reference)
        torch.testing.assert_close(params, twins, rtol=1e-13, atol=1e-14)


@each_class
@pytest.mark.parametrize("kwargs", [{}, {"weight_decay": 0.0}], ids=configuration_id)
def test_in_the_middle_and_back(cls: Any, kwargs: Kwargs) -> None:
    """Clipping, counts and state equal theirs, and checkpoints load in both directions."""
    fused, plain = _twins(cls, torch.float64, **kwargs)
    step_alike(fused, plain)
    attributes = dict(vars(fused))
    before = copy.deepcopy(fused.state_dict())
    entry = fuse_update_step(fused)
    assert entry.what.endswith("is now that of FusedLamb")
    assert_same(fused.state_dict(), before)
    for _ in range(3):
        step_alike(fused, plain)
        _assert_close(fused, plain)
    ours, theirs = (copy.deepcopy(o.state_dict()) for o in (fused, plain))
    assert {k: v.keys() for k, v in ours["state"].items()} == {
        k: v.keys() for k, v in theirs["state"].items()
    }
    assert ours["param_groups"][0].keys() == theirs["param_groups"][0].keys()
    fused.load_state_dict(theirs)
    plain.load_state_dict(ours)
    step_alike(fused, plain)
    _assert_close(fused, plain)
    unfuse(fused)
    assert type(fused) is cls
    assert vars(fused).keys() == attributes.keys()
    assert _kinds(fused.state_dict()) == _kinds(before)
    step_alike(fused, plain)
    _assert_close(fused, plain)


def _kinds(state_dict: Any) -> Any:
    return {k: {n: type(x) for n, x in v.items()} for k, v in state_dict["state"].items()}


def _assert_close(fused: Any, plain: Any) -> None:
    torch.testing.assert_close(params_of(fused), params_of(plain), rtol=1e-12, atol=1e-13)


@each_class
def test_parameter_without_gradient_counts_with_its_group(cls: Any) -> None:
    fused, plain = _twins(cls, torch.float64)
    fuse_update_step(fused)
    for i in range(4):
        for p, q in zip(params_of(fused), params_of(plain)):
            p.grad = random_like(p)
            q.grad = p.grad.clone()
        if i < 2:
            params_of(fused)[1].grad = params_of(plain)[1].grad = None
        fused.step()
        plain.step()
    _assert_close(fused, plain)


@each_class
def test_scaler_that_skips_a_step(cls: Any) -> None:
    fused, _ = _twins(cls)
    fuse_update_step(fused)
    scaler = new_scaler(2.0)
    for p in params_of(fused):
        p.grad = torch.full_like(p, float("inf"))
    scaler.step(fused)
    scaler.update()
    assert "step" not in fused.param_groups[0]
    step_alike(fused)
    assert fused.param_groups[0].get("step", 1) == 1


@each_class
def test_copy_has_what_the_class_keeps_in_the_object(cls: Any) -> None:
    fused, _ = _twins(cls)
    fuse_update_step(fused)
    twin = copy.deepcopy(fused)
    step_alike(fused, twin)
    assert all(map(torch.equal, params_of(fused), params_of(twin)))


@each_class
def test_option_that_a_group_lacks(cls: Any) -> None:
    """A missing option gets the optimizer's default; without one, the optimizer is refused."""
    for name in cls([Parameter(torch.randn(3))]).defaults:
        optimizer, twin = (cls([Parameter(torch.ones(3))]) for _ in range(2))
        del optimizer.param_groups[0][name]
        assert fuse_update_step(optimizer).what.endswith(f"set to their defaults: {name}")
        assert optimizer.param_groups[0].keys() == twin.param_groups[0].keys()
        fuse_update_step(twin)
        step_alike(optimizer, twin)
        assert torch.equal(*(o.param_groups[0]["params"][0] for o in (optimizer, twin)))
    optimizer = cls([Parameter(torch.ones(3))])
    del optimizer.param_groups[0]["eps"], optimizer.defaults["eps"]
    assert_no_fused_step(
        optimizer, RuntimeError, "no option eps, which the class known by this name has"
    )


REFUSED: list[tuple[Any, Kwargs, str]] = [
    (Timms, {"caution": True}, r"caution=True: FusedLamb's step does not support it"),
    (Timms, {"corrected_weight_decay": True}, "corrected_weight_decay=True"),
    (Timms, {"foreach": True}, "foreach=True: .*; omit the option"),
    (Apexs, {"adam_w_mode": False}, "adam_w_mode=False: .*no L2 penalty; use weight_decay=0"),
    (TorchOptimizers, {"adam": True}, "adam=True: .*has a trust ratio"),
    (TorchOptimizers, {"debias": True}, "debias=True: .*use fusedoptim.FusedLamb"),
]


@pytest.mark.parametrize(("cls", "kwargs", "message"), REFUSED, ids=configuration_id)
def test_refused_options(cls: Any, kwargs: Kwargs, message: str) -> None:
    assert_no_fused_step(_twins(cls, **kwargs)[0], RuntimeError, message)


def test_other_versions() -> None:
    newer, older = _twins(Timms)
    newer.defaults["cautious"] = 1
    assert_no_fused_step(newer, RuntimeError, "the option cautious is not known here")
    del older.defaults["trust_clip"]
    assert_no_fused_step(older, RuntimeError, "no option trust_clip, which the class")
