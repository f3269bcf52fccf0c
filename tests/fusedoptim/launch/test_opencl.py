"""Kernels by OpenCL's interface: compiled once for all processes, ordered with SYCL's work."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from fusedoptim import FusedSGD
from fusedoptim.allocator import load_dpctl, queue
from fusedoptim.launch import cache, cpu, opencl
from fusedoptim.launch.arguments import ONE_ADDRESS, frame_of
from fusedoptim.launch.backend import BuildError, LaunchError
from fusedoptim.launch.block import LaunchBlock
from fusedoptim.launch.kernel import kernel_for
from fusedoptim.launch.modules import load_module
from fusedoptim.launch.opencl import Driver, driver_of
from fusedoptim.launch.sycl import SyclCompiler, SyclKernel, SyclProgram
from fusedoptim.raw import RawKernel
from fusedoptim.step import commit
from tests.fusedoptim.helpers import SideBySide, each_class, make_params, run_script
from tests.fusedoptim.launch.long_steps import many_params
from tests.optimizer_cases import OptimizerCase

SGD = load_module("sgd", "f32")
SLOW = """
kernel void slow(global float *grad) {
    float x = 0;
    for (int i = 0; i < 30000000; i++) x = x * 0.5f + 1;
    grad[get_global_id(0)] = x;
}
"""


@pytest.fixture
def driver() -> Driver:
    driver = driver_of(queue("cpu").sycl_device)
    assert driver is not None
    kernel_for(queue("cpu"), "sgd", "f32")  # its own program, which the tests do not count
    return driver


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSEDOPTIM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The modules that the driver compiles."""
    seen: list[bytes] = []
    compile_now = Driver.compile_now

    def counting(driver: Driver, spirv: bytes, options: str = "") -> Any:
        seen.append(spirv)
        return compile_now(driver, spirv, options)

    monkeypatch.setattr(Driver, "compile_now", counting)
    return seen


def _step(driver: Driver, program: Any) -> list[float]:
    """The parameters 0 to 4 after a step of 0.5 with gradients of 1, by a kernel of ``program``."""
    kernel = kernel_for(queue("cpu"), "sgd", "f32")
    block = LaunchBlock(kernel, np.array([5]))
    block._on_device = program.kernel(kernel.queue, SGD.name, ONE_ADDRESS)
    block._on_device.prepare(block._frame)
    param, grad, factor = torch.arange(5.0), torch.ones(5), torch.ones(())
    block.write("param", param.data_ptr())
    block.write("grad", grad.data_ptr())
    numbers = {"grad_factor": factor.data_ptr(), "lr": 0.5, "weight_decay": 0.0}
    block.write_head(numbers)
    block.launch()
    block.wait()
    result: list[float] = param.tolist()
    return result


