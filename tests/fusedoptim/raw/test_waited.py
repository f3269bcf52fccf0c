"""Launches by OpenCL's interface: kept programs, arguments that change, order with SYCL's work."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

import fusedoptim
from fusedoptim import FusedSGD, allocator
from fusedoptim.launch.opencl import Driver, OpenCLKernel, driver_of
from fusedoptim.launch.order import in_flight_on
from fusedoptim.launch.sycl import SyclKernel
from fusedoptim.raw import LocalMemory, RawKernel, RawModule, _sources
from tests.fusedoptim.helpers import assert_lets_other_threads_run, run_script
from tests.interrupts import InterruptAt
from tests.running import UNBUFFERED

SLOW = """
kernel void slow(global float *x) {
    float v = 0;
    for (int i = 0; i < 30000000; i++) v = v * 0.5f + 1;
    x[get_global_id(0)] = v;
}
kernel void twice(global float *x) { x[get_global_id(0)] *= 2; }
"""


@pytest.fixture
def by_sycl(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each launch by SYCL is waited for."""
    launches: list[bool] = []

    def note(method: str, is_waited: bool) -> None:
        submit = getattr(SyclKernel, method)

        def noting(self: SyclKernel, *arguments: Any) -> Any:
            launches.append(is_waited)
            return submit(self, *arguments)

        monkeypatch.setattr(SyclKernel, method, noting)

    note("submit", is_waited=True)
    note("submit_unwaited", is_waited=False)
    return launches


def test_what_is_launched_by_sycl(module: RawModule, by_sycl: list[bool]) -> None:
    """SYCL launches what nobody waits for, and what has a queue of its own."""
    x, y = torch.ones(16), torch.zeros(16)
    for wait in (None, True):
        module["saxpy"](16, None, (16, 1, x, y), wait=wait)
    assert by_sycl == []
    module["saxpy"](16, None, (16, 1, x, y), wait=False)
    ours = allocator.queue("cpu")
    queue = allocator.load_dpctl().SyclQueue(ours.sycl_context, ours.sycl_device)
    RawKernel(SLOW, "twice", device=queue)(16, None, (x,))
    assert by_sycl == [False, True]
    module["saxpy"](16, None, (16, 1, x, y))
    assert by_sycl == [False, True]
    assert y.tolist() == [5.0] * 16


def test_after_a_launch_that_nobody_waits_for() -> None:
    module = RawModule(SLOW)
    x = torch.zeros(16)
    module["slow"](16, 16, (x,), wait=False)
    module["twice"](16, 16, (x,))
    assert x.tolist() == [4.0] * 16


@pytest.mark.parametrize("first_is_ours", [True, False])
def test_after_a_launch_on_another_queue(first_is_ours: bool) -> None:
    ours = allocator.queue("cpu")
    dpctl = allocator.load_dpctl()
    other = dpctl.SyclQueue(ours.sycl_context, ours.sycl_device, property="in_order")
    modules = [RawModule(SLOW), RawModule(SLOW, device=other)]
    first, second = modules if first_is_ours else modules[::-1]
    for name in ("slow", "twice"):
        first[name].compile(), second[name].compile()
    x = torch.zeros(16)
    first["slow"](16, 16, (x,), wait=False)
    second["twice"](16, 16, (x,))
    assert x.tolist() == [4.0] * 16
    p = Parameter(torch.zeros(16))
    p.grad = torch.ones(16)
    optimizer = FusedSGD([p], lr=1.0)
    optimizer.step()
    first["slow"](16, 16, (p.grad,), wait=False)
    optimizer.step()
    assert p.tolist() == [-3.0] * 16


def test_after_what_sycl_was_asked() -> None:
    """A launch waits for what dpctl or dpnp submitted to the queue and did not wait for."""
    module = RawModule(SLOW)
    queue = allocator.queue("cpu")
    memory = allocator.load_dpctl().memory.MemoryUSMShared(64, queue=queue)
    slow = module["slow"]._own().unwaited.handle
    event = queue.submit_async(slow, [memory], [16], [16])
    module["twice"](16, 16, (memory,))
    assert memoryview(memory).cast("f").tolist() == [4.0] * 16
    event.wait()


class _Lent:
    """An object in SYCL memory that is neither ours nor dpctl's."""

    def __init__(self) -> None:
        queue = allocator.queue("cpu")
        self._memory = allocator.load_dpctl().memory.MemoryUSMShared(64, queue=queue)
        self.__sycl_usm_array_interface__ = self._memory.__sycl_usm_array_interface__


