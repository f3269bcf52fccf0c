"""scaled_dot_product_attention compared with torch's and float64, with and without dropout."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from fusedoptim import ops
from fusedoptim._torch_private import has_bfloat16_products
from fusedoptim.nn import functional
from fusedoptim.nn.functional import scaled_dot_product_attention as attention
from tests.compiling import needs_compiler, quiet_compiler
from tests.fusedoptim.helpers import assert_within
from tests.optimizer_cases import FLOATS
from tests.tolerances import attention_errors, binomial_bound

TINY = 1e-12
"""A probability so small that nothing is ever dropped."""
torchs = nn.functional.scaled_dot_product_attention


@pytest.fixture
def _fresh_compiler() -> None:
    """Reset the compiler, as functions with the same code share a limited cache."""
    torch._dynamo.reset()


def inputs(
    *batch: int, rows: int = 9, columns: int = 21, width: int = 16, dtype: Any = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, as views of projections whose second-to-last dimension is the heads."""

    def new(length: int) -> Tensor:
        return torch.randn(*batch[:-1], length, batch[-1], width).transpose(-2, -3).to(dtype)

    return new(rows), new(columns), new(columns)


def gradients(y: Tensor, tensors: Any, grad: Tensor, **options: Any) -> list[Tensor]:
    return list(torch.autograd.grad(y, tensors, grad, **options))


