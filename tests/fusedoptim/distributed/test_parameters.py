"""Steps of DTensors of any placement, mixed with plain tensors, against whole references."""

from __future__ import annotations

import itertools
import sys
import weakref
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import Parameter

from fusedoptim import FusedAdam, FusedAdamW, FusedLamb, FusedSGD
from fusedoptim._torch_private import with_shard
from fusedoptim.step.sharding import local_of
from tests.fusedoptim.distributed.helpers import (
    SHAPES,
    ShardedSideBySide,
    flat_mesh,
    places,
    rank,
    square_mesh,
    whole,
)
from tests.fusedoptim.distributed.processes import on_processes
from tests.fusedoptim.helpers import bits
from tests.optimizer_cases import (
    ADAMW,
    LAMB,
    SPLIT_CASES,
    SPLIT_SGD,
    TORCHS_CASES,
    WHOLE_CASES,
)
from tests.tolerances import assert_as_exact


@on_processes(2)
def test_shards_that_are_not_on_the_device_of_their_mesh() -> None:
    """FSDP2's CPUOffloadPolicy keeps them on the CPU; here the mesh is of torch's meta device."""
    mesh = DeviceMesh("meta", [0, 1], _init_backend=False)

    def elsewhere(local: torch.Tensor) -> torch.Tensor:
        return with_shard(DTensor.from_local(local, mesh, [Shard(0)]), local)

    values, grads = torch.randn(3), torch.randn(2, 3)
    for case in TORCHS_CASES:
        param = Parameter(elsewhere(values.clone()))
        optimizer = case.make([param], **case.kwargs[-1])
        for grad in grads:
            param.grad = elsewhere(grad.clone())
            optimizer.step()

        def exact(case: Any = case) -> list[torch.Tensor]:
            alone = Parameter(values.double())
            reference = case.make_reference([alone], **case.kwargs[-1])
            for grad in grads:
                alone.grad = grad.double()
                reference.step()
            return [alone.detach()]

        assert_as_exact([param.to_local().detach()], exact, torch.float32)
        state = optimizer.state[param]
        assert {local_of(v).device.type for v in state.values() if v.ndim} <= {"cpu"}


@on_processes(2, 4)
def test_values() -> None:
    """Shapes may divide evenly or not, in every placement, with a plain tensor among them."""
    for mesh, dtype in ((flat_mesh(), torch.bfloat16), (square_mesh(), torch.float32)):
        chosen = [
            (torch.randn(shape).to(dtype), placements)
            for shape, placements in itertools.product(SHAPES, places(mesh))
        ]
        chosen[3:3] = [(torch.randn(4, dtype=dtype), None)]
        values, placements = zip(*chosen)
        for case in WHOLE_CASES:
            pair = ShardedSideBySide(case, values, mesh, placements)
            pair.train(2)
            pair.train(1, skip=(0, 3))


@on_processes(2)
def test_shards_of_several_rows() -> None:
    """The shards take several work-groups, take one, or are empty."""
    values = [torch.randn(40_000, 2), torch.randn(1, 40_000), torch.randn(30_000)]
    for case in WHOLE_CASES:
        ShardedSideBySide(case, values, flat_mesh(), [[Shard(0)]] * 3).train(2)


@on_processes(2)
def test_clipping() -> None:
    mesh = flat_mesh()
    values = [torch.randn(5, 7), torch.randn(9), torch.randn(4)]
    for case in WHOLE_CASES:
        pair = ShardedSideBySide(case, values, mesh, [[Shard(0)], [Shard(0)], None])
        for limit in (0.5, 100.0):
            pair.set_gradients()
            pair.check(limit=limit)


