"""ElementwiseKernel: against torch's operators in float64, and bit for bit where they are exact."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedoptim.raw import ElementwiseKernel, KernelCompileError, ReductionKernel
from tests.fusedoptim.helpers import assert_within
from tests.optimizer_cases import FLOATS
from tests.tolerances import ARITHMETIC, Bounded

squared_difference = ElementwiseKernel("T x, T y", "T z", "z = (x - y) * (x - y)", "squared")
difference = ElementwiseKernel("T x, T y", "T z", "z = x - y", "difference")
index = ElementwiseKernel("T x", "int64 z", "z = i * 10 + (x > 0)", "index")


def _randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("n", [0, 1, 17, 5000, 70_000])
def test_sizes_and_dtypes(dtype: torch.dtype, n: int) -> None:
    x, y = _randn(n, dtype=dtype), _randn(n, dtype=dtype)
    z = squared_difference(x, y)
    assert z.dtype == dtype
    a, b = (Bounded(v.double(), 0.0, ARITHMETIC[dtype]) for v in (x, y))
    expected = ((a - b) * (a - b)).stored(dtype)
    assert_within(z, expected.value, expected.error, "z")


_X = torch.randn(6, 1, 5, 7)
LAYOUTS: dict[str, tuple[Tensor, Tensor]] = {
    "0-d": (torch.randn(()), torch.randn(())),
    "0-d with 1-d": (torch.randn(()), torch.randn(9)),
    "row": (torch.randn(40, 30), torch.randn(30)),
    "column": (torch.randn(40, 30), torch.randn(40, 1)),
    "outer": (torch.randn(40, 1), torch.randn(30)),
    "both": (_X, torch.randn(4, 5, 1)),
    "strided": (torch.randn(80, 90)[::2, 1::3], torch.randn(40, 60)[:, ::2]),
    "transposed": (torch.randn(30, 40).t(), torch.randn(40, 30)),
    "both transposed": (torch.randn(30, 40).t(), torch.randn(30, 40).t()),
    "channels last": (
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ),
    "permuted": (torch.randn(4, 5, 6).permute(2, 0, 1), torch.randn(6, 4, 5)),
    "empty": (torch.randn(3, 0), torch.randn(1)),
    "expanded": (torch.randn(1, 30).expand(40, 30), torch.randn(40, 30)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    """Results have the bits, the shape and the strides of torch's."""
    x, y = LAYOUTS[layout]
    expected = torch.sub(x, y)
    z = difference(x, y)
    assert torch.equal(z, expected)
    assert z.shape == expected.shape
    if x.shape == expected.shape and "expanded" not in layout:
        assert z.stride() == torch.empty_like(x).stride()
    out = torch.empty(expected.shape[::-1]).permute(tuple(range(expected.dim()))[::-1])
    assert difference(x, y, out) is out
    assert torch.equal(out, expected)
    before = out.clone()
    assert torch.equal(difference(out, y, out), before - y)  # in place


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8], ids=str
)
def test_integers(dtype: torch.dtype) -> None:
    low = torch.iinfo(dtype).min
    x = torch.randint(low, torch.iinfo(dtype).max, (100,)).to(dtype)
    assert torch.equal(difference(x, x.flip(0)), x - x.flip(0))
    assert torch.equal(difference(x, 3), x - 3)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_unsigned_integers(dtype: str) -> None:
    """Results are compared with numpy's, as torch has few operators for these dtypes."""
    most = np.iinfo(dtype).max
    x = np.array([0, 1, 2, most - 1, most], dtype)
    for y in (x[::-1], x):
        z = difference(torch.from_numpy(x), torch.from_numpy(y.copy()))
        assert str(z.dtype) == f"torch.{dtype}"
        assert np.array_equal(z.numpy(), x - y)
    assert np.array_equal(difference(torch.from_numpy(x), 1).numpy(), x - x.dtype.type(1))
    halved = ElementwiseKernel(f"{dtype} x", f"{dtype} z", "z = x / 2", "halved")
    assert np.array_equal(halved(x).numpy(), x // 2)
    with pytest.raises(OverflowError):
        difference(torch.from_numpy(x), -1)


class TestArrays:
    """numpy arrays are tensors over the same memory."""

    def test_inputs_of_any_layout(self) -> None:
        x = np.arange(24.0).reshape(4, 6)
        y = np.random.default_rng(0).random((4, 6))
        for a, b in ((x, y), (x.T, y.T), (x[:, ::2], y[:, 1::2]), (x, y[0]), (x, y[:, :1])):
            z = difference(a, b)
            assert isinstance(z, Tensor)
            assert np.array_equal(z.numpy(), a - b)
        assert np.array_equal(difference(torch.from_numpy(x), y).numpy(), x - y)
        assert difference(np.array(3.0), np.array(2.0)).shape == ()

    def test_outputs(self) -> None:
        x, out = np.arange(6.0), np.empty(6)
        assert difference(x, 1.0, out) is out
        assert np.array_equal(out, x - 1)
        assert difference(torch.from_numpy(x), 2.0, out) is out
        assert np.array_equal(out, x - 2)
        mine = torch.empty(6, dtype=torch.float64)
        assert difference(x, x, mine) is mine

    def test_read_only(self) -> None:
        """Read-only inputs need no copy, and cause no warning of torch's."""
        x = np.arange(6.0)
        x.setflags(write=False)
        assert np.array_equal(difference(x, 1.0).numpy(), x - 1)
        wide = np.broadcast_to(x, (3, 6))
        assert np.array_equal(difference(wide, 1.0).numpy(), wide - 1)
        address = ElementwiseKernel("raw T x", "uint64 z", "z = (ulong)x", "address")
        assert int(address(x, size=1)[0]) == x.ctypes.data
        with pytest.raises(
            ValueError, match="difference: argument 'z' is an output and a read-only array"
        ):
            difference(np.ones(6), 1.0, x)

    @pytest.mark.parametrize(
        ("array", "error", "message"),
        [
            (np.ones(3, ">f8"), ValueError, "difference: argument 'x' is an array.*byte order"),
            (np.ma.ones(3), TypeError, r"difference: argument 'x' is a masked.*filled"),
            (np.ones(3, object), TypeError, "difference: argument 'x' is an array.*object"),
            (np.ones(3)[::-1], ValueError, "difference: argument 'x' is an array.*strides"),
            (
                np.ones(3, complex),
                TypeError,
                r"'x' is of torch\.complex128; supported types are bool",
            ),
            (np.ones(3, "float32"), TypeError, r"'y' is of torch\.float64 and must be of"),
        ],
    )
    def test_refused(self, array: object, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            difference(array, torch.ones(3, dtype=torch.float64))  # type: ignore[arg-type]


def test_parameters_may_have_the_names_that_reductions_reserve() -> None:
    added = ElementwiseKernel("T a, T b", "T c", "c = a + b")
    x = torch.randn(2, 9)
    assert torch.equal(added(*x), x[0] + x[1])


def test_bool() -> None:
    both = ElementwiseKernel("bool x, bool y", "bool z", "z = x && !y")
    x, y = torch.rand(50) < 0.5, torch.rand(50) < 0.5
    assert torch.equal(both(x, y), x & ~y)
    assert torch.equal(both(x, True), torch.zeros(50, dtype=torch.bool))
    scaled = ElementwiseKernel("bool k, int32 x", "int32 z", "z = x * k")
    ones = torch.ones(2, dtype=torch.int32)
    for number in (True, False, 2, -1, 256, 0, 0.5, float("nan")):  # numpy's truth of them
        for _ in range(2):  # checked, and repeated
            assert scaled(number, ones).tolist() == [int(np.bool_(number))] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_all_16_bit_numbers(dtype: torch.dtype) -> None:
    """Each number is read, and float32 numbers between them are rounded, as torch does both."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    x = bits.view(dtype)
    widen = ElementwiseKernel("T x", "float32 y", "y = x", "widen")
    narrow = ElementwiseKernel("float32 x", "T y", "y = x", "narrow")
    wide = x.float()
    assert torch.equal(widen(x).nan_to_num(7), wide.nan_to_num(7))
    between = torch.cat([wide, wide * (1 + 2**-9), wide * (1 - 2**-12), wide * 1.5, wide + 1e-7])
    expected = between.to(dtype)
    result = narrow(between, torch.empty_like(expected))
    assert torch.equal(result.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(result[numbers].view(torch.int16), expected[numbers].view(torch.int16))


def test_index_of_a_macro(tmp_path: Path) -> None:
    (tmp_path / "index.h").write_text("#define INDEX i\n")
    x = torch.zeros(2, 3).t()
    for preamble, options in [
        ("#define INDEX ((long)i)\n", ()),
        ("#define INDEX \\\n  i\n", ()),
        ("#define INDEX \\\r\n  i\r\n", ()),
        ("/* the index */ #define INDEX i\n", ()),
        ("%:define INDEX i\n", ()),
        ("", ("-DINDEX=i",)),
        ('#include "index.h"\n', (f"-I{tmp_path}",)),
    ]:
        by_macro = ElementwiseKernel("T x", "int64 y", "y = INDEX", "f", preamble, options)
        assert by_macro(x).tolist() == [[0, 1], [2, 3], [4, 5]]
        assert by_macro(x, torch.empty(2, 3, dtype=torch.int64).t())[1].tolist() == [2, 3]


def test_a_function_with_a_variable_of_the_indexs_name() -> None:
    preamble = (
        "static float sum(float x) { float s = 0; for (int i = 0; i < 3; i++) s += x; return s; }"
    )
    x = torch.randint(-9, 9, (2, 3)).float().t()
    y = ElementwiseKernel("T x", "T y", "y = sum(x)", "f", preamble)(x)
    assert torch.equal(y, 3 * x)
    assert y.stride() == x.stride()


def test_index_raw_and_size() -> None:
    x = torch.tensor([[1.0, -1.0], [-1.0, 1.0], [1.0, 1.0]]).t()
    assert index(x).tolist() == [[1, 10, 21], [30, 41, 51]]  # as elements are numbered in the shape
    reverse = ElementwiseKernel("raw T x, T scale", "T y", "y = x[n - 1 - i] * scale", "reverse")
    values = torch.arange(5.0)
    for size in (5, np.int64(5)):
        assert reverse(values, 2.0, size=size).tolist() == [8, 6, 4, 2, 0]
    scatter = ElementwiseKernel("int64 at, T x", "raw T y", "y[at] = x", "scatter")
    y = torch.zeros(4)
    assert scatter(torch.tensor([3, 0]), torch.tensor([5.0, 6.0]), y) is y
    assert y.tolist() == [6, 0, 0, 5]
    gather = ElementwiseKernel(
        "raw bfloat16 x, int32 at", "float32 y", "y = from_bfloat16(x[at])", "gather"
    )
    assert gather(values.bfloat16(), torch.tensor([4, 1], dtype=torch.int32)).tolist() == [4, 1]


def test_index_and_number_have_a_sign() -> None:
    """In CuPy both are ``ptrdiff_t``."""
    centered = ElementwiseKernel("raw T x", "float32 y", "y = (i - n / 2) * x[i - 1 < 0 ? 0 : i]")
    assert centered(torch.ones(5), size=5).tolist() == [-2, -1, 0, 1, 2]


@pytest.mark.parametrize(
    ("out_params", "operation", "expected"),
    [
        ("T y", "if (x < 0) { y = 0; return; } y = sqrt(x)", [0, 2, 0]),
        ("T y", "y = -1; STOP_IF(x < 0) y = above(x)", [-1, 1, -1]),
        ("raw T y", "y[i] = 3; if (x < 0) return; y[i] = x", [3, 4, 3]),
    ],
)
def test_return_keeps_the_outputs(out_params: str, operation: str, expected: list[float]) -> None:
    """As in CuPy, where outputs are references."""
    preamble = "#define STOP_IF(c) if (c) return;\nfloat above(float x) { return x > 0; }"
    kernel = ElementwiseKernel("T x", out_params, operation, preamble=preamble)
    assert kernel(torch.tensor([-1.0, 4, -9]), torch.full((3,), 77.0)).tolist() == expected


def test_only_raw_tensors() -> None:
    scatter = ElementwiseKernel("raw T x, raw int64 at", "raw T y", "y[at[i]] = x[i]", "scatter")
    x, at, y = torch.arange(4.0), torch.tensor([3, 2, 1, 0]), torch.full((4,), -1.0)
    assert scatter(x, at, y, size=3) is y
    assert y.tolist() == [-1, 2, 1, 0]
    scaled = ElementwiseKernel("float32 k", "raw float32 y", "y[i] = i * k")
    assert scaled(0.5, torch.zeros(20_000), size=20_000)[-1] == 9999.5


def test_outputs_preamble_and_numbers() -> None:
    both = ElementwiseKernel(
        "T x, float64 k",
        "T larger, int32 sign",
        "larger = twice(x) * (T)k; if (x < 0) { sign = -1; } else { sign = 1; }",
        "both",
        preamble="static float twice(float x) { return FACTOR * x; }",
        options=("-DFACTOR=2",),
    )
    larger, sign = both(torch.tensor([1.5, -2.0]), np.float32(3.0))
    assert larger.tolist() == [9.0, -12.0]
    assert sign.tolist() == [1, -1]
    assert sign.dtype == torch.int32
    add = ElementwiseKernel("T x", "T y", "y += x", "add")  # an output that is passed is read
    y = torch.ones(3)
    add(torch.arange(3.0), y)
    assert y.tolist() == [1, 2, 3]
    numbered = ElementwiseKernel("", "float32 y", "y = i", "numbered")
    assert numbered(torch.empty(2, 2)).tolist() == [[0, 1], [2, 3]]
    assert numbered(size=3).tolist() == [0, 1, 2]


def test_under_no_grad_and_version() -> None:
    x = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        assert difference(x, 1.0).tolist() == [0, 0, 0]
    out = torch.zeros(3)
    before = out._version
    difference(out, 1.0, out)
    assert out._version > before  # autograd notices changes of what it saved


def test_compiled_copied_and_shown() -> None:
    total = ReductionKernel("T x", "T y", "x", "a + b", "y = a", "0", "total")

    def both(x: Tensor) -> Tensor:
        return difference(x * 2, 1.0) + total(x, axis=0)

    x = torch.randint(-9, 9, (20,)).float()
    assert torch.equal(torch.compile(both, backend="eager")(x), x * 2 - 1 + x.sum())
    assert torch.equal(copy.deepcopy(difference)(x, x), torch.zeros(20))
    assert torch.equal(pickle.loads(pickle.dumps(total))(x), x.sum())
    assert repr(difference) == "<ElementwiseKernel difference(T x, T y) -> T z>"
    assert repr(total) == "<ReductionKernel total(T x) -> T y>"


class TestBadInput:
    @pytest.mark.parametrize(
        ("in_params", "message"),
        [
            ("float x", "'float' of 'float x' is not a type"),
            ("float32", "'float32' is not like"),
            ("float32 x y", "is not like"),
            ("float32 i", "'i' is a name of the generated kernel, as are i, n and those"),
            ("float32 x_", "'x_' is a name of the generated kernel"),
            ("float32 global", "'global' is a reserved word of OpenCL C"),
            ("float32 z", "two parameters have the name 'z'"),
        ],
    )
    def test_declarations(self, in_params: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            ElementwiseKernel(in_params, "float32 z", "z = 0")

    def test_names_and_outputs(self) -> None:
        with pytest.raises(ValueError, match="'two words' cannot be the name"):
            ElementwiseKernel("T x", "T y", "y = x", "two words")
        with pytest.raises(ValueError, match="'constant' cannot be the name"):
            ElementwiseKernel("T x", "T y", "y = x", "constant")
        with pytest.raises(ValueError, match="declares no output"):
            ElementwiseKernel("T x", "", "x")

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"in_params": ["T x"]}, TypeError, r"in_params=\['T x'\] is a list; pass a str, such"),
            ({"out_params": None}, TypeError, "out_params=None is a NoneType; pass a str, such"),
            ({"operation": len}, TypeError, "operation=.* is a builtin_function.*; pass a str"),
            ({"name": True}, TypeError, "name=True is a bool; pass a str"),
            ({"preamble": b""}, TypeError, "preamble=b'' is a bytes; pass a str"),
            ({"options": "-DN=3"}, TypeError, r"'-DN=3' is one string; pass a tuple"),
            ({"options": ["-O9"]}, ValueError, "has no option '-O9'"),
        ],
    )
    def test_definition(
        self, arguments: dict[str, object], error: type[Exception], message: str
    ) -> None:
        given = {"in_params": "T x", "out_params": "T y", "operation": "y = x", **arguments}
        with pytest.raises(error, match=message):
            ElementwiseKernel(**given)  # type: ignore[arg-type]

    def test_types(self) -> None:
        x = torch.ones(3)
        with pytest.raises(
            TypeError, match=r"'y' is of torch\.float64 and must be of torch\.float32"
        ):
            difference(x, x.double())
        with pytest.raises(
            TypeError, match=r"'x' is a list; pass a torch tensor or a numpy array, or a number"
        ):
            difference([1.0], x)  # type: ignore[arg-type]
        with pytest.raises(
            TypeError, match=r"'z' is a float; pass a torch tensor or a numpy array$"
        ):
            difference(x, x, 1.0)
        with pytest.raises(
            TypeError, match=r"'x' is of torch\.complex64; supported types are bool, int8"
        ):
            difference(x + 1j, x)
        with pytest.raises(TypeError, match=r"'y' is 0\.5 and must be a number of torch\.int64"):
            difference(torch.arange(3), 0.5)
        with pytest.raises(
            TypeError, match="takes 2 inputs and then its 1 outputs or none; 1 were given"
        ):
            difference(x)
        raw = ElementwiseKernel("raw T x, T y", "T z", "z = x[0] + y")
        with pytest.raises(
            TypeError, match=r"'x' is a float; pass a torch tensor or a numpy array$"
        ):
            raw(1.0, x)
        with pytest.raises(TypeError, match="'x' is an int; pass"):
            raw(1, x)
        unbound = ElementwiseKernel("float32 x", "T y", "y = x")
        with pytest.raises(TypeError, match="no input says what T of the output 'y' is"):
            unbound(x)
        with pytest.raises(OverflowError):
            difference(x.to(torch.int8), 1000)

    def test_shapes(self) -> None:
        x = torch.ones(3)
        with pytest.raises(ValueError, match="shapes do not fit"):
            difference(x, torch.ones(4))
        with pytest.raises(ValueError, match=r"'z' has shape \(4,\), and the result's is \(3,\)"):
            difference(x, x, torch.ones(4))
        for shared in (torch.ones(1).expand(3), torch.ones(6).as_strided((3, 2), (1, 1))):
            with pytest.raises(ValueError, match="elements of the output 'z' share memory"):
                difference(torch.ones(shared.shape), 1.0, shared)
        apart = torch.zeros(8).as_strided((3, 2), (2, 3))
        assert difference(torch.ones(3, 2), 1.0, apart) is apart
        with pytest.raises(ValueError, match="size=3 was given, but"):
            difference(x, x, size=3)
        numbered = ElementwiseKernel("", "float32 y", "y = i")
        numbered(size=1)
        for size in (-1, True, 1.0):
            with pytest.raises(ValueError, match=f"size={size} is not a number of elements"):
                numbered(size=size)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"no argument gives a shape; .* not raw, or size="):
            numbered()
        scatter = ElementwiseKernel("T x", "raw T y", "y[i] = x")
        with pytest.raises(ValueError, match="the raw output 'y' must be passed"):
            scatter(x)
        with pytest.raises(ValueError, match="not contiguous"):
            scatter(x, torch.ones(6)[::2])

    def test_gradients_layouts_and_devices(self) -> None:
        x = torch.ones(3)
        with pytest.raises(
            RuntimeError, match="'y' requires a gradient, and autograd does not see"
        ):
            difference(x, x.clone().requires_grad_())
        with pytest.raises(RuntimeError, match="argument 3 requires a gradient"):
            difference(x, x, x.clone(), x.clone().requires_grad_())
        with pytest.raises(ValueError, match=r"'x' is torch\.sparse_coo; pass its \.to_dense"):
            difference(x.to_sparse(), x)
        with pytest.raises(ValueError, match="are on cpu and meta"):
            difference(x, x.to("meta"))
        with pytest.raises(RuntimeError, match="on meta"):
            difference(x.to("meta"), x.to("meta"))

    def test_arguments_have_the_callers_names(self) -> None:
        x = torch.ones(3)
        power = ElementwiseKernel("T x, int32 m, raw T y", "T z", "z = x * m + y[0]", "power")
        with pytest.raises(ValueError, match=r"^power: argument 'x': memory holds the negatives"):
            power(torch._neg_view(x), 2, x)
        with pytest.raises(OverflowError, match=r"^power: argument 'm': \d+ is not in int32's"):
            power(x, 2**40, x)
        with pytest.raises(ValueError, match=r"^power: argument 'y': .* is not contiguous"):
            power(x, 2, torch.ones(6)[::2])
        with FakeTensorMode():
            fake = torch.ones(3)
        with pytest.raises(TypeError, match=r"^power: argument 'z': .* has no memory of its own"):
            power(x, 2, x, fake)

    def test_operation(self) -> None:
        broken = ElementwiseKernel("T x", "T y", "y = x;\ny += unknown")
        with pytest.raises(KernelCompileError, match=r"operation:2:\d+: error: use of undeclared"):
            broken(torch.ones(3))
        cupys = ElementwiseKernel("raw T x", "T y", "y = x[_ind.size() - 1 - i]")
        with pytest.raises(
            KernelCompileError, match=r"not CUDA C\+\+: write n for _ind\.size\(\)$"
        ):
            cupys(torch.ones(3), size=3)