def masks(rows: int, columns: int) -> dict[str, Tensor]:
    keeps = torch.rand(2, 1, rows, columns) > 0.3
    keeps[1, 0, 2] = False  # a row that is fully masked
    added = torch.randn(3, rows, columns)
    added[0, 1, columns // 2] = -math.inf
    added[0, 3] = -math.inf
    return {"bool": keeps, "float": added, "by column": torch.rand(2, 1, 1, columns) > 0.3}


def is_ours(*arguments: Any, **options: Any) -> bool:
    """Whether the call used our attention; if not, its result has to equal torch's."""
    with mock.patch.object(functional, "attention", wraps=functional.attention) as called:
        torch.manual_seed(1)
        result = attention(*arguments, **options)
    if not called.called:
        torch.manual_seed(1)
        torch.testing.assert_close(result, torchs(*arguments, **options), rtol=0, atol=0)
    return called.called


class TestValues:
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("shape", [(9, 21, 16), (64, 64, 64), (33, 1, 5)])
    @pytest.mark.parametrize(
        "how", ["plain", "causal", "bool", "float", "by column", "scale", "groups"]
    )
    def test_beside_float64_with_the_same_mask(
        self, how: str, shape: tuple[int, int, int], dtype: torch.dtype
    ) -> None:
        rows, columns, width = shape
        q, k, v = inputs(2, 6 if how == "groups" else 3, rows=rows, columns=columns, width=width)
        options: dict[str, Any] = {"dropout_p": 0.3}
        added = None
        if how == "groups":
            k, v = k[:, ::3], v[:, ::3]
            options["enable_gqa"] = True
        elif how == "causal":
            options["is_causal"] = True
            added = torch.full((rows, columns), -math.inf).triu(1).double()
        elif how == "scale":
            options["scale"] = -0.3
        elif how in masks(5, 5):
            given = masks(rows, columns)[how]
            options["attn_mask"] = given if given.dtype == torch.bool else given.to(dtype)
            added = options["attn_mask"].double()
            if how != "float":
                added = torch.zeros_like(added).masked_fill(~given, -math.inf)
        tensors = [tensor.to(dtype).requires_grad_() for tensor in (q, k, v)]
        seed = int(torch.randint(1 << 40, ()))
        torch.manual_seed(seed)
        y = attention(*tensors, **options)
        grad = torch.randn(y.shape).to(dtype)
        assert y.dtype == dtype

        torch.manual_seed(seed)
        batch, ones = y.shape[:-2], torch.ones(math.prod(y.shape[:-2]), rows, columns).double()
        kept = ops.dropout(ones, torch.randint(2**63 - 1, ()), 0.3).view(*batch, rows, columns)
        exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
        eq, ek, ev = exact
        if how == "groups":
            ek, ev = (tensor.repeat_interleave(3, 1) for tensor in (ek, ev))
        scale = options.get("scale", 1 / math.sqrt(width))
        scores, is_empty = scale * eq @ ek.mT, torch.tensor(False)
        if added is not None:
            is_empty = (added == -math.inf).all(-1, keepdim=True)
            scores = scores + added.masked_fill(is_empty, 0)
        weights = torch.softmax(scores, -1).masked_fill(is_empty, 0)
        expected = (weights * kept) @ ev
        allowed = attention_errors(
            *(tensor.detach() for tensor in (eq, ek, ev)), added, kept, scale, grad.double(), dtype
        )
        assert_within(y.detach(), expected.detach(), allowed[0], "output")
        got, right = gradients(y, tensors, grad), gradients(expected, exact, grad.double())
        if how == "groups":
            for i in (2, 3):
                allowed[i] = allowed[i].unflatten(1, (-1, 3)).sum(2) * 2
        for name, a, b, error in zip(("query", "key", "value"), got, right, allowed[1:]):
            assert_within(a, b, error, f"gradient of {name}")

    @pytest.mark.parametrize("how", ["bool", "float", "by column", "causal", "plain"])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_as_torchs_where_nothing_is_dropped(self, how: str, dtype: torch.dtype) -> None:
        """Rows that are fully masked, and the gradient of the mask, are torch's as well."""
        q, k, v = inputs(2, 3, dtype=dtype)
        mask = masks(9, 21).get(how)
        options: dict[str, Any] = {"is_causal": how == "causal"}
        tensors = [tensor.requires_grad_() for tensor in (q, k, v)]
        if how == "float":
            assert mask is not None
            mask = mask.to(dtype).requires_grad_()
            tensors.append(mask)
        grad = torch.randn(2, 3, 9, 16, dtype=dtype)
        results = []
        for function, p in ((attention, TINY), (torchs, 0.0)):
            y = function(q, k, v, mask, dropout_p=p, **options)
            results.append([y.detach(), *gradients(y, tensors, grad)])
        assert is_ours(q, k, v, mask, dropout_p=TINY, **options)
        torch.testing.assert_close(*results)
        assert torch.isfinite(results[0][0]).all()

    def test_on_processors_without_bfloat16_products(self) -> None:
        """All arithmetic is float32, so the result is that of float32, rounded."""
        tensors = inputs(2, 3, dtype=torch.bfloat16)
        torch.manual_seed(5)
        expected = attention(*(tensor.float() for tensor in tensors), dropout_p=0.5)
        torch.manual_seed(5)
        with mock.patch("fusedoptim.ops._attention.has_bfloat16_products", False):
            y = attention(*(tensor.requires_grad_() for tensor in tensors), dropout_p=0.5)
        assert torch.equal(y, expected.bfloat16())
        assert {grad.dtype for grad in gradients(y, tensors, y)} == {torch.bfloat16}

    def test_all_dropped(self) -> None:
        q, k, v = (tensor.requires_grad_() for tensor in inputs(2, 3))
        y = attention(q, k, v, dropout_p=1.0)
        assert not y.any()
        assert not any(grad.any() for grad in gradients(y, (q, k, v), torch.ones_like(y)))

    def test_rate_and_independence(self) -> None:
        """Values are unit vectors, so that the output shows which weights are left."""
        rows, columns, p = 64, 64, 0.2
        q, k, _ = inputs(4, 3, rows=rows, columns=columns)
        y = attention(q, k, torch.eye(columns).expand(4, 3, -1, -1), dropout_p=p)
        dropped = y == 0
        assert abs(int(dropped.sum()) - p * y.numel()) < binomial_bound(y.numel(), p)
        both = dropped[:, 0] & dropped[:, 1]
        assert abs(int(both.sum()) - p * p * both.numel()) < binomial_bound(both.numel(), p * p)

    def test_probability_is_a_tensor(self) -> None:
        q, k, v = inputs(2, 3)
        q.requires_grad_()
        results = []
        for p in (0.5, torch.tensor(0.5)):
            torch.manual_seed(1)
            y = attention(q, k, v, dropout_p=p)  # type: ignore[arg-type]  # torch takes it too
            results.append((y, *gradients(y, q, torch.ones_like(y))))
        assert all(map(torch.equal, *results))

    def test_nan_stays(self) -> None:
        q, k, v = inputs(2, 3)
        q[0, 0, 3, 1] = math.nan
        y = attention(q, k, v, dropout_p=0.1)
        assert y[0, 0, 3].isnan().all()
        assert not y[0, 1].isnan().any()

    def test_inputs_are_only_read(self) -> None:
        tensors = [tensor.requires_grad_() for tensor in inputs(2, 3)]
        mask = torch.randn(9, 21)
        before = [tensor.clone() for tensor in (*tensors, mask)]
        y = attention(*tensors, mask, 0.5)
        gradients(y, tensors, torch.ones_like(y))
        assert all(map(torch.equal, (*tensors, mask), before))


class TestGradient:
    @pytest.mark.parametrize("how", ["plain", "causal", "mask", "bool"])
    def test_gradcheck(self, how: str) -> None:
        tensors = [
            tensor.requires_grad_()
            for tensor in inputs(1, 2, rows=3, columns=4, width=3, dtype=torch.float64)
        ]
        keeps = torch.ones(3, 4, dtype=torch.bool)
        keeps[1], keeps[2, 1] = False, False
        if how == "mask":
            tensors.append(torch.randn(3, 4, dtype=torch.float64, requires_grad=True))

        def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
            torch.manual_seed(3)
            mask = keeps if how == "bool" else mask
            return attention(q, k, v, mask, 0.4, is_causal=how == "causal")

        assert torch.autograd.gradcheck(function, tensors)
        assert torch.autograd.gradgradcheck(function, tensors)

    def test_only_what_needs_one(self) -> None:
        q, k, v = inputs(2, 3)
        y = attention(q, k.requires_grad_(), v, dropout_p=0.1)
        y.sum().backward()
        assert k.grad is not None
        assert q.grad is None

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_checkpoint(self, use_reentrant: bool) -> None:
        tensors = [tensor.requires_grad_() for tensor in inputs(2, 3)]
        grad, results = torch.randn(2, 3, 9, 16), []
        for call in (
            lambda f, *a: f(*a),
            lambda f, *a: checkpoint(f, *a, use_reentrant=use_reentrant),
        ):
            torch.manual_seed(7)
            y = call(lambda q, k, v: attention(q, k, v, dropout_p=0.5), *tensors)
            y.backward(grad)
            results.append([y.detach(), *(tensor.grad for tensor in tensors)])
            for tensor in tensors:
                tensor.grad = None
        assert all(map(torch.equal, *results))

    def test_bfloat16_weights_are_kept(self) -> None:
        """Two matrices of the scores' size are kept, in bfloat16 if the processor multiplies it."""
        tensors = [t.requires_grad_() for t in inputs(2, 3, dtype=torch.bfloat16)]
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
        ):
            attention(*tensors, dropout_p=0.5)
        scores = 2 * 3 * 9 * 21
        widest = torch.bfloat16 if has_bfloat16_products else torch.float32
        of_scores = [tensor for tensor in kept if tensor.numel() == scores]
        assert len(of_scores) == 2
        assert {tensor.dtype for tensor in of_scores} == {widest}


