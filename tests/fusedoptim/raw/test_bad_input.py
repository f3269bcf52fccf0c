"""Bad input is refused before anything is launched, and messages name the cure."""

from __future__ import annotations

import re
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from fusedoptim import allocator
from fusedoptim.raw import (
    ElementwiseKernel,
    InvalidModuleError,
    KernelCompileError,
    KernelCompileWarning,
    LocalMemory,
    RawKernel,
    RawModule,
    _opencl_c,
    kernel,
)
from fusedoptim.raw._build import check_capabilities
from fusedoptim.raw._opencl_c import compile_opencl_c
from fusedoptim.raw._spirv import read_module, read_signatures
from tests.fusedoptim.helpers import nested_tensor

F32, F64 = torch.float32, torch.float64


def on_meta() -> torch.Tensor:
    return torch.zeros(4, device="meta")


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (4,))

    __torch_dispatch__ = classmethod(lambda cls, *args, **kwargs: None)


def sparse_csr() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # CSR tensors are in beta
        return torch.zeros(4, 4).to_sparse_csr()


class Plain(torch.Tensor):
    pass


def released() -> Any:
    memory = allocator.Pool("cpu").allocate(16)
    memory.release()
    return memory


def nested() -> torch.Tensor:
    return nested_tensor(torch.ones(2), torch.ones(3))


X = "saxpy: argument 2, 'const f32 *x': "
REFUSED_POINTERS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "dtype": (lambda: torch.zeros(4, dtype=F64), TypeError, "dtype is torch.float64, and the"),
    "bfloat16": (lambda: torch.zeros(4, dtype=torch.bfloat16), TypeError, "reads float32"),
    "complex": (lambda: torch.zeros(4, dtype=torch.complex64), TypeError, "torch.view_as_real"),
    "numpy dtype": (lambda: np.zeros(4), TypeError, "dtype is float64, and the kernel reads"),
    "byte order": (lambda: np.zeros(4, ">f4"), TypeError, "dtype is >f4"),
    "strided": (lambda: torch.zeros(8)[::2], ValueError, "strides (2,) is not contiguous"),
    "transposed": (lambda: torch.zeros(2, 3).t(), ValueError, "value.contiguous()"),
    "masked": (lambda: np.ma.zeros(4, "f4"), TypeError, "a masked array"),
    "numpy strides": (lambda: np.zeros(8, "f4")[::2], ValueError, "numpy.ascontiguousarray"),
    "negative bit": (lambda: torch._neg_view(torch.zeros(4)), ValueError, "resolve_neg()"),
    "sparse": (lambda: torch.zeros(4).to_sparse(), ValueError, "layout is torch.sparse_coo"),
    "csr": (sparse_csr, ValueError, "layout is torch.sparse_csr"),
    "nested": (nested, TypeError, "a nested tensor, which has no strides; pass each of its .unb"),
    "meta": (on_meta, RuntimeError, "is on meta, which SYCL does not serve"),
    "wrapper": (Wrapper, TypeError, "a Wrapper has no memory of its own"),
    "list": (lambda: [1.0, 2.0], TypeError, "list [1.0, 2.0], where a torch tensor"),
    "integer": (lambda: 12345, TypeError, "int 12345, where a torch tensor"),
    "released": (released, RuntimeError, "was released"),
}


def test_nested_tensors(module: RawModule) -> None:
    """They are refused after calls with other tensors too: torch would end the process."""
    twice, x = ElementwiseKernel("T x", "T y", "y = 2 * x", "twice"), torch.ones(4)
    for _ in range(2):
        twice(x), twice(x, torch.ones(4)), module["saxpy"](4, None, (4, 1, x, torch.zeros(4)))
    text = "argument 'x' is a nested tensor, which has no strides"
    with pytest.raises(TypeError, match=text):
        twice(nested())
    with pytest.raises(TypeError, match=text.replace("x", "y", 1)):
        twice(x, nested())
    with pytest.raises(TypeError, match="argument 3, 'f32 \\*y': a nested tensor, which has no"):
        module["saxpy"](4, None, (4, 1, x, nested()))


@pytest.mark.parametrize("case", list(REFUSED_POINTERS))
def test_pointers(module: RawModule, case: str) -> None:
    make, error, text = REFUSED_POINTERS[case]
    y = torch.zeros(4)
    with pytest.raises(Exception, match=re.escape(text)) as raised:
        module["saxpy"](4, None, (4, 1, make(), y))
    assert isinstance(raised.value, error | BufferError)
    assert str(raised.value).startswith(X)


