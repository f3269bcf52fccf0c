"""Several instances of a model in one process or in several; each figure is from a fresh process.

An instance has a share of the cores, which its threads are pinned to.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch

from benchmarks import _models
from benchmarks._inference import Task
from fusedoptim.runtime import CPUPool, pin

THREADS, PROCESSES = "threads", "processes"
_WARM_UP, _SECONDS = 5, 4.0


class Served(NamedTuple):
    """The work that one instance did while all of them ran."""

    batches: int
    seconds: float


def _bert_tiny() -> torch.nn.Module:
    from transformers import BertConfig, BertModel

    small = BertConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512
    )
    return BertModel(small)


def _task(model: str, batch: int) -> Task:
    """ResNet-50 on images of 224 by 224 pixels, BERT-tiny on sequences of 128 tokens."""
    if model == "ResNet-50":
        return Task(_models.resnet50().eval(), (torch.randn(batch, 3, 224, 224),))
    return Task(_bert_tiny().eval(), (torch.randint(30_000, (batch, 128)),))


MODELS = ("ResNet-50", "BERT-tiny")


def serve(model: str, batch: int, instances: int, by: str) -> float:
    """Samples per second of all instances, which are threads of this process, or processes."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[i::instances] for i in range(instances)]
    run = _by_threads if by == THREADS else _by_processes
    served = run(model, batch, shares)
    return sum(batch * one.batches / one.seconds for one in served)


def _by_threads(model: str, batch: int, shares: Sequence[Sequence[int]]) -> list[Served]:
    """Run the instances as threads, which share one model."""
    task = _task(model, batch)
    wait = threading.Barrier(len(shares)).wait
    pools = [CPUPool(share) for share in shares]
    futures = [pool.submit(_serve, task, wait) for pool in pools]
    return [future.result() for future in futures]


def _by_processes(model: str, batch: int, shares: Sequence[Sequence[int]]) -> list[Served]:
    """Run the instances as processes, each with its own model."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(shares))
    with ProcessPoolExecutor(
        len(shares), context, initializer=_set_barrier, initargs=(barrier,)
    ) as executor:
        calls = itertools.repeat(model), itertools.repeat(batch), shares
        return list(executor.map(_in_process, *calls))


_barrier: Any = None


def _set_barrier(barrier: Any) -> None:
    """Set the barrier of all processes, which can only be handed over when a process starts."""
    global _barrier
    _barrier = barrier


def _in_process(model: str, batch: int, share: Sequence[int]) -> Served:
    with pin(CPUPool(share)):
        return _serve(_task(model, batch), _barrier.wait)


def _serve(task: Task, wait: Callable[[], object]) -> Served:
    """Run batch after batch once all instances are ready; the last of others may end later."""
    model, inputs = task
    with torch.inference_mode():
        for _ in range(_WARM_UP):
            model(*inputs)
        wait()
        start = time.perf_counter()
        batches = 0
        while (seconds := time.perf_counter() - start) < _SECONDS:
            model(*inputs)
            batches += 1
        wait()
    return Served(batches, seconds)
