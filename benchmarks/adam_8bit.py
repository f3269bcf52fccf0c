"""Times AdamW with small state beside torchao's: ``python -m benchmarks.adam_8bit``.

Each optimizer is a process of its own, and they take turns. ``--torchao`` is the Python of an
environment with torchao, whose optimizers need torch.compile and a C++ compiler. Where they end is
in ``examples/state_dtype.py --torchao``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

from benchmarks import _fresh, _output
from benchmarks._output import Table
from benchmarks._shapes import MODELS

OURS = "fusedoptim:FusedAdamW"
BASE = "torch fused AdamW"
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    BASE: ("torch.optim:AdamW", {"fused": True}),
    "FusedAdamW": (OURS, {}),
    "FusedAdamW, bfloat16 state": (OURS, {"state_dtype": "torch.bfloat16"}),
    "FusedAdamW, float8 state": (OURS, {"state_dtype": "float8"}),
    "torchao AdamW8bit": ("torchao.optim:AdamW8bit", {}),
    "torchao AdamWFp8": ("torchao.optim:AdamWFp8", {}),
}
"""The path of each optimizer, and its arguments."""


def table(model: str, rounds: int, torchao: str | None) -> Table:
    """Step each optimizer in ``rounds`` processes."""
    chosen = {
        name: made
        for name, made in OPTIMIZERS.items()
        if torchao or not made[0].startswith("torchao")
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    for _ in range(rounds):
        for name, (path, arguments) in chosen.items():
            python = torchao if torchao and path.startswith("torchao") else sys.executable
            given = path, json.dumps(arguments), model, "float32"
            runs[name].append(_fresh.measured("timed_step", *given, python=python))
    times = {name: [t for run in found for t in run["seconds"]] for name, found in runs.items()}
    rows = [
        [
            name,
            f"{min(seconds) * 1e3:.3g}",
            f"{statistics.median(seconds) * 1e3:.3g}",
            f"{min(seconds) / min(times[BASE]):.2f}",
            f"{statistics.median(seconds) / statistics.median(times[BASE]):.2f}",
            f"{runs[name][0]['bytes']:.2f}",
            f"{min(run['first'] for run in runs[name]):.2f}",
        ]
        for name, seconds in times.items()
    ]
    header = ["optimizer", "min ms", "median ms", "ratio", "of medians", "state bytes", "first s"]
    return Table(f"{model}: a step, and bytes of state a weight", header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adam_8bit", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=2, help="processes of each optimizer")
    parser.add_argument("--model", default="resnet50", choices=MODELS, help="shapes of parameters")
    parser.add_argument("--torchao", metavar="PYTHON", help="of an environment with torchao")
    args = parser.parse_args()
    _output.print_machine()
    _output.print_table(table(args.model, args.rounds, args.torchao))


if __name__ == "__main__":
    main()
