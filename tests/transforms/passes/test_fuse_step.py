"""torch's optimizers get our step, with options that it supports, or are refused."""

from __future__ import annotations

import copy
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import lr_scheduler

import transforms
from tests.fusedoptim.helpers import step_alike
from tests.optimizer_cases import TORCHS_CASES, OptimizerCase, configuration_id
from tests.transforms.helpers import assert_no_fused_step, each_class, new_params, new_twins
from transforms.passes.fuse_step import fuse_update_step
from transforms.rewrites.fused_step import unfuse


class Plain(torch.optim.SGD):
    """A subclass that adds a constructor and methods."""

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


class TestSubclasses:
    def test_that_changes_nothing(self, launches: list[int]) -> None:
        optimizer, twin = new_twins(Plain)
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
        """torch wraps it for the first object of a class whose base class has made none yet."""

        class First(torch.optim.SGD): ...

        First.step = torch.optim.SGD.profile_hook_step(torch.optim.SGD.step)  # type: ignore[method-assign]
        First.step.hooked = True  # type: ignore[attr-defined]
        optimizer = First(new_params())
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
        optimizer = case.reference(new_params())
        optimizer.param_groups[0].update(kwargs)
        assert_no_fused_step(optimizer, RuntimeError, rf"^{option}=.*; omit the option")

    @pytest.mark.parametrize(
        "cls", [torch.optim.RMSprop, torch.optim.SparseAdam, torch.optim.LBFGS]
    )
    def test_unknown_class(self, cls: Any) -> None:
        message = rf"no fused step for .*{cls.__name__}; supported are"
        assert_no_fused_step(cls([Parameter(torch.ones(2))]), TypeError, message)

    @pytest.mark.parametrize(
        ("arguments", "cure"),
        [
            ({"fuse_update_step": True}, "or keep its own step with fuse_update_step=False$"),
            ({"dtype": torch.bfloat16}, "fusedoptim; or omit dtype, and train in float32"),
        ],
    )
    def test_cure(self, arguments: Any, cure: str) -> None:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.RMSprop(model.parameters())
        with pytest.raises(TypeError, match=cure):
            transforms.optimize(model, optimizer, **arguments)

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
        assert_no_fused_step(cls(new_params()), RuntimeError, rf"{names}.*; use torch\.optim")

    @pytest.mark.parametrize(
        ("param", "message"),
        [
            (torch.ones(2, device="meta"), "device that SYCL does not serve"),
            (torch.ones(2, dtype=torch.float8_e4m3fn), "float8_e4m3fn.*dtype that is not one of"),
            (torch.ones(1).expand(3), "share memory"),
        ],
    )
    def test_parameters(self, param: Tensor, message: str) -> None:
        error = (TypeError, RuntimeError)
        assert_no_fused_step(torch.optim.SGD([param]), error, rf"parameter 0.*{message}")

    @pytest.mark.parametrize(("change", "message"), CHANGED)
    def test_changed_objects(self, change: Callable[[Any], None], message: str) -> None:
        """Replaced methods, and attributes with names that our step needs, are refused."""
        optimizer = torch.optim.SGD(new_params())
        change(optimizer)
        assert_no_fused_step(optimizer, RuntimeError, message)


class TestMissingOptions:
    """A group from an older torch, or one that a user has edited, may lack any option."""

    @each_class
    def test_have_their_defaults(self, case: OptimizerCase, launches: list[int]) -> None:
        """They get the optimizer's defaults, else the class's, as in torch's ``__setstate__``."""
        names = case.reference(new_params()).defaults.keys()
        assert names >= {"lr", "weight_decay", "maximize", "fused"}
        for name in names:
            for lacks_default in (False, True):
                kwargs = {} if lacks_default else case.kwargs[-1]
                optimizer, twin = new_twins(case.reference, **kwargs)
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
        """torch sets the same options when it unpickles an optimizer.

        The exception is SGD's fused=False, which asks for torch's own step.
        """
        optimizer = case.reference(new_params())
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
        """SGD's ``__setstate__`` sets fused=False, which the user has not asked for."""
        optimizer = case.reference(new_params())
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
        optimizer = case.reference(new_params())
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
