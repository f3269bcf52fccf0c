"""FusedAdam and FusedAdamW whose moments are bfloat16, or 8-bit numbers with a scale a block."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from fusedoptim import FusedAdam, FusedAdamW, transforms
from fusedoptim.kernels import language, rounding
from fusedoptim.launch.block import Chunks, LaunchBlock
from fusedoptim.launch.devices import BACKENDS
from fusedoptim.step import dense, float8
from fusedoptim.step.step_counts import MOST_STEPS
from tests.fusedoptim.helpers import LAYOUTS, make_params, params_of, random_like
from tests.references import adam
from tests.tolerances import Bounded, binomial_bound, number, rounding_step

MOMENTS = ("exp_avg", "exp_avg_sq")
REDUCED = (torch.bfloat16, "float8")
each_dtype = pytest.mark.parametrize("state_dtype", REDUCED, ids=str)
LANES = BACKENDS["cpu"].shape.lanes
TILE = rounding.BLOCK * LANES
# Around the lanes, a draw of the words, a block, a tile and a chunk.
SIZES = (1, 15, 17, 255, 256, 257, TILE - 1, TILE, TILE + 1, 8 * TILE + 300)


def assert_same_bits(one: Tensor, other: Tensor) -> None:
    """Equal, and NaN in the same places."""
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def vectors(sizes: Sequence[int], seed: int = 0) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(size, generator=generator)) for size in sizes]


def run(optimizer: Any, steps: range) -> None:
    """Steps with gradients that depend on the number of the step alone."""
    for k in steps:
        generator = torch.Generator().manual_seed(k)
        for p in params_of(optimizer):
            spread = torch.randn(p.shape, generator=generator).exp()
            p.grad = (torch.randn(p.shape, generator=generator) * spread).to(p.dtype)
        optimizer.step()


def values_of(optimizer: Any, param: Tensor) -> dict[str, Tensor]:
    """The moments of a parameter in float64."""
    state = float8.readable(optimizer.state[param])
    return {name: state[name].double() for name in MOMENTS}


def blocks_of(param: Tensor) -> Tensor:
    """The block of each element: of the same lane, in the same tile."""
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
    """Of the format at a step: in 8 bits it follows from bounds of the block's new moments."""
    if state_dtype == torch.bfloat16:
        return torch.finfo(torch.bfloat16).smallest_normal
    beta, power, binades = (0.9, 1, 13) if name == "exp_avg" else (0.999, 2, 29)
    bound = beta * largest_of_blocks(before) + (1 - beta) * largest_of_blocks(grad) ** power
    _, exponent = torch.frexp(bound * (1 + 2**-20))  # however the bound was rounded
    return torch.ldexp(torch.ones_like(bound), exponent - 1 - binades)


@each_dtype
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "split"])
@pytest.mark.parametrize("layout", [*map(str, SIZES), "strided", "channels_last", "0-d", "empty"])
def test_a_step_is_adams_rounded(state_dtype: Any, kind: str, layout: str) -> None:
    """From the state that was read before it; moments are one of the two numbers around them."""
    dtype = torch.float32 if kind == "split" else getattr(torch, kind)
    make = LAYOUTS.get(layout) or (lambda dtype: torch.randn(int(layout)).to(dtype))
    p = Parameter(make(dtype))
    options = {"lr": 0.01, "weight_decay": 0.1}
    optimizer = FusedAdamW([p], state_dtype=state_dtype, split=kind == "split", **options)
    state: dict[str, Tensor] = {}
    for t in (1, 2, 3):
        p.grad = random_like(p)  # in whose block no second moment is tiny
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
    """A number between two is rounded up as often as it is near the upper one."""
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
    """A second moment that shrinks by a thousandth in a step; to nearest, it would stay."""
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
    # The rounded values are a martingale over expectation; the sample says how far they spread.
    assert (found.mean() - expected).abs() <= 6 * found.std() / n**0.5
    assert not torch.equal(found, start.expand(n))


