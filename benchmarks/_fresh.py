"""Measurements that each need a fresh process: ``measured`` starts one and returns its result.

``measured_by_ranks`` starts one for each rank of a process group.

Only torch is imported here at the start: the functions import what they measure. Memory is measured
for the whole process, which works on Linux only.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

_ROOT = Path(__file__).resolve().parent.parent
_PROCESS = Path("/proc/self")
_RESET_PEAK = "5"  # see proc_pid_clear_refs(5)


def measured(
    function: str,
    *arguments: str,
    python: str = sys.executable,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Return what a function of this module returns in a fresh process of this Python.

    Args:
        function: name of the function.
        arguments: the function's arguments.
        python: the Python that runs it.
        variables: environment variables of the process, besides those of this one.
    """
    command = [python, "-m", "benchmarks._fresh", function, *arguments]
    environment = {**os.environ, **variables}
    done = subprocess.run(
        command, cwd=_ROOT, stdout=subprocess.PIPE, text=True, check=True, env=environment
    )
    return json.loads(done.stdout.splitlines()[-1])  # DeepSpeed prints what it builds


def measured_by_ranks(ranks: int, threads: int, function: str, *arguments: str) -> list[Any]:
    """Return what a function of :mod:`benchmarks._ranks` returns on each rank of a gloo group.

    Args:
        ranks: number of processes.
        threads: threads of each process, in OMP_NUM_THREADS, which torchrun sets to 1 unless the
            user sets it.
        function: name of the function.
        arguments: the function's arguments.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks._fresh", "on_rank", f"file://{folder}/store"]
        own = {
            "WORLD_SIZE": str(ranks),
            "OMP_NUM_THREADS": str(threads),
            "GLOO_SOCKET_IFNAME": "lo",  # the machine's name may not resolve
        }
        processes = [
            subprocess.Popen(
                [*command, function, *arguments],
                cwd=_ROOT,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | own | {"RANK": str(rank)},
            )
            for rank in range(ranks)
        ]
        outputs = [process.communicate()[0] for process in processes]
    for process in processes:
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args)
    return list(map(json.loads, outputs))


def on_rank(store: str, function: str, *arguments: str) -> Any:
    """Return what a function of :mod:`benchmarks._ranks` returns, within a process group."""
    from torch import distributed

    from benchmarks import _ranks

    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    result = getattr(_ranks, function)(*arguments)
    distributed.barrier()
    gc.collect()  # DDP must be gone before its process group
    distributed.destroy_process_group()
    return result


def cores(workload: str) -> dict[str, list[float]]:
    """Seconds of the steps of :mod:`benchmarks._cores`, on OMP_NUM_THREADS threads."""
    from benchmarks._cores import times

    return times(workload)


def instances(model: str, batch: str, count: str, by: str) -> float:
    """Samples a second of several instances of a model; see :mod:`benchmarks._instances`."""
    from benchmarks._instances import serve

    return serve(model, int(batch), int(count), by)


def embeddings(rows_a_bag: str, kept: str, moved: str) -> dict[str, Any]:
    """Seconds of steps of embedding tables; see :mod:`benchmarks._embeddings`."""
    from benchmarks._embeddings import step

    return step(int(rows_a_bag), kept == "True", moved == "True")


def embedding_bags(workload: str, contender: str, rounds: str) -> dict[str, list[float]]:
    """Seconds of steps of embedding bags; see :mod:`benchmarks._embedding_bags`."""
    from benchmarks._embedding_bags import seconds_of

    return seconds_of(workload, contender, int(rounds))


def startup(optimizer: str) -> float:
    """Seconds between ``import torch`` and the end of one parameter's first step."""
    start = time.perf_counter()
    param = torch.zeros(1000, requires_grad=True)
    param.grad = torch.ones(1000)
    _named(optimizer)([param], lr=0.1, momentum=0.9).step()
    return time.perf_counter() - start


def step_memory(optimizer: str, model: str) -> int:
    """Bytes by which the resident memory rises in the second step; the first creates the state."""
    params = _params(model, torch.float32)
    stepped = _named(optimizer)(params, lr=1e-9, momentum=0.9)
    stepped.step()
    before = _reset_peak()
    stepped.step()
    return _peak() - before


def split_memory(way: str, model: str) -> dict[str, float]:
    """Bytes per weight of SplitSGD ("split") or of a float32 copy ("master"), after two steps.

    "weights" counts the weights with their lower halves or float32 copies, "tensors" all tensors
    that live from step to step. "peak" is the rise of the resident memory compared with a process
    without the model.
    """
    from benchmarks._peers import MasterSGD
    from benchmarks._workloads import LR, MOMENTUM
    from fusedoptim import SplitSGD

    def two_steps(params: list[Tensor]) -> tuple[int, int]:
        """Take two steps; return the bytes of the weights and of the other tensors."""
        optimizer = (SplitSGD if way == "split" else MasterSGD)(params, lr=LR, momentum=MOMENTUM)
        optimizer.step()
        optimizer.step()
        grads = [p.grad for p in params if p.grad is not None]
        if isinstance(optimizer, MasterSGD):
            grads += [m.grad for m in optimizer.masters if m.grad is not None]
            lower, momentum = optimizer.masters, optimizer.momentum
        else:
            states = optimizer.state.values()
            lower = [state["trail"] for state in states]
            momentum = [state["momentum_buffer"] for state in states]
        return _size(params) + _size(lower), _size(grads) + _size(momentum)

    two_steps(_params("8192", torch.bfloat16))  # starts the driver and builds the kernel
    before = _reset_peak()
    params = _params(model, torch.bfloat16)
    weights, others = two_steps(params)
    sizes = {"weights": weights, "tensors": weights + others, "peak": _peak() - before}
    count = sum(p.numel() for p in params)
    return {name: size / count for name, size in sizes.items()}


