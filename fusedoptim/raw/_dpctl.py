"""The C library that dpctl is made of.

dpctl's Python takes no host pointer as a kernel's argument; its C library takes any, and the CPU
device reads any.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

from fusedoptim.launch.sycl import dpctl_function

# Of the enumeration DPCTLKernelArgType, the same in dpctl 0.17 to 0.22. What is passed by value is
# bytes to the driver, so the type says no more than how many.
BY_SIZE = {1: 1, 2: 3, 4: 5, 8: 7}
POINTER, LOCAL_MEMORY = 10, 11
ANY_SIZE = 13  # a raw kernel argument, of dpctl 0.21 and newer

COMPLETE = 3
"""Of DPCTLSyclEventStatusType."""


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
