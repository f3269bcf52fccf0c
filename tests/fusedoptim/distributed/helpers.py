"""Sharded parameters compared with whole ones, and a model that torch can shard."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn import Parameter

from fusedoptim.step.sharding import MeshSum
from tests.fusedoptim.helpers import SideBySide, bits, exact_values, random_like, widened
from tests.optimizer_cases import OptimizerCase
from tests.tolerances import ARITHMETIC, Bounded, Exact, clipping, computed_exactly

Placements = Sequence[Any]


def rank() -> int:
    return torch.distributed.get_rank()


def size() -> int:
    return torch.distributed.get_world_size()


def flat_mesh() -> DeviceMesh:
    """A mesh of one dimension with all processes."""
    return init_device_mesh("cpu", (size(),))


def square_mesh() -> DeviceMesh:
    """A mesh of two dimensions: two rows of processes."""
    return init_device_mesh("cpu", (2, size() // 2), mesh_dim_names=("rows", "columns"))


def whole(tensor: Tensor) -> Tensor:
    """All elements of a tensor, sharded or not."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def all_whole(tensors: Sequence[Tensor]) -> list[Tensor]:
    """What :func:`whole` returns for each; one collective is faster than one for each tensor.

    Processes that have the same part of a tensor must have the same bits.
    """
    mesh = next((t.device_mesh for t in tensors if isinstance(t, DTensor)), None)
    if mesh is None:
        return [whole(tensor) for tensor in tensors]
    group = mesh.get_group() if mesh.ndim == 1 else None
    gathered: list[Any] = [None] * mesh.size()
    torch.distributed.all_gather_object(gathered, list(map(_part, tensors)), group)
    return list(map(_joined, tensors, zip(*gathered)))


def _part(tensor: Tensor) -> tuple[Any, Any, bytes]:
    """Where this process's part of a tensor begins, its shape and its bits."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tensor.shape, bits(tensor).numpy().tobytes()
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    local = tensor.to_local()
    assert local.shape == shape
    return offset, shape, bits(local).numpy().tobytes()


def _joined(tensor: Tensor, parts: Sequence[tuple[Any, Any, bytes]]) -> Tensor:
    found = torch.empty(tensor.shape, dtype=tensor.dtype)
    seen: dict[Any, bytes] = {}
    for offset, shape, content in parts:
        if 0 not in shape and (offset, shape) not in seen:
            place = [slice(first, first + size) for first, size in zip(offset, shape)]
            part = torch.frombuffer(bytearray(content), dtype=tensor.dtype)
            found[tuple(place)] = part.view(shape)
        assert seen.setdefault((offset, shape), content) == content
    assert sum(math.prod(shape) for _, shape in seen) == tensor.numel()
    return found


def places(mesh: DeviceMesh) -> list[Placements]:
    """Every kind of placement on a mesh of one or two dimensions."""
    if mesh.ndim == 1:
        return [[Shard(0)], [Shard(1)], [Replicate()]]
    one = [Shard(0), Shard(1), Replicate()]
    return [[a, b] for a in one for b in one]


SHAPES = ((5, 7), (1, 3), (16, 24), (3, 0))
"""Shapes whose shards have equal sizes, different sizes, or no elements."""


class ShardedSideBySide(SideBySide):
    """An optimizer of sharded parameters, and a reference of the whole ones.

    A placement of None leaves a parameter whole and the same on each process. The first process
    alone takes the reference's steps and compares: it gets the elements of all.
    """

    def __init__(
        self,
        case: OptimizerCase,
        values: Sequence[Tensor],
        mesh: DeviceMesh,
        placements: Sequence[Placements | None],
        **kwargs: Any,
    ) -> None:
        self._mesh, self._placements = mesh, placements
        self._like = values
        params = [Parameter(part) for part in self.parts(values)]
        super().__init__(case, {**case.kwargs[-1], **kwargs}, params)
        self.kwargs.pop("max_grad_norm", None)

    def _values(self) -> dict[Tensor, Tensor]:
        values = exact_values(self.ours)
        return dict(zip(values, all_whole(list(values.values()))))

    def parts(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The tensors, sharded as the parameters are."""
        return [
            value.clone()
            if places is None
            else distribute_tensor(value, self._mesh, places, src_data_rank=None)
            for value, places in zip(values, self._placements)
        ]

    def _step_reference(self) -> None:
        if rank() == 0:
            super()._step_reference()

    def _compare(self, *found: Any) -> None:
        if rank() == 0:
            super()._compare(*found)

    def set_gradients(self, skip: Sequence[int] = ()) -> None:
        grads = [random_like(value) for value in self._like]
        parts = self.parts(grads)
        for i, (p, reference) in enumerate(zip(self.params, self.references)):
            p.grad = reference.grad = None
            if i not in skip:
                p.grad, reference.grad = parts[i].to(p.dtype), widened(grads[i].to(p.dtype))
        self._grads = [p.grad.clone() for p in self.references if p.grad is not None]

    def _clipping(self) -> Bounded | None:
        if self.ours.max_grad_norm is None:
            return None
        return clipping(self._grads, self.ours.max_grad_norm, ARITHMETIC[self.params[0].dtype])

    _whole = staticmethod(all_whole)


def computed_once(exact: Callable[[], Sequence[Tensor]]) -> Exact:
    """What float32 weights are compared with: the first process computes it, and all get it."""
    found: list[Any] = [None]
    if rank() == 0:
        with torch.random.fork_rng(devices=[]):  # the same numbers follow in all processes
            found = [computed_exactly(exact, torch.float32)]
    torch.distributed.broadcast_object_list(found, 0)
    result: Exact = found[0]
    return result


@contextlib.contextmanager
def counted_collectives() -> Iterator[list[int]]:
    """Count the collectives that steps start; the list that is yielded holds the count."""
    counts = [0]
    groups = MeshSum._groups

    class Counting:
        def __init__(self, group: Any) -> None:
            self._group = group

        def allreduce(self, tensors: Any) -> Any:
            counts[0] += 1
            return self._group.allreduce(tensors)

    MeshSum._groups = lambda self: list(map(Counting, groups(self)))  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        MeshSum._groups = groups  # type: ignore[method-assign]


class Block(nn.Module):
    """Two layers that can be sharded by columns and rows, between a norm and a head."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, width)
        self.down = nn.Linear(width, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(self.up(self.norm(x)).tanh()))  # type: ignore[no-any-return]
