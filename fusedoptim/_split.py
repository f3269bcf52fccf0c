"""Parameters split in two halves: the upper 16 bits, a bfloat16, and the lower ones, the trail.

The upper half is the float32 value truncated, not rounded, so the pair is exactly that value.
Forward and backward passes see the bfloat16 half; an update reads and writes both. Two bytes and
two bytes where a bfloat16 parameter with a float32 master copy takes two and four.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fusedoptim._device import new_state
from fusedoptim._giving_back import CHUNK, give_back, is_ours_alone
from fusedoptim._modes import check_not_traced
from fusedoptim._tensors import (
    TRAIL,
    Candidate,
    dense_copy,
    describe,
    has_shared_elements,
    is_dense,
    is_lazy,
    laid_out_like,
    set_grad_enabled,
    turns,
)


def check(optimizer: str, params: Sequence[Tensor], others: Sequence[Tensor] = ()) -> None:
    """Raise unless all ``params`` are or can become upper halves.

    Args:
        optimizer: what errors call it.
        params: that are to be halves.
        others: of the optimizer, whose memory they must not share.

    Raises:
        TypeError: a parameter is neither float32 nor bfloat16, or not strided.
        RuntimeError: parameters share memory, which a conversion would end; a gradient to be
            converted does not fit; or the call is inside a tracing mode.
    """
    check_not_traced(f"{optimizer}: the split of parameters")
    for i, p in enumerate(params):
        what = f"{optimizer}: parameter {i} (shape {tuple(p.shape)})"
        if p.layout is not torch.strided:
            raise TypeError(f"{what} has layout {p.layout}, and only strided ones can be split")
        if p.dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(
                f"{what} is {p.dtype}; split parameters are bfloat16, or float32 to be converted: "
                "convert the model with model.float() or model.bfloat16()"
            )
        if p.dtype == torch.float32 and p.grad is not None and p.grad.shape != p.shape:
            raise RuntimeError(
                f"{what} has a gradient of another shape, {tuple(p.grad.shape)}; call zero_grad() "
                "after changing a parameter"
            )
    once = list(dict.fromkeys(params))
    known = [p for p in dict.fromkeys(others) if p not in set(once)]
    for p, turn in zip(once, turns(known + once)[len(known) :]):
        if turn or has_shared_elements(p):
            raise RuntimeError(
                f"{optimizer}: a parameter of shape {tuple(p.shape)} has elements that share "
                "memory, among themselves or with another parameter; clone() it first, or give "
                "one Parameter to both modules"
            )


def check_half(optimizer: str, candidate: Candidate) -> None:
    """Raise unless a parameter that was split is a bfloat16 half still."""
    if candidate.param.dtype != torch.bfloat16:
        raise TypeError(
            f"{describe(optimizer, candidate)} was converted after it was split, which loses its "
            "lower half; convert a model before making its optimizer, or make the optimizer anew"
        )


def _replace(param: Tensor, values: Tensor, grad: Tensor | None) -> None:
    """Give ``param`` these values, and a gradient of their dtype."""
    param.data = values
    if param.grad is not grad:  # torch lets one be kept that does not fit, but not be set
        param.grad = grad


def _converted_grad(param: Tensor, dtype: torch.dtype) -> Tensor | None:
    return None if param.grad is None else param.grad.to(dtype)


def halves_of(values: Tensor, is_used_up: bool = False) -> tuple[Tensor, Tensor]:
    """The upper halves, bfloat16, and the lower ones, int16, of float32 values.

    No memory is used but for the results; and for those that of the values is given back, if they
    are used up: a model's largest table has a fifth of its weights.
    """
    dense = _dense(values)
    is_used_up &= dense.data_ptr() == values.data_ptr()
    upper = torch.empty_like(dense, dtype=torch.bfloat16)
    lower = new_state(dense, torch.int16)
    pieces = _pieces(dense, lower, upper)
    done = 0
    try:
        for piece, low, high in pieces:
            words = piece.view(-1, 2)  # of which the lower comes first
            low.copy_(words[:, 0])
            high.copy_(words[:, 1])
            done += 1
            if is_used_up:
                give_back(piece)
    except BaseException:  # an interrupt
        _join_pieces(pieces[:done])
        raise
    return upper, lower


def _pieces(values: Tensor, lower: Tensor, upper: Tensor) -> list[tuple[Tensor, ...]]:
    """Of as many elements each, as 16-bit words."""
    return list(
        zip(
            torch.split(_words(values), 2 * CHUNK),
            torch.split(_words(lower), CHUNK),
            torch.split(_words(upper), CHUNK),
        )
    )


def _join_pieces(pieces: Iterable[tuple[Tensor, ...]]) -> None:
    for piece, low, high in pieces:
        _interleave(piece, low, high)


def _interleave(words: Tensor, lower: Tensor, upper: Tensor) -> None:
    words = words.view(-1, 2)
    words[:, 0].copy_(lower)
    words[:, 1].copy_(upper)


def join(param: Tensor, trail: Tensor) -> Tensor:
    """The float32 values of which ``param`` is the upper half and ``trail`` the lower."""
    upper = _dense(param)
    result = torch.empty_like(upper, dtype=torch.float32)
    lower = laid_out_like(upper, trail.to(upper.device))
    _interleave(_words(result), _words(lower), _words(upper))
    return result


def _dense(values: Tensor) -> Tensor:
    """The values without gaps in memory, copied if need be."""
    values = values.detach()
    return values if is_dense(values) and not is_lazy(values) else dense_copy(values)


def _words(values: Tensor) -> Tensor:
    """Dense ``values`` as their 16-bit words, in the order in which they are in memory."""
    return values.as_strided((values.numel(),), (1,)).view(torch.int16)


class Halves:
    """The parameters that an optimizer keeps in two halves; finds their trails in its state.

    A model whose checkpoints are to have the exact values holds the Halves of its optimizer. A copy
    of the model alone, as an average of weights is, has no optimizer: its Halves hold the trails,
    copied with it, and so do those whose optimizer is gone. Copied or pickled together, model and
    optimizer have the same Halves again.
    """

    in_model: bool = False
    """Whether a model's state_dict has the exact values, and the optimizer's no trails."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._trails: dict[Tensor, Tensor | None] = {}
        """By parameter; None while an optimizer has them."""
        self._state: MutableMapping[Tensor, Any] = {}
        """The optimizer's."""
        self.belong_to(optimizer)

    def belong_to(self, optimizer: Optimizer) -> None:
        """Look for the trails in the state of ``optimizer``, as long as there is one."""
        this = weakref.ref(self)  # an optimizer is freed when it is dropped: no cycle

        def keep_trails(_: object) -> None:
            halves = this()
            if halves is not None:
                halves._trails, halves._state = halves._found(), {}

        self._optimizer: weakref.ref[Optimizer] | None = weakref.ref(optimizer, keep_trails)
        self._state = getattr(optimizer, "state", {})  # none yet, in a constructor
        self._trails = dict.fromkeys(self._trails)

    @property
    def is_alone(self) -> bool:
        """Whether no optimizer updates them."""
        return self._optimizer is None or self._optimizer() is None

    def __contains__(self, param: object) -> bool:
        return param in self._trails

    def __iter__(self) -> Iterator[Tensor]:
        return iter(list(self._trails))

    def __reduce__(self) -> tuple[Any, ...]:
        return object.__new__, (Halves,), (self._found(), self.in_model)

    def __setstate__(self, state: tuple[dict[Tensor, Tensor | None], bool]) -> None:
        self._optimizer = None
        self._state = {}
        self._trails, self.in_model = state

    def split(self, param: Tensor) -> None:
        """Make a float32 or bfloat16 ``param`` an upper half; its trail joins the state.

        After an error or an interrupt, everything is as it was.
        """
        self._look()
        is_used_up = param.dtype == torch.float32 and is_ours_alone(param)
        values, grad = param.data, param.grad
        halves: tuple[Tensor, Tensor] | None = None
        is_grad_enabled = torch.is_grad_enabled()
        try:
            set_grad_enabled(False)
            if param.dtype == torch.bfloat16:
                halves = values, new_state(values, torch.int16).zero_()
            else:
                halves = halves_of(values, is_used_up)
            upper, trail = halves
            rounded = _converted_grad(param, torch.bfloat16)
            self._trails[param] = None
            self._state[param][TRAIL] = trail
            _replace(param, upper, rounded)
        except BaseException:
            if is_used_up and halves is not None:
                upper, trail = halves
                _join_pieces(_pieces(values, trail, upper))
            _replace(param, values, grad)
            self.forget(param)
            raise
        finally:
            set_grad_enabled(is_grad_enabled)

    def merge(self, param: Tensor) -> None:
        """Make an upper half the float32 parameter that it stands for, which is none of these.

        After an error or an interrupt, everything is as it was.

        Raises:
            ValueError: the optimizer has lost the lower half.
        """
        trail, copied = self.trail(param), self._trails[param]
        values, grad = param.data, param.grad
        is_grad_enabled = torch.is_grad_enabled()
        try:
            set_grad_enabled(False)
            whole, exact = join(values, trail), _converted_grad(param, torch.float32)
            _replace(param, whole, exact)
            self.forget(param)
        except BaseException:
            _replace(param, values, grad)
            self._trails[param] = copied
            if copied is None:
                self._state[param][TRAIL] = trail
            raise
        finally:
            set_grad_enabled(is_grad_enabled)

    def forget(self, param: Tensor) -> None:
        """Count ``param`` no more, if it was counted, and drop its trail."""
        self._trails.pop(param, None)
        state = self._state.get(param, {})
        state.pop(TRAIL, None)
        if not state:  # torch's classes take any state for that of a step
            self._state.pop(param, None)

    def _look(self) -> None:
        """Take the optimizer's state, which a user may have replaced, if there is an optimizer."""
        optimizer = self._optimizer() if self._optimizer is not None else None
        if optimizer is not None:
            self._state = optimizer.state

    def _find(self, param: Tensor) -> Tensor | None:
        self._look()
        trail: Tensor | None = self._state.get(param, {}).get(TRAIL, self._trails[param])
        return trail

    def _found(self) -> dict[Tensor, Tensor | None]:
        return {p: self._find(p) for p in self._trails}

    def trail(self, param: Tensor) -> Tensor:
        """The lower half of ``param``.

        Raises:
            ValueError: the optimizer has lost it.
        """
        trail = self._find(param)
        if trail is None:
            raise ValueError(LOST)
        return trail

    def exact(self, param: Tensor) -> Tensor:
        """A copy of the float32 values of ``param``."""
        return join(param, self.trail(param))

    def write(self, param: Tensor, values: Tensor) -> Tensor:
        """Take the lower half of ``values``, float32, for that of ``param``; return the upper."""
        upper, lower = halves_of(values)
        self.trail(param).copy_(lower)
        return upper


