"""The size of a kernel's sub-groups, in its module and under the CPU driver."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fusedoptim.launch.cpu import CPU
from fusedoptim.launch.kernel import _spirv
from fusedoptim.launch.modules import load_module, shipped
from fusedoptim.launch.sub_groups import with_sub_groups
from fusedoptim.launch.xpu import XPU
from fusedoptim.raw._spirv import instructions, read_module, words_of

_EXECUTION_MODE, _SUBGROUP_SIZE = 16, 35  # SPIR-V's numbers


@pytest.mark.parametrize(("kernel", "variant"), shipped())
def test_only_the_size_is_new(kernel: str, variant: str) -> None:
    spirv = load_module(kernel, variant).spirv
    changed = with_sub_groups(spirv, 16)
    before, after = (list(instructions(words_of(module))) for module in (spirv, changed))
    added = [instruction for instruction in after if instruction not in before]
    modes = [words[1:] for opcode, words in added if opcode == _EXECUTION_MODE]
    assert modes == [[_SUBGROUP_SIZE, 16]]
    assert len(added) == len(after) - len(before) == 2  # the other one is a capability
    assert read_module(changed).entries == read_module(spirv).entries


def test_a_gpus_driver_chooses() -> None:
    module = load_module("sgd", "f32")
    assert _spirv(module, XPU.shape) == module.spirv != _spirv(module, CPU.shape)


@pytest.mark.skipif(shutil.which("spirv-val") is None, reason="spirv-val: apt install spirv-tools")
@pytest.mark.parametrize("kernel", ["sgd", "lamb_moments", "embedding_bag"])
def test_the_module_is_valid(kernel: str, tmp_path: Path) -> None:
    path = tmp_path / "module.spv"
    path.write_bytes(with_sub_groups(load_module(kernel, "f32").spirv, 16))
    subprocess.run(["spirv-val", "--target-env", "opencl2.2", str(path)], check=True)
