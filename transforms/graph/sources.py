"""Notices every change of the parameters and buffers that constants were computed from.

Parameters are watched, like those of packed modules. A buffer has no class of its own that could
watch it, so it is compared with a copy, bit for bit. Only small buffers are.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from fusedoptim._torch_private import BypassSubclasses
from transforms.rewrites.packed_copy import is_shared
from transforms.rewrites.watched_parameter import WatchedParameter, exposures, settle, uses, watch

_MOST_BYTES = 1 << 16
"""The most bytes of a buffer that is compared."""
_version = attrgetter("_version")
_address = Tensor.data_ptr
_compare = ctypes.CDLL(None).memcmp
_compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_compare.restype = ctypes.c_int


def can_be_source(tensor: Any) -> bool:
    """Whether every later change of a parameter or buffer will be noticed."""
    if not isinstance(tensor, Tensor) or tensor.device.type != "cpu":
        return False
    if tensor.is_inference() or tensor.layout != torch.strided:
        return False
    if isinstance(tensor, nn.Parameter):
        return watch(tensor)
    return type(tensor) is Tensor and tensor.is_contiguous() and tensor.nbytes <= _MOST_BYTES


class Snapshot:
    """The state, at one time, of the sources among the arguments of a graph."""

    def __init__(self, positions: Sequence[int], args: Sequence[Any]) -> None:
        """Raise CannotWatch if a later change could be missed."""
        if not all(can_be_source(args[i]) for i in positions):
            raise CannotWatch
        params = [i for i in positions if type(args[i]) is WatchedParameter]
        self._buffers = [_Buffer(i, args[i]) for i in positions if i not in set(params)]
        self._get = _getter(params)
        found = self._get(args)
        # Before settle(), so that a use in another thread meanwhile is noticed.
        self._exposures, self._uses = exposures(), list(map(uses, found))
        if any(is_shared(args[i]) for i in positions) or not all(map(settle, found)):
            raise CannotWatch
        self._is_alive = True
        self._references = [weakref.ref(param, self._died) for param in found]
        self._ids = tuple(map(id, found))
        self._versions, self._addresses = _states(found)
        self.storages = {args[i].untyped_storage().data_ptr() for i in positions}

    def _died(self, _: object) -> None:
        self._is_alive = False  # another object may get its id

    def matches(self, args: Sequence[Any]) -> bool:
        """Whether all sources are unchanged."""
        found = self._get(args)
        if self._exposures != exposures():
            now = exposures()
            if list(map(uses, found)) != self._uses:
                return False
            self._exposures = now
        return (
            self._is_alive
            and tuple(map(id, found)) == self._ids
            and _states(found) == (self._versions, self._addresses)
            and all(
                args[each.position] is each.tensor
                and _compare(each.tensor.data_ptr(), each.address, each.nbytes) == 0
                for each in self._buffers
            )
        )


class _Buffer:
    """A buffer, and a copy of what it was."""

    __slots__ = ("_copy", "address", "nbytes", "position", "tensor")

    def __init__(self, position: int, tensor: Tensor) -> None:
        self.position, self.tensor = position, tensor
        self._copy = tensor.clone()
        self.address, self.nbytes = self._copy.data_ptr(), self._copy.nbytes


def _states(params: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """The version counters and addresses of parameters."""
    with BypassSubclasses():
        return list(map(_version, params)), list(map(_address, params))


class CannotWatch(Exception):
    """A source may be written to unnoticed."""


def _getter(positions: Sequence[int]) -> Any:
    if len(positions) > 1:
        return itemgetter(*positions)
    if positions:
        return lambda args: (args[positions[0]],)
    return lambda args: ()
