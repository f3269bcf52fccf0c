"""Kernels compiled ahead of time, in bundles that load where no compiler is installed.

``python -m fusedoptim aot build lion.cl -o lion.fob`` compiles them. :func:`load` returns the
kernels. :func:`warmup` makes the driver compile before the first step.
"""

from fusedoptim.aot._bundle import Bundle, BundleError, load
from fusedoptim.aot._devices import DeviceError
from fusedoptim.aot._make import Compiled, build
from fusedoptim.aot._verify import verify
from fusedoptim.aot._warmup import Warmed, warmup

__all__ = [
    "Bundle",
    "BundleError",
    "Compiled",
    "DeviceError",
    "Warmed",
    "build",
    "load",
    "verify",
    "warmup",
]
