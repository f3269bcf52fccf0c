"""Dropout and AlphaDropout: values, masks, gradients, tracing, statistics, errors."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fusedoptim.kernels.dropout import words
from fusedoptim.kernels.language import swapped_halves
from fusedoptim.launch.block import LaunchBlock
from fusedoptim.launch.modules import FOLDER
from fusedoptim.ops import _launching, alpha_dropout, dropout
from tests.compiling import each_compilation, needs_compiler, quiet_compiler
from tests.fusedoptim.helpers import run_in_threads
from tests.optimizer_cases import FLOATS
from tests.running import at_each_thread_count, check_script
from tests.tolerances import CHUNK, LANES

OP = torch.ops.fusedoptim.dropout.default
ALPHA_OP = torch.ops.fusedoptim.alpha_dropout.default
each_operator = pytest.mark.parametrize("operator", [dropout, alpha_dropout])
Operator = Callable[[Tensor, Tensor, float], Tensor]
BLOCK = 8 * LANES
"""The number of elements that are drawn at a time."""


def new_seed() -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, ())


def mask(shape: int | tuple[int, ...], seed: int | Tensor, p: float) -> Tensor:
    """Whether each element is kept."""
    return dropout(torch.ones(shape), torch.as_tensor(seed), p) != 0


def constants(operator: Operator, p: float) -> tuple[float, float, float]:
    """The factor of kept elements, and what is added to kept and to dropped ones."""
    if operator is dropout:
        return 1 / (1 - p), 0.0, 0.0
    c = 1.7580993408473766
    a = ((1 - p) * (1 + c * c * p)) ** -0.5
    return a, a * c * p, -a * c * (1 - p)


def of_torch(operator: Operator) -> Callable[..., Tensor]:
    """Torch's function of that name."""
    function: Callable[..., Tensor] = getattr(torch.nn.functional, operator.__name__)
    return function


def layouts() -> dict[str, Tensor]:
    """Tensors of all kinds of strides."""
    return {
        "chunks": torch.randn(2 * CHUNK + 77),
        "matrix": torch.randn(33, 65),
        "transposed": torch.randn(33, 65).t(),
        "channels_last": torch.randn(2, 8, 5, 7).to(memory_format=torch.channels_last),
        "one_channel": torch.randn(3, 1, 5, 7).to(memory_format=torch.channels_last),
        "strided": torch.randn(20, 30)[:, ::2],
        "expanded": torch.randn(20, 1).expand(20, 30),
        "offset": torch.randn(101)[1:],
        "scalar": torch.randn(()),
        "empty": torch.randn(0, 3),
    }


def numbers(seed: int, blocks: range) -> Tensor:
    """The random numbers of elements, in blocks of four words for each lane.

    A vector of words comes before the same words with their halves swapped.
    """
    found: list[int] = []
    for block in blocks:
        counters = range(block * LANES, (block + 1) * LANES)
        of_lanes = [words(seed, counter) for counter in counters]
        for vector in zip(*of_lanes):
            found += [*vector, *map(swapped_halves, vector)]
    return torch.tensor(found)


