"""Prints how many bytes the resident memory rises in an optimizer's second step.

``python -m benchmarks._memory fusedoptim:FusedSGD resnet50``, in a fresh process each time. The
first step creates the state, which every optimizer needs; the second shows what the step itself
needs. Linux only.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch

from benchmarks._shapes import MODELS

_PROCESS = Path("/proc/self")
_RESET_PEAK = "5"  # see proc_pid_clear_refs(5)


def reset_peak() -> int:
    """Reset the peak of the resident memory, and return its present size in bytes."""
    (_PROCESS / "clear_refs").write_text(_RESET_PEAK)
    return _status_bytes("VmRSS")


def peak() -> int:
    """Return the peak of the resident memory since :func:`reset_peak`, in bytes."""
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    for line in (_PROCESS / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.removesuffix("kB")) * 1024
    raise LookupError(f"/proc/self/status has no {field}")


def main() -> None:
    module, _, name = sys.argv[1].partition(":")
    optimizer_class = getattr(importlib.import_module(module), name)
    params = [torch.zeros(shape, requires_grad=True) for shape in MODELS[sys.argv[2]]()]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = optimizer_class(params, lr=1e-9, momentum=0.9)
    optimizer.step()
    before = reset_peak()
    optimizer.step()
    print(peak() - before)


if __name__ == "__main__":
    main()
