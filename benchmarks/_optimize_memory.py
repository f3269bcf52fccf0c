"""Prints, as JSON, the seconds and the memory that ``optimize(inplace=True)`` takes on BERT-base.

``python -m benchmarks._optimize_memory float32|bfloat16``, in a process of its own each time. The
memory is that of the model, as a multiple of the plain model's: at its peak, and afterwards. Linux
only.
"""

from __future__ import annotations

import json
import sys
import time

import torch

from benchmarks._memory import peak, reset_peak
from benchmarks._models import bert_base
from fusedoptim import transforms


def main() -> None:
    dtype = getattr(torch, sys.argv[1])
    small = torch.nn.Sequential(torch.nn.Linear(2000, 2000), torch.nn.Dropout()).eval()
    transforms.optimize(small, dtype=dtype)  # what the first call of all loads
    model = bert_base().eval()
    size = sum(p.nbytes for p in model.parameters())
    before = reset_peak()
    start = time.perf_counter()
    transforms.optimize(model, dtype=dtype, inplace=True)
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