class TestValues:
    @each_operator
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("layout", layouts())
    def test_kept_ones_are_scaled_and_the_others_zero(
        self, layout: str, dtype: torch.dtype, operator: Operator
    ) -> None:
        """AlphaDropout adds a constant to each; both have the same mask."""
        x, seed = layouts()[layout].to(dtype), new_seed()
        before = x.clone()
        y = operator(x, seed, 0.3)
        kept = dropout(torch.ones_like(x), seed, 0.3) != 0
        real = torch.promote_types(dtype, torch.float32)
        scale, if_kept, if_dropped = torch.tensor(constants(operator, 0.3), dtype=real)
        expected = torch.where(kept, x.to(real) * scale + if_kept, if_dropped).to(dtype)
        assert y.dtype == dtype
        assert y.stride() == torch.empty_like(x).stride()
        torch.testing.assert_close(y, expected, rtol=0, atol=0)
        assert torch.equal(x, before)

    @each_operator
    @pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
    def test_values_are_torchs(self, p: float, operator: Operator) -> None:
        """Equal elements have two results, here and in torch."""
        x = torch.randn((), dtype=torch.float64).expand(1000)
        ours, torchs = operator(x, new_seed(), p).unique(), of_torch(operator)(x, p, True).unique()
        assert len(ours) == 2
        torch.testing.assert_close(ours, torchs)

    @pytest.mark.parametrize("numel", [1, 63, 64, 65, 127, 128, 129, CHUNK + 250])
    def test_mask_is_philoxs(self, numel: int) -> None:
        seed, p = new_seed(), 0.37
        drawn = numbers(int(seed), range(-(-numel // BLOCK)))[:numel]
        assert torch.equal(mask(numel, seed, p), drawn >= round(p * 2**32))

    @pytest.mark.parametrize("position", [2**35 - BLOCK, 2**60])
    @pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63 - 1])
    def test_words_of_large_tensors(
        self, seed: int, position: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Counters have 64 bits, as seeds do."""
        write = LaunchBlock.write

        def moved(block: LaunchBlock, column: str, values: Any, rows: int | None = None) -> None:
            write(block, column, values + position if column == "position" else values, rows)

        monkeypatch.setattr(LaunchBlock, "write", moved)
        monkeypatch.setattr(_launching, "_idle", {})
        first = position // BLOCK
        drawn = numbers(seed, range(first, first + 3))
        assert torch.equal(mask(len(drawn), seed, 0.5), drawn >= 2**31)

    def test_mask_follows_the_order_in_memory(self) -> None:
        x = torch.ones(2, 8, 5, 7).to(memory_format=torch.channels_last)
        y = dropout(x, torch.tensor(3), 0.5)
        in_memory = y.permute(0, 2, 3, 1).flatten() != 0
        assert torch.equal(in_memory, mask(x.numel(), 3, 0.5))

    @each_operator
    @pytest.mark.parametrize("dtype", FLOATS)
    def test_zero_and_one(self, dtype: torch.dtype, operator: Operator) -> None:
        x = torch.randn(1000).to(dtype)
        assert torch.equal(operator(x, new_seed(), 0.0), x)
        assert torch.equal(operator(x, new_seed(), 1.0), torch.zeros_like(x))

    def test_p_is_a_tensor(self) -> None:
        x, seed = torch.randn(100), new_seed()
        assert torch.equal(dropout(x, seed, torch.tensor(0.5)), dropout(x, seed, 0.5))  # type: ignore[arg-type]  # as torch's parser, which takes it for a float

    @pytest.mark.parametrize(
        "p", [torch.tensor([0.5]), torch.tensor(0.5, requires_grad=True)], ids=["1-d", "grad"]
    )
    def test_p_is_a_tensor_that_torch_refuses(self, p: Any) -> None:
        for function in (dropout, lambda x, _, p: torch.nn.functional.dropout(x, p)):
            with pytest.raises(TypeError, match=r"p\.item\(\)|must be float, not Tensor"):
                function(torch.ones(8), torch.tensor(3), p)

    @each_operator
    @pytest.mark.parametrize("dtype", FLOATS)
    def test_infinity_and_nan_as_torchs(self, dtype: torch.dtype, operator: Operator) -> None:
        """Dropping multiplies by zero: a dropped infinity is NaN."""
        x = torch.tensor([math.inf, -math.inf, math.nan]).repeat(1000).to(dtype)
        y = operator(x, torch.tensor(5), 0.5)
        kept = mask(3000, 5, 0.5)
        torch.testing.assert_close(y, x * kept, rtol=0, atol=0, equal_nan=True)
        torchs = of_torch(operator)(x, 1.0, True)
        assert torch.equal(operator(x, new_seed(), 1.0).isnan(), torchs.isnan())

    def test_one_element_may_be_dropped_with_any_seed(self) -> None:
        kept = sum(int(mask(1, new_seed(), 0.5)) for _ in range(100))
        assert 5 < kept < 95  # fails by chance with a probability of 2e-22

    def test_threads_at_once(self) -> None:
        """Each thread uses launch blocks of its own."""
        x = torch.ones(3 * CHUNK)
        expected = [mask(x.numel(), k, 0.5) for k in range(4)]

        def work(k: int) -> None:
            for _ in range(50):
                assert torch.equal(dropout(x, torch.tensor(k), 0.5) != 0, expected[k])

        run_in_threads(*(functools.partial(work, k) for k in range(4)))


def test_the_same_bits_whatever_the_number_of_threads() -> None:
    x, seed = torch.ones(300_000), new_seed()
    first, *others = at_each_thread_count(lambda: dropout(x, seed, 0.5))
    assert all(torch.equal(first, other) for other in others)


class TestGradient:
    @each_operator
    @pytest.mark.parametrize("layout", layouts())
    def test_is_the_same_mask(self, layout: str, operator: Operator) -> None:
        """The gradient has the same mask, even with other strides."""
        seed = new_seed()
        x = layouts()[layout].requires_grad_()
        y = operator(x, seed, 0.25)
        for grad in (torch.randn_like(y), torch.randn(y.shape), torch.randn(()).expand(y.shape)):
            (got,) = torch.autograd.grad(y, x, grad, retain_graph=True)
            kept = dropout(torch.ones_like(x), seed, 0.25) != 0
            scaled = grad * torch.tensor(constants(operator, 0.25)[0])
            torch.testing.assert_close(got, torch.where(kept, scaled, 0), rtol=0, atol=0)

    @each_operator
    def test_nothing_but_the_seed_is_kept(self, operator: Operator) -> None:
        kept: list[Tensor] = []
        x = torch.randn(1000, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
        ):
            operator(x, new_seed(), 0.5)
        assert [tensor.numel() for tensor in kept] == [1]

    @each_operator
    @pytest.mark.parametrize("layout", ["matrix", "channels_last", "strided"])
    def test_gradcheck(self, layout: str, operator: Operator) -> None:
        x, seed = layouts()[layout][..., :3].double().requires_grad_(), new_seed()
        assert torch.autograd.gradcheck(lambda x: operator(x, seed, 0.4), x)
        assert torch.autograd.gradgradcheck(lambda x: operator(x, seed, 0.4), x)


class TestTracing:
    @pytest.mark.parametrize(
        ("layout", "dtype"),
        [
            *((layout, torch.float32) for layout in layouts()),
            *(("channels_last", dtype) for dtype in FLOATS if dtype != torch.float32),
        ],
    )
    def test_opcheck(self, layout: str, dtype: torch.dtype) -> None:
        x = layouts()[layout].to(dtype)
        for value in (x.detach(), x.requires_grad_()):
            torch.library.opcheck(OP, (value, new_seed(), 0.3))

    @pytest.mark.parametrize("layout", ["channels_last", "strided", "empty"])
    def test_opcheck_of_alpha_dropout(self, layout: str) -> None:
        x = layouts()[layout]
        torch.library.opcheck(ALPHA_OP, (x.requires_grad_(), new_seed(), 0.3, True))
        torch.library.opcheck(ALPHA_OP, (x.detach(), new_seed(), 0.3, False))

    @needs_compiler
    @quiet_compiler
    @each_compilation
    def test_compiled_equals_eager(self, dynamic: bool, sizes: list[int]) -> None:
        """Results are equal even in a graph whose compiler may choose strides."""
        convolution = torch.nn.Conv2d(8, 8, 3, padding=1)

        def function(x: Tensor, seed: Tensor) -> Tensor:
            y = convolution(x)
            both = torch.cat([dropout(y, seed, 0.5) * 2, alpha_dropout(y, seed, 0.5)])
            return both.permute(0, 2, 3, 1).contiguous()

        compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
        for size in sizes:
            x = torch.randn(2, 8, size, size).to(memory_format=torch.channels_last)
            x.requires_grad_()
            seed = new_seed()
            ours, expected = compiled(x, seed), function(x, seed)
            torch.testing.assert_close(ours, expected)
            assert torch.equal(ours == 0, expected == 0)
            grad = torch.randn_like(ours)
            gradients = [torch.autograd.grad(y, x, grad)[0] for y in (ours, expected)]
            torch.testing.assert_close(*gradients)

    @each_operator
    def test_fake_tensors(self, operator: Operator) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
            y = operator(x, torch.tensor(0), 0.5)
        assert (y.shape, y.stride()) == (x.shape, x.stride())

    def test_meta_tensors(self) -> None:
        y = dropout(
            torch.empty(3, 4, device="meta"), torch.empty((), dtype=torch.int64, device="meta"), 0.5
        )
        assert (y.shape, y.device.type) == ((3, 4), "meta")

    @each_operator
    def test_autocast_keeps_the_dtype(self, operator: Operator) -> None:
        for dtype in FLOATS:
            with torch.autocast("cpu", torch.bfloat16):
                assert operator(torch.ones(3).to(dtype), new_seed(), 0.5).dtype == dtype


@each_operator
class TestBadInput:
    @pytest.mark.parametrize("p", [-0.1, 1.1, math.nan, math.inf, -math.inf])
    def test_p(self, p: float, operator: Operator) -> None:
        message = f"^{operator.__name__}: p={p!r} is not a probability; pass a number"
        with pytest.raises(ValueError, match=message):
            operator(torch.ones(3), new_seed(), p)

    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
    def test_dtype(self, dtype: torch.dtype, operator: Operator) -> None:
        message = f"^{operator.__name__}: x has dtype {dtype}, and kernels compute with float"
        with pytest.raises(TypeError, match=message):
            operator(torch.ones(3, dtype=dtype), new_seed(), 0.5)

    @pytest.mark.parametrize("x", [None, [1.0]])
    def test_no_tensor(self, x: Any, operator: Operator) -> None:
        message = f"^{operator.__name__}: x is of type {type(x).__name__}; pass a tensor"
        with pytest.raises(TypeError, match=message):
            operator(x, new_seed(), 0.5)

    def test_seed(self, operator: Operator) -> None:
        name = operator.__name__
        with pytest.raises(TypeError, match=f"^{name}: seed is of type int; pass a tensor"):
            operator(torch.ones(4), 3, 0.5)  # type: ignore[arg-type]  # on purpose
        with pytest.raises(TypeError, match=r"seed has dtype torch.int32; pass an int64 tensor"):
            operator(torch.ones(3), new_seed().int(), 0.5)
        with pytest.raises(ValueError, match=r"seed has shape \(2,\) and is on cpu; pass one"):
            operator(torch.ones(3), torch.zeros(2, dtype=torch.int64), 0.5)

    def test_errors_of_a_traced_call_are_the_same(self, operator: Operator) -> None:
        x = torch.empty(3, device="meta")
        with pytest.raises(ValueError, match=r"p=2.0 is not a probability"):
            operator(x, torch.empty((), dtype=torch.int64, device="meta"), 2.0)


def chi_squared_tail(value: float, freedom: int) -> float:
    """The probability of a chi-squared value that is at least as large."""
    half = torch.tensor([freedom / 2, value / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


FALSE_ALARM = 1e-9
"""Each test's probability of a false alarm. There are fewer than 1,000: in all less than 1e-6."""
STRETCH = 1024
N = 1 << 20


def rate(kept: Tensor, p: float) -> float:
    """The probability of the number of kept elements, and of its spread over stretches."""
    off = kept.double().view(-1, STRETCH).sum(1) - STRETCH * (1 - p)
    variance = STRETCH * p * (1 - p)
    total = chi_squared_tail(float(off.sum() ** 2 / (len(off) * variance)), 1)
    spread = chi_squared_tail(float((off**2).sum() / variance), len(off))
    return min(total, 2 * spread, 2 * (1 - spread))


def independence(first: Tensor, second: Tensor, p: float) -> float:
    """The probability of the counts of kept and dropped elements in pairs."""
    observed = torch.bincount((2 * first.long() + second.long()).flatten(), minlength=4).double()
    one = torch.tensor([p, 1 - p], dtype=torch.float64)
    expected = first.numel() * torch.outer(one, one).flatten()
    return chi_squared_tail(float(((observed - expected) ** 2 / expected).sum()), 3)


def neighbours(kept: Tensor, p: float) -> float:
    """The least probability of pairs at some distances; an element is in one pair per distance."""
    found = []
    for distance in (1, 2, 3, 4, 8, LANES, 2 * LANES, 4 * LANES, BLOCK, CHUNK):
        pairs = kept[: len(kept) // (2 * distance) * 2 * distance].view(-1, 2, distance)
        found.append(independence(pairs[:, 0], pairs[:, 1], p))
    return min(found)


def seeds(generator: Callable[[int], Tensor], p: float) -> float:
    """The least probability of pairs of masks whose seeds differ in one bit or by one."""
    start = int(torch.randint(2**62, ()))
    mask = generator(start)
    others = [start + 1, start ^ 1, start ^ (1 << 31), start ^ (1 << 32), start ^ (1 << 61)]
    found = []
    for other in map(generator, others):
        found.append(independence(mask, other, p))
        # Counters that begin at the seed would give the same words at a distance.
        found += [independence(mask[k:], other[:-k], p) for k in (1, LANES, 4 * LANES, BLOCK)]
        found += [independence(mask[:-k], other[k:], p) for k in (1, LANES, 4 * LANES, BLOCK)]
    return min(found)


def moments(y: Tensor) -> float:
    """How far a normal sample's mean and variance are off from 0 and 1, in standard deviations."""
    off = torch.stack([y, y.square() - 1]).double()
    return float((off.mean(1).abs() / off.std(1)).max()) * math.sqrt(y.numel())


class TestStatistics:
    @pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
    def test_rate_and_neighbours(self, p: float) -> None:
        kept = mask(N, new_seed(), p)
        assert rate(kept, p) > FALSE_ALARM
        assert neighbours(kept, p) > FALSE_ALARM

    @pytest.mark.parametrize("p", [0.1, 0.5])
    def test_seeds(self, p: float) -> None:
        assert seeds(lambda seed: mask(N // 8, seed, p), p) > FALSE_ALARM

    def test_first_element_of_many_seeds(self) -> None:
        """A model of small layers uses only the first words of each seed."""
        kept = torch.stack([mask(STRETCH, seed, 0.5) for seed in range(STRETCH)])
        assert rate(kept.t().flatten(), 0.5) > FALSE_ALARM
        assert neighbours(kept.t().flatten(), 0.5) > FALSE_ALARM

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_mean_is_kept(self, dtype: torch.dtype) -> None:
        """The sum of what is kept is about normal, with a known standard deviation."""
        p = 0.1
        y = dropout(torch.ones(N, dtype=dtype), new_seed(), p).double()
        scale = float(torch.tensor(1 / (1 - p), dtype=dtype))
        deviation = scale * math.sqrt(N * p * (1 - p))
        assert abs(float(y.sum()) - scale * N * (1 - p)) < 6.1 * deviation  # or by chance, at 1e-9

    @pytest.mark.parametrize("p", [0.1, 0.5])
    def test_alpha_dropout_keeps_mean_and_variance(self, p: float) -> None:
        seed = new_seed()
        assert rate(alpha_dropout(torch.zeros(N), seed, p) > 0, p) > FALSE_ALARM
        y = alpha_dropout(torch.randn(N), seed, p)
        assert moments(y) < 6.2  # or by chance, at 1e-9


class TestBrokenGenerators:
    """The statistical tests detect broken generators."""

    P = 0.5

    def test_wrong_rate(self) -> None:
        assert rate(mask(N, new_seed(), self.P + 0.005), self.P) < FALSE_ALARM

    def test_another_variance(self) -> None:
        assert moments(dropout(torch.randn(N), new_seed(), 0.1)) > 6.2

    def test_another_mean(self) -> None:
        assert moments(alpha_dropout(torch.randn(N), new_seed(), 0.1) + 0.02) > 6.2

    def test_too_even_a_rate(self) -> None:
        assert rate(torch.arange(N) % 2 == 0, self.P) < FALSE_ALARM

    def test_a_word_for_two_neighbours(self) -> None:
        assert (
            neighbours(mask(N // 2, new_seed(), self.P).repeat_interleave(2), self.P) < FALSE_ALARM
        )

    def test_the_same_words_in_each_chunk(self) -> None:
        assert neighbours(mask(CHUNK, new_seed(), self.P).repeat(N // CHUNK), self.P) < FALSE_ALARM

    def test_a_seed_of_32_bits(self) -> None:
        assert seeds(lambda seed: mask(N // 8, seed % 2**32, self.P), self.P) < FALSE_ALARM

    def test_counters_that_begin_at_the_seed(self) -> None:
        generated = mask(N, new_seed(), self.P)

        def shifted(seed: int) -> Tensor:
            start = seed % 1000 * LANES
            return generated[start : start + N // 8]

        assert seeds(shifted, self.P) < FALSE_ALARM


def test_loop_is_vectorized(tmp_path: Path) -> None:
    """The driver's code has whole-vector products of 32 by 32 bits, and no gathers."""
    script = """
        import os, sys
        import torch
        from fusedoptim.ops import alpha_dropout, dropout
        os.chdir(sys.argv[1])
        for dtype in (torch.float32, torch.bfloat16):
            for operator in (alpha_dropout, dropout):
                operator(torch.ones(999, dtype=dtype), torch.tensor(1), 0.5)
    """
    check_script(
        script,
        str(tmp_path),
        CL_CONFIG_DUMP_DISASSEMBLY="True",  # to the current folder
        FUSEDOPTIM_CACHE_DIR=str(tmp_path / "cache"),
    )
    code = "".join(path.read_text() for path in tmp_path.glob("*.asm"))
    assert re.search(r"\bv?pmuludq\b.*[xyz]mm", code)
    assert not re.findall(r"\bvp?(?:gather|scatter)\w+", code)


@pytest.mark.parametrize("variant", ["f32", "f64", "bf16"])  # conversions of float16 add
def test_only_alpha_dropout_adds(variant: str) -> None:
    """Both kernels have the same source, and the compiler omits dropout's sums."""
    float_add = 129  # SPIR-V's OpFAdd
    assert float_add in operations(f"alpha_dropout_{variant}")
    assert float_add not in operations(f"dropout_{variant}")


def operations(module: str) -> set[int]:
    """The operations in a module of SPIR-V: numbers in the lower half of an instruction's word."""
    found, module_words = set(), np.fromfile(FOLDER / f"{module}.spv", np.uint32).tolist()
    place = 5  # after the header
    while place < len(module_words):
        found.add(module_words[place] & 0xFFFF)
        place += module_words[place] >> 16
    return found
