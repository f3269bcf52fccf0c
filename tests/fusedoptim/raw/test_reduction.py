"""ReductionKernel: against torch in float64, with the bound of a sum that is added in any order."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedoptim.launch import opencl
from fusedoptim.raw import KernelCompileError, ReductionKernel
from tests.fusedoptim.helpers import assert_within
from tests.optimizer_cases import FLOATS
from tests.running import ONE_CORE, check_script
from tests.tolerances import ARITHMETIC, additions, unit_roundoff

total = ReductionKernel("T x", "T y", "x", "a + b", "y = a", "0", "total")
norm = ReductionKernel("T x", "T y", "x * x", "a + b", "y = sqrt(a)", "0", "norm")
largest = ReductionKernel("T x", "T y", "x", "max(a, b)", "y = a", "-INFINITY", "largest")
dot = ReductionKernel("T x, T y", "T z", "x * y", "a + b", "z = a", "0", "dot")


def _assert_sum(result: Tensor, terms: Tensor, axis: Sequence[int], keepdims: bool = False) -> None:
    """Assert that ``result`` is the sum of ``terms``, which are float64."""
    dtype = result.dtype
    expected, magnitude = terms, terms.abs()
    for d in sorted(axis, reverse=True):
        expected = expected.sum(d, keepdim=keepdims)
        magnitude = magnitude.sum(d, keepdim=keepdims)
    n = terms.numel() // max(expected.numel(), 1)
    u = unit_roundoff(ARITHMETIC[dtype])
    error = (additions([n]) + 1) * u * magnitude
    error = error + unit_roundoff(dtype) * (expected.abs() + error)
    assert result.shape == expected.shape
    assert_within(result, expected, error, "sum")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("n", [0, 1, 17, 5000, 300_000, 600_000])
def test_sizes_and_dtypes(dtype: torch.dtype, n: int) -> None:
    x = torch.rand(n, dtype=torch.float64).to(dtype) * 0.01
    result = total(x)
    assert result.dtype == dtype
    _assert_sum(result, x.double(), [0])


@pytest.mark.parametrize("layout", ["contiguous", "permuted", "strided", "expanded"])
def test_axes(layout: str) -> None:
    x, axes = {
        "contiguous": (torch.randn(13, 40, 3), [(), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2)]),
        "permuted": (torch.randn(13, 40, 3).permute(1, 2, 0), [(0,), (0, 1), (0, 1, 2)]),
        "strided": (torch.randn(26, 41, 5)[::2, 1:, ::2], [(1,), (0, 2)]),
        "expanded": (torch.randn(13, 1, 3).expand(13, 40, 3), [(1,), (0, 1)]),
    }[layout]
    for axis in axes:
        _assert_sum(total(x, axis=axis), x.double(), axis)


def test_axes_kept_negative_and_all() -> None:
    x = torch.randn(13, 40, 3)
    _assert_sum(total(x, axis=1, keepdims=True), x.double(), [1], keepdims=True)
    _assert_sum(total(x, axis=[-1, 0]), x.double(), [0, 2])
    _assert_sum(total(x, axis=np.int64(1)), x.double(), [1])
    _assert_sum(total(x, axis=(np.int8(-1), 0)), x.double(), [0, 2])
    _assert_sum(total(x, axis=range(2)), x.double(), [0, 1])
    _assert_sum(total(x, keepdims=True), x.double(), [0, 1, 2], keepdims=True)


@pytest.mark.parametrize("shape", [(1000, 40), (40, 1000), (3000, 5), (5, 70_000), (70_000, 33)])
def test_long_axes(shape: tuple[int, int]) -> None:
    """Several chunks are reduced for each result, side by side or one after the other."""
    x = torch.randn(shape)
    for axis in (0, 1):
        _assert_sum(total(x, axis=axis), x.double(), [axis])
        assert torch.equal(largest(x, axis=axis), x.amax(axis))


@pytest.mark.parametrize("n", [64, 65, 127, 1000, 5000])
@pytest.mark.parametrize("count", [31, 32, 100, 257, 300])
def test_several_results_in_a_group(count: int, n: int) -> None:
    """Rows share groups, of which the last may have fewer, or rows do not share groups."""
    x = torch.randn(count, n + 3)[:, 1:-2]
    out = torch.empty(count, 2)[:, 1]
    total(x, out, axis=1)
    _assert_sum(out, x.double(), [1])
    assert torch.equal(largest(x, axis=1), x.amax(1))


@pytest.mark.parametrize("reduce_type", [None, "bool"])
def test_infinities_of_bool(reduce_type: str | None) -> None:
    """-INFINITY is the least bool, INFINITY the largest."""
    parts = "T x", "T y", "x"
    most = ReductionKernel(*parts, "a || b", "y = a", "-INFINITY", reduce_type=reduce_type)
    least = ReductionKernel(*parts, "a && b", "y = a", "INFINITY", reduce_type=reduce_type)
    for x in (torch.zeros(67, 3), torch.ones(67, 3), torch.rand(67, 3) < 0.01):
        x = x.bool()
        assert torch.equal(most(x), x.amax())
        assert torch.equal(most(x, axis=0), x.amax(0))
        assert torch.equal(least(~x), (~x).amin())
        assert torch.equal(least(~x, axis=0), (~x).amin(0))


def test_broadcast_numbers_and_outputs() -> None:
    x, y = torch.randn(30, 20), torch.randn(20)
    _assert_sum(dot(x, y, axis=1), x.double() * y.double(), [1])
    _assert_sum(dot(x, 2.0), x.double() * 2, [0, 1])
    out = torch.empty(2, 30)[0]
    assert dot(x, y, out, axis=1) is out
    _assert_sum(out, x.double() * y.double(), [1])
    strided = torch.empty(60)[::2]
    dot(x, y, strided, axis=1)
    assert torch.equal(strided, out)


@pytest.mark.parametrize("n", [15, 16, 63, 64, 65, 127, 128, 4096, 5000, 8191, 8192, 8257])
def test_sizes_around_the_unrolled_loop(n: int) -> None:
    """The user's parameters may have any names, and the index is right for every element."""
    scaled = ReductionKernel("T x, T k, T d", "T y", "x * k + i * d", "a + b", "y = a", "0")
    x = torch.rand(n, dtype=torch.float64)
    _assert_sum(scaled(x, 2.0, 0.5), 2 * x + 0.5 * torch.arange(n), [0])


