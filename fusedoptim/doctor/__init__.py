"""Examines the machine, the drivers and this package, and says how to cure each problem.

``python -m fusedoptim doctor`` prints what :func:`examine` returns.
"""

from __future__ import annotations

import time

from fusedoptim.doctor import _devices, _drivers, _environment, _machine, _package, _versions
from fusedoptim.doctor._report import Problem, Report, Section, guarded
from fusedoptim.doctor._workers import Workers

__all__ = ["Problem", "Report", "Section", "examine"]

_CHECKS = {
    "versions": _versions.check,
    "packages": _package.check_names,
    "kernels": _package.check_kernels,
    "machine": _machine.check,
    "environment": _environment.check,
    "drivers": _drivers.check,
}


def examine(device: str | None = None) -> Report:
    """Examine the machine, its drivers and devices, and run every shipped kernel on each device.

    Each kernel runs on random inputs, and its results are compared with those of its source, run as
    plain Python in float64. Everything that uses a driver runs in separate processes, as drivers
    may crash. So a notebook's process may call this at any time.

    Args:
        device: a SYCL filter string such as "cpu", "gpu" or "level_zero:gpu:1", to run the
            kernels only there; None for all devices.

    Returns:
        a report that prints as a page, in a terminal and in a notebook.

    Raises:
        TypeError: ``device`` is neither a string nor None.

    Example:
        >>> from fusedoptim import doctor
        >>> report = doctor.examine()
        >>> report.exit_code
        0
    """
    if not (device is None or isinstance(device, str)):
        raise TypeError(f"device={device!r} is neither a SYCL filter string nor None")
    started = time.monotonic()
    with Workers(device) as workers:  # they run while this process looks at files
        sections = [guarded(name, check) for name, check in _CHECKS.items()]
        sections += _devices.sections(workers)
    return Report(sections, time.monotonic() - started)