def _made(kind: str) -> tuple[Any, Any]:
    """An argument of 64 bytes, and the object that owns them."""
    owner: Any
    if kind == "memory":
        owner = allocator.Pool("cpu").allocate(64)
        return owner, owner
    if kind == "array":
        array = allocator.Pool("cpu").array(16, "float32")
        return array, array.memory
    if kind == "sycl":
        owner = _Lent()
        return owner, owner
    owner = np.zeros(16, np.float32)
    makers = {"tensor": torch.from_numpy, "dlpack": allocator.from_dlpack, "numpy": lambda x: x}
    return makers[kind](owner), owner


def _emptied(x: Any, args: list[Any]) -> None:
    args.clear()


def _data(x: Any, args: list[Any]) -> None:
    x.data = torch.zeros(1)


def _set(x: Any, args: list[Any]) -> None:
    x.set_(torch.zeros(1).untyped_storage(), 0, (1,), (1,))


def _swapped(x: Any, args: list[Any]) -> None:
    torch.utils.swap_tensors(x, torch.zeros(1))


@pytest.mark.parametrize(
    ("kind", "let_go"),
    [
        *[("tensor", way) for way in (_emptied, _data, _set, _swapped)],
        *[(kind, _emptied) for kind in ("numpy", "memory", "array", "dlpack", "sycl")],
    ],
)
def test_memory_lives_until_the_end(kind: str, let_go: Callable[[Any, list[Any]], None]) -> None:
    """Memory lives until its kernel ends, whatever becomes of an unwaited launch's arguments."""
    module = RawModule(SLOW)
    x, owner = _made(kind)
    owned = weakref.ref(owner)
    args = [x]
    module["slow"](16, 16, args, wait=False)
    let_go(x, args)
    del x, owner, args
    gc.collect()
    assert owned() is not None
    allocator.queue("cpu").wait()
    module["twice"](16, 16, (torch.zeros(16),), wait=False)
    gc.collect()
    assert owned() is None


def test_memory_may_be_resized_after_the_end() -> None:
    """A launch keeps an argument's storage, which stays resizable: `resize_` would not wait."""
    x = torch.ones(16)
    RawModule(SLOW)["slow"](16, 16, (x,), wait=False)
    allocator.queue("cpu").wait()
    assert x.untyped_storage().resizable()
    before = x.clone()
    assert torch.equal(x.resize_(100_000)[:16], before)


def test_a_list_that_changes_during_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may change the list while the caller waits for the kernel's end."""
    twice = RawModule(SLOW)["twice"]
    array = np.ones(32, np.float32)
    owned = weakref.ref(array)
    args = [torch.from_numpy(array)]
    del array
    finish = Driver.finish
    is_alive = []

    def changing(driver: Driver) -> None:
        args.clear()
        gc.collect()
        is_alive.append(owned() is not None)
        finish(driver)

    monkeypatch.setattr(Driver, "finish", changing)
    twice(32, 16, args)
    assert is_alive == [True]


@pytest.mark.parametrize("wait", [True, False])
def test_interrupt_after_a_submission(wait: bool) -> None:
    """A kernel that was launched has ended, or its memory is kept, wherever the interrupt came."""
    twice = RawModule(SLOW)["twice"]
    queue = allocator.queue("cpu")
    twice(16, 16, (torch.zeros(16),), wait=wait)
    launched = set()
    for n in range(1000):
        array = np.ones(16, np.float32)
        with InterruptAt(n, "polls", within=fusedoptim, since="launch") as interrupt:
            twice(16, 16, (torch.from_numpy(array),), wait=wait)
        owners = in_flight_on(queue, is_ordered=True).owners.values()
        is_kept = array.ctypes.data in [owner.data_ptr() for kept in owners for owner in kept]
        if not wait:
            queue.wait()
        launched.add(array[0] == 2)
        assert array.tolist() in ([1.0] * 16, [2.0] * 16)
        assert is_kept == (array[0] == 2 and not wait)
        if not interrupt.has_raised:
            break
    assert 3 < n < 1000
    assert launched == {False, True}


def test_one_group_lets_other_threads_run() -> None:
    """One group runs on the calling thread, for as long as it takes."""
    slow = RawModule(SLOW)["slow"].compile()
    x = torch.zeros(16)
    slow(16, 16, (x,))
    assert_lets_other_threads_run(lambda: slow(16, 16, (x,)))


@pytest.mark.parametrize(("count", "is_here"), [(100, True), (100_000, False)])
def test_one_group_that_needs_much_memory(count: int, is_here: bool) -> None:
    """A group that needs much memory does not run on the stack of the calling thread."""
    text = f"""kernel void f(global float *x) {{
        float a[{count}];
        for (int i = 0; i < {count}; i++) a[(i * 7919 + (int)x[0]) % {count}] = i;
        x[0] = a[(int)x[0]] >= 0;
    }}"""
    kernel = RawKernel(text)
    assert bool(kernel._own().waited.sizes((1,), (1,)).groups) == is_here
    x = torch.ones(1)
    kernel(1, 1, (x,))
    assert x.item() == 1


