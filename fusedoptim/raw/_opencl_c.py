"""Compiles OpenCL C to SPIR-V, by the compiler inside the CPU driver.

The library exports one function, Compile, which github.com/intel/opencl-clang documents
(opencl_clang.h). Its result is a C++ object, whose functions are called through its table.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fusedoptim._warn import warn
from fusedoptim.allocator import load_opencl_compiler
from fusedoptim.raw._errors import KernelCompileError, KernelCompileWarning, class_of
from fusedoptim.raw._typedefs import answers, question, unknown_types, with_types

# Positions in the result's table of functions.
_SIZE, _BYTES, _LOG, _RELEASE = 0, 1, 4, 5
_VERSION = b"200"  # of OpenCL C, without a -cl-std; the compiler reports 1.2 in any case

# Extensions of today's devices. The driver refuses a kernel that uses one that its device lacks.
_EXTENSIONS = """
    cl_khr_fp64 cl_khr_fp16 cl_khr_byte_addressable_store cl_khr_3d_image_writes
    cl_khr_depth_images cl_khr_int64_base_atomics cl_khr_int64_extended_atomics
    cl_khr_global_int32_base_atomics cl_khr_global_int32_extended_atomics
    cl_khr_local_int32_base_atomics cl_khr_local_int32_extended_atomics cl_khr_subgroups
    cl_khr_subgroup_extended_types cl_khr_subgroup_ballot
    cl_khr_subgroup_non_uniform_arithmetic cl_khr_subgroup_clustered_reduce
    cl_khr_subgroup_shuffle cl_khr_subgroup_shuffle_relative cl_khr_subgroup_rotate
    cl_intel_subgroups cl_intel_subgroups_char cl_intel_subgroups_short cl_intel_subgroups_long
    cl_khr_integer_dot_product cl_khr_expect_assume cl_ext_float_atomics __opencl_c_fp64
    __opencl_c_int64 __opencl_c_images __opencl_c_3d_image_writes __opencl_c_read_write_images
    __opencl_c_generic_address_space __opencl_c_subgroups
    __opencl_c_work_group_collective_functions __opencl_c_program_scope_global_variables
    __opencl_c_atomic_order_acq_rel __opencl_c_atomic_order_seq_cst
    __opencl_c_atomic_scope_device __opencl_c_atomic_scope_all_devices
    __opencl_c_ext_fp32_global_atomic_add __opencl_c_ext_fp32_local_atomic_add
    __opencl_c_ext_fp64_global_atomic_add __opencl_c_ext_fp32_global_atomic_min_max
"""
# Extensions of SPIR-V that a kernel may use. The compiler ends the process if one is needed and
# missing here. With all of them enabled it would use some, such as untyped pointers, in every
# kernel; older drivers do not know those.
_SPIRV_EXTENSIONS = """
    SPV_INTEL_subgroups SPV_INTEL_media_block_io SPV_KHR_subgroup_rotate
    SPV_KHR_uniform_group_instructions SPV_KHR_integer_dot_product SPV_KHR_bit_instructions
    SPV_KHR_expect_assume SPV_KHR_shader_clock SPV_INTEL_split_barrier
    SPV_EXT_shader_atomic_float_add SPV_EXT_shader_atomic_float_min_max
    SPV_EXT_shader_atomic_float16_add SPV_INTEL_optnone SPV_INTEL_inline_assembly
    SPV_INTEL_arbitrary_precision_integers SPV_INTEL_bfloat16_conversion
    SPV_INTEL_variable_length_array SPV_INTEL_function_pointers
    SPV_INTEL_unstructured_loop_controls SPV_KHR_linkonce_odr