TYPED = {
    "e": torch.float16,
    "f": F32,
    "d": F64,
    "h": torch.int16,
    "H": torch.uint16,
    "i": torch.int32,
    "Q": torch.uint64,
    "b": torch.int8,
    "pair": torch.complex64,
    "four": F32,
    "record": torch.uint8,
}
ALSO = {"H": [torch.bfloat16], "pair": [F32], "b": [torch.bool, F64], "record": [F64]}
EVERY = [F32, F64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16]
EVERY += [torch.uint16, torch.int32, torch.int64, torch.uint64, torch.bool, torch.complex64]


@pytest.mark.parametrize("name", list(TYPED))
def test_dtypes_of_pointers(module: RawModule, name: str) -> None:
    typed = module["typed"]
    given = {key: torch.zeros(16, dtype=dtype) for key, dtype in TYPED.items()}
    takes_all = name in ("b", "record")
    for dtype in EVERY:
        arguments = [*(given | {name: torch.zeros(16, dtype=dtype)}).values()]
        if takes_all or dtype == TYPED[name] or dtype in ALSO.get(name, []):
            typed(1, None, arguments)
        else:
            with pytest.raises(TypeError, match=rf"typed: argument \d+, '\w+ \*{name}': its dtype"):
                typed(1, None, arguments)


def test_misaligned_vectors(module: RawModule) -> None:
    given = {key: torch.zeros(16, dtype=dtype) for key, dtype in TYPED.items()}
    shift = next(i for i in range(5) if given["four"][i:].data_ptr() % 16)
    for _ in range(2):
        with pytest.raises(ValueError, match="is not a multiple of 16, the size of f32x4"):
            module["typed"](1, None, [*(given | {"four": given["four"][shift:]}).values()])
        module["typed"](1, None, [*given.values()])


SCALARS = [
    (1, 128, OverflowError, "'i8 b': 128 is not in int8's range, -128 to 127"),
    (2, -1, OverflowError, "'u8 B': -1 is not in uint8's range, 0 to 255"),
    (5, 2**31, OverflowError, "'i32 i': 2147483648 is not in int32's range"),
    (8, 2**64, OverflowError, "not in uint64's range"),
    (5, 1.0, TypeError, "'i32 i': the float 1.0, where int32 is expected; pass int(value)"),
    (5, np.float32(1), TypeError, "where int32 is expected"),
    (
        5,
        np.int64(1),
        TypeError,
        "a numpy int64, where int32 is expected; pass int(value) or numpy.",
    ),
    (5, np.bool_(True), TypeError, "where int32 is expected"),
    (5, torch.tensor(1), TypeError, "a tensor of shape (); pass value.item(), where int32"),
    (5, None, TypeError, "None, which only a pointer may be"),
    (5, "1", TypeError, "str '1', where int32 is expected"),
    (9, 65520.0, OverflowError, "'f16 e': 65520.0 is larger than any half"),
    (10, 1e39, OverflowError, "'f32 f': 1e+39 is larger than any float"),
    (10, 10**400, OverflowError, "int too large to convert to float"),
    (10, np.float64(1), TypeError, "a numpy float64, where float32 is expected; pass float(value)"),
    (10, 1j, TypeError, "complex 1j, where float32 is expected"),
    (11, torch.ones(3), TypeError, "a tensor of shape (3,), where float64 is expected"),
]


@pytest.mark.parametrize(("place", "value", "error", "text"), SCALARS)
def test_scalars(module: RawModule, place: int, value: Any, error: Any, text: str) -> None:
    out = torch.zeros(11, dtype=F64)
    arguments = [out, *[0] * 8, 0.0, 0.0, 0.0]
    arguments[place] = value
    with pytest.raises(error, match=re.escape(text)) as raised:
        module["scalars"](1, 1, arguments)
    assert str(raised.value).startswith(f"scalars: argument {place}, ")


def test_largest_float_that_rounds_to_it(module: RawModule) -> None:
    out = torch.zeros(11, dtype=F64)
    module["scalars"](1, 1, [out, *[0] * 8, 65504.0, 3.4028234663852886e38, 1e308])
    assert out[8:].tolist() == [65504.0, 3.4028234663852886e38, 1e308]


