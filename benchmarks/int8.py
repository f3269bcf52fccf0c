"""Times models in float32 and in INT8: ``python -m benchmarks.int8 [--save]``.

The models are ResNet-50 on random images, and BERT-base on 128 random tokens a sentence. Both have
random weights, and are calibrated on inputs of the same kind. The process keeps its memory
(``runtime.keep_memory``), so that no contender pays for page faults.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks import _command, _harness
from benchmarks._harness import Contender, Report
from benchmarks._models import bert_base, resnet50
from fusedoptim import runtime, transforms

OPTIMIZED = "float32, optimized"
STATIC = "INT8"
ROUNDS = {1: 40, 8: 10, 16: 10}
_TIME_LIMIT = 80  # seconds
_TOKENS = 128


def _images(batch: int) -> Tensor:
    return torch.randn(batch, 3, 224, 224)


def _sentences(batch: int) -> Tensor:
    return torch.randint(0, 30_000, (batch, _TOKENS))


def inference(
    make: Callable[[], nn.Module],
    inputs: Callable[[int], Tensor],
    batch: int,
    rounds: int | None,
) -> Report:
    """Time a forward pass in float32, plain and optimized, and in INT8."""
    runtime.keep_memory()
    torch.manual_seed(0)
    model, sample = make().eval(), inputs(batch)
    ways = {
        "float32, eager": model,
        OPTIMIZED: transforms.optimize(model, sample_input=sample),
        STATIC: transforms.quantize(model, [inputs(batch) for _ in range(2)]),
        "INT8, dynamic Linears": transforms.quantize(model),
    }

    def contender(name: str, module: nn.Module) -> Contender:
        def step() -> None:
            with torch.no_grad():
                module(sample)

        return Contender(name, step)

    timings = _harness.time_interleaved(
        [contender(name, module) for name, module in ways.items()],
        rounds or ROUNDS[batch],
        limit=_TIME_LIMIT if rounds is None else math.inf,
    )
    report = Report(f"{make.__name__}, batch {batch}", timings)
    least, median = report.timing(STATIC).over(report.timing(OPTIMIZED))
    worst = transforms.report(ways[STATIC]).done("quantize")[0]
    notes = [
        f"INT8 over optimized float32: {least:.2f} by the minimum, {median:.2f} by the median",
        f"largest error of a layer: {worst.error:.2%} ({worst.where})",
    ]
    return report._replace(notes=notes)


if __name__ == "__main__":
    workloads = {
        f"{name}-{batch}": functools.partial(inference, make, inputs, batch)
        for name, make, inputs, batches in (
            ("resnet50", resnet50, _images, (1, 16)),
            ("bert", bert_base, _sentences, (1, 8)),
        )
        for batch in batches
    }
    _command.run("int8", __doc__, workloads)