def test_norm() -> None:
    x = torch.randn(70_000)
    expected = torch.linalg.vector_norm(x.double())
    relative = (additions([70_000]) / 2 + 6) * unit_roundoff(torch.float32)
    assert_within(norm(x), expected, relative * expected, "norm")


def test_index_mean_and_two_outputs() -> None:
    first = ReductionKernel(
        "T x", "int64 at", "x > 0 ? (long)i : n", "min(a, b)", "at = a", "LONG_MAX", "first"
    )
    x = -torch.ones(4, 50)
    x[torch.arange(4), torch.tensor([7, 0, 49, 3])] = 1
    assert first(x, axis=1).tolist() == [7, 0, 49, 3]
    assert first(-torch.ones(9)).item() == 9
    moments = ReductionKernel(
        "T x, float32 k",
        "T mean, float64 scaled",
        "x",
        "a + b",
        "mean = a / n; scaled = a * k",
        "0",
        "moments",
        reduce_type="float64",
    )
    values = torch.arange(8.0)
    mean, scaled = moments(values, 10.0)
    assert (mean.item(), scaled.item(), scaled.dtype) == (3.5, 280.0, torch.float64)


def test_index_over_several_dimensions() -> None:
    """It counts in the order of the dimensions, whatever the order of ``axis``, as CuPy's does."""
    weighted = ReductionKernel("T x", "float64 y", "x * i", "a + b", "y = a", "0", "weighted")
    x = torch.randint(-9, 9, (3, 5, 4), dtype=torch.int32)
    expected = (x.transpose(0, 1).flatten(1) * torch.arange(12)).sum(1).double()
    assert torch.equal(weighted(x, axis=(0, 2)), expected)
    assert torch.equal(weighted(x, axis=(-1, 0)), expected)


def test_number_has_a_sign_and_return_keeps_the_outputs() -> None:
    x = torch.arange(-10, 0, dtype=torch.int32)
    mean = ReductionKernel("T x", "T y", "x", "a + b", "y = a / n", "0", "mean")
    assert mean(x).item() == -5
    weighted = ReductionKernel("T x", "float32 y", "x * (i - n)", "a + b", "y = a", "0")
    assert weighted(x).item() == (x * (torch.arange(10) - 10)).sum()
    at_least = ReductionKernel("T x", "T y", "x", "a + b", "y = a; if (a > 3) return; y = 3", "0")
    assert at_least(torch.tensor([[2.0, 2.0], [1.0, 1.0]]), axis=1).tolist() == [4, 3]