def test_vectors_structs_and_local_memory(module: RawModule) -> None:
    out = torch.zeros(5, dtype=F64)
    for value, error, text in [
        ((1, 2, 3), ValueError, "3 numbers, where 2 are expected"),
        ((1, 200), OverflowError, "200 is not in int8's range"),
        (b"abc", ValueError, "a value of 3 bytes, where 2 are expected"),
        (7, TypeError, "a tuple of 2 numbers, or bytes"),
        (np.array([1, 2], "u1"), TypeError, "a numpy uint8, where int8 is expected"),
    ]:
        with pytest.raises(error, match=text):
            module["vectors"](1, 1, (out, value, (1, 2)))
    with pytest.raises(TypeError, match="bytes, a numpy or a ctypes value of 16 bytes"):
        module["wide"](1, 1, (out, (1, 2, 3, 4), (1, 2, 3), (7, 8)))
    x = torch.zeros(8)
    with pytest.raises(TypeError, match=r"memory of the work-group is expected; pass LocalMemory"):
        module["reversed"](8, 8, (x, x))
    with pytest.raises(ValueError, match="LocalMemory of 1,073,741,824 bytes in all"):
        module["reversed"](8, 8, (x, LocalMemory(1 << 30)))
    with pytest.raises(TypeError, match=r"nbytes=1.5 is not an integer"):
        LocalMemory(1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nbytes=0 is not positive"):
        LocalMemory(0)
    with pytest.raises(TypeError, match="images, samplers and pipes cannot be passed"):
        module["image"](1, 1, (x, torch.zeros(1, dtype=torch.int32)))


def test_count_and_kind_of_arguments(module: RawModule) -> None:
    x = torch.zeros(4)
    count = r"saxpy takes 4 arguments \(u64 n, f32 a, const f32 \*x, f32 \*y\), and 3 were given"
    with pytest.raises(TypeError, match=count):
        module["saxpy"](4, None, (4, 1, x))
    with pytest.raises(TypeError, match="saxpy: args is a Tensor; pass a tuple"):
        module["saxpy"](4, None, x)  # type: ignore[arg-type]
    module["copy"](0, None, (None, None))


def test_subclass_with_memory_of_its_own(module: RawModule) -> None:
    y = torch.zeros(4).as_subclass(Plain)
    module["saxpy"](4, None, (4, 1, torch.ones(4), y))
    assert (y == 1).all()


SIZES: list[tuple[Any, Any, type[Exception], str]] = [
    (-1, None, ValueError, "global_size=(-1,) has a negative number"),
    (1.0, None, TypeError, "global_size=1.0 is neither an integer nor a sequence"),
    ((4, 1.0), None, TypeError, "global_size=(4, 1.0) is neither"),
    ("4", None, TypeError, "global_size='4' is neither"),
    ((), None, ValueError, "has 0 dimensions; pass 1 to 3"),
    ((1, 1, 1, 1), None, ValueError, "has 4 dimensions"),
    (2**31, None, ValueError, "2,147,483,648 work items, and a launch in SYCL has fewer"),
    ((2**16, 2**15), None, ValueError, "fewer than 2**31"),
    (2**70, 16, ValueError, "fewer than 2**31"),
    (16, 0, ValueError, "local_size=(0,) has a number below 1; None lets"),
    (16, -2, ValueError, "below 1"),
    (16, (4, 1), ValueError, "and global_size=(16,) differ in their dimensions"),
    (17, 16, ValueError, "global_size=(17,) is not a multiple of local_size=(16,); launch (32,)"),
    (4, 256, ValueError, "counts work items: (4,) groups are global_size=(1024,)"),
    ((2**20, 1), (2**20, 1), ValueError, "allows at most (8192, 8192)"),
    ((8192, 8192), (8192, 8192), ValueError, "are 67108864 work items, and"),
]


@pytest.mark.parametrize(("items", "group", "error", "text"), SIZES)
def test_sizes(module: RawModule, items: Any, group: Any, error: Any, text: str) -> None:
    x = torch.zeros(4)
    module["saxpy"](1, 1, (0, 1, x, x))  # sizes that are remembered
    with pytest.raises(error, match=re.escape(text)):
        module["saxpy"](items, group, (0, 1, x, x))


def test_sizes_of_nothing(module: RawModule) -> None:
    y = torch.zeros(4)
    for items in [0, (4, 0), (0, 4, 4)]:
        module["saxpy"](items, None, (4, 1, torch.ones(4), y))
    module["saxpy"](0, 16, (4, 1, torch.ones(4), y))
    assert not y.any()


def test_more_local_memory_than_there_is() -> None:
    source = """kernel void f(global float *x) {
        local float much[1 << 22];
        much[get_local_id(0)] = 1; barrier(CLK_LOCAL_MEM_FENCE); x[get_global_id(0)] = much[0];
    }"""
    with pytest.raises(RuntimeError, match=r"f: the driver of .* refused the launch"):
        RawKernel(source)(16, 16, (torch.zeros(16),))


def test_more_local_memory_than_a_number_can_tell(module: RawModule) -> None:
    for nbytes in (2**63, 2**70):
        with pytest.raises(ValueError, match=r"reversed: argument 1, .* than any device has"):
            module["reversed"](8, 8, (torch.zeros(8), LocalMemory(nbytes)))


def test_host_memory_where_the_device_cannot_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gpu:
        """A GPU, and nothing else that a kind of device may ask for."""

        name = "A"

        def __getattr__(self, question: str) -> bool:
            return question == "is_gpu"

    elsewhere = mock.Mock(sycl_device=Gpu())
    monkeypatch.setattr(kernel, "named_queue", lambda name: elsewhere)
    text = r"f: argument 0 is in the host's memory, which A \(device='gpu'\) cannot read"
    with pytest.raises(RuntimeError, match=text):
        RawKernel("kernel void f(global int *x) {}", device="gpu")(
            1, 1, (torch.zeros(1, dtype=torch.int32),)
        )


def test_sources(tmp_path: Path) -> None:
    (tmp_path / "latin.cl").write_bytes("// é".encode("latin-1"))
    for source, error, text in [
        ("kernels/f.cl", ValueError, "looks like a file's name; pass pathlib.Path"),
        (5, TypeError, "source is an int; pass OpenCL C text, SPIR-V bytes"),
        (tmp_path / "latin.cl", ValueError, "latin.cl is not UTF-8 text"),
        (tmp_path / "f.txt", ValueError, "is neither a .cl nor a .spv file"),
        (tmp_path / "none.cl", FileNotFoundError, "none.cl"),
    ]:
        with pytest.raises(error, match=text):
            RawKernel(source, "f")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="device=5 is neither a SYCL filter string nor a"):
        RawKernel("kernel void f() {}", device=5)
    with pytest.raises(allocator.DeviceNotFoundError, match="cuda"):
        RawKernel("kernel void f() {}", device="cuda")(1, 1, ())