class TestTorchs:
    """Calls that are not ours go to torch, with torch's errors."""

    def test_other_arguments(self) -> None:
        q, k, v = inputs(2, 3)
        assert is_ours(q, k, v, dropout_p=0.1)
        assert not is_ours(q, k, v)
        assert not is_ours(q[:, :1], k, v, dropout_p=0.1)
        assert not is_ours(q[0, 0], k[0, 0], v[0, 0], dropout_p=0.1)
        assert not is_ours(q[:, :, :0], k, v, dropout_p=0.1)
        assert not is_ours(q, k, v, torch.tensor(1.0), 0.1)

    def test_nested(self) -> None:
        parts = [torch.randn(3, 4, 8), torch.randn(3, 5, 8)]
        x = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2).contiguous()
        assert attention(x, x, x).is_nested

    @pytest.mark.parametrize(
        "options",
        [
            {"attn_mask": torch.ones(9, 21), "is_causal": True},
            {"attn_mask": torch.ones(9, 21, dtype=torch.int64)},
            {"attn_mask": torch.ones(8, 21)},
            {"dropout_p": 1.5},
            {"dropout_p": -0.5},
            {"key": torch.ones(2, 3, 21, 15)},
            {"key": torch.ones(2, 3, 21, 16, dtype=torch.float64)},
            {
                "key": torch.ones(2, 2, 21, 16),
                "value": torch.ones(2, 2, 21, 16),
                "enable_gqa": True,
            },
        ],
    )
    def test_errors(self, options: dict[str, Any]) -> None:
        q, k, v = inputs(2, 3)
        given = {"query": q, "key": k, "value": v, "dropout_p": 0.5, **options}
        errors = []
        for function in (attention, torchs):
            with pytest.raises((RuntimeError, ValueError)) as caught:
                function(**given)
            errors.append((type(caught.value), str(caught.value)))
        assert errors[0] == errors[1]

    @pytest.mark.filterwarnings("ignore:`torch.jit.script")
    def test_func_transforms_and_forward_mode(self) -> None:
        q, k, v = inputs(2, 3)

        def loss(function: Callable[..., Tensor], q: Tensor) -> Tensor:
            return function(q, k, v, dropout_p=0.5).square().sum()

        grads = []
        for function in (attention, torchs):
            torch.manual_seed(1)
            grads.append(torch.func.grad(lambda q, f=function: loss(f, q))(q))
        assert torch.equal(*grads)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(v, v)
            y, tangent = torch.autograd.forward_ad.unpack_dual(attention(q, k, dual, dropout_p=0.5))
        torch.testing.assert_close(y, tangent)

    def test_signature(self) -> None:
        documented = (torchs.__doc__ or "").strip().partition("->")[0].strip()
        parameters = inspect.signature(attention).parameters.values()
        written = ", ".join(
            p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters
        )
        assert " ".join(documented.split()).replace("( ", "(") in (
            f"scaled_dot_product_attention({written})",
            f"scaled_dot_product_attention({written}):",
        )


