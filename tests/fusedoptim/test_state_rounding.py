"""How moments are rounded to reduced dtypes: at random, by which words, and to which codes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from fusedoptim import FusedAdam, FusedAdamW
from fusedoptim.kernels import language, rounding
from fusedoptim.launch.block import LaunchBlock
from fusedoptim.step import float8
from tests.fusedoptim.helpers import LAYOUTS, random_like
from tests.fusedoptim.reduced_state import (
    LANES,
    MOMENTS,
    SIZES,
    TILE,
    assert_same_values,
    each_dtype,
    values_of,
    vectors,
)
from tests.references import adam
from tests.tolerances import Bounded, binomial_bound, number, rounding_step


def blocks_of(param: Tensor) -> Tensor:
    """The block of each element; elements of the same lane and tile are in one block."""
    i = torch.arange(param.numel())
    return (
        torch.empty_like(param, dtype=torch.int64)
        .as_strided((param.numel(),), (1,))
        .copy_(i // TILE * LANES + i % LANES)
        .as_strided(param.shape, param.stride())
    )


def largest_of_blocks(values: Tensor) -> Tensor:
    """For each element, the largest magnitude in its block."""
    blocks = blocks_of(values).flatten()
    flat = values.abs().flatten()
    result = torch.zeros(int(blocks.max()) + 1, dtype=flat.dtype)
    return result.scatter_reduce_(0, blocks, flat, "amax")[blocks].view(values.shape)


def smallest_normal(state_dtype: Any, name: str, before: Tensor, grad: Tensor) -> Tensor | float:
    """The smallest normal number of the format at a step.

    In 8 bits it follows from bounds of the block's new moments.
    """
    if state_dtype == torch.bfloat16:
        return torch.finfo(torch.bfloat16).smallest_normal
    beta, power, binades = (0.9, 1, 13) if name == "exp_avg" else (0.999, 2, 29)
    bound = beta * largest_of_blocks(before) + (1 - beta) * largest_of_blocks(grad) ** power
    _, exponent = torch.frexp(bound * (1 + 2**-20))  # covers any rounding of the bound
    return torch.ldexp(torch.ones_like(bound), exponent - 1 - binades)


@each_dtype
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "split"])
@pytest.mark.parametrize("layout", [*map(str, SIZES), "strided", "channels_last", "0-d", "empty"])
def test_a_step_is_adams_rounded(state_dtype: Any, kind: str, layout: str) -> None:
    """A step is Adam's from the state that it read; moments are rounded up or down."""
    dtype = torch.float32 if kind == "split" else getattr(torch, kind)
    make = LAYOUTS.get(layout) or (lambda dtype: torch.randn(int(layout)).to(dtype))
    p = Parameter(make(dtype))
    options = {"lr": 0.01, "weight_decay": 0.1}
    optimizer = FusedAdamW([p], state_dtype=state_dtype, split=kind == "split", **options)
    state: dict[str, Tensor] = {}
    for t in (1, 2, 3):
        p.grad = random_like(p)  # so that no block has a tiny second moment
        grad = p.grad.double()
        (theta,) = (x.double() for x in optimizer.master_params())
        before = {k: Bounded(v, 0.0, torch.float32) for k, v in state.items()}
        expected = adam.step(
            Bounded(theta, 0.0, torch.float32),
            Bounded(grad, 0.0, torch.float32),
            before,
            t,
            betas=(number(0.9), number(0.999)),
            eps=number(1e-8),
            lr=number(0.01),
            weight_decay=number(0.1),
            decoupled_weight_decay=True,
        ).stored(torch.float32 if kind == "split" else dtype)
        optimizer.step()
        (updated,) = (x.double() for x in optimizer.master_params())
        assert ((updated - expected.value).abs() <= expected.error).all()
        after = values_of(optimizer, p)
        if p.numel():
            fraction = 7 if state_dtype == torch.bfloat16 else 3
            for name in MOMENTS:
                exact = before[name]
                old = state.get(name, torch.zeros_like(grad))
                smallest = smallest_normal(state_dtype, name, old, grad)
                step = rounding_step(exact.value.abs() + exact.error, fraction, smallest)
                assert ((after[name] - exact.value).abs() <= step + exact.error).all()
        state = after