@on_processes(2)
def test_state_is_placed_as_torchs() -> None:
    flat = [(flat_mesh(), placements) for placements in places(flat_mesh())]
    square = [(square_mesh(), [first, Shard(1)]) for first in (Shard(0), Replicate())]
    for case, (mesh, placements) in itertools.product(TORCHS_CASES, [*flat, *square]):
        p = Parameter(distribute_tensor(torch.randn(5, 3), mesh, placements))
        q = Parameter(p.detach().clone())
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
        options = case.kwargs[-1]
        ours, theirs = case.make([p], **options), case.make_reference([q], **options)
        ours.step()
        theirs.step()
        assert ours.state[p].keys() == theirs.state[q].keys()
        for name, expected in theirs.state[q].items():
            state = ours.state[p][name]
            assert type(state) is type(expected)
            if isinstance(expected, DTensor):
                assert (state._spec, state.stride()) == (expected._spec, expected.stride())
                torch.testing.assert_close(state.to_local(), expected.to_local())


@on_processes(2)
def test_partial_gradients() -> None:
    """A step adds up the processes' partial gradients of a replicated parameter, as torch does."""
    mesh = flat_mesh()
    p = Parameter(distribute_tensor(torch.ones(3), mesh, [Replicate()]))
    q = Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    optimizer = FusedSGD([p, q], lr=1.0)
    plans = []
    for step in range(1, 4):
        p.grad = DTensor.from_local(torch.full((3,), 1.0 + rank()), mesh, [Partial()])
        q.grad = DTensor.from_local(torch.full((4,), 1.0), mesh, [Replicate()])
        given = p.grad
        optimizer.step()
        assert p.grad is given
        assert given.placements == (Partial(),)
        assert whole(p).eq(1 - 3 * step).all()
        assert whole(q).eq(1 - step).all()
        plans.append(optimizer._plan.groups[0])
    assert plans[1] is plans[2]


@on_processes(4)
def test_partial_gradients_on_a_mesh_of_two_dimensions() -> None:
    """Gradients that are partial sums along one dimension or both give the step of whole ones."""
    mesh = square_mesh()
    replicated = [[Replicate(), Shard(0)], [Shard(1), Replicate()], [Replicate(), Replicate()]]
    values = [torch.randn(5, 7) for _ in replicated]
    for case, limit in itertools.product((ADAMW, LAMB), (None, 0.5)):
        pair = ShardedSideBySide(case, values, mesh, replicated)
        for _ in range(2):
            pair.set_gradients()
            for p in pair.params:
                p.grad = as_partial_sums(p.grad)
            pair.check(limit=limit)


def as_partial_sums(grad: Any) -> DTensor:
    """The same gradient, whose values are sums over the dimensions where it is replicated."""
    places = [Partial() if place.is_replicate() else place for place in grad.placements]
    parts = 2 ** sum(place.is_partial() for place in places)  # of a power of 2, so sums are exact
    return DTensor.from_local(
        grad.to_local() / parts, grad.device_mesh, places, shape=grad.shape, stride=grad.stride()
    )


@on_processes(2)
def test_memory_of_other_order() -> None:
    """Shards may have gaps or be transposed, with gradients and state of another memory order."""
    mesh = flat_mesh()
    locals_ = [torch.randn(4, 6)[:, ::2], torch.randn(3, 4).t(), torch.randn(2, 3, 5, 7)]
    locals_.append(locals_[2].to(memory_format=torch.channels_last))
    for make in (lambda ps: FusedAdamW(ps), lambda ps: FusedLamb(ps, max_grad_norm=0.5)):
        params = [Parameter(DTensor.from_local(t.clone(), mesh, [Shard(0)])) for t in locals_]
        params[0] = Parameter(DTensor.from_local(locals_[0], mesh, [Shard(0)]))
        references = [Parameter(whole(p).double()) for p in params]
        ours, theirs = make(params), make(references)
        for _ in range(2):
            for p, reference in zip(params, references):
                grad = torch.randn_like(whole(p)).contiguous()
                p.grad = distribute_tensor(grad, mesh, [Shard(0)])
                reference.grad = grad.double()
            ours.step()
            theirs.step()
        for p, reference in zip(params, references):
            torch.testing.assert_close(whole(p).double(), reference, rtol=1e-4, atol=1e-5)


