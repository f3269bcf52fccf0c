"""``python -m fusedoptim aot build|list|verify|warmup``."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

_DEVICES_NOTE = """\
A device's machine code shows that a kernel compiles for it, and can be unpacked with unzip. It is
not what runs: dpctl, Python's interface to SYCL, loads only SPIR-V, which the driver compiles.
"""
_CACHE_NOTE = """\
The CPU driver's programs are cached on disk, so later processes are warm too. Intel's GPU driver
has a cache of its own, according to its documentation: in NEO_CACHE_DIR, unless
NEO_CACHE_PERSISTENT=0.
"""


def add_parser(subparsers: Any) -> None:
    """Add the command ``aot`` to those of ``python -m fusedoptim``."""
    text = "compile kernels ahead of time"
    parser = subparsers.add_parser("aot", help=text, description=f"{text.capitalize()}.")
    commands = parser.add_subparsers(title="commands", metavar="<command>", required=True)

    def add(name: str, run: Callable[[Any], int], text: str, note: str = "") -> Any:
        command = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=note,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=lambda arguments: _reporting_errors(run, arguments))
        return command

    build = add("build", _build, "compile kernels to a bundle", _DEVICES_NOTE)
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
        help='for the compiler, as --options="-DN=4 -cl-mad-enable"',
    )
    build.add_argument(
        "--devices",
        default="",
        metavar="skl,dg2,pvc",
        help="Intel GPUs for which ocloc compiles too; a family is gen9, a range dg1:acm-g10",
    )
    show = add("list", _list, "list the kernels of a bundle")
    verify = add("verify", _verify, "check a bundle, and build its kernels here")
    warmup = add("warmup", _warmup, "have the driver compile; print the times", _CACHE_NOTE)
    for command in (show, verify):
        command.add_argument("bundle", metavar="BUNDLE.fob")
    warmup.add_argument(
        "bundle", metavar="BUNDLE.fob", nargs="?", help="default: all kernels that are shipped"
    )
    for command in (verify, warmup):
        command.add_argument(
            "--device", default="cpu", help='a SYCL filter string such as "gpu" (default: cpu)'
        )


def _reporting_errors(run: Callable[[Any], int], arguments: Any) -> int:
    """Run a command; print the errors that its input causes."""
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
    rows = [
        (", ".join(each.kernels), each.target, f"{each.size:,}", f"{each.seconds * 1e3:.0f}")
        for each in compiled
    ]
    _print_table([("kernels", "target", "bytes", "ms"), *rows], right=2)
    print(f"wrote {arguments.output}")
    return 0


def _list(arguments: Any) -> int:
    from fusedoptim.aot._bundle import load

    rows = [("kernel", "parameters", "from", "SPIR-V bytes", "machine code")]
    for module in load(arguments.bundle).modules:
        code = ", ".join(f"{name} {len(file):,}" for name, file in module.binaries.items())
        source = shlex.join([module.source, *module.options])
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
    count = f"{len(problems)} problem{'s' * (len(problems) > 1)}" if problems else "ok"
    print(f"{arguments.bundle}: {count}")
    return int(bool(problems))


def _warmup(arguments: Any) -> int:
    from fusedoptim.aot._warmup import Warmed, warmup

    warmed = warmup(arguments.bundle, device=arguments.device)
    warmed.append(Warmed("together", sum(each.seconds for each in warmed)))
    rows = [(each.name, f"{each.seconds * 1e3:.1f}") for each in warmed]
    _print_table([("kernel", "ms"), *rows], right=1)
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
