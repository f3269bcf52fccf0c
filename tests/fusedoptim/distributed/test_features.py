"""Each of our classes with each of torch's features for several processes.

docs/distributed.md has the table. Each of its cells is tested here, or in test_models.py if it is
about sharded models: it works, or is refused.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from fusedoptim import FusedAdamW, FusedLamb
from fusedoptim.nn import MergedEmbeddingBag
from fusedoptim.offload import OffloadOptimizer
from tests.fusedoptim.distributed.helpers import Block, flat_mesh, rank, size
from tests.fusedoptim.distributed.processes import on_processes
from tests.fusedoptim.distributed.training import (
    LIMIT,
    SPLITS,
    assert_trained,
    batches,
    checked_updates,
    fsdp1,
    loss_of,
    make,
    new_model,
    own_batches,
    train,
)
from tests.fusedoptim.helpers import bits, refused
from tests.optimizer_cases import (
    ADAMW,
    CASES,
    LAMB,
    WHOLE_CASES,
    OptimizerCase,
)

with warnings.catch_warnings():  # these modules use torch.jit, which is deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import (
        PostLocalSGDOptimizer,
        ZeroRedundancyOptimizer,
        _apply_optimizer_in_backward,
    )


def ddp(model: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, **options)


@on_processes(2)
def test_ddp() -> None:
    for case in WHOLE_CASES:
        for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
            model = ddp(new_model(), **options)
            train(model, make(case, model))
            assert_trained(model, case)


@on_processes(2)
def test_ddp_with_the_optimizer_on_the_host() -> None:
    for case in WHOLE_CASES:
        model = ddp(new_model())
        optimizer = OffloadOptimizer(
            model.parameters(), case.cls, copy_in_backward=False, **case.always, **case.kwargs[-1]
        )
        train(model, optimizer)
        assert_trained(model, case)


@on_processes(2)
def test_collectives_by_hand_with_the_optimizer_on_the_host() -> None:
    for case in WHOLE_CASES:
        model = new_model()
        for p in model.parameters():
            p.data.add_(rank())
        optimizer = OffloadOptimizer(
            model.parameters(), case.cls, copy_in_backward=False, **case.always, **case.kwargs[-1]
        )
        for p in model.parameters():
            torch.distributed.broadcast(p.data, 0)
        optimizer.weights_changed()
        for batch in own_batches():
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            for p in model.parameters():
                torch.distributed.all_reduce(p.grad)
                p.grad.data.div_(size())
            optimizer.step()
        assert_trained(model, case)


@on_processes(2)
def test_ddp_no_sync() -> None:
    """Gradients of two halves of a batch accumulate before they are reduced over processes."""
    for case in WHOLE_CASES:
        model = ddp(new_model(), gradient_as_bucket_view=True)
        optimizer = make(case, model)
        for batch in own_batches():
            optimizer.zero_grad()
            first, second = batch.chunk(2)
            with model.no_sync():
                (loss_of(model, first) / 2).backward()
            (loss_of(model, second) / 2).backward()
            optimizer.step()
        assert_trained(model, case)


@on_processes(2)
def test_ddp_with_tables_that_backward_updates() -> None:
    """Each process would update its replica by its own batch, so this is refused."""

    class Model(nn.Module):
        def __init__(self, optimizer: str | None) -> None:
            super().__init__()
            self.tables = MergedEmbeddingBag([(10, 4)], optimizer)
            self.top = nn.Linear(4, 1)

        def forward(self, indices: Tensor) -> Tensor:
            result: Tensor = self.top(self.tables([indices], [torch.tensor([0])])[0])
            return result

    indices, name = torch.tensor([rank()]), "tables.0.weight"
    wrapped = ddp(Model("sgd"))
    with pytest.raises(RuntimeError, match=f"the table '{name}' is in a DistributedDataParallel"):
        wrapped(indices)
    with torch.no_grad():
        wrapped(indices)
    averaged = ddp(Model(None))
    averaged(indices).sum().backward()
    grad = averaged.module.tables[0].weight.grad
    assert grad[:2].abs().sum(1).bool().all()
    own = Model("sgd")  # whose tables differ on purpose
    before = own.tables[0].weight.clone()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(own, [name])
    ddp(own)(indices).sum().backward()
    changed = (own.tables[0].weight != before).any(1)
    assert changed.nonzero().flatten().tolist() == [rank()]


@on_processes(2)
def test_split_inside_ddp_is_refused() -> None:
    """A new dtype would drop the hooks that average gradients; nothing is converted."""
    offload = functools.partial(
        OffloadOptimizer, optimizer_class=FusedAdamW, copy_in_backward=False, bucket_cap_mb=1e-5
    )
    for kind in (FusedAdamW, FusedLamb, offload):
        model = ddp(new_model())
        with pytest.raises(RuntimeError, match=r"before DistributedDataParallel\(model\)"):
            kind(model.parameters(), lr=0.1, split=True)
        assert all(p.dtype == torch.float32 for p in model.parameters())
        train(model, make(ADAMW, model))
        assert_trained(model, ADAMW)


@on_processes(2)
def test_ddp_of_split_replicas_that_began_differently() -> None:
    """DDP copies rank 0's weights to all processes, but not the lower halves."""
    offload = functools.partial(
        OffloadOptimizer, optimizer_class=FusedAdamW, copy_in_backward=False
    )
    for kind in (FusedAdamW, offload):
        torch.manual_seed(rank())
        model = Block()
        optimizer = kind(model.parameters(), lr=1e-3, split=True)
        wrapped = ddp(model)
        for batch in own_batches(torch.bfloat16):
            optimizer.zero_grad()
            loss_of(wrapped, batch).backward()
            optimizer.step()
            for value in optimizer.master_params():
                theirs = value.clone()
                torch.distributed.broadcast(theirs, 0)
                assert torch.equal(value, theirs)