"""

# The options of OpenCL's specification: the compiler ignores options that it does not know.
DRIVER_OPTIONS = (
    "-cl-denorms-are-zero",
    "-cl-fp32-correctly-rounded-divide-sqrt",
    "-cl-opt-disable",
    "-cl-mad-enable",
    "-cl-no-signed-zeros",
    "-cl-unsafe-math-optimizations",
    "-cl-finite-math-only",
    "-cl-fast-relaxed-math",
    "-cl-no-subgroup-ifp",
)
"""Options that the driver takes too, when it compiles SPIR-V."""
_COMPILER_OPTIONS = ("-cl-single-precision-constant", "-cl-strict-aliasing", "-w", "-Werror")
_STANDARDS = ("CL1.0", "CL1.1", "CL1.2", "CL2.0", "CL3.0")

_NATIVE = ("exp", "log", "sin", "cos", "tan")
_FUNCTIONS = (*_NATIVE, "sqrt", "rsqrt", "pow", "tanh", "erf", "fabs", "fmax", "fmin", "floor")
"""Functions that CUDA has for float under the name with an f; the native ones also as intrinsics.
"""
_INSTEAD = {
    'extern "C"': 'nothing for extern "C"',
    "__global__": "kernel for __global__, and global float * for a float * of its parameters",
    "__device__": "nothing for __device__",
    "__shared__": "local for __shared__",
    "__constant__": "constant for __constant__",
    "__restrict__": "restrict for __restrict__",
    "__syncthreads": "barrier(CLK_LOCAL_MEM_FENCE) for __syncthreads()",
    "threadIdx": "get_local_id(0) for threadIdx.x",
    "blockIdx": "get_group_id(0) for blockIdx.x",
    "blockDim": "get_local_size(0) for blockDim.x",
    "gridDim": "get_num_groups(0) for gridDim.x",
    "atomicAdd": "atomic_add, of integers, for atomicAdd",
    "_ind.size()": "n for _ind.size()",
    **{f"{name}f": f"{name} for {name}f" for name in _FUNCTIONS},
    **{f"__{name}f": f"native_{name} for __{name}f" for name in _NATIVE},
}
"""What to write instead of words of CUDA and of CuPy's kernels."""

_lock = threading.RLock()  # a signal handler may compile in the middle


def check_options(options: Sequence[str]) -> tuple[str, ...]:
    """The options as a tuple; TypeError or ValueError if one is not an option of OpenCL C."""
    options = as_options(options)
    for option in options:
        _check_option(option)
    return options


def as_options(options: Sequence[str]) -> tuple[str, ...]:
    """``options`` as a tuple of strings; TypeError unless they are a sequence of strings."""
    if isinstance(options, str):
        raise TypeError(f"options={options!r} is one string; pass a tuple, ({options!r},)")
    options = tuple(options)
    for option in options:
        if not isinstance(option, str):
            raise TypeError(f"options={options!r}: {option!r} is not a string")
    return options


def _check_option(option: str) -> None:
    if '"' in option or "\n" in option:
        raise ValueError(f"the option {option!r} has a quote or a line break; #define it instead")
    if option.startswith("-D"):
        if re.match(r"-D\s*[A-Za-z_]\w*(=|$)", option) is None:
            raise ValueError(f"the option {option!r} defines no name; write '-DNAME=value'")
    elif option.startswith("-I"):
        if not Path(option[2:].strip()).is_dir() or not option[2:].strip():
            raise ValueError(f"the option {option!r} names no folder that exists")
    elif option.startswith("-cl-std="):
        if option.removeprefix("-cl-std=") not in _STANDARDS:
            raise ValueError(f"the option {option!r} is not one of {', '.join(_STANDARDS)}")
    elif option not in DRIVER_OPTIONS + _COMPILER_OPTIONS:
        known = ", ".join(("-D", "-I", "-cl-std=", *_COMPILER_OPTIONS, *DRIVER_OPTIONS))
        raise ValueError(f"OpenCL C has no option {option!r}; available: {known}")


