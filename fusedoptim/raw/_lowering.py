"""The meaning of :mod:`fusedoptim.raw.language` on a SPIR-V device, for numba-dpex.

Only the compiler imports this: it needs the ``[jit]`` extra.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numba.cpython.rangeobj  # noqa: F401 (its lowering of ranges registers itself)
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.core.errors import TypingError
from numba.extending import models, overload, register_model
from numba_dpex.kernel_api_impl.spirv.dispatcher import SPIRVKernelDispatcher
from numba_dpex.kernel_api_impl.spirv.target import SPIRV_TARGET_NAME

from fusedoptim.kernels._lowering import (
    FORMATS,
    GLOBAL_FENCE,
    LOCAL_FENCE,
    VALUES,
    barrier,
    call_builtin,
    device_intrinsic,
    load,
    store,
)
from fusedoptim.raw import language

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_GLOBAL, _LOCAL = 1, 3  # SPIR-V's CrossWorkgroup and Workgroup, OpenCL's __global and __local


class Pointer(types.Type):  # type: ignore[misc]
    """A kernel argument that points to numbers stored as ``element``."""

    def __init__(self, element: str, local: bool = False) -> None:
        self.element = element
        self.address_space = _LOCAL if local else _GLOBAL
        super().__init__(name=f"{'Local' if local else 'Global'}[{element}]")


@register_model(Pointer)
class _PointerModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, pointer: Pointer) -> None:
        memory = FORMATS[pointer.element].memory
        super().__init__(manager, pointer, ir.PointerType(memory, pointer.address_space))


# numba-dpex copies the models when it first compiles, which may have been before this.
SPIRVKernelDispatcher.targetdescr.target_context.data_model_manager.register(Pointer, _PointerModel)


@device_intrinsic
def _load(context: Any, pointer: Pointer, index: types.Type) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        address = builder.gep(args[0], [args[1]], inbounds=True)
        return load(builder, pointer.element, address)

    return VALUES[pointer.element](pointer, types.int64), generate


@device_intrinsic
def _store(context: Any, pointer: Pointer, index: types.Type, value: types.Type) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        address = builder.gep(args[0], [args[1]], inbounds=True)
        store(builder, pointer.element, address, args[2])
        return context.get_dummy_value()

    return types.void(pointer, types.int64, VALUES[pointer.element]), generate


def _check_index(index: types.Type) -> None:
    if not isinstance(index, types.Integer):
        raise TypingError(f"an index must be an integer, and this is of type {index}")


@overload(operator.getitem, strict=False, target=SPIRV_TARGET_NAME)  # type: ignore[untyped-decorator]
def _getitem_overload(pointer: Any, index: Any) -> Any:
    if not isinstance(pointer, Pointer):
        return None
    _check_index(index)
    return lambda pointer, index: _load(pointer, index)


@overload(operator.setitem, strict=False, target=SPIRV_TARGET_NAME)  # type: ignore[untyped-decorator]
def _setitem_overload(pointer: Any, index: Any, value: Any) -> Any:
    if not isinstance(pointer, Pointer):
        return None
    _check_index(index)
    return lambda pointer, index, value: _store(pointer, index, value)


def _give_meaning(function: Callable[..., int], mangled: str) -> None:
    """Map ``function`` of the language to the OpenCL C built-in with this mangled name."""

    @device_intrinsic
    def built_in(context: Any, dimension: types.Type) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            return call_builtin(builder, mangled, _I64, [builder.trunc(args[0], _I32)])

        return types.int64(types.int64), generate

    @overload(function, strict=False, target=SPIRV_TARGET_NAME)  # type: ignore[untyped-decorator]
    def meaning(dimension: Any = 0) -> Any:
        return lambda dimension=0: built_in(dimension)


_give_meaning(language.global_id, "_Z13get_global_idj")
_give_meaning(language.local_id, "_Z12get_local_idj")
_give_meaning(language.group_id, "_Z12get_group_idj")
_give_meaning(language.global_size, "_Z15get_global_sizej")
_give_meaning(language.local_size, "_Z14get_local_sizej")


_barrier = barrier(LOCAL_FENCE | GLOBAL_FENCE)


@overload(language.barrier, strict=False, target=SPIRV_TARGET_NAME)  # type: ignore[untyped-decorator]
def _barrier_overload() -> Any:
    return lambda: _barrier()


def _mix(mixed: Callable[..., Any]) -> None:
    """Make an operator on an integer and a float32 compute in float32, as in C, not in float64.

    This affects everything that is compiled later in the process. The package's own kernels mix no
    types in arithmetic, and so stay the same. They do compare with the number 0, so comparisons are
    not changed.
    """

    @overload(mixed, strict=False, target=SPIRV_TARGET_NAME)  # type: ignore[untyped-decorator]
    def meaning(a: Any, b: Any) -> Any:
        if isinstance(a, types.Integer) and b == types.float32:
            return lambda a, b: mixed(np.float32(a), b)
        if a == types.float32 and isinstance(b, types.Integer):
            return lambda a, b: mixed(a, np.float32(b))
        return None


for _name in ("add", "sub", "mul", "truediv", "iadd", "isub", "imul", "itruediv"):
    _mix(getattr(operator, _name))


@overload(  # type: ignore[untyped-decorator]
    operator.pow, strict=False, target=SPIRV_TARGET_NAME, prefer_literal=True
)
def _power_overload(base: Any, exponent: Any) -> Any:
    """Squares and cubes as products: numba's powers are loops."""
    power = getattr(exponent, "literal_value", None)
    if not isinstance(base, types.Float) or power not in (2, 3):
        return None
    if power == 2:
        return lambda base, exponent: base * base
    return lambda base, exponent: base * base * base
