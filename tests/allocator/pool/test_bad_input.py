"""Invalid calls raise an error that names the cause, and change nothing."""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.dlpack import from_dlpack as to_torch

import allocator
from allocator import Hook, OutOfMemoryError, Pool
from allocator.pool.driver import UsmDriver
from tests.allocator.helpers import MIB, FaultyDriver

Call = Callable[[Pool], Any]


class Index:
    def __index__(self) -> int:
        return 7


@pytest.fixture
def pool() -> Iterator[Pool]:
    """A pool in use that the test must leave unchanged."""
    pool = Pool("cpu", limit="1GiB")
    kept = pool.full(100, 3.0)
    before = (pool.memory_allocated(), pool.limit, pool._core.hooks.all)
    yield pool
    gc.collect()  # raised errors keep their frames alive
    assert (pool.memory_allocated(), pool.limit, pool._core.hooks.all) == before
    assert kept.tolist() == [3.0] * 100
    assert pool.zeros(100).sum() == 0


def rejects(pool: Pool, call: Call, error: type[Exception], message: str) -> None:
    reserved = pool.memory_reserved()
    with pytest.raises(error, match=message) as caught:
        call(pool)
    assert caught.type is error
    assert pool.memory_reserved() == reserved


SIZES: list[tuple[Any, type[Exception], str]] = [
    (-1, ValueError, "-1"),
    (2**63, ValueError, "9223372036854775808"),
    (1.0, TypeError, r"1\.0"),
    ("8", TypeError, "'8'"),
    (None, TypeError, "None"),
    (True, TypeError, "True"),
]


@pytest.mark.parametrize(("size", "error", "message"), SIZES)
def test_sizes(pool: Pool, size: Any, error: type[Exception], message: str) -> None:
    rejects(pool, lambda p: p.allocate(size), error, f"nbytes.*{message}")
    for call in (
        lambda p: p.empty(size),
        lambda p: p.empty((2, size)),
        lambda p: p.zeros([size, 0]),
        lambda p: p.array((size,)),
        lambda p: p.empty_strided((size,), (1,)),
    ):
        rejects(pool, call, error, f"shape.*{message}")


@pytest.mark.parametrize(
    "size", [7, np.int64(7), np.uint8(7), np.array(7), torch.tensor(7), Index()]
)
def test_integers_of_any_kind(pool: Pool, size: Any) -> None:
    assert pool.allocate(size).nbytes == 7
    assert pool.empty((size, 2)).shape == pool.array([size, 2]).shape == (7, 2)
    assert pool.empty(size).shape == (7,)


@pytest.mark.parametrize("shape", [0, (0,), (3, 0, 2), [0]])
def test_nothing_takes_no_block(pool: Pool, shape: Any) -> None:
    allocated = pool.memory_allocated()
    tensor, array, memory = pool.empty(shape), pool.array(shape), pool.allocate(0)
    assert pool.memory_allocated() == allocated
    assert tensor.numel() == array.size == memory.nbytes == 0


