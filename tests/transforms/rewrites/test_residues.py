"""The rounded values and their residues together give the original, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from transforms.rewrites import residues

each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype == torch.float32
    assert torch.equal(
        actual.contiguous().view(torch.int32), expected.contiguous().view(torch.int32)
    )


@each_dtype
def test_every_kind_of_bits(dtype: torch.dtype) -> None:
    bits = torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int64).to(torch.int32)
    top = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    ties = torch.cat([top + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    values = torch.cat([bits, ties]).view(torch.float32)
    rounded, residue = residues.split(values, dtype)
    expected = values.to(dtype)
    assert torch.equal(rounded.view(torch.int16), expected.view(torch.int16))
    assert_same_bits(residues.join(rounded, residue), values)


@each_dtype
def test_takes_no_more_than_float32(dtype: torch.dtype) -> None:
    values = torch.randn(1 << 21) * 0.02
    rounded, residue = residues.split(values, dtype)
    assert rounded.nbytes + sum(t.nbytes for t in residue) <= 1.01 * values.nbytes


@each_dtype
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (2, 3, 4, 5), (1_100_000, 2)])
def test_shapes_and_strides(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape)
    layouts = [values, values.t() if values.dim() == 2 else values, values.expand(2, *shape)]
    if values.dim() == 4:
        layouts.append(values.contiguous(memory_format=torch.channels_last))
    for laid_out in layouts:
        joined = residues.join(*residues.split(laid_out, dtype))
        assert_same_bits(joined, laid_out)
        if laid_out is not layouts[2]:
            assert joined.stride() == laid_out.stride()


@each_dtype
def test_rounded_values_laid_out_anew_and_written_to(dtype: torch.dtype) -> None:
    values = torch.randn(4, 3, 5, 5) * torch.tensor(10.0).pow(torch.randint(-12, 4, (4, 3, 5, 5)))
    rounded, residue = residues.split(values, dtype)
    other = rounded.contiguous(memory_format=torch.channels_last)
    assert_same_bits(residues.join(other, residue), values)
    other[1] = 1.0
    joined = residues.join(other, residue)
    assert_same_bits(joined[0], values[0])
    assert torch.equal(joined.to(dtype), other)
