"""Times raw kernels: ``python -m benchmarks.raw [--save]``.

``launch`` launches a kernel with four arguments on 1,024 elements and waits for it, 100 times;
times are totals. The base is dpctl's ``queue.submit_async`` of the same kernel on USM memory, and
the wait for its event. "Alternating tensors" alternates between two pairs of tensors.
``SAXPY`` computes ``y += a x`` over 64 M elements, 12 bytes each, in four shapes: a work item for
each element, in groups of the driver's choice or of 16, and groups of 16 work items that walk a
chunk of 64 Ki. It also times torch's ``add``, and pure traffic of as many bytes, of which it reads
12 of 20.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from allocator import Pool, load_dpctl, queue
from benchmarks import _command
from benchmarks._harness import Contender, Report, repeated, time_interleaved
from benchmarks.traffic import Traffic
from fusedoptim.raw import RawKernel

_REPEATS = 100
_SMALL = 1024
_LARGE = 64 << 20
_LANES, _CHUNK = 16, 64 * 1024
_SAXPY_BYTES = 12
_TRAFFIC_BYTES = 20

SAXPY = """
kernel void saxpy(ulong n, float a, global const float *restrict x, global float *restrict y) {
    size_t i = get_global_id(0);
    if (i < n) y[i] += a * x[i];
}
"""
# Each work item takes every sixteenth element of its group's chunk; n is a multiple of CHUNK.
CHUNKS = """
kernel void saxpy(ulong n, float a, global const float *restrict x, global float *restrict y) {
    size_t start = get_group_id(0) * CHUNK;
    for (size_t i = start + get_local_id(0); i < start + CHUNK; i += get_local_size(0))
        y[i] += a * x[i];
}
"""
# Reads two places of each array at once, so that a core has more loads in flight.
HALVES = """
kernel void saxpy(ulong n, float a, global const float *restrict x, global float *restrict y) {
    size_t start = get_group_id(0) * CHUNK, half_way = CHUNK / 2;
    for (size_t i = start + get_local_id(0); i < start + half_way; i += get_local_size(0)) {
        float first = y[i] + a * x[i], second = y[i + half_way] + a * x[i + half_way];
        y[i] = first;
        y[i + half_way] = second;
    }
}
"""


def launch(rounds: int | None) -> Report:
    kernel = RawKernel(SAXPY).compile()
    x, y = torch.randn(_SMALL), torch.randn(_SMALL)
    weight = Parameter(torch.randn(_SMALL))
    arguments = (_SMALL, 0.5, x, y)
    others = itertools.cycle([arguments, (_SMALL, 0.5, torch.randn(_SMALL), torch.randn(_SMALL))])

    def on_parameter() -> None:
        with torch.no_grad():
            kernel(_SMALL, _LANES, (_SMALL, 0.5, x, weight))

    contenders = [
        Contender("queue.submit, wait", _repeated(_submit(kernel))),
        Contender("RawKernel", _repeated(lambda: kernel(_SMALL, _LANES, arguments))),
        Contender(
            "RawKernel, alternating tensors",
            _repeated(lambda: kernel(_SMALL, _LANES, next(others))),
        ),
        Contender(
            "RawKernel, the driver's group", _repeated(lambda: kernel(_SMALL, None, arguments))
        ),
        Contender("RawKernel, no_grad", _repeated(on_parameter)),
        Contender("torch.add", _repeated(lambda: torch.add(y, x, alpha=0.5, out=y))),
    ]
    return Report("launch", time_interleaved(contenders, rounds or 200))


def _submit(kernel: RawKernel) -> Callable[[], None]:
    """Return a launch of the kernel by dpctl itself, on USM memory, with the wait for its end."""
    pool, cpu = Pool("cpu"), queue("cpu")
    memory = load_dpctl().memory
    x, y = (memory.as_usm_memory(pool.allocate(4 * _SMALL)) for _ in range(2))
    arguments = [ctypes.c_uint64(_SMALL), ctypes.c_float(0.5), x, y]
    handle: Any = kernel._own().unwaited.handle

    def submit() -> None:
        cpu.submit_async(handle, arguments, [_SMALL], [_LANES]).wait()

    return submit


def saxpy(rounds: int | None) -> Report:
    naive = RawKernel(SAXPY)
    chunks, halves = (
        RawKernel(source, options=[f"-DCHUNK={_CHUNK}"]) for source in (CHUNKS, HALVES)
    )
    x, y = torch.randn(_LARGE), torch.randn(_LARGE)
    arguments = (_LARGE, 0.5, x, y)
    items = _LARGE // _CHUNK * _LANES
    moved = _LARGE * _SAXPY_BYTES
    traffic = Traffic([_with_gradient(_LARGE * _SAXPY_BYTES // _TRAFFIC_BYTES)])
    traffic.read_gradients()
    contenders = [
        Contender("torch.add", lambda: torch.add(y, x, alpha=0.5, out=y), moved),
        Contender("RawKernel, item an element", lambda: naive(_LARGE, None, arguments), moved),
        Contender("RawKernel, groups of 16", lambda: naive(_LARGE, _LANES, arguments), moved),
        Contender("RawKernel, chunks", lambda: chunks(items, _LANES, arguments), moved),
        Contender("RawKernel, halves of chunks", lambda: halves(items, _LANES, arguments), moved),
        Contender("pure traffic", traffic.step, moved),
    ]
    timings = time_interleaved(contenders, rounds or 30)
    return Report("SAXPY", timings, reference="pure traffic")


def _with_gradient(elements: int) -> Tensor:
    parameter = Parameter(torch.zeros(elements))
    parameter.grad = torch.zeros(elements)
    return parameter


def _repeated(call: Callable[[], object]) -> Callable[[], None]:
    return repeated(call, _REPEATS)


if __name__ == "__main__":
    _command.run("raw", __doc__, {"launch": launch, "SAXPY": saxpy})