@each_dtype
def test_rounding_is_unbiased(state_dtype: Any) -> None:
    """A number between two is rounded up in proportion to its distance from the lower one."""
    n = 1 << 16
    p = Parameter(torch.zeros(n))
    optimizer = FusedAdam([p], state_dtype=state_dtype)
    p.grad = torch.full((n,), 1 + torch.rand(()).item())
    optimizer.step()
    g = p.grad[0].double()
    fraction = 7 if state_dtype == torch.bfloat16 else 3
    for name, exact in (("exp_avg", 0.1 * g), ("exp_avg_sq", 0.001 * g * g)):
        step = rounding_step(exact, fraction, 0.0)
        lower = torch.floor(exact / step) * step
        values = values_of(optimizer, p)[name]
        ups = int((values == lower + step).sum())
        assert int((values == lower).sum()) + ups == n
        # The word has 16 bits or more: the probability is off by less than 2 to the minus 16.
        chance = ((exact - lower) / step).item()
        assert abs(ups - n * chance) <= binomial_bound(n, chance) + n * 2**-16


@each_dtype
def test_small_changes_are_not_lost(state_dtype: Any) -> None:
    """A second moment shrinks by a thousandth in a step; rounded to nearest, it would stay."""
    n = 1 << 14
    p = Parameter(torch.zeros(n))
    optimizer = FusedAdam([p], lr=0.0, state_dtype=state_dtype)
    p.grad = torch.ones(n)
    optimizer.step()
    start = values_of(optimizer, p)["exp_avg_sq"].mean()
    p.grad = torch.zeros(n)
    for _ in range(700):
        optimizer.step()
    found = values_of(optimizer, p)["exp_avg_sq"]
    expected = start * 0.999**700
    # The rounded values over their expectation are a martingale; the sample shows how they spread.
    assert (found.mean() - expected).abs() <= 6 * found.std() / n**0.5
    assert not torch.equal(found, start.expand(n))


@each_dtype
def test_words_differ(state_dtype: Any) -> None:
    """Words differ between elements, parameters and steps: half of the roundings agree."""
    n = 1 << 12
    p, q = Parameter(torch.zeros(n)), Parameter(torch.zeros(n))
    optimizer = FusedAdam([p, q], betas=(0.0, 0.999), lr=0.0, state_dtype=state_dtype)
    fraction = 7 if state_dtype == torch.bfloat16 else 3
    ups = []
    for _ in range(2):
        for x in (p, q):
            x.grad = torch.full((n,), 1 + 2.0 ** -(fraction + 1))  # half-way
        optimizer.step()
        ups += [values_of(optimizer, x)["exp_avg"] > x.grad[0] for x in (p, q)]
    ups += [ups[0].roll(shift) for shift in (1, LANES, 2 * LANES, 3 * LANES, 4 * LANES, 256)]
    for a, b in itertools.combinations(ups[:4], 2):
        assert abs(int((a == b).sum()) - n / 2) <= binomial_bound(n, 0.5)
    for shifted in ups[4:]:
        # Neighbors are independent in pairs, but not all together.
        assert abs(int((ups[0] == shifted).sum()) - n / 2) <= 2 * binomial_bound(n, 0.5)


