"""Interrupts in tests: at each place of some code in turn, at one place, or at random moments.

:class:`InterruptAt` raises at the n-th place. A test goes through all of them:

    for n in itertools.count():
        with InterruptAt(n, "calls", within=allocator) as interrupt:
            step()
        check()
        if not interrupt.has_raised:
            break

For a step: ``InterruptAt(n, "polls", within=fusedoptim, since="_update")``. "polls" are the places
at which CPython looks for signals; ``since`` names the function from whose first call on they are
counted. Where the code takes the same path each time, :func:`polls_of` finds its places in one run,
and going through those is faster: only the call with the place is traced opcode by opcode.
:func:`stopping_at` acts at the first place that meets a condition, such as :func:`at` a
function's call, and :func:`interrupted` interrupts at random moments.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import inspect
import linecache
import opcode
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, Literal, NamedTuple

from tests.conftest import SEED

Condition = Callable[[FrameType, str], bool]
"""Whether a traced event, such as a "call" or a "line", is the one to stop at."""

_CALLS = "CALL", "CALL_FUNCTION_EX", "CALL_KW"
_POLLING = bytes(name in (*_CALLS, "JUMP_BACKWARD") for name in opcode.opname[:256])
"""Whether CPython looks for signals after an opcode; it also does when a function starts."""
_HAS_CYTHON_EVENTS = sys.version_info >= (3, 13)
"""Whether dpctl reports calls of its own functions as calls of the Python function below them."""


class Place(NamedTuple):
    """A place of code that takes the same path each time."""

    call: int
    """Which of the traced calls it is in, from 1."""
    code: CodeType
    """What that call runs."""
    n: int
    """Which of the places in that call it is, from 0."""


class InterruptAt:
    """Raises an exception at the n-th place, once, and keeps it from leaving the ``with`` block.

    Args:
        n: which place, from 0; -1 for none; or one that :func:`polls_of` has found.
        places: "calls" of functions, "opcodes", or "polls", where CPython looks for signals.
            "polls" leave out generators and ``__del__``, in which Python reports exceptions
            instead of raising them.
        within: the module or package whose code is interrupted.
        since: name of the function from whose first call on the places are counted.
        error: the exception.
    """

    def __init__(
        self,
        n: int | Place,
        places: Literal["calls", "opcodes", "polls"],
        *,
        within: ModuleType,
        since: str | None = None,
        error: type[BaseException] = KeyboardInterrupt,
    ) -> None:
        path = Path(str(within.__file__))
        self._within = str(path.parent if path.name == "__init__.py" else path)
        self._only = n if isinstance(n, Place) else None
        self._left = n.n if isinstance(n, Place) else n
        self._places, self._since, self._error = places, since, error
        self._has_begun = since is None
        self._polled: set[FrameType] = set()  # whose last opcode polls
        # Frames keep what they use alive: Python only reports exceptions in callbacks of weak
        # references, too. Without an interrupt there is none, and code that counts references
        # takes its usual path.
        self._keeps_frames = self._left >= 0
        self._frames: list[FrameType] = []
        self._calls = 0
        self.passed: list[tuple[int, CodeType]] = []
        """For each place that was passed, which of the traced calls it is in, and its code."""
        self.has_raised = False

    def __enter__(self) -> InterruptAt:
        self._before, self._is_collecting = sys.gettrace(), gc.isenabled()
        gc.disable()  # Python reports exceptions in finalizers instead of raising them
        # CPython 3.12 reports opcodes only if a frame has asked for them before this call.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._trace)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        sys.settrace(self._before)
        self._frames.clear()  # or each run would leave thousands of objects in cycles
        self._polled.clear()
        if self._is_collecting:
            gc.enable()
        return self.has_raised and isinstance(error, self._error)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Return what traces the rest of a call."""
        code, is_polled = frame.f_code, self._places == "polls"
        if self.has_raised or not code.co_filename.startswith(self._within):
            return None
        if _HAS_CYTHON_EVENTS and code.co_code[frame.f_lasti] != opcode.opmap["RESUME"]:
            return self._trace  # not the start of a function
        if is_polled and (code.co_name == "__del__" or code.co_flags & inspect.CO_GENERATOR):
            return None
        self._has_begun |= code.co_name == self._since
        self._calls += 1
        here = self._calls, code
        if self._places == "calls":
            self._pass(here)
            return None
        polled = self._polled
        polled.discard(frame.f_back)  # type: ignore[arg-type]  # a call from Python
        if self._only is not None and here != self._only[:2]:
            return None
        if self._keeps_frames:
            self._frames.append(frame)
        if is_polled:
            self._pass(here)
        polls = code.co_code.translate(_POLLING)

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "opcode":  # of which there are thousands in a step
                if not is_polled:
                    self._pass(here)
                elif frame in polled:
                    polled.remove(frame)
                    self._pass(here)
                if polls[frame.f_lasti]:
                    polled.add(frame)
            elif event == "exception":  # CPython goes to the handler without looking
                polled.discard(frame)
            return frame.f_trace

        frame.f_trace = trace  # first: without it CPython 3.13 ignores the next line
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return trace

    def _pass(self, here: tuple[int, CodeType]) -> None:
        if not self._has_begun:
            return
        self.passed.append(here)
        self._left -= 1
        if self._left == -1:
            self.has_raised = True
            raise self._error  # which ends the tracing


