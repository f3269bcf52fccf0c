"""Facts that an array reports, and operations that it and its memory refuse."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from allocator import Array, Pool, from_dlpack
from tests.allocator.helpers import FaultyDriver

ON_USM = (14, 0)


@pytest.fixture
def pool() -> Pool:
    return Pool("cpu")


def lent() -> Array:
    """Another library's memory."""
    return from_dlpack(np.arange(6.0).reshape(2, 3))


def test_shape(pool: Pool) -> None:
    array = pool.array((2, 3), "float32")
    assert (array.ndim, len(array), array.size, array.nbytes) == (2, 2, 6, 24)
    assert repr(array) == f"<Array float32[2, 3] at {array.address:#x}>"
    scalar = pool.array((), "float32")
    assert scalar.ndim == 0
    with pytest.raises(TypeError, match="0-d"):
        len(scalar)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_memory_is_not_duplicated(pool: Pool, duplicate: Callable[[Any], Any]) -> None:
    for memory in (pool.allocate(8), pool.array(3), pool.array(3, "bfloat16"), lent()):
        with pytest.raises(
            TypeError, match=f"^{re.escape(repr(memory))} can be neither copied nor"
        ):
            duplicate(memory)


@pytest.mark.parametrize("nbytes", [2**31 + 10, 2**32 + 10])
def test_large_memory_is_copied_whole(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    monkeypatch.setattr("allocator.pool.driver.bytes", memoryview, raising=False)  # copies nothing
    memory = pool.allocate(nbytes)  # whose pages take no memory until they are used
    source = np.empty(nbytes, np.uint8)
    source[-1] = np.asarray(memory)[-1] = 7
    for data in (memory.copy_to_host(), from_dlpack(source)._contents()):
        assert (len(data), data[-1]) == (nbytes, 7)


@pytest.mark.parametrize("shape", [0, (0, 3), (3, 0)])
def test_nothing_is_written(pool: Pool, shape: Any) -> None:
    for nbytes in (0, 8):
        pool.allocate(nbytes).copy_from_host(np.empty(shape))


def test_queue(pool: Pool) -> None:
    assert pool.array(3, "float32").sycl_queue is pool.sycl_queue
    with pytest.raises(AttributeError, match="another library has no sycl_queue"):
        _ = lent().sycl_queue


def test_interface_that_sycl_reads(pool: Pool) -> None:
    array = pool.array((2, 3), "float32")
    interface = array.__sycl_usm_array_interface__
    assert (interface["data"][0], interface["shape"]) == (array.address, (2, 3))
    with pytest.raises(BufferError, match="dpctl or dpnp may read it"):
        array.memory.release()
    with pytest.raises(AttributeError, match="numpy has no bfloat16"):
        _ = pool.array(3, "bfloat16").__sycl_usm_array_interface__
    with pytest.raises(AttributeError, match="no __sycl_usm_array_interface__"):
        _ = lent().__sycl_usm_array_interface__


def test_no_other_memory_is_given_as_a_device() -> None:
    with pytest.raises(
        BufferError, match=r"another library cannot be exported as device \(14, 0\)"
    ):
        lent().__dlpack__(dl_device=ON_USM)
    array = Pool(driver=FaultyDriver()).array(3, "float32")
    with pytest.raises(
        BufferError, match=r"without a SYCL queue cannot be exported as device \(14, 0\)"
    ):
        array.__dlpack__(dl_device=ON_USM)


class Producer:
    """Exports a tensor's capsules like a library that predates DLPack versions."""

    def __init__(self, tensor: torch.Tensor, device: tuple[int, int] = (1, 0)) -> None:
        self._tensor, self._device = tensor, device

    def __dlpack__(self, stream: Any = None) -> Any:
        return self._tensor.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def test_producers_from_before_versions() -> None:
    tensor = torch.randn(5)
    array = from_dlpack(Producer(tensor))
    assert (array.address, array.shape) == (tensor.data_ptr(), (5,))
    assert torch.equal(torch.from_dlpack(array), tensor)


def test_capsule_of_another_device() -> None:
    with pytest.raises(BufferError, match=r"device \(1, 0\) differs from __dlpack_device__"):
        from_dlpack(Producer(torch.randn(5), ON_USM))


def test_what_is_no_queue(pool: Pool) -> None:
    with pytest.raises(TypeError, match=r"queue=3 is not a dpctl\.SyclQueue"):
        pool.record_queue(pool.empty(3), 3)
