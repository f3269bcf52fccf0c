"""Steps of every optimizer that tests/optimizer_cases.py lists: results, gradients, launches."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from fusedoptim.launch.block import LaunchBlock
from fusedoptim.launch.openmp import WORTH_SLEEPING
from fusedoptim.launch.pipeline import _FEW
from fusedoptim.step import commit
from fusedoptim.step.dense import _MANY_WRITTEN, DenseRows
from tests.fusedoptim.helpers import (
    FEW_LAYOUTS,
    LAYOUTS,
    SideBySide,
    assert_same_bits,
    each_case,
    each_case_and_dtype,
    each_class,
    exact_values,
    few,
    make_params,
    random_like,
    run_in_threads,
    single,
    step_alike,
    unchanged,
    widened,
)
from tests.optimizer_cases import (
    CASES,
    CONFIGURATIONS_AND_DTYPES,
    Kwargs,
    OptimizerCase,
    configuration_id,
)
from tests.tolerances import CHUNK

each_configuration = pytest.mark.parametrize(
    ("case", "kwargs", "dtype"), CONFIGURATIONS_AND_DTYPES, ids=configuration_id
)


class TestParity:
    """Parameters and state equal torch's in float64."""

    @each_configuration
    def test_seven_steps_with_grads_missing_and_a_frozen_layer(
        self, case: OptimizerCase, kwargs: Kwargs, dtype: torch.dtype
    ) -> None:
        # The host cuts parameters into rows alike for all options, and a kernel's loop over rows is
        # generated alike for all; so each layout is tested with the last configuration.
        layouts = tuple(LAYOUTS) if kwargs is case.kwargs[-1] else FEW_LAYOUTS
        pair = SideBySide(case, kwargs, make_params(dtype, layouts))
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
        for kwargs, layouts in ((case.kwargs[0], FEW_LAYOUTS), (case.kwargs[-1], tuple(LAYOUTS))):
            pair = SideBySide(case, kwargs, make_params(dtype, layouts))
            for i in range(3):
                pair.set_gradients()
                if i == 1:  # lazily conjugated: the bits in memory are not the values
                    for p, reference in zip(pair.params, pair.references):
                        p.grad = p.grad.conj()
                        reference.grad = widened(p.grad).resolve_conj()
                pair.check()

    @each_class
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=configuration_id)
    def test_many_chunks(self, case: OptimizerCase, dtype: torch.dtype) -> None:
        """Numpy writes the addresses of so many, and torch's threads sleep meanwhile."""
        count = _FEW * CHUNK + 3
        assert count > WORTH_SLEEPING
        pair = SideBySide(case, params=[Parameter(torch.randn(count).to(dtype))])
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
        pair = few(case)
        for set_to_none in (True, False, True, False):
            pair.train()
            pair.ours.zero_grad(set_to_none=set_to_none)
            pair.torchs.zero_grad(set_to_none=set_to_none)
            pair.check()

    @each_case
    def test_another_parameter_has_none_each_time(self, case: OptimizerCase) -> None:
        pair = few(case)
        for i in range(len(pair.params)):
            pair.train(skip=[i])
        pair.assert_equal()

    @each_case
    def test_swapped_parameter_storage(self, case: OptimizerCase) -> None:
        pair = few(case)
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
        pair = few(case)
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
        """State is kept until the kernel ends, even if another thread clears it, and no longer."""
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


class TestCompile:
    """A step in a compiled function is a graph break: it runs eagerly, between two graphs."""

    @each_class
    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_step_in_a_compiled_function(self, case: OptimizerCase, backend: str) -> None:
        torch.compiler.reset()
        pair = few(case)

        @torch.compile(backend=backend)
        def compiled() -> None:
            pair.ours.step()

        for _ in range(4):
            pair.set_gradients()
            pair.check(compiled)


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
        """Also for so many that the versions of those written are counted during the launch."""
        numels = range(_MANY_WRITTEN + 10)
        optimizer = case.make([Parameter(torch.randn(n)) for n in numels], **case.kwargs[-1])
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
        pair = few(case)
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
