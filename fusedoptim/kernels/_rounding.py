"""The meaning of :mod:`fusedoptim.kernels.rounding` on a SPIR-V device, for numba-dpex.

A code is a uint8, and a random word an int32.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from fusedoptim.kernels import rounding
from fusedoptim.kernels._lowering import call_builtin, device_intrinsic

_I8, _I32, _F32 = ir.IntType(8), ir.IntType(32), ir.FloatType()
_EXPONENT = _I32(0x7F800000)
_MAGNITUDE = _I32(0x7FFFFFFF)
_SIGN = _I32(0x80000000)
_HUGE = _I32((127 + rounding.SCALABLE_EXPONENT) << 23)
_TWO = _I32(0x40000000)  # the bits of 2.0, of which only that of the exponent's first place is set
_NAN = _F32(float("nan"))
_FRACTION = _I32(rounding.FRACTION_BITS)
_TO_BF16 = _I32(rounding.WORD_BITS - rounding.BF16_FRACTION_BITS)
_TO_SIGN = _I32(24)
_FLOAT, _WORD, _CODE = types.float32, types.int32, types.uint8


def _bits(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    return builder.bitcast(value, _I32)


def _float(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    return builder.bitcast(bits, _F32)


def _largest(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.icmp_unsigned(">", a, b), a, b)


@device_intrinsic
def as_word(context: Any, word: types.Type) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.trunc(args[0], _I32)

    return _WORD(types.int64), generate


@device_intrinsic
def xor(context: Any, word: types.Type, other: types.Type) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.xor(*args)

    return _WORD(_WORD, _WORD), generate


@device_intrinsic
def to_bf16(context: Any, value: types.Type, word: types.Type) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        value, word = args
        bits = builder.add(_bits(builder, value), builder.lshr(word, _TO_BF16))
        rounded = builder.and_(bits, _I32(0xFFFF0000))
        is_nan = builder.fcmp_unordered("uno", value, value)  # the sum may have reached the sign
        return builder.select(is_nan, value, _float(builder, rounded))

    return _FLOAT(_FLOAT, _WORD), generate


@device_intrinsic
def larger_magnitude(context: Any, largest: types.Type, value: types.Type) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        largest, value = (_bits(builder, arg) for arg in args)
        return _float(builder, _largest(builder, builder.and_(value, _MAGNITUDE), largest))

    return _FLOAT(_FLOAT, _FLOAT), generate


@device_intrinsic
def is_scalable(context: Any, m: types.Type, v: types.Type) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        magnitudes = [builder.and_(_bits(builder, arg), _MAGNITUDE) for arg in args]
        return builder.and_(*(builder.icmp_unsigned("<", x, _HUGE) for x in magnitudes))

    return types.boolean(_FLOAT, _FLOAT), generate


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


def _magnitude(
    builder: ir.IRBuilder, shifted: ir.Value, scale: ir.Value, factor: ir.Value, nan: int
) -> ir.Value:
    """``factor``, which is not negative, times the magnitude of a code.

    Args:
        builder: the builder of the instructions.
        shifted: the code, shifted by FRACTION_BITS.
        scale: the scale of its block.
        factor: what to multiply by.
        nan: the magnitude that is NaN.
    """
    # As the exponent and the fraction of y, which is 2 or more, it is the smaller of
    # factor * scale * y / 4 and factor * scale * (y / 2 - 1).
    magnitude = builder.and_(shifted, _I32(nan << rounding.FRACTION_BITS))
    y = _float(builder, builder.or_(magnitude, _TWO))
    unit = builder.fmul(factor, scale)
    half = builder.fmul(unit, _F32(0.5))
    normal = builder.fmul(y, builder.fmul(unit, _F32(0.25)))
    rest = call_builtin(builder, "_Z3fmafff", _F32, [half, y, builder.fneg(unit)])
    value = builder.select(builder.fcmp_ordered("<", normal, rest), normal, rest)
    is_nan = builder.icmp_unsigned("==", magnitude, _I32(nan << rounding.FRACTION_BITS))
    return builder.select(is_nan, _NAN, value)


@device_intrinsic
def e4m3_product(context: Any, code: types.Type, scale: types.Type, factor: types.Type) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        code, scale, factor = builder.sext(args[0], _I32), args[1], args[2]
        shifted = builder.shl(code, _FRACTION)
        value = _magnitude(builder, shifted, scale, factor, rounding.NAN_E4M3)
        return _float(builder, builder.or_(_bits(builder, value), builder.and_(code, _SIGN)))

    return _FLOAT(_CODE, _FLOAT, _FLOAT), generate


@device_intrinsic
def e5m3_product(context: Any, code: types.Type, scale: types.Type, factor: types.Type) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        code, scale, factor = builder.zext(args[0], _I32), args[1], args[2]
        shifted = builder.shl(code, _FRACTION)
        return _magnitude(builder, shifted, scale, factor, rounding.NAN_E5M3)

    return _FLOAT(_CODE, _FLOAT, _FLOAT), generate


def _rounded(
    builder: ir.IRBuilder, magnitude: ir.Value, scale: ir.Value, word: ir.Value, nan: int
) -> ir.Value:
    is_normal = builder.fcmp_ordered(">", magnitude, scale)
    y = builder.fadd(magnitude, builder.select(is_normal, magnitude, scale))
    distance = builder.sub(_bits(builder, y), _bits(builder, scale))  # of NaN, of either sign, huge
    code = builder.lshr(builder.add(distance, word), _FRACTION)
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
