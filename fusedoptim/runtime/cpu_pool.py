"""A set of cores, and a thread on them that runs calls."""

from __future__ import annotations

import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from fusedoptim.runtime._cores import listed, nodes, one_of_each, process_cores
from fusedoptim.runtime._threads import Settings

__all__ = ["CPUPool"]

_THREAD_NAME = "CPUPool"
_BINDING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
"""With these variables OpenMP binds the main thread to one core."""
_P = ParamSpec("_P")
_T = TypeVar("_T")


class CPUPool(Executor):
    """Cores of this process: for :func:`pin`, and for calls that a thread on them runs.

    It is a :class:`concurrent.futures.Executor` with one thread, which the first :meth:`submit`
    starts. The thread runs one call after another. It stays on the pool's cores, with as many
    OpenMP threads as there are cores, as in ``with pin(pool)``. Several pools thus run several
    calls at once, one each, on their own cores. Pools may share cores; their threads then share the
    cores' time.

    A thread has settings of its own: call :func:`torch.no_grad`, :func:`torch.inference_mode` and
    :class:`torch.autocast` within the function that is submitted. What a call sets for its thread,
    such as ``torch.set_num_threads``, holds for the next call too.

    Args:
        core_ids: numbers of cores, as Linux counts them: a list, a range or another iterable.
            None for all that the process may use.
        node_id: number of a NUMA node. The pool gets one hardware thread of each of its physical
            cores, among those that the process may use.

    Raises:
        TypeError: ``core_ids`` is not an iterable of integers, or ``node_id`` is not an integer.
        ValueError: the process may not use a core (``os.sched_getaffinity``), a core is named
            twice, there is none, the machine has no such node, or both arguments are given.

    Example:
        >>> import os, torch
        >>> from fusedoptim.runtime import CPUPool
        >>> first, *_ = os.sched_getaffinity(0)
        >>> with CPUPool([first]) as pool:
        ...     future = pool.submit(torch.nn.Linear(4, 2), torch.ones(3, 4))
        ...     future.result().shape
        torch.Size([3, 2])

    The names of the arguments are those of the class in Intel Extension for PyTorch.
    """

    def __init__(self, core_ids: Iterable[int] | None = None, node_id: int | None = None) -> None:
        if core_ids is not None and node_id is not None:
            raise ValueError(
                f"core_ids={core_ids!r} and node_id={node_id!r} both say which cores; pass one"
            )
        cores = _of_node(node_id) if node_id is not None else _checked(core_ids)
        self.core_ids: tuple[int, ...] = tuple(sorted(cores))
        """The numbers of its cores, in ascending order."""
        self._is_shut_down = False
        self._thread = _new_thread()
        _pools.add(self)

    def __repr__(self) -> str:
        return f"CPUPool(core_ids={list(self.core_ids)})"

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Make the pool's thread call ``fn(*args, **kwargs)``, after the calls submitted earlier.

        Args:
            fn: a function, a module or another callable.
            args: its arguments by position.
            kwargs: its arguments by name.

        Returns:
            the call's future: ``result()`` waits for what it returns or raises, and ``cancel()``
            cancels a call that has not begun.

        Raises:
            TypeError: ``fn`` is not callable.
            RuntimeError: the pool is shut down, or the interpreter is.

        Example:
            >>> from fusedoptim.runtime import CPUPool
            >>> pool = CPUPool()
            >>> pool.submit(pow, 2, 5).result()
            32
            >>> pool.shutdown()
        """
        if not callable(fn):
            raise TypeError(f"fn={fn!r} cannot be called; pass the function and its arguments")
        return self._thread.submit(_call_pinned, frozenset(self.core_ids), fn, args, kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the pool's thread after the submitted calls; :func:`pin` still accepts the pool.

        Leaving ``with CPUPool(...) as pool`` calls this, and so does the interpreter's exit.

        Args:
            wait: return only when the thread has ended.
            cancel_futures: cancel the calls that have not begun.

        Example:
            >>> from fusedoptim.runtime import CPUPool
            >>> CPUPool().shutdown()
        """
        self._is_shut_down = True
        self._thread.shutdown(wait, cancel_futures=cancel_futures)

    def _renew(self) -> None:
        """Make a new thread in a forked process, where the parent's threads do not exist."""
        self._thread = _new_thread()
        if self._is_shut_down:
            self._thread.shutdown()


def _new_thread() -> ThreadPoolExecutor:
    """A thread that starts with its first call."""
    return ThreadPoolExecutor(1, thread_name_prefix=_THREAD_NAME)


_own = threading.local()
"""Whether the calling thread is a pool's and pinned."""


def _call_pinned(
    cores: frozenset[int], fn: Callable[..., _T], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _T:
    """Call a function on the pool's thread, which its first call pins for good."""
    if not hasattr(_own, "is_pinned"):
        Settings().change(cores)
        _own.is_pinned = True
    return fn(*args, **kwargs)


def _checked(core_ids: Iterable[int] | None) -> Iterable[int]:
    """The cores that the user names."""
    allowed = process_cores()
    if core_ids is None:
        return allowed
    try:
        given = [operator.index(core) for core in core_ids]
    except TypeError:
        raise TypeError(
            f"core_ids={core_ids!r} is not an iterable of integers; pass [0] for core 0, or "
            "range(4) for the first four"
        ) from None
    if not given:
        raise ValueError("core_ids is empty; pass at least one core, or None for all")
    if repeated := {core for core in given if given.count(core) > 1}:
        raise ValueError(f"core_ids={given} has core {listed(repeated)} twice; pass each core once")
    if foreign := set(given) - allowed:
        numbers = ", ".join(map(str, sorted(foreign)))
        binding = "".join(f"unset {name}, " for name in _BINDING if name in os.environ)
        raise ValueError(
            f"core_ids={given}: this process may not use core {numbers}, only "
            f"{listed(allowed)} (os.sched_getaffinity); choose among those, or {binding}"
            "start the process with more by taskset -c, numactl -C or the container's --cpuset-cpus"
        )
    return given


def _of_node(node_id: int) -> Iterable[int]:
    """One hardware thread of each physical core of a node."""
    found, allowed = nodes(), process_cores()
    try:
        number = operator.index(node_id)
    except TypeError:
        raise TypeError(
            f"node_id={node_id!r} is not an integer; pass 0 for the first node"
        ) from None
    if number not in found:
        raise ValueError(
            f"node_id={number} is not a NUMA node of this machine; choose one of {list(found)}"
        )
    if not (own := found[number] & allowed):
        raise ValueError(
            f"node_id={number}: this process may use none of its cores {listed(found[number])}, "
            f"but {listed(allowed)} (os.sched_getaffinity); choose another node"
        )
    return one_of_each(own)


_pools: weakref.WeakSet[CPUPool] = weakref.WeakSet()


def _renew_pools() -> None:
    for pool in list(_pools):
        pool._renew()


os.register_at_fork(after_in_child=_renew_pools)
