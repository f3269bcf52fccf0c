"""The contract of every optimizer that tests/optimizer_cases.py lists."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook

from fusedoptim.launch.block import LaunchBlock
from fusedoptim.step import commit
from fusedoptim.step.dense import DenseRows
from tests.fusedoptim.helpers import (
    LAYOUTS,
    SideBySide,
    assert_same_bits,
    each_case,
    each_case_and_dtype,
    each_class,
    each_way_to_copy,
    exact_values,
    make_params,
    random_like,
    refused,
    run_in_threads,
    single,
    step_alike,
    through_a_file,
    unchanged,
    widened,
)
from tests.optimizer_cases import (
    CASES,
    CONFIGURATIONS_AND_DTYPES,
    TORCHS_CASES,
    OptimizerCase,
    configuration_id,
)

each_configuration = pytest.mark.parametrize(
    ("case", "kwargs", "dtype"), CONFIGURATIONS_AND_DTYPES, ids=configuration_id
)
Kwargs = dict[str, Any]
ADAMS = [case for case in CASES if "exp_avg_sq" in case.state_keys]


def _kind_of_state(case: OptimizerCase) -> set[str]:
    """What tells a class's state from that of classes whose checkpoints do not fit it."""
    return {*case.state_keys} - {"step", "trail", "max_exp_avg_sq"}


def _options(optimizer: Any) -> list[Kwargs]:
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


class TestParity:
    """Parameters and state equal torch's in float64."""

    @each_configuration
    def test_seven_steps_with_grads_missing_and_a_frozen_layer(
        self, case: OptimizerCase, kwargs: Kwargs, dtype: torch.dtype
    ) -> None:
        pair = SideBySide(case, kwargs, make_params(dtype))
        frozen = 3
        for i in range(7):
            everything = range(len(pair.params))
            pair.train(skip=everything if i == 2 else [frozen] if i in (3, 4) else [])

    @each_class
    @pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=configuration_id)
    def test_complex(self, case: OptimizerCase, dtype: torch.dtype) -> None:
        if not case.supports_complex:
            with pytest.raises(TypeError, match=r"parameter 0 .*complex"):
                case.make(make_params(dtype))
            return
        for kwargs in (case.kwargs[0], case.kwargs[-1]):
            pair = SideBySide(case, kwargs, make_params(dtype))
            for i in range(3):
                pair.set_gradients()
                if i == 1:  # lazily conjugated: the bits in memory are not the values
                    for p, reference in zip(pair.params, pair.references):
                        p.grad = p.grad.conj()
                        reference.grad = widened(p.grad).resolve_conj()
                pair.check()

    @each_class
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=configuration_id)
    def test_a_million_elements(self, case: OptimizerCase, dtype: torch.dtype) -> None:
        pair = SideBySide(case, params=[Parameter(torch.randn(1_000_003).to(dtype))])
        pair.train(2)

    @each_case
    def test_groups_of_mixed_dtypes(self, case: OptimizerCase) -> None:
        params = [Parameter(torch.randn(100).to(dtype)) for dtype in case.dtypes * 2]
        together = [Parameter(p.detach().clone()) for p in params]
        pairs = [SideBySide(case, params=[p]) for p in params]
        optimizer = case.make(
            [{"params": together[:3]}, {"params": together[3:]}], **case.kwargs[-1]
        )
        for _ in range(3):
            for pair, p in zip(pairs, together):
                pair.set_gradients()
                p.grad = pair.params[0].grad.clone()
                pair.step()
            optimizer.step()
        values = exact_values(optimizer)
        for pair, p in zip(pairs, together):
            assert torch.equal(values[p], exact_values(pair.ours)[pair.params[0]])

    @each_class
    @pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), 0.0, -0.0])
    def test_special_values(self, case: OptimizerCase, value: float) -> None:
        for dtype in case.dtypes:
            pair = SideBySide(case, {"lr": 0.5}, [Parameter(torch.tensor([value, 1, 2]).to(dtype))])
            (p,), (reference,) = pair.params, pair.references
            p.grad = torch.tensor([1, value, 2]).to(p.dtype)
            reference.grad = widened(p.grad)
            pair.check()


