"""An optimizer of torch's gets our step, and stays what it was in all else."""

from __future__ import annotations

import copy
import gc
import pickle
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import lr_scheduler

from fusedoptim import FusedSGD
from fusedoptim.optimizer import FusedOptimizer
from tests.fusedoptim.helpers import (
    FEW_LAYOUTS,
    SideBySide,
    assert_same_state,
    make_params,
    new_scaler,
    params_of,
    random_like,
    snapshot,
    step_alike,
)
from tests.optimizer_cases import TORCHS_CASES, OptimizerCase, configuration_id
from tests.transforms.helpers import assert_no_fused_step, assert_same, converted, each_class
from transforms.passes.fuse_step import fuse_update_step
from transforms.rewrites.fused_step import unfuse

each_configuration = pytest.mark.parametrize(
    ("case", "kwargs"),
    [(case, kwargs) for case in TORCHS_CASES for kwargs in case.kwargs],
    ids=configuration_id,
)


class Plain(torch.optim.SGD):
    """Of its own: a constructor and a method."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)

    def __repr__(self) -> str:
        return "plain"

    def rate(self) -> float:
        rate: float = self.param_groups[0]["lr"]
        return rate


class Mixin:
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)  # type: ignore[misc]


class MixedIn(Mixin, torch.optim.Adagrad):
    pass


def _overriding(cls: type[Any], method: str) -> type[Any]:
    """A subclass with a method of its own."""
    return type("Own", (cls,), {method: lambda self, *args: None})


def _params() -> list[Parameter]:
    return [Parameter(torch.randn(5, 3)), Parameter(torch.randn(4))]


def _set_gradients(*optimizers: Any) -> None:
    """Equal ones."""
    for twins in zip(*map(params_of, optimizers)):
        grad = random_like(twins[0])
        for p in twins:
            p.grad = grad.clone()


def _twins(cls: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Two optimizers on equal parameters."""
    params = _params()
    return cls(params, **kwargs), cls([p.detach().clone() for p in params], **kwargs)


def _assert_equal(one: Any, other: Any) -> None:
    assert all(map(torch.equal, params_of(one), params_of(other)))


def _trained(case: OptimizerCase, steps: int = 2, **kwargs: Any) -> Any:
    optimizer = case.reference(_params(), **(case.kwargs[-1] | kwargs))
    for _ in range(steps):
        step_alike(optimizer)
    return optimizer