def polls_of(call: Callable[[], object], *, within: ModuleType, since: str) -> list[Place]:
    """Run a call, and return the places at which CPython looks for signals in it."""
    with InterruptAt(-1, "polls", within=within, since=since) as never:
        result = call()
    del result  # not within the call's places
    counts: collections.Counter[int] = collections.Counter()
    places = []
    for number, code in never.passed:
        places.append(Place(number, code, counts[number]))
        counts[number] += 1
    return places


def interrupt() -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def stopping_at(condition: Condition, action: Callable[[], None] = interrupt) -> Iterator[None]:
    """Act at the first traced event for which the condition holds."""
    before = sys.gettrace()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if condition(frame, event):
            sys.settrace(before)
            action()
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def at(function: Callable[..., Any], event: str) -> Condition:
    """The start of a function, its "call", or its "return"."""
    return lambda frame, found: frame.f_code is function.__code__ and found == event


def at_line(function: Callable[..., Any], line: int | str) -> Condition:
    """A line of a function, by its number or by text in it."""
    code = function.__code__

    def is_there(frame: FrameType, event: str) -> bool:
        if frame.f_code is not code or event != "line":
            return False
        if isinstance(line, int):
            return frame.f_lineno == line
        return line in linecache.getline(code.co_filename, frame.f_lineno)

    return is_there


def at_call_from(function: Callable[..., Any], n: int = 0) -> Condition:
    """The n-th call that a function makes."""
    left = n

    def is_there(frame: FrameType, event: str) -> bool:
        nonlocal left
        caller = frame.f_back
        if event != "call" or caller is None or caller.f_code is not function.__code__:
            return False
        left -= 1
        return left < 0

    return is_there


def interrupted(step: Callable[[random.Random], None], count: int, most: float) -> None:
    """Call ``step`` repeatedly, and interrupt it at random moments.

    Args:
        step: takes a source of random choices.
        count: number of interrupts.
        most: longest time until the next interrupt, in seconds.
    """
    choose, is_armed = random.Random(SEED), False

    def handle(number: int, frame: Any) -> None:
        nonlocal is_armed
        if is_armed:  # once, and never while the interrupt is handled
            is_armed = False
            raise KeyboardInterrupt

    def run() -> None:  # from 3.12 on, the jump back of a loop that ends a `try` is outside of it
        while is_armed:
            step(choose)

    previous = signal.signal(signal.SIGALRM, handle)
    hook, sys.unraisablehook = sys.unraisablehook, lambda error: None  # silences finalizers
    try:
        while count > 0:
            try:
                is_armed = True
                signal.setitimer(signal.ITIMER_REAL, max(choose.random() * most, 1e-6))
                run()
            except KeyboardInterrupt:
                count -= 1
    finally:
        is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        sys.unraisablehook = hook
    gc.collect()
