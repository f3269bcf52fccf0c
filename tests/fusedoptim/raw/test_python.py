"""Raw kernels written in Python: what they compute, what they compile to, and what is refused."""

from __future__ import annotations

import collections
import enum
import importlib.util
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy
import pytest
import torch

from fusedoptim.kernels import lamb, sgd
from fusedoptim.kernels._validation import objections
from fusedoptim.launch.modules import load_module
from fusedoptim.raw import KernelCompileError, LocalMemory, RawKernel, language
from fusedoptim.raw._python import arguments, compile_python, identity
from fusedoptim.raw._spirv import read_module
from fusedoptim.raw.language import (
    BFloat16,
    Float16,
    Float32,
    Float64,
    Global,
    Int8,
    Int16,
    Int32,
    Int64,
    Local,
    UInt8,
    UInt64,
    barrier,
    fma,
    global_id,
    global_size,
    group_id,
    local_id,
    local_size,
)
from tests.compiling import needs_gpu_compiler
from tests.fusedoptim.helpers import assert_within, run_script
from tests.tolerances import BUILTIN_ULPS, Bounded, unit_roundoff

HAS_COMPILER = importlib.util.find_spec("numba_dpex") is not None
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="pip install '.[jit]'")
GAIN = 0.25
SHIFTS = (1, 2)
FLOAT64 = 10  # SPIR-V's capability


def saxpy(n: Int64, a: Float32, x: Global[Float32], y: Global[Float32]) -> None:
    i = global_id(0)
    if i < n:
        y[i] = a * x[i] + y[i]


def clipped(value: float) -> float:
    if value > 1:
        return GAIN
    return max(value, -1.0) * GAIN


def mixed(n: Int64, x: Global[Float32], y: Global[BFloat16], z: Global[Float16]) -> None:
    i = global_id()
    while i < n:
        y[i] = fma(x[i], 0.5, y[i]) + i + clipped(x[i])
        z[i] = -z[i] / 2 + x[i] ** 2
        i += global_size()


def double(x: Global[Float64], k: Int8, y: Global[Float32]) -> None:
    i = global_id(0)
    x[i] = x[i] * 0.1 + k
    y[i] = x[i]


def integers(a: Global[Int32], b: Global[Int16], c: Global[UInt8], d: Global[UInt64]) -> None:
    i = global_id(0)
    a[i] = a[i] // b[i] + a[i] % b[i]
    c[i] = (c[i] << SHIFTS[0]) ^ 5
    d[i] = d[i] >> SHIFTS[1]


def places(out: Global[Int64]) -> None:
    i, j = global_id(0), global_id(1)
    place = j * global_size(0) + i
    out[place] = i + 10 * j + 100 * local_id(0) + 1000 * group_id(1) + 10000 * local_size(0)


def group_sums(x: Global[Float32], shared: Local[Float32], sums: Global[Float32]) -> None:
    lane = local_id(0)
    shared[lane] = x[global_id(0)]
    barrier()
    width = local_size(0) // 2
    while width > 0:
        if lane < width:
            shared[lane] += shared[lane + width]
        barrier()
        width //= 2
    if lane == 0:
        sums[group_id(0)] = shared[0]


def functions(x: Global[Float32], y: Global[Float32], n: Int64) -> None:
    i = global_id(0)
    value = x[i]
    y[i] = math.exp(value)
    y[n + i] = math.log(value)
    y[2 * n + i] = math.sin(value)
    y[3 * n + i] = math.cos(value)
    y[4 * n + i] = math.tanh(value)
    y[5 * n + i] = math.erf(value)
    y[6 * n + i] = math.sqrt(abs(value))
    y[7 * n + i] = math.pow(value, 1.5)


def loops(x: Global[Float32], y: Global[Float32], n: Int32) -> None:
    total = 0.0
    for k in range(1, n):
        if (k % 3 == 0 and not x[k] < 0) or k == 5:
            continue
        total += k * x[k]
    y[0] = total
    y[1] = math.inf if math.isnan(x[0]) else numpy.float32(n) / 4


