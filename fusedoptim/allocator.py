"""The package :mod:`allocator`, by a name that nobody else's module can shadow."""

from fusedoptim._facade import import_own as _import_own

_import_own("allocator")

import allocator  # noqa: E402 - once it is known to be ours
from allocator import *  # noqa: E402, F403 - its __all__ is this one's

__all__ = allocator.__all__
