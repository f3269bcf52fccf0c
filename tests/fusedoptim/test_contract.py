"""What every optimizer owes its users; tests/optimizer_cases.py says which there are."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook

from fusedoptim.launch.table import LaunchBlock
from fusedoptim.step import dense
from fusedoptim.step.dense import DenseRows
from tests.fusedoptim.helpers import (
    LAYOUTS,
    SideBySide,
    assert_same_state,
    exact_values,
    make_params,
    snapshot,
    widened,
)
from tests.optimizer_cases import (
    ALL_CASES,
    CASES,
    CONFIGURATIONS_AND_DTYPES,
    OptimizerCase,
    configuration_id,
)

each_case = pytest.mark.parametrize("case", CASES, ids=configuration_id)
each_case_and_split = pytest.mark.parametrize("case", ALL_CASES, ids=configuration_id)
each_configuration = pytest.mark.parametrize(
    ("case", "kwargs", "dtype"), CONFIGURATIONS_AND_DTYPES, ids=configuration_id
)
each_case_and_dtype = pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, dtype) for case in ALL_CASES for dtype in case.dtypes],
    ids=configuration_id,
)
Kwargs = dict[str, Any]


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
            pair.set_gradients(skip=everything if i == 2 else [frozen] if i in (3, 4) else [])
            pair.step()
            pair.assert_equal()

    @each_case
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
                pair.step()
                pair.assert_equal()

    @each_case
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=configuration_id)
    def test_millions_of_elements(self, case: OptimizerCase, dtype: torch.dtype) -> None:
        pair = SideBySide(case, case.kwargs[-1], [Parameter(torch.randn(3_000_017).to(dtype))])
        for _ in range(2):
            pair.set_gradients()
            pair.step()
        pair.assert_equal()

    @each_case_and_split
    def test_groups_of_mixed_dtypes(self, case: OptimizerCase) -> None:
        params = [Parameter(torch.randn(100).to(dtype)) for dtype in case.dtypes * 2]
        together = [Parameter(p.detach().clone()) for p in params]
        pairs = [SideBySide(case, case.kwargs[-1], [p]) for p in params]
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

    @each_case
    @pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), 0.0, -0.0])
    def test_special_values(self, case: OptimizerCase, value: float) -> None:
        for dtype in case.dtypes:
            pair = SideBySide(case, {"lr": 0.5}, [Parameter(torch.tensor([value, 1, 2]).to(dtype))])
            (p,), (reference,) = pair.params, pair.references
            p.grad = torch.tensor([1, value, 2]).to(p.dtype)
            reference.grad = widened(p.grad)
            pair.step()
            pair.assert_equal()


class TestGradients:
    """New, missing and odd gradients, and storage that was swapped between two steps."""

    @each_case
    def test_layout_differs_from_the_parameter(self, case: OptimizerCase) -> None:
        pair = SideBySide(case, case.kwargs[-1], make_params(torch.float32, ["channels_last"] * 2))
        for _ in range(3):
            pair.set_gradients()
            pair.params[0].grad = pair.params[0].grad.contiguous()
            pair.params[1].grad = pair.params[1].grad.clone(memory_format=torch.contiguous_format)
            pair.step()
            pair.assert_equal()

    @each_case
    def test_gradient_keeps_its_values_and_its_version(self, case: OptimizerCase) -> None:
        (p,) = make_params(torch.float32, ["1000"])
        optimizer = case.make([p], **case.kwargs[-1])
        p.grad = torch.randn_like(p)
        before, version = p.grad.clone(), p.grad._version
        optimizer.step()
        assert torch.equal(p.grad, before)
        assert p.grad._version == version

    @each_case_and_split
    def test_zero_grad_to_none_and_to_zero(self, case: OptimizerCase) -> None:
        pair = SideBySide(case, case.kwargs[-1], make_params(torch.float32))
        for set_to_none in (True, False, True, False):
            pair.set_gradients()
            pair.step()
            pair.ours.zero_grad(set_to_none=set_to_none)
            pair.torchs.zero_grad(set_to_none=set_to_none)
            pair.step()
            pair.assert_equal()

    @each_case_and_split
    def test_another_parameter_has_none_each_time(self, case: OptimizerCase) -> None:
        pair = SideBySide(case, case.kwargs[-1], make_params(torch.float32))
        for i in range(len(pair.params)):
            pair.set_gradients(skip=[i])
            pair.step()
        pair.assert_equal()

    @each_case_and_split
    def test_swapped_parameter_storage(self, case: OptimizerCase) -> None:
        pair = SideBySide(case, case.kwargs[-1], make_params(torch.float32))
        pair.set_gradients()
        pair.step()
        old = [p.data for p in pair.params]
        for p in pair.params:
            p.data = p.data.clone()
        unchanged = [values.clone() for values in old]
        pair.step()
        pair.assert_equal()
        for values, expected in zip(old, unchanged):
            assert torch.equal(values, expected)

    @each_case_and_split
    def test_swapped_state(self, case: OptimizerCase) -> None:
        pair = SideBySide(case, case.kwargs[-1], make_params(torch.float32))
        pair.set_gradients()
        pair.step()
        for state in pair.ours.state.values():
            assert set(state) == set(case.state_keys)
            for key in case.state_keys:
                state[key] = state[key].clone()
        pair.step()
        pair.assert_equal()
        for optimizer in (pair.ours, pair.torchs):
            optimizer.state.clear()
        if case.is_split:
            with pytest.raises(ValueError, match="lost its lower half"):
                pair.ours.step()
            return
        pair.step()
        pair.assert_equal()

    @each_case
    def test_state_is_kept_until_the_kernel_has_ended(
        self, case: OptimizerCase, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Though another thread clears it meanwhile; and no longer."""
        (p,) = make_params(torch.float32, ["1000"])
        optimizer = case.make([p], **case.kwargs[-1])
        for _ in range(2):
            p.grad = torch.randn_like(p)
            optimizer.step()
        state = optimizer.state[p]
        kernels = [weakref.ref(state[key]) for key in case.state_keys if key != "step"]
        marks_written = dense.increment_version

        def clear(params: Any) -> None:
            state.clear()
            assert all(tensor() is not None for tensor in kernels)
            marks_written(params)

        monkeypatch.setattr(dense, "increment_version", clear)
        optimizer.step()
        assert all(tensor() is None for tensor in kernels)

    @each_case_and_split
    def test_state_moved_to_shared_memory(self, case: OptimizerCase) -> None:
        pair = SideBySide(case, case.kwargs[-1], make_params(torch.float32, ["1000", "17"]))
        pair.set_gradients()
        pair.step()
        for p in pair.params:
            p.share_memory_()
            for key in case.state_keys:
                pair.ours.state[p][key].share_memory_()
        pair.step()
        pair.assert_equal()

    @each_case
    def test_model_converted_between_steps(self, case: OptimizerCase) -> None:
        (p,) = make_params(torch.float32, ["1000"])
        optimizer = case.make([p], **case.kwargs[-1])
        p.grad = torch.randn_like(p)
        optimizer.step()
        p.data = p.data.bfloat16()
        p.grad = torch.randn_like(p)
        optimizer.step()
        assert p.dtype == torch.bfloat16

    # torch's Adagrad, of its own sparse tensors
    @pytest.mark.filterwarnings("ignore:Sparse invariant checks")
    @each_case
    def test_sparse_gradients(self, case: OptimizerCase) -> None:
        tables = [torch.nn.Embedding(20, 3, sparse=True) for _ in range(2)]
        tables[1].load_state_dict(tables[0].state_dict())
        heads = [Parameter(torch.ones(3)) for _ in range(2)]
        ours = case.make([tables[0].weight, heads[0]], lr=0.1)
        torchs = case.reference([tables[1].weight, heads[1]], lr=0.1)
        if case.is_split:
            pytest.skip("see test_sparse.py: torch has no such gradient of bfloat16 and float32")
        if not case.supports_sparse_gradients:
            tables[0](torch.arange(3)).sum().backward()
            before = tables[0].weight.detach().clone()
            with pytest.raises(RuntimeError, match="does not support sparse gradients"):
                ours.step()
            assert torch.equal(tables[0].weight, before)
            return
        for _ in range(3):
            rows = torch.randint(20, (8,))
            for table, head, optimizer in zip(tables, heads, (ours, torchs)):
                optimizer.zero_grad()
                (table(rows) * head).sum().backward()
                optimizer.step()
        torch.testing.assert_close(tables[0].weight, tables[1].weight)
        torch.testing.assert_close(heads[0], heads[1])

    @each_case
    def test_autograd_sees_the_write(self, case: OptimizerCase) -> None:
        (p,) = make_params(torch.float32, ["1000"])
        optimizer = case.make([p], lr=0.1)
        loss = (p * p).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class TestTorchContract:
    """Signatures, errors, groups, hooks, schedulers: as torch has them."""

    @each_case
    def test_is_an_instance_of_the_class_it_stands_for(self, case: OptimizerCase) -> None:
        assert issubclass(case.cls, case.reference if case.is_torchs else torch.optim.Optimizer)

    @each_case
    def test_signature(self, case: OptimizerCase) -> None:
        """The reference's arguments, in its order, and then ours, by name only."""
        ours = inspect.signature(case.cls).parameters
        references = inspect.signature(case.reference).parameters
        assert tuple(ours) == (*references, *case.own_arguments)
        for name, parameter in references.items():
            assert (ours[name].default, ours[name].kind) == (parameter.default, parameter.kind)
        for name in case.own_arguments:
            assert ours[name].kind is inspect.Parameter.KEYWORD_ONLY

    @each_case
    def test_groups_have_the_references_defaults(self, case: OptimizerCase) -> None:
        params = [Parameter(torch.ones(1))]
        defaults = case.make(params).defaults
        for key, value in case.reference(params).defaults.items():
            assert defaults[key] == value

    @each_case
    def test_invalid_arguments(self, case: OptimizerCase) -> None:
        for kwargs in case.invalid_kwargs:
            with pytest.raises(Exception) as expected:  # noqa: PT011 (its type is the point)
                case.reference([Parameter(torch.ones(1))], **kwargs)
            with pytest.raises(type(expected.value)) as raised:
                case.make([Parameter(torch.ones(1))], **kwargs)
            assert str(raised.value) == str(expected.value)

    @each_case
    @pytest.mark.parametrize(
        "params", [[], torch.ones(1), [torch.ones(2) * torch.ones(2, requires_grad=True)], [1]]
    )
    def test_invalid_params(self, case: OptimizerCase, params: Any) -> None:
        with pytest.raises((TypeError, ValueError)) as expected:
            case.reference(params)
        with pytest.raises(type(expected.value)) as raised:
            case.make(params)
        assert str(raised.value) == str(expected.value)

    @each_case
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

    @each_case
    def test_refused_option_set_later(self, case: OptimizerCase) -> None:
        (p,) = make_params(torch.float32, ["17"])
        optimizer = case.make([p])
        p.grad = torch.ones_like(p)
        optimizer.step()
        for kwargs in case.refused_kwargs:
            ((option, value),) = kwargs.items()
            before = optimizer.param_groups[0][option]
            optimizer.param_groups[0][option] = value
            with pytest.raises(RuntimeError, match=f"^{option}="):
                optimizer.step()
            optimizer.param_groups[0][option] = before
        optimizer.step()

    @each_case
    def test_nan_is_refused(self, case: OptimizerCase) -> None:
        """At construction, in a new group and when it was set later; nothing changes then."""
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

            # Each switches on what needs it.
            momentum = {"momentum": 0.9} if "momentum" in defaults else {}
            optimizer = case.make([p], **momentum)
            with pytest.raises(ValueError, match=message):
                optimizer.add_param_group({"params": [Parameter(torch.ones(1))], name: nan})
            assert len(optimizer.param_groups) == 1
            p.grad = torch.ones_like(p)
            optimizer.step()
            if name == "initial_accumulator_value":  # has done its work
                continue
            before, state, version = p.detach().clone(), snapshot(optimizer), p._version
            optimizer.param_groups[0][name] = nan
            with pytest.raises(ValueError, match=message):
                optimizer.step()
            assert torch.equal(p, before)
            assert p._version == version
            assert_same_state(optimizer, state)

    @each_case
    def test_fused_true_is_accepted(self, case: OptimizerCase) -> None:
        (p,) = make_params(torch.float32, ["17"])
        optimizer = case.make([p], fused=True)
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert optimizer.param_groups[0]["fused"] is True

    @each_case
    def test_closure(self, case: OptimizerCase) -> None:
        (p,) = make_params(torch.float32, ["17"])
        optimizer = case.make([p], lr=0.1)

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

    @each_case
    def test_add_param_group(self, case: OptimizerCase) -> None:
        params = make_params(torch.float32, ["1000", "17"])
        pair = SideBySide(case, case.kwargs[-1], params[:1])
        pair.set_gradients()
        pair.step()
        pair.ours.add_param_group({"params": [params[1]], "lr": 0.01})
        reference = Parameter(widened(exact_values(pair.ours)[params[1]]))
        pair.torchs.add_param_group({"params": [reference], "lr": 0.01})
        pair.params.append(params[1])
        pair.references.append(reference)
        for _ in range(2):
            pair.set_gradients()
            pair.step()
        pair.assert_equal()

    @each_case
    def test_parameter_given_twice(self, case: OptimizerCase) -> None:
        params = make_params(torch.float32, ["65537"])
        pair = SideBySide(case, case.kwargs[-1], params)
        again = make_params(torch.float32, ["65537"])
        with pytest.warns(UserWarning, match="duplicate parameters"):
            pair.ours = case.make(again * 2, **case.kwargs[-1])
        (value,) = {id(p): v for p, v in exact_values(pair.ours).items()}.values()
        pair.params = again
        pair.references = [Parameter(widened(value))]
        with pytest.warns(UserWarning, match="duplicate parameters"):
            pair.torchs = case.make_reference(pair.references * 2, **case.kwargs[-1])
        for _ in range(3):
            pair.set_gradients()
            pair.step()
        pair.assert_equal()

    @each_case
    def test_parameter_given_twice_keeps_its_value(self, case: OptimizerCase) -> None:
        (p,) = make_params(torch.float32, ["1000"])
        before = p.detach().clone()
        with pytest.warns(UserWarning, match="duplicate parameters"):
            optimizer = case.make([p, p], lr=0.1)
        assert torch.equal(exact_values(optimizer)[p], before)

    @each_case
    def test_parameter_in_two_groups(self, case: OptimizerCase) -> None:
        """Which torch refuses to make; after an edit it updates one group after the other."""
        pair = SideBySide(case, case.kwargs[-1], make_params(torch.float32, ["1000", "17", "3x0"]))
        for optimizer, params in ((pair.ours, pair.params), (pair.torchs, pair.references)):
            (group,) = optimizer.param_groups
            optimizer.param_groups.append({**group, "lr": 0.02, "params": [params[1]]})
        for step in range(6):
            for optimizer, params in ((pair.ours, pair.params), (pair.torchs, pair.references)):
                first, second = optimizer.param_groups
                first["params"] = params if step < 4 else params[:1]
                second["params"] = params[1:] if step < 2 else params
            pair.set_gradients()
            pair.step()
        pair.assert_equal()

    @each_case
    def test_hyper_parameters_changed_between_steps(self, case: OptimizerCase) -> None:
        pair = SideBySide(case, case.kwargs[-1], make_params(torch.float32))
        for lr in (0.1, 0.01, torch.tensor(0.05)):
            for optimizer in (pair.ours, pair.torchs):
                optimizer.param_groups[0]["lr"] = lr
            pair.set_gradients()
            pair.step()
        pair.assert_equal()

    @each_case
    def test_schedulers(self, case: OptimizerCase) -> None:
        pair = SideBySide(case, {"lr": 0.1}, make_params(torch.float32))
        schedulers = [
            torch.optim.lr_scheduler.OneCycleLR(
                optimizer,
                max_lr=0.2,
                total_steps=6,
                cycle_momentum=any(k in optimizer.defaults for k in ("momentum", "betas")),
            )
            for optimizer in (pair.ours, pair.torchs)
        ]
        for _ in range(5):
            pair.set_gradients()
            pair.step()
            for scheduler in schedulers:
                scheduler.step()
        pair.assert_equal()

    @each_case
    def test_named_parameters(self, case: OptimizerCase) -> None:
        model = torch.nn.Linear(3, 2)
        optimizer = case.make(model.named_parameters(), lr=0.1)
        assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
        model.weight.grad = torch.ones_like(model.weight)
        model.weight.data = model.weight.data.t()
        with pytest.raises(RuntimeError, match="weight"):
            optimizer.step()

    @each_case
    def test_step_hooks(self, case: OptimizerCase) -> None:
        (p,) = make_params(torch.float32, ["17"])
        optimizer = case.make([p], lr=0.1)
        p.grad = torch.ones_like(p)
        before = p.detach().clone()
        seen = []

        def pre(hooked: Any, args: Any, kwargs: Any) -> None:
            assert (hooked, args, kwargs) == (optimizer, (optimizer,), {})
            assert torch.equal(p, before)
            seen.append("pre")

        def post(hooked: Any, args: Any, kwargs: Any) -> None:
            assert not torch.equal(p, before)
            seen.append("post")

        handles = [optimizer.register_step_pre_hook(pre), optimizer.register_step_post_hook(post)]
        optimizer.step()
        assert seen == ["pre", "post"]
        for handle in handles:
            handle.remove()
        optimizer.step()
        assert seen == ["pre", "post"]

    @each_case
    def test_global_step_hooks(self, case: OptimizerCase) -> None:
        (p,) = make_params(torch.float32, ["17"])
        optimizer = case.make([p], lr=0.1)
        seen: list[Any] = []
        handle = register_optimizer_step_post_hook(lambda hooked, *_: seen.append(hooked))
        optimizer.step()
        handle.remove()
        assert seen == [optimizer]

    @each_case
    def test_profiler_range(self, case: OptimizerCase) -> None:
        (p,) = make_params(torch.float32, ["17"])
        optimizer = case.make([p], lr=0.1)
        p.grad = torch.ones_like(p)
        with torch.autograd.profiler.profile() as profile:
            optimizer.step()
        assert f"Optimizer.step#{case.name}.step" in {
            event.name for event in profile.function_events
        }

    @each_case
    def test_grad_scaler_skips_a_step_with_infinities(self, case: OptimizerCase) -> None:
        for fused in (None, True):
            (p,) = make_params(torch.float32, ["17"])
            pair = SideBySide(case, {"lr": 0.1}, [p])
            pair.ours.param_groups[0]["fused"] = fused
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            before, state = p.detach().clone(), snapshot(pair.ours)
            scaler.scale((p * float("inf")).sum()).backward()
            scaler.step(pair.ours)
            scaler.update()
            assert torch.equal(p, before)
            assert_same_state(pair.ours, state)
            pair.ours.zero_grad()
            scaler.scale(p.sum()).backward()
            pair.references[0].grad = torch.ones_like(pair.references[0])
            pair.step(functools.partial(scaler.step, pair.ours))
            pair.assert_equal()