def test_cuda_source() -> None:
    source = """extern "C" __global__ void f(const float *x, float *y, int n) {
        int i = blockDim.x * blockIdx.x + threadIdx.x;
        if (i < n) y[i] = sqrtf(__expf(x[i]));
    }"""
    with pytest.raises(KernelCompileError, match=r"this is OpenCL C, not CUDA C\+\+: ") as raised:
        RawKernel(source, "f").compile()
    for advice in (
        "kernel for __global__, and global float *",
        'nothing for extern "C"',
        "get_local_id(0) for threadIdx.x",
        "get_group_id(0) for blockIdx.x",
        "get_local_size(0) for blockDim.x",
        "sqrt for sqrtf",
        "native_exp for __expf",
    ):
        assert advice in str(raised.value)
    assert "CUDA" not in raised.value.log
    with pytest.raises(KernelCompileError) as raised:
        RawKernel("kernel void f(global float *x) { x[0] = y; }").compile()
    assert "CUDA" not in str(raised.value)


def test_compile_errors_show_the_line() -> None:
    source = "kernel void f(global float *x) {\n    x[0] = y;\n}"
    broken = RawKernel(source, "f")
    with pytest.raises(KernelCompileError, match="undeclared identifier 'y'") as raised:
        broken(1, 1, (torch.zeros(1),))
    assert "line 2:12: error" in str(raised.value)
    assert "    2 |     x[0] = y;" in raised.value.log
    with pytest.raises(KernelCompileError, match="Symbols not found: \\[ g \\]") as raised:
        RawKernel("float g(float); kernel void f(global float *x) { x[0] = g(1); }").compile()
    assert "Failed to build device program" in raised.value.log


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("the OpenCL C compiler is not installed: pip install intel-opencl-rt")

    monkeypatch.setattr(_opencl_c, "_library", missing)
    with pytest.raises(ImportError, match="pip install intel-opencl-rt"):
        RawKernel("kernel void without_a_compiler() {}").compile()
    monkeypatch.undo()
    monkeypatch.setattr("allocator.runtime.libraries._installed_file", lambda *names: None)
    with pytest.raises(ImportError, match="pip install intel-opencl-rt"):
        allocator.load_opencl_compiler()


def test_compile_warnings_are_shown() -> None:
    source = "#warning twice\nkernel void f() {}"
    with pytest.warns(KernelCompileWarning, match="line 1:2: warning: twice"):
        RawKernel(source).compile()
    RawKernel(source + "\n", options=["-w"]).compile()
    with pytest.raises(KernelCompileError, match="twice"):
        RawKernel(source, options=["-Werror"]).compile()


