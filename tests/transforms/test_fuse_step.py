"""An optimizer of torch's gets our step, and stays what it was in all else."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import types
import warnings
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
from tests.fusedoptim.helpers import SideBySide, assert_same_state, make_params, snapshot
from tests.optimizer_cases import OptimizerCase, configuration_id
from tests.transforms.helpers import TORCHS, assert_same, converted, each_class
from transforms.passes.fuse_step import fuse_update_step
from transforms.rewrites.fused_step import unfuse

LAYOUTS = ("17", "1000", "channels_last", "strided", "0-d", "empty")
each_configuration = pytest.mark.parametrize(
    ("case", "kwargs"),
    [(case, kwargs) for case in TORCHS for kwargs in case.kwargs],
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


class OwnStep(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class OwnGroups(torch.optim.Adam):
    def _init_group(self, *args: Any) -> Any:
        return super()._init_group(*args)


class OwnCheckpoints(torch.optim.AdamW):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


class Mixin:
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)  # type: ignore[misc]


class MixedIn(Mixin, torch.optim.Adagrad):
    pass


class NamedAsOurs(torch.optim.SGD):
    def split_params(self) -> None: ...


def _params() -> list[Parameter]:
    return [Parameter(torch.randn(5, 3)), Parameter(torch.randn(4))]


def _set_gradients(*optimizers: Any) -> None:
    params = [[p for g in o.param_groups for p in g["params"]] for o in optimizers]
    for twins in zip(*params):
        grad = torch.randn_like(twins[0])
        for p in twins:
            p.grad = grad.clone()


def _step(*optimizers: Any) -> None:
    """All with equal gradients."""
    _set_gradients(*optimizers)
    for optimizer in optimizers:
        optimizer.step()


def _trained(case: OptimizerCase, steps: int = 2, **kwargs: Any) -> Any:
    optimizer = case.reference(_params(), **(case.kwargs[-1] | kwargs))
    for _ in range(steps):
        _step(optimizer)
    return optimizer


def _launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each of our steps."""
    seen: list[int] = []
    update = FusedOptimizer._update
    monkeypatch.setattr(FusedOptimizer, "_update", lambda self: (seen.append(1), update(self))[1])
    return seen


class TestParity:
    @each_configuration
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_from_the_start(self, case: OptimizerCase, kwargs: Any, dtype: torch.dtype) -> None:
        pair = SideBySide(converted(case), kwargs, make_params(dtype, LAYOUTS))
        for i in range(4):
            pair.set_gradients(skip=[1] if i == 2 else [])
            pair.step()
            pair.assert_equal()

    @each_configuration
    def test_after_steps_of_torchs(self, case: OptimizerCase, kwargs: Any) -> None:
        """In float64, in which torch's own steps equal the reference's bit for bit."""
        pair = SideBySide(converted(case), kwargs, make_params(torch.float64, LAYOUTS))
        unfuse(pair.ours)
        pair.ours.param_groups[0]["foreach"] = False
        for _ in range(2):
            pair.set_gradients()
            pair.torchs.step()
            pair.ours.step()
        fuse_update_step(pair.ours)
        for p, reference in zip(pair.params, pair.references):
            assert torch.equal(p, reference)
        for _ in range(3):
            pair.set_gradients()
            pair.step()
            pair.assert_equal()

    @each_class
    def test_state_of_16_bit_parameters_is_widened(self, case: OptimizerCase) -> None:
        params = [Parameter(p.detach().bfloat16()) for p in _params()]
        optimizer = case.reference(params, **case.kwargs[-1])
        _step(optimizer)
        before = snapshot(optimizer)
        fuse_update_step(optimizer)
        unfuse(optimizer)
        assert_same_state(optimizer, before)
        fuse_update_step(optimizer)
        _step(optimizer)
        for state in optimizer.state.values():
            assert {v.dtype for k, v in state.items() if k != "step"} == {torch.float32}
        unfuse(optimizer)
        for state in optimizer.state.values():
            assert {v.dtype for k, v in state.items() if k != "step"} == {torch.bfloat16}
        _step(optimizer)