class TestGradients:
    """New, missing and unusual gradients, and storage that is swapped between two steps."""

    @each_class
    def test_layout_differs_from_the_parameter(self, case: OptimizerCase) -> None:
        pair = SideBySide(case, params=make_params(torch.float32, ["channels_last"] * 2))
        for _ in range(3):
            pair.set_gradients()
            pair.params[0].grad = pair.params[0].grad.contiguous()
            pair.params[1].grad = pair.params[1].grad.clone(memory_format=torch.contiguous_format)
            pair.check()

    @each_case_and_dtype
    def test_gradient_keeps_its_values_and_its_version(
        self, case: OptimizerCase, dtype: torch.dtype
    ) -> None:
        params = make_params(dtype)
        optimizer = case.make(params, **case.kwargs[-1])
        grads = [random_like(p) for p in params]
        for _ in range(2):
            for p, grad in zip(params, grads):
                p.grad = grad.clone()
            versions = [p.grad._version for p in params]
            optimizer.step()
            assert all(torch.equal(p.grad, grad) for p, grad in zip(params, grads))
            assert [p.grad._version for p in params] == versions

    @each_case
    def test_zero_grad_to_none_and_to_zero(self, case: OptimizerCase) -> None:
        pair = SideBySide(case)
        for set_to_none in (True, False, True, False):
            pair.train()
            pair.ours.zero_grad(set_to_none=set_to_none)
            pair.torchs.zero_grad(set_to_none=set_to_none)
            pair.check()

    @each_case
    def test_another_parameter_has_none_each_time(self, case: OptimizerCase) -> None:
        pair = SideBySide(case)
        for i in range(len(pair.params)):
            pair.train(skip=[i])
        pair.assert_equal()

    @each_case
    def test_swapped_parameter_storage(self, case: OptimizerCase) -> None:
        pair = SideBySide(case)
        pair.train()
        old = [p.data for p in pair.params]
        for p in pair.params:
            p.data = p.data.clone()
        before = [values.clone() for values in old]
        pair.check()
        for values, expected in zip(old, before):
            assert torch.equal(values, expected)

    @each_case
    def test_swapped_state(self, case: OptimizerCase) -> None:
        pair = SideBySide(case)
        pair.train()
        for state in pair.ours.state.values():
            assert set(state) == set(case.state_keys)
            for key in case.state_keys:
                state[key] = state[key].clone()
        pair.check()
        for optimizer in (pair.ours, pair.torchs):
            optimizer.state.clear()
        if case.is_split:
            with pytest.raises(ValueError, match="lost its lower half"):
                pair.ours.step()
            return
        pair.check()

    @each_class
    def test_state_is_kept_until_the_kernel_has_ended(
        self, case: OptimizerCase, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Even if another thread clears it during the step; and no longer."""
        p, optimizer = single(case, "1000")
        for _ in range(2):
            optimizer.step()
        state = optimizer.state[p]
        kernels = [weakref.ref(state[key]) for key in case.state_keys if key != "step"]
        marks_written = commit.increment_version

        def clear(params: Any) -> None:
            state.clear()
            assert all(tensor() is not None for tensor in kernels)
            marks_written(params)

        monkeypatch.setattr(commit, "increment_version", clear)
        optimizer.step()
        assert all(tensor() is None for tensor in kernels)

    @each_case
    def test_state_moved_to_shared_memory(self, case: OptimizerCase) -> None:
        pair = SideBySide(case, params=make_params(torch.float32, ["1000", "17"]))
        pair.train()
        for p in pair.params:
            p.share_memory_()
            for key in case.state_keys:
                pair.ours.state[p][key].share_memory_()
        pair.check()

    @each_class
    def test_model_converted_between_steps(self, case: OptimizerCase) -> None:
        p, optimizer = single(case, "1000")
        optimizer.step()
        p.data = p.data.bfloat16()
        p.grad = random_like(p)
        optimizer.step()
        assert p.dtype == torch.bfloat16

    @pytest.mark.parametrize(
        ("case", "kwargs"),
        [(case, kw) for case in CASES if "step" in case.state_keys for kw in case.kwargs],
        ids=configuration_id,
    )
    def test_steps_are_counted_for_each_parameter(
        self, case: OptimizerCase, kwargs: Kwargs
    ) -> None:
        params = [Parameter(torch.randn(5)) for _ in range(3)]
        pair = SideBySide(case, kwargs, params)
        for skip in ([], [1], [1, 2], []):
            pair.train(skip=skip)
        assert [int(pair.ours.state[p]["step"]) for p in params] == [4, 2, 3]

    @each_class
    def test_autograd_sees_the_write(self, case: OptimizerCase) -> None:
        p, optimizer = single(case, "1000", lr=0.1)
        loss = (p * p).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class TestTorchContract:
    """Signatures, errors, groups and hooks equal torch's."""

    @each_class
    def test_signature_and_defaults(self, case: OptimizerCase) -> None:
        """The reference's arguments, in its order, then ours, keyword-only."""
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
            cure = rf"use torch\.optim\.{case.reference.__name__} for that"
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
        """At construction, in a new group and between steps; and nothing changes."""
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
        """torch refuses to construct it; after an edit it updates one after the other."""
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
    def test_profiler_range(self, case: OptimizerCase) -> None:
        _, optimizer = single(case, lr=0.1)
        with torch.autograd.profiler.profile() as profile:
            optimizer.step()
        assert f"Optimizer.step#{case.name}.step" in {
            event.name for event in profile.function_events
        }


class TestCompile:
    """A step in a compiled function is a graph break: it runs eagerly, between two graphs."""

    @each_class
    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_step_in_a_compiled_function(self, case: OptimizerCase, backend: str) -> None:
        torch.compiler.reset()
        pair = SideBySide(case)

        @torch.compile(backend=backend)
        def compiled() -> None:
            pair.ours.step()

        for _ in range(4):
            pair.set_gradients()
            pair.check(compiled)


class TestState:
    """Keys, dtypes and shapes of the state, and every way to save, load and copy it."""

    @each_case_and_dtype
    def test_dtype_and_layout(self, case: OptimizerCase, dtype: torch.dtype) -> None:
        params = make_params(dtype)
        optimizer = case.make(params, **case.kwargs[-1])
        assert bool(optimizer.state) == case.has_state_from_the_start
        step_alike(optimizer)
        dtypes = {"step": torch.float32, "trail": torch.int16}
        expected = torch.float64 if dtype == torch.float64 else torch.float32
        for p in params:
            assert set(optimizer.state[p]) == set(case.state_keys)
            for key, value in optimizer.state[p].items():
                assert value.dtype == dtypes.get(key, expected)
                assert value.shape == (() if key == "step" else p.shape)
                assert value.device == p.device
                assert not value.requires_grad

    @each_case_and_dtype
    def test_state_dict_round_trip(self, case: OptimizerCase, dtype: torch.dtype) -> None:
        """An optimizer that is saved and loaded stays bit-identical to one that is not."""
        params = make_params(dtype)
        copies = [Parameter(p.detach().clone()) for p in params]
        optimizer, other = (case.make(ps, **case.kwargs[-1]) for ps in (params, copies))
        for i in range(4):
            step_alike(optimizer, other)
            if i == 1:
                checkpoint = through_a_file(other.state_dict())
                other = case.make(copies, lr=0.7)
                other.load_state_dict(checkpoint)
        assert_same_bits(optimizer, other)
        assert all(set(optimizer.state[p]) == set(case.state_keys) for p in params)

    @each_class
    def test_state_dict_equals_the_references(self, case: OptimizerCase) -> None:
        for kwargs in case.kwargs:
            params = make_params(case.dtypes[0], ["17", "empty", "0-d"])
            pair = SideBySide(case, kwargs, params)
            pair.train()
            ours, torchs = pair.ours.state_dict(), pair.torchs.state_dict()
            (group,), (expected,) = ours["param_groups"], torchs["param_groups"]
            if case.is_torchs:
                expected["foreach"] = None  # the one that the pair sets itself
            else:
                for option in ("foreach", "capturable", "differentiable", "fused"):
                    assert not group.pop(option)
            shared = {key: value for key, value in group.items() if key not in case.own_arguments}
            assert shared == expected
            if not case.is_split:
                assert ours["state"].keys() == torchs["state"].keys()

    @each_class
    def test_state_dict_moves_both_ways(self, case: OptimizerCase) -> None:
        dtype = torch.float64 if torch.float64 in case.dtypes else torch.float32
        pair = SideBySide(case, params=make_params(dtype))
        pair.train()
        ours, torchs = pair.ours.state_dict(), pair.torchs.state_dict()
        if not case.is_split:  # a new optimizer would begin with lower halves of zero
            pair.ours = case.make(pair.params)
        pair.torchs = case.make_reference(pair.references)
        pair.ours.load_state_dict(torchs)
        pair.torchs.load_state_dict(ours)
        pair.train(2)

    @each_class
    def test_loading_keeps_the_implementation(self, case: OptimizerCase) -> None:
        (p,) = make_params(torch.float32, ["17"])
        checkpoint = case.reference([p]).state_dict()
        for kwargs in case.refused_kwargs:
            checkpoint["param_groups"][0].update(kwargs)
        optimizer = case.make([p])
        optimizer.load_state_dict(checkpoint)
        for kwargs in case.refused_kwargs:
            (option,) = kwargs
            assert optimizer.param_groups[0][option] == optimizer.defaults[option]
        p.grad = torch.ones_like(p)
        optimizer.step()

    @each_case
    def test_float32_state_of_bfloat16_parameters_survives(self, case: OptimizerCase) -> None:
        p, optimizer = single(case, "1000", torch.bfloat16)
        for _ in range(2):
            optimizer.step()
        other = case.make([p])
        seen = []
        other.register_load_state_dict_post_hook(
            lambda loaded: seen.append(loaded.state[p][case.state_keys[0]].dtype)
        )
        other.load_state_dict(optimizer.state_dict())
        assert seen == [torch.float32]
        for key in case.state_keys:
            assert torch.equal(other.state[p][key], optimizer.state[p][key])
            if key != "step":  # torch does not copy a step count
                assert other.state[p][key] is not optimizer.state[p][key]

    @each_case
    def test_load_of_another_model(self, case: OptimizerCase) -> None:
        _, other = single(case, "17")
        other.step()
        p, optimizer = single(case, "1000")
        before = p.detach().clone()
        with pytest.raises(ValueError, match=r"shape \(17,\)"):  # noqa: PT012 (whichever comes first)
            optimizer.load_state_dict(other.state_dict())
            assert not case.is_split
            optimizer.step()
        assert torch.equal(p, before)

    @each_class
    @pytest.mark.parametrize("saver", CASES, ids=configuration_id)
    @pytest.mark.parametrize("which", [0, -1])
    def test_load_of_another_class(
        self, case: OptimizerCase, saver: OptimizerCase, which: int
    ) -> None:
        """It is refused, and changes nothing, unless the state is the same."""
        _, saved = single(saver, "17", **saver.kwargs[which])
        saved.step()
        _, optimizer = single(case, "17")
        optimizer.step()
        if _kind_of_state(case) == _kind_of_state(saver):
            optimizer.load_state_dict(saved.state_dict())
            optimizer.step()
            return
        options = _options(optimizer)
        other = saver.name.removeprefix("Fused").removeprefix("Split")
        with refused(optimizer, ValueError, f"^{case.name}: the checkpoint is one of {other}, "):
            optimizer.load_state_dict(saved.state_dict())
        assert _options(optimizer) == options

    @pytest.mark.parametrize(
        ("case", "saver"), [*itertools.product(TORCHS_CASES, repeat=2)], ids=configuration_id
    )
    def test_load_of_another_class_by_torchs(
        self, case: OptimizerCase, saver: OptimizerCase
    ) -> None:
        """Theirs load what ours refuse, and fail in the next step."""
        loaded, saved = (
            each.reference([Parameter(torch.randn(17))], lr=0.1) for each in (case, saver)
        )
        loaded.load_state_dict(saved.state_dict())
        fits = _kind_of_state(case) == _kind_of_state(saver)
        with contextlib.nullcontext() if fits else pytest.raises(KeyError):
            step_alike(loaded)

    @pytest.mark.parametrize("saver", [torch.optim.NAdam, torch.optim.RAdam])
    @pytest.mark.parametrize("case", ADAMS, ids=configuration_id)
    def test_load_of_adams_relatives(self, case: OptimizerCase, saver: Any) -> None:
        """Whose state is Adam's, and something more."""
        saved = saver([Parameter(torch.randn(17))], lr=0.1)
        step_alike(saved)
        p, optimizer = single(case, "17")
        optimizer.load_state_dict(saved.state_dict())
        state = saved.state_dict()["state"][0]
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[p][key], state[key])
        before = p.detach().clone()
        optimizer.step()
        assert optimizer.state[p]["step"] == 2
        assert not torch.equal(p, before)

    @each_class
    def test_load_without_some_of_the_state(self, case: OptimizerCase) -> None:
        _, optimizer = single(case, "17")
        optimizer.step()
        needed = [key for key in case.state_keys if key not in ("trail", "max_exp_avg_sq")]
        for key in needed if len(needed) > 1 else []:
            checkpoint = copy.deepcopy(optimizer.state_dict())
            checkpoint["param_groups"][0]["lr"] = 0.75
            del checkpoint["state"][0][key]
            options = _options(optimizer)
            with refused(optimizer, ValueError, f"has no '{key}' of parameter 0"):
                optimizer.load_state_dict(checkpoint)
            assert _options(optimizer) == options

    @each_class
    @each_way_to_copy
    def test_copies_are_independent(self, case: OptimizerCase, copied: Any) -> None:
        pair = SideBySide(case)
        pair.train()
        twin = copied(pair.ours)
        before = [p.detach().clone() for p in pair.params]
        step_alike(twin)
        assert all(map(torch.equal, pair.params, before))
        pair.train()


