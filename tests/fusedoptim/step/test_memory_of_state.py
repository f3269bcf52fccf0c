"""State and parameters whose memory moves, shrinks or is shared between steps."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.nn import Parameter

from fusedoptim import FusedAdagrad, FusedAdam, FusedSGD
from fusedoptim.step.tensors import update_order


def test_step_counts_moved_to_shared_memory() -> None:
    """The counts of all parameters are views of one tensor, so they move together."""
    pairs = [[Parameter(torch.ones(2)) for _ in range(500)] for _ in range(2)]
    ours, torchs = FusedAdam(pairs[0], lr=1.0), torch.optim.Adam(pairs[1], lr=1.0)
    for i in range(4):
        for p in pairs[0] + pairs[1]:
            p.grad = torch.ones(2)
        ours.step()
        torchs.step()
        if i == 1:
            ours.state[pairs[0][0]]["step"].share_memory_()
            junk = [torch.full((500,), 7.0) for _ in range(100)]
    assert [ours.state[p]["step"].item() for p in pairs[0]] == [4.0] * 500
    torch.testing.assert_close(pairs[0][3], pairs[1][3])
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
    with pytest.warns(UserWarning, match="duplicate parameters"):
        ours = FusedAdagrad([tables[0]] * 2, lr=1.0, lr_decay=1.0)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        torchs = torch.optim.Adagrad([tables[1]] * 2, lr=1.0, lr_decay=1.0, foreach=False)
    with torch.sparse.check_sparse_tensor_invariants(False):
        for _ in range(2):
            for p in tables:
                p.grad = torch.sparse_coo_tensor([[1, 3]], torch.ones(2, 2), (4, 2))
            ours.step()
            torchs.step()
    assert ours.state[tables[0]]["step"] == torchs.state[tables[1]]["step"] == 4
    torch.testing.assert_close(tables[0], tables[1])


def test_states_exchanged_between_parameters() -> None:
    pairs = [[Parameter(torch.zeros(2)) for _ in range(2)] for _ in range(2)]
    optimizers = [FusedSGD(pairs[0], momentum=0.5), torch.optim.SGD(pairs[1], momentum=0.5)]
    for i in range(3):
        for params, optimizer in zip(pairs, optimizers):
            for k, p in enumerate(params):
                p.grad = torch.full((2,), 1.0 + k)
            optimizer.step()
            if i == 1:
                states = [optimizer.state[p] for p in params]
                optimizer.state.clear()
                for p, state in zip(reversed(params), states):
                    optimizer.state[p] = state
    for ours, torchs in zip(*pairs):
        torch.testing.assert_close(ours, torchs)


def test_dropping_an_optimizer_frees_its_state() -> None:
    p = Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    gc.disable()
    try:
        optimizer = FusedAdam([p])
        optimizer.step()
        state = weakref.ref(optimizer.state[p]["exp_avg"])
        del optimizer
        assert state() is None
    finally:
        gc.enable()


def test_counts_are_on_the_cpu_whatever_the_default_device() -> None:
    p = Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = FusedAdam([p])
    torch.set_default_device("meta")
    try:
        optimizer.step()
    finally:
        torch.set_default_device(None)
    assert optimizer.state[p]["step"].device.type == "cpu"


def test_update_order_of_parameters_that_share_memory() -> None:
    base = torch.zeros(10)
    params = [base[0:4], base[2:6], torch.zeros(3), base[5:8], base[0:0], base[0:4], base[8:]]
    assert update_order(params) == [0, 1, 0, 2, 0, 2, 0]
