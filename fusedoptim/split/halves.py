"""Float32 parameters in two halves: the upper 16 bits are a bfloat16, the lower 16 the trail.

The upper half is the float32 value truncated, not rounded, so the pair is exactly that value.
Forward and backward passes see the bfloat16 half; an update reads and writes both. A weight takes
four bytes; bfloat16 with a float32 master copy takes six.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch.optim import Optimizer

from fusedoptim._torch_private import is_flattened
from fusedoptim.split.hooks import check_no_hooks
from fusedoptim.split.pages import CHUNK, has_sole_owner, release_pages
from fusedoptim.step.checks import is_called_from
from fusedoptim.step.modes import check_not_traced, on_memory
from fusedoptim.step.sharding import is_dtensor, is_partial, like_param, local_of
from fusedoptim.step.tensors import (
    TRAIL,
    has_memory,
    has_shared_elements,
    memory_of,
    new_state,
    update_order,
)

_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"


def check_splittable(
    optimizer: str, params: Sequence[Tensor], others: Sequence[Tensor] = ()
) -> None:
    """Raise unless all ``params`` are or can become upper halves.

    Args:
        optimizer: its name in errors.
        params: the parameters to be split.
        others: parameters of the optimizer, with which they must not share memory.
    """
    check_not_traced(f"{optimizer}: the split of parameters")
    for i, p in enumerate(params):
        what = f"{optimizer}: parameter {i} (shape {tuple(p.shape)})"
        if p.layout is not torch.strided:
            raise TypeError(f"{what} has layout {p.layout}, and only strided ones can be split")
        if is_dtensor(p) and (p.dtype != torch.bfloat16 or is_partial(p)):
            raise TypeError(
                f"{what} is sharded (DTensor) and {p.dtype}; only bfloat16 ones can be split, "
                "because what shards them, such as FSDP2, also holds their values: call "
                "model.bfloat16() before fully_shard()"
            )
        if is_flattened(p):
            raise TypeError(
                f"{what} is a piece of a flat parameter (FullyShardedDataParallel), which cannot "
                "be split, as torch could not save its lower half; use fully_shard"
            )
        if p.device.type != "meta" and not has_memory(local_of(p)):
            raise TypeError(
                f"{what} is a {type(p).__name__} with no memory of its own, and cannot be split; "
                "split it before it is wrapped, or use the torch.optim class"
            )
        if p.dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(
                f"{what} is {p.dtype}; split parameters are bfloat16, or float32 to be converted: "
                "convert the model with model.float() or model.bfloat16()"
            )
        if p.dtype == torch.float32 and is_called_from(_ZERO) and distributed.get_world_size() > 1:
            raise TypeError(
                f"{what} is float32, and ZeroRedundancyOptimizer would split it in one process "
                "alone; call model.bfloat16() before constructing the optimizer"
            )
        if p.dtype == torch.float32 and p.grad is not None and p.grad.shape != p.shape:
            raise RuntimeError(
                f"{what} has a gradient of another shape, {tuple(p.grad.shape)}; call zero_grad() "
                "after changing a parameter"
            )
    once = list(dict.fromkeys(params))
    known = [p for p in dict.fromkeys(others) if p not in set(once)]
    orders = update_order(list(map(local_of, known + once)))
    for p, order in zip(once, orders[len(known) :]):
        if order or has_shared_elements(local_of(p)):
            raise RuntimeError(
                f"{optimizer}: a parameter of shape {tuple(p.shape)} has elements that share "
                "memory, among themselves or with another parameter; clone() it first, or give "
                "one Parameter to both modules"
            )
    check_no_hooks(optimizer, [p for p in once if p.dtype == torch.float32])


def _replace(param: Tensor, values: Tensor, grad: Tensor | None) -> None:
    """Give ``param`` these values, and a gradient of their dtype."""
    param.data = values
    if param.grad is not grad:  # torch keeps a gradient that does not fit, but refuses to set it
        param.grad = grad


def _converted_grad(param: Tensor, dtype: torch.dtype) -> Tensor | None:
    return None if param.grad is None else param.grad.to(dtype)


def _zero_trail(param: Tensor) -> Tensor:
    """The lower half of a bfloat16 ``param`` that has had none."""
    return like_param(new_state(local_of(param), torch.int16).zero_(), param)


def halves_of(values: Tensor, consume: bool = False) -> tuple[Tensor, Tensor]:
    """The upper halves, bfloat16, and the lower ones, int16, of float32 values.

    Args:
        values: the values to be split, piece by piece, so that only the results take memory.
        consume: whether to free the memory of each piece that is done, which loses its values.
    """
    dense = memory_of(values.detach())
    consume &= dense.data_ptr() == values.data_ptr()
    upper = torch.empty_like(dense, dtype=torch.bfloat16)
    lower = new_state(dense, torch.int16)
    pieces = _pieces(dense, lower, upper)
    done = 0
    try:
        for piece, low, high in pieces:
            words = piece.view(-1, 2)  # little-endian: the lower half comes first
            low.copy_(words[:, 0])
            high.copy_(words[:, 1])
            done += 1
            if consume:
                release_pages(piece)
    except BaseException:  # an interrupt
        _join_pieces(pieces[:done])
        raise
    return upper, lower


def _pieces(values: Tensor, lower: Tensor, upper: Tensor) -> list[tuple[Tensor, ...]]:
    """Views of corresponding pieces, as 16-bit words."""
    return list(
        zip(
            torch.split(_words(values), 2 * CHUNK),
            torch.split(_words(lower), CHUNK),
            torch.split(_words(upper), CHUNK),
        )
    )


def _join_pieces(pieces: Iterable[tuple[Tensor, ...]]) -> None:
    for piece, lower, upper in pieces:
        words = piece.view(-1, 2)
        words[:, 0].copy_(lower)
        words[:, 1].copy_(upper)


def join(param: Tensor, trail: Tensor) -> Tensor:
    """The float32 values with the upper halves ``param`` and the lower halves ``trail``."""
    upper = memory_of(param.detach())
    result = torch.empty_like(upper, dtype=torch.float32)
    _join_pieces(_pieces(result, memory_of(trail.to(upper.device), upper), upper))
    return result


def _words(values: Tensor) -> Tensor:
    """The 16-bit words of dense ``values``, in memory order."""
    return values.as_strided((values.numel(),), (1,)).view(torch.int16)


@on_memory
def _zero(trail: Tensor | None) -> None:
    if trail is not None:
        trail.zero_()


class Halves:
    """The parameters that an optimizer keeps in two halves.

    The trails are in the optimizer's state. A parameter's trail goes there with the rest of its
    state, which most classes make at its first step: torch.distributed.checkpoint assumes that an
    optimizer with any state has all of it.

    A model whose state_dict has the exact values holds the Halves of its optimizer. If there is no
    optimizer, as in a copy of the model alone or once the optimizer is deleted, the Halves hold the
    trails. A model and an optimizer that are copied or pickled together share one Halves again.

    If something else writes a parameter before its first step, its trail becomes zero: it belongs
    to other values. DistributedDataParallel writes rank 0's upper halves to all processes, which
    then have the same values.
    """

    in_model: bool = False
    """Whether the exact values are in a model's state_dict, and no trails in the optimizer's."""
    _coming: tuple[object, Sequence[tuple[Tensor, Tensor, bool]]] | None = None
    """The state that a load puts in force, and the trails that are in force from then on."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._trails: dict[Tensor, Tensor | None] = {}
        """The trail of each parameter; None once it is in the optimizer's state."""
        self._versions: dict[Tensor, int | None] = {}
        """The versions of parameters that have taken no step, when their trails were noted; None
        while one is written. Those of a loaded checkpoint are not here: their upper halves may be
        loaded later."""
        self._state: MutableMapping[Tensor, Any] = {}
        """The optimizer's state."""
        self.belong_to(optimizer)

    def belong_to(self, optimizer: Optimizer) -> None:
        """Find the trails in the state of ``optimizer`` for as long as it exists."""
        this = weakref.ref(self)  # a cycle would delay the end of the optimizer

        def keep_trails(_: object) -> None:
            halves = this()
            if halves is not None:
                halves._trails, halves._state = {p: halves.find(p) for p in halves}, {}

        self._optimizer: weakref.ref[Optimizer] | None = weakref.ref(optimizer, keep_trails)
        self._state = getattr(optimizer, "state", {})  # none yet, in a constructor
        for p in self:
            self.find(p)

    @property
    def is_alone(self) -> bool:
        """Whether no optimizer updates them."""
        return self._optimizer is None or self._optimizer() is None

    def __contains__(self, param: object) -> bool:
        return param in self._trails

    def __iter__(self) -> Iterator[Tensor]:
        return iter(list(self._trails))

    def __reduce__(self) -> tuple[Any, ...]:
        trails = {p: self.find(p) for p in self}
        return object.__new__, (Halves,), (trails, self.in_model, list(self._versions))

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._optimizer = None
        self._state = {}
        self._trails, self.in_model, *noted = state  # version 0.1 noted none
        self._versions = {p: None for params in noted for p in params}
        for p in self._versions:
            self.note_values(p)

    @on_memory
    def split(self, param: Tensor) -> None:
        """Make a float32 or bfloat16 ``param`` an upper half, and keep its trail.

        An error or an interrupt changes nothing.
        """
        if is_dtensor(param):  # bfloat16: its local shard stays as it is
            self.hold(param, _zero_trail(param))
            return
        consume = param.dtype == torch.float32 and has_sole_owner(param)
        values, grad = param.data, param.grad
        halves: tuple[Tensor, Tensor] | None = None
        try:
            if param.dtype == torch.bfloat16:
                halves = values, _zero_trail(param)
            else:
                halves = halves_of(values, consume)
            upper, trail = halves
            rounded = _converted_grad(param, torch.bfloat16)
            self.hold(param, trail)
            _replace(param, upper, rounded)
            self._versions[param] = None
            self.note_values(param)
        except BaseException:
            if consume and halves is not None:
                upper, trail = halves
                _join_pieces(_pieces(values, trail, upper))
            _replace(param, values, grad)
            self.forget(param)
            raise

    def expect_state(self, state: object, trails: Sequence[tuple[Tensor, Tensor, bool]]) -> None:
        """Keep these trails from the moment when ``state`` is the optimizer's.

        The optimizer's state is one object and these records are others, so no single store could
        replace both. Whatever reads the records first does the rest, even after an interrupt.

        Args:
            state: the state that a load is about to put in force.
            trails: each parameter, its trail, and whether the trail is in the checkpoint, so that
                the upper half may be loaded later.
        """
        self._coming = state, trails

    def expect_values(self, param: Tensor) -> None:
        """Keep the trail that ``param`` is about to get, even if its upper half is written."""
        self._versions.pop(param, None)

    def hold(self, param: Tensor, trail: Tensor) -> None:
        """Keep ``trail``, the lower half of ``param``: in its state, if it has any."""
        self._read_state()
        if self._state.get(param):
            self._state[param][TRAIL] = trail
        self._trails[param] = trail
        self.find(param)

    def note_values(self, param: Tensor) -> None:
        """Note that the trail of ``param`` belongs to its present values, if it took no step."""
        self._read_state()
        is_first = param in self._versions or self._trails.get(param) is not None
        if is_first and not param.is_inference():
            self._versions[param] = param._version

    def begin_step(self, params: Iterable[Tensor]) -> None:
        """Make trails zero that belong to other values; the next writes are those of a step."""
        for p in params:
            self.find(p)
            self._versions.pop(p, None)

    def have(self, trails: Iterable[tuple[Tensor, Tensor | None]]) -> bool:
        """Whether parameters that have taken no step have these trails already."""
        self._read_state()
        return all(
            param in self._versions
            and trail is not None
            and torch.equal(self.trail(param), trail.to(param.device, torch.int16))
            for param, trail in trails
        )

    @on_memory
    def merge(self, param: Tensor) -> None:
        """Make an upper half the float32 parameter again, and forget it.

        An error or an interrupt changes nothing.
        """
        trail, copied = self.trail(param), self._trails[param]
        values, grad = param.data, param.grad
        try:
            whole, exact = join(values, trail), _converted_grad(param, torch.float32)
            _replace(param, whole, exact)
            self.forget(param)
        except BaseException:
            _replace(param, values, grad)
            self._trails[param] = copied
            if copied is None:
                self._state[param][TRAIL] = trail
            raise

    def split_all(
        self, params: Iterable[Tensor], conclude: Callable[[], object] | None = None
    ) -> None:
        """Split all that are not split yet; an error or an interrupt leaves none of them split.

        Args:
            params: the parameters.
            conclude: called at the end; if it is interrupted, none of them is split either.
        """
        chosen = [p for p in dict.fromkeys(params) if p not in self]
        whole = {p for p in chosen if p.dtype == torch.float32}
        try:
            for p in chosen:
                self.split(p)
            if conclude is not None:
                conclude()
        except BaseException:  # torch's out of memory is a RuntimeError
            for p in chosen:
                if p in self and p in whole:
                    self.merge(p)
                else:
                    self.forget(p)
            raise

    def merge_all(self, params: Sequence[Tensor]) -> None:
        """Merge all; an error or an interrupt leaves all of them split."""
        try:
            for p in params:
                self.merge(p)
        except BaseException:
            self.split_all(params)  # those that are merged already
            raise

    def forget(self, param: Tensor) -> None:
        """Drop ``param``, if it is one of these, and its trail."""
        self._read_state()  # or a coming trail would make it one of these again
        self._trails.pop(param, None)
        self._versions.pop(param, None)
        state = self._state.get(param, {})
        state.pop(TRAIL, None)
        if not state:  # a trail is all the state of SGD without momentum
            self._state.pop(param, None)

    def settle(self, params: Iterable[Tensor]) -> None:
        """Note the trails that a step has moved to the state of the optimizer.

        A parameter that is not in ``params``, the optimizer's, and whose state was deleted is
        forgotten, unless a model's state_dict needs its trail.
        """
        own = set(params)
        for p in self:
            if self.find(p) is None and p not in own and not self.in_model:
                self.forget(p)

    def _read_state(self) -> None:
        """Find the state of the optimizer, which a load or a user may have replaced."""
        optimizer = self._optimizer() if self._optimizer is not None else None
        if optimizer is not None:
            self._state = optimizer.state
        coming = self._coming
        if coming is not None and coming[0] is self._state:
            # An interrupt leaves it to the next call, which repeats it.
            for param, trail, is_loaded in coming[1]:
                if is_loaded:
                    self.expect_values(param)
                self._trails[param] = trail
            self._coming = None

    def find(self, param: Tensor) -> Tensor | None:
        """The trail of ``param``; None if it is not split, or if the optimizer has lost it."""
        self._read_state()
        trail: Tensor | None = self._state.get(param, {}).get(TRAIL)
        if trail is None:
            trail = self._trails.get(param)
        else:
            if trail.dtype == torch.int32:  # ZeroRedundancyOptimizer loads what state_dict() saved
                trail = like_param(local_of(trail).short(), trail)
                self._state[param][TRAIL] = trail
            if param in self:
                self._trails[param] = None
        if trail is not None and trail.is_meta and not param.is_meta:  # since model.to_empty()
            trail = _zero_trail(param)
            self.hold(param, trail)
        known = self._versions.get(param)
        if known is not None and known != param._version:  # something has written the upper half
            _zero(trail)
            self._versions[param] = param._version
        return trail

    def before_first_step(self, param: Tensor) -> Tensor | None:
        """The trail of a parameter without state; None for any other."""
        self.find(param)  # notes a trail that is in the state now
        return self._trails.get(param)

    def trail(self, param: Tensor) -> Tensor:
        """The lower half of ``param``; a ValueError if it is lost, or of another shape."""
        trail = self.find(param)
        if trail is None:
            raise ValueError(LOST)
        if trail.shape != param.shape:
            raise ValueError(
                f"a split parameter has shape {tuple(param.shape)}, and its lower half, the state "
                f"{TRAIL!r}, {tuple(trail.shape)}; change shapes before parameters are split"
            )
        return trail

    def exact(self, param: Tensor) -> Tensor:
        """A copy of the float32 values of ``param``."""
        return like_param(join(param, self.trail(param)), param)

    def write(self, param: Tensor, values: Tensor) -> Tensor:
        """Set the trail of ``param`` to the lower half of float32 ``values``; return the upper.

        Call :meth:`note_values` when the upper half is in ``param``.
        """
        upper, lower = halves_of(values)
        self.trail(param).copy_(lower)
        if param in self._versions:
            self._versions[param] = None
        return upper


LOST = (
    f"a split parameter has lost its lower half, the state {TRAIL!r}; load a state_dict that has "
    "it, or construct the optimizer again"
)