@each_dtype
def test_words_differ(state_dtype: Any) -> None:
    """Between elements, parameters and steps: roundings agree about half of the time."""
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
        # Neighbours are not all independent of each other, pairs are.
        assert abs(int((ups[0] == shifted).sum()) - n / 2) <= 2 * binomial_bound(n, 0.5)


def test_words_of_a_draw_are_independent_in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each word is uniform, and the upper 18 bits of any two: the bits are independent sums."""
    words = []
    for k in range(128):  # words are linear, and so known by what each bit of Philox adds
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
    """Of a matrix of bits."""
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
    """An element's position has 64 bits: the words are those that Python draws for it."""
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


@each_dtype
def test_steps_that_float32_does_not_count(state_dtype: Any) -> None:
    """Rather than to draw the same words again and again, a step raises, and changes nothing."""
    params = vectors([1000, 17, 300])
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    optimizer = FusedAdamW(groups, state_dtype=state_dtype)
    run(optimizer, range(1))
    optimizer.state[params[2]]["step"].fill_(MOST_STEPS - 1)
    run(optimizer, range(1, 2))
    assert optimizer.state[params[2]]["step"] == MOST_STEPS
    before = copy.deepcopy(optimizer)
    with pytest.raises(RuntimeError, match=r"set state\['step'\] of all parameters to 8388608"):
        run(optimizer, range(2, 3))
    assert_equal(optimizer, before)
    assert [optimizer.state[p]["step"].item() for p in params] == [2, 2, MOST_STEPS]
    optimizer.state[params[2]]["step"].fill_(MOST_STEPS // 2)
    run(optimizer, range(2, 3))
    assert optimizer.state[params[2]]["step"] == MOST_STEPS // 2 + 1
    exact = FusedAdamW(params[:1])
    run(exact, range(1))
    exact.state[params[0]]["step"].fill_(MOST_STEPS)
    run(exact, range(1, 2))  # as torch's


@each_dtype
def test_chunks_do_not_matter(state_dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for limit in (BACKENDS["cpu"].shape.chunk, TILE, 2 * TILE):
        monkeypatch.setattr(dense, "Chunks", lambda numels, _, limit=limit: Chunks(numels, limit))
        optimizer = FusedAdam(vectors(SIZES), state_dtype=state_dtype)
        run(optimizer, range(4))
        runs.append(optimizer)
    for other in runs[1:]:
        assert_equal(runs[0], other)


def assert_equal(one: Any, other: Any) -> None:
    """The same parameters and the same moments, bit by bit."""
    for p, q in zip(params_of(one), params_of(other)):
        assert_same_bits(p, q)
        for name in MOMENTS:
            assert_same_bits(values_of(one, p)[name], values_of(other, q)[name])


def saved(optimizer: Any) -> dict[str, Any]:
    """Its state_dict, through a file."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@each_dtype
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resume_is_bit_for_bit(state_dtype: Any, split: bool, dtype: torch.dtype) -> None:
    def make() -> Any:
        params = make_params(dtype, ("17", "1000", "65537", "channels_last", "empty", "0-d"))
        return FusedAdamW(params, state_dtype=state_dtype, split=split)

    optimizer = make()
    run(optimizer, range(5))
    resumed, copied = make(), copy.deepcopy(optimizer)
    with torch.no_grad():
        for p, q in zip(params_of(resumed), params_of(optimizer)):
            p.copy_(q)
    resumed.load_state_dict(saved(optimizer))
    for each in (optimizer, resumed, copied):
        run(each, range(5, 12))
    assert_equal(optimizer, resumed)
    assert_equal(optimizer, copied)


@pytest.mark.parametrize("target", [torch.float32, *REDUCED], ids=str)
@pytest.mark.parametrize("source", ["torch", torch.float32, *REDUCED], ids=str)
def test_checkpoints_are_converted(source: Any, target: Any) -> None:
    """Of torch's class and of any other state_dtype, to the nearest number."""
    given: Any = torch.optim.AdamW(vectors(SIZES))
    if source != "torch":
        given = FusedAdamW(vectors(SIZES), state_dtype=source)
    run(given, range(3))
    optimizer = FusedAdamW(vectors(SIZES), state_dtype=target)
    optimizer.load_state_dict(saved(given))
    for p in params_of(optimizer):
        p.grad = torch.zeros_like(p)
    loaded = {p: values_of(optimizer, p) for p in params_of(optimizer)}
    for p, q in zip(params_of(optimizer), params_of(given)):
        for name in MOMENTS:
            assert_same_bits(loaded[p][name], values_of(given, q)[name])
    run(optimizer, range(3, 4))
    assert {str(optimizer.state[p]["exp_avg_sq"].dtype) for p in params_of(optimizer)} == {
        str({"float8": torch.uint8}.get(target, target))
    }


@each_dtype
def test_ours_load_in_torchs(state_dtype: Any) -> None:
    ours = FusedAdamW(vectors(SIZES), state_dtype=state_dtype)
    run(ours, range(3))
    theirs = torch.optim.AdamW(vectors(SIZES))
    theirs.load_state_dict(saved(ours))
    for p, q in zip(params_of(ours), params_of(theirs)):
        assert set(theirs.state[q]) == {"step", *MOMENTS}
        for name in MOMENTS:
            assert theirs.state[q][name].dtype == torch.float32
            assert_same_bits(theirs.state[q][name].double(), values_of(ours, p)[name])
    run(theirs, range(3, 4))


@each_dtype
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30, 3.5e20])
def test_a_gradient_that_is_not_finite(state_dtype: Any, bad: float) -> None:
    """Or whose square is not, or too large: no other element differs, of its block or elsewhere."""
    n, where = 3 * TILE, TILE + 37
    pair = [FusedAdam([Parameter(torch.ones(n))], state_dtype=state_dtype) for _ in range(2)]
    others = torch.arange(n) != where
    for k in range(4):
        for optimizer, value in zip(pair, (0.0, bad if k == 1 else 0.0)):
            (p,) = params_of(optimizer)
            generator = torch.Generator().manual_seed(k)
            p.grad = torch.randn(n, generator=generator)
            p.grad[where] = value
            optimizer.step()
        for name in MOMENTS:
            a, b = (values_of(o, params_of(o)[0])[name] for o in pair)
            assert_same_bits(a[others], b[others])
        if k:
            found = values_of(pair[1], params_of(pair[1])[0])["exp_avg_sq"][where]
            assert found.isnan() if state_dtype == "float8" else not found < 1e38
    p, q = (params_of(o)[0] for o in pair)
    assert_same_bits(p[others], q[others])


