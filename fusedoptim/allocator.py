"""The package :mod:`allocator`, by a name that nobody else's module can shadow."""

from fusedoptim._facade import import_own as _import_own

_import_own("allocator")

from allocator import (  # noqa: E402
    DeviceNotFoundError,
    borrowed_queue,
    check_not_forked,
    is_forked,
    load_compiler,
    load_dpctl,
    queue,
)

__all__ = [
    "DeviceNotFoundError",
    "borrowed_queue",
    "check_not_forked",
    "is_forked",
    "load_compiler",
    "load_dpctl",
    "queue",
]
