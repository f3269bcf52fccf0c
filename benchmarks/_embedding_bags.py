"""Tables of embedding bags, their workloads, and how torch, fusedoptim and peers update them.

Only torch is imported at the start, as the Pythons of peers have no fusedoptim.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks._harness import Contender, time_interleaved

TABLES, ROWS, LR = 26, 100_000, 0.01
_EPS = 1e-10


class Workload(NamedTuple):
    """The bags of a step, and what the step does with them."""

    optimizer: str
    width: int = 64
    batch: int = 2048
    indices: int = 1
    """The number of indices of each bag, or the average number."""
    varying: bool = False
    """Whether each bag has another number of indices, up to twice the average."""
    split: bool = False
    updates: bool = True
    dtype: torch.dtype = torch.float32


WORKLOADS = {
    "sgd": Workload("sgd"),
    "sgd-20-indices": Workload("sgd", indices=20),
    "sgd-20-varying": Workload("sgd", indices=20, varying=True),
    "sgd-20-varying-batch-128": Workload("sgd", batch=128, indices=20, varying=True),
    "sgd-20-batch-128": Workload("sgd", batch=128, indices=20),
    "sgd-wide": Workload("sgd", width=128),
    "sgd-batch-128": Workload("sgd", batch=128),
    "sgd-split": Workload("sgd", split=True),
    "adagrad": Workload("adagrad"),
    "rowwise-adagrad": Workload("rowwise_adagrad"),
    "forward": Workload("sgd", updates=False),
    "forward-20-indices": Workload("sgd", indices=20, updates=False),
    "forward-bfloat16": Workload("sgd", updates=False, dtype=torch.bfloat16),
    "forward-batch-128": Workload("sgd", batch=128, updates=False),
}


class Bags:
    """torch's tables, the indices of a round, and the gradients of its bags."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.tables = [
            torch.nn.EmbeddingBag(
                ROWS, workload.width, mode="sum", sparse=True, dtype=workload.dtype
            )
            for _ in range(TABLES)
        ]
        weights = [table.weight for table in self.tables]
        rule = torch.optim.SGD if workload.optimizer == "sgd" else torch.optim.Adagrad
        self._optimizer: torch.optim.Optimizer = rule(weights, lr=LR)
        shape = workload.batch, workload.width
        self.grads = [torch.randn(shape) * 1e-3 for _ in range(TABLES)]
        self.draw()

    def draw(self) -> None:
        """Draw new indices."""
        lengths = [self._lengths() for _ in range(TABLES)]
        self.indices = [torch.randint(ROWS, (int(own.sum()),)) for own in lengths]
        self.offsets = [own.cumsum(0) - own for own in lengths]
        self.joined_indices = torch.cat(self.indices)
        self.joined_offsets = torch.cat([torch.zeros(1, dtype=torch.int64), *lengths]).cumsum(0)

    def _lengths(self) -> Tensor:
        """The number of indices of each bag of a table."""
        workload = self.workload
        if workload.varying:
            return torch.randint(1, 2 * workload.indices, (workload.batch,))
        return torch.full((workload.batch,), workload.indices)

    def step(self) -> None:
        """A step of torch."""
        outputs = [
            table(*own)
            for table, own in zip(self.tables, zip(self.indices, self.offsets), strict=True)
        ]
        if self.workload.updates:
            torch.autograd.backward(outputs, self.grads)
            self._optimizer.step()
            self._optimizer.zero_grad()


def _merged(bags: Bags) -> Any:
    """Merged bags with copies of the same tables."""
    from fusedoptim.nn import MergedEmbeddingBag

    workload = bags.workload
    return MergedEmbeddingBag.from_embedding_bags(
        copy.deepcopy(bags.tables), optimizer=workload.optimizer, lr=LR, split=workload.split
    )


def ours(bags: Bags) -> Callable[[], None]:
    """A step of merged bags, each table with tensors of its own."""
    return _stepping(bags, _merged(bags))


def in_huge_pages(bags: Bags) -> Callable[[], None]:
    """The same with tables and state in huge pages."""
    from fusedoptim.runtime import use_huge_pages

    merged = _merged(bags)
    use_huge_pages(merged, merged.optimizer())
    return _stepping(bags, merged)


def _stepping(bags: Bags, merged: Any) -> Callable[[], None]:
    workload = bags.workload
    grads = [grad.to(merged[0].weight.dtype) for grad in bags.grads]

    def step() -> None:
        outputs = merged(bags.indices, bags.offsets)
        if workload.updates:
            torch.autograd.backward(outputs, grads)
            merged.optimizer().step()

    return step


def joined(bags: Bags) -> Callable[[], None]:
    """The same with one tensor of indices for all tables, which gives one tensor of bags."""
    merged, workload = _merged(bags), bags.workload
    grad = torch.cat(bags.grads, 1).to(merged[0].weight.dtype)

    def step() -> None:
        output = merged(bags.joined_indices, bags.joined_offsets[:-1])
        if workload.updates:
            output.backward(grad)
            merged.optimizer().step()

    return step


def _fbgemm(bags: Bags) -> Callable[[], None]:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        EmbeddingLocation,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    workload = bags.workload
    place = EmbeddingLocation.HOST, ComputeDevice.CPU
    merged = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, workload.width, *place)] * TABLES,
        optimizer=EmbOptimType[f"EXACT_{workload.optimizer.upper()}"],
        learning_rate=LR,
        eps=_EPS,
    )
    for weight, table in zip(merged.split_embedding_weights(), bags.tables):
        weight.copy_(table.weight.detach())
    joined = torch.cat(bags.grads, 1)

    def step() -> None:
        output = merged(bags.joined_indices, bags.joined_offsets)
        if workload.updates:
            output.backward(joined)

    return step


def _ipex(bags: Bags) -> Callable[[], None]:
    from intel_extension_for_pytorch.nn import modules

    by_name: Mapping[str, Any] = {
        "sgd": modules.MergedEmbeddingBagWithSGD,
        "adagrad": modules.MergedEmbeddingBagWithAdaGrad,
    }
    tables = copy.deepcopy(bags.tables)
    merged = by_name[bags.workload.optimizer].from_embeddingbag_list(tables, lr=LR)

    def step() -> None:
        outputs: list[Tensor] = merged(bags.indices, bags.offsets)
        if bags.workload.updates:
            torch.autograd.backward(outputs, bags.grads)

    return step


CONTENDERS = {"fusedoptim": ours, "joined": joined, "fbgemm": _fbgemm, "IPEX": _ipex}
"""How contenders other than torch take a step, each in its own environment."""


def seconds_of(workload: str, contender: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of the steps of torch and of another contender, interleaved."""
    bags = Bags(WORKLOADS[workload])
    other = Contender(contender, CONTENDERS[contender](bags))
    timings = time_interleaved([Contender("torch", bags.step), other], rounds, bags.draw)
    return {timing.name: list(timing.seconds) for timing in timings}
