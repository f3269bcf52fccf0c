"""Unusual and shared memory, and memory that moves: each once gave a wrong result or a crash."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from fusedoptim import FusedAdagrad, FusedAdam, FusedSGD
from fusedoptim.allocator import queue
from fusedoptim.launch import pipeline
from fusedoptim.launch.cpu import CPU
from fusedoptim.launch.kernel import kernel_for
from fusedoptim.split.pages import has_sole_owner
from fusedoptim.step import commit
from fusedoptim.step.tensors import update_order
from tests.fusedoptim.helpers import run_in_threads
from tests.garbage import without_collections


def _with_ones(*sizes: int, count: int = 1, groups: bool = False, **kwargs: Any) -> tuple[Any, Any]:
    """FusedSGD, with parameters of zeros and gradients of ones, in one group or in a group each."""
    params = [Parameter(torch.zeros(sizes)) for _ in range(count)]
    for p in params:
        p.grad = torch.ones(sizes)
    return params, FusedSGD([{"params": [p]} for p in params] if groups else params, 1.0, **kwargs)


def _beside_torchs(
    make: Callable[[], Sequence[Tensor]], grads: Sequence[Tensor], ours: Any, torchs: Any
) -> Iterator[tuple[int, torch.optim.Optimizer, Sequence[Tensor]]]:
    """Take three steps of two optimizers, and compare the parameters; yield before each step."""
    optimizers = []
    for cls in (ours, torchs):
        params = make()
        optimizers.append((cls(params), params))
    for step in range(3):
        for optimizer, params in optimizers:
            for p, grad in zip(params, grads):
                p.grad = grad
            yield step, optimizer, params
            optimizer.step()
    for p, expected in zip(*(params for _, params in optimizers)):
        torch.testing.assert_close(p.detach(), expected.detach(), rtol=0, atol=0)


def _sgds(**kwargs: Any) -> tuple[Any, Any]:
    return (
        lambda params: FusedSGD(params, lr=1.0, **kwargs),
        lambda params: torch.optim.SGD(params, lr=1.0, foreach=False, **kwargs),
    )


def _twice() -> list[Tensor]:
    p = Parameter(torch.zeros(1_000_000))
    return [p, Parameter(p.data)]


def _views() -> list[Tensor]:
    base = torch.zeros(8)
    return [Parameter(base[::2]), Parameter(base), Parameter(base[::2]), Parameter(base[4:])]


def _conjugated() -> list[Tensor]:
    return [Parameter(torch.tensor([1 + 2j, 3 - 1j]).conj())]


@pytest.mark.parametrize("make", [_twice, _views, _conjugated])
def test_shared_and_conjugated_parameters(make: Callable[[], list[Tensor]]) -> None:
    grads = [(1.0 + 9 * i) * torch.ones_like(p) for i, p in enumerate(make())]
    for _ in _beside_torchs(make, grads, *_sgds(momentum=0.5)):
        pass


def test_states_exchanged_between_parameters() -> None:
    def make() -> list[Tensor]:
        return [Parameter(torch.zeros(2)) for _ in range(2)]

    grads = [torch.full((2,), 1.0 + i) for i in range(2)]
    for step, optimizer, params in _beside_torchs(make, grads, *_sgds(momentum=0.5)):
        if step == 2:
            states = [optimizer.state[p] for p in params]
            optimizer.state.clear()
            optimizer.state.update(zip(reversed(params), states))


def test_step_counts_moved_to_shared_memory() -> None:
    """The counts of all parameters are views of one tensor, so they move together."""

    def make() -> list[Tensor]:
        return [Parameter(torch.ones(2)) for _ in range(500)]

    ours, torchs = (
        lambda params, cls=cls: cls(params, lr=1.0) for cls in (FusedAdam, torch.optim.Adam)
    )
    for step, optimizer, params in _beside_torchs(make, [torch.ones(2)] * 500, ours, torchs):
        if step == 1 and type(optimizer) is FusedAdam:
            optimizer.state[params[0]]["step"].share_memory_()
            junk = [torch.full((500,), 7.0) for _ in range(100)]
        assert step == 0 or optimizer.state[params[7]]["step"] == step
    del junk


@pytest.mark.parametrize("how", ["fewer rows", "float16", "transposed"])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_state_of_another_layout_at_the_same_address(how: str, is_sparse: bool) -> None:
    p = Parameter(torch.ones(4, 4))
    optimizer = FusedAdagrad([p], lr=0.1)
    gradient = torch.ones(4, 4)
    for _ in range(2):
        p.grad = gradient.to_sparse(1) if is_sparse else gradient
        optimizer.step()
    memory = torch.full((16,), 2.0)
    swapped = {
        "fewer rows": memory.view(4, 4)[:2],
        "float16": memory.view(torch.float16)[:16].view(4, 4),
        "transposed": memory.view(4, 4).t(),
    }[how]
    optimizer.state[p]["sum"].data = swapped
    before = memory.clone()
    if how == "fewer rows":
        with pytest.raises(ValueError, match=r"shape \(2, 4\)"):
            optimizer.step()
        assert torch.equal(memory, before)
    else:
        expected = swapped.float() + 1
        optimizer.step()
        torch.testing.assert_close(optimizer.state[p]["sum"].float(), expected)


def test_clipping_counts_parameters_that_share_memory() -> None:
    results = []
    for fused in (True, False):
        base = torch.zeros(4)
        params = [Parameter(base[:3]), Parameter(base[1:])]
        for p, g in zip(params, (3.0, 400.0)):
            p.grad = torch.full((3,), g)
        if fused:
            FusedSGD(params, lr=1.0, max_grad_norm=1.0).step()
        else:
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            torch.optim.SGD(params, lr=1.0, foreach=False).step()
        results.append(base)
    torch.testing.assert_close(*results)


def test_sparse_parameter_given_twice_counts_twice() -> None:
    tables = [Parameter(torch.ones(4, 2)) for _ in range(2)]
    kwargs: Any = {"lr": 1.0, "lr_decay": 1.0}
    with pytest.warns(UserWarning, match="duplicate parameters"):
        ours = FusedAdagrad([tables[0]] * 2, **kwargs)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        torchs = torch.optim.Adagrad([tables[1]] * 2, **kwargs, foreach=False)
    with torch.sparse.check_sparse_tensor_invariants(False):
        for _ in range(2):
            for p in tables:
                p.grad = torch.sparse_coo_tensor([[1, 3]], torch.ones(2, 2), (4, 2))
            ours.step()
            torchs.step()
    assert ours.state[tables[0]]["step"] == torchs.state[tables[1]]["step"] == 4
    torch.testing.assert_close(tables[0], tables[1])


def test_update_order_of_parameters_that_share_memory() -> None:
    base = torch.zeros(10)
    params = [base[0:4], base[2:6], torch.zeros(3), base[5:8], base[0:0], base[0:4], base[8:]]
    assert update_order(params) == [0, 1, 0, 2, 0, 2, 0]


def test_lazily_negated_gradient() -> None:
    (p,), optimizer = _with_ones(1)
    for expected in (-1.0, -2.0):
        optimizer.zero_grad()
        z = torch.complex(torch.zeros(1), p).conj()
        (z * torch.tensor([1j])).real.sum().backward()
        assert p.grad is not None
        assert p.grad.is_neg()
        optimizer.step()
        assert p.item() == expected


def test_parameter_conjugated_between_steps() -> None:
    p = Parameter(torch.tensor([1j]))
    p.grad = torch.tensor([1j])
    optimizer = FusedSGD([p], lr=1.0)
    optimizer.step()
    p.data = p.data.conj()
    optimizer.step()
    assert p.item() == -1j


def test_gradient_without_memory() -> None:
    for steps_before in (0, 1):
        (p,), optimizer = _with_ones(4)
        for _ in range(steps_before):
            optimizer.step()
        p.grad = torch._efficientzerotensor(4)
        with pytest.raises(TypeError, match=r"no memory of its own; clone\(\) it"):
            optimizer.step()


@pytest.mark.parametrize("transposed", ["parameter", "state"])
def test_transposed_at_the_same_address(transposed: str) -> None:
    (p,), optimizer = _with_ones(2, 2, momentum=1.0 if transposed == "state" else 0.0)
    p.grad = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    optimizer.step()
    if transposed == "parameter":
        p.data = p.data.t()
    else:
        state = optimizer.state[p]
        state["momentum_buffer"] = state["momentum_buffer"].t()
    optimizer.step()
    assert p.tolist() == [[0.0, -1.0 - (transposed == "state")], [-1.0, 0.0]]


def test_interrupt_between_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt during a launch loses neither the state nor the wait for its end."""
    params, optimizer = _with_ones(100_000, count=2, groups=True, momentum=0.5)

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(commit, "increment_version", interrupt)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    assert params[0].unique().tolist() == [-1.0]
    assert params[0] in optimizer.state
    optimizer.step()
    assert params[0].unique().tolist() == [-2.5]
    assert params[1].unique().tolist() == [-1.0]


