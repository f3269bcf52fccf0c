"""The user's own kernels, on torch tensors, numpy arrays and SYCL memory, without copies.

The conventions are CuPy's; docs/writing-kernels.md lists the differences. Importing this module
loads no compiler and touches no device.
"""

from fusedoptim.raw._arguments import LocalMemory
from fusedoptim.raw._errors import InvalidModuleError, KernelCompileError, KernelCompileWarning
from fusedoptim.raw.elementwise import ElementwiseKernel
from fusedoptim.raw.kernel import RawKernel, RawModule
from fusedoptim.raw.reduction import ReductionKernel

__all__ = [
    "ElementwiseKernel",
    "InvalidModuleError",
    "KernelCompileError",
    "KernelCompileWarning",
    "LocalMemory",
    "RawKernel",
    "RawModule",
    "ReductionKernel",
]