def optimize_memory(purpose: str, dtype: str) -> dict[str, float]:
    """Time and memory of ``optimize(inplace=True)`` on BERT-base, for inference or training.

    Memory is a multiple of the plain model's: at its peak, and afterwards. For training, the
    optimizer is an AdamW without state.
    """
    from benchmarks._models import bert_base
    from fusedoptim import transforms

    def pair(model: nn.Module) -> tuple[Any, ...]:
        if purpose == "training":
            return model, torch.optim.AdamW(model.parameters())
        return (model.eval(),)

    options = {"dtype": getattr(torch, dtype)}
    small = pair(nn.Sequential(nn.Linear(2000, 2000), nn.Dropout()))
    transforms.optimize(*small, **options)  # imports and loads everything that the first call needs
    model = bert_base()
    rewritten = pair(model)
    size = sum(p.nbytes for p in model.parameters())
    before = _reset_peak()
    start = time.perf_counter()
    transforms.optimize(*rewritten, **options, inplace=True)
    seconds = time.perf_counter() - start
    most, after = _peak(), _reset_peak()
    peak, rest = (1 + (memory - before) / size for memory in (most, after))
    return {"seconds": seconds, "peak": peak, "after": rest}


def timed_step(optimizer: str, arguments: str, model: str, dtype: str) -> dict[str, Any]:
    """Seconds of the first step and, for two seconds, of later ones; bytes of state for a weight.

    Args:
        optimizer: the path of its class, such as "torch.optim:AdamW".
        arguments: its arguments, as JSON; "torch.bfloat16" is that dtype.
        model: name of the shapes.
        dtype: the dtype of the parameters.
    """
    given = {
        k: torch.bfloat16 if v == "torch.bfloat16" else v for k, v in json.loads(arguments).items()
    }
    params = _params(model, getattr(torch, dtype))
    stepped = _named(optimizer)(params, lr=1e-9, **given)
    for p in params:
        assert p.grad is not None
        p.grad = p.grad.to(p.dtype)  # which is another if they are split
    seconds: list[float] = []
    while len(seconds) < 13 or sum(seconds[3:]) < 2:
        start = time.perf_counter()
        stepped.step()
        seconds.append(time.perf_counter() - start)
    held = sum(_held(value) for state in stepped.state.values() for value in state.values())
    count = sum(p.numel() for p in params)
    return {"first": seconds[0], "seconds": seconds[3:], "bytes": held / count}


def _held(value: Any) -> int:
    """Bytes of a tensor, or of the tensors that a subclass wraps."""
    if hasattr(value, "__tensor_flatten__"):
        return sum(_held(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    return value.nbytes if isinstance(value, Tensor) else 0


def training(model: str, configuration: str) -> dict[str, Any]:
    """Times of a run of :mod:`benchmarks._training`, and the peak of the resident memory."""
    from benchmarks._training import train

    return train(model, configuration)._asdict() | {"peak": _peak()}


def inference(model: str, batch: str, dtype: str, configuration: str) -> dict[str, Any]:
    """Times of inferences of :mod:`benchmarks._inference`, their peak memory and deviation."""
    from benchmarks._inference import deviation, infer, new_task

    task = new_task(model, int(batch))
    _reset_peak()
    record, output = infer(task, dtype, configuration)
    peak = _peak()
    plain = new_task(model, int(batch))
    return record._asdict() | {"peak": peak, "deviation": deviation(output, plain)}


def inference_products(model: str, batch: str, dtype: str) -> list[float]:
    """Seconds of each inference's Linears and convolutions alone."""
    from benchmarks._inference import new_task, products

    return products(new_task(model, int(batch)), dtype)


def products(model: str, configuration: str) -> list[float]:
    """Seconds of each training iteration's matrix products and convolutions alone."""
    from benchmarks._training import products as measure

    return measure(model, configuration)


def varied(workload: str, kept: str, seed: str) -> dict[str, float]:
    """Seconds, system time and page faults of an iteration, and the peak of the resident memory.

    All except the peak are measured in the second half of a workload of :mod:`benchmarks._varied`.
    """
    from benchmarks._varied import WORKLOADS
    from fusedoptim.runtime import keep_memory

    if kept == "True":
        keep_memory()
    run, iterations = WORKLOADS[workload]
    running = run(int(seed))
    for _ in range(iterations // 2):
        next(running)
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(iterations // 2):
        next(running)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    workers = [Path("/proc", str(child.pid)) for child in multiprocessing.active_children()]
    totals = {
        "seconds": seconds,
        "system": after.ru_stime - before.ru_stime,
        "faults": after.ru_minflt - before.ru_minflt,
    }
    peak = sum(_peak(process) for process in (_PROCESS, *workers))
    return {name: total / (iterations // 2) for name, total in totals.items()} | {"peak": peak}


def _named(path: str) -> Any:
    """The class with a path such as "torch.optim:SGD"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _params(model: str, dtype: torch.dtype) -> list[Tensor]:
    from benchmarks._shapes import MODELS

    params = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in MODELS[model]()]
    for param in params:
        param.grad = torch.ones_like(param)
    return params


def _size(tensors: list[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


def _reset_peak() -> int:
    """Reset the peak of the resident memory, and return its present size in bytes."""
    (_PROCESS / "clear_refs").write_text(_RESET_PEAK)
    return _status_bytes("VmRSS")


def _peak(process: Path = _PROCESS) -> int:
    """Return the peak of a process's resident memory since it was reset, in bytes."""
    return _status_bytes("VmHWM", process)


def _status_bytes(field: str, process: Path = _PROCESS) -> int:
    lines = (process / "status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return int(values[field].removesuffix("kB")) * 1024


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
