"""What only FusedLamb does."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import fusedoptim
from fusedoptim import FusedLamb
from fusedoptim.launch.block import LaunchBlock
from fusedoptim.launch.pipeline import Pipeline
from fusedoptim.step import dense
from tests.fusedoptim.helpers import (
    SideBySide,
    assert_same_bits,
    params_of,
    step_alike,
    values_after,
)
from tests.interrupts import InterruptAt
from tests.optimizer_cases import LAMB, configuration_id
from tests.references.lamb import ReferenceLamb
from tests.tolerances import CHUNK, by_hand


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        # m = v = (0.5, 0.5), over 1 - 0.5: u = (1, 1) of norm 1.414213562
        # ratio = 5 / 1.414213562 = 3.535533906; p = (3 - 0.3535533906, 4 - 0.3535533906)
        # m = v = (0.75, 0.25), over 1 - 0.25: (1, 1/3); u = (1, 0.5773502692) of norm 1.154700538
        # ratio = 4.505580155 / 1.154700538 = 3.901946873
        # p = (2.646446609 - 0.3901946873, 3.646446609 - 0.2252790077)
        ({}, [2.646446609406726, 3.646446609406726, 2.256251922118821, 3.421167601664692]),
        # u = (1 + 0.5 * 3, 1 + 0.5 * 4) = (2.5, 3) of norm 3.905124838; ratio = 1.280368799
        # p = (3 - 0.3200921998, 4 - 0.3841106398)
        # u = (1 + 0.5 * 2.679907800, 0.5773502692 + 0.5 * 3.615889360)
        #   = (2.339953900, 2.385294949) of norm 3.341409321; ratio = 4.500729017 / 3.341409321
        # p = (2.679907800 - 0.1346955307 * 2.339953900, 3.615889360 - 0.1346955307 * 2.385294949)
        (
            {"weight_decay": 0.5},
            [2.679907800167760, 3.615889360201312, 2.364726467839617, 3.294600791188926],
        ),
        # u = (1, 1) of norm 1.414213562; ratio = 4 / 1.414213562 = 2.828427125
        # p = (3 - 0.2828427125, 4 - 0.2828427125), of norm 4.604309893
        # u = (1, 0.5773502692) of norm 1.154700538; ratio = 4 / 1.154700538 = 3.464101615
        # p = (2.717157288 - 0.3464101615, 3.717157288 - 0.2)
        (
            {"max_param_norm": 4.0},
            [2.717157287525381, 3.717157287525381, 2.370747126011605, 3.517157287525381],
        ),
        # m = (1, 1), v = (0.5, 0.5): m / sqrt(v) = 1.414213562
        # u = (1.414213562 + 0.5 * 3, 1.414213562 + 0.5 * 4) of norm 4.488818880
        # ratio = 5 / 4.488818880 = 1.113878758
        # p = (3 - 0.1113878758 * 2.914213562, 4 - 0.1113878758 * 3.414213562)
        # m = (1.5, 0.5), v = (0.75, 0.25): m / sqrt(v) = (1.732050808, 1)
        # u = (1.732050808 + 0.5 * 2.675391942, 1 + 0.5 * 3.619698004) of norm 4.161561810
        # ratio = 4.501103829 / 4.161561810 = 1.081590046
        # p = (2.675391942 - 0.1081590046 * 3.069746778, 3.619698004 - 0.1081590046 * 2.809849002)
        (
            {"weight_decay": 0.5, "bias_correction": False, "grad_averaging": False},
            [2.675391941584273, 3.619698003671330, 2.343371185684998, 3.315787532576902],
        ),
        # Both ratios of the first row are above 1, so 1: p = (3 - 0.1, 4 - 0.1);
        # p = (2.9 - 0.1, 3.9 - 0.05773502692)
        ({"trust_clip": True}, [2.9, 3.9, 2.8, 3.842264973081037]),
        # Adam's steps: the same numbers.
        ({"always_adapt": False}, [2.9, 3.9, 2.8, 3.842264973081037]),
        # p shrinks by 1 - 0.1 * 0.5 to (2.85, 3.8), of norm 4.75; ratio = 3.358757211
        # p = (2.85 - 0.3358757211, 3.8 - 0.3358757211)
        # p shrinks to (2.388418065, 3.290918065), of norm 4.066286090; ratio = 3.521507053
        # p = (2.388418065 - 0.3521507053, 3.290918065 - 0.2033143045)
        (
            {"weight_decay": 0.5, "decoupled_decay": True},
            [2.514124278936389, 3.464124278936389, 2.036267359712236, 3.087603760502384],
        ),
        # The first row, the other way: p = (3 + 0.3535533906, 4 + 0.3535533906)
        ({"maximize": True}, [3.353553390593274, 4.353553390593274]),
    ],
    ids=configuration_id,
)
@pytest.mark.parametrize("cls", [FusedLamb, ReferenceLamb])
def test_by_hand(cls: Any, kwargs: dict[str, Any], expected: list[float]) -> None:
    """Two steps from (3, 4), whose norm is 5, with gradients (1, 1) and (1, 0), in float64."""
    grads = ([1.0, 1.0], [1.0, 0.0])
    values = values_after(cls, [3.0, 4.0], grads, betas=(0.5, 0.5), eps=0.0, **kwargs)
    assert values[: len(expected)] == by_hand(expected, 90)


class TestRatio:
    """The ratio is 1 where a norm is zero, and is that of a whole tensor, whatever its chunks."""

    @pytest.mark.parametrize("dtype", LAMB.dtypes, ids=configuration_id)
    def test_parameter_of_zeros(self, dtype: torch.dtype) -> None:
        p = Parameter(torch.zeros(40_000, dtype=dtype))
        p.grad = torch.ones_like(p)
        FusedLamb([p], lr=0.5, eps=0.0).step()
        torch.testing.assert_close(p.detach(), torch.full_like(p, -0.5))

    @pytest.mark.parametrize("dtype", LAMB.dtypes, ids=configuration_id)
    def test_update_of_zeros(self, dtype: torch.dtype) -> None:
        p = Parameter(torch.randn(40_000).to(dtype))
        before = p.detach().clone()
        p.grad = torch.zeros_like(p)
        FusedLamb([p], lr=0.5).step()
        assert torch.equal(p, before)

    def test_each_tensor_has_its_own(self) -> None:
        params = [Parameter(torch.full((n,), value)) for n, value in ((100_000, 4.0), (3, 0.5))]
        for p in params:
            p.grad = torch.ones_like(p)
        FusedLamb(params, lr=0.25, eps=0.0).step()
        # The update is 1 everywhere, so a tensor of one value has that value for its ratio.
        torch.testing.assert_close(params[0].detach(), torch.full((100_000,), 3.0))
        torch.testing.assert_close(params[1].detach(), torch.full((3,), 0.375))

    @pytest.mark.parametrize("place", [0, CHUNK - 1, CHUNK, 99_999])
    def test_one_element_that_decides_a_norm(self, place: int) -> None:
        """The norm is right wherever the one element is that decides it."""
        p = Parameter(torch.zeros(100_000, dtype=torch.float64))
        p.grad = torch.zeros_like(p)
        with torch.no_grad():
            p[place], p.grad[place] = 8.0, 2.0
        FusedLamb([p], lr=0.25, weight_decay=0.5).step()
        # u = 1 + 0.5 * 8 = 5, and the ratio is 8 / 5.
        expected = torch.zeros_like(p)
        expected[place] = 8 - 0.25 * 8
        torch.testing.assert_close(p.detach(), expected)

    def test_always_adapt_asks_for_the_weight_decay_of_the_group(self) -> None:
        params = [Parameter(torch.full((1000,), 4.0)) for _ in range(2)]
        optimizer = FusedLamb(
            [{"params": [p], "weight_decay": decay} for p, decay in zip(params, (0.0, 0.25))],
            lr=0.25,
            always_adapt=False,
        )
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        # u is 1, and 1 + 0.25 * 4 = 2, with a ratio of 4 / 2.
        torch.testing.assert_close(params[0].detach(), torch.full((1000,), 4 - 0.25))
        torch.testing.assert_close(params[1].detach(), torch.full((1000,), 4 - 0.25 * 2 * 2))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched."""
    launches: list[str] = []
    launch = LaunchBlock.launch
    monkeypatch.setattr(
        LaunchBlock,
        "launch",
        lambda block, *events: (launches.append(block.kernel.module.name), launch(block, *events)),
    )
    return launches


