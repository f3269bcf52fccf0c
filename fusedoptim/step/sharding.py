"""Parameters that are spread over processes: their local shards, and sums over a mesh of processes.

torch's DTensor is a tensor whose elements are divided among processes, or replicated, along each
dimension of a mesh. A step updates the local shard; only norms concern the whole parameter.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fusedoptim._torch_private import (
    BypassSubclasses,
    is_flattened,
    local_tensor,
    shard_spec,
    with_shard,
)
from fusedoptim.launch.devices import is_on_host

_GRAD = operator.attrgetter("grad")
FINGERPRINT = 8
"""The number of values in a fingerprint of parameters. They are bytes: float32 adds up those of
65,000 processes exactly."""
Layout: TypeAlias = tuple[int, torch.dtype]
"""The number of values that are added up, and their dtype."""


def _dtensor_class() -> Any:
    """The class DTensor; () if nobody has imported it yet, as the import is slow."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())


def is_dtensor(tensor: object) -> bool:
    """Whether a tensor is spread over processes."""
    return isinstance(tensor, _dtensor_class())


def local_of(tensor: Tensor) -> Tensor:
    """This process's shard of a DTensor; any other tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    local: Tensor = local_tensor(tensor)
    wait = getattr(local, "wait", None)  # torch's AsyncCollectiveTensor has it
    return local if wait is None else wait()


def like_param(local: Tensor, param: Tensor, known: object = None) -> Tensor:
    """A tensor with ``param``'s mesh and placements, and with this ``local`` shard.

    It is ``local`` itself if ``param`` is not a DTensor, and ``known`` if that has this very shard.
    """
    if not is_dtensor(param):
        return local
    if isinstance(known, Tensor) and is_dtensor(known) and local_tensor(known) is local:
        return known
    return with_shard(param, local)


def place_of(tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
    """The mesh and placements of a DTensor."""
    spec = shard_spec(tensor)
    return spec.mesh, spec.placements


def describe_place(tensor: Tensor) -> str:
    """The mesh and placements of a DTensor, as errors name them."""
    if not is_dtensor(tensor):
        return "not sharded"
    mesh, placements = place_of(tensor)
    names = ", ".join(map(repr, placements))
    return f"({names}) on a mesh of shape {tuple(mesh.shape)}"


def same_place(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are divided alike over the same processes, or neither is divided."""
    if is_dtensor(a) and is_dtensor(b):
        return place_of(a) == place_of(b)
    return not is_dtensor(a) and not is_dtensor(b)


def is_partial(tensor: Tensor) -> bool:
    """Whether the values are sums of several processes' parts that are not yet added up."""
    return is_dtensor(tensor) and any(p.is_partial() for p in place_of(tensor)[1])


def is_piece(param: Tensor) -> bool:
    """Whether FullyShardedDataParallel may have given other processes parts of a parameter."""
    if not is_flattened(param):
        return False
    from torch import distributed

    return not distributed.is_initialized() or distributed.get_world_size() > 1


def has_dtensors(objects: Iterable[object]) -> bool:
    """Whether any of the objects is spread over processes."""
    cls = _dtensor_class()
    return cls != () and any(issubclass(kind, cls) for kind in set(map(type, objects)))


def dtensors(params: Iterable[Tensor]) -> list[Tensor]:
    """The parameters that are spread over processes."""
    return list(filter(is_dtensor, params))


