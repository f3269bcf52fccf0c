"""Gives a tensor's memory back while its values are converted, piece by piece.

A large tensor in another form needs as much memory again, for as long as both exist: for a table of
embeddings, a fifth of a model. If nobody else can see the memory of the old form, each piece of it
can go as soon as it is converted.
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

CHUNK = 1 << 18
"""elements of a piece."""
_WORTH_IT = 1 << 20  # bytes
_DONTNEED = getattr(mmap, "MADV_DONTNEED", None)


def has_sole_owner(tensor: Tensor) -> bool:
    """Whether nobody but the tensor itself can see its memory, which is large and torch's own.

    Another tensor over it, such as a view or one in a ``state_dict``, a numpy array, a DLPack
    capsule, another process and a mapped file can.
    """
    if tensor.device.type != "cpu" or tensor.nbytes < _WORTH_IT or _madvise() is None:
        return False
    storage = tensor.untyped_storage()
    if not storage.resizable() or storage.is_shared() or storage.nbytes() != tensor.nbytes:
        return False
    del storage
    return _holders(tensor) == _holders(torch.empty(1))


def _holders(tensor: Tensor) -> tuple[int, int]:
    """Of the memory, and of Python's object for it."""
    storage = tensor.untyped_storage()
    count = -1 if storage_use_count is None else storage_use_count(storage._cdata)
    return count, sys.getrefcount(storage)


@functools.cache
def _madvise() -> Callable[..., int] | None:
    if _DONTNEED is None or not sys.platform.startswith("linux"):
        return None
    if storage_use_count is None:
        return None
    function: Any = getattr(ctypes.CDLL(None), "madvise", None)
    if function is not None:
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise: Callable[..., int] | None = function
    return madvise


def release_pages(piece: Tensor) -> None:
    """Let the system have the pages that lie wholly within ``piece``, whose values are lost.

    Args:
        piece: contiguous, of a tensor of which :func:`has_sole_owner` is true.
    """
    madvise = _madvise()
    assert madvise is not None
    first = -(-piece.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (piece.data_ptr() + piece.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        madvise(first, last - first, _DONTNEED)  # should it fail, the pages stay
