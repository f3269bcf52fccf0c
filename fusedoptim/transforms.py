"""The package :mod:`transforms`, by a name that nobody else's module can shadow."""

from fusedoptim._facade import import_own as _import_own

_import_own("transforms")

from transforms import (  # noqa: E402
    Entry,
    NoEffectWarning,
    Report,
    disable_auto_channels_last,
    enable_auto_channels_last,
    finalize,
    optimize,
    report,
    restore,
)

__all__ = [
    "Entry",
    "NoEffectWarning",
    "Report",
    "disable_auto_channels_last",
    "enable_auto_channels_last",
    "finalize",
    "optimize",
    "report",
    "restore",
]
