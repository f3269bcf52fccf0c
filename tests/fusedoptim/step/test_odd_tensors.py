"""Tensors in unusual memory: each of these once gave a wrong result or a crash."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from fusedoptim import FusedSGD
from fusedoptim.allocator import queue
from fusedoptim.launch import pipeline
from fusedoptim.launch.cpu import CPU
from fusedoptim.launch.kernel import kernel_for
from fusedoptim.step import commit
from tests.fusedoptim.helpers import run_in_threads


def _steps(params: list[Tensor], grads: list[Tensor], count: int = 1) -> list[Tensor]:
    """Step with FusedSGD; return torch's result for copies that share memory in the same way."""
    storages: dict[int, Tensor] = {}
    copies = []
    for p in params:
        key = p.untyped_storage().data_ptr()
        storage = storages.setdefault(
            key, torch.tensor([], dtype=p.dtype).set_(p.untyped_storage().clone())
        )
        copy = storage.as_strided(p.shape, p.stride(), p.storage_offset())
        copies.append(Parameter(copy.conj() if p.is_conj() else copy))
    for p, copy, grad in zip(params, copies, grads):
        p.grad, copy.grad = grad, grad
    ours = FusedSGD(params, lr=1.0, momentum=0.5)
    torchs = torch.optim.SGD(copies, lr=1.0, momentum=0.5, foreach=False)
    for _ in range(count):
        ours.step()
        torchs.step()
    return copies


def _with_ones(*shape: int, momentum: float = 0.0) -> tuple[Parameter, FusedSGD]:
    """A parameter of zeros, with a gradient of ones, and its optimizer."""
    p = Parameter(torch.zeros(shape))
    p.grad = torch.ones(shape)
    return p, FusedSGD([p], lr=1.0, momentum=momentum)


def test_lazily_negated_gradient() -> None:
    p = Parameter(torch.tensor([0.0]))
    optimizer = FusedSGD([p], lr=1.0)
    for expected in (-1.0, -2.0):
        optimizer.zero_grad()
        z = torch.complex(torch.zeros(1), p).conj()
        (z * torch.tensor([1j])).real.sum().backward()
        assert p.grad is not None
        assert p.grad.is_neg()
        optimizer.step()
        assert p.item() == expected


def test_lazily_conjugated_parameter() -> None:
    p = Parameter(torch.tensor([1 + 2j, 3 - 1j]).conj())
    (expected,) = _steps([p], [torch.tensor([1j, 1j])], count=2)
    assert torch.equal(p, expected)


def test_parameter_conjugated_between_steps() -> None:
    p = Parameter(torch.tensor([1j]))
    p.grad = torch.tensor([1j])
    optimizer = FusedSGD([p], lr=1.0)
    optimizer.step()
    p.data = p.data.conj()
    optimizer.step()
    assert p.item() == -1j


def test_gradient_without_memory() -> None:
    p = Parameter(torch.ones(4))
    p.grad = torch._efficientzerotensor(4)
    with pytest.raises(TypeError, match=r"no memory of its own; clone\(\) it"):
        FusedSGD([p], lr=1.0).step()
    optimizer = FusedSGD([p], lr=1.0)
    p.grad = torch.ones(4)
    optimizer.step()
    p.grad = torch._efficientzerotensor(4)
    with pytest.raises(TypeError, match="no memory of its own"):
        optimizer.step()


def test_parameter_transposed_at_the_same_address() -> None:
    p, optimizer = _with_ones(2, 2)
    p.grad = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    optimizer.step()
    p.data = p.data.t()
    optimizer.step()
    assert p.tolist() == [[0.0, -1.0], [-1.0, 0.0]]


def test_state_transposed_at_the_same_address() -> None:
    p, optimizer = _with_ones(2, 2, momentum=1.0)
    p.grad = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    optimizer.step()
    state = optimizer.state[p]
    state["momentum_buffer"] = state["momentum_buffer"].t()
    optimizer.step()
    assert p.tolist() == [[0.0, -2.0], [-1.0, 0.0]]