def test_integers_and_bool() -> None:
    x = torch.randint(-100, 100, (300, 7), dtype=torch.int32)
    assert torch.equal(total(x, axis=0), x.sum(0, dtype=torch.int32))
    wide = ReductionKernel("int32 x", "int64 y", "x", "a + b", "y = a", "0", "wide")
    assert torch.equal(wide(x), x.sum())
    any_true = ReductionKernel("bool x", "bool y", "x", "a || b", "y = a", "false", "any_true")
    flags = torch.rand(70_000, 2) < 1e-4
    assert torch.equal(any_true(flags, axis=0), flags.any(0))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"])
def test_a_floating_identity_of_integers_is_the_nearest(dtype: str) -> None:
    limits = np.iinfo(dtype)
    x = np.random.default_rng().integers(limits.min, limits.max, (50, 3), dtype, endpoint=True)
    smallest = ReductionKernel("T x", "T y", "x", "min(a, b)", "y = a", "1.0 / 0", "smallest")
    assert np.array_equal(largest(x, axis=0).numpy(), x.max(0))
    assert np.array_equal(smallest(x, axis=1).numpy(), x.min(1))
    nothing = torch.from_numpy(x[:0])
    assert (largest(nothing).item(), smallest(nothing).item()) == (limits.min, limits.max)
    common = ReductionKernel("T x", "T y", "x", "a & b", "y = a", "-1", "common")
    assert common(x).item() == np.bitwise_and.reduce(x, None)


_SUMS = """
import hashlib
import torch
from fusedoptim.raw import ReductionKernel

torch.manual_seed(0)
total = ReductionKernel("T x", "T y", "x", "a + b", "y = a", "0", "total")
x = torch.randn(1_000_000)
sums = [total(x).view(1), total(x.view(-1, 4), axis=0)]
sums += [total(x.view(1000, 1000), axis=axis) for axis in (0, 1)]
found = hashlib.sha256(torch.cat(sums).numpy().tobytes()).hexdigest()
print(found)
"""


def test_same_bits_whatever_the_number_of_threads() -> None:
    namespace: dict[str, str] = {}
    exec(_SUMS, namespace)
    assert check_script(ONE_CORE + _SUMS).strip() == namespace["found"]


def test_several_threads_and_chunks() -> None:
    """Each call has its own count of groups that have finished."""
    x = torch.randint(0, 100, (600_000,), dtype=torch.int64)
    rows = x.view(1000, 600)
    with ThreadPoolExecutor(4) as pool:
        sums = [pool.submit(total, x) for _ in range(40)]
        columns = [pool.submit(total, rows, axis=0) for _ in range(40)]
        assert all(s.result() == x.sum() for s in sums)
        assert all(torch.equal(s.result(), rows.sum(0)) for s in columns)


