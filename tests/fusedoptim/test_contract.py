"""What torch promises of every optimizer in tests/optimizer_cases.py: arguments, groups, hooks."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook

from fusedoptim import FusedSGD
from fusedoptim.step.checks import OPTIONS
from tests.fusedoptim.helpers import (
    SideBySide,
    assert_same_bits,
    each_class,
    exact_values,
    make_params,
    refused,
    single,
    step_alike,
    widened,
)
from tests.optimizer_cases import Kwargs, OptimizerCase


class TestTorchContract:
    """Signatures, errors, groups and hooks equal torch's."""

    @each_class
    def test_signature_and_defaults(self, case: OptimizerCase) -> None:
        """The arguments are the reference's, in its order, and then ours, keyword-only."""
        assert issubclass(case.cls, case.reference if case.is_torchs else torch.optim.Optimizer)
        ours = inspect.signature(case.cls).parameters
        references = inspect.signature(case.reference).parameters
        assert tuple(ours) == (*references, *case.own_arguments)
        for name, parameter in references.items():
            assert (ours[name].default, ours[name].kind) == (parameter.default, parameter.kind)
        for name in case.own_arguments:
            assert ours[name].kind is inspect.Parameter.KEYWORD_ONLY
        params = [Parameter(torch.ones(1))]
        assert case.reference(params).defaults.items() <= case.make(params).defaults.items()

    @each_class
    def test_invalid_arguments(self, case: OptimizerCase) -> None:
        good = [Parameter(torch.ones(1))]
        not_leaf = torch.ones(2) * torch.ones(2, requires_grad=True)
        calls: list[tuple[Any, Kwargs]] = [(good, kwargs) for kwargs in case.invalid_kwargs]
        calls += [(params, {}) for params in ([], torch.ones(1), [not_leaf], [1])]
        for params, kwargs in calls:
            with pytest.raises(Exception) as expected:  # noqa: PT011 (its type is the point)
                case.reference(params, **kwargs)
            with pytest.raises(type(expected.value)) as raised:
                case.make(params, **kwargs)
            assert str(raised.value) == str(expected.value)

    @each_class
    def test_refused_arguments(self, case: OptimizerCase) -> None:
        cure = "omit the option"
        if case.is_torchs:
            cure = rf"omit the option, or use plain torch\.optim\.{case.reference.__name__}"
        for kwargs in case.refused_kwargs:
            (option,) = kwargs
            with pytest.raises(RuntimeError, match=rf"^{option}=.*{cure}"):
                case.make([Parameter(torch.ones(1))], **kwargs)
            optimizer = case.make([Parameter(torch.ones(1))])
            with pytest.raises(RuntimeError, match=rf"^{option}=.*{cure}"):
                optimizer.add_param_group({"params": [Parameter(torch.ones(1))], **kwargs})
            assert len(optimizer.param_groups) == 1

    @each_class
    def test_refused_option_set_later(self, case: OptimizerCase) -> None:
        _, optimizer = single(case)
        optimizer.step()
        for kwargs in case.refused_kwargs:
            ((option, value),) = kwargs.items()
            before = optimizer.param_groups[0][option]
            optimizer.param_groups[0][option] = value
            with pytest.raises(RuntimeError, match=f"^{option}="):
                optimizer.step()
            optimizer.param_groups[0][option] = before
        optimizer.step()

    @each_class
    def test_nan_is_refused(self, case: OptimizerCase) -> None:
        """NaN is refused at construction, in a new group and between steps, and nothing changes."""
        names = {"lr": "lr|learning rate", "eps": "eps", "betas": "beta"}
        defaults = case.make([Parameter(torch.ones(1))]).defaults
        for name, value in defaults.items():
            if isinstance(value, bool) or not isinstance(value, int | float | tuple):
                continue
            message = names.get(name, name)
            nan = (float("nan"), 0.9) if name == "betas" else float("nan")
            p = Parameter(torch.randn(17))
            before = p.detach().clone()
            with pytest.raises(ValueError, match=message):
                case.make([p], **{name: nan})
            assert torch.equal(p, before)

            # dampening and nesterov are read only with momentum
            momentum = {"momentum": 0.9} if "momentum" in defaults else {}
            optimizer = case.make([p], **momentum)
            with refused(optimizer, ValueError, message):
                optimizer.add_param_group({"params": [Parameter(torch.ones(1))], name: nan})
            p.grad = torch.ones_like(p)
            optimizer.step()
            if name == "initial_accumulator_value":  # read only when state is made
                continue
            optimizer.param_groups[0][name] = nan
            with refused(optimizer, ValueError, message):
                optimizer.step()

    @each_class
    def test_flags_that_are_no_bool(self, case: OptimizerCase) -> None:
        """A flag of NumPy's or torch's is one."""
        momentum = {"momentum": 0.9} if "momentum" in case.kwargs[-1] else {}
        for name, default in case.make([Parameter(torch.ones(1))]).defaults.items():
            if not isinstance(default, bool) or name in OPTIONS:
                continue
            optimizers = [case.make([Parameter(torch.ones(4))], **momentum) for _ in range(3)]
            for optimizer, flag in zip(optimizers, (True, np.bool_(True), torch.tensor(True))):
                optimizer.param_groups[0][name] = flag
            for _ in range(2):
                step_alike(*optimizers)
            for other in optimizers[1:]:
                assert_same_bits(optimizers[0], other)

    @each_class
    def test_rate_that_requires_grad(self, case: OptimizerCase) -> None:
        """It is read as a number, without torch's warning."""
        _, optimizer = single(case, lr=torch.tensor(0.1, requires_grad=True))
        optimizer.step()

    @each_class
    def test_what_users_add_to_a_group(self, case: OptimizerCase) -> None:
        nan = float("nan")
        p = Parameter(torch.ones(3))
        optimizer = case.make([{"params": [p], "best_loss": nan}])
        step_alike(optimizer)
        optimizer.param_groups[0]["lr"] = nan
        with refused(optimizer, ValueError, "lr is nan"):
            optimizer.step()

    def test_parameter_appended_to_a_named_group(self) -> None:
        first, second = (Parameter(torch.zeros(3)) for _ in range(2))
        optimizer = FusedSGD([("first", first)], lr=1.0)
        optimizer.param_groups[0]["params"].append(second)
        first.grad = second.grad = torch.ones(3)
        optimizer.step()
        assert first.tolist() == second.tolist() == [-1.0] * 3
        second.data = torch.zeros(4)
        with refused(optimizer, RuntimeError, "parameter 1 .*zero_grad"):
            optimizer.step()

    @each_class
    def test_fused_true_is_accepted(self, case: OptimizerCase) -> None:
        _, optimizer = single(case, fused=True)
        optimizer.step()
        assert optimizer.param_groups[0]["fused"] is True

    @each_class
    def test_closure(self, case: OptimizerCase) -> None:
        p, optimizer = single(case, lr=0.1)

        def closure() -> Tensor:
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = (p * p).sum()
            loss.backward()
            return loss

        first = optimizer.step(closure)
        with torch.no_grad():
            second = optimizer.step(closure)
        assert second < first

    @each_class
    def test_add_param_group(self, case: OptimizerCase) -> None:
        params = make_params(torch.float32, ["1000", "17"])
        pair = SideBySide(case, params=params[:1])
        pair.train()
        pair.ours.add_param_group({"params": [params[1]], "lr": 0.01})
        reference = Parameter(widened(exact_values(pair.ours)[params[1]]))
        pair.torchs.add_param_group({"params": [reference], "lr": 0.01})
        pair.params.append(params[1])
        pair.references.append(reference)
        pair.train(2)

    @each_class
    def test_parameter_given_twice(self, case: OptimizerCase) -> None:
        pair = SideBySide(case, params=make_params(torch.float32, ["65537"]))
        pair.params = make_params(torch.float32, ["65537"])
        before = pair.params[0].detach().clone()
        with pytest.warns(UserWarning, match="duplicate parameters"):
            pair.ours = case.make(pair.params * 2, **case.kwargs[-1])
        assert torch.equal(exact_values(pair.ours)[pair.params[0]], before)
        pair.references = [Parameter(widened(before))]
        with pytest.warns(UserWarning, match="duplicate parameters"):
            pair.torchs = case.make_reference(pair.references * 2, **case.kwargs[-1])
        pair.train(3)

    @each_class
    def test_parameter_in_two_groups(self, case: OptimizerCase) -> None:
        """torch refuses this at construction; after an edit, it updates one after the other."""
        pair = SideBySide(case, params=make_params(torch.float32, ["1000", "17", "3x0"]))
        for optimizer, params in ((pair.ours, pair.params), (pair.torchs, pair.references)):
            (group,) = optimizer.param_groups
            optimizer.param_groups.append({**group, "lr": 0.02, "params": [params[1]]})
        for step in range(6):
            for optimizer, params in ((pair.ours, pair.params), (pair.torchs, pair.references)):
                first, second = optimizer.param_groups
                first["params"] = params if step < 4 else params[:1]
                second["params"] = params[1:] if step < 2 else params
            pair.train()
        pair.assert_equal()

    @each_class
    def test_hyper_parameters_changed_between_steps(self, case: OptimizerCase) -> None:
        pair = SideBySide(case)
        for lr in (0.1, 0.01, torch.tensor(0.05)):
            for optimizer in (pair.ours, pair.torchs):
                optimizer.param_groups[0]["lr"] = lr
            pair.train()
        pair.assert_equal()

    @each_class
    def test_step_hooks(self, case: OptimizerCase) -> None:
        p, optimizer = single(case, lr=0.1)
        before = p.detach().clone()
        seen: list[Any] = []

        def pre(hooked: Any, args: Any, kwargs: Any) -> None:
            assert (hooked, args, kwargs) == (optimizer, (optimizer,), {})
            assert torch.equal(p, before)
            seen.append("pre")

        def post(hooked: Any, args: Any, kwargs: Any) -> None:
            assert not torch.equal(p, before)
            seen.append("post")

        handles = [
            optimizer.register_step_pre_hook(pre),
            optimizer.register_step_post_hook(post),
            register_optimizer_step_post_hook(lambda hooked, *_: seen.append(hooked)),
        ]
        optimizer.step()
        for handle in handles:
            handle.remove()
        optimizer.step()
        assert seen == ["pre", "post", optimizer]

    @each_class
    def test_step_hooks_of_a_subclass(self, case: OptimizerCase) -> None:
        """torch calls them around the overriding step; the step within does not call them again."""
        seen: list[str] = []

        class Overriding(case.cls):  # type: ignore[name-defined,misc]  # a class in a variable
            def step(self, closure: Any = None) -> Any:
                seen.append("begin")
                result = super().step(closure)
                seen.append("end")
                return result

        class Decorated(case.cls):  # type: ignore[name-defined,misc]  # a class in a variable
            step = torch.no_grad()(case.cls.step)

        for kind, inner in ((Overriding, ["begin", "end"]), (Decorated, [])):
            seen.clear()
            p = Parameter(torch.ones(2))
            optimizer = kind([p], lr=0.1, **case.always)
            p.grad = torch.ones_like(p)
            optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
            optimizer.register_step_post_hook(lambda *_: seen.append("post"))
            optimizer.step()
            assert seen == ["pre", *inner, "post"]

    @each_class
    def test_profiler_range(self, case: OptimizerCase) -> None:
        _, optimizer = single(case, lr=0.1)
        with torch.autograd.profiler.profile() as profile:
            optimizer.step()
        assert f"Optimizer.step#{case.name}.step" in {
            event.name for event in profile.function_events
        }