def test_words_of_a_draw_are_independent_in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each word, and the upper 18 bits of any two, are uniform: the bits are independent sums."""
    words = []
    for k in range(128):  # words are linear: what each bit of Philox adds determines them
        drawn = tuple((1 << k) >> 32 * i & 0xFFFFFFFF for i in range(4))
        monkeypatch.setattr(rounding, "philox", lambda *counter, drawn=drawn: drawn)
        added: list[int] = []
        keep = lambda i, k, word, added=added: added.append(word)  # noqa: E731
        rounding.for_each_element(keep, (), 0, rounding.DRAW, 0, 0, 0.0, None)
        words.append(added)
    rows = [
        [sum((words[k][n] >> bit & 1) << k for k in range(128)) for bit in range(20)]
        for n in range(rounding.DRAW)
    ]
    assert len(rows) == rounding.DRAW
    assert all(rank(bits) == rounding.WORD_BITS == 20 for bits in rows)
    for one, other in itertools.combinations(rows, 2):
        assert rank(one[2:] + other[2:]) == 36


def rank(rows: Sequence[int]) -> int:
    """The rank of a matrix of bits."""
    basis: list[int] = []
    for row in rows:
        for pivot in basis:
            row = min(row, row ^ pivot)
        if row:
            basis.append(row)
    return len(basis)


@each_dtype
@pytest.mark.parametrize("position", [0, 2**32 - TILE, 2**40])
def test_words_of_large_tensors(
    state_dtype: Any, position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An element's position has 64 bits, and the words are those that Python draws for it."""
    write = LaunchBlock.write

    def moved(block: LaunchBlock, column: str, values: Any, rows: int | None = None) -> None:
        write(block, column, values + position if column == "position" else values, rows)

    monkeypatch.setattr(LaunchBlock, "write", moved)
    n = TILE + 300
    (p,) = vectors([n])
    optimizer = FusedAdam([p], betas=(0.0, 0.999), lr=0.0, state_dtype=state_dtype)
    fraction = 7 if state_dtype == torch.bfloat16 else 3
    p.grad = torch.full((n,), 1 + 2.0 ** -(fraction + 1))  # half-way
    optimizer.step()
    words = torch.zeros(n, dtype=torch.int64)
    keep = lambda i, _, word: words.__setitem__(i, word)  # noqa: E731
    for lane in range(LANES):
        with language.as_lane(lane, LANES):
            rounding.for_each_element(keep, (), 0, n, position, 0, 1.0, None)
    assert torch.equal(values_of(optimizer, p)["exp_avg"] > p.grad[0], words >= 1 << 19)


def test_a_second_moment_that_was_rounded_to_zero() -> None:
    """The divisor is the smallest number that the block can hold, so the step stays small."""
    n = TILE
    p = Parameter(torch.zeros(n))
    optimizer = FusedAdam([p], lr=1.0, state_dtype="float8")
    p.grad = torch.full((n,), 2.0**-17)
    p.grad[:LANES] = 1.0
    optimizer.step()
    values = values_of(optimizer, p)
    lost = (values["exp_avg_sq"] == 0) & (values["exp_avg"] != 0)
    assert lost.any()
    p.grad = torch.zeros(n)
    before = p.detach().clone()
    optimizer.step()
    assert (p - before).abs()[lost].max() <= 4.0


class TestCodes:
    """Reading and making codes on the host, as kernels do."""

    FORMATS = (
        (torch.int8, rounding.e4m3_value, rounding.e4m3_code),
        (torch.uint8, rounding.e5m3_value, rounding.e5m3_code),
    )

    @pytest.mark.parametrize(("dtype", "value", "code"), FORMATS)
    def test_every_code(
        self, dtype: torch.dtype, value: Callable[..., float], code: Callable[..., int]
    ) -> None:
        """A code's value is exact, and becomes the same value again whatever the random word."""
        codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(LANES)
        for scale in (2.0**-120, 2.0**-20, 1.0):
            shape = float8.scales_shape(len(codes), LANES)
            read = float8.decoded(codes.view(dtype), torch.full(shape, scale))
            expected = torch.tensor([value(int(c), scale) for c in codes.tolist()])
            torch.testing.assert_close(read.float(), expected, rtol=0, atol=0, equal_nan=True)
            again, scales = float8.encoded(read, dtype, LANES)
            assert_same_values(float8.decoded(again, scales), read)
            for word in (0, (1 << rounding.WORD_BITS) - 1):
                made = [value(code(x, scale, word), scale) for x in read.tolist()]
                torch.testing.assert_close(
                    torch.tensor(made), expected, rtol=0, atol=0, equal_nan=True
                )

    def test_e4m3_is_torchs(self) -> None:
        numbers = torch.arange(256, dtype=torch.uint8)
        codes = numbers.view(torch.float8_e4m3fn)
        read = float8.decoded(numbers.view(torch.int8), torch.full((1, LANES), 2.0**-6))
        torch.testing.assert_close(read.float(), codes.float(), rtol=0, atol=0, equal_nan=True)

    @pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
    def test_to_nearest(self, dtype: torch.dtype) -> None:
        values = torch.randn(5000) * torch.randn(5000).exp()
        values = values if dtype is torch.int8 else values.abs()
        codes, scales = float8.encoded(values, dtype, LANES)
        step = rounding_step(values.double(), 3, scales.max())
        read = float8.decoded(codes, scales).double()
        # Half a step; where the value rounds up to a higher binade, half of that binade's step.
        assert ((read - values).abs() <= step / 2).all()
