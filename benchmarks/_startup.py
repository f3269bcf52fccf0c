"""Prints the seconds between ``import torch`` and the end of one parameter's first step.

``python -m benchmarks._startup torch.optim:SGD``, in a fresh process each time.
"""

from __future__ import annotations

import importlib
import sys
import time

import torch


def main() -> None:
    start = time.perf_counter()
    module, _, name = sys.argv[1].partition(":")
    optimizer_class = getattr(importlib.import_module(module), name)
    param = torch.zeros(1000, requires_grad=True)
    param.grad = torch.ones(1000)
    optimizer_class([param], lr=0.1, momentum=0.9).step()
    print(time.perf_counter() - start)


if __name__ == "__main__":
    main()
