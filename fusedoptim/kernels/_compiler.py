"""From a kernel, a plain Python function, to a SPIR-V module, through numba-dpex.

Needs the ``[jit]`` extra. :func:`compile_kernel` is deterministic: the same source and tool
versions give the same bytes, which ``make kernels-verify`` holds against the committed ones.
"""

from __future__ import annotations

import inspect
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

from fusedoptim._modules import Argument
from fusedoptim.allocator import load_compiler
from fusedoptim.kernels.language import Role

load_compiler()  # numba-dpex's wheels cannot find their own libraries

import dpcpp_llvm_spirv  # noqa: E402
import llvmlite.binding as llvm  # noqa: E402
from numba.core import types  # noqa: E402
from numba.core.compiler_lock import global_compiler_lock  # noqa: E402
from numba.core.target_extension import target_override  # noqa: E402
from numba_dpex import device_func  # noqa: E402
from numba_dpex.kernel_api_impl.spirv.dispatcher import SPIRVKernelDispatcher  # noqa: E402
from numba_dpex.kernel_api_impl.spirv.target import (  # noqa: E402
    SPIRV_TARGET_NAME,
    CompilationMode,
)

from fusedoptim.kernels import _lowering  # noqa: E402

WORD = 8  # bytes of one value in a launch block
_SPIRV_VERSION = "--spirv-max-version=1.0"  # what OpenCL 2.1 takes, so every driver
_INLINE_THRESHOLD = 2  # of 0 to 3; from 1 on, every call in a kernel is inlined


def arguments(kernel: Callable[..., None]) -> list[Argument]:
    """The kernel's arguments in order, read from its annotations.

    Raises:
        TypeError: an argument is not annotated with a type of ``fusedoptim.kernels.language``.
    """
    hints = get_type_hints(kernel, include_extras=True)
    found = []
    for name in inspect.signature(kernel).parameters:
        roles = [m for m in getattr(hints.get(name), "__metadata__", ()) if isinstance(m, Role)]
        if not roles:
            raise TypeError(
                f"{kernel.__name__}: argument {name!r} has no type of fusedoptim.kernels.language; "
                "annotate it with Length, Storage, State, RowFlag, Scalar or Flag"
            )
        found.append(Argument(name, roles[0]))
    return found


def _numba_type(role: Role, dtype: str) -> types.Type:
    wide = "f64" if dtype == "f64" else "f32"
    if role is Role.STORAGE:
        return _lowering.Pointer(dtype)
    if role is Role.STATE:
        return _lowering.Pointer(wide)
    if role is Role.SCALAR:
        return types.float64 if wide == "f64" else types.float32
    return types.int64


def _entry_point(kernel: Callable[..., None], dtype: str) -> Callable[[int], None]:
    """A function of the launch block's address that reads the arguments and calls ``kernel``."""
    args = arguments(kernel)
    namespace: dict[str, Any] = {"kernel": device_func(kernel), "group": _lowering.group}
    in_row = [arg.name for arg in args if arg.role.in_row]
    of_launch = [arg.name for arg in args if not arg.role.in_row]
    values = []
    for arg in args:
        namespace[f"read_{arg.name}"] = _lowering.argument_reader(_numba_type(arg.role, dtype))
        if arg.role.in_row:
            values.append(f"read_{arg.name}(row + {WORD * in_row.index(arg.name)})")
        else:
            values.append(f"read_{arg.name}(block + {WORD * of_launch.index(arg.name)})")
    source = (
        "def entry_point(block):\n"
        f"    row = block + {WORD * len(of_launch)} + group() * {WORD * len(in_row)}\n"
        f"    kernel({', '.join(values)})\n"
    )
    exec(source, namespace)
    entry_point: Callable[[int], None] = namespace["entry_point"]
    return entry_point


@global_compiler_lock  # type: ignore[untyped-decorator]
def _llvm_module(entry_point: Callable[[int], None], name: str) -> Any:
    """The optimized LLVM module of one kernel, whose only visible symbol is ``name``."""
    options = {
        "_compilation_mode": CompilationMode.KERNEL,
        "inline_threshold": _INLINE_THRESHOLD,
    }
    dispatcher = SPIRVKernelDispatcher(entry_point, targetoptions=options)
    with target_override(SPIRV_TARGET_NAME):
        compiled = dispatcher._compiler._compile_core((types.int64,), types.void)
    library = compiled.library
    function = library.get_function(compiled.fndesc.llvm_func_name)
    wrapper = compiled.target_context.prepare_spir_kernel(function, compiled.fndesc.argtypes)
    library.inline_threshold = _INLINE_THRESHOLD
    library.finalize()

    module = llvm.parse_assembly(str(library.final_module))
    # A NumbaEnv global is left that spirv-val rejects and Intel's GPU compiler aborts on.
    for variable in module.global_variables:
        variable.linkage = "internal"
    for definition in module.functions:
        if definition.name == wrapper.name:
            definition.name = name
        elif not definition.is_declaration:
            definition.linkage = "internal"
    passes = llvm.ModulePassManager()
    passes.add_global_dce_pass()
    passes.add_strip_symbols_pass()  # names hold a counter: two builds would differ
    passes.run(module)
    return module


def compile_kernel(kernel: Callable[..., None], dtype: str, name: str) -> bytes:
    """Compile ``kernel`` for parameters of ``dtype`` to a SPIR-V module.

    Args:
        kernel: a function whose arguments are annotated with types of the kernel language.
        dtype: "f32", "f64", "bf16" or "f16".
        name: of the module's entry point.

    Returns:
        the binary module; its only entry point takes one int64, the launch block's address.
    """
    module = _llvm_module(_entry_point(kernel, dtype), name)
    with tempfile.TemporaryDirectory() as folder:
        bitcode, spirv = Path(folder, "kernel.bc"), Path(folder, "kernel.spv")
        bitcode.write_bytes(module.as_bitcode())
        translator = dpcpp_llvm_spirv.get_llvm_spirv_path()
        command = [translator, _SPIRV_VERSION, str(bitcode), "-o", str(spirv)]
        subprocess.run(command, check=True)
        return spirv.read_bytes()