@needs_compiler
class TestResults:
    def test_saxpy(self) -> None:
        x, y = torch.randn(1000), torch.randn(1000)
        a, b, c = (Bounded(v.double(), 0.0, torch.float32) for v in (torch.tensor(0.3), x, y))
        expected = Bounded(a.value.expand(1000), 0.0, torch.float32) * b + c
        RawKernel(saxpy)(1008, 16, (1000, 0.3, x, y))
        assert_within(y, expected.value, expected.error, "y")

    def test_16_bits(self) -> None:
        n = 300
        x, y, z = torch.randn(n), torch.randn(n).bfloat16(), torch.randn(n).half()
        a, b, c = (Bounded(v.double(), 0.0, torch.float32) for v in (x, y, z))
        i = torch.arange(n).double()
        helped = Bounded(x.double().clamp(-1, 1) * GAIN, 0.0, torch.float32)
        wanted_y = (a * 0.5 + b + Bounded(i, 0.0, torch.float32) + helped).stored(torch.bfloat16)
        wanted_z = (-c * 0.5 + a * a).stored(torch.float16)
        RawKernel(mixed)(64, 16, (n, x, y, z))
        assert_within(y, wanted_y.value, wanted_y.error, "y")
        assert_within(z, wanted_z.value, wanted_z.error, "z")

    def test_float64(self) -> None:
        x, y = torch.randn(50, dtype=torch.float64), torch.empty(50)
        expected = x * 0.1 - 3
        RawKernel(double)(50, None, (x, -3, y))
        assert_within(x, expected, 4 * unit_roundoff(torch.float64) * 10, "x")
        assert torch.equal(y, x.float())

    def test_integers(self) -> None:
        a = torch.tensor([7, -7, 9, 2**31 - 1], dtype=torch.int32)
        b = torch.tensor([2, 2, 0, -4], dtype=torch.int16)
        c = torch.tensor([1, 2, 128, 255], dtype=torch.uint8)
        d = torch.tensor([1, 5, 2**63, 2**64 - 1], dtype=torch.uint64)
        RawKernel(integers)(4, 1, (a, b, c, d))
        assert a.tolist() == [4, -3, 0, -536870912 - 1]
        assert c.tolist() == [7, 1, 5, 251]
        assert d.tolist() == [0, 1, 2**61, 2**62 - 1]

    def test_places(self) -> None:
        out = torch.empty(3, 4, dtype=torch.int64)
        RawKernel(places)((4, 3), (2, 1), (out,))
        i, j = torch.arange(4), torch.arange(3)[:, None]
        assert torch.equal(out, i + 10 * j + 100 * (i % 2) + 1000 * j + 20000)

    def test_local_memory_and_barrier(self) -> None:
        x, sums = torch.randint(-50, 50, (512,)).float(), torch.empty(8)
        RawKernel(group_sums)(512, 64, (x, LocalMemory(64 * 4), sums))
        assert torch.equal(sums, x.view(8, 64).sum(1))

    def test_functions_of_math(self) -> None:
        n = 200
        x, y = torch.rand(n) * 3 + 0.01, torch.empty(8, n)
        RawKernel(functions)(n, None, (x, y, n))
        wide = x.double()
        expected = {name: getattr(torch, name)(wide) for name in BUILTIN_ULPS if name != "pow"}
        expected["pow"] = wide**1.5
        for row, (name, right) in zip(y, expected.items()):
            allowed = 2 * unit_roundoff(torch.float32) * BUILTIN_ULPS[name] * right.abs()
            assert_within(row, right, allowed, name)

    def test_loops(self) -> None:
        x, y = torch.randint(-9, 9, (20,)).float(), torch.empty(2)
        RawKernel(loops)(1, 1, (x, y, 20))
        kept = [k for k in range(1, 20) if not ((k % 3 == 0 and not x[k] < 0) or k == 5)]
        assert y.tolist() == [sum(k * x[k].item() for k in kept), 5]

    def test_closure(self) -> None:
        def scaled(by: float) -> RawKernel:
            def scale(x: Global[Float32]) -> None:
                x[global_id(0)] *= by

            return RawKernel(scale)

        x = torch.ones(3)
        scaled(2.0)(3, None, (x,))
        scaled(0.5)(3, None, (x,))
        assert x.tolist() == [1, 1, 1]

    def test_global_changed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def write(x: Global[Float32]) -> None:
            x[global_id(0)] = GAIN

        x = torch.empty(1)
        RawKernel(write)(1, 1, (x,))
        assert x.item() == GAIN
        monkeypatch.setitem(globals(), "GAIN", 7.0)
        RawKernel(write)(1, 1, (x,))
        assert x.item() == 7