class ShardedGradients:
    """The gradients of an optimizer's DTensors, which each step reads once.

    Gradients whose placements differ from their parameters' are redistributed to these; examples
    are the partial sums of replicated parameters between sequence-parallel layers. All processes
    find the same ones, in the same order, whatever else they find, because each takes a collective.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        """Begin without gradients: :meth:`read` reads them."""
        self.params = params
        self.grads: list[Tensor | None] = []
        """This step's gradients, from :meth:`read` to :meth:`forget`."""
        self.are_placed = True
        """Whether all gradients that are DTensors are on the meshes of their parameters."""
        self._specs = list(map(shard_spec, params))
        self._fitting = self._specs
        """The gradients' specs when all of them were last placed like their parameters."""
        self._index = {p: i for i, p in enumerate(params)}

    def are_moved(self) -> bool:
        """Whether the parameters' placements have changed, as torch.utils.swap_tensors can."""
        return list(map(shard_spec, self.params)) != self._specs

    def read(self) -> None:
        """Take this step's gradients."""
        with BypassSubclasses():
            grads: list[Any] = list(map(_GRAD, self.params))
        self.grads = grads
        try:
            given = list(map(shard_spec, grads))
        except AttributeError:  # no gradient, or a plain one, which is refused later
            given = list(map(getattr, grads, itertools.repeat("_spec"), self._specs))
        self.are_placed = is_fitting = True
        if given != self._fitting:  # one call in C if they are the same objects, as FSDP2's are
            for i, (its, place) in enumerate(zip(given, self._specs)):
                if its.mesh != place.mesh:
                    self.are_placed = is_fitting = False
                elif its.placements != place.placements:
                    is_fitting = False
                    with torch.no_grad():
                        grads[i] = grads[i].redistribute(placements=place.placements)
        if is_fitting:
            self._fitting = given

    def forget(self) -> None:
        """Keep no gradient alive."""
        self.grads = []

    def of(self, param: Tensor) -> Tensor | None:
        """This step's gradient of any parameter, DTensor or not."""
        place = self._index.get(param)
        return param.grad if place is None else self.grads[place]

    def of_each(self, params: Sequence[Tensor]) -> Callable[[], Sequence[Any]]:
        """A function that returns this step's gradients of some of the DTensors."""
        places = [self._index[p] for p in params]
        first, last = places[0], places[-1]
        if places == list(range(first, last + 1)):
            return lambda: self.grads[first : last + 1]
        take = operator.itemgetter(*places)
        return lambda: take(self.grads)


class Spread(NamedTuple):
    """How a DTensor is spread over processes."""

    mesh: Any
    """A DeviceMesh."""
    dims: tuple[int, ...]
    """The mesh dimensions over which elements are divided; over others they are replicated."""


def spread_of(tensor: Tensor) -> Spread | None:
    """How ``tensor`` is spread; None if it is not a DTensor."""
    if not is_dtensor(tensor):
        return None
    mesh, placements = place_of(tensor)
    dims = [i for i, p in enumerate(placements) if not p.is_replicate() and mesh.size(i) > 1]
    return Spread(mesh, tuple(dims))


def is_divided(spread: Spread | None) -> bool:
    """Whether no process has the whole parameter."""
    return spread is not None and bool(spread.dims)


