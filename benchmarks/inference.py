"""Times models with and without optimize: ``python -m benchmarks.inference [--save]``.

Inference of ResNet-50 in float32 with batches of 1 and 16; and the time and memory of ``optimize``
itself on BERT-base.
"""

from __future__ import annotations

import functools
import itertools
import math

import torch
from torch import nn

from benchmarks import _command, _harness
from benchmarks._fresh import measured
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
    """Time a forward pass of ResNet-50, plain and optimized in three ways."""
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
        limit=_TIME_LIMIT if rounds is None else math.inf,
    )
    report = Report(f"resnet50, batch {batch}", timings)
    least, median = report.base.over(report.timing(OPTIMIZED))
    layout = transforms.report(ways[OPTIMIZED]).done("auto_channels_last")
    notes = [
        f"eager over {OPTIMIZED}: {least:.2f} by the minimum, {median:.2f} by the median",
        f"the sample input selected {'channels_last' if layout else 'the original memory format'}",
    ]
    return report._replace(notes=notes)


def optimize(rounds: int | None) -> Table:
    """Measure time and memory of ``optimize(inplace=True)`` in fresh processes."""
    rows = []
    for purpose, dtype in itertools.product(("inference", "training"), ("float32", "bfloat16")):
        runs = [measured("optimize_memory", purpose, dtype) for _ in range(rounds or 3)]
        best = min(runs, key=lambda facts: facts["seconds"])
        rows.append(
            [
                f"bert-base, {purpose}, {dtype}",
                format_seconds(best["seconds"]),
                f"{best['peak']:.2f}",
                f"{best['after']:.2f}",
            ]
        )
    header = ["model", "time", "peak memory / model", "memory afterwards / model"]
    return Table("optimize(model, inplace=True)", header, rows)


if __name__ == "__main__":
    timed = {f"batch-{batch}": functools.partial(inference, batch) for batch in BATCHES}
    _command.run("inference", __doc__, {**timed, OPTIMIZE: optimize})