class TestSameObject:
    @each_class
    def test_nothing_is_copied(self, case: OptimizerCase) -> None:
        optimizer = _trained(case)
        groups, state, values = optimizer.param_groups, optimizer.state, snapshot(optimizer)
        group = dict(groups[0])
        entry = fuse_update_step(optimizer)
        assert entry.done
        assert entry.what == f"the step of {_path(case.reference)} is now that of {case.name}"
        assert optimizer.param_groups is groups
        assert optimizer.state is state
        assert groups[0] == group
        assert_same_state(optimizer, values)
        assert isinstance(optimizer, case.reference)
        assert isinstance(optimizer, case.cls)
        assert optimizer.fused is True
        assert isinstance(optimizer, FusedOptimizer)

    @each_class
    def test_twice_changes_nothing_more(self, case: OptimizerCase) -> None:
        optimizer = _trained(case)
        fuse_update_step(optimizer)
        attributes = dict(vars(optimizer))
        entry = fuse_update_step(optimizer)
        assert not entry.done
        assert "already" in entry.what
        assert vars(optimizer) == attributes

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
        for p, q in zip(optimizer.param_groups[0]["params"], twin.param_groups[0]["params"]):
            assert torch.equal(p, q)

    @each_class
    def test_is_freed_when_dropped(self, case: OptimizerCase) -> None:
        optimizer = _trained(case)
        scheduler = lr_scheduler.StepLR(optimizer, 1)
        fuse_update_step(optimizer)
        _step(optimizer)
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
    def test_that_changes_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        launches = _launches(monkeypatch)
        optimizer, twin = Plain(_params()), Plain(_params())
        twin.load_state_dict(optimizer.state_dict())
        for p, q in zip(optimizer.param_groups[0]["params"], twin.param_groups[0]["params"]):
            q.data.copy_(p)
        fuse_update_step(optimizer)
        _step(optimizer, twin)
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

    @pytest.mark.parametrize(
        ("cls", "names"),
        [
            (OwnStep, "OwnStep overrides step of SGD"),
            (OwnGroups, "OwnGroups overrides _init_group of Adam"),
            (OwnCheckpoints, "OwnCheckpoints overrides load_state_dict of AdamW"),
            (MixedIn, "MixedIn overrides step of Adagrad"),
            (NamedAsOurs, "NamedAsOurs overrides split_params of SGD"),
        ],
    )
    def test_that_changes_something(self, cls: Any, names: str) -> None:
        optimizer = cls(_params())
        attributes = dict(vars(optimizer))
        with pytest.raises(RuntimeError, match=rf"{names}.*fuse_update_step=False"):
            fuse_update_step(optimizer)
        assert type(optimizer) is cls
        assert vars(optimizer) == attributes


