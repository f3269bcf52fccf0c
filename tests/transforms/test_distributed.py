"""Models in torch's own wrappers are refused with a remedy, and the remedy works.

The tests run in a process of their own, with a process group of one process on the CPU.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from fusedoptim import transforms
from tests.fusedoptim.distributed.processes import on_processes
from tests.transforms.models import small
from transforms.rewrites import onednn_products

ROUNDINGS = 3 * 5 * 4
"""Three steps of a network of five layers, whose roundings each count a few times."""


def wrap(wrapper: str, model: nn.Module) -> nn.Module:
    if wrapper == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if wrapper == "fsdp":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return small()


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: Any, dtype: torch.dtype | None = None) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
            output = model(torch.randn(4, 3, 4, 4, generator=generator))
        output.float().square().mean().backward()
        optimizer.step()


def refuse(*arguments: Any) -> None:
    for inplace in (False, True):
        with pytest.raises(TypeError, match="optimize the model inside first, then wrap"):
            transforms.optimize(*arguments, inplace=inplace)


def check_refused(wrapper: str) -> None:
    model = wrap(wrapper, network())
    weights = [p.detach().clone() for p in model.parameters()]
    optimizer = sgd(model)
    refuse(model, optimizer)
    refuse(model.eval())
    if wrapper != "ddp":
        inside = (model.module if wrapper == "fsdp" else model[4]).train()  # type: ignore[index,union-attr]
        refuse(inside, sgd(inside))
    assert type(optimizer) is torch.optim.SGD
    assert all(map(torch.equal, model.parameters(), weights))
    train(model.train(), optimizer)


def check_split_is_refused() -> None:
    """Splitting the weights of a model inside DDP would drop the hooks that average gradients."""
    wrapped = wrap("ddp", network().train())
    inside = wrapped.module
    optimizer = sgd(inside)
    with pytest.raises(RuntimeError, match=r"before DistributedDataParallel\(model\)"):
        transforms.optimize(inside, optimizer, dtype=torch.bfloat16, inplace=True)
    assert type(optimizer) is torch.optim.SGD
    assert all(p.dtype == torch.float32 for p in inside.parameters())


def check_restore_is_refused(model: nn.Module, optimizer: Any) -> None:
    """Merging them would do the same; nothing is restored."""
    halves = list(optimizer.halves)
    assert halves
    with pytest.raises(RuntimeError, match="delete the wrapper first"):
        transforms.restore(model, optimizer)
    assert type(optimizer) is not torch.optim.SGD
    assert list(optimizer.halves) == halves
    assert all(p.dtype == torch.bfloat16 for p in halves)


def check_lower_halves_of_loaded_weights() -> None:
    """They stay when a model is loaded or moved, and are zero when DDP has written the upper."""
    loaded = network().state_dict()
    for name, _ in network().named_parameters():
        loaded[name] = torch.randn_like(loaded[name])
    model = network().train()
    model, _ = transforms.optimize(model, sgd(model), dtype=torch.bfloat16)
    halves = {name for name, p in model.named_parameters() if p.dtype == torch.bfloat16}
    assert halves
    model.load_state_dict(loaded)
    model.to("cpu")
    assert all(torch.equal(model.state_dict()[name], loaded[name]) for name in halves)
    wrap("ddp", model)
    uppers = dict(model.named_parameters())
    assert all(torch.equal(model.state_dict()[name], uppers[name].float()) for name in halves)


def check_cure(wrapper: str) -> None:
    is_ddp = wrapper == "ddp"
    plain = wrap(wrapper, network())
    train(plain, sgd(plain))
    for dtype in (None, torch.bfloat16) if is_ddp else (None,):
        model = network()
        # With channels_last weights, fully_shard raises, and torch 2.13's FSDP computes wrong
        # results.
        is_last = None if is_ddp else False
        model, optimizer = transforms.optimize(
            model, sgd(model), dtype=dtype, auto_channels_last=is_last
        )
        wrapped = wrap(wrapper, model)
        # FSDP replaces the parameters, as for any model.
        train(wrapped, optimizer if is_ddp else sgd(wrapped), dtype)
        eps = torch.finfo(dtype or torch.float32).eps
        states = wrapped.state_dict(), plain.state_dict()
        assert states[0].keys() == states[1].keys()
        for key, value in states[0].items():
            assert value.dtype == states[1][key].dtype
            off = torch.dist(value.float(), states[1][key].float())
            assert off <= ROUNDINGS * eps * states[1][key].float().norm(), (key, off)
        if is_ddp:
            if dtype is not None:
                check_restore_is_refused(model, optimizer)
            del wrapped
            transforms.restore(model, optimizer)
            assert type(optimizer) is torch.optim.SGD
            assert all(p.dtype == torch.float32 for p in model.parameters())


def check(wrapper: str) -> None:
    check_refused(wrapper)
    with (  # as for large products, on a processor where the pass applies
        mock.patch.object(onednn_products, "objection", return_value=None),
        mock.patch.object(onednn_products, "LEAST_PRODUCTS", 1),
    ):
        check_cure(wrapper)


@on_processes(1)
def test_ddp() -> None:
    check("ddp")
    check_split_is_refused()
    check_lower_halves_of_loaded_weights()


@on_processes(1)
def test_fsdp() -> None:
    check("fsdp")


@on_processes(1)
def test_fsdp2() -> None:
    check("fsdp2")
