"""Launches: memory, ids, what is returned, and what a kernel tells about itself."""

from __future__ import annotations

import copy
import functools
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fusedoptim import allocator
from fusedoptim.launch import cpu
from fusedoptim.raw import LocalMemory, RawKernel, RawModule
from tests.fusedoptim.helpers import assert_within, run_in_threads
from tests.tolerances import Bounded, number


@pytest.fixture(params=["OpenCL", "SYCL"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The interface that builds and launches the CPU's kernels; a GPU's kernels use SYCL's."""
    if request.param == "SYCL":
        monkeypatch.setattr(cpu, "driver_of", lambda device: None)
    way: str = request.param
    return way


def saxpy_bound(a: float, x: Tensor, y: Tensor) -> Bounded:
    exact = [Bounded(t.double(), 0.0, torch.float32) for t in (x, y)]
    return number(a) * exact[0] + exact[1]


@pytest.mark.parametrize("n", [0, 1, 15, 1000, 65537])
@pytest.mark.parametrize("local", [None, 16])
def test_saxpy(module: RawModule, n: int, local: int | None) -> None:
    x, y = torch.randn(n + 3)[3:], torch.randn(n + 1)[1:]
    expected = saxpy_bound(0.3, x, y)
    address, version = y.data_ptr(), y._version
    size = n if local is None else -(-n // local) * local
    assert module["saxpy"](size, local, (n, 0.3, x, y)) is None
    assert_within(y, expected.value, expected.error, "y")
    assert y.data_ptr() == address
    assert y._version == version + (n > 0)
    assert x._version == 0


def test_large_launch_after_torchs_threads(module: RawModule) -> None:
    x, y = torch.randn(2_100_000), torch.zeros(2_100_000)
    module["saxpy"](2_100_000, None, (2_100_000, 1, x, y))
    assert torch.equal(x, y)
    assert torch.equal(x + y, 2 * y)


@pytest.mark.parametrize("size", [(4,), (4, 3), (4, 3, 2)])
@pytest.mark.parametrize("as_given", [tuple, list, np.array])
def test_first_size_is_that_of_id_0(module: RawModule, size: tuple[int, ...], as_given) -> None:
    out = torch.zeros(size[::-1], dtype=torch.int32)
    module["where"](as_given(size), (2,) + (1,) * (len(size) - 1), (out,))
    index = torch.meshgrid(*[torch.arange(n) for n in size[::-1]], indexing="ij")[::-1]
    expected = sum(10**k * ids for k, ids in enumerate(index))
    assert torch.equal(out.long(), expected + 2000 + 10000)


def test_local_memory_and_barrier(module: RawModule) -> None:
    out = torch.zeros(32)
    module["reversed"](32, 8, (out, LocalMemory(np.int64(8 * 4))))
    assert torch.equal(out.view(4, 8).flip(1).flatten(), torch.arange(32.0))


def test_required_local_size_is_taken(module: RawModule) -> None:
    out = torch.zeros(32, dtype=torch.int32)
    module["required"]((8, 4), None, (out,))
    assert (out == 4).all()
    module["required"]((8, 4), (4, 2), (out,))
    for local in [(2, 4), (8, 1)]:
        with pytest.raises(ValueError, match=r"requires \(4, 2, 1\)"):
            module["required"]((8, 4), local, (out,))
    with pytest.raises(ValueError, match=r"requires \(4, 2, 1\)"):
        module["required"](8, None, (out,))


def test_scalars(module: RawModule) -> None:
    out = torch.zeros(11, dtype=torch.float64)
    limits = [-128, 255, -32768, 65535, -(2**31), 2**32 - 1, -(2**53), 2**53, 0.5, 1.5, 0.1]
    module["scalars"](1, 1, (out, *limits))
    assert out.tolist() == limits
    typed = [np.dtype(name).type(value) for name, value in zip("bBhHiIqQefd", limits)]
    out.zero_()
    module["scalars"](1, 1, [out, *typed])
    assert out.tolist() == limits
    module["scalars"](1, 1, (out, *[True] * 8, float("inf"), float("-inf"), float("nan")))
    assert out[:10].tolist() == [1.0] * 8 + [float("inf"), float("-inf")]
    assert out[10].isnan()


def test_vectors_and_structs(module: RawModule, way: str) -> None:
    out = torch.zeros(5, dtype=torch.float64)
    module["vectors"](1, 1, (out, (-1, 2), np.array([0.5, 4], np.float32)))
    assert out.tolist() == [-1, 2, 0.5, 4, 0]
    record = np.array([(7, 8, 0.1)], dtype="i4,f4,f8")
    arguments = (out, (1, 2, 3, 4.5), np.array([5, 6, 7], np.float32), record)
    if way == "OpenCL" or hasattr(allocator.load_dpctl(), "RawKernelArg"):
        module["wide"](1, 1, arguments)
        assert out.tolist() == [1, 4.5, 7, 7, 0.1]
    else:
        with pytest.raises(RuntimeError, match="only values of 1, 2, 4 or 8 bytes"):
            module["wide"](1, 1, arguments)


def test_no_parameters(module: RawModule) -> None:
    module["nothing"](1, None, ())


def memories() -> dict[str, tuple[object, object]]:
    """Sixteen bytes that count up, in each kind of memory."""
    pool = allocator.Pool("cpu")
    memory = pool.allocate(16)
    memory.copy_from_host(bytes(range(16)))
    array = pool.array(16, "uint8")
    memoryview(array)[:] = bytes(range(16))
    usm = allocator.load_dpctl().memory.MemoryUSMShared(16)
    usm.copy_from_host(bytearray(range(16)))
    counting = torch.arange(16, dtype=torch.uint8)
    return {
        "tensor": counting,
        "0-d": torch.frombuffer(bytearray(range(16)), dtype=torch.complex128)[0],
        "Parameter": torch.nn.Parameter(counting.view(torch.float32), requires_grad=False),
        "pool tensor": pool.empty(16, torch.uint8).copy_(counting),
        "Memory": memory,
        "Array": array,
        "borrowed": allocator.from_dlpack(counting.clone()),
        "USM": usm,
        "numpy": np.arange(16, dtype=np.uint8),
        "read-only": np.frombuffer(bytes(range(16)), dtype=np.uint8),
    }


@pytest.mark.parametrize("kind", list(memories()))
def test_memory_of_every_kind(module: RawModule, kind: str) -> None:
    source, to = memories()[kind], torch.zeros(16, dtype=torch.uint8)
    module["copy"](16, None, (source, to))
    assert to.tolist() == list(range(16))
    if kind == "read-only":
        with pytest.raises(ValueError, match="argument 1, 'void \\*to': the array is read-only"):
            module["copy"](16, None, (to, source))
        return
    to += 1
    module["copy"](16, None, (to, source))
    back = torch.zeros(16, dtype=torch.uint8)
    module["copy"](16, None, (source, back))
    assert torch.equal(back, to)


def test_memory_of_a_pool_can_be_released(module: RawModule) -> None:
    """A kernel that has ended keeps nothing of what it was given."""
    pool = allocator.Pool("cpu")
    memory, array = pool.allocate(16), pool.array(16, "uint8")
    module["copy"](16, None, (memory, array))
    array.memory.release()
    memory.release()
    with pytest.raises(ValueError, match=r"argument 0, .* array at .* was released"):
        module["copy"](16, None, (array, None))


def test_dpctl_and_dpnp_arrays(module: RawModule) -> None:
    tensors = pytest.importorskip("dpctl.tensor", exc_type=ImportError)
    queue = allocator.load_dpctl().SyclQueue("cpu")  # out of order, unlike ours
    x = tensors.arange(10, dtype="f4", sycl_queue=queue)
    y = tensors.zeros(14, dtype="f4", sycl_queue=queue)
    module["saxpy"](10, None, (10, 2, x, y[4:]))
    assert tensors.asnumpy(y).tolist() == [0] * 4 + [2 * i for i in range(10)]
    with pytest.raises(ValueError, match="not contiguous"):
        module["saxpy"](5, None, (5, 2, x[::2], y))
    with pytest.raises(TypeError, match="dtype is int64, and the kernel reads float32"):
        module["saxpy"](5, None, (5, 2, tensors.astype(x, "i8"), y))


def test_null_pointers() -> None:
    text = "kernel void f(global int *x, global float *y, constant float *z)"
    kernel = RawKernel(text + "{ *x = (y == 0) + 2 * (z == 0); }")
    x, some = torch.zeros((), dtype=torch.int32), torch.ones(4)
    for y, z, expected in [(None, None, 3), (some, some, 0), (None, some, 1), (some, None, 2)]:
        kernel(1, None, (x, y, z))
        assert x == expected


def test_queues_of_others(module: RawModule) -> None:
    """Arrays of another queue of the same context are waited for; other contexts are refused."""
    dpctl = allocator.load_dpctl()
    ours = allocator.queue("cpu")
    other = dpctl.SyclQueue(ours.sycl_context, ours.sycl_device)
    alien = dpctl.SyclQueue(dpctl.SyclContext([ours.sycl_device]), ours.sycl_device)
    memory = [dpctl.memory.MemoryUSMShared(16, queue=q) for q in (ours, other, alien)]
    memory[0].copy_from_host(bytearray(range(16)))
    memory[1].copy_from_host(bytearray(16))
    module["copy"](16, None, (memory[0], memory[1]))
    assert bytes(memory[1].copy_to_host()) == bytes(range(16))
    with pytest.raises(RuntimeError, match="argument 1 is in the SYCL context of"):
        module["copy"](16, None, (memory[0], memory[2]))
    back = torch.zeros(16, dtype=torch.uint8)
    module["copy"](16, None, (memory[2], back))  # alone, it determines the queue
    for q in (other, alien):
        out = torch.zeros(1)
        RawKernel("kernel void f(global float *x) { x[0] = 3; }", device=q)(1, None, (out,))
        assert out == 3


def test_without_waiting(module: RawModule) -> None:
    y = torch.zeros(100_000)
    for _ in range(20):
        module["saxpy"](100_000, None, (100_000, 1, torch.ones(100_000), y), wait=False)
    module["saxpy"](1, None, (0, 0, y, y))  # in order, and waited for
    assert (y == 20).all()


def test_autograd_notices(module: RawModule) -> None:
    x, y = torch.randn(10), torch.randn(10)
    weight = torch.randn(10, requires_grad=True)
    for _ in range(2):  # the second time, the tensors have been checked before
        loss = (weight * y).sum()
        module["saxpy"](10, None, (10, 1, x, y))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        with pytest.raises(RuntimeError, match="requires grad"):
            module["saxpy"](10, None, (10, 1, x, weight))
        with torch.no_grad():
            module["saxpy"](10, None, (10, 1, x, weight))
        with torch.inference_mode():
            module["saxpy"](10, None, (10, 1, x, torch.zeros(10)))
        module["saxpy"](10, None, (10, 1, weight, weight.detach()))


def test_a_tensor_that_lost_its_memory(module: RawModule) -> None:
    x, y = torch.randn(10), torch.randn(10)
    module["saxpy"](10, None, (10, 1, x, y))
    x.untyped_storage().resize_(0)
    with pytest.raises(TypeError, match="argument 2, 'const f32 \\*x': a Tensor with no memory"):
        module["saxpy"](10, None, (10, 1, x, y))


def test_threads_share_a_kernel() -> None:
    kernel = RawKernel("kernel void f(global int *x, int v) { x[get_global_id(0)] += v; }")
    tensors = [torch.zeros(100, dtype=torch.int32) for _ in range(4)]

    def work(i: int) -> None:
        for _ in range(100):
            kernel(100, None, (tensors[i], i))

    run_in_threads(*(functools.partial(work, i) for i in range(4)))
    assert [t.unique().tolist() for t in tensors] == [[0], [100], [200], [300]]


def test_in_a_compiled_function(module: RawModule) -> None:
    kernel = module["saxpy"]

    @torch.compile(backend="eager")
    def compiled(x: Tensor, y: Tensor) -> Tensor:
        y = y + 1
        kernel(10, None, (10, 2.0, x, y))
        return y * 2

    x, y = torch.ones(10), torch.zeros(10)
    for _ in range(2):
        assert (compiled(x, y) == 6).all()
    torch.compiler.reset()


def test_a_kernel_tells_of_itself(module: RawModule) -> None:
    kernel = module["saxpy"]
    assert kernel.name == "saxpy"
    assert kernel.kind == "OpenCL C"
    assert kernel.num_args == 4
    assert [p.name for p in kernel.signature] == ["n", "a", "x", "y"]
    assert kernel.compile() is kernel
    assert kernel.max_work_group_size >= kernel.preferred_work_group_size_multiple >= 1
    assert kernel.private_mem_size >= 0
    assert kernel.spirv[:4] == b"\x03\x02\x23\x07"
    assert repr(kernel) == "<RawKernel saxpy(u64 n, f32 a, const f32 *x, f32 *y)>"
    table = kernel._repr_html_()
    assert "const f32 *" in table
    assert kernel._own().queue.sycl_device.name in table
    assert repr(RawKernel("text", "f")) == "<RawKernel f of OpenCL C, not compiled>"
    assert repr(RawKernel("text")) == "<RawKernel of OpenCL C, not compiled>"
    assert "saxpy" in module
    assert module.names[:2] == tuple(module)[:2] == ("saxpy", "copy")
    assert len(module) == len(module.names)
    assert repr(module).startswith("<RawModule of OpenCL C: saxpy, copy, ")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda k: pickle.loads(pickle.dumps(k))])
def test_copies(module: RawModule, copied) -> None:
    y = torch.zeros(3)
    copied(module["saxpy"])(3, None, (3, 1, torch.ones(3), y))
    assert (y == 1).all()


def test_sources_of_every_kind(module: RawModule, tmp_path: Path) -> None:
    text = "kernel void f(global int *x) { x[0] = N; }"
    one = RawKernel(text, "f", ("-DN=5",))
    (tmp_path / "f.cl").write_text(text)
    (tmp_path / "f.spv").write_bytes(one.spirv)
    kernels = [
        one,
        RawKernel(tmp_path / "f.cl", options=["-DN=5"]),
        RawKernel(tmp_path / "f.spv"),
        RawKernel(one.spirv, options=("-cl-mad-enable",)),
        RawKernel(memoryview(one.spirv), "f"),
    ]
    for kernel in kernels:
        x = torch.zeros(1, dtype=torch.int32)
        kernel(1, 1, (x,))
        assert x == 5
    assert [k.kind for k in kernels[1:3]] == ["OpenCL C", "SPIR-V"]


@pytest.mark.parametrize("directive", ["include", "import"])
def test_included_files_may_change(tmp_path: Path, directive: str) -> None:
    text = f'#{directive} "n.h"\n' + "kernel void f(global int *x) { x[0] = N; }"
    folder = tmp_path / "a folder"
    folder.mkdir()
    for n in (1, 2):
        (folder / "n.h").write_text(f"#define N {n}\n")
        x = torch.zeros(1, dtype=torch.int32)
        RawKernel(text, options=(f"-I{folder}",))(1, 1, (x,))
        assert x == n
