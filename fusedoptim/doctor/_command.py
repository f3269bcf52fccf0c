"""The command ``python -m fusedoptim doctor``."""

from __future__ import annotations

import argparse
from typing import Any

_DESCRIPTION = """\
Examine the machine, the drivers, the environment and this package; run every shipped kernel on
every device and compare it with its source in float64; say what is wrong, and the cure.
Exit status: 0, also with warnings; 1 with errors.
"""


def add_parser(subparsers: Any) -> None:
    """Add the command to those of ``python -m fusedoptim``."""
    parser = subparsers.add_parser(
        "doctor",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device",
        metavar="FILTER",
        help="run the kernels on this device alone: cpu, gpu, level_zero:gpu:1, ...",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from fusedoptim.doctor import examine

    report = examine(arguments.device)
    print(report.json() if arguments.json else report)
    return report.exit_code
