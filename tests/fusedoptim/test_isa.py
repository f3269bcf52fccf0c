"""What FUSEDOPTIM_ISA asks for is what the CPU driver compiles for, or an error."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import allocator
from allocator.runtime import isa as driver_isa
from allocator.runtime import maps
from fusedoptim import FusedSGD, isa
from fusedoptim.ops import dropout
from tests.running import run_script

_WITHOUT = "without FUSEDOPTIM_ISA"
# The driver writes its code to the current folder; packages are imported from this one.
_ENTER = "import os, sys, fusedoptim, allocator; os.chdir(sys.argv[1])"
# The bits of parameters and state after a few steps, and of a sum. Lamb sums over tensors too.
_STEPS = """
import hashlib, torch
from fusedoptim import FusedAdam, FusedLamb, SplitSGD, isa
from fusedoptim.raw import ReductionKernel
digest = hashlib.sha256()
cases = (FusedAdam, torch.float32), (SplitSGD, torch.bfloat16), (FusedLamb, torch.float32)
for cls, dtype in cases:
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(10_007).to(dtype))
    optimizer = cls([param], lr=0.01, weight_decay=0.1)
    for _ in range(3):
        param.grad = torch.randn(10_007).to(dtype)
        optimizer.step()
    for tensor in (param.detach(), *optimizer.state[param].values()):
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
total = ReductionKernel("T x", "T y", "x", "a + b", "y = a", "0")
digest.update(total(torch.randn(10_007)).numpy().tobytes())
print(isa.level(), digest.hexdigest())
"""
# The driver's own variable is wrong at first; then the level is set, after the import.
_WRONG_THEN_STEPS = f"""
import os
from fusedoptim import isa
wanted = os.environ.pop("FUSEDOPTIM_ISA")
os.environ["CL_CONFIG_CPU_TARGET_ARCH"] = "pentium"
try:
    isa.level()
except RuntimeError as error:
    print(error)
del os.environ["CL_CONFIG_CPU_TARGET_ARCH"]
os.environ["FUSEDOPTIM_ISA"] = wanted
{_STEPS}
print(sorted(name for name in os.environ if "TARGET_ARCH" in name))
"""


class Run(NamedTuple):
    lines: list[str]
    registers: set[str]
    """The kinds of vector register in the code that the driver made."""
    gathers: set[str]
    """The instructions in it that load or store the lanes of a register one by one."""


def lower_level() -> str:
    return "avx2" if isa.LEVELS.index(isa.highest()) > isa.LEVELS.index("avx2") else "sse4.2"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The same steps in two processes, at the machine's level and at a lower one."""
    lower = lower_level()
    done = {}
    for name, script, level in (
        (_WITHOUT, _STEPS, {}),
        (lower, _WRONG_THEN_STEPS, {driver_isa.VARIABLE: lower}),
    ):
        folder = tmp_path_factory.mktemp("disassembly")
        with pytest.MonkeyPatch.context() as monkeypatch:
            for variable in (driver_isa.VARIABLE, driver_isa.DRIVER_VARIABLE):
                monkeypatch.delenv(variable, raising=False)
            ended = run_script(
                _ENTER + script, str(folder), CL_CONFIG_DUMP_DISASSEMBLY="True", **level
            )
        assert ended.returncode == 0, ended.stderr
        kernels = [path.read_text() for path in folder.glob("*.asm")]
        code = "".join(kernels)
        assert code
        # With AVX-512, a masked scatter stores the one result of a reduction's group.
        of_many = "".join(kernel for kernel in kernels if "<reduction>:" not in kernel)
        loads, stores = r"\bvp?gather\w+", r"\bvp?scatter\w+"
        done[name] = Run(
            ended.stdout.splitlines(),
            set(re.findall(r"\b([xyz]mm)\d", code)),
            {*re.findall(loads, code), *re.findall(stores, of_many)},
        )
    return done


def test_disassembly_has_the_registers_of_the_level(runs: dict[str, Run]) -> None:
    widest = {"sse4.2": "xmm", "avx": "ymm", "avx2": "ymm", "avx512": "zmm", "avx512_fp16": "zmm"}
    assert max(runs[_WITHOUT].registers) == widest[isa.highest()]
    assert max(runs[lower_level()].registers) == widest[lower_level()]


def test_loops_are_vectorized(runs: dict[str, Run]) -> None:
    """A branch for each lane, such as numba's test for zero divisors, would cause gathers."""
    assert all(not run.gathers for run in runs.values())


def test_level_is_the_drivers_and_steps_give_the_same_bits(runs: dict[str, Run]) -> None:
    level, bits = runs[_WITHOUT].lines[0].split()
    assert level == isa.highest()
    assert runs[lower_level()].lines[1].split() == [lower_level(), bits]