def test_hyper_parameter_that_cannot_be_packed() -> None:
    """The error names the hyper-parameter, and no group is updated."""
    params, optimizer = _with_ones(3, count=2, groups=True, momentum=0.5)
    for bad, error, message in (
        (None, TypeError, "^FusedSGD: lr is None; set it to a number, as in"),
        ("0.1", TypeError, "^FusedSGD: lr is 0.1; set it to a number"),
        (1e39, OverflowError, r"^FusedSGD: lr is 1e\+39; set it to a number of at most 3.403e\+38"),
        (torch.tensor(1e39, dtype=torch.float64), OverflowError, "^FusedSGD: lr is "),
    ):
        optimizer.param_groups[1]["lr"] = bad
        with pytest.raises(error, match=message):
            optimizer.step()
        assert not optimizer.state
        optimizer.param_groups[1]["lr"] = 1.0
        optimizer.step()
        optimizer.param_groups[1]["lr"] = bad
        with pytest.raises(error, match=message):
            optimizer.step()
        assert all(p.tolist() == [-1.0] * 3 for p in params)
        optimizer.state.clear()
        for p in params:
            p.data.zero_()


def test_tensor_momentum_changed_in_place() -> None:
    momentum = torch.tensor(0.5)
    (p,), optimizer = _with_ones(1, momentum=momentum)
    optimizer.step()
    momentum.fill_(1.0)
    optimizer.step()
    assert p.item() == -3.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_gradients_are_not_kept_alive(dtype: torch.dtype) -> None:
    p = Parameter(torch.zeros(3, dtype=dtype))
    optimizer = FusedSGD([p], lr=1.0)
    for _ in range(2):
        p.grad = torch.ones(3, dtype=dtype)
        gone = weakref.ref(p.grad)
        optimizer.step()
        optimizer.zero_grad()
        assert gone() is None


