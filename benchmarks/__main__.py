"""Runs the named benchmarks, by default all: ``python -m benchmarks [name ...] [--save]``.

Each runs in a process of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from benchmarks import _command

NAMES = (
    *("sgd", "adagrad", "adam", "lamb", "split_sgd", "sparse", "clipping"),
    *("dropout", "attention", "cross_entropy", "detection", "embedding_bags", "interaction"),
    *("convolution", "iteration", "memory", "huge_pages", "inference", "int8"),
    *("cores", "ranks", "instances"),
    *("fragmentation", "pool", "raw", "elementwise"),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("name", nargs="*", help=f"one of {', '.join(NAMES)}")
    _command.add_options(parser)
    args = parser.parse_args()
    if unknown := set(args.name) - set(NAMES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(NAMES)}")
    options = ["--save"] if args.save else []
    if args.rounds is not None:
        options += ["--rounds", str(args.rounds)]
    for name in args.name or NAMES:
        print(f"\n# {name}", flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *options], check=True)


if __name__ == "__main__":
    main()