@on_processes(2)
def test_merge_inside_ddp_is_refused() -> None:
    model = new_model().down
    optimizer = FusedAdamW(model.parameters())
    optimizer.split_params([model.weight])
    wrapped = ddp(model)
    values = list(optimizer.master_params())
    with pytest.raises(RuntimeError, match="delete the wrapper first"):
        optimizer.merge_params([model.weight])
    assert optimizer.is_split(model.weight)
    del wrapped
    loss = model.weight.sum()  # its graph holds the same node
    optimizer.merge_params([model.weight])
    del loss
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert all(map(torch.equal, model.parameters(), values))


@on_processes(2)
def test_ddp_with_compressed_gradients() -> None:
    for case in WHOLE_CASES:
        model = DistributedDataParallel(new_model())
        # In a lambda, as torch recognizes the hook by its name and refuses it without a GPU.
        model.register_comm_hook(
            None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)
        )
        optimizer = make(case, model)
        with checked_updates(case, optimizer):
            train(model, optimizer)


def split_then_ddp(make: Callable[[nn.Module], Any], **options: Any) -> tuple[nn.Module, Any]:
    model = new_model()
    optimizer = make(model)
    return ddp(model, **options), optimizer


@on_processes(2)
def test_split_weights() -> None:
    """Steps with DDP are exact, and clip, with float32 weights that are split before."""
    choices: tuple[dict[str, bool], ...] = (
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
    )
    for options, case in itertools.product(choices, SPLITS):
        make_clipping = functools.partial(make, case, max_grad_norm=LIMIT)
        model, optimizer = split_then_ddp(make_clipping, **options)
        with checked_updates(case, optimizer, LIMIT):
            train(model, optimizer)


@on_processes(2)
def test_split_weights_after_clip_grad_norm() -> None:
    for case in SPLITS:
        model, optimizer = split_then_ddp(functools.partial(make, case))
        with checked_updates(case, optimizer):
            train(model, optimizer, clip=LIMIT)


@on_processes(2)
def test_split_weights_with_no_sync_and_compressed_gradients() -> None:
    for case in SPLITS:
        model, optimizer = split_then_ddp(functools.partial(make, case))
        model.register_comm_hook(
            None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)
        )
        with checked_updates(case, optimizer):
            for batch in own_batches(torch.bfloat16):
                optimizer.zero_grad()
                with model.no_sync():
                    loss_of(model, batch).backward()
                loss_of(model, batch).backward()
                optimizer.step()


