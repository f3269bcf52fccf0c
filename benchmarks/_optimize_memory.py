"""Prints, as JSON, the time and memory of ``optimize(inplace=True)`` on BERT-base.

``python -m benchmarks._optimize_memory inference|training float32|bfloat16``, in a fresh
process each time. Memory is a multiple of the plain model's: at its peak, and afterwards. For
training, the optimizer is an AdamW without state. Linux only.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from benchmarks._memory import peak, reset_peak
from benchmarks._models import bert_base
from fusedoptim import transforms


def main() -> None:
    is_training, dtype = sys.argv[1] == "training", getattr(torch, sys.argv[2])

    def pair(model: nn.Module) -> tuple[Any, ...]:
        return (model, AdamW(model.parameters())) if is_training else (model.eval(),)

    small = pair(nn.Sequential(nn.Linear(2000, 2000), nn.Dropout()))
    transforms.optimize(*small, dtype=dtype)  # loads what the first call loads
    model = bert_base()
    rewritten = pair(model)
    size = sum(p.nbytes for p in model.parameters())
    before = reset_peak()
    start = time.perf_counter()
    transforms.optimize(*rewritten, dtype=dtype, inplace=True)
    seconds = time.perf_counter() - start
    most = peak()
    after = reset_peak()
    facts = {
        "seconds": seconds,
        "peak": 1 + (most - before) / size,
        "after": 1 + (after - before) / size,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
