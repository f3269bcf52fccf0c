"""The meaning on a SPIR-V device of the language's vectors, for numba-dpex.

Like ``_lowering.py``, which must be imported first, it is imported by the compiler only. A vector
is one of LLVM's, so that the driver's compiler gets its operations as they are written here,
whatever it vectorizes.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import models, overload, register_model
from numba_dpex.kernel_api_impl.spirv.target import SPIRV_TARGET_NAME

from fusedoptim.kernels import language
from fusedoptim.kernels._lowering import (
    FORMATS,
    Pointer,
    call_builtin,
    device_intrinsic,
    halves,
    joined,
    places,
)

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_WIDTH = language.VECTOR
_QUARTER = _WIDTH // 4


class VectorType(types.Type):  # type: ignore[misc]
    """``language.VECTOR`` numbers of the arithmetic dtype."""

    def __init__(self, real: types.Type) -> None:
        self.real = real
        super().__init__(name=f"Vector({real})")


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector: VectorType) -> None:
        real = ir.DoubleType() if vector.real is types.float64 else ir.FloatType()
        super().__init__(manager, vector, ir.VectorType(real, language.VECTOR))


def _shuffled(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, elements: list[int]) -> ir.Value:
    """The given elements of two vectors; those of ``b`` are numbered after those of ``a``."""
    mask = ir.VectorType(_I32, len(elements))
    return builder.shuffle_vector(a, b, ir.Constant(mask, [_I32(k) for k in elements]))


def _vector_load(count: int) -> Any:
    """An intrinsic that loads ``count`` elements, and repeats them until a vector is full."""

    @device_intrinsic
    def load(context: Any, pointer: Pointer, index: types.Type) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            values = []
            for element, address in places(builder, pointer, *args):
                memory, align, widen, _ = FORMATS[element]
                address = builder.bitcast(
                    address, ir.PointerType(ir.VectorType(memory, count), address.type.addrspace)
                )
                loaded = builder.load(address, align=align)
                if count < _WIDTH:
                    loaded = _shuffled(builder, loaded, loaded, [k % count for k in range(_WIDTH)])
                values.append(widen(builder, loaded))
            return joined(builder, values)

        return VectorType(pointer.value)(pointer, types.int64), generate

    return load


_load_vector, _load_repeated = _vector_load(_WIDTH), _vector_load(_QUARTER)


def _store_elements(
    builder: ir.IRBuilder, pointer: Pointer, args: Any, elements: list[int]
) -> None:
    addresses, index, vector = args
    if len(elements) < _WIDTH:
        vector = _shuffled(builder, vector, vector, elements)
    values = halves(builder, vector) if pointer.element == "split" else [vector]
    for (element, address), value in zip(places(builder, pointer, addresses, index), values):
        memory, align, _, narrow = FORMATS[element]
        address = builder.bitcast(
            address, ir.PointerType(ir.VectorType(memory, len(elements)), address.type.addrspace)
        )
        builder.store(narrow(builder, value), address, align=align)


@device_intrinsic
def _store_vector(context: Any, pointer: Pointer, index: types.Type, vector: VectorType) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        _store_elements(builder, pointer, args, list(range(_WIDTH)))
        return context.get_dummy_value()

    return types.void(pointer, types.int64, vector), generate


def _quarter_store(quarter: int) -> Any:
    @device_intrinsic
    def store(context: Any, pointer: Pointer, index: types.Type, vector: VectorType) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            first = quarter * _QUARTER
            _store_elements(builder, pointer, args, list(range(first, first + _QUARTER)))
            return context.get_dummy_value()

        return types.void(pointer, types.int64, vector), generate

    return store


_store_quarters = [_quarter_store(quarter) for quarter in range(4)]


@device_intrinsic
def _spread(context: Any, value: types.Type) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        (value,) = args
        empty = ir.Constant(ir.VectorType(value.type, _WIDTH), ir.Undefined)
        first = builder.insert_element(empty, value, _I32(0))
        return _shuffled(builder, first, first, [0] * _WIDTH)

    return VectorType(value)(value), generate


@device_intrinsic
def _vector_fma(context: Any, a: VectorType, b: VectorType, c: VectorType) -> Any:
    mangled = "_Z3fmaDv16_dS_S_" if c.real is types.float64 else "_Z3fmaDv16_fS_S_"

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return call_builtin(builder, mangled, args[0].type, list(args))

    return c(a, b, c), generate


@device_intrinsic
def _add(context: Any, a: VectorType, b: VectorType) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.fadd(*args)

    return a(a, b), generate


@device_intrinsic
def _quarter_sums(context: Any, a: VectorType, b: VectorType, c: VectorType, d: VectorType) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        """Two rounds of adding halves of quarters, then the quarters in the vectors' order."""
        quarters = range(0, _WIDTH, 4)

        def added(a: ir.Value, b: ir.Value, one: tuple[int, ...], other: tuple[int, ...]) -> Any:
            """In each quarter, elements ``one`` plus ``other``; ``b`` has elements 4 to 7."""
            chosen = [
                [first + k if k < 4 else _WIDTH + first + k - 4 for first in quarters for k in of]
                for of in (one, other)
            ]
            return builder.fadd(*(_shuffled(builder, a, b, elements) for elements in chosen))

        a, b, c, d = args
        ab = added(a, b, (0, 4, 1, 5), (2, 6, 3, 7))
        cd = added(c, d, (0, 4, 1, 5), (2, 6, 3, 7))
        sums = added(ab, cd, (0, 1, 4, 5), (2, 3, 6, 7))
        return _shuffled(builder, sums, sums, [4 * k + i for i in range(4) for k in range(4)])

    return a(a, b, c, d), generate