@needs_compiler
class TestModules:
    def test_signature(self) -> None:
        kernel = RawKernel(mixed)
        assert kernel.name == "mixed"
        assert [str(p) for p in kernel.signature] == ["i64 n", "const f32 *x", "bf16 *y", "f16 *z"]

    def test_deterministic(self) -> None:
        assert compile_python(mixed) == compile_python(mixed)
        copy = FunctionType(mixed.__code__, mixed.__globals__, "mixed")
        copy.__annotations__ = mixed.__annotations__
        assert identity(copy) == identity(mixed)
        assert len({identity(kernel) for kernel in (saxpy, mixed, double, loops)}) == 4

    def test_identity_follows_what_is_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = identity(mixed), identity(saxpy)
        monkeypatch.setitem(globals(), "GAIN", 0.5)  # which mixed uses through clipped
        assert identity(mixed) != before[0]
        assert identity(saxpy) == before[1]

    def test_the_packages_own_kernels_stay_the_same(self) -> None:
        """The package's kernels compile unchanged, though raw rules are registered for all."""
        from fusedoptim.kernels._compiler import compile_kernel

        compile_python(mixed)
        for kernel in (sgd.sgd_momentum, lamb.lamb_ratio):
            module = load_module(kernel.__name__, "f32")
            assert compile_kernel(kernel, "f32", module.name) == module.spirv

    @needs_gpu_compiler
    def test_gpus_take_them(self, tmp_path: Path) -> None:
        """GPUs take such kernels, even Arc without float64: literals and integers do not use it."""
        for kernel in (mixed, group_sums):
            (tmp_path / f"{kernel.__name__}.spv").write_bytes(compile_python(kernel))
        assert objections(tmp_path, tmp_path / "emulated.json") == []


def _kernel(source: str, **names: Any) -> Callable[..., None]:
    """A kernel that is hidden from type checkers."""
    namespace: dict[str, Any] = {**vars(language), "__name__": "kernels", "math": math, **names}
    exec(source, namespace)
    return next(value for name, value in namespace.items() if name.startswith("bad"))


def _with_number(number: float) -> dict[str, Callable[..., None]]:
    """Kernels that multiply by ``number``, which each has in another place."""
    constants, package = ModuleType("constants"), ModuleType("package")
    package.constants = constants  # type: ignore[attr-defined]
    constants.package = package  # type: ignore[attr-defined]
    constants.N, constants.T = number, (1, (number,))  # type: ignore[attr-defined]
    pair = collections.namedtuple("pair", "a b" if number == 77.5 else "b a")(77.5, 2.5)
    head = "def bad(x: Global[Float32]):"
    sources = {
        "lambda": f"{head} f = lambda v: v * {number}; x[0] = f(x[0])",
        "global of a lambda": f"{head} f = lambda v: v * N; x[0] = f(x[0])",
        "default of a lambda": f"{head} f = lambda v, k={number}: v * k; x[0] = f(x[0])",
        "lambda in a lambda": f"{head} f = lambda v: (lambda w: w * N)(v); x[0] = f(x[0])",
        "function": f"{head}\n def f(v):\n  return v * {number}\n x[0] = f(x[0])",
        "default": f"def f(v, k={number}): return v * k\n{head} x[0] = f(x[0])",
        "module": f"{head} x[0] *= package.constants.N",
        "tuple of a module": f"{head} x[0] *= package.constants.T[1][0]",
        "module of another name": f"{head} m = package.constants; x[0] *= m.N",
        "named tuple": f"{head} x[0] *= pair.a",
    }
    names = {"N": number, "package": package, "pair": pair}
    return {place: _kernel(source, **names) for place, source in sources.items()}


