"""The launch block: where a kernel finds its rows and scalars."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from fusedoptim._launch import LaunchBlock, LaunchShape, kernel_for
from fusedoptim.allocator import queue


@pytest.fixture
def block(monkeypatch: pytest.MonkeyPatch) -> LaunchBlock:
    """Tensors of 5, 0 and 2 elements in chunks of 2: rows of 2, 2, 1 and 2."""
    kernel = kernel_for(queue("cpu"), "sgd_momentum", "f32")
    monkeypatch.setattr(kernel, "shape", LaunchShape(lanes=16, chunk=2))
    return LaunchBlock(kernel, [5, 0, 2], {"param": 4, "grad": 4, "momentum_buffer": 4})


def test_rows(block: LaunchBlock) -> None:
    block.write_addresses("param", [1000, 2000, 3000])
    block.write_flags("fresh", [True, False, False])
    assert block._column["length"].tolist() == [2, 2, 1, 2]
    assert block._column["param"].tolist() == [1000, 1008, 1016, 3000]
    assert block._column["fresh"].tolist() == [1, 1, 1, 0]


def test_scalars(block: LaunchBlock) -> None:
    block.write_scalars((0.5, 0.25, 0.9, 1.0, True, False))
    head = bytes(block._bytes[: 6 * 8])
    *scalars, nesterov, maximize = struct.unpack("<f4xf4xf4xf4xqq", head)
    np.testing.assert_allclose(scalars, [0.5, 0.25, 0.9, 1.0], rtol=1e-7)
    assert (nesterov, maximize) == (1, 0)


def test_nothing_to_do() -> None:
    kernel = kernel_for(queue("cpu"), "sgd", "f32")
    empty = LaunchBlock(kernel, [0, 0], {"param": 4, "grad": 4})
    empty.write_addresses("param", [0, 0])
    empty.write_scalars((0.1, 0.0, False))
    empty.launch()
    empty.wait_on_host()


def test_a_kernel_is_built_once() -> None:
    assert kernel_for(queue("cpu"), "sgd", "f32") is kernel_for(queue("cpu"), "sgd", "f32")