OPTIONS: list[tuple[Any, type[Exception], str]] = [
    ("-DN=1", TypeError, "options='-DN=1' is one string; pass a tuple"),
    ((5,), TypeError, "5 is not a string"),
    (("-fast",), ValueError, "OpenCL C has no option '-fast'; available: -D, -I"),
    (("-O3",), ValueError, "OpenCL C has no option '-O3'"),
    (("-D",), ValueError, "defines no name"),
    (("-D1=2",), ValueError, "defines no name"),
    (('-DN="a"',), ValueError, "has a quote or a line break"),
    (("-I/nowhere/at/all",), ValueError, "names no folder that exists"),
    (("-cl-std=CL9.0",), ValueError, "is not one of CL1.0, CL1.1, CL1.2, CL2.0, CL3.0"),
]


@pytest.mark.parametrize(("options", "error", "text"), OPTIONS)
def test_options(options: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        RawKernel("kernel void f() {}", "f", options)


def test_options_that_work(module: RawModule) -> None:
    source = "kernel void f(global int *x) { x[0] = N; x[1] = __OPENCL_C_VERSION__; }"
    for standard in ("CL1.2", "CL2.0", "CL3.0"):
        x = torch.zeros(2, dtype=torch.int32)
        options = ("-DN=3 + 4", f"-cl-std={standard}", "-cl-fast-relaxed-math")
        RawKernel(source, "f", options)(1, 1, (x,))
        assert x.tolist() == [7, int(float(standard[2:]) * 100)]
    with pytest.raises(ValueError, match="from SPIR-V has no option '-DN=1'; available: -cl-den"):
        RawModule(module.spirv, ("-DN=1",))
    with pytest.raises(ValueError, match="the module already has its own"):
        RawKernel(module, "saxpy", ("-DN=1",))


def test_names(module: RawModule) -> None:
    with pytest.raises(KeyError, match="has no kernel 'f'; available: saxpy, copy, where"):
        module.get_function("f")
    with pytest.raises(KeyError, match="the SPIR-V has no kernel 'g'; available: saxpy"):
        RawKernel(module.spirv, "g").compile()
    with pytest.raises(ValueError, match="name=None, but there are several kernels: saxpy, copy"):
        RawKernel(module.spirv).compile()


def swapped(spirv: bytes) -> bytes:
    words = np.frombuffer(spirv, np.uint32)
    return words.byteswap().tobytes()


MODULES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda spirv: b"", "0 bytes are not a SPIR-V module"),
    "short": (lambda spirv: spirv[:10], "10 bytes are not a SPIR-V module"),
    "text": (lambda spirv: b"kernel void f() {} //...", "are not SPIR-V's magic number"),
    "no whole word": (lambda spirv: spirv[:-1], "truncated or of another kind"),
    "within an instruction": (lambda spirv: spirv[:-6] + b"\0\0", "is truncated or damaged"),
    "without its end": (lambda spirv: spirv[:-4], "its last function has no end"),
    "header alone": (lambda spirv: spirv[:20], "has no kernel"),
    "swapped": (swapped, "is in big-endian byte order"),
    "zeros": (lambda spirv: spirv[:20] + bytes(40), "is truncated or damaged"),
    "no kernel": (
        lambda spirv: compile_opencl_c("int f(int x) { return x; }"),
        "has no kernel .*; in OpenCL C, .* `kernel void`",
    ),
}


@pytest.mark.parametrize("case", list(MODULES))
def test_damaged_modules(module: RawModule, case: str) -> None:
    damage, text = MODULES[case]
    with pytest.raises(InvalidModuleError, match=text):
        RawModule(damage(module.spirv)).names  # noqa: B018 (compiles)


def test_module_cut_anywhere(module: RawModule) -> None:
    """A file that is cut anywhere is refused by us, not by a driver."""
    spirv = compile_opencl_c("kernel void f(global float *x, int n) { x[n] = n; }")
    for end in range(0, len(spirv), 4):
        with pytest.raises(InvalidModuleError):
            read_signatures(spirv[:end])


ATOMICS = "#pragma OPENCL EXTENSION cl_khr_int64_base_atomics : enable\n"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("kernel void f(global double *x) { x[0] *= 2; }", "float64 arithmetic, which A lacks"),
        (
            "kernel void f(global long *x) { atom_inc(x); }",
            "64-bit atomics, which A lacks",
        ),
    ],
)
def test_what_a_device_lacks(source: str, text: str) -> None:
    lacking = dict.fromkeys(("has_aspect_fp16", "has_aspect_fp64", "has_aspect_atomic64"), False)
    device = types.SimpleNamespace(name="A", **lacking)
    with pytest.raises(InvalidModuleError, match=text):
        check_capabilities(read_module(compile_opencl_c(ATOMICS + source)), device)