@needs_compiler
class TestNumbersFromElsewhere:
    @pytest.mark.parametrize("place", _with_number(2.5))
    def test_change(self, place: str) -> None:
        """A kernel with another number is another kernel, in one process and in the cache."""
        for number in (2.5, 77.5):
            x = torch.ones(1)
            RawKernel(_with_number(number)[place])(1, 1, (x,))
            assert x.item() == number

    @pytest.mark.parametrize("place", _with_number(2.5))
    def test_float32(self, place: str) -> None:
        module = read_module(compile_python(_with_number(0.1)[place]))
        assert FLOAT64 not in module.capabilities

    def test_constants_of_math(self) -> None:
        kernel = _kernel("def bad(x: Global[Float32]): x[0] = math.exp(x[0]) * math.pi")
        assert FLOAT64 not in read_module(compile_python(kernel)).capabilities
        x = torch.zeros(1)
        RawKernel(kernel)(1, 1, (x,))
        assert x.item() == numpy.float32(math.pi)

    def test_documented_functions_of_math(self) -> None:
        """All that the documentation names compile."""
        (listed,) = re.findall(r"``math`` that compile are: (.*?)\.\n", str(language.__doc__), re.S)
        names = re.sub(r"\(.*?\)", "", listed, flags=re.S).replace(",", " ").split()
        assert len(names) > 30
        of_two = ("atan2", "copysign", "fmod", "pow")
        terms = " + ".join(f"math.{name}(v{', v' * (name in of_two)})" for name in names)
        compile_python(_kernel(f"def bad(x: Global[Float32]): v = x[0]; x[0] = {terms}"))

    def test_members_of_an_enum(self) -> None:
        source = "def bad(x: Global[Float32]): x[0] = E.A.value"
        kernels = [
            _kernel(source, E=enum.IntEnum("E", {"A": value}, module=module))
            for value, module in [(2, "one"), (77, "one"), (2, "two")]
        ]
        assert identity(kernels[0]) != identity(kernels[1])
        assert identity(kernels[0]) == identity(kernels[2])

    def test_an_array_of_a_module(self) -> None:
        module = ModuleType("module")
        module.A = numpy.ones(1)  # type: ignore[attr-defined]
        with pytest.raises(TypeError, match="bad uses 'A', of type ndarray"):
            identity(_kernel("def bad(x: Global[Float32]): x[0] = module.A[0]", module=module))

    def test_only_what_is_used_of_each_module(self) -> None:
        def lazily(name: str) -> Any:
            raise ImportError(name) if name == "shift" else AttributeError(name)

        one, two = ModuleType("one"), ModuleType("two")
        vars(one).update(package=two, scale=2.0, __getattr__=lazily)
        vars(two).update(package=one, shift=5.0, scale=[1, 2, 3])
        for source in ("one.scale + two.shift", "two.package.scale + one.package.shift"):
            kernel = _kernel(f"def bad(x: Global[Float32]): x[0] = {source}", one=one, two=two)
            x = torch.zeros(1)
            RawKernel(kernel)(1, 1, (x,))
            assert x.item() == 7