def _fused(case: OptimizerCase) -> Any:
    optimizer = _trained(case)
    fuse_update_step(optimizer)
    return optimizer


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each of our steps."""
    seen: list[int] = []
    update = FusedOptimizer._update
    monkeypatch.setattr(FusedOptimizer, "_update", lambda self: (seen.append(1), update(self))[1])
    return seen


class TestParity:
    @each_configuration
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_from_the_start(self, case: OptimizerCase, kwargs: Any, dtype: torch.dtype) -> None:
        pair = SideBySide(converted(case), kwargs, make_params(dtype, FEW_LAYOUTS))
        pair.train(2)
        pair.train(skip=[1])
        pair.train()

    @each_configuration
    def test_after_steps_of_torchs(self, case: OptimizerCase, kwargs: Any) -> None:
        """In float64, in which torch's own steps equal the reference's bit for bit."""
        pair = SideBySide(converted(case), kwargs, make_params(torch.float64, FEW_LAYOUTS))
        unfuse(pair.ours)
        pair.ours.param_groups[0]["foreach"] = False
        for _ in range(2):
            pair.set_gradients()
            pair.torchs.step()
            pair.ours.step()
        fuse_update_step(pair.ours)
        assert all(map(torch.equal, pair.params, pair.references))
        pair.train(3)

    @each_class
    def test_state_of_16_bit_parameters_is_widened(self, case: OptimizerCase) -> None:
        params = [Parameter(p.detach().bfloat16()) for p in _params()]
        optimizer = case.reference(params, **case.kwargs[-1])
        step_alike(optimizer)
        before = snapshot(optimizer)
        fuse_update_step(optimizer)
        unfuse(optimizer)
        assert_same_state(optimizer, before)
        fuse_update_step(optimizer)
        step_alike(optimizer)
        for state in optimizer.state.values():
            assert {v.dtype for k, v in state.items() if k != "step"} == {torch.float32}
        unfuse(optimizer)
        for state in optimizer.state.values():
            assert {v.dtype for k, v in state.items() if k != "step"} == {torch.bfloat16}
        step_alike(optimizer)


class TestSameObject:
    @each_class
    def test_there_and_back(self, case: OptimizerCase) -> None:
        """Nothing is copied, twice is as once, and undoing restores all."""
        optimizer = _trained(case)
        optimizer.register_state_dict_post_hook(lambda o, d: d | {"note": 1})
        groups, state, values = optimizer.param_groups, optimizer.state, snapshot(optimizer)
        group, attributes = dict(groups[0]), dict(vars(optimizer))
        before = copy.deepcopy(optimizer.state_dict())
        entry = fuse_update_step(optimizer)
        assert entry.done
        assert entry.what == f"the step of {_path(case.reference)} is now that of {case.name}"
        assert optimizer.param_groups is groups
        assert optimizer.state is state
        assert groups[0] == group
        assert_same_state(optimizer, values)
        assert_same(optimizer.state_dict(), before)
        assert isinstance(optimizer, case.reference)
        assert isinstance(optimizer, case.cls)
        assert optimizer.fused is True
        assert isinstance(optimizer, FusedOptimizer)
        fused = dict(vars(optimizer))
        entry = fuse_update_step(optimizer)
        assert (entry.done, "already" in entry.what) == (False, True)
        assert vars(optimizer) == fused
        unfuse(optimizer)
        assert type(optimizer) is case.reference
        assert vars(optimizer) == attributes
        assert_same(optimizer.state_dict(), before)

    @each_class
    def test_undone_after_steps(self, case: OptimizerCase) -> None:
        optimizer = _fused(case)
        step_alike(optimizer)
        unfuse(optimizer)
        steps = [s["step"] for s in optimizer.state.values() if "step" in s]
        assert len({step.untyped_storage().data_ptr() for step in steps}) == len(steps)
        step_alike(optimizer)

    def test_one_of_ours_is_fused_already(self) -> None:
        optimizer = FusedSGD(_params())
        assert not fuse_update_step(optimizer).done
        assert type(optimizer) is FusedSGD
        unfuse(optimizer)
        assert type(optimizer) is FusedSGD
        assert optimizer.fused

    @each_class
    def test_original_step(self, case: OptimizerCase) -> None:
        optimizer = _trained(case)
        twin = copy.deepcopy(optimizer)
        fuse_update_step(optimizer)
        _set_gradients(optimizer, twin)
        optimizer._original_step()
        twin.step()
        _assert_equal(optimizer, twin)

    @each_class
    def test_is_freed_when_dropped(self, case: OptimizerCase) -> None:
        optimizer = _trained(case)
        scheduler = lr_scheduler.StepLR(optimizer, 1)
        fuse_update_step(optimizer)
        step_alike(optimizer)
        reference = weakref.ref(optimizer)
        gc.collect()
        gc.disable()
        try:
            del optimizer, scheduler
            assert reference() is None
        finally:
            gc.enable()


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


class TestSubclasses:
    def test_that_changes_nothing(self, launches: list[int]) -> None:
        optimizer, twin = _twins(Plain)
        fuse_update_step(optimizer)
        step_alike(optimizer, twin)
        assert launches == [1]
        assert isinstance(optimizer, Plain)
        assert optimizer.rate() == 0.1
        assert repr(optimizer) == "plain"
        assert type(optimizer).__name__ == "FusedPlain"
        for how in (copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))):
            assert how(optimizer).rate() == 0.1
        unfuse(optimizer)
        assert type(optimizer) is Plain

    def test_whose_step_torch_itself_has_wrapped(self) -> None:
        """As it does with the first object of a class whose base has made none yet."""

        class First(torch.optim.SGD): ...

        First.step = torch.optim.SGD.profile_hook_step(torch.optim.SGD.step)  # type: ignore[method-assign]
        First.step.hooked = True  # type: ignore[attr-defined]
        optimizer = First(_params())
        assert fuse_update_step(optimizer).done


def _scheduled_after_a_replacement(optimizer: Any) -> None:
    optimizer.step = types.MethodType(lambda self: None, optimizer)
    optimizer.scheduler = lr_scheduler.StepLR(optimizer, 1)


def _replaced(name: str) -> Callable[[Any], None]:
    def change(optimizer: Any) -> None:
        method = getattr(optimizer, name)
        setattr(optimizer, name, lambda *args: method(*args))

    return change


CHANGED: list[tuple[Callable[[Any], None], str]] = [
    *[
        (_replaced(name), rf"optimizer\.{name} was replaced .*<lambda>")
        for name in ("step", "load_state_dict", "zero_grad")
    ],
    (_scheduled_after_a_replacement, r"optimizer\.step was replaced"),
    (lambda o: setattr(o, "split", "my own"), "fused step needs for itself: split"),
]


class TestRefused:
    @pytest.mark.parametrize(
        ("case", "kwargs"),
        [(case, kwargs) for case in TORCHS_CASES for kwargs in case.refused_kwargs],
        ids=configuration_id,
    )
    def test_options(self, case: OptimizerCase, kwargs: Any) -> None:
        (option,) = kwargs
        optimizer = case.reference(_params())
        optimizer.param_groups[0].update(kwargs)
        assert_no_fused_step(optimizer, RuntimeError, rf"^{option}=.*; or keep its own step")

    @pytest.mark.parametrize(
        "cls", [torch.optim.RMSprop, torch.optim.SparseAdam, torch.optim.LBFGS]
    )
    def test_unknown_class(self, cls: Any) -> None:
        message = rf"no fused step for .*{cls.__name__}: there are"
        assert_no_fused_step(cls([Parameter(torch.ones(2))]), TypeError, message)

    @pytest.mark.parametrize(
        ("cls", "names"),
        [
            (_overriding(torch.optim.SGD, "step"), "Own overrides step of SGD"),
            (_overriding(torch.optim.Adam, "_init_group"), "Own overrides _init_group of Adam"),
            (_overriding(torch.optim.AdamW, "load_state_dict"), "load_state_dict of AdamW"),
            (MixedIn, "MixedIn overrides step of Adagrad"),
            (_overriding(torch.optim.SGD, "split_params"), "Own overrides split_params of SGD"),
        ],
    )
    def test_subclass_that_changes_something(self, cls: Any, names: str) -> None:
        assert_no_fused_step(cls(_params()), RuntimeError, rf"{names}.*fuse_update_step=False")

    @pytest.mark.parametrize(
        ("param", "message"),
        [
            (torch.ones(2, device="meta"), "device that SYCL does not serve"),
            (torch.ones(2, dtype=torch.float8_e4m3fn), "float8_e4m3fn.*dtype that is none of"),
            (torch.ones(1).expand(3), "share memory"),
        ],
    )
    def test_parameters(self, param: Tensor, message: str) -> None:
        error = (TypeError, RuntimeError)
        assert_no_fused_step(torch.optim.SGD([param]), error, rf"parameter 0.*{message}")

    @pytest.mark.parametrize(("change", "message"), CHANGED)
    def test_changed_objects(self, change: Callable[[Any], None], message: str) -> None:
        """Methods that were replaced, and attributes that ours needs."""
        optimizer = torch.optim.SGD(_params())
        change(optimizer)
        assert_no_fused_step(optimizer, RuntimeError, message)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.LinearLR(o)], optimizer=o
    ),
    "cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=20),
}


class TestSchedulers:
    """Warnings are errors: torch's, that a step was overridden, too."""

    @pytest.mark.parametrize("name", SCHEDULERS)
    @pytest.mark.parametrize("when", ["before", "after", "both", "before its first step"])
    @each_class
    def test_steps_are_ours(
        self, case: OptimizerCase, when: str, name: str, launches: list[int]
    ) -> None:
        if name == "cycle" and case.name == "FusedAdagrad":
            pytest.skip("has no momentum to cycle")
        optimizer, twin = _twins(case.reference, **case.kwargs[-1])
        schedulers = [SCHEDULERS[name](twin)]
        if when != "after":
            schedulers.append(SCHEDULERS[name](optimizer))
        if when != "before its first step":
            step_alike(optimizer, twin)
            for scheduler in schedulers:
                scheduler.step()
        fuse_update_step(optimizer)
        if when == "after":
            schedulers.append(SCHEDULERS[name](optimizer))
        if when == "both":
            SCHEDULERS[name](optimizer)
        for i in range(3):
            step_alike(optimizer, twin)
            assert len(launches) == i + 1
            for scheduler in schedulers:
                scheduler.step()
        assert optimizer._opt_called

    @each_class
    def test_undone(self, case: OptimizerCase, launches: list[int]) -> None:
        optimizer = case.reference(_params())
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        fuse_update_step(optimizer)
        step_alike(optimizer)
        unfuse(optimizer)
        scheduler.step()
        step_alike(optimizer)
        scheduler.step()
        fuse_update_step(optimizer)
        step_alike(optimizer)
        assert len(launches) == 2
        assert optimizer.param_groups[0]["lr"] == optimizer.defaults["lr"] / 4

    def test_order_is_watched_still(self) -> None:
        optimizer = torch.optim.SGD(_params())
        scheduler = lr_scheduler.StepLR(optimizer, 1)
        fuse_update_step(optimizer)
        with pytest.warns(UserWarning, match="before `optimizer.step\\(\\)`"):
            scheduler.step()


