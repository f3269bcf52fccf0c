"""The module MultiheadAttention compared with torch's, with and without dropout."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fusedoptim import ops
from fusedoptim.nn import MultiheadAttention
from tests.compiling import needs_compiler, quiet_compiler
from tests.fusedoptim.helpers import each_way_to_copy
from tests.fusedoptim.nn.test_scaled_dot_product import TINY


def pair(p: float, **options: Any) -> tuple[MultiheadAttention, nn.MultiheadAttention]:
    expected = nn.MultiheadAttention(8, 2, dropout=p, dtype=torch.float64, **options)
    ours = MultiheadAttention(8, 2, dropout=p, dtype=torch.float64, **options)
    ours.load_state_dict(expected.state_dict())
    return ours, expected


class TestMultiheadAttention:
    @staticmethod
    def calls(is_self: bool) -> Iterator[dict[str, Any]]:
        """All combinations of arguments, for three samples of five rows."""
        columns = 5 if is_self else 7
        padding = torch.rand(3, columns) < 0.3
        excluded = torch.rand(5, columns) < 0.3
        padding[:, 0], excluded[:, 0] = False, False
        bools = {"none": None, "2d": excluded, "3d": excluded.expand(6, -1, -1)}
        for has_padding, matrix, kind, need, average, is_causal in itertools.product(
            (False, True),
            bools,
            (torch.bool, torch.float64),
            (False, True),
            (False, True),
            (False, True),
        ):
            if is_causal and (matrix != "2d" or not is_self):
                continue
            given = torch.ones(5, 5, dtype=torch.bool).triu(1) if is_causal else bools[matrix]

            def converted(mask: Tensor | None, kind: torch.dtype = kind) -> Tensor | None:
                if mask is None or kind == torch.bool:
                    return mask
                return torch.zeros(mask.shape, dtype=kind).masked_fill(mask, -math.inf)

            yield {
                "key_padding_mask": converted(padding) if has_padding else None,
                "attn_mask": converted(given),
                "need_weights": need,
                "average_attn_weights": average,
                "is_causal": is_causal,
            }

    @pytest.mark.parametrize("batch_first", [False, True])
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("kind", ["self", "cross", "of other widths"])
    def test_as_torchs(self, kind: str, bias: bool, batch_first: bool) -> None:
        widths = {"kdim": 6, "vdim": 10} if kind == "of other widths" else {}
        ours, expected = pair(TINY, bias=bias, batch_first=batch_first, **widths)
        for options in self.calls(kind == "self"):
            query = torch.randn(3, 5, 8).double()
            given = [query] * 3
            if kind != "self":
                given[1:] = [torch.randn(3, 7, widths.get(k, 8)).double() for k in ("kdim", "vdim")]
            if not batch_first:
                given = (
                    [query.transpose(0, 1)] * 3
                    if kind == "self"
                    else [t.transpose(0, 1) for t in given]
                )
            grad, results = torch.randn(given[0].shape).double(), []
            for module in (ours, expected):
                module.zero_grad()
                output, weights = module(*given, **options)
                output.backward(grad)
                results.append([output.detach(), *(p.grad for p in module.parameters())])
                if options["need_weights"]:
                    results[-1].append(weights.detach())
                else:
                    assert weights is None
            torch.testing.assert_close(*results)

    def test_dropout_is_ours(self) -> None:
        x = torch.randn(5, 3, 8).double()
        ours, expected = pair(0.5)
        for need in (False, True):
            where = "fusedoptim.ops" if need else "fusedoptim.ops._attention"
            with mock.patch(f"{where}.dropout", wraps=ops.dropout) as called:
                ours(x, x, x, need_weights=need)
                expected(x, x, x, need_weights=need)
            assert called.call_count == 1
        _, weights = ours(x, x, x, average_attn_weights=False)
        assert (weights == 0).any()

    @pytest.mark.parametrize(
        "how", ["bias", "zero", "unbatched", "eval", "no dropout", "mixed masks"]
    )
    @pytest.mark.filterwarnings("ignore:Support for mismatched")
    def test_anything_else_is_torchs(self, how: str) -> None:
        made = {"bias": {"add_bias_kv": True}, "zero": {"add_zero_attn": True}}.get(how, {})
        ours, expected = pair(0.0 if how == "no dropout" else 0.5, **made)
        x = torch.randn(5, 8).double() if how == "unbatched" else torch.randn(5, 3, 8).double()
        options = {}
        if how == "mixed masks":
            options = {
                "attn_mask": torch.zeros(5, 5).double(),
                "key_padding_mask": torch.zeros(3, 5).bool(),
            }
        if how == "eval":
            ours, expected = ours.eval(), expected.eval()
        results = []
        for module in (ours, expected):
            torch.manual_seed(2)
            results.append(module(x, x, x, **options))
        assert all(map(torch.equal, *results))

    def test_errors_are_torchs(self) -> None:
        x, wide = torch.randn(5, 3, 8).double(), torch.randn(5, 3, 9).double()
        mask = torch.zeros(4, 5).bool()
        for given, options in (
            ((wide, x, x), {}), ((x, x, x[:4]), {}), ((x, x, x), {"attn_mask": mask}),
            ((x, x, x), {"key_padding_mask": mask}), ((x, x, x), {"is_causal": True}),
        ):  # fmt: skip
            errors = []
            for module in pair(0.5):
                with pytest.raises((RuntimeError, AssertionError)) as caught:
                    module(*given, **options)
                errors.append((type(caught.value), str(caught.value)))
            assert errors[0] == errors[1]

    def test_in_an_encoder_layer(self) -> None:
        layers = []
        for cls in (nn.MultiheadAttention, MultiheadAttention):
            torch.manual_seed(4)
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=TINY, dtype=torch.float64)
            layer.self_attn.__class__ = cls
            layers.append(layer)
        x = torch.randn(5, 3, 8).double()
        mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
        outputs = [layer(x, src_mask=mask, is_causal=True) for layer in layers]
        torch.testing.assert_close(*outputs)
        torch.testing.assert_close(layers[1].eval()(x), layers[0].eval()(x))

    @each_way_to_copy
    def test_copies(self, copied: Callable[[Any], Any]) -> None:
        ours, _ = pair(0.5)
        twin, x = copied(ours), torch.randn(5, 3, 8).double()
        results = []
        for module in (ours, twin):
            torch.manual_seed(2)
            results.append(module(x, x, x))
        assert type(twin) is MultiheadAttention
        assert all(map(torch.equal, *results))

    def test_signatures(self) -> None:
        for name in ("__init__", "forward"):
            parameters = [
                [
                    (p.name, p.default)
                    for p in inspect.signature(getattr(cls, name)).parameters.values()
                ]
                for cls in (MultiheadAttention, nn.MultiheadAttention)
            ]
            assert parameters[0] == parameters[1]
        assert repr(MultiheadAttention(8, 2)) == repr(nn.MultiheadAttention(8, 2))

    @pytest.mark.parametrize("need_weights", [False, True])
    def test_autocast(self, need_weights: bool) -> None:
        x, results = torch.randn(5, 3, 8), []
        for module in pair(TINY):
            with torch.autocast("cpu", torch.bfloat16):
                output, weights = module.float()(x, x, x, need_weights=need_weights)
            output.sum().backward()
            dtypes = {p.grad.dtype for p in module.parameters() if p.grad is not None}
            results.append((output.dtype, None if weights is None else weights.dtype, dtypes))
        assert results[0] == results[1]

    @needs_compiler
    @quiet_compiler
    @pytest.mark.parametrize(
        ("need_weights", "backend"), [(False, "aot_eager"), (True, "inductor")]
    )
    def test_compiled(self, need_weights: bool, backend: str) -> None:
        ours, expected = pair(TINY)
        compiled = torch.compile(ours, fullgraph=True, backend=backend)
        x, mask = torch.randn(5, 3, 8).double(), torch.rand(3, 5) < 0.3
        mask[:, 0] = False
        options = {"key_padding_mask": mask, "need_weights": need_weights}
        torch.testing.assert_close(compiled(x, x, x, **options), expected(x, x, x, **options))
