"""The launch block: where a kernel finds its rows and scalars."""

from __future__ import annotations

import struct
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from fusedoptim.allocator import queue
from fusedoptim.kernels.language import Role
from fusedoptim.launch.block import Chunks, LaunchBlock
from fusedoptim.launch.kernel import kernel_for
from fusedoptim.launch.layout import Argument, Layout


@pytest.fixture
def chunks() -> Chunks:
    """Tensors of 5, 0 and 2 elements in chunks of 2: rows of 2, 2, 1 and 2."""
    return Chunks([5, 0, 2], 2)


@pytest.fixture
def block(chunks: Chunks) -> LaunchBlock:
    return LaunchBlock(kernel_for(queue("cpu"), "sgd_momentum", "f32"), chunks.lengths)


def test_chunks(chunks: Chunks) -> None:
    assert chunks.counts.tolist() == [3, 0, 1]
    assert chunks.owner.tolist() == [0, 0, 0, 2]
    assert chunks.first.tolist() == [0, 3, 3]
    assert chunks.start.tolist() == [0, 2, 4, 0]
    assert chunks.lengths.tolist() == [2, 2, 1, 2]


def test_chunks_of_nothing() -> None:
    for sizes in ([], [0], [0, 0]):
        chunks = Chunks(sizes, 2)
        assert chunks.lengths.tolist() == []
        assert chunks.counts.tolist() == [0] * len(sizes)


def test_rows(block: LaunchBlock) -> None:
    block.write("param", np.array([1000, 1008, 1016, 3000]))
    block.write("fresh", [True, True, True, False])
    assert block.rows == 4
    assert block._column["length"].tolist() == [2, 2, 1, 2]
    assert block._column["param"].tolist() == [1000, 1008, 1016, 3000]
    assert block._column["fresh"].tolist() == [1, 1, 1, 0]
    block.write("fresh", 0)
    assert block._column["fresh"].tolist() == [0, 0, 0, 0]


def test_each_row_knows_the_head(block: LaunchBlock) -> None:
    """A row is the head's address and one word for each argument, in the module's order."""
    head = 2 * 8 + block.kernel.head_packing.size
    columns = 1 + len(block.kernel.layout.row)
    words = np.frombuffer(block._memory, dtype=np.int64, offset=head).reshape(-1, columns)
    address, _ = block._memory.__sycl_usm_array_interface__["data"]
    assert words[:4, 0].tolist() == [address] * 4
    assert struct.unpack_from("<q", block._frame.buffer, 8) == (address + head,)


def test_head(block: LaunchBlock) -> None:
    values = {
        "grad_factor": 2**63 + 8,
        "lr": 0.5,
        "weight_decay": 0.25,
        "momentum": 0.9,
        "one_minus_dampening": 1.0,
        "nesterov": True,
    }
    block.write_head({**values, "unused": 1.0})
    head = bytes(block._bytes[: 8 * 8])
    rows, run, factor, *scalars, nesterov = struct.unpack("<qqQf4xf4xf4xf4xq", head)
    assert (rows, run) == (4, 1024 * 4 // 7)
    assert factor == 2**63 + 8
    np.testing.assert_allclose(scalars, [0.5, 0.25, 0.9, 1.0], rtol=1e-7)
    assert nesterov == 1


@pytest.mark.parametrize(("dtype", "real"), [("f32", np.float32), ("f64", np.float64)])
def test_row_scalars_are_in_the_arithmetic_dtype(dtype: str, real: type) -> None:
    block = LaunchBlock(kernel_for(queue("cpu"), "adagrad", dtype), np.array([3, 4]))
    block.write("step_size", [0.1, 0.3])
    assert block._column["step_size"].dtype == real
    assert block._column["step_size"].tolist() == [real(0.1), real(0.3)]


@pytest.mark.parametrize("count", [None, 4, 3, 1, 0])
def test_the_first_rows(chunks: Chunks, count: int | None) -> None:
    """A launch updates only as many rows as are selected."""
    block = LaunchBlock(kernel_for(queue("cpu"), "sgd", "f32"), chunks.lengths)
    params = torch.zeros(len(chunks.lengths), 2)
    grads, factor = torch.ones_like(params), torch.ones(())
    rows = np.arange(len(params)) * 8
    block.write("param", params.data_ptr() + rows)
    block.write("grad", grads.data_ptr() + rows)
    block.write_head({"grad_factor": factor.data_ptr(), "lr": 1.0, "weight_decay": 0.0})
    if count is not None:
        block.select(count)
    block.launch()
    block.wait()
    expected = torch.zeros(4, 2)
    expected[:count] = -1.0
    expected[2, 1] = 0.0  # beyond the end of its tensor
    assert torch.equal(params, expected)


@pytest.mark.parametrize("count", [1, 10, 11, 40, 93, 94, 99, 100])
def test_groups_of_short_rows(count: int) -> None:
    """A group walks a run of rows of any lengths; the last run may be shorter."""
    lengths = np.random.default_rng(count).integers(1, 200, size=100)
    block = LaunchBlock(kernel_for(queue("cpu"), "sgd", "f32"), lengths)
    assert 5 < block._rows_per_group < 20
    params, grads, factor = torch.randn(100, 200), torch.randn(100, 200), torch.ones(())
    rows = np.arange(100) * 200 * 4
    block.write("param", params.data_ptr() + rows)
    block.write("grad", grads.data_ptr() + rows)
    numbers = {"grad_factor": factor.data_ptr(), "lr": 1.0, "weight_decay": 0.0}
    block.write_head(numbers)
    for first in (count, 100 - count):  # more rows than the launch before, or fewer
        expected = params.clone()
        for row, length in enumerate(lengths[:first]):
            expected[row, :length] -= grads[row, :length]
        block.select(first)
        block.launch()
        block.wait()
        assert torch.equal(params, expected)


def test_nothing_to_do() -> None:
    kernel = kernel_for(queue("cpu"), "sgd", "f32")
    empty = LaunchBlock(kernel, Chunks([0, 0], 2).lengths)
    empty.write("param", np.array([], dtype=np.int64))
    empty.write_head({"grad_factor": 0, "lr": 0.1, "weight_decay": 0.0})
    empty.launch()
    empty.wait()


def test_a_kernel_is_built_once() -> None:
    assert kernel_for(queue("cpu"), "sgd", "f32") is kernel_for(queue("cpu"), "sgd", "f32")


def test_arguments_of_split_kernels() -> None:
    """A kernel of split parameters takes the lower halves right after its Param."""
    plain = kernel_for(queue("cpu"), "adam", "f32").layout.row
    split = kernel_for(queue("cpu"), "adam", "split").layout.row
    assert [a for a in split if a.role is not Role.TRAIL] == list(plain)
    assert split[[role for _, role in split].index(Role.PARAM) + 1] == ("trail", Role.TRAIL)


def test_roles_that_have_no_word() -> None:
    """A kernel with such a role is refused: its value would be packed as an arithmetic number."""
    Layout([Argument(role.value, role) for role in Role if role is not Role.INDEX])
    for in_row in (False, True):
        unknown: Any = mock.Mock(in_row=in_row)
        with pytest.raises(TypeError, match="'x': a launch block has no word"):
            Layout([Argument("n", Role.LENGTH), Argument("x", unknown)])