class TestAutocast:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("has_mask", [False, True])
    def test_as_torchs(self, dtype: torch.dtype, has_mask: bool) -> None:
        """All inputs are rounded first; the largest mask values become infinity."""
        q, k, v = inputs(2, 3)
        mask = torch.zeros(9, 21)
        mask[2, 1:], mask[3] = torch.finfo(torch.float32).min, torch.finfo(torch.float32).min
        given = mask if has_mask else None
        with torch.autocast("cpu", dtype):
            ours, expected = attention(q, k, v, given, TINY), torchs(q, k, v, given)
        assert ours.dtype == expected.dtype == dtype
        if has_mask:
            assert not ours[:, :, 3].any()
        rounded = [tensor.to(dtype).double() for tensor in (q, k, v)]
        added = mask.to(dtype).double() if has_mask else None
        kept, grad = torch.ones(2, 3, 9, 21).double(), torch.zeros(2, 3, 9, 16).double()
        allowed = attention_errors(*rounded, added, kept, 1 / math.sqrt(16), grad, dtype)[0]
        assert_within(ours, torchs(*rounded, added), allowed, "output")

    def test_backward_is_outside_or_inside(self) -> None:
        tensors = [tensor.requires_grad_() for tensor in inputs(2, 3)]
        grad, results = torch.randn(2, 3, 9, 16), []
        for is_inside in (False, True):
            torch.manual_seed(1)
            y = attention(*tensors, dropout_p=0.5)
            with torch.autocast("cpu", torch.bfloat16, enabled=is_inside):
                results.append(gradients(y, tensors, grad))
        assert all(map(torch.equal, *results))
        with torch.autocast("cpu", torch.bfloat16):
            y = attention(*tensors, dropout_p=0.5)
        assert {g.dtype for g in gradients(y, tensors, grad.bfloat16())} == {torch.float32}


