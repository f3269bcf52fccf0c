"""The package :mod:`transforms`, by a name that nobody else's module can shadow."""

from fusedoptim._facade import import_own

__all__ = list(import_own("transforms").__all__)