class TestCompile:
    """torch.compile around a step: the step runs as it always does, between two graphs."""

    @each_case
    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_step_in_a_compiled_function(self, case: OptimizerCase, backend: str) -> None:
        torch.compiler.reset()
        pair = SideBySide(case, case.kwargs[-1], make_params(torch.float32))

        @torch.compile(backend=backend)
        def compiled() -> None:
            pair.ours.step()

        for _ in range(4):
            pair.set_gradients()
            pair.step(compiled)
            pair.assert_equal()

    @each_case
    def test_compiled_model(self, case: OptimizerCase) -> None:
        torch.compiler.reset()
        models = [torch.nn.Linear(5, 3) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        optimizers = [case.make(model.parameters(), lr=0.1) for model in models]
        forward = torch.compile(models[0], backend="aot_eager")
        for _ in range(4):
            x = torch.randn(7, 5, dtype=models[0].weight.dtype)
            for call, optimizer in zip((forward, models[1]), optimizers):
                optimizer.zero_grad()
                call(x).square().sum().backward()
                optimizer.step()
        torch.testing.assert_close(models[0].weight, models[1].weight)


class TestState:
    """Its keys, dtypes and shapes, and every way in and out of the process."""

    @each_case_and_dtype
    def test_dtype_and_layout(self, case: OptimizerCase, dtype: torch.dtype) -> None:
        params = make_params(dtype)
        optimizer = case.make(params, **case.kwargs[-1])
        assert bool(optimizer.state) == case.has_state_from_the_start
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
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
        """Two optimizers, one of which goes through a file, stay equal bit for bit."""
        params = make_params(dtype)
        copies = [Parameter(p.detach().clone()) for p in params]
        optimizer, other = (case.make(ps, **case.kwargs[-1]) for ps in (params, copies))
        for i in range(4):
            for p, c in zip(params, copies):
                p.grad = torch.randn_like(p)
                c.grad = p.grad.clone()
            optimizer.step()
            other.step()
            if i == 1:
                file = io.BytesIO()
                torch.save(other.state_dict(), file)
                file.seek(0)
                other = case.make(copies, lr=0.7)
                other.load_state_dict(torch.load(file))
        for p, c in zip(params, copies):
            assert torch.equal(p, c)
            for key in case.state_keys:
                assert torch.equal(optimizer.state[p][key], other.state[c][key])

    @each_case
    def test_state_dict_equals_the_references(self, case: OptimizerCase) -> None:
        for kwargs in case.kwargs:
            params = make_params(case.dtypes[0], ["17", "empty", "0-d"])
            pair = SideBySide(case, kwargs, params)
            pair.set_gradients()
            pair.step()
            ours, torchs = pair.ours.state_dict(), pair.torchs.state_dict()
            (group,), (expected,) = ours["param_groups"], torchs["param_groups"]
            if case.is_torchs:
                expected["foreach"] = None  # the one that the pair sets itself
            else:
                assert group.pop("fused") is None
            assert group == expected
            if not case.is_split:
                assert ours["state"].keys() == torchs["state"].keys()

    @each_case
    def test_state_dict_moves_both_ways(self, case: OptimizerCase) -> None:
        dtype = torch.float64 if torch.float64 in case.dtypes else torch.float32
        pair = SideBySide(case, case.kwargs[-1], make_params(dtype))
        pair.set_gradients()
        pair.step()
        ours, torchs = pair.ours.state_dict(), pair.torchs.state_dict()
        if not case.is_split:  # a new optimizer would begin with lower halves of zero
            pair.ours = case.make(pair.params)
        pair.torchs = case.make_reference(pair.references)
        pair.ours.load_state_dict(torchs)
        pair.torchs.load_state_dict(ours)
        for _ in range(2):
            pair.set_gradients()
            pair.step()
        pair.assert_equal()

    @each_case
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

    @each_case_and_split
    def test_float32_state_of_bfloat16_parameters_survives(self, case: OptimizerCase) -> None:
        (p,) = make_params(torch.bfloat16, ["1000"])
        optimizer = case.make([p], **case.kwargs[-1])
        for _ in range(2):
            p.grad = torch.randn_like(p)
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
            if key != "step":  # which torch hands on as it is
                assert other.state[p][key] is not optimizer.state[p][key]

    @each_case_and_split
    def test_load_of_another_model(self, case: OptimizerCase) -> None:
        params = make_params(torch.float32, ["17", "1000"])
        other = case.make([params[0]], **case.kwargs[-1])
        params[0].grad = torch.ones_like(params[0])
        other.step()
        optimizer = case.make([params[1]], **case.kwargs[-1])
        params[1].grad = torch.ones_like(params[1])
        before = params[1].detach().clone()
        if case.is_split:
            with pytest.raises(ValueError, match=r"shape \(17,\)"):
                optimizer.load_state_dict(other.state_dict())
        else:
            optimizer.load_state_dict(other.state_dict())
            with pytest.raises(ValueError, match=r"shape \(17,\)"):
                optimizer.step()
        assert torch.equal(params[1], before)

    @each_case
    @pytest.mark.parametrize("how", ["deepcopy", "pickle"])
    def test_copies_go_their_own_way(self, case: OptimizerCase, how: str) -> None:
        pair = SideBySide(case, case.kwargs[-1], make_params(torch.float32))
        pair.set_gradients()
        pair.step()
        if how == "deepcopy":
            twin = copy.deepcopy(pair.ours)
        else:
            twin = pickle.loads(pickle.dumps(pair.ours))
        before = [p.detach().clone() for p in pair.params]
        for p in twin.param_groups[0]["params"]:
            p.grad = torch.randn_like(p)
        twin.step()
        for p, expected in zip(pair.params, before):
            assert torch.equal(p, expected)
        pair.set_gradients()
        pair.step()
        pair.assert_equal()

    @each_case
    def test_hooks_of_state_dict(self, case: OptimizerCase) -> None:
        (p,) = make_params(torch.float32, ["17"])
        optimizer = case.make([p], lr=0.1)
        optimizer.register_state_dict_post_hook(lambda o, d: d | {"note": 1})
        assert optimizer.state_dict()["note"] == 1

        def halve(_: Any, state_dict: dict[str, Any]) -> None:
            state_dict["param_groups"][0]["lr"] /= 2

        optimizer.register_load_state_dict_pre_hook(halve)
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.param_groups[0]["lr"] == 0.05


class TestLaunches:
    """One launch for each group, device and dtype; tables written only where something changed."""

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

    @each_case
    def test_one_for_all_parameters(self, case: OptimizerCase, launches: list[LaunchBlock]) -> None:
        params = [Parameter(torch.randn(n)) for n in range(600)]
        optimizer = case.make(params, **case.kwargs[-1])
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
        assert len(launches) == 1

    @each_case
    def test_one_for_each_group_and_dtype(
        self, case: OptimizerCase, launches: list[LaunchBlock]
    ) -> None:
        groups = [
            {"params": [Parameter(torch.ones(3).to(dtype)) for dtype in case.dtypes]}
            for _ in range(2)
        ]
        optimizer = case.make(groups, lr=0.1)
        for group in groups:
            for p in group["params"]:
                p.grad = torch.ones_like(p)
        optimizer.step()
        buckets = {(i, p.dtype) for i, group in enumerate(groups) for p in group["params"]}
        assert len(launches) == len(buckets)

    @each_case
    def test_none_without_gradients(self, case: OptimizerCase, launches: list[LaunchBlock]) -> None:
        optimizer = case.make(make_params(torch.float32), lr=0.1)
        state = snapshot(optimizer)
        optimizer.step()
        assert launches == []
        assert_same_state(optimizer, state)

    @each_case
    def test_nothing_is_rebuilt_for_new_gradients(
        self, case: OptimizerCase, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        built = []
        init = DenseRows.__init__
        monkeypatch.setattr(
            DenseRows, "__init__", lambda self, *args: (built.append(self), init(self, *args))[1]
        )
        pair = SideBySide(case, case.kwargs[-1], make_params(torch.float32))
        pair.set_gradients()
        pair.step()
        once = len(built)
        assert once > 0
        for _ in range(4):
            pair.ours.zero_grad()
            pair.set_gradients()
            pair.step()
        assert len(built) == once
        pair.assert_equal()


@each_case
def test_threads_with_an_optimizer_each(case: OptimizerCase) -> None:
    layouts = [layout for layout in LAYOUTS if layout != "65537"]
    pairs = [
        SideBySide(case, case.kwargs[-1], make_params(torch.float32, layouts)) for _ in range(4)
    ]
    errors: list[BaseException] = []

    def train(pair: SideBySide) -> None:
        try:
            for _ in range(10):
                for p, reference in zip(pair.params, pair.references):
                    p.grad = torch.ones_like(p)
                    reference.grad = widened(p.grad)
                pair.step()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=[pair]) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for pair in pairs:
        pair.assert_equal()


@each_case
def test_two_runs_give_the_same_bits(case: OptimizerCase) -> None:
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        params = make_params(torch.bfloat16, list(LAYOUTS))
        optimizer = case.make(params, **case.kwargs[-1])
        for _ in range(3):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step()
        results.append(params)
    for a, b in zip(*results):
        assert torch.equal(a, b)
