"""Times merged embedding bags: ``python -m benchmarks.embedding_bags [--save]``.

26 tables of 100,000 rows, as a DLRM has, with new indices in each round. An iteration is forward,
backward and the update of the tables; the base is 26 ``EmbeddingBag(sparse=True)`` and an optimizer
of torch's. "forward" is without a backward pass, but recorded for one. "touched" reads and writes
each row that the round's indices name, once, by torch's index_select and index_copy_. All with
freed memory kept.
"""

from __future__ import annotations

import copy
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import _command
from benchmarks._harness import Contender, Report, time_interleaved
from fusedoptim.nn import MergedEmbeddingBag
from fusedoptim.runtime import keep_memory

_TABLES, _ROWS, _LR = 26, 100_000, 0.01
_ROUNDS = 20


class _Workload(NamedTuple):
    optimizer: str
    width: int = 64
    batch: int = 2048
    indices: int = 1
    """Of each bag."""
    split: bool = False
    updates: bool = True


_WORKLOADS = {
    "sgd": _Workload("sgd"),
    "sgd-20-indices": _Workload("sgd", indices=20),
    "sgd-wide": _Workload("sgd", width=128),
    "sgd-batch-128": _Workload("sgd", batch=128),
    "sgd-split": _Workload("sgd", split=True),
    "adagrad": _Workload("adagrad"),
    "rowwise-adagrad": _Workload("rowwise_adagrad"),
    "forward": _Workload("sgd", updates=False),
    "forward-20-indices": _Workload("sgd", indices=20, updates=False),
    "forward-batch-128": _Workload("sgd", batch=128, updates=False),
}


class _Bags:
    """The same tables for torch and for us, and the indices of a round."""

    def __init__(self, workload: _Workload) -> None:
        self._workload = workload
        tables = [
            torch.nn.EmbeddingBag(_ROWS, workload.width, mode="sum", sparse=True)
            for _ in range(_TABLES)
        ]
        self.plain = copy.deepcopy(tables)
        weights = [bag.weight for bag in self.plain]
        rule = torch.optim.SGD if workload.optimizer == "sgd" else torch.optim.Adagrad
        self._optimizer: torch.optim.Optimizer = rule(weights, lr=_LR)
        self.merged = MergedEmbeddingBag.from_embedding_bags(
            tables, optimizer=workload.optimizer, lr=_LR, split=workload.split
        )
        shape = workload.batch, workload.width
        self._grads = [torch.randn(shape) * 1e-3 for _ in range(_TABLES)]
        self._own_grads = [grad.to(tables[0].weight.dtype) for grad in self._grads]
        self.draw()

    def draw(self) -> None:
        """New indices."""
        count = self._workload.batch * self._workload.indices
        self.indices = [torch.randint(_ROWS, (count,)) for _ in range(_TABLES)]
        self.offsets = [torch.arange(0, count, self._workload.indices) for _ in range(_TABLES)]
        self._distinct = [i.unique() for i in self.indices]

    def torchs(self) -> None:
        outputs = [
            bag(*own) for bag, own in zip(self.plain, zip(self.indices, self.offsets), strict=True)
        ]
        if self._workload.updates:
            torch.autograd.backward(outputs, self._grads)
            self._optimizer.step()
            self._optimizer.zero_grad()

    def ours(self) -> None:
        outputs = self.merged(self.indices, self.offsets)
        if self._workload.updates:
            torch.autograd.backward(outputs, self._own_grads)
            self.merged.optimizer().step()

    def touched(self) -> None:
        for bag, rows in zip(self.plain, self._distinct):
            weight: Tensor = bag.weight.detach()
            weight.index_copy_(0, rows, weight.index_select(0, rows))


def _measure(name: str, rounds: int | None) -> Report:
    keep_memory()
    bags = _Bags(_WORKLOADS[name])
    contenders = [
        Contender("torch", bags.torchs),
        Contender("fusedoptim", bags.ours),
        Contender("touched", bags.touched),
    ]
    return Report(name, time_interleaved(contenders, rounds or _ROUNDS, bags.draw))


if __name__ == "__main__":
    measures = {name: functools.partial(_measure, name) for name in _WORKLOADS}
    _command.run("embedding_bags", __doc__, measures)