@needs_compiler
class TestCompileErrors:
    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("def bad(x: Global[Float32]): x[0.5] = 1.0", "an index must be an integer"),
            ("def bad(x: Global[Float32]): x[0] = y[0]", "name 'y' is not defined"),
            ("def bad(x: Global[Float32]): x[0] = math.fsum(x)", "Unknown attribute 'fsum'"),
            ("def bad(x: Global[Float32]): return x[0]", "No conversion from float32 to none"),
        ],
    )
    def test_numbas_message(self, source: str, message: str) -> None:
        with pytest.raises(KernelCompileError, match=message) as caught:
            RawKernel(_kernel(source)).compile()
        assert str(caught.value).startswith("the kernel bad does not compile:\n")
        assert message in caught.value.log

    def test_line_is_shown(self) -> None:
        def wrong(x: Global[Float32]) -> None:
            x[0] = x + 1  # type: ignore[operator]

        with pytest.raises(KernelCompileError, match=r"(?s)test_python\.py.*x\[0\] = x \+ 1") as e:
            compile_python(wrong)
        assert "def wrong" in str(e.value)

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("def bad(x: Global[Float32]): assert x[0]", "bad contains raise or assert"),
            ("def bad(x: Global[Float32]): bad(x)", "bad calls itself"),
            ("def bad(x: Global[Float32]): print(x[0])", "bad uses print; of Python's built-ins"),
            ("def bad(x: Global[Float32]): x[0] = a[0]", "bad uses 'a', of type ndarray"),
        ],
    )
    def test_refused(self, source: str, message: str) -> None:
        for function in (compile_python, identity):
            with pytest.raises(TypeError, match=message):
                function(_kernel(source, a=numpy.ones(1)))

    def test_options(self) -> None:
        with pytest.raises(ValueError, match=r"takes no options, and got \['-O3'\]"):
            compile_python(saxpy, ["-O3"])


class TestSignatures:
    def test_arguments(self) -> None:
        assert [tuple(a) for a in arguments(mixed)] == [
            ("n", "i64", None),
            ("x", "f32", Global),
            ("y", "bf16", Global),
            ("z", "f16", Global),
        ]
        assert arguments(group_sums)[1].memory is Local

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("def bad(x): x[0] = 1", "argument 'x' has no type of fusedoptim.raw.language"),
            ("def bad(x: float): pass", "argument 'x' has no type.*Float32, Global"),
            ("def bad(item, x: Global[Float32]): pass", r"call global_id\(0\) for item.get_id\(0"),
            ("def bad(x: BFloat16): pass", "argument 'x' is a 16-bit number; make it a Float32"),
            ("def bad(x: Float32 = 1.0): pass", "argument 'x' has a default or no position"),
            ("def bad(*, x: Float32): pass", "argument 'x' has a default or no position"),
            ("def bad(x: 'Missing'): pass", "'Missing' is not defined.*import the types"),
            ("def bad(x: Float32) -> Float32: return x", "a kernel returns None"),
        ],
    )
    def test_refused(self, source: str, message: str) -> None:
        with pytest.raises(TypeError, match=message):
            arguments(_kernel(source))

    @pytest.mark.parametrize("function", [lambda x: None, len, torch.nn.Linear, "saxpy"])
    def test_no_function(self, function: Any) -> None:
        with pytest.raises(TypeError, match="a kernel is a function made with def"):
            compile_python(function)


def test_the_language_means_something_in_a_kernel_only() -> None:
    for name in ("global_id", "local_id", "group_id", "global_size", "local_size", "barrier"):
        with pytest.raises(RuntimeError, match=r"launch it with fusedoptim\.raw\.RawKernel"):
            getattr(language, name)()
    with pytest.raises(RuntimeError, match="only in a kernel"):
        Global[float]()[0]
    with pytest.raises(RuntimeError, match="only in a kernel"):
        Local[float]()[0] = 1.0


@needs_compiler
def test_numba_dpex_has_compiled_before() -> None:
    """numba-dpex copies what it knows of types when it first compiles."""
    done = run_script("""
        from fusedoptim.kernels import _compiler, sgd
        _compiler.compile_kernel(sgd.sgd, "f32", "sgd_f32")
        from fusedoptim.raw._python import compile_python
        from tests.fusedoptim.raw.test_python import saxpy
        assert compile_python(saxpy)
    """)
    assert done.stderr == ""


@pytest.mark.skipif(HAS_COMPILER, reason="the compiler is installed")
def test_compiler_missing() -> None:
    kernel = RawKernel(saxpy)
    with pytest.raises(ImportError, match=r"pip install '\.\[jit\]'.*fusedoptim aot build"):
        kernel(1, 1, (1, 1.0, torch.ones(1), torch.ones(1)))
    for function in (compile_python, identity):
        with pytest.raises(ImportError, match="numba-dpex is not installed"):
            function(saxpy)
