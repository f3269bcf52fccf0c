"""Computes the tables of docs/scale.md from measured steps: ``python -m benchmarks.scale``."""

from __future__ import annotations

import argparse
import csv
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks._output import RESULTS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scale.md"
RANKS = (8, 64, 1024)
MEASURED = 109_482_240
"""Parameters of BERT-base, whose steps were measured."""
LATENCY = 10e-6
"""Seconds of each of the log2(ranks) exchanges of a collective: an assumption."""
NETWORKS = {"25 Gbit/s": 25e9 / 8, "400 Gbit/s": 400e9 / 8}
"""Bytes per second that each rank sends and receives."""
LINK = 25e9
"""Bytes per second each way between an accelerator and its host: an assumption."""
SPLIT_BYTES, WHOLE_BYTES = 26, 28
"""Bytes that AdamW's step moves for each weight: with split weights, and with float32 weights."""


class Model(NamedTuple):
    """A model to train."""

    name: str
    weights: float


BERT, SEVEN = Model("BERT-base", MEASURED), Model("7 billion weights", 7e9)


class Step(NamedTuple):
    """A step that was measured, in results/<file>.csv."""

    file: str
    contender: str

    def seconds(self, weights: float) -> float:
        """The latest minimum on two cores, in proportion to the weights."""
        with (RESULTS / f"{self.file}.csv").open(newline="") as lines:
            rows = [
                row
                for row in csv.DictReader(lines)
                if row["workload"] == "bert-base"
                and row["contender"] == self.contender
                and row["cores"] == "2"
            ]
        return float(rows[-1]["min_us"]) * 1e-6 * weights / MEASURED


# In one process with the clipped steps: memory, and so the time, differs from process to process.
TORCH = Step("clipping", "torch fused AdamW, unclipped")
OURS = Step("clipping", "FusedAdamW, unclipped")
STEPS = {
    "AdamW": (TORCH, OURS),
    "AdamW, gradients clipped": (
        Step("clipping", "clip_grad_norm_, torch fused AdamW"),
        Step("clipping", "FusedAdamW(max_grad_norm=1)"),
    ),
    "Lamb": (Step("lamb", "foreach Lamb"), Step("lamb", "FusedLamb")),
}


def collective(ranks: int, size: float, bandwidth: float, passes: int) -> float:
    """Seconds to send (ranks - 1) / ranks of ``size`` bytes ``passes`` times around a ring."""
    return passes * (size * (ranks - 1) / ranks / bandwidth + LATENCY * math.log2(ranks))


def steps() -> Iterator[list[str]]:
    """The time of a step on one rank."""
    yield ["", "torch, ms", "ours, ms", "saved, ns a weight"]
    for name, pair in STEPS.items():
        theirs, ours = (step.seconds(MEASURED) for step in pair)
        saved = (theirs - ours) * 1e9 / MEASURED
        yield [name, f"{theirs * 1e3:.0f}", f"{ours * 1e3:.0f}", f"{saved:.2f}"]


def compared(model: Model, is_sharded: bool) -> Iterator[list[str]]:
    """The time of step and collectives in an iteration, and what each part of ours saves."""
    yield [
        "ranks",
        "network",
        "step",
        "collectives",
        "fused step",
        "clipping",
        "split",
        "all saved",
    ]
    for ranks in RANKS:
        part = model.weights / (ranks if is_sharded else 1)
        plain, ours = (step.seconds(part) for step in STEPS["AdamW"])
        clipped, ours_clipped = (step.seconds(part) for step in STEPS["AdamW, gradients clipped"])
        fused = plain - ours
        norms = clipped - ours_clipped - fused
        for network, bandwidth in NETWORKS.items():
            passes = 3 if is_sharded else 2  # gather in forward and backward, and reduce
            whole, half = (
                collective(ranks, width * model.weights, bandwidth, passes) for width in (4, 2)
            )
            split = whole - half + ours * (1 - SPLIT_BYTES / WHOLE_BYTES)
            share = (fused + norms + split) / (clipped + whole)
            times = map(milliseconds, (clipped, whole, fused, norms, split))
            yield [f"{ranks:,}", network, *times, f"{share:.0%}"]


def offloaded() -> Iterator[list[str]]:
    """The bytes that cross the link to the host in an iteration, and the host's step."""
    yield [
        "ranks",
        "float32 over the link",
        "bfloat16 over the link",
        "host's step",
        "saved at most",
    ]
    for ranks in RANKS:
        part = SEVEN.weights / ranks
        whole, half = (2 * width * part / LINK for width in (4, 2))
        step = OURS.seconds(part) * SPLIT_BYTES / WHOLE_BYTES
        apart = OURS.seconds(part) + whole
        # Gradients come, the step runs and weights go back at the same time, over a duplex link.
        together = max(step, half / 2)
        times = map(milliseconds, (whole, half, step, apart - together))
        yield [f"{ranks:,}", *times]


def milliseconds(seconds: float) -> str:
    """A time in milliseconds, with at least two digits."""
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def table(rows: Iterator[list[str]]) -> str:
    """The rows as a table in Markdown."""
    header, *body = rows
    lines = [header, ["---"] * len(header), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def tables() -> dict[str, str]:
    """The page's tables, by topic."""
    return {
        "steps": table(steps()),
        "DDP": table(compared(BERT, is_sharded=False)),
        "FSDP2": table(compared(SEVEN, is_sharded=True)),
        "offload": table(offloaded()),
    }


def page() -> str:
    """docs/scale.md with these tables, each after a comment with its name."""
    text = PAGE.read_text()
    for name, rows in tables().items():
        text = re.sub(rf"(?<=<!-- {name} -->\n\n)(\|.*\n)*", lambda _, rows=rows: rows, text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write them to docs/scale.md")
    if parser.parse_args().write:
        PAGE.write_text(page())
    else:
        print("\n".join(tables().values()))


if __name__ == "__main__":
    main()