def compile_opencl_c(source: str, options: Sequence[str] = ()) -> bytes:
    """Compile OpenCL C to SPIR-V, as version 1.2 unless an option names another.

    Raises:
        KernelCompileError: it does not compile; the message has the compiler's log.
        ValueError: an option is unknown.
        ImportError: the compiler is not installed.

    Example:
        >>> spirv = compile_opencl_c("kernel void f(global int *x) { x[get_global_id(0)] = N; }",
        ...                          ["-DN=4"])
        >>> hex(int.from_bytes(spirv[:4], "little"))
        '0x7230203'
    """
    if not isinstance(source, str):
        raise TypeError(f"source is {class_of(source)}; OpenCL C is a str")
    if "\0" in source:
        raise ValueError("source has a null character; OpenCL C is text")
    options = check_options(options)
    with _lock:
        status, spirv, log = _compile(source, ["-cl-kernel-arg-info", *options], _extra_options())
        if not status and (names := unknown_types(spirv)):
            spirv = with_types(spirv, _meanings(source, names, options))
    log = re.sub(r"^\d+:(?=\d+:\d+: )", "line ", log, flags=re.MULTILINE).rstrip()
    if status:
        reason = log or f"the compiler's status is {status}"
        raise KernelCompileError(
            f"the OpenCL C source does not compile:\n{reason}{_advice(source)}", log
        )
    if log:
        warn(f"the OpenCL C source compiles, with warnings:\n{log}", KernelCompileWarning)
    return spirv


def _meanings(source: str, names: Sequence[str], options: Sequence[str]) -> dict[str, str]:
    """The numbers and vectors that ``names`` stand for in ``source``."""
    asked = source + question(names)
    failed, answer, _ = _compile(asked, [*options, "-w"], _extra_options())
    if not failed:
        return answers(names, answer)
    if len(names) == 1:  # an image, or a struct that is only declared
        return {}
    alone = [_meanings(source, [name], options) for name in names]
    return {name: meaning for found in alone for name, meaning in found.items()}


def _advice(source: str) -> str:
    """What to write instead of words that CUDA and CuPy have and OpenCL C lacks."""
    found = [
        advice
        for word, advice in _INSTEAD.items()
        if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", source)
    ]
    return f"\nthis is OpenCL C, not CUDA C++: write {'; '.join(found)}" if found else ""


@functools.cache
def compiler_version() -> str:
    """The version of the package that contains the compiler."""
    return importlib.metadata.version("intel-opencl-rt")


@functools.cache
def _library() -> ctypes.CDLL:
    return load_opencl_compiler()


@functools.cache
def _extra_options() -> list[str]:
    """The compiler's options besides the user's."""
    common = [
        "-emit-spirv",
        "-D__IMAGE_SUPPORT__",
        "-cl-ext=-all,+" + ",+".join(_EXTENSIONS.split()),
    ]
    choice = "-spirv-ext=-all,+" + ",+".join(_SPIRV_EXTENSIONS.split())
    status, _, _ = _compile("", [], [*common, choice])
    return common if status else [*common, choice]  # the compiler of 2024 has no such option


def _compile(source: str, options: Sequence[str], extra: Sequence[str]) -> tuple[int, bytes, str]:
    """The compiler's status (zero is success), its SPIR-V, and its log."""
    result = ctypes.c_void_p()
    status = _library().Compile(
        ctypes.c_char_p(source.encode()),
        None,  # headers in memory: their texts, how many, and their names
        ctypes.c_uint(0),
        None,
        None,  # a precompiled header and its size
        ctypes.c_size_t(0),
        ctypes.c_char_p(" ".join(map(_quoted, options)).encode()),
        ctypes.c_char_p(" ".join(extra).encode()),
        ctypes.c_char_p(_VERSION),
        ctypes.byref(result),
    )
    if not result:
        return status or -1, b"", ""
    try:
        spirv = ctypes.string_at(
            _call(result, _BYTES, ctypes.c_void_p), _call(result, _SIZE, ctypes.c_size_t)
        )
        log = _call(result, _LOG, ctypes.c_char_p) or b""
        return status, spirv, log.decode(errors="replace")
    finally:
        _call(result, _RELEASE, None)


def _quoted(option: str) -> str:
    return f'"{option}"' if re.search(r"\s", option) else option


def _call(result: ctypes.c_void_p, place: int, restype: Any) -> Any:
    """Call a function of a C++ object by its position in the table."""
    table = ctypes.cast(result, ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p)))[0]
    return ctypes.CFUNCTYPE(restype, ctypes.c_void_p)(table[place])(result)
