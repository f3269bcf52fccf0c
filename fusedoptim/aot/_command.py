"""``python -m fusedoptim aot build|list|verify|warmup``."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

_DEVICES_NOTE = """\
A device's machine code shows that a kernel compiles for it, and can be unpacked with unzip. It is
not what runs: dpctl, Python's way to SYCL, loads SPIR-V alone, and the driver compiles that.
"""
_CACHE_NOTE = """\
What the CPU driver makes of the kernels is kept on the disk: later processes are warm too. Intel's
GPU driver does likewise, says its documentation, in NEO_CACHE_DIR and unless
NEO_CACHE_PERSISTENT=0.
"""


def add_parser(subparsers: Any) -> None:
    """Add the command ``aot`` to those of ``python -m fusedoptim``."""
    parser = subparsers.add_parser(
        "aot", help="compile kernels ahead of time", description="Compile kernels ahead of time."
    )
    commands = parser.add_subparsers(title="commands", metavar="<command>", required=True)
    build = _add(commands, "build", _build, "compile kernels to a bundle", _DEVICES_NOTE)
    build.add_argument(
        "source",
        nargs="+",
        metavar="SOURCE",
        help="a .cl or .spv file, module.py:function or package.module:function ([jit])",
    )
    build.add_argument("-o", "--output", required=True, metavar="OUT.fob", help="the bundle")
    build.add_argument(
        "--options",
        default="",
        metavar="OPTIONS",
        help='the compiler\'s, as --options="-DN=4 -cl-mad-enable"',
    )
    build.add_argument(
        "--devices",
        default="",
        metavar="skl,dg2,pvc",
        help="Intel GPUs for ocloc to compile for too; a family is gen9, a range dg1:acm-g10",
    )
    _add_bundle(_add(commands, "list", _list, "what a bundle holds"))
    verify = _add(commands, "verify", _verify, "check a bundle, and build its kernels here")
    _add_bundle(verify)
    _add_device(verify)
    warmup = _add(
        commands, "warmup", _warmup, "have the driver compile; print the times", _CACHE_NOTE
    )
    _add_bundle(warmup, nargs="?", default=None, help="default: the kernels of our optimizers")
    _add_device(warmup)


def _add(
    commands: Any, name: str, run: Callable[[Any], int], text: str, note: str = ""
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=note,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=lambda arguments: _reporting_errors(run, arguments))
    return parser


def _add_bundle(parser: argparse.ArgumentParser, **kwargs: Any) -> None:
    parser.add_argument("bundle", **({"metavar": "BUNDLE.fob"} | kwargs))


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", default="cpu", help='a SYCL filter string such as "gpu" (default: cpu)'
    )


def _reporting_errors(run: Callable[[Any], int], arguments: Any) -> int:
    """The status of a command; what it raises because of its input is printed."""
    try:
        return run(arguments)
    except (RuntimeError, ValueError, OSError, ImportError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _build(arguments: Any) -> int:
    from fusedoptim.aot._make import build

    compiled = build(
        arguments.source,
        arguments.output,
        options=shlex.split(arguments.options),
        devices=arguments.devices.split(",") if arguments.devices else (),
    )
    rows = [("kernels", "target", "bytes", "ms")]
    rows += (
        (", ".join(each.kernels), each.target, f"{each.size:,}", f"{each.seconds * 1e3:.0f}")
        for each in compiled
    )
    _print_table(rows, right=2)
    print(f"wrote {arguments.output}")
    return 0


def _list(arguments: Any) -> int:
    from fusedoptim.aot._bundle import load

    rows = [("kernel", "parameters", "from", "SPIR-V bytes", "machine code")]
    for module in load(arguments.bundle).modules:
        code = ", ".join(f"{name} {len(file):,}" for name, file in module.binaries.items())
        source = f"{module.source} {shlex.join(module.options)}".strip()
        rows += (
            (name, ", ".join(parameters), source, f"{len(module.spirv):,}", code)
            for name, parameters in module.kernels.items()
        )
    _print_table(rows)
    return 0


def _verify(arguments: Any) -> int:
    from fusedoptim.aot._verify import verify

    problems = verify(arguments.bundle, device=arguments.device)
    for problem in problems:
        print(problem, file=sys.stderr)
    count = "ok" if not problems else f"{len(problems)} problem{'s' * (len(problems) > 1)}"
    print(f"{arguments.bundle}: {count}")
    return 1 if problems else 0


def _warmup(arguments: Any) -> int:
    from fusedoptim.aot._warmup import warmup

    warmed = warmup(arguments.bundle, device=arguments.device)
    rows = [("kernel", "ms")]
    rows += ((each.name, f"{each.seconds * 1e3:.1f}") for each in warmed)
    rows.append(("together", f"{sum(each.seconds for each in warmed) * 1e3:.1f}"))
    _print_table(rows, right=1)
    print(_CACHE_NOTE, end="")
    return 0


def _print_table(rows: Sequence[Sequence[str]], right: int = 99) -> None:
    """Print columns, those from ``right`` on aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = (
            cell.rjust(width) if i >= right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        )
        print("  ".join(cells).rstrip())
