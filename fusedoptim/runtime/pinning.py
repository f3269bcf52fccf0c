"""Runs a thread and its OpenMP threads on the cores of a pool, for a while.

See docs/design/pinned-threads.md.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from fusedoptim.runtime._cores import listed, unpinned
from fusedoptim.runtime._threads import Settings
from fusedoptim.runtime.cpu_pool import CPUPool

__all__ = ["pin"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_RUN_LATER = (
    inspect.iscoroutinefunction,
    inspect.isgeneratorfunction,
    inspect.isasyncgenfunction,
)
"""Whether a call of a function only returns an object that runs its body later."""


class _ExitMethod:
    """``pin.__exit__``, of which each ``with`` statement gets an :class:`_Exit` of its own."""

    def __get__(self, pinned: pin | None, owner: type[pin]) -> Callable[..., None]:
        if pinned is None:  # contextlib.ExitStack passes the pin itself
            return _leave_innermost
        leave = _Exit(_leave_innermost, pinned)
        _entered.exit = weakref.ref(leave)
        return leave


class pin(contextlib.ContextDecorator):  # in lower case, like torch.no_grad
    """Run the calling thread on the cores of a pool, with as many OpenMP threads as cores.

    A context manager, and a decorator of functions, but not of generators and coroutines. It holds
    for the calling thread and its OpenMP threads, on which torch runs that thread's operations and
    this package its kernels. Leaving it restores the previous cores of each thread and the previous
    number of threads, even if ``torch.set_num_threads`` was called within. Other threads are not
    affected. Pins may be nested: the innermost counts. Threads and processes that start within
    inherit the cores.

    The threads of the CPU driver run only kernels of :class:`fusedoptim.raw.RawKernel`. The whole
    process shares them, on the cores that the process had when the driver started.

    Args:
        pool: a :class:`CPUPool`. Only its cores are used; its thread is not started.

    Raises:
        TypeError: ``pool`` is not a CPUPool; or it decorates a generator or coroutine function.
        ValueError: on entering it, this process may no longer use a core.
        RuntimeError: on entering it with several cores, the process was forked, and the OpenMP
            threads of the forking thread have not survived; or torch has no OpenMP.

    Example:
        >>> import os, torch
        >>> from fusedoptim.runtime import CPUPool, pin
        >>> first, *_ = os.sched_getaffinity(0)
        >>> with pin(CPUPool([first])):
        ...     torch.get_num_threads()
        1
        >>> @pin(CPUPool([first]))
        ... def infer(model, inputs):
        ...     return model(inputs)
        >>> infer(torch.nn.Linear(4, 2), torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """

    def __init__(self, pool: CPUPool) -> None:
        if not isinstance(pool, CPUPool):
            raise TypeError(f"pool={pool!r} is not a CPUPool; pass CPUPool([0]) for core 0")
        self._cores = frozenset(pool.core_ids)

    def __call__(self, func: _Function) -> _Function:
        """Pin the thread during each call of a function.

        Args:
            func: the function; its calls must run its body, which those of a generator or
                coroutine function do not.
        """
        body = getattr(func, "__func__", func)  # of a staticmethod or classmethod
        called = type(body).__call__  # of an object, its method
        if any(is_later(each) for is_later in _RUN_LATER for each in (body, called)):
            raise TypeError(
                f"pin cannot decorate {func!r}: its body runs after the call has returned; pin the "
                "code that runs it, or use `with pin(pool):` in it around code without yield or "
                "await"
            )
        return super().__call__(func)

    def __enter__(self) -> None:
        entered = _Entered(self, Settings())
        try:
            _entered.pins.append(entered)
            _entered.give_to_exit(entered)
            unpinned.setdefault(threading.get_ident(), entered.before.cores)
            entered.before.change(self._cores)
        except BaseException:
            _insist(_leave, entered)
            raise

    __exit__ = _ExitMethod()


def _leave_innermost(pinned: pin, *exception: object) -> None:
    """What ``pin.__exit__`` does."""
    pins = _entered.pins
    if not pins or pins[-1].pin is not pinned:
        raise RuntimeError(
            f"this pin to cores {listed(pinned._cores)} is not the one that the thread entered "
            "last; leave pins in reverse order, in the thread that entered them"
        )
    _insist(_leave, pins[-1])


class _Entered(NamedTuple):
    """A pin that a thread is in."""

    pin: pin
    before: Settings


class _Exit(functools.partial[None]):
    """What a ``with`` statement keeps of a pin, and calls at its end.

    A signal's handler may raise at the first instruction of a Python function, before that can
    leave the pin. The statement then drops this object, which no Python function has got.
    """

    entered: _Entered | None = None
    """What the statement has entered."""

    def __del__(self) -> None:
        entered = self.entered
        if entered is not None and entered in _entered.pins:
            _insist(_leave, entered)


class _Pins(threading.local):
    """The pins that the calling thread is in."""

    def __init__(self) -> None:
        self.pins: list[_Entered] = []
        """Outermost first."""
        self.exit: weakref.ref[_Exit] | None = None
        """What the last ``with`` statement, which gets it before it enters, will call."""

    def give_to_exit(self, entered: _Entered) -> None:
        """Tell the ``with`` statement that is entering a pin, if one is, what to leave."""
        leave = None if self.exit is None else self.exit()
        self.exit = None
        if leave is not None and leave.args[0] is entered.pin:
            leave.entered = entered


_entered = _Pins()


def _leave(entered: _Entered) -> None:
    """Restore the state before a thread's innermost pin; a second call changes nothing."""
    entered.before.restore()
    pins = _entered.pins
    if entered in pins:
        pins.remove(entered)
    if pins:  # some of the threads may be unknown to the pin around it
        outer = pins[-1].before
        outer.team = entered.before.team | outer.team
    else:
        unpinned.pop(threading.get_ident(), None)


def _insist(function: Callable[[_Entered], None], entered: _Entered) -> None:
    """Call a function, and once more if it is interrupted."""
    try:
        function(entered)
    except BaseException:
        function(entered)
        raise
