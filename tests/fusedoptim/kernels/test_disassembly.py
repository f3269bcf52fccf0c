"""What the CPU driver makes of kernels: loads and stores of whole vectors, and no gathers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fusedoptim.launch.modules import shipped
from tests.fusedoptim.helpers import run_script

FULL_WIDTH = ("adam_float8", "embedding_bag", "sum_rows", "sgd_rows", "adagrad_rows")
"""Kernels whose every load and store is of consecutive elements, or of one for all lanes."""
_MODULES = [f"{kernel}_{variant}" for kernel, variant in shipped() if kernel in FULL_WIDTH]
_BUILD = """
import os, sys
from fusedoptim.allocator import queue
from fusedoptim.launch.kernel import kernel_for
os.chdir(sys.argv[1])
for name in sys.argv[2:]:
    kernel_for(queue("cpu"), *name.rsplit("_", 1))
"""
_GATHER = re.compile(r"\bv(?:p?gather|p?scatter)\w*")
_VECTOR_MEMORY = re.compile(r"\bv\w+\s.*[([].*zmm\d+|\bv\w+\s.*zmm\d+.*, .*[([]")
"""An instruction that loads or stores 16 floats, or more, in the syntax of AT&T or of Intel."""


@pytest.fixture(scope="module")
def disassembly(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of all the kernels, as the driver writes it to the current folder."""
    folder = tmp_path_factory.mktemp("disassembly")
    run_script(_BUILD, str(folder), *_MODULES, CL_CONFIG_DUMP_DISASSEMBLY="True")
    return "".join(path.read_text() for path in sorted(folder.glob("*.asm")))


@pytest.mark.parametrize("name", _MODULES)
def test_full_width_without_gathers(name: str, disassembly: str) -> None:
    _, found, rest = disassembly.partition(f"<{name}>:")
    assert found, f"the driver has written no disassembly of {name}"
    body = rest.partition("Disassembly of section")[0]
    assert _GATHER.findall(body) == []
    if "avx512f" in Path("/proc/cpuinfo").read_text():
        assert _VECTOR_MEMORY.search(body)