class TestAround:
    @each_class
    def test_hooks_and_closures(self, case: OptimizerCase) -> None:
        optimizer = case.reference(_params())
        seen: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        fuse_update_step(optimizer)
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        _set_gradients(optimizer)
        params = params_of(optimizer)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = sum(p.square().sum() for p in params)
            assert isinstance(loss, Tensor)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        before = closure()
        loss = optimizer.step(closure)
        assert torch.equal(loss, before)
        assert seen == ["before", "after"]
        assert not torch.equal(optimizer.step(closure), before)

    @each_class
    def test_scaler(self, case: OptimizerCase) -> None:
        optimizer, twin = _twins(case.reference, **case.kwargs[0])
        scalers = new_scaler(4.0), new_scaler(4.0)
        for i in range(5):
            if i == 1:
                fuse_update_step(optimizer)
            _set_gradients(optimizer, twin)
            if i == 3:
                for o in (optimizer, twin):
                    params_of(o)[1].grad[2] = torch.inf
            before = [p.detach().clone() for p in params_of(optimizer)]
            for o, scaler in zip((optimizer, twin), scalers):
                scaler.step(o)
                scaler.update()
            assert all(map(torch.equal, before, params_of(optimizer))) == (i == 3)
        torch.testing.assert_close(params_of(optimizer), params_of(twin))
        assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0
        unfuse(optimizer)
        assert not hasattr(optimizer, "_step_supports_amp_scaling")

    @each_class
    def test_added_group(self, case: OptimizerCase) -> None:
        optimizer = _fused(case)
        new = Parameter(torch.randn(6))
        before = new.detach().clone()
        optimizer.add_param_group({"params": [new], "lr": 0.5})
        step_alike(optimizer)
        assert not torch.equal(new, before)
        with pytest.raises(RuntimeError, match=r"^differentiable=True"):
            optimizer.add_param_group({"params": _params(), "differentiable": True})
        assert len(optimizer.param_groups) == 2

    @each_class
    def test_zero_grad(self, case: OptimizerCase) -> None:
        optimizer = _fused(case)
        _set_gradients(optimizer)
        optimizer.zero_grad(set_to_none=False)
        assert all(not p.grad.any() for p in params_of(optimizer))
        optimizer.zero_grad()
        assert all(p.grad is None for p in params_of(optimizer))

    @each_class
    @pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
    def test_copies(self, case: OptimizerCase, how: Any, launches: list[int]) -> None:
        optimizer = _fused(case)
        step_alike(optimizer)
        twin = how(optimizer)
        assert type(twin) is type(optimizer)
        step_alike(optimizer, twin)
        assert len(launches) == 3
        _assert_equal(optimizer, twin)
        unfuse(twin)
        assert type(twin) is case.reference
        step_alike(twin)

    def test_torchs_fused_optimizer(self) -> None:
        """It has told the GradScaler already that it takes its scale."""
        optimizer = torch.optim.SGD(_params(), fused=True)
        step_alike(optimizer)
        fuse_update_step(optimizer)
        step_alike(optimizer)
        unfuse(optimizer)
        assert optimizer._step_supports_amp_scaling
        step_alike(optimizer)