def test_a_second_moment_that_was_rounded_to_zero() -> None:
    """The first is divided by the smallest that the block can hold, and the step stays small."""
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


def test_bytes() -> None:
    """2.1 bytes a weight."""
    p = Parameter(torch.zeros(1 << 20))
    optimizer = FusedAdamW([p], state_dtype="float8")
    run(optimizer, range(1))
    state = optimizer.state[p]
    assert sum(state[k].nbytes for k in state if k != "step") <= 2.1 * p.numel()
    assert set(state) == {"step", *MOMENTS, *(f"{name}_scale" for name in MOMENTS)}


@pytest.mark.parametrize("cls", [FusedAdam, FusedAdamW])
class TestRefused:
    @pytest.mark.parametrize("state_dtype", [torch.float16, torch.float64, "int8", None, 8])
    def test_a_dtype_that_is_not_offered(self, cls: Any, state_dtype: Any) -> None:
        with pytest.raises(ValueError, match=r"state_dtype is .*; pass one of torch\.float32"):
            cls(vectors([3]), state_dtype=state_dtype)

    @each_dtype
    def test_amsgrad(self, cls: Any, state_dtype: Any) -> None:
        with pytest.raises(ValueError, match="does not go with amsgrad=True"):
            cls(vectors([3]), state_dtype=state_dtype, amsgrad=True)
        optimizer = cls(vectors([3]), state_dtype=state_dtype)
        run(optimizer, range(1))
        optimizer.param_groups[0]["amsgrad"] = True
        before = params_of(optimizer)[0].detach().clone()
        with pytest.raises(ValueError, match="does not go with amsgrad=True"):
            run(optimizer, range(1, 2))
        assert_same_bits(params_of(optimizer)[0].detach(), before)

    @each_dtype
    @pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
    def test_dtypes_of_parameters(self, cls: Any, state_dtype: Any, dtype: torch.dtype) -> None:
        wide = Parameter(torch.zeros(3, dtype=dtype))
        with pytest.raises(TypeError, match=f"and one is {dtype}; convert the model"):
            cls([wide], state_dtype=state_dtype)
        optimizer = cls(vectors([3]), state_dtype=state_dtype)
        with pytest.raises(TypeError, match=f"and one is {dtype}"):
            optimizer.add_param_group({"params": iter([wide])})
        assert len(optimizer.param_groups) == 1
        params_of(optimizer)[0].data = torch.zeros(3, dtype=dtype)
        with pytest.raises(TypeError, match=f"and one is {dtype}"):
            optimizer.step()

    @each_dtype
    def test_sparse_gradients(self, cls: Any, state_dtype: Any) -> None:
        (p,) = vectors([3])
        p.grad = torch.tensor([1.0, 0.0, 0.0]).to_sparse()
        with pytest.raises(RuntimeError, match="does not support sparse gradients"):
            cls([p], state_dtype=state_dtype).step()