def test_parts_of_a_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements that are read count, and so does what is computed from them."""
    seen: list[tuple[int, bool]] = []

    def parts_of(groups: int, elements: int, threads: int, is_light: bool) -> int:
        seen.append((elements, is_light))
        return 1

    monkeypatch.setattr(opencl, "parts_of", parts_of)
    costly = ReductionKernel("T x", "T y", "exp(x)", "a + b", "y = a", "0")
    greatest = ReductionKernel("T x", "T y", "fabs(x)", "max (a, b)", "y = sqrt(a)", "0")
    for kernel in (total, costly, greatest):
        kernel(torch.ones(600_000))
    assert seen == [(600_000, True), (600_000, False), (600_000, True)]


def test_fake_tensors_leave_nothing_behind() -> None:
    fresh = ReductionKernel("T x", "T y", "x", "a + b", "y = a", "0")
    with FakeTensorMode(), pytest.raises(TypeError, match="has no memory of its own"):
        fresh(torch.ones(5))
    assert fresh(torch.ones(5)) == 5


def test_numpy_and_out() -> None:
    x = np.arange(12.0).reshape(3, 4)
    assert np.array_equal(total(x, axis=0).numpy(), x.sum(0))
    for out in (np.empty(4), torch.empty(4, dtype=torch.float64)):
        assert total(x, axis=0, out=out) is out
        assert np.array_equal(np.asarray(out), x.sum(0))
    both = ReductionKernel("T x", "T low, T high", "x", "a + b", "low = -a; high = a", "0", "both")
    outs = torch.empty(2, 4, dtype=torch.float64).unbind()
    assert all(a is b for a, b in zip(both(x, axis=0, out=outs), outs))
    assert np.array_equal(outs[0].numpy(), -x.sum(0))
    with pytest.raises(TypeError, match="takes 1 inputs and then its 1 outputs or none; 3 were"):
        total(x, outs[0], axis=0, out=outs[0])
    with pytest.raises(ValueError, match=r"shape \(4,\), and the result's is \(3,\)"):
        total(x, axis=1, out=outs[0])


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_unsigned_integers(dtype: str) -> None:
    x = np.random.default_rng(0).integers(np.iinfo(dtype).max, size=300_000, dtype=dtype)
    assert total(x).item() == x.sum(dtype=dtype)


class TestBadInput:
    @pytest.mark.parametrize("axis", [2, -3, (0, 5), 0.5, True])
    def test_axis(self, axis: object) -> None:
        with pytest.raises(ValueError, match="is not valid for 2 dimensions"):
            total(torch.ones(3, 4), axis=axis)  # type: ignore[arg-type]

    @pytest.mark.parametrize("axis", [True, 1.0, (True,), "1", (1, 0.0)])
    def test_axis_that_equals_another(self, axis: object) -> None:
        x = torch.ones(3, 4)
        total(x, axis=1), total(x, axis=(1,)), total(x, axis=(1, 0))
        with pytest.raises(ValueError, match="is not valid for 2 dimensions"):
            total(x, axis=axis)  # type: ignore[arg-type]

    def test_keepdims(self) -> None:
        """The truth of a value, as in numpy."""
        x = torch.ones(3, 4)
        for keepdims in (1, np.array([2]), torch.tensor(True), "yes"):
            assert total(x, axis=1, keepdims=keepdims).shape == (3, 1)  # type: ignore[arg-type]  # a bool
        for keepdims in (0, None, [], np.array(0)):
            assert total(x, axis=1, keepdims=keepdims).shape == (3,)  # type: ignore[arg-type]  # a bool
        with pytest.raises(ValueError, match=r"keepdims=array.* is neither true nor false; pass T"):
            total(x, axis=1, keepdims=np.array([1, 0]))  # type: ignore[arg-type]  # a bool

    def test_too_many_results(self) -> None:
        x = torch.ones(1, dtype=torch.uint8).expand(2**31, 2)
        with pytest.raises(ValueError, match=r"total: 2,147,483,648 results of 2 elements each"):
            total(x, axis=1)

    def test_axis_twice(self) -> None:
        with pytest.raises(ValueError, match="names a dimension twice"):
            total(torch.ones(3, 4), axis=(0, -2))

    def test_declarations(self) -> None:
        with pytest.raises(ValueError, match="must declare outputs, none of them raw"):
            ReductionKernel("T x", "raw T y", "x", "a + b", "y = a", "0")
        with pytest.raises(ValueError, match="'b' is a name of the generated kernel"):
            ReductionKernel("T b", "T y", "b", "a + b", "y = a", "0")
        with pytest.raises(TypeError, match="map_expr=None is a NoneType; pass a str"):
            ReductionKernel("T x", "T y", None, "a + b", "y = a", "0")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="identity='' is not a C expression"):
            ReductionKernel("T x", "T y", "x", "a + b", "y = a", "")
        with pytest.raises(ValueError, match="reduce_type='float' is not one of bool, int8"):
            ReductionKernel("T x", "T y", "x", "a + b", "y = a", "0", reduce_type="float")

    def test_arguments(self) -> None:
        x = torch.ones(3, 4)
        with pytest.raises(
            TypeError, match="takes 1 inputs and then its 1 outputs or none; 0 were given"
        ):
            total()
        with pytest.raises(
            ValueError, match=r"no argument gives a shape; pass a tensor that is not raw$"
        ):
            total(1.0)
        with pytest.raises(ValueError, match=r"shape \(3,\), and the result's is \(4,\)"):
            total(x, torch.ones(3), axis=0)
        with pytest.raises(RuntimeError, match="autograd does not see"):
            total(x.requires_grad_())

    def test_expressions(self) -> None:
        broken = ReductionKernel("T x", "T y", "x", "a + c", "y = a", "0")
        with pytest.raises(
            KernelCompileError, match=r"reduce_expr:1:\d+: error: use of undeclared"
        ):
            broken(torch.ones(3))
