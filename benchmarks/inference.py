"""Times models against themselves optimized: ``python -m benchmarks.inference [--save]``.

ResNet-50 for inference in float32, at batch 1 and 16; and what ``optimize`` itself takes on
BERT-base, in seconds and in memory.
"""

from __future__ import annotations

import functools
import itertools
import json
import math

import torch
from torch import nn

from benchmarks import _command, _harness, _processes
from benchmarks._harness import Contender, Report
from benchmarks._models import resnet50
from benchmarks._output import Table, format_seconds
from fusedoptim import transforms

PLAIN = "eager"
OPTIMIZED = "optimized for the batch"
BATCHES = {1: 40, 16: 10}
OPTIMIZE = "optimize"
_TIME_LIMIT = 150  # seconds


def inference(batch: int, rounds: int | None) -> Report:
    """Time a forward pass of ResNet-50 as it is, optimized, and with one of two passes each."""
    model = resnet50().eval()
    images = torch.randn(batch, 3, 224, 224)
    ways = {
        PLAIN: model,
        OPTIMIZED: transforms.optimize(model, sample_input=images),
        "optimized, batch unknown": transforms.optimize(model),
        "optimized, auto_channels_last=False": transforms.optimize(model, auto_channels_last=False),
    }

    def contender(name: str, module: nn.Module) -> Contender:
        def step() -> None:
            with torch.no_grad():
                module(images)

        return Contender(name, step)

    timings = _harness.time_interleaved(
        [contender(name, module) for name, module in ways.items()],
        rounds or BATCHES[batch],
        lambda: None,
        limit=_TIME_LIMIT if rounds is None else math.inf,
    )
    report = Report(f"resnet50, batch {batch}", timings)
    least, median = report.base.over(report.timing(OPTIMIZED))
    layout = transforms.report(ways[OPTIMIZED]).done("auto_channels_last")
    notes = [
        f"eager over {OPTIMIZED}: {least:.2f} by the minimum, {median:.2f} by the median",
        f"the sample has chosen {'channels_last' if layout else 'the layout as it was'}",
    ]
    return report._replace(notes=notes)


def optimize(rounds: int | None) -> Table:
    """Seconds and memory of ``optimize(inplace=True)``, each in a process of its own."""
    rows = []
    for purpose, dtype in itertools.product(("inference", "training"), ("float32", "bfloat16")):
        runs = [
            json.loads(_processes.output("benchmarks._optimize_memory", purpose, dtype))
            for _ in range(rounds or 3)
        ]
        best = min(runs, key=lambda facts: facts["seconds"])
        rows.append(
            [
                f"bert-base, {purpose}, {dtype}",
                format_seconds(best["seconds"]),
                f"{best['peak']:.2f}",
                f"{best['after']:.2f}",
            ]
        )
    header = ["model", "time", "peak memory, of the model's", "memory afterwards"]
    return Table("optimize(model, inplace=True)", header, rows)


if __name__ == "__main__":
    timed = {f"batch-{batch}": functools.partial(inference, batch) for batch in BATCHES}
    _command.run("inference", __doc__, {**timed, OPTIMIZE: optimize})