def test_float64_parameters_keep_their_state() -> None:
    p = Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = FusedAdam([p], state_dtype=torch.float32)
    p.grad = torch.ones(3, dtype=torch.float64)
    optimizer.step()
    assert optimizer.state[p]["exp_avg"].dtype == torch.float64


def test_an_optimizer_that_optimize_converts_has_float32_state() -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = transforms.optimize(model, optimizer=optimizer, inplace=True)
    assert optimizer.state_dtype == torch.float32


class TestCodes:
    """Reading and making codes on the host, as kernels do."""

    FORMATS = (
        (torch.float8_e4m3fn, rounding.e4m3_value, rounding.e4m3_code),
        (torch.uint8, rounding.e5m3_value, rounding.e5m3_code),
    )

    @pytest.mark.parametrize(("dtype", "value", "code"), FORMATS)
    def test_every_code(
        self, dtype: torch.dtype, value: Callable[..., float], code: Callable[..., int]
    ) -> None:
        """Its value is exact, and becomes the same value again whatever the random word."""
        codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(LANES)
        for scale in (2.0**-120, 2.0**-20, 1.0):
            shape = float8.scales_shape(len(codes), LANES)
            read = float8.decoded(codes.view(dtype), torch.full(shape, scale))
            expected = torch.tensor([value(int(c), scale) for c in codes.tolist()])
            torch.testing.assert_close(read.float(), expected, rtol=0, atol=0, equal_nan=True)
            again, scales = float8.encoded(read, dtype, LANES)
            assert_same_bits(float8.decoded(again, scales), read)
            for word in (0, (1 << rounding.WORD_BITS) - 1):
                made = [value(code(x, scale, word), scale) for x in read.tolist()]
                torch.testing.assert_close(
                    torch.tensor(made), expected, rtol=0, atol=0, equal_nan=True
                )

    def test_e4m3_is_torchs(self) -> None:
        codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
        read = float8.decoded(codes, torch.full((1, LANES), 2.0**-6))
        torch.testing.assert_close(read.float(), codes.float(), rtol=0, atol=0, equal_nan=True)

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8])
    def test_to_nearest(self, dtype: torch.dtype) -> None:
        values = torch.randn(5000) * torch.randn(5000).exp()
        values = values if dtype is torch.float8_e4m3fn else values.abs()
        codes, scales = float8.encoded(values, dtype, LANES)
        step = rounding_step(values.double(), 3, scales.max())
        read = float8.decoded(codes, scales).double()
        # Half a step, or half of one a binade higher where the value rounds up to it.
        assert ((read - values).abs() <= step / 2).all()
