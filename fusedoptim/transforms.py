"""The package :mod:`transforms`, by a name that nobody else's module can shadow."""

from fusedoptim._facade import import_own as _import_own

_import_own("transforms")

import transforms  # noqa: E402
from transforms import *  # noqa: E402, F403

__all__ = [*transforms.__all__]