@pytest.mark.parametrize("is_skipped", [True, False])
def test_gradients_of_a_step_that_is_not_taken(is_skipped: bool) -> None:
    """A GradScaler skips a step that has infinities; a wrong hyper-parameter raises."""
    params, optimizer = _with_ones(3, count=2, groups=True)
    optimizer.step()
    for p in params:
        p.grad = torch.ones(3)
    gone = [weakref.ref(p.grad) for p in params]
    if is_skipped:
        optimizer.found_inf = torch.ones(())
        optimizer.step()
    else:
        optimizer.param_groups[1]["lr"] = float("nan")
        with pytest.raises(ValueError, match="lr is nan"):
            optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    assert [gradient() for gradient in gone] == [None, None]


def test_gradients_of_parameters_that_share_memory() -> None:
    whole = torch.zeros(8)
    params = [Parameter(whole[:6]), Parameter(whole[2:])]
    optimizer = FusedSGD(params, lr=1.0)
    for steps in (1, 2):
        for p in params:
            p.grad = torch.ones(6)
        gone = [weakref.ref(p.grad) for p in params if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        assert [gradient() for gradient in gone] == [None, None]
        assert whole.tolist() == [-steps] * 2 + [-2 * steps] * 4 + [-steps] * 2


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_sparse_gradients_are_not_kept_alive(momentum: float) -> None:
    rows = torch.arange(0, 400_000, 2)
    p = Parameter(torch.zeros(400_000, 4))
    optimizer = FusedSGD([p], lr=1.0, momentum=momentum)
    for _ in range(2):
        indices, values = rows[None].clone(), torch.ones(len(rows), 4)
        p.grad = torch.sparse_coo_tensor(indices, values, p.shape, check_invariants=True)
        assert not has_sole_owner(values)
        optimizer.step()
        optimizer.zero_grad()
        assert has_sole_owner(values)


def test_removed_group_is_forgotten() -> None:
    params, optimizer = _with_ones(3, count=2, groups=True)
    optimizer.step()
    gone = weakref.ref(params.pop())
    del optimizer.param_groups[1]
    optimizer.step()
    gc.collect()
    assert gone() is None


def test_dropping_an_optimizer_frees_its_state() -> None:
    (p,), optimizer = _with_ones(3, momentum=0.5)
    with without_collections():
        optimizer.step()
        state = weakref.ref(optimizer.state[p]["momentum_buffer"])
        del optimizer
        assert state() is None


def test_counts_are_on_the_cpu_whatever_the_default_device() -> None:
    (p,), _ = _with_ones(3)
    optimizer = FusedAdam([p])
    torch.set_default_device("meta")
    try:
        optimizer.step()
    finally:
        torch.set_default_device(None)
    assert optimizer.state[p]["step"].device.type == "cpu"


def test_one_optimizer_in_two_threads() -> None:
    """Each thread prepares its own launch while the other one's may be running."""
    params, optimizer = _with_ones(2000, count=64)

    def work() -> None:
        for _ in range(100):
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()

    run_in_threads(work, work)
    assert all(p.unique().tolist() == [-200.0] for p in params)


def test_block_outlives_the_kernel_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a step does not wait, but freeing its block does; here the CPU acts as a GPU."""
    monkeypatch.setattr(CPU, "runs_on_host", False)
    params, optimizer = _with_ones(100_000, count=100)
    optimizer.step()
    del optimizer
    assert all(p.unique().tolist() == [-1.0] for p in params)


@pytest.mark.parametrize("few", [0, 2])
def test_address_beyond_2_to_the_63(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs have such addresses. Few rows are written one by one, more rows as an array."""
    monkeypatch.setattr(pipeline, "_FEW", few)
    _, optimizer = _with_ones(40_000)  # two rows
    optimizer.step()
    (rows,) = optimizer._plan.groups[0].rows
    address = 0xFF00_FFFF_FFE0_0000
    rows.pipeline.write_addresses("param", [address], 4)
    second = address + 4 * kernel_for(queue("cpu"), "sgd", "f32").shape.chunk
    column = rows.pipeline._blocks[0]._column["param"]
    assert column.astype("uint64").tolist() == [address, second]
