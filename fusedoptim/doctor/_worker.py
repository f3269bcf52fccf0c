"""What the doctor's own processes do: they may crash, and tell by lines of JSON how far they came.

What is raised is a finding, of whatever class: it is told, and the next thing is examined.

Run as ``python -c "from fusedoptim.doctor._worker import main; main(...)"`` by
:mod:`fusedoptim.doctor._workers`.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterable
from typing import Any, TextIO

_LOADED = ("libOpenCL.", "libsycl.", "libur_", "libze_", "libintelocl", "libigdrcl", "libtbb.")


def main(device: str | None, claims: int, with_torch: bool) -> None:
    """Examine torch or list the devices; test kernels, until all are claimed; end the process.

    Args:
        device: a SYCL filter string, or None for all devices.
        claims: file descriptor of a pipe that holds the kernels' indices, 2 bytes each. Whoever
            reads one tests that kernel, so that quick workers do more and the others' kernels are
            tested when one has crashed.
        with_torch: whether this worker examines torch.
    """
    # Drivers and runtimes print what they like to standard output.
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        if with_torch:
            _say(lines, at="imports torch")
            _try_torch(lines)
        _say(lines, at="asks the driver")
        _try_kernels(lines, device, claims, describe=not with_torch)
        _say(lines, loaded=_loaded())
    except Exception as failure:  # whatever it is, the report says it
        _say(lines, failed=_last_line(failure))
    sys.stderr.flush()
    os._exit(0)  # torch takes half a second to be torn down


def _say(lines: TextIO, **facts: Any) -> None:
    print(json.dumps(facts), file=lines, flush=True)


def _last_line(failure: BaseException) -> str:
    return traceback.format_exception_only(failure)[-1].strip()


def _loaded() -> list[str]:
    """The runtime's and the drivers' libraries that this process has loaded."""
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
    kernels = [f"{kernel}_{variant}" for kernel, variant in shipped()]
    if describe:
        _say(lines, devices=[d._asdict() for d in found.values()], planned=len(kernels))
        if any("cpu" in name for name in found):
            _say(lines, compiled_for=isa.level())
    used = _used(found)
    if describe:
        _say(lines, unused=[name for name in found if name not in used])
    chosen = used if device is None else [queue(device).sycl_device.filter_string]
    queues = {}
    for name in chosen:
        try:
            queues[name] = queue(name)
        except Exception as failure:
            _say(lines, failed=_last_line(failure))
    while (index := int.from_bytes(os.read(claims, 2), sys.byteorder)) < len(kernels):
        kernel = kernels[index]
        for name, on_device in queues.items():
            _say(lines, at=f"tests {kernel} on {name}")
            if kernel.endswith("_f64") and not found[name].has_float64:
                problem = None  # a step says so, and what to do
            else:
                try:
                    in_usm = not backend_of(on_device).runs_on_host
                    problem = kernel_problem(on_device, kernel, in_usm=in_usm)
                except Exception as failure:
                    problem = f"cannot be run: {_last_line(failure)}"
            _say(lines, tested=kernel, device=name, problem=problem)


def _used(found: Iterable[str]) -> list[str]:
    """Devices without those of CPU drivers that another is preferred to."""
    from fusedoptim.allocator import queue

    cpus = [name for name in found if "cpu" in name]
    ours = [queue("cpu").sycl_device.filter_string] if len(cpus) > 1 else cpus
    return [name for name in found if name not in cpus or name in ours]


def _try_torch(lines: TextIO) -> None:
    """Import torch, and update its own tensors on each device that it has."""
    try:
        import torch
    except Exception as failure:
        _say(lines, torch_failed=_last_line(failure))
        return
    from fusedoptim import isa

    _say(lines, highest=isa.highest())  # by torch's means
    from fusedoptim.launch.devices import BACKENDS

    places = [device for backend in BACKENDS.values() for device in backend.devices()]
    _say(lines, torch=torch.__version__, places=list(map(str, places)))
    for place in places:
        _say(lines, at=f"updates torch's tensors on {place}")
        try:
            _say(lines, updated=str(place), problem=_update_problem(place))
        except Exception as failure:
            _say(lines, failed=_last_line(failure))


def _update_problem(device: Any) -> str:
    """What is wrong with FusedSGD's launch on torch's memory and stream, or nothing.

    An optimizer itself is not made here: torch then imports its compiler, which takes a second.
    """
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