@device_intrinsic
def _vector_sum(context: Any, a: VectorType) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        """Halves are added until two elements are left."""
        (a,) = args
        count = _WIDTH
        while count > 2:
            count //= 2
            lower, upper = list(range(count)), list(range(count, 2 * count))
            a = builder.fadd(_shuffled(builder, a, a, lower), _shuffled(builder, a, a, upper))
        first, second = (builder.extract_element(a, _I32(k)) for k in (0, 1))
        return builder.fadd(first, second)

    return a.real(a), generate


@overload(language.load_vector, strict=False, target=SPIRV_TARGET_NAME)  # type: ignore[untyped-decorator]
def _load_vector_overload(values: Any, index: Any) -> Any:
    return lambda values, index: _load_vector(values, index)


@overload(language.repeated_quarter, strict=False, target=SPIRV_TARGET_NAME)  # type: ignore[untyped-decorator]
def _repeated_quarter_overload(values: Any, index: Any) -> Any:
    return lambda values, index: _load_repeated(values, index)


@overload(language.spread, strict=False, target=SPIRV_TARGET_NAME)  # type: ignore[untyped-decorator]
def _spread_overload(value: Any) -> Any:
    return lambda value: _spread(value)


@overload(language.store_vector, strict=False, target=SPIRV_TARGET_NAME)  # type: ignore[untyped-decorator]
def _store_vector_overload(values: Any, index: Any, vector: Any) -> Any:
    return lambda values, index, vector: _store_vector(values, index, vector)


@overload(language.store_quarter, strict=False, target=SPIRV_TARGET_NAME)  # type: ignore[untyped-decorator]
def _store_quarter_overload(values: Any, index: Any, vector: Any, quarter: Any) -> Any:
    if not isinstance(quarter, types.IntegerLiteral):
        return None  # numba then asks for the literal
    store = _store_quarters[quarter.literal_value]
    return lambda values, index, vector, quarter: store(values, index, vector)


@overload(language.vector_fma, strict=False, target=SPIRV_TARGET_NAME)  # type: ignore[untyped-decorator]
def _vector_fma_overload(a: Any, b: Any, c: Any) -> Any:
    return lambda a, b, c: _vector_fma(a, b, c)


@overload(language.quarter_sums, strict=False, target=SPIRV_TARGET_NAME)  # type: ignore[untyped-decorator]
def _quarter_sums_overload(a: Any, b: Any, c: Any, d: Any) -> Any:
    return lambda a, b, c, d: _quarter_sums(a, b, c, d)


@overload(language.vector_sum, strict=False, target=SPIRV_TARGET_NAME)  # type: ignore[untyped-decorator]
def _vector_sum_overload(a: Any) -> Any:
    return lambda a: _vector_sum(a)


@overload(operator.add, strict=False, target=SPIRV_TARGET_NAME)  # type: ignore[untyped-decorator]
def _add_overload(a: Any, b: Any) -> Any:
    if isinstance(a, VectorType) and isinstance(b, VectorType):
        return lambda a, b: _add(a, b)
    return None
