"""A kernel that moves the bytes of SGD with momentum and computes next to nothing.

``python -m benchmarks.traffic build|check|verify``

build   compile the kernel, and write it and its description beside this file ([jit] extra)
check   fail if a source changed and the module did not, or the module is damaged (no compiler)
verify  compile again and compare byte for byte ([jit] extra)
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusedoptim.allocator import queue
from fusedoptim.kernels.__main__ import source_hash
from fusedoptim.kernels.language import Grad, Index, Param, Role, State
from fusedoptim.launch.block import Chunks, LaunchBlock
from fusedoptim.launch.kernel import Kernel
from fusedoptim.launch.modules import Argument, Module

DTYPE = "f32"
NAME = f"traffic_{DTYPE}"
SPIRV = Path(__file__).with_name(f"{NAME}.spv")
DESCRIPTION = SPIRV.with_suffix(".json")


def traffic(i: Index, param: Param, grad: Grad, momentum_buffer: State) -> None:
    """Reads three values and writes two for each parameter, as SGD with momentum does.

    One addition is the least that makes all three values be read: it descends along the gradient
    of the step before.
    """
    theta = param[i]
    g = grad[i]
    b = momentum_buffer[i]
    momentum_buffer[i] = g
    param[i] = theta - b


class Traffic:
    """A launch of the kernel over given tensors, as FusedSGD would launch it."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        """Lay out the launch; the parameters' gradients are read in :meth:`read_gradients`.

        Args:
            params: contiguous float32 tensors on the CPU.
        """
        self._params = params
        self._momentum = [torch.zeros_like(p, requires_grad=False) for p in params]
        kernel = _kernel()
        self._chunks = Chunks([p.numel() for p in params], kernel.shape.chunk)
        self._block = LaunchBlock(kernel, self._chunks.lengths)
        self._write("param", params)
        self._write("momentum_buffer", self._momentum)

    def _write(self, column: str, tensors: Sequence[Tensor]) -> None:
        base = np.array(list(map(Tensor.data_ptr, tensors)))
        self._block.write(column, base[self._chunks.owner] + 4 * self._chunks.start)

    def read_gradients(self) -> None:
        """Take the gradients that the parameters have now."""
        self._write("grad", [p.grad for p in self._params if p.grad is not None])

    def step(self) -> None:
        """Launch the kernel and wait for its end."""
        self._block.launch()
        self._block.wait()


@functools.cache
def _kernel() -> Kernel:
    description = json.loads(DESCRIPTION.read_text())
    arguments = tuple(Argument(name, Role(role)) for name, role in description["arguments"])
    spirv = SPIRV.read_bytes()
    module = Module(NAME, DTYPE, arguments, sums=0, is_serial=False, spirv=spirv)
    return Kernel(queue("cpu"), module)


def _compiled() -> tuple[dict[str, Any], bytes]:
    """The module, freshly compiled, and its description."""
    from fusedoptim.kernels._compiler import compile_kernel, signature

    spirv = compile_kernel(traffic, DTYPE, NAME)
    words = signature(traffic, DTYPE).arguments
    description = {
        "sha256": hashlib.sha256(spirv).hexdigest(),
        "source_sha256": source_hash(Path(__file__)),
        "arguments": [[argument.name, argument.role.value] for argument in words],
    }
    return description, spirv


def build() -> list[str]:
    """Compile the kernel, and write the module and its description."""
    description, spirv = _compiled()
    SPIRV.write_bytes(spirv)
    DESCRIPTION.write_text(json.dumps(description, indent=1) + "\n")
    return []


def check() -> list[str]:
    """What differs between the source, the description and the module, without the compiler."""
    description = json.loads(DESCRIPTION.read_text())
    problems = []
    if description["source_sha256"] != source_hash(Path(__file__)):
        problems.append("the source or the compiler changed since the build: build again")
    if description["sha256"] != hashlib.sha256(SPIRV.read_bytes()).hexdigest():
        problems.append(f"{SPIRV.name} is not the module that was built: build again")
    return problems


def verify() -> list[str]:
    """What differs between the committed files and a fresh build, byte for byte."""
    description, spirv = _compiled()
    problems = []
    if json.loads(DESCRIPTION.read_text()) != description:
        problems.append(f"{DESCRIPTION.name} differs from a fresh build: build again")
    if SPIRV.read_bytes() != spirv:
        problems.append(f"{SPIRV.name} differs from a fresh build: build again")
    return problems


def main() -> int:
    """Run the command that the command line names; print what is wrong."""
    commands = {"build": build, "check": check, "verify": verify}
    parser = argparse.ArgumentParser(prog="python -m benchmarks.traffic", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("command", choices=commands)
    command = parser.parse_args().command
    problems = commands[command]()
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{command}: {NAME}, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
