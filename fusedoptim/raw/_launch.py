"""Submission of a kernel through dpctl's C library.

dpctl's Python takes no host pointer as a kernel's argument; its C library, which it is made of,
takes any, and the CPU device reads any.
"""

from __future__ import annotations

import atexit
import collections
import ctypes
import functools
import threading
from typing import Any, NamedTuple

from fusedoptim._program import dpctl_function
from fusedoptim.allocator import is_forked

# Of the enumeration DPCTLKernelArgType, the same in dpctl 0.17 to 0.22. What is passed by value is
# bytes to the driver, so the type says no more than how many.
BY_SIZE = {1: 1, 2: 3, 4: 5, 8: 7}
POINTER, LOCAL_MEMORY = 10, 11
ANY_SIZE = 13  # a raw kernel argument, of dpctl 0.21 and newer

_COMPLETE = 3  # of DPCTLSyclEventStatusType


class _Functions(NamedTuple):
    """Functions of dpctl's C library."""

    submit: Any
    submit_groups: Any
    wait: Any
    status: Any
    delete: Any
    raw_argument: Any
    """makes an argument of any size, None where dpctl has none."""
    delete_raw_argument: Any


@functools.cache
def functions() -> _Functions:
    """Those of dpctl's C library that a launch needs."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    submission = [pointer, pointer, pointer, pointer, size]
    return _Functions(
        submit=dpctl_function(
            "DPCTLQueue_SubmitRange", pointer, *submission, pointer, size, pointer, size
        ),
        submit_groups=dpctl_function(
            "DPCTLQueue_SubmitNDRange", pointer, *submission, pointer, pointer, size, pointer, size
        ),
        wait=dpctl_function("DPCTLEvent_Wait", None, pointer),
        status=dpctl_function("DPCTLEvent_GetCommandExecutionStatus", ctypes.c_int, pointer),
        delete=dpctl_function("DPCTLEvent_Delete", None, pointer),
        raw_argument=dpctl_function("DPCTLRawKernelArg_Create", pointer, pointer, size),
        delete_raw_argument=dpctl_function("DPCTLRawKernelArg_Delete", None, pointer),
    )


class InFlight:
    """What launches that nobody waits for still use, outside of torch's memory."""

    def __init__(self) -> None:
        self._kept: collections.deque[tuple[int, Any]] = collections.deque()
        self._lock = threading.Lock()

    def keep(self, event: int, used: Any) -> None:
        """Keep ``used`` until the event has happened and another launch is kept."""
        self._kept.append((event, used))
        if not self._lock.acquire(blocking=False):
            return  # another thread looks
        try:
            while self._kept and functions().status(self._kept[0][0]) == _COMPLETE:
                functions().delete(self._kept.popleft()[0])
        finally:
            self._lock.release()

    def wait(self) -> None:
        """Wait for all launches that are kept."""
        while self._kept and not is_forked():
            event, _ = self._kept.popleft()
            functions().wait(event)
            functions().delete(event)


in_flight = InFlight()
atexit.register(in_flight.wait)  # before the memory that they use goes
