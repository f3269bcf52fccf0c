"""The CPU driver's code for kernels: whole vectors, only intended gathers, nothing scalar."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from fusedoptim.launch.modules import shipped
from tests.fusedoptim.helpers import run_script

AVX512 = "avx512f" in Path("/proc/cpuinfo").read_text()


class Expected(NamedTuple):
    """What is expected of a kernel's code, in all of its variants."""

    share: float
    """The minimum share of whole vectors among instructions of floating-point arithmetic.

    A kernel of lanes may have only half: where the driver cannot tell that a group has 16 lanes, it
    adds a scalar copy for the remaining lanes, which never runs.
    """
    by_lane: frozenset[str] = frozenset()
    """The accesses that go lane by lane: "load", "store"."""


_BOTH = frozenset({"load", "store"})
KERNELS = {
    # Less than half, as what is the same in all lanes is scalar.
    "adam_float8": Expected(0.45),
    # Weights and counts are the same in all lanes, so their arithmetic is scalar. In float16, the
    # scalar copy converts numbers by more arithmetic than vectors do.
    "embedding_bag": Expected(0.35),
    "sum_rows": Expected(0.3),
    "sgd_rows": Expected(0.35),
    "adagrad_rows": Expected(0.4),
    "rowwise_adagrad_rows": Expected(0.45),
    # They use vector types; the rest of a width is computed number by number.
    "interaction": Expected(0.7),
    "interaction_backward": Expected(0.7),
    # A lane reads a box of five numbers. The older driver stores a single lane's number by a mask.
    "nms": Expected(1, _BOTH),
    # In ROIAlign's result, the channels of a bin are not adjacent.
    "roi_align": Expected(1, frozenset({"store"})),
    "roi_align_strided": Expected(1, _BOTH),
    "roi_align_backward": Expected(1, frozenset({"load"})),
    "roi_align_backward_strided": Expected(1, _BOTH),
}
_MODULES = [f"{kernel}_{variant}" for kernel, variant in shipped() if kernel in KERNELS]
_FETCHING = [x for x in _MODULES if x.startswith("embedding_bag") or "_rows_" in x]
_SCALAR = ["roi_align_taps_f32", "roi_align_taps_f64"]
"""Serial kernels, for which the check must fail."""
_BUILD = """
import os, sys
from fusedoptim.allocator import queue
from fusedoptim.launch.kernel import kernel_for
os.chdir(sys.argv[1])
for name in sys.argv[2:]:
    kernel_for(queue("cpu"), *name.rsplit("_", 1))
"""
_BUILD_WITHOUT_SUB_GROUPS = f"""
from fusedoptim.launch import kernel
kernel.with_sub_groups = lambda spirv, size: spirv
{_BUILD}
"""
"""The driver refuses to leave kernels scalar whose sub-groups shall have a size."""
# Both syntaxes, AT&T's and Intel's: a mnemonic, then operands in either order.
_ARITHMETIC = re.compile(
    r"\bv(?:add|sub|mul|div|min|max|sqrt|fn?m(?:add|sub)\d+)([ps])[sd]\s(.*)$", re.MULTILINE
)
_FUSED = re.compile(r"\bvfn?m(?:add|sub)\d+([ps])[sd]\s(.*)$", re.MULTILINE)
"""Multiplications with additions: these sum and update the columns of rows, and nothing else."""
_BY_LANE = {
    "load": re.compile(r"\bvp?gather\w*"),
    "store": re.compile(r"\bvp?scatter\w*"),
}
_BY_LANE_BFLOAT16 = {"load": re.compile(r"\bvpinsrw\b"), "store": re.compile(r"\bvpextrw\b")}
"""The stand-ins for 16-bit gathers. Other kernels convert single numbers by them."""


def disassembled(
    folder: Path, *modules: str, build: str = _BUILD, **environment: str
) -> dict[str, str]:
    """The disassembly of each kernel, which the driver writes to ``folder``."""
    run_script(build, str(folder), *modules, CL_CONFIG_DUMP_DISASSEMBLY="True", **environment)
    written = "".join(path.read_text() for path in sorted(folder.glob("*.asm")))
    code = {}
    for name in modules:
        _, found, rest = written.partition(f"<{name}>:")
        assert found, f"the driver has written no disassembly of {name}"
        code[name] = rest.partition("Disassembly of section")[0]
    return code


def share_of_vectors(code: str, instructions: re.Pattern[str] = _ARITHMETIC) -> float:
    """The share of whole 64-byte registers among instructions of floating-point arithmetic."""
    found = instructions.findall(code)
    return sum(kind == "p" and "zmm" in operands for kind, operands in found) / len(found)


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return disassembled(tmp_path_factory.mktemp("code"), *_MODULES, *_SCALAR)


@pytest.mark.parametrize("name", _MODULES)
def test_accesses_by_lane(name: str, code: dict[str, str]) -> None:
    kernel, _, variant = name.rpartition("_")
    for access in _BOTH - KERNELS[kernel].by_lane:
        assert _BY_LANE[access].findall(code[name]) == []
        if variant == "bf16" and AVX512:  # AVX2 has nothing else to narrow a vector's numbers
            assert _BY_LANE_BFLOAT16[access].findall(code[name]) == []


@pytest.mark.parametrize("name", _FETCHING)
def test_rows_are_fetched_ahead(name: str, code: dict[str, str]) -> None:
    """Rows are prefetched by an instruction; a call of a driver's function would cost too much."""
    assert re.search(r"\bprefetcht1\b", code[name])
    assert not re.search(r"\bcall", code[name])


@pytest.mark.parametrize("name", [x for x in _MODULES if x.startswith("interaction")])
def test_features_are_fetched_ahead(name: str, code: dict[str, str]) -> None:
    assert re.search(r"\bprefetcht1\b", code[name])


@pytest.mark.skipif(not AVX512, reason="the shares are those of AVX-512")
class TestVectors:
    @pytest.mark.parametrize("name", _MODULES)
    def test_arithmetic_is_of_whole_vectors(self, name: str, code: dict[str, str]) -> None:
        assert share_of_vectors(code[name]) >= KERNELS[name.rpartition("_")[0]].share

    @pytest.mark.parametrize("name", _FETCHING)
    def test_each_loop_over_columns_has_whole_vectors(
        self, name: str, code: dict[str, str]
    ) -> None:
        """Each sum of the scalar copy has at least one instruction of whole vectors beside it."""
        assert share_of_vectors(code[name], _FUSED) >= 0.5

    @pytest.mark.parametrize("name", _SCALAR)
    def test_a_serial_kernel_has_none(self, name: str, code: dict[str, str]) -> None:
        assert share_of_vectors(code[name]) == 0

    def test_kernels_that_the_driver_leaves_scalar(self, tmp_path: Path) -> None:
        """The check notices kernels that are scalar, as this driver option makes them."""
        names = ["embedding_bag_f32", "sgd_rows_bf16", "nms_f32", "roi_align_f64"]
        scalar = disassembled(
            tmp_path, *names, build=_BUILD_WITHOUT_SUB_GROUPS, CL_CONFIG_CPU_VECTORIZER_MODE="1"
        )
        assert [share_of_vectors(code) for code in scalar.values()] == [0] * len(names)
