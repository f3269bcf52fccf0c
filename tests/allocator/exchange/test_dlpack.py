"""Memory exported to or imported from other libraries keeps its bytes and its address."""

from __future__ import annotations

import gc
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.dlpack import from_dlpack as to_torch

import allocator
from allocator import Array, Memory, Pool, from_dlpack
from allocator.exchange import borrowed
from allocator.exchange.devices import HOST, check_torch_has
from allocator.exchange.dlpack import Legacy, Versioned, _get_pointer, is_valid
from allocator.exchange.dtypes import _ALL, as_dtype
from tests.running import check_script

LEGACY, VERSIONED = b"dltensor", b"dltensor_versioned"
READ_ONLY, IS_COPIED = 1, 2
KINDS = ("device", "shared", "host")
ON_USM = (14, 0)
NUMPY_TAKES = [d.name for d in _ALL if d.typestr is not None]
old_numpy = pytest.mark.skipif(np.__version__ < "2.1", reason="numpy exports no versioned capsules")


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool("cpu")
    yield pool
    gc.collect()
    borrowed.exporter.sweep()
    assert pool.memory_allocated() == 0


def library(name: str) -> Any:
    try:
        allocator.load_compiler()
    except ImportError as error:
        pytest.skip(str(error))
    return pytest.importorskip(name, exc_type=ImportError)


@pytest.mark.skipif(torch.xpu._is_compiled(), reason="torch has tensors on Intel GPUs")
def test_torch_without_gpus_is_refused() -> None:
    check_torch_has(HOST, torch, "Pool('cpu')")
    with pytest.raises(RuntimeError, match=r"without XPU.*tensors on Pool\('gpu'\); install"):
        check_torch_has(ON_USM, torch, "Pool('gpu')")