def assert_zero_resumes(model: nn.Module, optimizer: Any, case: OptimizerCase) -> None:
    """torch's class loads the state itself, lower halves included."""
    train(model, optimizer)
    optimizer.consolidate_state_dict(0)
    saved = [optimizer.state_dict() if rank() == 0 else None]
    distributed.broadcast_object_list(saved)
    other = ddp(new_model().bfloat16())
    other.load_state_dict(model.state_dict())
    loaded = ZeroRedundancyOptimizer(
        other.parameters(), optimizer_class=case.cls, **case.always, **case.kwargs[-1]
    )
    loaded.load_state_dict(copy.deepcopy(saved[0]))  # which may share the state's memory
    both = loaded.optim, optimizer.optim
    assert all(map(torch.equal, *(each.master_params() for each in both)))
    for resumed, its_optimizer in (model, optimizer), (other, loaded):
        train(resumed, its_optimizer)
    for p, expected in zip(other.parameters(), model.parameters()):
        assert torch.equal(bits(p), bits(expected))
    assert all(map(torch.equal, *(each.master_params() for each in both)))


@on_processes(2)
def test_zero_redundancy() -> None:
    for case in (*CASES, *SPLITS[1:]):
        for as_views in (False, True):
            model = ddp(new_model().bfloat16() if case.is_split else new_model())
            optimizer = ZeroRedundancyOptimizer(
                model.parameters(),
                optimizer_class=case.cls,
                parameters_as_bucket_view=as_views,
                **case.always,
                **case.kwargs[-1],
            )
            if case.is_split:
                assert_zero_resumes(model, optimizer, case)
                continue
            train(model, optimizer)
            assert_trained(model, case)


@on_processes(2)
def test_zero_redundancy_clips_what_each_process_updates() -> None:
    for case in WHOLE_CASES:
        model = ddp(new_model())
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(),
            optimizer_class=case.cls,
            max_grad_norm=LIMIT,
            **case.always,
            **case.kwargs[-1],
        )
        with checked_updates(case, optimizer.optim, LIMIT, is_alone=True):
            train(model, optimizer)


@on_processes(2)
def test_zero_redundancy_of_float32_is_not_split() -> None:
    """Each process would convert the parameters that it updates, and no others."""
    for as_views in (False, True):
        model = new_model()
        with pytest.raises(TypeError, match=r"is float32, and ZeroRedundancy.*model\.bfloat16"):
            ZeroRedundancyOptimizer(
                model.parameters(),
                optimizer_class=FusedAdamW,
                parameters_as_bucket_view=as_views,
                split=True,
            )
        assert {p.dtype for p in model.parameters()} == {torch.float32}


@on_processes(2)
def test_zero_redundancy_with_overlap_is_refused() -> None:
    """torch refuses it, as it has functional versions of its own classes only."""
    for case in CASES:
        with pytest.raises(ValueError, match="functional"):
            ZeroRedundancyOptimizer(
                new_model().parameters(), optimizer_class=case.cls, overlap_with_ddp=True, lr=0.1
            )


@on_processes(2)
def test_optimizer_in_backward() -> None:
    """Each parameter has an optimizer, stepped by its hook, even if it is a shard of FSDP2."""
    cases = *WHOLE_CASES, *SPLITS
    limits = None, LIMIT / 100  # below the norm of each parameter
    for case, is_sharded, limit in itertools.product(cases, (False, True), limits):
        model = new_model().bfloat16() if case.is_split else new_model()
        if is_sharded:
            model = fully_shard(model, mesh=flat_mesh())
        with contextlib.ExitStack() as stack:
            for p in model.parameters():
                optimizer = case.make([p], **case.kwargs[-1], max_grad_norm=limit)
                if case.is_split or limit is not None:
                    stack.enter_context(checked_updates(case, optimizer, limit))

                def hook(p: Tensor, optimizer: Any = optimizer) -> None:
                    optimizer.step()
                    p.grad = None

                p.register_post_accumulate_grad_hook(hook)
            dtype = next(model.parameters()).dtype
            for batch in own_batches(dtype) if is_sharded else batches(dtype=dtype):
                loss_of(model, batch).backward()
        assert all(p.grad is None for p in model.parameters())
        if not case.is_split and limit is None:
            assert_trained(model, case)