class TestKept:
    def test_compiled_once(self, driver: Driver, place: Path, compiled: list[bytes]) -> None:
        for options in ("", "-cl-opt-disable"):
            for _ in range(3):
                program = driver.compile(SGD.spirv, options)
                assert _step(driver, program) == [-0.5, 0.5, 1.5, 2.5, 3.5]
        assert compiled == [SGD.spirv] * 2
        assert len(list(place.iterdir())) == 2

    @pytest.mark.usefixtures("place")
    def test_for_another_process(self) -> None:
        """Another process compiles nothing, unless it is for another instruction set."""
        script = """
import torch
from fusedoptim import FusedAdam
from fusedoptim.launch import opencl
compiled = []
compile_now = opencl.Driver.compile_now
opencl.Driver.compile_now = lambda *a: compiled.append(a) or compile_now(*a)
p = torch.nn.Parameter(torch.ones(1000))
p.grad = torch.linspace(-1, 1, 1000)
FusedAdam([p], max_grad_norm=1.0).step()
print(len(compiled), p.detach().view(torch.int32).sum().item())
"""
        isas = ("", "avx2", "")
        runs = [run_script(script, FUSEDOPTIM_ISA=isa).stdout.split() for isa in isas]
        assert [count for count, _ in runs] == ["2", "2", "0"]
        assert runs[0][1] == runs[2][1]

    @pytest.mark.parametrize("of", ["driver", "processor"])
    def test_for_the_same_machine_only(
        self, of: str, driver: Driver, place: Path, compiled: list[bytes]
    ) -> None:
        driver.compile(SGD.spirv)
        platform, name, version, *target, features = driver._identity
        if of == "driver":
            version += ".1"
        else:
            features += " avx1024"
        identity = (platform, name, version, *target, features)
        Driver(driver.opencl, driver._device, identity).compile(SGD.spirv)
        assert len(compiled) == 2

    def test_not_while_the_driver_has_settings(
        self, driver: Driver, place: Path, compiled: list[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Settings may make the driver compile otherwise, or write what it compiles to files."""
        monkeypatch.setenv("CL_CONFIG_DUMP_ASM", "False")
        for _ in range(2):
            driver.compile(SGD.spirv)
        assert len(compiled) == 2
        assert not place.exists()

    def test_damaged(self, driver: Driver, place: Path, compiled: list[bytes]) -> None:
        driver.compile(SGD.spirv)
        (file,) = place.iterdir()
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.warns(RuntimeWarning, match="truncated or damaged"):
            program = driver.compile(SGD.spirv)
        assert _step(driver, program)[0] == -0.5
        assert len(compiled) == 2

    def test_of_another_driver(
        self, driver: Driver, place: Path, compiled: list[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another driver's program is refused and rebuilt, even if name and version are equal."""
        with monkeypatch.context() as patch:
            patch.setattr(Driver, "_binary", lambda *_: b"a program of another driver")
            driver.compile(SGD.spirv)
        for _ in range(2):
            assert _step(driver, driver.compile(SGD.spirv))[0] == -0.5
        assert len(compiled) == 2

    def test_of_another_driver_where_nothing_can_be_written(
        self, driver: Driver, place: Path, compiled: list[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The refused program stays there, and is read only once."""
        with monkeypatch.context() as patch:
            patch.setattr(Driver, "_binary", lambda *_: b"a program of another driver")
            driver.compile(SGD.spirv)
        (file,) = place.iterdir()
        content = file.read_bytes()

        def refused(*_: object, **__: object) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        for change in ("unlink", "replace", "mkdir"):
            monkeypatch.setattr(cache.os, change, refused)
        reads = []
        read = Driver._read

        def counting(driver: Driver, binary: bytes, options: str) -> Any:
            reads.append(binary)
            assert len(reads) == 1
            return read(driver, binary, options)

        monkeypatch.setattr(Driver, "_read", counting)
        assert _step(driver, driver.compile(SGD.spirv))[0] == -0.5
        assert len(reads) == 1
        assert len(compiled) == 2
        assert file.read_bytes() == content

    def test_nowhere(
        self, driver: Driver, tmp_path: Path, compiled: list[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A step works without a cache, and without a warning, as torch's optimizers have none."""
        (tmp_path / "file").touch()
        for place in ("", str(tmp_path / "file" / "cache")):
            monkeypatch.setenv("FUSEDOPTIM_CACHE_DIR", place)
            assert _step(driver, driver.compile(SGD.spirv))[0] == -0.5
        assert len(compiled) == 2


def test_processor_features() -> None:
    assert " sse4_2 " in opencl.processor_features()


def test_driver_says_why(driver: Driver) -> None:
    text = ctypes.c_char_p(b"kernel void wrong() { no_such_function(); }")
    source = driver._context, 1, ctypes.byref(text), None
    with pytest.raises(BuildError, match="no_such_function") as raised:
        driver._built("clCreateProgramWithSource", source, "")
    assert "no_such_function" in raised.value.log


def test_refused_launch(driver: Driver) -> None:
    lanes = 1 << 20  # more lanes than any device allows in a group
    kernel = driver.compile(SGD.spirv).kernel(queue("cpu"), SGD.name, ONE_ADDRESS)
    frame, sizes = frame_of(0), kernel.sizes((lanes,), (lanes,))
    kernel.prepare(frame)
    events = ["of another"]
    with pytest.raises(LaunchError, match=r"clEnqueueNDRangeKernel failed with OpenCL's error -"):
        kernel.submit(frame, sizes, 5, events)
    assert events == ["of another"]


def test_one_group_runs_on_the_calling_thread(driver: Driver) -> None:
    """A lone group runs on the calling thread, but not before a longer launch submitted earlier."""
    assert driver.own_thread is not None
    small, large = Parameter(torch.zeros(8)), Parameter(torch.zeros(2_000_000))
    optimizer = FusedSGD([{"params": [large], "lr": 1.0}, {"params": [small], "lr": 1.0}])
    for _ in range(20):
        small.grad, large.grad = torch.ones(8), torch.ones(2_000_000)
        optimizer.step()
    progress = driver.progress
    assert progress.latest is progress.ended
    latest = progress.latest
    large.grad = None
    optimizer.step()
    assert progress.latest is latest  # nothing was submitted to the other threads
    assert small.tolist() == [-21.0] * 8
    assert large.eq(-20).all()


def test_overlapping_parameters_of_two_groups() -> None:
    """The long launch comes first, although the short one could run at once."""
    whole = Parameter(torch.zeros(4_000_000))
    part = Parameter(torch.zeros(0))
    part.data = whole.data[-8:]
    optimizer = FusedSGD([{"params": [whole], "lr": 1.0}, {"params": [part], "lr": 0.5}])
    whole.grad, part.grad = torch.ones(4_000_000), torch.ones(8)
    for _ in range(50):
        optimizer.step()
    assert part.tolist() == [-75.0] * 8
    assert whole[:-8].eq(-50).all()


def test_one_queue_for_all_threads() -> None:
    """All threads share one queue, which orders Lamb's three kernels."""
    run_script("""
import time
from fusedoptim.launch import opencl
from fusedoptim.allocator import queue
from tests.fusedoptim.helpers import run_in_threads
devices = opencl.OpenCL.devices
opencl.OpenCL.devices = lambda self: time.sleep(0.2) or devices(self)
device = queue("cpu").sycl_device
found = []
run_in_threads(*[lambda: found.append(opencl.driver_of(device))] * 4)
assert len(found) == 4 and len(set(map(id, found))) == 1, found
""")


def test_end_that_is_seen_between_note_and_submission(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step waits for its kernel even if another thread has taken it for ended before."""
    monkeypatch.setattr(opencl, "team", lambda: None)
    enqueue = driver.opencl.enqueue

    def seen_before(*arguments: Any) -> int:
        driver.progress.wait(lambda: None)
        status: int = enqueue(*arguments)
        return status

    p = Parameter(torch.zeros(4_000_000))
    p.grad = torch.ones(4_000_000)
    optimizer = FusedSGD([p], lr=1.0)
    optimizer.step()
    monkeypatch.setattr(driver.opencl, "enqueue", seen_before)
    states = []
    marks = commit.increment_version

    def look(params: Any) -> None:
        states.append(driver.progress.latest is driver.progress.ended)
        marks(params)

    monkeypatch.setattr(commit, "increment_version", look)
    optimizer.step()
    assert p.eq(-2).all()
    assert states == [False]


@pytest.fixture(scope="module")
def compile_once() -> Callable[..., SyclProgram]:
    """SYCL's compiler, which keeps nothing: each test needs the same few programs."""
    return functools.cache(SyclCompiler.compile)


@pytest.fixture
def by_sycl(
    monkeypatch: pytest.MonkeyPatch,
    sycl_launches: list[SyclKernel],
    compile_once: Callable[..., SyclProgram],
) -> Iterator[list[SyclKernel]]:
    """Build and launch kernels as on a GPU; the list has those launched."""
    kernel_for.cache_clear()
    monkeypatch.setattr(cpu, "driver_of", lambda device: None)
    monkeypatch.setattr(SyclCompiler, "compile", compile_once)
    yield sycl_launches
    kernel_for.cache_clear()


@pytest.mark.parametrize("limit", [None, 1.0], ids=["", "clipped"])
@each_class
def test_by_sycl(case: OptimizerCase, limit: float | None, by_sycl: list[SyclKernel]) -> None:
    dtypes = case.dtypes[-1:] if case.is_split else (torch.float32, torch.float64, torch.bfloat16)
    for dtype in dtypes:
        by_sycl.clear()
        SideBySide(case, params=make_params(dtype)).train(3, limit=limit)
        assert len(by_sycl) >= (3 if limit is None else 6)


def test_writes_are_counted_by_sycl(by_sycl: list[SyclKernel]) -> None:
    params, optimizer = many_params()
    optimizer.step()
    assert len(by_sycl) == 1
    assert [p._version for p in params] == [1] * len(params)


@pytest.mark.usefixtures("by_sycl")
def test_by_sycl_after_a_raw_kernel_on_another_queue() -> None:
    """A step waits for kernels that nobody waited for, whatever launches it."""
    ours = queue("cpu")
    other = load_dpctl().SyclQueue(ours.sycl_context, ours.sycl_device, property="in_order")
    slow = RawKernel(SLOW, device=other)
    p = Parameter(torch.zeros(16))
    p.grad = torch.zeros(16)
    optimizer = FusedSGD([p], lr=1.0)
    optimizer.step()
    slow(16, 16, (p.grad,), wait=False)
    optimizer.step()
    assert p.tolist() == [-2.0] * 16


def test_a_device_that_opencl_does_not_have() -> None:
    assert opencl._driver("Level-Zero", "Data Center GPU", "1.6") is None