@needs_compiler
@quiet_compiler
@pytest.mark.usefixtures("_fresh_compiler")
class TestCompiled:
    @pytest.mark.parametrize(
        ("how", "dynamic", "backend"),
        [
            *((how, False, "aot_eager") for how in ("plain", "causal", "bool", "autocast")),
            *((how, True, "aot_eager") for how in ("plain", "causal")),
            ("bool, autocast", True, "inductor"),
        ],
    )
    def test_whole_graph(self, how: str, dynamic: bool, backend: str) -> None:
        """Values are the same as without a compiler, except for the roundings of both."""

        def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            # A float that is no literal is symbolic in a dynamic graph, which compiles twice then.
            p = TINY if how == "plain" else 1e-12
            with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in how):
                # Negating and doubling are exact, so that both compute with the same inputs.
                return attention(-q, k, v, mask, p, is_causal=how == "causal") * 2

        dtype = torch.bfloat16 if "autocast" in how else torch.float32
        compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)
        for rows in (9, 11) if dynamic else (9,):
            tensors = [tensor.requires_grad_() for tensor in inputs(2, 3, rows=rows)]
            keeps = masks(rows, 21)["bool"] if "bool" in how else None
            results = []
            for call in (compiled, function):
                y = call(*tensors, keeps)
                results.append([y.detach(), *gradients(y, tensors, torch.ones_like(y))])
            added = None
            if keeps is not None:
                added = torch.zeros(keeps.shape).double().masked_fill(~keeps, -math.inf)
            elif how == "causal":
                added = torch.full((rows, 21), -math.inf).triu(1).double()
            kept, grad = torch.ones(2, 3, rows, 21).double(), torch.full((2, 3, rows, 16), 2.0)
            rounded = [tensor.detach().to(dtype).double() for tensor in tensors]
            allowed = attention_errors(
                -rounded[0], *rounded[1:], added, kept, 1 / math.sqrt(16), grad.double(), dtype
            )
            allowed[0] *= 2
            names = ("output", "gradient of query", "gradient of key", "gradient of value")
            for name, got, eager, error in zip(names, *results, allowed):
                assert_within(got, eager.double(), 2 * error, name)

    def test_masks_and_gradients_are_those_of_eager(self) -> None:
        """Masks and gradients are those of eager if the compiler draws seeds as torch does."""

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, dropout_p=0.5)

        tensors = [tensor.requires_grad_() for tensor in inputs(2, 3)]
        grad, results = torch.randn(2, 3, 9, 16), []
        with torch._inductor.config.patch(fallback_random=True):
            for call in (function, torch.compile(function, fullgraph=True)):
                torch.manual_seed(7)
                y = call(*tensors)
                results.append([y.detach(), *gradients(y, tensors, grad)])
        torch.testing.assert_close(*results)

    def test_each_call_draws_anew(self) -> None:
        p = 0.5  # symbolic in a dynamic graph, as it is no literal

        @torch.compile(fullgraph=True, dynamic=True)
        def compiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, dropout_p=p)

        q, k, v = inputs(2, 3)
        assert not torch.equal(compiled(q, k, v), compiled(q, k, v))


def test_fake_tensors() -> None:
    with FakeTensorMode():
        q, k, v = inputs(2, 3)
        y = attention(q.requires_grad_(), k, v[..., :5], dropout_p=0.5)
        assert y.shape == (2, 3, 9, 5)
        (grad,) = gradients(y, q, torch.ones_like(y))
        assert grad.shape == q.shape


def test_repeats_under_a_seed() -> None:
    q, k, v = inputs(2, 3)
    results = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        results.append(attention(q, k, v, dropout_p=0.5))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    "wrong",
    [
        {"query": None},
        {"key": None},
        {"value": [1.0]},
        {"attn_mask": [True]},
        {"is_causal": "no"},
        {"is_causal": 1},
        {"enable_gqa": 1},
    ],
)
def test_wrong_types(wrong: dict[str, Any]) -> None:
    """The error is torch's."""
    q, k, v = inputs(2, 3)
    with pytest.raises(TypeError, match=f"argument '{next(iter(wrong))}'.* must be"):
        attention(**{"query": q, "key": k, "value": v, "dropout_p": 0.5, **wrong})