def test_arguments_that_change(module: RawModule) -> None:
    """Arguments change one at a time, as OpenCL keeps those that were given before."""
    tensors = [torch.randn(64) for _ in range(4)]
    saxpy = module["saxpy"]
    for n, a, i, j in [(64, 1.0, 0, 1), (64, 1.0, 0, 2), (64, 2.0, 0, 2), (9, 2.0, 0, 2)] * 2:
        x, y = tensors[i], tensors[j]
        expected = y.clone()
        expected[:n] += a * x[:n]
        saxpy(64, 16, (n, a, x, y))
        assert torch.equal(y, expected)
    backwards, out = module["reversed"], torch.zeros(32)
    for group in (8, 16, 8, 32):
        backwards(32, group, (out, LocalMemory(group * 4)))
        expected = torch.arange(32.0).view(-1, group).flip(1).flatten()
        assert torch.equal(out, expected)


def test_arguments_given_half(module: RawModule, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a call that is interrupted while it gives arguments, the next call's are right."""
    saxpy = module["saxpy"]
    x, y, z = torch.ones(16), torch.zeros(16), torch.zeros(16)
    saxpy(16, 16, (16, 1, x, y))
    frames = saxpy._signature.frames
    (frame,) = frames

    def interrupted(*arguments: Any) -> int:
        set_pointer(*arguments)
        if arguments[1] == 3:
            raise KeyboardInterrupt
        return 0

    driver = driver_of(allocator.queue("cpu").sycl_device)
    assert driver is not None
    set_pointer = driver.opencl.set_pointer
    with monkeypatch.context() as patch:
        patch.setattr(driver.opencl, "set_pointer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            saxpy(16, 16, (16, 1, x, z))
    frames[:] = [frame]
    saxpy(16, 16, (16, 1, x, y))
    assert y.tolist() == [2.0] * 16
    assert z.tolist() == [0.0] * 16


def test_compiled_once_for_all_processes(tmp_path: Path) -> None:
    """Programs are compiled once for all processes, even those that print and contain texts."""
    script = """
import torch
from fusedoptim.launch import opencl
from fusedoptim.raw import RawKernel
compiled = []
compile_now = opencl.Driver.compile_now
opencl.Driver.compile_now = lambda *a: compiled.append(a) or compile_now(*a)
text = 'kernel void f(global int *x) { x[0] += 1; printf("x is %d\\\\n", x[0]); }'
x = torch.zeros(1, dtype=torch.int32)
RawKernel(text)(1, None, (x,))
print(len(compiled), flush=True)
"""
    for count in ("1", "0"):
        done = run_script(UNBUFFERED + script, FUSEDOPTIM_CACHE_DIR=str(tmp_path))
        assert sorted(done.stdout.splitlines()) == [count, "x is 1"]


def test_variables_that_outlive_a_launch(by_sycl: list[bool]) -> None:
    """Variables that outlive a launch are the same for all launches."""
    text = "global int n = 0; kernel void count(global int *x) { *x = ++n; }"
    count = RawKernel(text, options=["-cl-std=CL2.0"])
    x = torch.zeros((), dtype=torch.int32)
    for i, wait in enumerate((True, False, True, None, False), start=1):
        count(1, 1, (x,), wait=wait)
        allocator.queue("cpu").wait()
        assert x == i
    assert by_sycl == [True, False, True, True, False]


def test_programs_go_with_their_kernels() -> None:
    twice = RawKernel(SLOW, "twice")
    twice(16, 16, (torch.ones(16),))
    waited = twice._own().waited
    assert isinstance(waited, OpenCLKernel)
    program = weakref.ref(waited.program)
    del twice, waited
    _sources._shared.cache_clear()
    gc.collect()
    assert program() is None


def test_refused_launch(module: RawModule) -> None:
    """The kernel still works after a refused launch."""
    saxpy, x, y = module["saxpy"], torch.ones(16), torch.zeros(16)
    saxpy(16, 16, (16, 1, x, y))
    built = saxpy._own()
    shape = built.shape(16, 16)
    nine_dimensions = shape.waited._replace(last=(9, *shape.waited.last[1:]))
    built._shapes[(16,), (16,)] = shape._replace(waited=nine_dimensions)
    with pytest.raises(RuntimeError, match=r"saxpy: .* refused .* \(.* OpenCL's error -53\)"):
        saxpy(16, 16, (16, 1, x, y))
    built._shapes.clear()
    saxpy(16, 16, (16, 1, x, y))
    assert y.tolist() == [2.0] * 16