_OF_LARGER = ["lamb_moments_f32", "lamb_ratio_f32", "lamb_update_f32"]


def test_four_launches_for_any_tensors(launches: list[str]) -> None:
    sizes = [0, 200_000, 70_000, 1, 0, 300_000, 17, 200_000, 0]
    pair = SideBySide(LAMB, LAMB.kwargs[-1], [Parameter(torch.randn(n)) for n in sizes])
    for _ in range(2):
        launches.clear()
        pair.train()
        assert launches == ["lamb_f32", *_OF_LARGER]


@pytest.mark.parametrize(
    ("dtype", "skipped"),
    [
        (torch.float32, (3, 6, 9)),
        (torch.bfloat16, (3, 6, 9)),
        (torch.float64, (None, None)),  # NumPy's powers of several counts differ from Python's
    ],
)
def test_together_as_each_alone(dtype: torch.dtype, skipped: tuple[int | None, ...]) -> None:
    """Tensors of one launch, of different sizes and step counts, have the bits of their own."""
    sizes = [0, 200_000, 40_000, 70_000, 1, 0, 300_000, 17, 100_000, 0]
    tensors = [torch.randn(n, dtype=dtype) for n in sizes]
    together, alone = ([Parameter(t.clone()) for t in tensors] for _ in range(2))
    optimizers = [FusedLamb(params, lr=0.1, weight_decay=0.1) for params in (together, *zip(alone))]
    for k, idle in enumerate(skipped, start=2):
        for params in (together, alone):
            for i, (p, t) in enumerate(zip(params, tensors)):
                p.grad = None if i == idle else t / k
        for optimizer in optimizers:
            optimizer.step()
    first, *others = optimizers
    for p, q, other in zip(together, alone, others):
        assert torch.equal(p, q)
        for name, value in first.state[p].items():
            assert torch.equal(value, other.state[q][name])