class OnUsm:
    """Exports an array as memory of a oneAPI device."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.array.__dlpack__(**{**kwargs, "dl_device": ON_USM})

    def __dlpack_device__(self) -> tuple[int, int]:
        return ON_USM


class Through:
    """Returns a capsule that was made elsewhere."""

    def __init__(self, capsule: Any, device: tuple[int, int] = (1, 0)) -> None:
        self.capsule, self.device = capsule, device

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


def managed(capsule: Any) -> Any:
    """The struct in an unused capsule."""
    if is_valid(capsule, VERSIONED):
        return Versioned.from_address(_get_pointer(capsule, VERSIONED))
    return Legacy.from_address(_get_pointer(capsule, LEGACY))


def filled(pool: Pool, nbytes: int) -> tuple[Memory, bytes]:
    memory = pool.allocate(nbytes)
    data = bytes(i * 37 % 251 for i in range(nbytes))
    memory.copy_from_host(data)
    return memory, data


def bits_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [d.name for d in _ALL])
def test_every_dtype_keeps_its_bits(pool: Pool, dtype: str) -> None:
    kind = as_dtype(dtype)
    memory = pool.allocate(6 * kind.itemsize)
    data = bytes(i % 2 if dtype == "bool" else i * 37 % 256 for i in range(memory.nbytes))
    memory.copy_from_host(data)
    array = memory.array((2, 3), getattr(torch, dtype))
    tensor = to_torch(array)
    assert tensor.dtype is getattr(torch, dtype)
    assert (tensor.data_ptr(), tensor.shape) == (memory.address, (2, 3))
    assert bits_of(tensor) == data
    back = from_dlpack(tensor)
    assert (back.dtype, back.address, back.shape) == (kind, memory.address, (2, 3))
    assert bits_of(to_torch(back)) == data


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns of deprecated dtypes
def test_no_dtype_of_torch_is_missing() -> None:
    found = set()
    dtypes = {t for t in vars(torch).values() if isinstance(t, torch.dtype)}
    for each in {t for t in dtypes if "qu" not in str(t) and "qint" not in str(t)}:
        try:
            capsule = torch.empty(2, dtype=each).__dlpack__(max_version=(1, 0))
        except (RuntimeError, BufferError, NotImplementedError):
            continue
        tensor = managed(capsule).tensor
        found.add((tensor.code, tensor.bits, tensor.lanes))
    assert found - {(d.code, d.bits, d.lanes) for d in _ALL} == set()


@pytest.mark.parametrize("dtype", NUMPY_TAKES)
def test_numpy_reads_and_lends_every_dtype_it_has(pool: Pool, dtype: str) -> None:
    array = pool.array(4, dtype)
    pool.driver.write(array.address, memoryview(bytes(array.nbytes)))
    view = np.from_dlpack(array)
    assert (view.dtype.name, view.ctypes.data) == (dtype, array.address)
    assert from_dlpack(np.ones(4, dtype)).dtype == array.dtype


@pytest.mark.parametrize("dtype", [torch.float32, np.float32, np.dtype("f4"), "float32", float])
def test_dtypes_of_others(pool: Pool, dtype: Any) -> None:
    assert pool.array(3, dtype).dtype.name == ("float64" if dtype is float else "float32")


LAYOUTS: list[tuple[Any, Any, int]] = [
    ((), None, 0),
    (5, None, 0),
    ((2, 3), (1, 2), 0),
    ((2, 3), (12, 4), 8),
    ((4,), (3,), 20),
    ((1, 1, 2), (7, 0, 1), 4),
    ((0,), None, 0),
    ((3, 0, 2), None, 0),
]


@pytest.mark.parametrize("version", [None, (0, 8), (1, 0), (1, 3), (2, 0)])
@pytest.mark.parametrize(("shape", "strides", "offset"), LAYOUTS)
def test_layouts(pool: Pool, shape: Any, strides: Any, offset: int, version: Any) -> None:
    memory, data = filled(pool, 128)
    array = memory.array(shape, "int32", strides=strides, offset=offset)
    capsule = array.__dlpack__(max_version=version)
    assert is_valid(capsule, VERSIONED if version and version[0] else LEGACY)
    tensor = to_torch(capsule)
    assert tuple(tensor.shape) == array.shape
    assert tensor.stride() == array.strides
    words = torch.frombuffer(bytearray(data), dtype=torch.int32)
    assert torch.equal(tensor, words.as_strided(array.shape, array.strides, offset // 4))
    assert tensor.numel() == 0 or tensor.data_ptr() == memory.address + offset


def test_memory_of_no_bytes(pool: Pool) -> None:
    memory = pool.allocate(0)
    assert pool.memory_allocated() == 0
    assert bytes(memoryview(memory)) == memory.copy_to_host() == b""
    assert to_torch(memory).numel() == np.from_dlpack(memory).size == 0
    memory.release()


@pytest.mark.parametrize("kind", KINDS)
def test_every_library_has_the_same_address(kind: str) -> None:
    pool = Pool("cpu", kind)
    array = pool.array((2, 3))
    memory = array.memory
    assert isinstance(memory, Memory)
    tensor = to_torch(array)
    tensor.copy_(torch.arange(6.0).view(2, 3))
    view = np.from_dlpack(array)
    assert tensor.data_ptr() == view.ctypes.data == array.address
    tensor[1, 2] = 50
    assert view[1, 2] == 50
    assert struct.unpack_from("<6f", memory) == (0, 1, 2, 3, 4, 50)
    usm = allocator.load_dpctl().memory.as_usm_memory(array.memory)
    assert usm._pointer == array.address
    assert usm.get_usm_type() == kind
    assert usm.nbytes == array.memory.nbytes
    capsule = managed(array.__dlpack__(max_version=(1, 0), dl_device=ON_USM)).tensor
    assert (capsule.device_type, capsule.device_id, capsule.data) == (*ON_USM, array.address)


def test_dpctl_memory_keeps_what_it_reads() -> None:
    pool = Pool("cpu")
    usm = allocator.load_dpctl().memory.as_usm_memory(filled(pool, 64)[0])
    gc.collect()
    assert pool.memory_allocated() == 512
    assert bytes(usm.copy_to_host()) == bytes(i * 37 % 251 for i in range(64))
    del usm
    assert pool.memory_allocated() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_dpctl_tensor(kind: str) -> None:
    tensor = library("dpctl.tensor")
    pool = Pool("cpu", kind)
    array = pool.array((2, 3), strides=(4, 1))
    to_torch(array).fill_(7)
    for read in (tensor.asarray(array), tensor.from_dlpack(OnUsm(array))):
        assert (read._pointer, read.shape, read.strides) == (array.address, (2, 3), (4, 1))
        assert tensor.asnumpy(read).tolist() == [[7] * 3] * 2


def test_dpnp() -> None:
    dpnp = library("dpnp")
    pool = Pool("cpu")
    array = pool.array((2, 3))
    to_torch(array).fill_(7)
    read = dpnp.from_dlpack(OnUsm(array))
    assert read.get_array()._pointer == array.address
    assert dpnp.asnumpy(dpnp.asarray(array)).tolist() == [[7] * 3] * 2  # a copy
    tensor = library("dpctl.tensor")
    read = dpnp.asarray(tensor.asarray(array))
    assert read.get_array()._pointer == array.address


def test_import_of_dpctl_tensor() -> None:
    tensor = library("dpctl.tensor")
    source = tensor.arange(6, dtype="f4")
    array = from_dlpack(source)
    assert (array.address, array.__dlpack_device__()) == (source._pointer, ON_USM)
    assert tensor.from_dlpack(array)._pointer == source._pointer
    on_host = to_torch(array.__dlpack__(dl_device=(1, 0)))  # a CPU's memory is the host's
    assert on_host.data_ptr() == source._pointer
    assert on_host.tolist() == list(range(6))


@pytest.mark.parametrize("kind", KINDS)
def test_buffer_protocol(kind: str) -> None:
    pool = Pool("cpu", kind)
    memory = pool.allocate(16)
    view = memoryview(memory)
    assert (view.nbytes, view.format, view.readonly) == (16, "B", False)
    struct.pack_into("<4i", memory, 0, 1, 2, 3, 4)
    assert np.frombuffer(view, "i4").tolist() == [1, 2, 3, 4]
    assert np.frombuffer(view, "i4").ctypes.data == memory.address
    assert memory.copy_to_host() == bytes(view)
    with pytest.raises(BufferError, match="1 tensors or views"):
        memory.release()
    assert not memory.is_released
    view.release()
    memory.release()
    with pytest.raises(TypeError):
        memoryview(memory)


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_a_consumer_keeps_the_memory(pool: Pool, version: Any) -> None:
    memory, data = filled(pool, 64)
    tensor = to_torch(memory.__dlpack__(max_version=version))
    del memory
    gc.collect()
    assert pool.memory_allocated() == 512
    part = tensor[10:20]
    del tensor
    others = [pool.allocate(64) for _ in range(4)]
    assert part.data_ptr() - 10 not in {m.address for m in others}
    assert bits_of(part) == data[10:20]
    del part, others
    assert pool.memory_allocated() == 0


def test_release_waits_for_every_consumer(pool: Pool) -> None:
    memory = pool.allocate(64)
    readers: list[Any] = [to_torch(memory), np.from_dlpack(memory)]
    while readers:
        with pytest.raises(BufferError, match=f"{len(readers)} tensors"):
            memory.release()
        readers.pop()
    memory.release()
    assert memory.is_released


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_a_capsule_is_used_once(pool: Pool, version: Any) -> None:
    capsule = pool.array(3).__dlpack__(max_version=version)
    tensor = to_torch(capsule)
    with pytest.raises(RuntimeError, match="capsule"):
        to_torch(capsule)
    with pytest.raises(ValueError, match="used before"):
        from_dlpack(Through(capsule))
    assert pool.memory_allocated() == 512
    del capsule
    tensor.fill_(1)
    assert pool.memory_allocated() == 512


def test_structs_are_used_again(pool: Pool) -> None:
    memory = pool.allocate(64)
    for _ in range(1000):
        to_torch(memory)
        pool.memory_allocated()  # collects the released tensors
    assert sum(e.owner is not None for e in pool._core.exporter.exports) == 0


@pytest.mark.parametrize("copy", [None, False])
def test_no_copy(pool: Pool, copy: bool | None) -> None:
    array = pool.array(3)
    content = managed(array.__dlpack__(max_version=(1, 0), dl_device=(1, 0), copy=copy))
    assert (content.flags, content.tensor.data) == (0, array.address)
    assert to_torch(array, copy=copy).data_ptr() == array.address


def test_copy(pool: Pool) -> None:
    memory, data = filled(pool, 64)
    capsule = memory.__dlpack__(max_version=(1, 0), copy=True)
    assert managed(capsule).flags == IS_COPIED
    tensor = to_torch(capsule)
    assert tensor.data_ptr() != memory.address
    memory.copy_from_host(bytes(64))
    assert bits_of(tensor) == data
    assert to_torch(memory, copy=True).data_ptr() != memory.address


def test_copy_of_an_array_with_gaps(pool: Pool) -> None:
    memory, data = filled(pool, 64)
    array = memory.array((4, 3), "int16", strides=(1, 8), offset=4)
    expected = np.frombuffer(data, np.int16)[2:]
    copied = to_torch(array.__dlpack__(copy=True))
    assert copied.is_contiguous()
    assert copied.tolist() == [[int(expected[i + 8 * j]) for j in range(3)] for i in range(4)]


def test_streams(pool: Pool) -> None:
    dpctl = allocator.load_dpctl()
    array = pool.array(3)
    own = array.__dlpack__(dl_device=ON_USM, stream=pool.sycl_queue)
    other = array.__dlpack__(dl_device=ON_USM, stream=dpctl.SyclQueue("cpu"))
    assert managed(own).tensor.data == managed(other).tensor.data == array.address
    with pytest.raises(BufferError, match="stream=5"):
        array.__dlpack__(dl_device=ON_USM, stream=5)
    with pytest.raises(BufferError, match="stream="):
        array.__dlpack__(stream=pool.sycl_queue)


@pytest.mark.parametrize(
    "source", [np.arange(6.0).reshape(2, 3).T, np.array(3.0), np.empty((0, 3))]
)
def test_import_from_numpy(source: Any) -> None:
    array = from_dlpack(source)
    assert (array.shape, array.size) == (source.shape, source.size)
    assert array.size == 0 or array.address == source.ctypes.data
    again = to_torch(array)
    assert np.array_equal(again.numpy(), source)
    assert again.numel() == 0 or again.data_ptr() == source.ctypes.data


@pytest.mark.parametrize("release", [lambda: from_dlpack(np.arange(3)), gc.collect])
@pytest.mark.parametrize("version", [None, (1, 0)])
def test_an_import_keeps_its_lender(version: Any, release: Callable[[], object]) -> None:
    freed: list[int] = []

    class Lender(np.ndarray[Any, Any]):
        def __del__(self) -> None:
            freed.append(1)

    array = from_dlpack(np.arange(6.0).view(Lender))
    tensor = to_torch(array.__dlpack__(max_version=version))
    del array
    gc.collect()
    assert tensor.tolist() == [0, 1, 2, 3, 4, 5]
    assert not freed
    del tensor
    release()  # the next import, or a full garbage collection
    assert freed == [1]


@old_numpy
def test_read_only_imports() -> None:
    source = np.arange(6.0)
    source.flags.writeable = False
    array = from_dlpack(source)
    assert array.is_read_only
    assert managed(array.__dlpack__(max_version=(1, 0))).flags == READ_ONLY
    assert not np.from_dlpack(array).flags.writeable
    with pytest.raises(BufferError, match="read-only"):
        array.__dlpack__()
    copied = array.__dlpack__(max_version=(1, 0), copy=True)
    assert managed(copied).flags == IS_COPIED
    assert to_torch(copied).tolist() == source.tolist()
    assert to_torch(array.__dlpack__(copy=True)).data_ptr() != source.ctypes.data


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (np.arange(4)[::-1], BufferError, "negative"),
        (np.broadcast_to(np.arange(3.0).copy(), (2, 3)), ValueError, "overlap"),
    ],
)
def test_layouts_that_cannot_be_lent_on(source: Any, error: type[Exception], message: str) -> None:
    if not source.flags.writeable and np.__version__ < "2.1":
        pytest.skip("numpy exports nothing read-only")
    with pytest.raises(error, match=message):
        from_dlpack(source)


def test_what_is_no_import() -> None:
    with pytest.raises(TypeError, match="list"):
        from_dlpack([1, 2])
    with pytest.raises(BufferError, match="device 2"):
        from_dlpack(Through(None, (2, 0)))
    with pytest.raises(BufferError, match=r"negative bit .*resolve_neg\(\)"):
        from_dlpack(torch.tensor([1 + 2j]).conj().imag)
    capsule = torch.zeros(2).__dlpack__(max_version=(1, 0))
    managed(capsule).major = 2
    with pytest.raises(BufferError, match=r"version 2\."):
        from_dlpack(Through(capsule))
    managed(capsule).major, managed(capsule).tensor.bits = 1, 7
    with pytest.raises(BufferError, match="7 bits"):
        from_dlpack(Through(capsule))
    managed(capsule).tensor.bits = 32
    assert from_dlpack(Through(capsule)).shape == (2,)


ANY_MINOR = """
import importlib, sys, types, numpy, torch
replaced = []
for minor in (0, 1, 3, 2**32 - 1):
    for name in [name for name in sys.modules if name.partition(".")[0] == "allocator"]:
        replaced.append(sys.modules.pop(name))
    package = types.ModuleType("allocator")  # so that its __init__ does not run yet
    package.__path__ = [{folder!r}]
    sys.modules["allocator"] = package
    importlib.import_module("{dlpack}").VERSION = (1, minor)
    del sys.modules["allocator"]
    import allocator
    pool = allocator.Pool("cpu")
    array = pool.array(3, "int32")
    assert torch.from_dlpack(array).fill_(7).tolist() == [7, 7, 7]
    assert numpy.from_dlpack(array).tolist() == [7, 7, 7]
    kept = pool.empty((1024,)).fill_(1)
    before, calls = pool.memory_stats()["allocation.all.allocated"], 0
    for _ in range(5):
        x = pool.empty((1024,)).fill_(2)
    def profile(frame, event, argument):
        global calls
        calls += event == "call" and frame.f_code.co_filename.startswith({folder!r})
    sys.setprofile(profile)
    for _ in range(100):
        x = pool.empty((1024,))
    sys.setprofile(None)
    x.fill_(3)
    assert (kept == 1).all()
    assert pool.memory_stats()["allocation.all.allocated"] - before == 105
    assert pool.memory_allocated() == 2 * 4096 + 512, pool.memory_allocated()
    del x, kept, array
    assert pool.memory_allocated() == 0
    print(minor, calls)
"""


def test_reuse_does_not_depend_on_the_minor_version() -> None:
    """The version word shows whether a consumer is done, for every minor version."""
    folder = os.path.dirname(allocator.__file__)
    script = ANY_MINOR.format(folder=folder, dlpack=Versioned.__module__)
    # Each of the 100 allocations makes two calls: empty() and its check of the shape.
    assert check_script(script).split() == ["0", "200", "1", "200", "3", "200", "4294967295", "200"]
