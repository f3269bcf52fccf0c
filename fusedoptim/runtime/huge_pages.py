"""Moves tensors into huge pages, in which rows at random places are found faster.

See docs/design/huge-pages.md.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fusedoptim._warn import warn

if TYPE_CHECKING:
    import torch

__all__ = ["use_huge_pages"]

_PAGE = 2 << 20  # of x86-64
_MADV_POPULATE_WRITE, _MADV_COLLAPSE = 23, 25  # mman.h
_FIRST_LINUX = 6, 1  # has MADV_COLLAPSE
_RELEASE = re.compile(r"(\d+)\.(\d+)")
_PASSING = errno.EAGAIN, errno.EBUSY
_ATTEMPTS = 3


def use_huge_pages(*targets: torch.Tensor | torch.nn.Module | torch.optim.Optimizer) -> int:
    """Move memory of tensors into pages of 2 MiB, at once and in place.

    For embedding tables of hundreds of MiB, and for their optimizer's state: their rows lie at
    random places, and in pages of 4 KiB the processor first has to look up nearly every page's
    address in memory. Values and addresses stay the same, so the call may come at any time, once
    the state exists. Other models gain nothing.

    It affects nothing else in the process, and lasts until the memory is freed. What is not aligned
    to 2 MiB at both ends of a tensor stays in small pages, and so do small tensors. While a forked
    process shares the memory, such as a DataLoader's worker, writing to it splits pages again: call
    this after such processes have started, or start them by "spawn".

    Args:
        targets: tensors on the CPU; modules, for their parameters and buffers on the CPU;
            optimizers, for the parameters and the state that are on the CPU.

    Returns:
        how many bytes of them lie in huge pages now. If aligned parts were left in small pages, a
        warning says why. Linux can move pages from 6.1 on, but not those of mapped files.

    Raises:
        TypeError: a target is something else.
        ValueError: a given tensor is not dense memory of the CPU.

    Example:
        >>> import torch
        >>> from fusedoptim import runtime
        >>> table = torch.nn.EmbeddingBag(100_000, 64, mode="sum", sparse=True)
        >>> moved = runtime.use_huge_pages(table)  # 24 MiB, of 24.4
    """
    memory = [storage for target in targets for storage in _memory(target)]
    pages = {address for storage in memory for address in _pages(storage)}
    failures = [failure for address in sorted(pages) if (failure := _failure(address))]
    if failures:
        left, total = (count * _PAGE >> 20 for count in (len(failures), len(pages)))
        warn(
            f"use_huge_pages() left {left:,} of {total:,} MiB in small pages: "
            + _reason(failures[0]),
            RuntimeWarning,
        )
    return (len(pages) - len(failures)) * _PAGE


def can_move_pages() -> bool:
    """Whether Linux can move memory into huge pages."""
    system = os.uname()
    release = _RELEASE.match(system.release)
    is_late = release is not None and tuple(map(int, release.groups())) >= _FIRST_LINUX
    return system.sysname == "Linux" and is_late


def _memory(target: object) -> Iterator[torch.UntypedStorage]:
    """The memory of a target's tensors, without those of a module that lie elsewhere."""
    import torch  # not above: the doctor works where torch is broken

    from fusedoptim.launch.devices import is_on_host
    from fusedoptim.step.sharding import local_of
    from fusedoptim.step.tensors import has_memory

    def is_here(tensor: torch.Tensor) -> bool:
        local = local_of(tensor)
        return local.layout is torch.strided and is_on_host(local.device) and has_memory(local)

    if isinstance(target, torch.Tensor):
        if not is_here(target):
            raise ValueError(
                f"use_huge_pages: a tensor on {target.device} with layout {target.layout} has no "
                "dense memory of the CPU; pass tensors that have, or a module"
            )
        tensors = [target]
    elif isinstance(target, torch.nn.Module):
        tensors = [*target.parameters(), *target.buffers()]
    elif isinstance(target, torch.optim.Optimizer):
        states = [value for state in target.state.values() for value in state.values()]
        tensors = [value for value in states if isinstance(value, torch.Tensor)]
        tensors += [param for group in target.param_groups for param in group["params"]]
    else:
        raise TypeError(
            f"use_huge_pages: {type(target).__name__} is not a tensor, module or optimizer; pass "
            "these one by one, as in use_huge_pages(model, optimizer) or use_huge_pages(*tensors)"
        )
    for tensor in filter(is_here, tensors):
        yield local_of(tensor).untyped_storage()


def _pages(storage: torch.UntypedStorage) -> range:
    """The addresses of the huge pages that lie wholly in this memory."""
    first = storage.data_ptr()
    return range(-(-first // _PAGE) * _PAGE, (first + storage.nbytes()) // _PAGE * _PAGE, _PAGE)


def _failure(address: int) -> int:
    """Move the memory at this address into a huge page. Returns the number of the error, or 0."""
    for _ in range(_ATTEMPTS):
        failure = _advise(address, _PAGE, _MADV_COLLAPSE)
        if failure == errno.EINVAL:  # perhaps nobody has written to it yet: a small page suffices
            _advise(address, mmap.PAGESIZE, _MADV_POPULATE_WRITE)
        elif failure not in _PASSING:
            break
    return failure


def _advise(address: int, size: int, advice: int) -> int:
    """Call madvise. Returns the number of the error, or 0."""
    process = ctypes.CDLL(None, use_errno=True)
    failed = process.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)
    return ctypes.get_errno() if failed else 0


def _reason(failure: int) -> str:
    """Why pages were not moved, and what can be done."""
    if not can_move_pages():
        return (
            f"{os.uname().sysname} {os.uname().release} cannot move them, Linux 6.1 and later can; "
            "set THP_MEM_ALLOC_ENABLE=1 before Python starts, and torch asks for huge pages"
        )
    if failure == errno.EINVAL:
        return "Linux cannot move those of a mapped file; pass copies of its tensors"
    return f"Linux says {os.strerror(failure)!r}; free memory, and call it again"