def test_drivers_own_variable_is_left_to_the_user(runs: dict[str, Run]) -> None:
    refused, _, left_behind = runs[lower_level()].lines
    assert "refuses to start with CL_CONFIG_CPU_TARGET_ARCH='pentium'; unset it" in refused
    assert left_behind == "[]"


def test_level_in_this_process() -> None:
    assert isa.level() == allocator.loaded_isa()
    assert isa.LEVELS.index(isa.level()) <= isa.LEVELS.index(isa.highest())


def test_highest_is_what_the_system_says() -> None:
    flags = re.findall(r"^flags\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[0]
    for level, flag in {
        "sse4.2": "sse4_2", "avx": "avx", "avx2": "avx2", "avx512": "avx512vl",
        "avx512_fp16": "avx512_fp16",
    }.items():  # fmt: skip
        has = isa.LEVELS.index(level) <= isa.LEVELS.index(isa.highest())
        assert has == (flag in flags.split())


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    allocator.queue("cpu")
    monkeypatch.delenv(driver_isa.DRIVER_VARIABLE, raising=False)
    return monkeypatch


def test_unknown_level(wanted: pytest.MonkeyPatch) -> None:
    wanted.setenv("FUSEDOPTIM_ISA", "AVX-1024")
    with pytest.raises(ValueError, match=r"'AVX-1024' is not one of sse4.2, avx, avx2, avx512, "):
        isa.level()


def test_empty_is_unset(wanted: pytest.MonkeyPatch) -> None:
    wanted.setenv("FUSEDOPTIM_ISA", "")
    assert isa.level() in isa.LEVELS


def test_above_the_machine(wanted: pytest.MonkeyPatch) -> None:
    wanted.setattr(driver_isa, "highest_isa", lambda: "avx2")
    wanted.setattr(driver_isa, "_loaded", "avx2")
    wanted.setenv("FUSEDOPTIM_ISA", "avx512")
    with pytest.raises(ValueError, match="'avx512' is above this machine's highest level, 'avx2'"):
        allocator.queue("cpu")


def test_too_late_for_this_process(wanted: pytest.MonkeyPatch) -> None:
    other = next(level for level in isa.LEVELS if level != isa.level())
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    for p in params:
        p.grad = torch.ones(3)
    stepping, new = (FusedSGD([p], lr=0.5) for p in params)
    stepping.step()
    wanted.setenv("FUSEDOPTIM_ISA", other)
    for use in (new.step, lambda: dropout(params[0], torch.tensor(0), 0.5), allocator.queue):
        with pytest.raises(RuntimeError, match="was set after the CPU driver had started"):
            use()
    stepping.step()
    assert [p.detach().tolist() for p in params] == [[0.0] * 3, [1.0] * 3]


def test_same_level_is_never_too_late(wanted: pytest.MonkeyPatch) -> None:
    wanted.setenv("FUSEDOPTIM_ISA", isa.level())
    assert isa.level() == os.environ["FUSEDOPTIM_ISA"]


def test_contradicts_the_drivers_own_variable(wanted: pytest.MonkeyPatch) -> None:
    wanted.setenv("FUSEDOPTIM_ISA", "sse4.2")
    wanted.setenv("CL_CONFIG_CPU_TARGET_ARCH", "corei7")
    assert driver_isa.wanted_isa() == "sse4.2"
    wanted.setenv("CL_CONFIG_CPU_TARGET_ARCH", "skx")
    with pytest.raises(ValueError, match="unset one of the two"):
        driver_isa.wanted_isa()


def test_driver_of_another_make(wanted: pytest.MonkeyPatch) -> None:
    wanted.setattr(driver_isa, "_loaded", None)
    wanted.setattr(maps, "_MAPS", os.devnull)
    with pytest.raises(RuntimeError, match="does not show its instruction set"):
        isa.level()
    wanted.setenv("FUSEDOPTIM_ISA", "sse4.2")
    with pytest.raises(RuntimeError, match="not Intel's CPU driver; unset it"):
        allocator.queue("cpu")


def test_processor_without_any_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_isa, "processor_features", str)
    with pytest.raises(RuntimeError, match=r"lacks SSE4\.2"):
        driver_isa.highest_isa.__wrapped__()


def test_highest_level_is_torchs() -> None:
    """torch asks the processor itself, where we read what Linux reports."""
    has = torch.cpu.get_capabilities()
    of_level = {
        "avx": "avx",
        "avx2": "avx2",
        "avx512": "avx512_f",
        "avx512_fp16": "avx512_fp16",
    }
    highest = [level for level, feature in of_level.items() if has.get(feature, False)]
    assert driver_isa.highest_isa() == [*["sse4.2"], *highest][-1]
