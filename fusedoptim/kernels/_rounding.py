"""The meaning of :mod:`fusedoptim.kernels.rounding` on a SPIR-V device, for numba-dpex.

A code is a uint8 in memory; the largest of several, and a random word, are int32.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from fusedoptim.kernels import rounding
from fusedoptim.kernels._lowering import device_intrinsic

_I8, _I32, _F32 = ir.IntType(8), ir.IntType(32), ir.FloatType()
_EXPONENT = _I32(0x7F800000)
_MAGNITUDE = _I32(0x7FFFFFFF)
_SIGN = _I32(0x80000000)
_LARGE = _I32((127 + rounding.SQUARE_EXPONENT) << 23)
_NAN = _F32(float("nan"))
_FRACTION = _I32(rounding.FRACTION_BITS)
_DISCARDED = _I32(32 - rounding.FRACTION_BITS)
_TO_SIGN = _I32(24)
_FLOAT, _WORD, _CODE = types.float32, types.int32, types.uint8


def _bits(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    return builder.bitcast(value, _I32)


def _float(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    return builder.bitcast(bits, _F32)


def _largest(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.icmp_unsigned(">", a, b), a, b)


def _widened(builder: ir.IRBuilder, code: ir.Value) -> ir.Value:
    return builder.zext(code, _I32) if code.type == _I8 else code


@device_intrinsic
def as_word(context: Any, word: types.Type) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.trunc(args[0], _I32)

    return _WORD(types.int64), generate


@device_intrinsic
def next_word(context: Any, word: types.Type) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        (word,) = args
        return builder.xor(word, builder.shl(word, _I32(8)))

    return _WORD(_WORD), generate


@device_intrinsic
def to_bf16(context: Any, value: types.Type, word: types.Type) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        value, word = args
        bits = builder.add(_bits(builder, value), builder.lshr(word, _I32(16)))
        rounded = builder.and_(bits, _I32(0xFFFF0000))
        is_nan = builder.fcmp_unordered("uno", value, value)  # the sum may have reached the sign
        return builder.select(is_nan, value, _float(builder, rounded))

    return _FLOAT(_FLOAT, _WORD), generate


@device_intrinsic
def larger_magnitude(context: Any, largest: types.Type, value: types.Type) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        largest, value = (_bits(builder, arg) for arg in args)
        magnitude = builder.and_(value, _MAGNITUDE)
        has_square = builder.icmp_unsigned("<", magnitude, _LARGE)
        magnitude = builder.select(has_square, magnitude, _I32(0))
        return _float(builder, _largest(builder, magnitude, largest))

    return _FLOAT(_FLOAT, _FLOAT), generate


def _larger(nan: int) -> Any:
    @device_intrinsic
    def larger(context: Any, largest: types.Type, code: types.Type) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            largest, code = args
            magnitude = builder.and_(_widened(builder, code), _I32(nan))
            is_nan = builder.icmp_unsigned("==", magnitude, _I32(nan))
            return _largest(builder, builder.select(is_nan, _I32(0), magnitude), largest)

        return _WORD(_WORD, code), generate

    return larger


e4m3_larger = _larger(rounding.NAN_E4M3)
e5m3_larger = _larger(rounding.NAN_E5M3)


def _scale(binades: int) -> Any:
    @device_intrinsic
    def scale(context: Any, largest: types.Type) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            exponent = builder.and_(_bits(builder, args[0]), _EXPONENT)
            least = _I32((127 - rounding.LEAST_EXPONENT) << 23)
            bits = builder.sub(exponent, _I32(binades << 23))
            is_more = builder.icmp_signed(">", bits, least)
            return _float(builder, builder.select(is_more, bits, least))

        return _FLOAT(_FLOAT), generate

    return scale


e4m3_scale = _scale(rounding.BINADES_E4M3)
e5m3_scale = _scale(rounding.BINADES_E5M3)


def _magnitude(builder: ir.IRBuilder, code: ir.Value, scale: ir.Value, nan: int) -> ir.Value:
    bits = builder.add(builder.shl(code, _FRACTION), _bits(builder, scale))
    y = _float(builder, bits)
    half, rest = builder.fmul(y, _F32(0.5)), builder.fsub(y, scale)
    value = builder.select(builder.fcmp_ordered("<", half, rest), half, rest)
    return builder.select(builder.icmp_unsigned("==", code, _I32(nan)), _NAN, value)


@device_intrinsic
def e4m3_value(context: Any, code: types.Type, scale: types.Type) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        code, scale = _widened(builder, args[0]), args[1]
        magnitude = builder.and_(code, _I32(rounding.NAN_E4M3))
        value = _magnitude(builder, magnitude, scale, rounding.NAN_E4M3)
        sign = builder.shl(builder.and_(code, _I32(rounding.SIGN_E4M3)), _TO_SIGN)
        return _float(builder, builder.or_(_bits(builder, value), sign))

    return _FLOAT(code, _FLOAT), generate


@device_intrinsic
def e5m3_value(context: Any, code: types.Type, scale: types.Type) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return _magnitude(builder, _widened(builder, args[0]), args[1], rounding.NAN_E5M3)

    return _FLOAT(code, _FLOAT), generate


def _rounded(
    builder: ir.IRBuilder, magnitude: ir.Value, scale: ir.Value, word: ir.Value, nan: int
) -> ir.Value:
    is_normal = builder.fcmp_ordered(">", magnitude, scale)
    y = builder.fadd(magnitude, builder.select(is_normal, magnitude, scale))
    distance = builder.sub(_bits(builder, y), _bits(builder, scale))  # of NaN, of either sign, huge
    random = builder.lshr(word, _DISCARDED)
    code = builder.lshr(builder.add(distance, random), _FRACTION)
    return builder.select(builder.icmp_unsigned("<", code, _I32(nan)), code, _I32(nan))


@device_intrinsic
def e4m3_code(context: Any, value: types.Type, scale: types.Type, word: types.Type) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        value, scale, word = args
        bits = _bits(builder, value)
        magnitude = _float(builder, builder.and_(bits, _MAGNITUDE))
        code = _rounded(builder, magnitude, scale, word, rounding.NAN_E4M3)
        sign = builder.lshr(builder.and_(bits, _SIGN), _TO_SIGN)
        return builder.trunc(builder.or_(code, sign), _I8)

    return _CODE(_FLOAT, _FLOAT, _WORD), generate


@device_intrinsic
def e5m3_code(context: Any, value: types.Type, scale: types.Type, word: types.Type) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        value, scale, word = args
        return builder.trunc(_rounded(builder, value, scale, word, rounding.NAN_E5M3), _I8)

    return _CODE(_FLOAT, _FLOAT, _WORD), generate