def test_parameters_that_share_memory() -> None:
    p = Parameter(torch.zeros(1_000_000))
    q = Parameter(p.data)
    _, expected = _steps([p, q], [torch.ones_like(p), torch.full_like(p, 10.0)], count=5)
    assert torch.equal(p, expected)


def test_views_of_one_memory() -> None:
    base = torch.zeros(8)
    params = [Parameter(base[::2]), Parameter(base), Parameter(base[::2]), Parameter(base[4:])]
    expected = _steps(params, [torch.ones_like(p) for p in params], count=3)
    assert torch.equal(params[1], expected[1])


def test_a_step_in_the_middle_of_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt during a launch loses neither the state nor the wait for its end."""
    params = [Parameter(torch.zeros(100_000)), Parameter(torch.zeros(16)[::2])]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = FusedSGD([{"params": [p]} for p in params], lr=1.0, momentum=0.5)

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
    """The error names it, and no group is updated."""
    params = [Parameter(torch.zeros(3)) for _ in range(2)]
    optimizer = FusedSGD([{"params": [p]} for p in params], lr=1.0, momentum=0.5)
    for p in params:
        p.grad = torch.ones(3)
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


def test_option_set_after_a_step() -> None:
    _, optimizer = _with_ones(3)
    optimizer.step()
    optimizer.param_groups[0]["differentiable"] = True
    with pytest.raises(RuntimeError, match="differentiable=True"):
        optimizer.step()


def test_tensor_momentum_changed_in_place() -> None:
    p = Parameter(torch.zeros(1))
    p.grad = torch.ones(1)
    momentum = torch.tensor(0.5)
    optimizer = FusedSGD([p], lr=1.0, momentum=momentum)  # type: ignore[arg-type]
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


def test_removed_group_is_forgotten() -> None:
    params = [Parameter(torch.zeros(3)) for _ in range(2)]
    for p in params:
        p.grad = torch.ones(3)
    optimizer = FusedSGD([{"params": [p]} for p in params], lr=1.0)
    optimizer.step()
    gone = weakref.ref(params.pop())
    del p, optimizer.param_groups[1]
    optimizer.step()
    gc.collect()
    assert gone() is None


def test_one_optimizer_in_two_threads() -> None:
    """Each prepares its own launch while the other one's may be running."""
    params = [Parameter(torch.zeros(2000)) for _ in range(64)]
    for p in params:
        p.grad = torch.ones(2000)
    optimizer = FusedSGD(params, lr=1.0)

    def work() -> None:
        for _ in range(100):
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()

    run_in_threads(work, work)
    assert all(p.unique().tolist() == [-200.0] for p in params)


def test_block_outlives_the_kernel_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a step does not wait, but freeing its block does; the CPU stands in for one."""
    monkeypatch.setattr(CPU, "runs_on_host", False)
    params = [Parameter(torch.zeros(100_000)) for _ in range(100)]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = FusedSGD(params, lr=1.0)
    optimizer.step()
    del optimizer
    assert all(p.unique().tolist() == [-1.0] for p in params)


@pytest.mark.parametrize("few", [0, 2])
def test_address_beyond_2_to_the_63(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs have them. Few rows are written one by one, more rows as an array."""
    monkeypatch.setattr(pipeline, "_FEW", few)
    p = Parameter(torch.zeros(40_000))  # two rows
    p.grad = torch.zeros(40_000)
    optimizer = FusedSGD([p], lr=1.0)
    optimizer.step()
    (rows,) = optimizer._plan.groups[0].rows
    address = 0xFF00_FFFF_FFE0_0000
    rows._pipeline.write_addresses("param", [address], 4)
    second = address + 4 * kernel_for(queue("cpu"), "sgd", "f32").shape.chunk
    column = rows._pipeline._blocks[0]._column["param"]
    assert column.astype("uint64").tolist() == [address, second]
