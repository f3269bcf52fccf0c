"""Frees a tensor's memory piece by piece while its values are converted.

Converting a large tensor needs memory for both forms, and one embedding table may be a fifth of a
model. If nothing else refers to the memory of the old form, each piece of it can be freed as soon
as it is converted.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedoptim._torch_private import storage_use_count
from fusedoptim.launch.devices import is_on_host

CHUNK = 1 << 18
"""Elements of a piece."""
_MIN_BYTES = 1 << 20
_DONTNEED = getattr(mmap, "MADV_DONTNEED", None)


def has_sole_owner(tensor: Tensor) -> bool:
    """Whether only this tensor refers to its memory, and the memory is large and torch's own.

    Views, tensors in a ``state_dict``, numpy arrays, DLPack capsules, other processes and mapped
    files are other owners.
    """
    if not is_on_host(tensor.device):
        return False
    if tensor.nbytes < _MIN_BYTES or _madvise() is None:
        return False
    storage = tensor.untyped_storage()
    if not storage.resizable() or storage.is_shared() or storage.nbytes() != tensor.nbytes:
        return False
    del storage
    return _holders(tensor) == _holders(torch.empty(1))


def _holders(tensor: Tensor) -> tuple[int, int]:
    """Counts of references to the memory, and to Python's object for it."""
    storage = tensor.untyped_storage()
    count = -1 if storage_use_count is None else storage_use_count(storage._cdata)
    return count, sys.getrefcount(storage)


@functools.cache
def _madvise() -> Callable[..., int] | None:
    function: Any = getattr(ctypes.CDLL(None), "madvise", None)
    if function is None or _DONTNEED is None or storage_use_count is None:
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise: Callable[..., int] = function
    return madvise


def release_pages(piece: Tensor) -> None:
    """Free the pages that lie wholly within ``piece``, whose values are lost.

    ``piece`` is contiguous, and part of a tensor for which :func:`has_sole_owner` is true.
    """
    madvise = _madvise()
    assert madvise is not None
    first = -(-piece.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (piece.data_ptr() + piece.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        madvise(first, last - first, _DONTNEED)  # on failure the pages stay
