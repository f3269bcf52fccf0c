"""The meaning of :mod:`fusedoptim.kernels.language` on a SPIR-V device, for numba-dpex.

Only the compiler imports this: it needs the ``[jit]`` extra. Importing it registers the
overloads; numba-dpex then resolves the language's names in any kernel.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numba.cpython.tupleobj  # noqa: F401 (its lowering of tuples registers itself)
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, overload, register_model
from numba_dpex.kernel_api_impl.spirv.math.mathimpl import registry as device_functions
from numba_dpex.kernel_api_impl.spirv.target import SPIRV_TARGET_NAME

from fusedoptim.dtypes import ELEMENTS, Element
from fusedoptim.kernels import language

_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_F32, _F64 = ir.FloatType(), ir.DoubleType()
_GLOBAL = 1  # SPIR-V's CrossWorkgroup storage class, OpenCL's __global
LOCAL_FENCE, GLOBAL_FENCE = 1, 2  # OpenCL's CLK_LOCAL_MEM_FENCE and CLK_GLOBAL_MEM_FENCE


class Pointer(types.Type):  # type: ignore[misc]
    """Address of values stored as ``element``, or as "split".

    A split value is a float32 in two halves: a pair of addresses, upper halves first.
    """

    def __init__(self, element: str) -> None:
        self.element = element
        super().__init__(name=f"Pointer({element})")

    @property
    def value(self) -> types.Type:
        """The type that a load gives and a store takes."""
        return types.float32 if self.element == "split" else VALUES[self.element]


@register_model(Pointer)
class _PointerModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, pointer: Pointer) -> None:
        addresses = 2 if pointer.element == "split" else 1
        super().__init__(manager, pointer, ir.ArrayType(_I64, addresses))


def device_intrinsic(function: Callable[..., Any]) -> Any:
    return intrinsic(target=SPIRV_TARGET_NAME)(function)


def call_builtin(
    builder: ir.IRBuilder, name: str, result: ir.Type, args: list[ir.Value], pure: bool = True
) -> ir.Value:
    """Call the OpenCL C built-in with this mangled name."""
    signature = ir.FunctionType(result, [arg.type for arg in args])
    function = cgutils.get_or_insert_function(builder.module, signature, name)
    function.calling_convention = "spir_func"
    function.attributes.add("nounwind")
    function.attributes.add("readnone" if pure else "convergent")
    return builder.call(function, args)


# numba-dpex reads work-item ids from a builtin vector in the wrong address space, on which
# Intel's GPU compiler aborts; the OpenCL functions compile and run everywhere.
def _work_item_function(mangled: str, dimension: int = 0) -> Any:
    @device_intrinsic
    def work_item_function(context: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            return call_builtin(builder, mangled, _I64, [_I32(dimension)])

        return types.int64(), generate

    return work_item_function


group = _work_item_function("_Z12get_group_idj")
# A launch in parts passes the first group of each as the offset of a dimension that is not used:
# an offset of the first one would have to be divided by the size of a group.
first_group = _work_item_function("_Z17get_global_offsetj", dimension=1)
_lane = _work_item_function("_Z12get_local_idj")
_lanes = _work_item_function("_Z14get_local_sizej")


@overload(language.lane, strict=False, target=SPIRV_TARGET_NAME)  # type: ignore[untyped-decorator]
def _lane_overload() -> Any:
    return lambda: _lane()


@overload(language.lanes, strict=False, target=SPIRV_TARGET_NAME)  # type: ignore[untyped-decorator]
def _lanes_overload() -> Any:
    return lambda: _lanes()


@device_intrinsic
def _fma(context: Any, a: types.Type, b: types.Type, c: types.Type) -> Any:
    real = types.float64 if types.float64 in (a, b, c) else types.float32
    mangled = {types.float32: "_Z3fmafff", types.float64: "_Z3fmaddd"}[real]

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return call_builtin(builder, mangled, args[0].type, list(args))

    return real(real, real, real), generate


@overload(language.fma, strict=False, target=SPIRV_TARGET_NAME)  # type: ignore[untyped-decorator]
def _fma_overload(a: Any, b: Any, c: Any) -> Any:
    return lambda a, b, c: _fma(a, b, c)


def _group_reduction(of_float: str, of_double: str) -> Any:
    @device_intrinsic
    def reduction(context: Any, value: types.Type) -> Any:
        mangled = {types.float32: of_float, types.float64: of_double}[value]

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            return call_builtin(builder, mangled, args[0].type, list(args), pure=False)

        return value(value), generate

    return reduction


_group_sum = _group_reduction("_Z21work_group_reduce_addf", "_Z21work_group_reduce_addd")
_group_max = _group_reduction("_Z21work_group_reduce_maxf", "_Z21work_group_reduce_maxd")


@overload(language.group_sum, strict=False, target=SPIRV_TARGET_NAME)  # type: ignore[untyped-decorator]
def _group_sum_overload(value: Any) -> Any:
    return lambda value: _group_sum(value)


@overload(language.group_max, strict=False, target=SPIRV_TARGET_NAME)  # type: ignore[untyped-decorator]
def _group_max_overload(value: Any) -> Any:
    return lambda value: _group_max(value)


@device_intrinsic
def _uniform(context: Any, value: types.Type) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        name = "_Z19sub_group_broadcastlj"  # a group's other sub-groups have the same value
        return call_builtin(builder, name, _I64, [args[0], _I32(0)], pure=False)

    return types.int64(types.int64), generate


@overload(language.uniform, strict=False, target=SPIRV_TARGET_NAME)  # type: ignore[untyped-decorator]
def _uniform_overload(value: Any) -> Any:
    return lambda value: _uniform(value)


def barrier(fences: int) -> Any:
    """The intrinsic that waits for a work-group, behind fences of OpenCL's ``barrier``."""

    @device_intrinsic
    def barrier(context: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            call_builtin(builder, "_Z7barrierj", ir.VoidType(), [_I32(fences)], pure=False)
            return context.get_dummy_value()

        return types.void(), generate

    return barrier


_barrier = barrier(GLOBAL_FENCE)


@overload(language.barrier, strict=False, target=SPIRV_TARGET_NAME)  # type: ignore[untyped-decorator]
def _barrier_overload() -> Any:
    return lambda: _barrier()


@device_intrinsic
def _is_word_below(context: Any, word: types.Type, bound: types.Type) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.icmp_unsigned("<", *(builder.trunc(arg, _I32) for arg in args))

    return types.boolean(types.int64, types.int64), generate


@overload(language.is_word_below, strict=False, target=SPIRV_TARGET_NAME)  # type: ignore[untyped-decorator]
def _is_word_below_overload(word: Any, bound: Any) -> Any:
    return lambda word, bound: _is_word_below(word, bound)


@device_intrinsic
def _swapped_halves(context: Any, word: types.Type) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        bits, half = builder.trunc(args[0], _I32), _I32(16)
        swapped = builder.or_(builder.shl(bits, half), builder.lshr(bits, half))
        return builder.zext(swapped, _I64)

    return types.int64(types.int64), generate


@overload(language.swapped_halves, strict=False, target=SPIRV_TARGET_NAME)  # type: ignore[untyped-decorator]
def _swapped_halves_overload(word: Any) -> Any:
    return lambda word: _swapped_halves(word)


def _divide(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
    return builder.fdiv(*args)


# numba's own division tests for zero: a branch out of the loop for each lane, for which the CPU
# driver gathers and scatters (docs/design/spirv-ahead-of-time.md).
for _real in (types.float32, types.float64):
    device_functions.lower(operator.truediv, _real, _real)(_divide)


def _alike(value: ir.Value, *scalars: ir.Type) -> list[ir.Type]:
    """The types, or vectors of them if the value is a vector."""
    if isinstance(value.type, ir.VectorType):
        return [ir.VectorType(scalar, value.type.count) for scalar in scalars]
    return list(scalars)


def _bf16_to_f32(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    i32, f32 = _alike(bits, _I32, _F32)
    return builder.bitcast(builder.shl(builder.zext(bits, i32), i32(16)), f32)


def _f32_to_bf16(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    i16, i32 = _alike(value, _I16, _I32)
    bits = builder.bitcast(value, i32)
    odd = builder.and_(builder.lshr(bits, i32(16)), i32(1))
    rounded = builder.add(bits, builder.add(odd, i32(0x7FFF)))  # to nearest, ties to even
    is_nan = builder.fcmp_unordered("uno", value, value)
    rounded = builder.select(is_nan, i32(0x7FC00000), rounded)
    return builder.trunc(builder.lshr(rounded, i32(16)), i16)


# float16 in integer arithmetic: the CPU driver leaves OpenCL's vload_half a function call for each
# lane, and a native conversion would require the Float16 capability, which most CPUs lack
# (docs/design/element-kernels.md).
def _f16_to_f32(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    i32, f32 = _alike(bits, _I32, _F32)
    bits = builder.zext(bits, i32)
    sign = builder.shl(builder.and_(bits, i32(0x8000)), i32(16))
    magnitude = builder.and_(bits, i32(0x7FFF))
    # Rebias the exponent (15 to 127); infinity and NaN keep theirs at all ones.
    normal = builder.add(builder.shl(magnitude, i32(13)), i32((127 - 15) << 23))
    special = builder.or_(normal, i32(0x7F800000))
    is_special = builder.icmp_unsigned(">=", magnitude, i32(0x7C00))
    normal = builder.select(is_special, special, normal)
    # Below 2^-14 the value is the mantissa times 2^-24: exact, and no float32 denormal.
    tiny = builder.fmul(builder.uitofp(magnitude, f32), f32(2.0**-24))
    is_tiny = builder.icmp_unsigned("<", magnitude, i32(0x0400))
    result = builder.select(is_tiny, builder.bitcast(tiny, i32), normal)
    return builder.bitcast(builder.or_(result, sign), f32)


def _f32_to_f16(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    i16, i32, f32 = _alike(value, _I16, _I32, _F32)
    bits = builder.bitcast(value, i32)
    sign = builder.and_(builder.lshr(bits, i32(16)), i32(0x8000))
    magnitude = builder.and_(bits, i32(0x7FFFFFFF))
    # Rebias, round to nearest even on the 13 bits that go; a carry reaches the exponent.
    odd = builder.and_(builder.lshr(magnitude, i32(13)), i32(1))
    rebias = i32(-((127 - 15) << 23) + 0x0FFF)
    normal = builder.lshr(builder.add(builder.add(magnitude, rebias), odd), i32(13))
    # Adding 0.5 moves the 2^-24 place to the last bit, and the addition does the rounding.
    shifted = builder.fadd(builder.bitcast(magnitude, f32), f32(0.5))
    tiny = builder.sub(builder.bitcast(shifted, i32), i32(0x3F000000))
    is_tiny = builder.icmp_unsigned("<", magnitude, i32(0x38800000))  # 2^-14
    result = builder.select(is_tiny, tiny, normal)
    is_large = builder.icmp_unsigned(">=", magnitude, i32(0x47800000))  # 2^16
    result = builder.select(is_large, i32(0x7C00), result)
    is_nan = builder.icmp_unsigned(">", magnitude, i32(0x7F800000))
    result = builder.select(is_nan, i32(0x7E00), result)
    return builder.trunc(builder.or_(result, sign), i16)


def as_is(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    return value


# Elements that no device computes with, and the conversions from and to arithmetic.
_CONVERSIONS = {
    "bf16": (_bf16_to_f32, _f32_to_bf16),
    "f16": (_f16_to_f32, _f32_to_f16),
}


class Format(NamedTuple):
    """How an element lies in memory."""

    memory: ir.Type
    size: int
    """The size in bytes, which is also the alignment."""
    widen: Any
    """The conversion from memory to arithmetic."""
    narrow: Any
    """The conversion from arithmetic to memory."""


def _format(element: Element) -> Format:
    if element.name in _CONVERSIONS:
        return Format(ir.IntType(8 * element.size), element.size, *_CONVERSIONS[element.name])
    memory = {"f32": _F32, "f64": _F64}.get(element.name, ir.IntType(8 * element.size))
    return Format(memory, element.size, as_is, as_is)


FORMATS = {element.name: _format(element) for element in ELEMENTS.values()}
"""The format of each element, by its name."""
FORMATS["half"] = Format(  # one half of a split value, as an integer
    _I16,
    2,
    lambda builder, bits: builder.zext(bits, *_alike(bits, _I32)),
    lambda builder, value: builder.trunc(value, *_alike(value, _I16)),
)
VALUES: dict[str, types.Type] = {
    name: getattr(types, ELEMENTS[element.arithmetic].dtype) for name, element in ELEMENTS.items()
}
"""The type that a load of an element gives and a store takes."""


def _element(builder: ir.IRBuilder, address: ir.Value, index: ir.Value, memory: ir.Type) -> Any:
    base = builder.inttoptr(address, ir.PointerType(memory, _GLOBAL))
    return builder.gep(base, [index], inbounds=True)


def load(builder: ir.IRBuilder, element: str, address: ir.Value) -> ir.Value:
    """The value of ``element`` at an address, in arithmetic."""
    _, align, widen, _ = FORMATS[element]
    return widen(builder, builder.load(address, align=align))


def store(builder: ir.IRBuilder, element: str, address: ir.Value, value: ir.Value) -> None:
    """Store a value of arithmetic as ``element``."""
    _, align, _, narrow = FORMATS[element]
    builder.store(narrow(builder, value), address, align=align)


def places(builder: ir.IRBuilder, pointer: Pointer, addresses: ir.Value, index: ir.Value) -> Any:
    """Where a value is: its element and address, or those of both halves of a split value."""
    elements = ["half", "half"] if pointer.element == "split" else [pointer.element]
    for k, element in enumerate(elements):
        base = builder.extract_value(addresses, k)
        yield element, _element(builder, base, index, FORMATS[element].memory)


def joined(builder: ir.IRBuilder, values: list[ir.Value]) -> ir.Value:
    """A loaded value, or that of the two halves of a split one."""
    if len(values) == 1:
        return values[0]
    upper, lower = values
    i32, f32 = _alike(upper, _I32, _F32)
    return builder.bitcast(builder.or_(builder.shl(upper, i32(16)), lower), f32)


def halves(builder: ir.IRBuilder, value: ir.Value) -> list[ir.Value]:
    """The halves of a split value, as integers."""
    (i32,) = _alike(value, _I32)
    bits = builder.bitcast(value, i32)
    return [builder.lshr(bits, i32(16)), bits]


@device_intrinsic
def _load(context: Any, pointer: Pointer, index: types.Type) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return joined(builder, [load(builder, *place) for place in places(builder, pointer, *args)])

    return pointer.value(pointer, types.int64), generate


@device_intrinsic
def _store(context: Any, pointer: Pointer, index: types.Type, value: types.Type) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        addresses, i, value = args
        values = halves(builder, value) if pointer.element == "split" else [value]
        for place, half in zip(places(builder, pointer, addresses, i), values):
            store(builder, place[0], place[1], half)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, pointer.value), generate


@overload(operator.getitem, strict=False, target=SPIRV_TARGET_NAME)  # type: ignore[untyped-decorator]
def _getitem_overload(pointer: Any, index: Any) -> Any:
    if isinstance(pointer, Pointer):
        return lambda pointer, index: _load(pointer, index)
    if isinstance(pointer, LaneValues):
        return lambda pointer, index: _lane_load(pointer, index)
    return None


@overload(operator.setitem, strict=False, target=SPIRV_TARGET_NAME)  # type: ignore[untyped-decorator]
def _setitem_overload(pointer: Any, index: Any, value: Any) -> Any:
    if isinstance(pointer, Pointer):
        return lambda pointer, index, value: _store(pointer, index, value)
    if isinstance(pointer, LaneValues):
        return lambda pointer, index, value: _lane_store(pointer, index, value)
    return None


@overload(language.rounds, strict=False, target=SPIRV_TARGET_NAME)  # type: ignore[untyped-decorator]
def _rounds_overload(values: Any) -> Any:
    is_narrow = values.element in _CONVERSIONS
    return lambda values: is_narrow


class LaneValues(types.Type):  # type: ignore[misc]
    """Address of values of type ``real`` that one work item has for itself."""

    def __init__(self, real: types.Type) -> None:
        self.real = real
        super().__init__(name=f"LaneValues({real})")


_REALS = {types.float32: _F32, types.float64: _F64}


@register_model(LaneValues)
class _LaneValuesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, values: LaneValues) -> None:
        super().__init__(manager, values, ir.PointerType(_REALS[values.real]))


def lane_values(real: types.Type) -> Any:
    """The intrinsic that :func:`fusedoptim.kernels.language.lane_values` is in this arithmetic.

    The CPU driver lays out such memory lane beside lane, so that one vector is a value of each, if
    nothing but loads and stores of single values uses it. So it is not filled, as numba's own would
    be.
    """

    @intrinsic(prefer_literal=True, target=SPIRV_TARGET_NAME)  # type: ignore[untyped-decorator]
    def lane_values(context: Any, count: types.IntegerLiteral) -> Any:
        memory = ir.ArrayType(_REALS[real], count.literal_value)

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            with builder.goto_entry_block():
                values = builder.alloca(memory)
            return builder.gep(values, [_I32(0), _I32(0)], inbounds=True)

        return LaneValues(real)(count), generate

    return lane_values


@device_intrinsic
def _lane_load(context: Any, values: LaneValues, index: types.Type) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.load(builder.gep(args[0], [args[1]], inbounds=True))

    return values.real(values, types.int64), generate


@device_intrinsic
def _lane_store(context: Any, values: LaneValues, index: types.Type, value: types.Type) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        builder.store(args[2], builder.gep(args[0], [args[1]], inbounds=True))
        return context.get_dummy_value()

    return types.void(values, types.int64, values.real), generate


def argument_reader(result: types.Type) -> Any:
    """An intrinsic ``read(address)`` that takes words of the launch block as ``result``."""
    memory = {types.int64: _I64, types.float32: _F32, types.float64: _F64}.get(result)
    if isinstance(result, Pointer):
        memory = ir.ArrayType(_I64, 2 if result.element == "split" else 1)

    @device_intrinsic
    def read(context: Any, address: types.Type) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            return builder.load(_element(builder, args[0], _I64(0), memory), align=8)

        return result(types.int64), generate

    return read
