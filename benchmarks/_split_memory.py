"""Prints, as JSON, the bytes per weight of SplitSGD or of a float32 master copy.

``python -m benchmarks._split_memory split|master bert-base``, in a fresh process each time.
"weights" is the value itself, "tensors" all tensors that live from step to step, and "peak" the
rise of the resident memory over a process without the model. Linux only.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks._memory import peak, reset_peak
from benchmarks._peers import MasterSGD
from benchmarks._shapes import MODELS, Shape
from benchmarks._workloads import LR, MOMENTUM
from fusedoptim import SplitSGD


def _params(shapes: Sequence[Shape]) -> list[Tensor]:
    params = [torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    for param in params:
        param.grad = torch.ones_like(param)
    return params


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


def split(params: list[Tensor]) -> tuple[int, int]:
    """Take two steps; return the bytes of the weights and of the momentum."""
    optimizer = SplitSGD(params, lr=LR, momentum=MOMENTUM)
    optimizer.step()
    optimizer.step()
    state = [optimizer.state[p] for p in params]
    weights = _size(params) + _size([s["trail"] for s in state])
    return weights, _size([s["momentum_buffer"] for s in state])


def master(params: list[Tensor]) -> tuple[int, int]:
    """Take two steps; return the bytes of the weights, and of momentum and float32 gradient."""
    optimizer = MasterSGD(params, lr=LR, momentum=MOMENTUM)
    optimizer.step()
    optimizer.step()
    grads = [m.grad for m in optimizer.masters if m.grad is not None]
    return _size(params) + _size(optimizer.masters), _size(grads) + _size(optimizer.momentum)


def main() -> None:
    steps = {"split": split, "master": master}[sys.argv[1]]
    shapes = MODELS[sys.argv[2]]()
    steps(_params([(8192,)]))  # starts the driver and threads, and builds the kernel
    before = reset_peak()
    params = _params(shapes)
    weights, state = steps(params)
    grads = _size([p.grad for p in params if p.grad is not None])
    count = sum(map(math.prod, shapes))
    facts = {"weights": weights, "tensors": weights + state + grads, "peak": peak() - before}
    print(json.dumps({name: size / count for name, size in facts.items()}))


if __name__ == "__main__":
    main()