LOST = (
    f"a split parameter has lost its lower half, the state {TRAIL!r}; load a state_dict that has "
    "it, or make the optimizer anew"
)


def check_checkpoint(optimizer: str, saved: Iterable[tuple[int, Tensor, dict[str, Any]]]) -> None:
    """Raise unless the trails in a checkpoint are of all split parameters, or of none.

    Args:
        optimizer: what errors call it.
        saved: number, parameter and saved state of each that is split.

    Raises:
        ValueError: a trail is missing, or of another shape or dtype.
    """
    saved = list(saved)
    if not any(TRAIL in state for _, _, state in saved):
        return
    for i, p, state in saved:
        trail = state.get(TRAIL)
        if trail is None:
            raise ValueError(
                f"{optimizer}: the checkpoint has lost the {TRAIL!r} of parameter {i} (shape "
                f"{tuple(p.shape)}), the lower half of its values; load a whole checkpoint"
            )
        if trail.shape != p.shape or trail.dtype != torch.int16:
            raise ValueError(
                f"{optimizer}: the {TRAIL!r} of parameter {i} in the checkpoint is {trail.dtype} "
                f"of shape {tuple(trail.shape)}, and the parameter's is torch.int16 of shape "
                f"{tuple(p.shape)}; load the checkpoint of the same model"
            )