BAD_CALLS: dict[str, tuple[Call, type[Exception], str]] = {
    "product": (lambda p: p.empty((2**62, 4)), ValueError, "shape=.*2\\^63"),
    "product with 0": (lambda p: p.empty((2**62, 4, 0)), ValueError, "shape=.*2\\^63"),
    "bytes": (lambda p: p.empty(2**62, torch.float64), ValueError, "shape=.*2\\^63"),
    "strided bytes": (lambda p: p.empty_strided(2, [2**62]), ValueError, "2\\^63"),
    "stride": (lambda p: p.empty_strided(1, [2**70]), ValueError, "strides=.*2\\^63"),
    "dimensions": (lambda p: p.empty((1,) * 65), ValueError, "65 dimensions"),
    "array's dimensions": (lambda p: p.array((1,) * 65), ValueError, "65 dimensions"),
    "bytes as a shape": (lambda p: p.empty(b"ab"), TypeError, "shape=b'ab'"),
    "dtype name": (lambda p: p.array(3, "float33"), TypeError, "float33.*bfloat16"),
    "dtype list": (lambda p: p.array(3, ["f4"]), TypeError, "f4.*bfloat16"),
    "qint8": (lambda p: p.empty(3, torch.qint8), TypeError, "qint8.*bfloat16"),
    "bits8": (lambda p: p.empty(3, torch.bits8), TypeError, "bits8.*bfloat16"),
    "int4": (lambda p: p.empty(3, vars(torch)["int4"]), TypeError, "int4.*bfloat16"),
    "uint1": (lambda p: p.array(3, vars(torch)["uint1"]), TypeError, "uint1.*bfloat16"),
    "text": (lambda p: p.array(3, np.dtype("U4")), TypeError, "U4.*bfloat16"),
    "byte order": (lambda p: p.array(3, np.dtype(">f4")), TypeError, "byte order"),
    "no torch dtype": (lambda p: p.empty(3, np.float32), TypeError, r"pass torch\.float32"),  # type: ignore[arg-type]
    "dimensions apart": (lambda p: p.empty(2, 3), TypeError, r"dtype=3 .* such as \(2, 3\)"),  # type: ignore[arg-type]
    "no torch dtype's name": (
        lambda p: p.zeros(3, "float32"),  # type: ignore[arg-type]
        TypeError,
        r"dtype='float32' is not a torch\.dtype; pass torch\.float32",
    ),
    "no name": (lambda p: p.empty(3, "zeros"), TypeError, r"'zeros' is not a torch\.dtype$"),  # type: ignore[arg-type]
    "alignment 0": (lambda p: p.allocate(9, alignment=0), ValueError, "alignment=0"),
    "alignment 3": (lambda p: p.allocate(9, alignment=3), ValueError, "alignment=3"),
    "alignment -8": (lambda p: p.allocate(9, alignment=-8), ValueError, "alignment=-8"),
    "alignment": (lambda p: p.allocate(9, alignment=4 << 20), ValueError, "alignment=4194304"),
    "negative stride": (lambda p: p.array(3, strides=[-1]), ValueError, r"strides=\[-1\]"),
    "torch's": (lambda p: p.empty_strided(3, (-1,)), ValueError, r"strides=\(-1,\)"),
    "overlap": (lambda p: p.array((2, 3), strides=(1, 1)), ValueError, "overlap"),
    "torch overlap": (lambda p: p.empty_strided((2, 3), (1, 1)), ValueError, "overlap"),
    "stride 0": (lambda p: p.array(3, strides=[0]), ValueError, r"strides=\[0\].*overlap"),
    "strides missing": (lambda p: p.array((2, 3), strides=[1]), ValueError, r"strides=\[1\]"),
    "stride text": (lambda p: p.array(3, strides="1"), TypeError, "strides='1'"),
    "strides 3": (lambda p: p.array(3, strides=3), TypeError, "strides=3"),
    "odd": (lambda p: p.allocate(64).array(3, "int32", offset=2), ValueError, "offset=2.*int32"),
    "before": (lambda p: p.allocate(64).array(3, offset=-4), ValueError, "offset=-4"),
    "real": (
        lambda p: p.allocate(64).array(3, offset=float(4)),  # type: ignore[arg-type]
        TypeError,
        r"offset=4\.0",
    ),
    "end": (lambda p: p.allocate(64).array(61, offset=4), ValueError, "byte 65 of 64"),
    "empty end": (lambda p: p.allocate(64).array(0, offset=65), ValueError, "byte 65 of 64"),
    "data": (lambda p: p.allocate(2).copy_from_host(b"abc"), ValueError, "3 bytes.*2"),
    "foreign": (
        lambda p: p.record_queue(torch.zeros(3), p.sycl_queue),
        ValueError,
        "not belong to pool",
    ),
    "other pool": (
        lambda p: p.record_queue(allocator.default_pool().zeros(3), p.sycl_queue),
        ValueError,
        "not belong to pool",
    ),
    "other memory": (
        lambda p: p.record_queue(allocator.default_pool().allocate(3), p.sycl_queue),
        ValueError,
        "not belong to pool",
    ),
    "budget text": (lambda p: p.budget("lots"), ValueError, "'lots'"),
    "budget below 0": (lambda p: p.budget(-1), ValueError, "-1"),
    "budget real": (lambda p: p.budget(1.5), TypeError, r"1\.5"),
    "budget bool": (lambda p: p.budget(True), TypeError, "True"),
    "callback": (lambda p: p.budget(1, None, "callback"), TypeError, "'callback'"),  # type: ignore[arg-type]
    "reserve text": (lambda p: p.reserve("lots"), ValueError, "'lots'"),
    "reserve below 0": (lambda p: p.reserve(-1), ValueError, "-1"),
    "reserve real": (lambda p: p.reserve(1.5), TypeError, r"1\.5"),
    "reserve None": (lambda p: p.reserve(None), TypeError, "None"),  # type: ignore[arg-type]
    "hook": (lambda p: p.add_hook(3), TypeError, r"hook=3 is not an instance of allocator\.Hook"),  # type: ignore[arg-type]
    "hook's class": (
        lambda p: p.hook(Hook).__enter__(),  # type: ignore[arg-type]
        TypeError,
        "hook=<class.*pass an instance",
    ),
    "enabled": (lambda p: p.record_history("foo"), TypeError, "enabled='foo' is not True or False"),  # type: ignore[arg-type]
    "force": (lambda p: p.close(force="no"), TypeError, "force='no' is not True or False"),  # type: ignore[arg-type]
    "abbreviated": (lambda p: p.memory_summary("cpu"), TypeError, "abbreviated='cpu' is not True"),  # type: ignore[arg-type]
    "no rows": (lambda p: p.timeline(max_entries=0), ValueError, "max_entries=0"),
    "rows bool": (lambda p: p.timeline(max_entries=True), TypeError, "max_entries=True"),
    "rows text": (lambda p: p.timeline(max_entries="x"), TypeError, "max_entries='x'"),  # type: ignore[arg-type]
    "no memory": (lambda p: p.record_queue([1], p.sycl_queue), TypeError, "list"),
    "stream": (lambda p: p.array(3).__dlpack__(stream=5), BufferError, "stream=5"),
    "version 1": (lambda p: p.array(3).__dlpack__(max_version=1), ValueError, "max_version=1"),  # type: ignore[arg-type]
    "version ()": (lambda p: p.array(3).__dlpack__(max_version=()), ValueError, "max_version"),  # type: ignore[arg-type]
    "version a": (
        lambda p: p.array(3).__dlpack__(max_version=("a", 0)),  # type: ignore[arg-type]
        ValueError,
        "max_version",
    ),
    "device 1": (lambda p: p.array(3).__dlpack__(dl_device=1), ValueError, "dl_device=1"),  # type: ignore[arg-type]
    "CUDA": (lambda p: p.array(3).__dlpack__(dl_device=(2, 0)), BufferError, r"\(2, 0\)"),
    "no copy": (
        lambda p: p.array(3).__dlpack__(dl_device=(1, 1), copy=False),
        BufferError,
        "copy=False",
    ),
    "oneAPI 99": (lambda p: p.array(3).__dlpack__(dl_device=(14, 99)), BufferError, "14, 99"),
    "empty oneAPI": (lambda p: p.array(0).__dlpack__(dl_device=(14, 0)), BufferError, "empty"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_calls(pool: Pool, name: str) -> None:
    pool.allocate(4 << 20)  # enough for calls that allocate before they fail
    rejects(pool, *BAD_CALLS[name])


def test_more_than_the_device_gives(pool: Pool) -> None:
    largest = pool.sycl_queue.sycl_device.max_mem_alloc_size
    message = rf"(?s){largest:,} bytes at once \(max_mem_alloc_size\).*, or allocate less at once$"
    for limit in (None, 2 * largest):
        pool.set_limit(limit)
        rejects(pool, lambda p: p.allocate(largest + 1), OutOfMemoryError, message)
    pool.set_limit("1GiB")
    rejects(pool, lambda p: p.allocate(2 << 30), OutOfMemoryError, "raise the limit$")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"kind": "gpu"}, ValueError, "kind='gpu'"),
        ({"device": 5}, TypeError, r"device=5 is not a device; .*torch\.device"),
        ({"device": torch.device("cuda")}, ValueError, "device=device.*'cuda'.* cpu or xpu"),
        ({"device": "level_zero:gpu:7"}, allocator.DeviceNotFoundError, "level_zero:gpu:7"),
        ({"limit": -1}, ValueError, "limit=-1"),
        ({"limit": "many"}, ValueError, "limit='many'"),
        ({"limit": "-1"}, ValueError, "limit='-1'"),
        ({"limit": math.nan}, ValueError, "limit=nan"),
        ({"limit": True}, TypeError, "limit=True"),
        ({"fraction": 0}, ValueError, "fraction=0"),
        ({"fraction": 1.5}, ValueError, r"fraction=1\.5"),
        ({"fraction": -0.5}, ValueError, r"fraction=-0\.5"),
        ({"fraction": math.nan}, ValueError, "fraction=nan"),
        ({"fraction": "1"}, TypeError, "fraction='1'"),
        ({"fraction": True}, TypeError, "fraction=True"),
        ({"stable_addresses": 0}, ValueError, "0"),
        ({"stable_addresses": -1}, ValueError, "-1"),
        ({"stable_addresses": "lots"}, ValueError, "'lots'"),
        ({"stable_addresses": 1.5}, TypeError, r"1\.5"),
        ({"stable_addresses": True}, TypeError, "True"),
        ({"stable_addresses": MIB, "limit": 0}, ValueError, "stable_addresses"),
        ({"stable_addresses": MIB, "limit": MIB}, ValueError, "stable_addresses"),
        ({"stable_addresses": MIB, "fraction": 0.5}, ValueError, "stable_addresses"),
        ({"stable_addresses": MIB, "idle_seconds": 1.0}, ValueError, "stable_addresses"),
        ({"idle_seconds": 0}, ValueError, "not positive and finite"),
        ({"idle_seconds": -1}, ValueError, "not positive and finite"),
        ({"idle_seconds": math.inf}, ValueError, "not positive and finite"),
        ({"idle_seconds": math.nan}, ValueError, "not positive and finite"),
        ({"idle_seconds": 10**400}, ValueError, "not positive and finite"),
        ({"idle_seconds": "1"}, TypeError, "is not a number"),
        ({"idle_seconds": True}, TypeError, "is not a number"),
        ({"idle_seconds": [1]}, TypeError, "is not a number"),
        ({"debug": "x"}, TypeError, "debug='x' is not True or False"),
        ({"debug": 1}, TypeError, "debug=1 is not True or False"),
        ({"rules": 3}, TypeError, r"rules=3 is not an allocator\.Rules"),
        ({"rules": 0}, TypeError, r"rules=0 is not an allocator\.Rules"),
        ({"limit": 1, "fraction": 0.5}, ValueError, r"limit=1.*fraction=0\.5"),
    ],
)
def test_pools(pool: Pool, arguments: dict[str, Any], error: Any, message: str) -> None:
    driver = FaultyDriver()
    with pytest.raises(error, match=message):
        Pool(**arguments if {"kind", "device"} & set(arguments) else {"driver": driver} | arguments)
    assert driver.calls == 0
    if set(arguments) <= {"limit", "fraction"}:
        with pytest.raises(error, match=message):
            pool.set_limit(**arguments)


