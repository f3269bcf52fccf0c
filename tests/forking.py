"""Run test scripts in forks of a process that has already imported torch, which is slow.

``tests/running.py`` starts ``exec(next_script())``, and writes one line of JSON for each script.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from types import CodeType

import torch  # noqa: F401 (what the forks need not do)

import tests.frozen  # noqa: F401 (last of all)


def next_script() -> CodeType:
    """Fork for each line of the standard input, and print how the fork ended.

    In a fork it returns the script. The caller then continues as a process that runs nothing else,
    and ends as the interpreter does.
    """
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            return _entered(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    sys.exit()


def _entered(
    script: str, arguments: Sequence[str], variables: dict[str, str], files: Sequence[str]
) -> CodeType:
    """Prepare this process for a script, with ``files`` as its three standard streams."""
    os.environ.clear()
    os.environ.update(variables)
    for number, name in enumerate(files):
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.argv[1:] = arguments
    return compile(script, "<string>", "exec")