class TestRefused:
    @pytest.mark.parametrize(
        ("case", "kwargs"),
        [(case, kwargs) for case in TORCHS for kwargs in case.refused_kwargs],
        ids=configuration_id,
    )
    def test_options(self, case: OptimizerCase, kwargs: Any) -> None:
        (option,) = kwargs
        optimizer = case.reference(_params())
        optimizer.param_groups[0].update(kwargs)
        attributes = dict(vars(optimizer))
        with pytest.raises(RuntimeError, match=rf"^{option}=.*; or keep its own step"):
            fuse_update_step(optimizer)
        assert type(optimizer) is case.reference
        assert vars(optimizer) == attributes

    def test_unknown_class(self) -> None:
        for cls in (torch.optim.RMSprop, torch.optim.SparseAdam, torch.optim.LBFGS):
            optimizer: Any = cls([Parameter(torch.ones(2))])
            with pytest.raises(TypeError, match=rf"no fused step for .*{cls.__name__}: there are"):
                fuse_update_step(optimizer)
            assert type(optimizer) is cls

    @pytest.mark.parametrize(
        ("param", "message"),
        [
            (torch.ones(2, device="meta"), "device that SYCL does not serve"),
            (torch.ones(2, dtype=torch.float8_e4m3fn), "float8_e4m3fn.*dtype that is none of"),
            (torch.ones(1).expand(3), "share memory"),
        ],
    )
    def test_parameters(self, param: Tensor, message: str) -> None:
        optimizer = torch.optim.SGD([param])
        with pytest.raises((TypeError, RuntimeError), match=rf"parameter 0.*{message}"):
            fuse_update_step(optimizer)
        assert type(optimizer) is torch.optim.SGD

    def test_replaced_methods(self) -> None:
        for name in ("step", "load_state_dict", "zero_grad"):
            optimizer = torch.optim.SGD(_params())
            method = getattr(optimizer, name)
            setattr(optimizer, name, lambda *args, method=method: method(*args))
            with pytest.raises(RuntimeError, match=rf"optimizer\.{name} was replaced .*<lambda>"):
                fuse_update_step(optimizer)
            assert type(optimizer) is torch.optim.SGD

    def test_step_replaced_before_a_scheduler_wraps_it(self) -> None:
        optimizer = torch.optim.SGD(_params())
        optimizer.step = types.MethodType(lambda self: None, optimizer)  # type: ignore[method-assign]
        scheduler = lr_scheduler.StepLR(optimizer, 1)
        with pytest.raises(RuntimeError, match=r"optimizer\.step was replaced"):
            fuse_update_step(optimizer)
        assert scheduler.optimizer is optimizer

    def test_attributes_that_ours_needs(self) -> None:
        optimizer: Any = torch.optim.SGD(_params())
        optimizer.split = "my own"
        with pytest.raises(
            RuntimeError, match="attributes that the fused step needs for itself: split"
        ):
            fuse_update_step(optimizer)
        assert optimizer.split == "my own"


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
        self, case: OptimizerCase, when: str, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if name == "cycle" and case.name == "FusedAdagrad":
            pytest.skip("has no momentum to cycle")
        launches = _launches(monkeypatch)
        optimizer, twin = (case.reference(_params(), **case.kwargs[-1]) for _ in range(2))
        for p, q in zip(optimizer.param_groups[0]["params"], twin.param_groups[0]["params"]):
            q.data.copy_(p)
        schedulers = [SCHEDULERS[name](twin)]
        if when != "after":
            schedulers.append(SCHEDULERS[name](optimizer))
        if when != "before its first step":
            _step(optimizer, twin)
            for scheduler in schedulers:
                scheduler.step()
        fuse_update_step(optimizer)
        if when == "after":
            schedulers.append(SCHEDULERS[name](optimizer))
        if when == "both":
            SCHEDULERS[name](optimizer)
        for i in range(3):
            _step(optimizer, twin)
            assert len(launches) == i + 1
            for scheduler in schedulers:
                scheduler.step()
        assert optimizer._opt_called

    @each_class
    def test_undone(self, case: OptimizerCase, monkeypatch: pytest.MonkeyPatch) -> None:
        launches = _launches(monkeypatch)
        optimizer = case.reference(_params())
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        fuse_update_step(optimizer)
        _step(optimizer)
        unfuse(optimizer)
        scheduler.step()
        _step(optimizer)
        scheduler.step()
        fuse_update_step(optimizer)
        _step(optimizer)
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
        params = optimizer.param_groups[0]["params"]

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
        optimizer, twin = (case.reference(_params(), **case.kwargs[0]) for _ in range(2))
        for p, q in zip(optimizer.param_groups[0]["params"], twin.param_groups[0]["params"]):
            q.data.copy_(p)
        scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]  # type: ignore[attr-defined]
        for i in range(5):
            if i == 1:
                fuse_update_step(optimizer)
            _set_gradients(optimizer, twin)
            if i == 3:
                for o in (optimizer, twin):
                    o.param_groups[0]["params"][1].grad[2] = float("inf")
            before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
            for o, scaler in zip((optimizer, twin), scalers):
                scaler.scale(torch.ones(()))
                scaler.step(o)
                scaler.update()
            after = optimizer.param_groups[0]["params"]
            assert all(torch.equal(p, q) for p, q in zip(before, after)) == (i == 3)
        for p, q in zip(optimizer.param_groups[0]["params"], twin.param_groups[0]["params"]):
            torch.testing.assert_close(p, q)
        assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0
        unfuse(optimizer)
        assert not hasattr(optimizer, "_step_supports_amp_scaling")

    @each_class
    def test_added_group(self, case: OptimizerCase) -> None:
        optimizer = _trained(case)
        fuse_update_step(optimizer)
        new = Parameter(torch.randn(6))
        before = new.detach().clone()
        optimizer.add_param_group({"params": [new], "lr": 0.5})
        _step(optimizer)
        assert not torch.equal(new, before)
        with pytest.raises(RuntimeError, match=r"^differentiable=True"):
            optimizer.add_param_group({"params": _params(), "differentiable": True})
        assert len(optimizer.param_groups) == 2

    @each_class
    def test_zero_grad(self, case: OptimizerCase) -> None:
        optimizer = _trained(case)
        fuse_update_step(optimizer)
        _set_gradients(optimizer)
        optimizer.zero_grad(set_to_none=False)
        assert all(not p.grad.any() for p in optimizer.param_groups[0]["params"])
        optimizer.zero_grad()
        assert all(p.grad is None for p in optimizer.param_groups[0]["params"])

    @each_class
    @pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
    def test_copies(self, case: OptimizerCase, how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        launches = _launches(monkeypatch)
        optimizer = _trained(case)
        fuse_update_step(optimizer)
        _step(optimizer)
        twin = how(optimizer)
        assert type(twin) is type(optimizer)
        _step(optimizer, twin)
        assert len(launches) == 3
        for p, q in zip(optimizer.param_groups[0]["params"], twin.param_groups[0]["params"]):
            assert torch.equal(p, q)
        unfuse(twin)
        assert type(twin) is case.reference
        _step(twin)

    def test_torchs_fused_optimizer(self) -> None:
        """It has told the GradScaler already that it takes its scale."""
        optimizer = torch.optim.SGD(_params(), fused=True)
        _step(optimizer)
        fuse_update_step(optimizer)
        _step(optimizer)
        unfuse(optimizer)
        assert optimizer._step_supports_amp_scaling
        _step(optimizer)


class TestCheckpoints:
    """They do not tell whether the step was fused; in both directions, bit for bit."""

    @each_class
    def test_from_plain_to_fused_and_back(self, case: OptimizerCase) -> None:
        plain, fused = (_trained(case, steps) for steps in (3, 1))
        fuse_update_step(fused)
        for source, target in ((plain, fused), (fused, plain)):
            _step(source)
            file = io.BytesIO()
            torch.save(source.state_dict(), file)
            file.seek(0)
            target.load_state_dict(torch.load(file))
            assert_same(target.state_dict(), source.state_dict())
            _step(target)

    @each_class
    def test_undone(self, case: OptimizerCase) -> None:
        optimizer = _trained(case)
        optimizer.register_state_dict_post_hook(lambda o, d: d | {"note": 1})
        attributes, before = dict(vars(optimizer)), copy.deepcopy(optimizer.state_dict())
        fuse_update_step(optimizer)
        assert_same(optimizer.state_dict(), before)
        unfuse(optimizer)
        assert type(optimizer) is case.reference
        assert vars(optimizer) == attributes
        assert_same(optimizer.state_dict(), before)

    @each_class
    def test_undone_after_steps(self, case: OptimizerCase) -> None:
        optimizer = _trained(case)
        fuse_update_step(optimizer)
        _step(optimizer)
        before = copy.deepcopy(optimizer.state_dict())
        unfuse(optimizer)
        assert_same(optimizer.state_dict(), before)
        steps = [s["step"] for s in optimizer.state.values() if "step" in s]
        assert len({step.untyped_storage().data_ptr() for step in steps}) == len(steps)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _step(optimizer)


class TestMissingOptions:
    """A group out of an older torch, or one that a user has edited, may lack any of them."""

    @each_class
    def test_have_their_defaults(
        self, case: OptimizerCase, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The optimizer's; or those of the class, which torch's own ``__setstate__`` sets too."""
        launches = _launches(monkeypatch)
        names = case.reference(_params()).defaults.keys()
        assert names >= {"lr", "weight_decay", "maximize", "fused"}
        for name in names:
            for lacks_default in (False, True):
                kwargs = {} if lacks_default else case.kwargs[-1]
                params = _params()
                twin = case.reference([p.detach().clone() for p in params], **kwargs)
                optimizer = case.reference(params, **kwargs)
                for group in optimizer.param_groups:
                    del group[name]
                if lacks_default:
                    del optimizer.defaults[name]
                entry = fuse_update_step(optimizer)
                assert entry.done
                assert entry.what.endswith(f"; missing options set to their defaults: {name}")
                assert optimizer.defaults == twin.defaults
                (group,), (other,) = optimizer.param_groups, twin.param_groups
                assert group | {"params": []} == other | {"params": []}
                _step(optimizer, twin)
                assert launches.pop() == 1
                for p, q in zip(group["params"], other["params"]):
                    torch.testing.assert_close(p, q)

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
            _step(old)

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
