"""The meaning on a SPIR-V device of the language's ``fetch``, for numba-dpex.

Like ``_lowering.py``, which must be imported first, it is imported by the compiler only. OpenCL's
``prefetch`` is a function call in the CPU driver. So this is LLVM's own operation, which that
driver turns into one instruction for all lanes of a group. SPIR-V has no such operation: it
declares a function that the driver knows by its name.
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import overload
from numba_dpex.kernel_api_impl.spirv.target import SPIRV_TARGET_NAME

from fusedoptim.kernels import language
from fusedoptim.kernels._lowering import FORMATS, Pointer, device_intrinsic, places

INTRINSIC = "llvm.prefetch"
"""The operation that the translator to SPIR-V declares as a function."""
_LINE = 64  # bytes of a cache line
_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
# To the second-level cache: the first-level one has fewer buffers for lines that are on their way.
_TO_READ, _TO_SECOND_LEVEL, _AS_DATA = _I32(0), _I32(2), _I32(1)


@functools.cache
def _fetching(count: int) -> Any:
    """An intrinsic that prefetches ``count`` elements."""

    @device_intrinsic
    def fetch(context: Any, pointer: Pointer, index: types.Type) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            for element, address in places(builder, pointer, *args):
                first = builder.bitcast(address, _I8.as_pointer(address.type.addrspace))
                for byte in range(0, count * FORMATS[element].size, _LINE):
                    _prefetch(builder, builder.gep(first, [_I64(byte)]))
            return context.get_dummy_value()

        return types.void(pointer, types.int64), generate

    return fetch


def _prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    arguments = [address, _TO_READ, _TO_SECOND_LEVEL, _AS_DATA]
    signature = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    name = f"{INTRINSIC}.p{address.type.addrspace}i8"
    builder.call(cgutils.get_or_insert_function(builder.module, signature, name), arguments)


@overload(language.fetch, strict=False, target=SPIRV_TARGET_NAME)  # type: ignore[untyped-decorator]
def _fetch_overload(values: Any, index: Any, count: Any) -> Any:
    if not isinstance(count, types.IntegerLiteral):
        return None  # numba then asks for the literal
    fetch = _fetching(count.literal_value)
    return lambda values, index, count: fetch(values, index)
