"""8-bit state, with a scale for each block: encoding float32 values, and decoding them.

The numbers are those of :mod:`fusedoptim.kernels.rounding`. The state ``name`` of a parameter is
its codes, laid out like the parameter; the state ``name`` plus SUFFIX is its scales. In memory
order, the elements are cut into tiles of BLOCK elements for each lane of the device's work-groups.
A block is what one lane walks: the elements of a tile whose index modulo the lanes is the same.

Decoded values are exact, and encode again without rounding, so a checkpoint needs only the values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedoptim.kernels.language import Role
from fusedoptim.kernels.rounding import (
    BINADES_E4M3,
    BINADES_E5M3,
    BLOCK,
    FRACTION_BITS,
    LEAST_EXPONENT,
    NAN_E4M3,
    NAN_E5M3,
    SIGN_E4M3,
)
from fusedoptim.step.sharding import like_param, local_of
from fusedoptim.step.tensors import State, is_dense

SUFFIX = "_scale"
DTYPES = {Role.STATE_E4M3: torch.int8, Role.STATE_E5M3: torch.uint8}
"""The dtypes of codes, by which values differ from them. torch has no name for e5m3, and cannot
unpickle its own for e4m3."""
SCALES = torch.bfloat16
"""The dtype of scales: it has all powers of two."""

_HALF = 1 << (FRACTION_BITS - 1)
_LARGEST_FRACTION = 1.75  # of the last exponent: the next code is NaN


def scales_shape(numel: int, lanes: int) -> tuple[int, int]:
    """The shape of the scales of a state of ``numel`` elements."""
    return -(-numel // (BLOCK * lanes)), lanes


def encoded(values: Tensor, dtype: torch.dtype, lanes: int) -> tuple[Tensor, Tensor]:
    """The codes of ``values``, laid out like them, and their scales.

    Args:
        values: a tensor of any floating-point dtype, without gaps in memory.
        dtype: the dtype of the codes.
        lanes: the lanes of the device's work-groups.
    """
    signed = dtype is torch.int8
    nan, binades = (NAN_E4M3, BINADES_E4M3) if signed else (NAN_E5M3, BINADES_E5M3)
    tiles, _ = scales_shape(values.numel(), lanes)
    flat = values.new_zeros(tiles * BLOCK * lanes, dtype=torch.float32)
    flat[: values.numel()] = _in_memory_order(values)
    blocks = flat.view(tiles, BLOCK, lanes)
    magnitude = blocks.abs()

    largest = (
        torch.where(magnitude.isfinite(), magnitude, 0.0).amax(1) if tiles else flat.view(0, lanes)
    )
    mantissa, exponent = torch.frexp(largest)
    exponent = exponent - 2 - binades + (2 * mantissa > _LARGEST_FRACTION).int()
    scales = torch.ldexp(torch.ones_like(largest), exponent.clamp(min=-LEAST_EXPONENT))

    scale = scales.unsqueeze(1)
    y = magnitude + torch.maximum(magnitude, scale)
    distance = (y.view(torch.int32) - scale.view(torch.int32)).where(magnitude.isfinite(), 0)
    odd = (distance >> FRACTION_BITS) & 1
    codes = (distance + odd + (_HALF - 1)) >> FRACTION_BITS  # to nearest, ties to even
    codes = torch.where(magnitude.isfinite(), codes, nan)
    if signed:
        codes = codes | (blocks.signbit().int() * SIGN_E4M3)
    result = torch.empty_like(values, dtype=torch.uint8)
    _in_memory_order(result).copy_(codes.view(-1)[: values.numel()])
    return result.view(dtype), scales.to(SCALES)


def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """The values, laid out like ``codes``, as bfloat16, which represents all of them exactly."""
    tiles, lanes = scales.shape
    flat = codes.new_zeros(tiles * BLOCK * lanes, dtype=torch.uint8)
    flat[: codes.numel()] = _in_memory_order(codes.view(torch.uint8))
    blocks = flat.view(tiles, BLOCK, lanes).int()
    signed = codes.dtype is torch.int8
    nan = NAN_E4M3 if signed else NAN_E5M3
    magnitude = blocks & nan
    scale = scales.float().unsqueeze(1)
    y = ((magnitude << FRACTION_BITS) + scale.view(torch.int32)).view(torch.float32)
    values = torch.minimum(y / 2, y - scale)
    values = torch.where(magnitude == nan, torch.nan, values)
    if signed:
        values = torch.where(blocks >= SIGN_E4M3, -values, values)
    result = torch.empty_like(codes, dtype=torch.bfloat16)
    _in_memory_order(result).copy_(values.view(-1)[: codes.numel()])
    return result


def _in_memory_order(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,)) if is_dense(tensor) else tensor.reshape(-1)


def is_encoded(state: State, name: str) -> bool:
    """Whether the state ``name`` is codes: a user may have set values instead."""
    is_codes = isinstance(state[name], Tensor) and state[name].dtype in DTYPES.values()
    return is_codes and name + SUFFIX in state


def _decoded_state(codes: Tensor, scales: Tensor) -> Tensor:
    """The values of codes that may be sharded."""
    return like_param(decoded(local_of(codes), scales), codes)


def readable(state: State) -> State:
    """A parameter's ``state`` as a checkpoint has it: values instead of codes and scales."""
    return {
        name: _decoded_state(value, state[name + SUFFIX]) if is_encoded(state, name) else value
        for name, value in state.items()
        if not (name.endswith(SUFFIX) and name.removesuffix(SUFFIX) in state)
    }