def test_a_device_without_the_kind() -> None:
    class Device:
        name = "toaster"
        has_aspect_usm_shared_allocations = False

    class Queue(allocator.load_dpctl().SyclQueue):  # type: ignore[misc]
        sycl_device = Device()

    with pytest.raises(RuntimeError, match="toaster lacks usm_shared_allocations"):
        UsmDriver(Queue("cpu"), "shared")


USES: list[Callable[[Any], Any]] = [
    lambda m: m.array(3),
    lambda m: m.__dlpack__(),
    lambda m: m.copy_to_host(),
    lambda m: m.copy_from_host(b""),
    lambda m: m.__sycl_usm_array_interface__,
    to_torch,
]


@pytest.mark.parametrize("use", USES)
def test_released_memory(pool: Pool, use: Callable[[Any], Any]) -> None:
    memory = pool.allocate(64)
    array = memory.array(64)
    memory.release()
    rejects(pool, lambda _: use(memory), RuntimeError, "released")
    rejects(pool, lambda _: array.__dlpack__(), BufferError, "released")
    rejects(pool, lambda p: p.record_queue(memory, None), ValueError, "released")


def test_a_sub_device() -> None:
    dpctl = allocator.load_dpctl()
    root = allocator.queue("cpu").sycl_device
    if root.max_compute_units < 2:
        pytest.skip("the device has no parts")
    array = Pool(dpctl.SyclQueue(root.create_sub_devices(partition=[1])[0])).array(3)
    with pytest.raises(BufferError, match="sub-device"):
        array.__dlpack__(dl_device=(14, 0))
    assert np.from_dlpack(array).shape == (3,)


def test_a_context_of_its_own() -> None:
    dpctl = allocator.load_dpctl()
    device = allocator.queue("cpu").sycl_device
    context = dpctl.SyclContext([device])
    if context == device.sycl_platform.default_context:
        pytest.skip("dpctl gives the default context here")
    array = Pool(dpctl.SyclQueue(context, device)).array(3)
    with pytest.raises(BufferError, match="context"):
        array.__dlpack__(dl_device=(14, 0))


def test_a_named_pool_that_exists() -> None:
    name = "a named pool that exists"
    pool = allocator.named_pool(name, kind="shared")
    assert allocator.named_pool(name, kind="shared") is pool
    message = (
        rf"exists, with shared memory of {re.escape(pool.driver.name)}; .* same device and kind"
    )
    for arguments in ({}, {"kind": "shared", "limit": "1MiB"}):
        with pytest.raises(ValueError, match=message):
            allocator.named_pool(name, **arguments)