@on_processes(2)
def test_what_is_refused() -> None:
    mesh, other = flat_mesh(), init_device_mesh("cpu", (2, 1))
    value = torch.randn(4, 2)

    def sharded(placement: Any = None, on: Any = mesh) -> Any:
        places = [placement or Shard(0)] + [Replicate()] * (on.ndim - 1)
        return distribute_tensor(value, on, places)

    def step(param: Any, grad: Any, **state: Any) -> Any:
        p = Parameter(param)
        optimizer = FusedAdam([p])
        if state:
            optimizer.state[p].update(state)
        p.grad = grad
        return optimizer

    partial = DTensor.from_local(value, mesh, [Partial()])
    # from_local() does not accept sparse tensors, and torch's layers make no such gradient.
    sparse = DTensor(value[:2].to_sparse(), sharded()._spec, requires_grad=False)
    moments = {"exp_avg": sharded(), "exp_avg_sq": sharded(), "step": torch.tensor(1.0)}
    torn = DTensor.from_local(value[:1], mesh, [Shard(0)], shape=value.shape, stride=(2, 1))
    for optimizer, error, message in (
        (step(partial, partial), TypeError, "redistribute"),
        (step(sharded(), sparse), TypeError, "sparse=False"),
        (step(sharded(), sharded(on=other)), RuntimeError, "mesh of shape"),
        (step(sharded(), torn), RuntimeError, "shard of shape"),
        (step(sharded(), sharded(), **{**moments, "exp_avg": value}), ValueError, "not sharded"),
        (
            step(sharded(), sharded(), **{**moments, "exp_avg": sharded(Shard(1))}),
            ValueError,
            "set_optimizer_state_dict",
        ),
        (step(value, value.clone(), **{**moments, "exp_avg": sharded()}), TypeError, "no memory"),
    ):
        (p,) = optimizer.param_groups[0]["params"]
        before = whole(p) if p is not optimizer and not isinstance(p, DTensor) else p.to_local()
        before = before.detach().clone()
        with pytest.raises(error, match=message):
            optimizer.step()
        now = p.to_local() if isinstance(p, DTensor) else p
        assert torch.equal(now, before)


@on_processes(2)
def test_warm_steps_make_no_new_plan() -> None:
    """Steps reuse the plan, and take as many Python calls for many parameters as for few."""
    counts = []
    for count in (5, 50):
        params = [
            Parameter(distribute_tensor(torch.randn(8), flat_mesh(), [Shard(0)]))
            for _ in range(count)
        ]
        optimizer = FusedAdamW(params)
        for p in params:
            p.grad = torch.ones_like(p)
        for _ in range(3):
            optimizer.step()
        plan = optimizer._plan.groups[0]
        calls = [0]

        def count_calls(frame: Any, event: str, arg: Any, calls: list[int] = calls) -> None:
            calls[0] += event == "call"

        sys.setprofile(count_calls)
        optimizer.step()
        sys.setprofile(None)
        counts.append(calls[0])
        assert optimizer._plan.groups[0] is plan
    # The driver's bookkeeping depends on the size of what it submits.
    assert counts[1] <= counts[0] + 10


@on_processes(2)
def test_gradients_between_steps() -> None:
    """No gradient is kept alive. One on another mesh is refused, and the next ones are accepted."""
    mesh = flat_mesh()
    p = Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    idle = Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    optimizer = FusedSGD([idle, p], lr=1.0)
    plans = []
    for step in range(1, 7):
        if step == 4:
            p.grad = distribute_tensor(torch.ones(4), square_mesh(), [Shard(0), Replicate()])
            with pytest.raises(RuntimeError, match="mesh of shape"):
                optimizer.step()
        p.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        optimizer.step()
        assert whole(p).eq(1 - step).all()
        kept = weakref.ref(p.grad)
        p.grad = None
        assert kept() is None
        plans.append(optimizer._plan.groups[0])
    assert all(plan is plans[0] for plan in plans)
    assert whole(idle).eq(1).all()


@on_processes(2)
def test_swapped_for_other_placements() -> None:
    """torch.utils.swap_tensors keeps the parameter's object."""
    mesh = flat_mesh()
    values = torch.randn(4, 6)
    p, alone = Parameter(distribute_tensor(values, mesh, [Shard(0)])), Parameter(values.clone())
    optimizers = FusedSGD([p], max_grad_norm=1.0), FusedSGD([alone], max_grad_norm=1.0)
    for place in (Shard(0), Shard(1), Replicate(), Shard(0)):
        torch.utils.swap_tensors(p, Parameter(p.detach().redistribute(placements=[place])))
        for _ in range(3):
            alone.grad = torch.randn_like(alone)
            p.grad = distribute_tensor(alone.grad, mesh, [place])
            for optimizer in optimizers:
                optimizer.step()
        p.grad = None
        torch.testing.assert_close(whole(p), alone.detach())