class TestMissingOptions:
    """A group out of an older torch, or one that a user has edited, may lack any of them."""

    @each_class
    def test_have_their_defaults(self, case: OptimizerCase, launches: list[int]) -> None:
        """The optimizer's; or those of the class, which torch's own ``__setstate__`` sets too."""
        names = case.reference(_params()).defaults.keys()
        assert names >= {"lr", "weight_decay", "maximize", "fused"}
        for name in names:
            for lacks_default in (False, True):
                kwargs = {} if lacks_default else case.kwargs[-1]
                optimizer, twin = _twins(case.reference, **kwargs)
                del optimizer.param_groups[0][name]
                if lacks_default:
                    del optimizer.defaults[name]
                entry = fuse_update_step(optimizer)
                assert entry.done
                assert entry.what.endswith(f"; missing options set to their defaults: {name}")
                assert optimizer.defaults == twin.defaults
                (group,), (other,) = optimizer.param_groups, twin.param_groups
                assert group | {"params": []} == other | {"params": []}
                step_alike(optimizer, twin)
                assert launches.pop() == 1
                torch.testing.assert_close(group["params"], other["params"])

    @each_class
    def test_are_those_that_torch_sets(self, case: OptimizerCase) -> None:
        """When it unpickles an optimizer; but SGD's fused=False, which asks for its own step."""
        optimizer = case.reference(_params())
        kept = {"lr", "betas", "momentum", "dampening", "weight_decay", "eps", "lr_decay"}
        for group in (optimizer.defaults, optimizer.param_groups[0]):
            for name in group.keys() - kept - {"params", "fused", "initial_accumulator_value"}:
                del group[name]
        by_torch = pickle.loads(pickle.dumps(optimizer))
        fuse_update_step(optimizer)
        for name, value in by_torch.param_groups[0].items():
            if name != "params":
                assert optimizer.param_groups[0][name] == value, name

    @each_class
    @pytest.mark.parametrize("refused", [False, True])
    def test_fused_of_an_optimizer_from_before_torch_had_it(
        self, case: OptimizerCase, refused: bool
    ) -> None:
        """SGD's ``__setstate__`` sets False, which nobody has asked for."""
        optimizer = case.reference(_params())
        del optimizer.defaults["fused"], optimizer.param_groups[0]["fused"]
        optimizer.param_groups[0]["differentiable"] = refused
        old = pickle.loads(pickle.dumps(optimizer))
        options = dict(old.param_groups[0])
        if refused:
            with pytest.raises(RuntimeError, match=r"^differentiable=True"):
                fuse_update_step(old)
            assert old.param_groups[0] == options
            assert "fused" not in old.defaults
        else:
            assert fuse_update_step(old).done
            assert old.param_groups[0] == options | {"fused": None}
            step_alike(old)

    @each_class
    def test_are_left_alone_if_the_optimizer_is_refused(self, case: OptimizerCase) -> None:
        optimizer = case.reference(_params())
        del optimizer.param_groups[0]["maximize"], optimizer.defaults["maximize"]
        optimizer.param_groups[0]["foreach"] = True
        with pytest.raises(RuntimeError, match=r"^foreach=True"):
            fuse_update_step(optimizer)
        assert "maximize" not in optimizer.param_groups[0]
        assert "maximize" not in optimizer.defaults


def test_option_set_later() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    fuse_update_step(optimizer)
    model(torch.ones(4, 3)).square().sum().backward()
    optimizer.param_groups[0]["differentiable"] = True
    with pytest.raises(RuntimeError, match=r"^differentiable=True: FusedSGD's step"):
        optimizer.step()
