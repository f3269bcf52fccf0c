"""Names that OpenCL C gives to types: tensors are checked against the types that they stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fusedoptim.raw import RawKernel

TYPES = {
    "real": "f32",
    "other": "f32",
    "index": "u32",
    "size_t": "u64",
    "ptrdiff_t": "i64",
    "byte": "u8",
    "fixed": "i32",
    "vec": "f32x8",
    "triple": "f64x3",
    "half_": "f16",
    "MACRO": "f32",
    # No one type of tensor fits these, and an address of any alignment fits "loose".
    "Record": "void",
    "Kind": "void",
    "four": "void",
    "loose": "void",
}
SOURCE = """
#define MACRO float
typedef float real; typedef real other; typedef unsigned int index; typedef uchar byte;
typedef const volatile int fixed; typedef float8 vec; typedef half half_;
typedef double triple __attribute__((ext_vector_type(3)));
typedef struct { int a; float b; } Record; typedef enum { A, B } Kind; typedef int four[4];
typedef float8 loose __attribute__((aligned(4)));
"""


@pytest.mark.parametrize("options", [(), ("-Werror",), ("-cl-std=CL2.0",)])
def test_what_a_name_stands_for(options: tuple[str, ...]) -> None:
    parameters = ", ".join(f"global {name} *x_{name}" for name in TYPES)
    kernel = RawKernel(f"{SOURCE}kernel void f({parameters}) {{}} // the end", options=options)
    found = {str(p.name): p.dtype or "void" for p in kernel.signature}
    assert found == {f"x_{name}": dtype for name, dtype in TYPES.items()}


def test_values_and_local_memory() -> None:
    kernel = RawKernel(
        f"{SOURCE}kernel void f(index i, real a, vec v, Record r, local other *shared) {{}}"
    )
    text = ["u32 i", "f32 a", "f32x8 v", "struct of 8 bytes r", "local f32 *shared"]
    assert list(map(str, kernel.signature)) == text
    assert RawKernel(kernel.spirv).signature == kernel.signature


@pytest.mark.parametrize(
    ("before", "parameter", "after"),
    [
        ("typedef struct tree tree;", "global tree *t", ""),  # never defined
        ("", "read_only image2d_t t", ""),
        ("", "global int *t", "#define char int\n#define global __global\n#define real double"),
    ],
)
def test_others_that_cannot_be_asked(before: str, parameter: str, after: str) -> None:
    kernel = RawKernel(
        f"typedef float real; {before}\n"
        f"kernel void f(global real *x, {parameter}) {{ x[0] = 1; }}\n{after}"
    )
    assert kernel.signature[0].dtype == "f32"
    with pytest.raises(TypeError, match=r"argument 0, 'f32 \*x': its dtype is torch.float64"):
        kernel(1, 1, (torch.zeros(4, dtype=torch.float64), torch.zeros(4)))


def test_a_name_of_an_included_file(tmp_path: Path) -> None:
    (tmp_path / "real.h").write_text("typedef float real;")
    for text in ('#include "real.h"', "#define HEADER <real.h>\n#include HEADER"):
        source = f"{text}\nkernel void f(global real *x) {{ x[0] = 1; }}"
        kernel = RawKernel(source, options=(f"-I{tmp_path}",))
        with pytest.raises(TypeError, match=r"argument 0, 'f32 \*x': its dtype is torch.float64"):
            kernel(1, 1, (torch.zeros(4, dtype=torch.float64),))


def test_refused() -> None:
    kernel = RawKernel(
        f"{SOURCE}kernel void f(global real *x, global vec *v, global size_t *n, index i)"
        "{ x[0] = i + n[0] + v[0].s0; }"
    )
    x, v, n = torch.zeros(1), torch.zeros(32), torch.zeros(1, dtype=torch.uint64)
    shift = next(k for k in range(9) if v[k:].data_ptr() % 32)
    with pytest.raises(TypeError, match=r"argument 0, 'f32 \*x': its dtype is torch.float64"):
        kernel(1, 1, (x.double(), v, n, 0))
    with pytest.raises(ValueError, match=r"argument 1, .* multiple of 32, the size of f32x8"):
        kernel(1, 1, (x, v[shift:], n, 0))
    with pytest.raises(TypeError, match=r"argument 2, 'u64 \*n': its dtype is torch.int32"):
        kernel(1, 1, (x, v, n.int(), 0))
    with pytest.raises(OverflowError, match=r"argument 3, 'u32 i': -1 is not in uint32's range"):
        kernel(1, 1, (x, v, n, -1))
    assert x.item() == 0
