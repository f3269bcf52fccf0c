"""The program of the doctor's worker processes, which report by lines of JSON and may crash.

Every exception is a finding: it is reported, and the examination goes on.

Run as ``python -c "from fusedoptim.doctor._worker import main; main(...)"`` by
:mod:`fusedoptim.doctor._workers`.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any, TextIO

_LOADED = ("libOpenCL.", "libsycl.", "libur_", "libze_", "libintelocl", "libigdrcl", "libtbb.")


def main(device: str | None, claims: int, with_torch: bool) -> None:
    """Examine torch or list the devices; test kernels, until all are claimed; end the process.

    Args:
        device: a SYCL filter string, or None for all devices.
        claims: file descriptor of a pipe that holds the kernels' indices, 2 bytes each. The worker
            that reads an index tests that kernel. So fast workers test more kernels, and if one
            crashes, the others test the remaining kernels.
        with_torch: whether this worker examines torch.
    """
    # Drivers and runtimes print to standard output.
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        if with_torch:
            _say(lines, at="imports torch")
            _try_torch(lines)
        _say(lines, at="asks the driver")
        _try_kernels(lines, device, claims, describe=not with_torch)
        _say(lines, loaded=_loaded())
    except Exception as failure:  # of any class: a report names it, and goes on
        _say(lines, failed=_last_line(failure))
    sys.stderr.flush()
    os._exit(0)  # without tearing down torch, which is slow


def _say(lines: TextIO, **facts: Any) -> None:
    print(json.dumps(facts), file=lines, flush=True)


def _last_line(failure: BaseException) -> str:
    return traceback.format_exception_only(failure)[-1].strip()


def _loaded() -> list[str]:
    """The libraries of the runtime and the drivers that this process has loaded."""
    from fusedoptim.allocator import loaded_files

    return sorted(path for path in loaded_files() if os.path.basename(path).startswith(_LOADED))


def _try_kernels(lines: TextIO, device: str | None, claims: int, describe: bool) -> None:
    """Test the kernels that are claimed, on each device."""
    from fusedoptim import isa
    from fusedoptim.allocator import devices, queue
    from fusedoptim.doctor._self_test import kernel_problem
    from fusedoptim.launch.devices import backend_of
    from fusedoptim.launch.modules import shipped

    found = {d.filter_string: d for d in devices()}
    backends = {}
    for name in found:
        try:
            backends[name] = backend_of(queue(name))
        except Exception as failure:  # of any class: a report names it
            if device in (None, name):
                _say(lines, failed=_last_line(failure))
    used = _used(backends)
    kernels = [f"{kernel}_{variant}" for kernel, variant in shipped()]
    if describe:
        on_host = {name for name, backend in backends.items() if backend.runs_on_host}
        described = [d._asdict() | {"on_host": name in on_host} for name, d in found.items()]
        unused = [name for name in backends if name not in used]
        _say(lines, devices=described, unused=unused, planned=len(kernels))
        if on_host:
            _say(lines, compiled_for=isa.level())
    chosen = used if device is None else [queue(device).sycl_device.filter_string]
    while (claim := os.read(claims, 2)) and (index := int.from_bytes(claim, sys.byteorder)) < len(
        kernels
    ):
        kernel = kernels[index]
        for name in chosen:
            _say(lines, at=f"tests {kernel} on {name}")
            if kernel.endswith("_f64") and not found[name].has_float64:
                problem = None  # a step raises an error that says so
            else:
                try:
                    in_usm = not backend_of(queue(name)).runs_on_host
                    problem = kernel_problem(queue(name), kernel, in_usm=in_usm)
                except Exception as failure:  # of any class: a report names it
                    problem = f"cannot be run: {_last_line(failure)}"
            _say(lines, tested=kernel, device=name, problem=problem)


def _used(backends: Mapping[str, Any]) -> list[str]:
    """The devices that optimizers use: if several drivers serve the host, one is preferred."""
    from fusedoptim.launch.devices import named_queue

    hosts = {backend.torch_type for backend in backends.values() if backend.runs_on_host}
    preferred = [named_queue(kind).sycl_device.filter_string for kind in hosts]
    return [
        name for name, backend in backends.items() if not backend.runs_on_host or name in preferred
    ]


def _try_torch(lines: TextIO) -> None:
    """Import torch, and update its own tensors on each device that it has."""
    try:
        import torch
    except Exception as failure:  # a broken installation raises anything
        _say(lines, torch_failed=_last_line(failure))
        return
    _say(lines, threads=torch.get_num_threads())
    from fusedoptim import isa

    _say(lines, highest=isa.highest())  # torch finds it out
    from fusedoptim.launch.devices import BACKENDS

    places = [device for backend in BACKENDS.values() for device in backend.devices()]
    _say(lines, torch=torch.__version__, places=list(map(str, places)))
    for place in places:
        _say(lines, at=f"updates torch's tensors on {place}")
        try:
            _say(lines, updated=str(place), problem=_update_problem(place))
        except Exception as failure:  # torch's or the driver's own
            _say(lines, failed=_last_line(failure))


def _update_problem(device: Any) -> str:
    """What is wrong with FusedSGD's launch on torch's memory and stream, or ""."""
    import numpy as np
    import torch

    from fusedoptim.launch.block import LaunchBlock
    from fusedoptim.launch.devices import queue_of
    from fusedoptim.launch.kernel import kernel_for

    param, grad = torch.rand(2, 1000, device=device)
    factor = torch.ones((), device=device)
    expected = param.cpu().double() - 0.5 * grad.cpu().double()  # not every GPU has float64
    block = LaunchBlock(kernel_for(queue_of(device), "sgd", "f32"), np.array([1000]))
    block.write("param", param.data_ptr())
    block.write("grad", grad.data_ptr())
    numbers = {"grad_factor": factor.data_ptr(), "lr": 0.5, "weight_decay": 0.0}
    block.write_head(numbers)
    block.launch()
    block.wait()
    error = (param.cpu().double() - expected).abs().max().item()
    # Values below 1, an exact product, and a sum that is rounded once.
    return "" if error <= torch.finfo(torch.float32).eps / 2 else f"is off by up to {error!s}"
