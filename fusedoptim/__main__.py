"""The command line: ``python -m fusedoptim <command>``."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Sequence

from fusedoptim._version import __version__

_COMMANDS = {
    "doctor": "what is installed, what works, what does not and the cure",
    "aot": "compile kernels ahead of time",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the command line names.

    Returns:
        the exit status; 1 if the output cannot be written, 2 if there is no command.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m fusedoptim")
    parser.add_argument("--version", action="version", version=f"fusedoptim {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="<command>")
    for name, text in _COMMANDS.items():
        if name in arguments[:1]:  # what the others import may be what is broken
            importlib.import_module(f"fusedoptim.{name}._command").add_parser(commands)
        else:
            commands.add_parser(name, help=text)
    parsed = parser.parse_args(arguments)
    if not hasattr(parsed, "run"):
        parser.print_help(sys.stderr)
        return 2
    try:
        status: int = parsed.run(parsed)
        if sys.stdout is not None:  # Python has none where it is closed
            sys.stdout.flush()
    except OSError as error:  # as of a full disk, or a pipe that nobody reads
        print(f"error: {error}", file=sys.stderr)
        with contextlib.suppress(OSError):
            sys.stdout.close()  # at its end Python would try again
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
