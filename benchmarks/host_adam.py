"""Times AdamW where parameters are offloaded to: ``python -m benchmarks.host_adam``.

The step on the host alone, on lists of parameters whose gradients are there. Each contender runs in
processes of its own, in turn. DeepSpeed's needs ``--deepspeed``, a Python that has it and torch; it
compiles its step when it is first used.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from typing import NamedTuple

from benchmarks import _fresh, _output
from benchmarks._output import Table

LISTS = {
    "bert-base float32": ("bert-base", "float32"),
    "bert-base bfloat16": ("bert-base", "bfloat16"),
    "10000x1000 float32": ("10000x1000", "float32"),
    "lora bfloat16": ("lora", "bfloat16"),
}
"""Shapes and dtype."""
DEEPSPEED = "DeepSpeedCPUAdam"


class Contender(NamedTuple):
    """An optimizer's path and arguments."""

    path: str
    arguments: dict[str, object]


CONTENDERS = {
    "torch fused": Contender("torch.optim:AdamW", {"fused": True}),
    DEEPSPEED: Contender("deepspeed.ops.adam:DeepSpeedCPUAdam", {"adamw_mode": True}),
    "FusedAdamW": Contender("fusedoptim:FusedAdamW", {}),
    "FusedAdamW, float8 state": Contender("fusedoptim:FusedAdamW", {"state_dtype": "float8"}),
}


def measure(workload: str, names: list[str], rounds: int, deepspeed: str) -> Table:
    """Time the named contenders in turn, ``rounds`` times."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _, name in itertools.product(range(rounds), names):
        path, arguments = CONTENDERS[name]
        python = deepspeed if name == DEEPSPEED else sys.executable
        given = path, json.dumps(arguments), *LISTS[workload]
        seconds[name] += _fresh.measured("timed_step", *given, python=python)["seconds"]
    base = seconds.get(DEEPSPEED, seconds[names[0]])
    header = ["", "min", "median", "of the base", "median of it"]
    rows = [
        [
            name,
            *(_output.format_seconds(statistic(times)) for statistic in (min, statistics.median)),
            *(f"{f(times) / f(base):.2f}" for f in (min, statistics.median)),
        ]
        for name, times in seconds.items()
    ]
    which = DEEPSPEED if DEEPSPEED in names else names[0]
    return Table(f"{workload}, {rounds} processes each; the base is {which}", header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_adam", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=3, help="processes of each contender")
    parser.add_argument("--list", action="append", choices=LISTS, help="repeatable")
    parser.add_argument(
        "--deepspeed", metavar="PYTHON", help="of an environment with DeepSpeed, to measure it too"
    )
    args = parser.parse_args()
    names = [name for name in CONTENDERS if name != DEEPSPEED or args.deepspeed]
    _output.print_machine()
    for workload in args.list or LISTS:
        _output.print_table(measure(workload, names, args.rounds, args.deepspeed))


if __name__ == "__main__":
    main()