class MeshSum:
    """Sums over the parameters on one mesh, which its processes add up in one collective.

    A mesh of several dimensions takes one collective for each divided dimension, unless all are
    divided and the mesh has all processes.
    """

    def __init__(self, mesh: Any, params: Sequence[Tensor], dtype: torch.dtype) -> None:
        self.mesh = mesh
        self.params = params
        """The parameters, the same on all processes, whether or not they have a gradient."""
        self.dtype = dtype
        """The dtype of the sums."""
        self.device = local_of(params[0]).device
        """The device of the sums."""
        kinds = repr([(tuple(p.shape), p.dtype) for p in params])
        digest = hashlib.sha256(kinds.encode()).digest()[:FINGERPRINT]
        self._fingerprint = torch.tensor(list(digest), dtype=torch.float32, device=self.device)
        self._dims = sorted({dim for p in params for dim in _spread(p).dims})
        count = 1 if mesh.get_coordinate() is None else math.prod(map(mesh.size, self._dims))
        self._expected = self._fingerprint * count
        self._is_checked = False

    def includes(self, spread: Spread | None) -> bool:
        """Whether it adds up the processes' parts of a parameter with this spread."""
        return spread is not None and is_divided(spread) and spread.mesh == self.mesh

    def contributes(self, spread: Spread | None) -> bool:
        """Whether this process adds its part of a parameter with this spread.

        Of several processes with the same part, only the first does.
        """
        place = self.mesh.get_coordinate()
        if spread is None or not self.includes(spread) or place is None:
            return False
        return all(place[dim] == 0 for dim in self._dims if dim not in spread.dims)

    def add_up(self, values: Tensor, works: list[Any]) -> None:
        """Replace ``values`` by their sum over the processes.

        The C call that starts a collective appends it to ``works``. After an interrupt, another
        call with the same arguments goes on, and starts no collective twice.

        Raises:
            RuntimeError: not all processes took part, or the process group is gone.
        """
        try:
            for group in self._groups()[len(works) :]:
                for work in works:
                    work.wait()
                works.extend(map(group.allreduce, ([values],)))
            for work in works:
                work.wait()
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(
                "the norms of sharded parameters could not be added up over the mesh of shape "
                f"{tuple(self.mesh.shape)}: {error}. All its processes must call step(), with the "
                "same parameters, before destroy_process_group(); resume from a checkpoint"
            ) from error

    def sign(self, values: Tensor) -> None:
        """Write the fingerprint of these parameters into the last numbers of ``values``."""
        values[-FINGERPRINT:] = self._fingerprint

    def check_same(self, values: Tensor) -> None:
        """Raise unless all processes have the same parameters.

        Args:
            values: the sum over all processes, with that of their fingerprints.
        """
        if self._is_checked:
            return
        if not torch.equal(values[-FINGERPRINT:].float(), self._expected):
            raise RuntimeError(
                f"this process has {len(self.params)} sharded parameters on the mesh of shape "
                f"{tuple(self.mesh.shape)}, and another process has different ones; "
                "construct all optimizers with the same parameters"
            )
        self._is_checked = not is_on_host(self.device)  # else it would wait for the device

    def agree(self, layout: Layout | None) -> None:
        """Raise unless all processes have the same parameters, by a collective of its own.

        Args:
            layout: the layout that processes add up which do not call this; None if all call it.
        """
        numel, dtype = layout or (FINGERPRINT, torch.float32)
        values = torch.zeros(numel, dtype=dtype, device=self.device)
        self.sign(values)
        self.add_up(values, [])
        self.check_same(values)

    def _groups(self) -> list[Any]:
        from torch import distributed

        if self.mesh.get_coordinate() is None:
            return []
        if (
            len(self._dims) == self.mesh.ndim > 1
            and self.mesh.size() == distributed.get_world_size()
        ):
            return [distributed.group.WORLD]
        return [self.mesh.get_group(dim) for dim in self._dims]


def _spread(param: Tensor) -> Spread:
    found = spread_of(param)
    assert found is not None
    return found


def mesh_sums(params: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[MeshSum]:
    """A sum for each mesh over which parameters are divided, in the order of parameters.

    Args:
        params: DTensors.
        dtypes: the dtype of the sum over each parameter.
    """
    members: dict[Any, list[tuple[Tensor, torch.dtype]]] = {}
    for p, dtype in zip(params, dtypes):
        spread = _spread(p)
        if spread.dims:
            members.setdefault(spread.mesh, []).append((p, dtype))
    return [
        MeshSum(
            mesh, [p for p, _ in own], functools.reduce(torch.promote_types, (d for _, d in own))
        )
        for mesh, own in members.items()
    ]


def over_meshes(
    sums: Sequence[MeshSum],
    squares: Sequence[tuple[Spread | None, Tensor]],
    found_inf: Tensor | int | None,
) -> tuple[list[tuple[Spread | None, Tensor]], Tensor | int | None]:
    """Turn numbers about this process's gradients into numbers about all gradients.

    Args:
        sums: the optimizer's sums.
        squares: 0-d tensors: sums of squares over parameters that are spread alike.
        found_inf: whether there are infinities, a number for each process, an int if that has no
            gradients; None if not asked for.

    Returns:
        squares whose sum is the sum over all gradients, and whether any process has an infinity.
    """
    whole = [own for own in squares if not any(each.includes(own[0]) for each in sums)]
    for each in sums:
        # The same size on all processes: gloo aborts one that receives more than it asked for.
        dtype = torch.float64 if is_on_host(each.device) else each.dtype
        values = torch.zeros(2 + FINGERPRINT, dtype=dtype, device=each.device)
        each.sign(values)
        for spread, square in squares:
            if each.contributes(spread):
                values[0] += square.to(each.device)
        if found_inf is not None:
            values[1] = found_inf
        each.add_up(values, [])
        each.check_same(values)
        whole.append((None, values[0].to(each.dtype)))
        if found_inf is not None:
            found_inf = values[1]
    return whole, found_inf