@on_processes(2)
def test_split_parameters() -> None:
    """Upper halves and trails are sharded alike, and a pair of them is the exact value."""
    mesh = flat_mesh()
    values = [torch.randn(5, 7).bfloat16(), torch.randn(1, 3).bfloat16(), torch.randn(4).bfloat16()]
    for case in (SPLIT_SGD, *SPLIT_CASES):
        pair = ShardedSideBySide(case, values, mesh, [[Shard(0)], [Shard(0)], [Replicate()]])
        pair.train(2)
        trail = pair.ours.state[pair.params[0]]["trail"]
        assert (trail.dtype, trail.placements) == (torch.int16, (Shard(0),))


@on_processes(2)
def test_split_is_refused() -> None:
    """Splitting sharded float32 is refused: what sharded it would still hold the old values."""
    mesh = flat_mesh()
    p = Parameter(distribute_tensor(torch.randn(4), mesh, [Shard(0)]))
    with pytest.raises(TypeError, match="before fully_shard"):
        FusedAdamW([p], split=True)
    half = Parameter(p.detach().bfloat16())
    optimizer = FusedAdamW([p, half])
    with pytest.raises(TypeError, match="before fully_shard"):
        optimizer.split_params([p, half])
    optimizer.split_params([half])
    assert (p.dtype, half.dtype) == (torch.float32, torch.bfloat16)
    with pytest.raises(TypeError, match="stays split"):
        optimizer.merge_params([half])


@on_processes(2)
def test_same_bits_as_of_local_tensors() -> None:
    """A step of DTensors has the bits of one of their shards, also with 16-bit and 8-bit state."""
    mesh = flat_mesh()
    for state_dtype in (torch.float32, torch.bfloat16, "float8"):
        torch.manual_seed(rank())
        places = [Shard(0)], [Shard(1)], [Shard(0)]
        shards = [torch.randn(shape) for shape in ((3, 700), (5, 4), (9,))]
        params = [Parameter(DTensor.from_local(t.clone(), mesh, p)) for t, p in zip(shards, places)]
        alone = [Parameter(t.clone()) for t in shards]
        ours, locals_ = (FusedAdamW(ps, state_dtype=state_dtype) for ps in (params, alone))
        for _ in range(3):
            for p, q, place in zip(params, alone, places):
                q.grad = torch.randn_like(q)
                p.grad = DTensor.from_local(q.grad.clone(), mesh, place)
            ours.step()
            locals_.step()
        for p, q in zip(params, alone):
            assert torch.equal(p.to_local(), q)
            for name, expected in locals_.state[q].items():
                state = ours.state[p][name]
                assert isinstance(state, DTensor) == (name in ("exp_avg", "exp_avg_sq"))
                local = state.to_local() if isinstance(state, DTensor) else state
                assert torch.equal(bits(local), bits(expected))


@on_processes(4)
def test_processes_outside_of_the_mesh() -> None:
    """Processes outside the mesh have no elements; their steps work, also of other parameters."""
    mesh = DeviceMesh("cpu", [0, 1])
    torch.manual_seed(6)
    value = torch.randn(5, 3)
    for make in (lambda ps: FusedLamb(ps, max_grad_norm=1.0), FusedAdamW):
        p, whole_one = Parameter(distribute_tensor(value, mesh, [Shard(0)])), Parameter(value)
        ours, alone = make([p]), make([whole_one])
        for _ in range(2):
            p.grad, whole_one.grad = torch.ones_like(p), torch.ones_like(whole_one)
            ours.step()
            alone.step()
        if rank() < 2:
            torch.testing.assert_close(whole(p), whole_one.detach())
        else:
            assert p.to_local().numel() == 0