def test_an_interrupt_between_kernels() -> None:
    """Wherever the interrupt comes, all tensors are updated or none is."""
    grads = [torch.randn(n) for n in (40_000, 70_000)]

    def run(steps: int, n: int = -1) -> tuple[list[Parameter], bool]:
        params = [Parameter(g + 1) for g in grads]
        optimizer = FusedLamb(params, lr=0.1)
        for p, g in zip(params, grads):
            p.grad = g
        for _ in range(steps - 1):
            optimizer.step()
        with InterruptAt(n, "polls", within=fusedoptim, since="_update") as interrupted:
            optimizer.step()
        return params, interrupted.has_raised

    expected = [run(steps)[0] for steps in (1, 2)]
    found = set()
    for n in itertools.count():
        params, has_raised = run(2, n)
        if not has_raised:
            break
        is_like = [all(map(torch.equal, params, e)) for e in expected]
        assert any(is_like), f"wrong after place {n}"
        found.add(tuple(is_like))
    assert found == {(True, False), (False, True)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_one_kernel_computes_what_three_do(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of one kernel and of three are equal: loading a checkpoint may change the kernel."""
    sizes = [1, 15, 16, 17, 1000, 4095, 4096, 5000, 16 * 1024, 32 * 1024]
    params = [Parameter(torch.randn(n, dtype=dtype)) for n in sizes]
    copies = [Parameter(p.detach().clone()) for p in params]
    one = FusedLamb(params, lr=0.1, weight_decay=0.1)
    three = FusedLamb(copies, lr=0.1, weight_decay=0.1)
    kernels = FusedLamb._kernels
    for _ in range(3):
        step_alike(one)
        for p, copy in zip(params, copies):
            copy.grad = p.grad
        with monkeypatch.context() as patch:
            patch.setattr(
                FusedLamb, "_kernels", lambda self, group, one_row: kernels(self, group, False)
            )
            three.step()
    assert_same_bits(one, three)


class _Reduction:
    """A stage that quadruples the parameters' sums, as four processes with equal shards would."""

    pending: Sequence[Any] = ()

    def __init__(self, pipeline: Pipeline) -> None:
        self._moments = pipeline.stages[0]
        self._sums = pipeline.sums

    def launch(self, events: list[Any]) -> None:
        self._moments.wait()
        assert self._sums is not None
        self._sums[..., 0] *= 4
        events.append(None)

    def wait(self) -> None:
        raise AssertionError("it is never pending")


def test_a_reduction_between_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second kernel takes the norms from sums that a stage before it has changed."""

    class Reduced(Pipeline):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.stages.insert(1, _Reduction(self))

    monkeypatch.setattr(dense, "Pipeline", Reduced)
    p = Parameter(torch.randn(100_000, dtype=torch.float64))
    before, reference = p.detach().clone(), Parameter(p.detach().clone())
    p.grad = reference.grad = torch.randn_like(p)
    for optimizer in (FusedLamb([p], lr=0.25), ReferenceLamb([reference], lr=0.5)):
        optimizer.step()
    torch.testing.assert_close(p.detach() - before, reference.detach() - before)


def test_nothing_but_empty_tensors() -> None:
    optimizer = FusedLamb(
        [Parameter(torch.ones(shape)) for shape in ((0,), (3, 0))], weight_decay=0.1
    )
    step_alike(optimizer)
    assert [int(optimizer.state[p]["step"]) for p in params_of(optimizer)] == [1, 1]


def test_options_of_a_group_changed_later() -> None:
    pair = SideBySide(LAMB, {"lr": 0.1}, [Parameter(torch.randn(1000)) for _ in range(3)])
    for change in (
        {"trust_clip": True},
        {"always_adapt": False},
        {"weight_decay": 0.1},
        {"decoupled_decay": True},
        {"bias_correction": False, "grad_averaging": False, "trust_clip": False},
        {"maximize": True},
    ):
        for optimizer in (pair.ours, pair.torchs):
            optimizer.param_groups[0].update(change)
        pair.train()


def test_torchs_options() -> None:
    """Lamb has torch's options as the other classes do, but refuses other implementations."""
    for option in ("foreach", "capturable", "differentiable"):
        optimizer = FusedLamb([Parameter(torch.ones(1))], **{option: False})  # type: ignore[arg-type]
        assert optimizer.param_groups[0][option] is False
        with pytest.raises(RuntimeError, match=option):
            FusedLamb([Parameter(torch.ones(1))], **{option: True})  # type: ignore[arg-type]