class TestLaunches:
    """One launch for each group, device and dtype; tables are built once."""

    @pytest.fixture
    def launches(self, monkeypatch: pytest.MonkeyPatch) -> list[LaunchBlock]:
        seen: list[LaunchBlock] = []
        launch = LaunchBlock.launch
        monkeypatch.setattr(
            LaunchBlock,
            "launch",
            lambda block, *rows: (seen.append(block), launch(block, *rows))[1],
        )
        return seen

    @each_class
    def test_one_for_all_parameters(self, case: OptimizerCase, launches: list[LaunchBlock]) -> None:
        optimizer = case.make([Parameter(torch.randn(n)) for n in range(600)], **case.kwargs[-1])
        step_alike(optimizer)
        assert len(launches) == 1

    @each_class
    def test_one_for_each_group_and_dtype(
        self, case: OptimizerCase, launches: list[LaunchBlock]
    ) -> None:
        groups = [
            {"params": [Parameter(torch.ones(3).to(dtype)) for dtype in case.dtypes]}
            for _ in range(2)
        ]
        optimizer = case.make(groups, lr=0.1)
        step_alike(optimizer)
        buckets = {(i, p.dtype) for i, group in enumerate(groups) for p in group["params"]}
        assert len(launches) == len(buckets)

    @each_class
    def test_none_without_gradients(self, case: OptimizerCase, launches: list[LaunchBlock]) -> None:
        optimizer = case.make(make_params(torch.float32), lr=0.1)
        with unchanged(optimizer):
            optimizer.step()
        assert launches == []

    @each_class
    def test_nothing_is_rebuilt_for_new_gradients(
        self, case: OptimizerCase, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        built = []
        init = DenseRows.__init__
        monkeypatch.setattr(
            DenseRows, "__init__", lambda self, *args: (built.append(self), init(self, *args))[1]
        )
        pair = SideBySide(case)
        pair.train()
        once = len(built)
        assert once > 0
        for _ in range(4):
            pair.ours.zero_grad()
            pair.train()
        assert len(built) == once


@each_class
def test_threads_with_an_optimizer_each(case: OptimizerCase) -> None:
    layouts = [layout for layout in LAYOUTS if layout != "65537"]
    pairs = [SideBySide(case, params=make_params(torch.float32, layouts)) for _ in range(4)]
    run_in_threads(*(functools.partial(pair.train, 10) for pair in pairs))


@each_class
def test_two_runs_give_the_same_bits(case: OptimizerCase) -> None:
    params = make_params(torch.bfloat16)
    runs = [case.make([Parameter(p.detach().clone()) for p in params], **case.kwargs[-1])]
    runs.append(case.make(params, **case.kwargs[-1]))
    for _ in range(3):
        step_alike(*runs)
    assert_same_bits(*runs)