@on_processes(2)
def test_apply_optimizer_in_backward() -> None:
    for case in WHOLE_CASES:
        model = new_model()
        _apply_optimizer_in_backward(case.cls, model.parameters(), case.kwargs[-1])
        for batch in batches():
            loss_of(model, batch).backward()
        assert_trained(model, case)
        wrapped = ddp(model)
        # Torch's own code needs one. The build for CUDA says so in other words.
        with pytest.raises(RuntimeError, match=r"accelerator|create a new Stream"):
            loss_of(wrapped, next(own_batches())).backward()
    for case in SPLITS:
        model = new_model().bfloat16()
        _apply_optimizer_in_backward(case.cls, model.parameters(), case.always | case.kwargs[-1])
        with contextlib.ExitStack() as stack:
            for p in model.parameters():
                (optimizer,) = p._in_backward_optimizers
                stack.enter_context(checked_updates(case, optimizer))
            for batch in batches(dtype=torch.bfloat16):
                loss_of(model, batch).backward()
    model = new_model()
    with pytest.raises(RuntimeError, match="would lose the hooks"):  # of this very function
        _apply_optimizer_in_backward(FusedAdamW, model.parameters(), {"split": True})


@on_processes(2)
def test_max_grad_norm() -> None:
    """The norm is the whole gradients', wherever the shards are."""
    offload = CPUOffloadPolicy(pin_memory=False)
    ways: list[Callable[[nn.Module], nn.Module]] = [
        DistributedDataParallel,
        functools.partial(DistributedDataParallel, gradient_as_bucket_view=True),
        functools.partial(DistributedDataParallel, static_graph=True),
        functools.partial(fully_shard, mesh=flat_mesh(), offload_policy=offload),
    ]
    for case, way in itertools.product((ADAMW, LAMB), ways):
        model = way(new_model())
        train(model, case.make(model.parameters(), **case.kwargs[-1], max_grad_norm=0.1))
        assert_trained(model, case, limit=0.1)


@on_processes(2)
def test_after_clip_grad_norm() -> None:
    for case in WHOLE_CASES:
        model = fully_shard(new_model(), mesh=flat_mesh())
        train(model, make(case, model), clip=0.1)
        assert_trained(model, case, limit=0.1)


@on_processes(2)
def test_post_local_sgd() -> None:
    """Each process trains alone, with the norm of its own gradients; the weights are averaged."""
    groups = [torch.distributed.new_group([i]) for i in range(size())]
    alone = groups[rank()]
    for case, limit in itertools.product(WHOLE_CASES, (None, LIMIT)):
        results = []
        for dtype in (torch.float32, torch.float64):
            model = DistributedDataParallel(new_model().to(dtype))
            state = PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=1)
            model.register_comm_hook(state, post_localSGD_hook)
            is_ours = dtype is torch.float32
            options = {**case.kwargs[-1], **({"max_grad_norm": limit} if is_ours else {})}
            averager = PeriodicModelAverager(period=2, warmup_steps=1)
            local = (case.make if is_ours else case.make_reference)(model.parameters(), **options)
            optimizer = PostLocalSGDOptimizer(optim=local, averager=averager)
            for batch in own_batches(dtype):
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                if limit is not None and not is_ours:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
                optimizer.step()
            results.append([p.detach().double() for p in model.parameters()])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@on_processes(2)
def test_post_local_sgd_of_split_weights_is_refused() -> None:
    """It averages upper halves alone; nothing is written."""
    for case in SPLITS:
        model, local = split_then_ddp(functools.partial(make, case))
        averager = PeriodicModelAverager(period=2, warmup_steps=1)
        optimizer = PostLocalSGDOptimizer(optim=local, averager=averager)
        loss_of(model, next(own_batches(torch.bfloat16))).backward()
        with refused(local, RuntimeError, "upper halves of split parameters"):
            optimizer.step()
        local.step()


@on_processes(2)
def test_fsdp1() -> None:
    """FSDP1's parameters are pieces without a mesh; updates that need no norm are right."""
    for case in (case for case in WHOLE_CASES if case.is_elementwise):
        model = fsdp1(new_model())
        train(model, make(case, model))
        with FullyShardedDataParallel.summon_full_params(model):
            assert_trained(model, case)


@on_processes(2)
def test_split_of_fsdp1_is_refused() -> None:
    """It would train, but torch could not save the lower halves."""
    for dtype in (torch.float32, torch.bfloat16):
        model = fsdp1(new_model().to(dtype))
        with pytest.raises(TypeError, match="use fully_shard"):
            FusedAdamW(model.parameters(), split=True)
        assert {p.dtype for p in model.parameters()} == {dtype}
