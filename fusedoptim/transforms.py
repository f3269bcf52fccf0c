"""The package :mod:`transforms`, by a name that nobody else's module can shadow."""

from fusedoptim._facade import import_own as _import_own

__all__ = list(_import_own("transforms").__all__)
