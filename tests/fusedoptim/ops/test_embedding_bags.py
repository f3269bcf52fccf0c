"""The operator embedding_bags: values, gradients, forms, tracing, errors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedoptim.nn import MergedEmbeddingBag
from fusedoptim.ops import embedding_bags
from tests.fusedoptim.bag_cases import ROWS, WIDTHS, expected, new_bags
from tests.fusedoptim.helpers import assert_within
from tests.optimizer_cases import FLOATS
from tests.running import at_each_thread_count
from tests.tolerances import bag_errors

OP = torch.ops.fusedoptim.embedding_bags.default
MOST = 6


def tables(
    width: int = 20, dtype: torch.dtype = torch.float32, sizes: Sequence[int] = ROWS
) -> list[Tensor]:
    return [
        torch.randn(rows, width + 3 * t).to(dtype).requires_grad_() for t, rows in enumerate(sizes)
    ]


def widened(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


class TestValues:
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("width", WIDTHS)
    @pytest.mark.parametrize("mode", ["sum", "mean"])
    def test_both_ways(self, dtype: torch.dtype, width: int, mode: str) -> None:
        weights, bags = tables(width, dtype), new_bags(ROWS, most=MOST)
        outputs = embedding_bags(weights, *bags, mean=mode == "mean", include_last_offset=True)
        wide = widened(weights)
        grads = [torch.randn_like(output) for output in outputs]
        own = torch.autograd.grad(outputs, weights, grads)
        for t, output in enumerate(outputs):
            args = bags.indices[t], bags.offsets[t], mode
            wanted = expected(wide[t], *args)
            sizes = expected(wide[t].detach().abs(), *args)
            assert output.dtype == dtype
            assert_within(output.detach(), wanted.detach(), bag_errors(sizes, MOST, dtype), "bags")
            (grad,) = torch.autograd.grad(wanted, wide[t], grads[t].double())
            again = expected(wide[t], *args)
            (sizes,) = torch.autograd.grad(again, wide[t], grads[t].double().abs())
            most = len(bags.indices[t])
            assert_within(own[t], grad, bag_errors(sizes, most, dtype), "gradients")

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("width", WIDTHS)
    @pytest.mark.parametrize("bags", [1, 2, 33])
    def test_one_index_each(self, dtype: torch.dtype, width: int, bags: int) -> None:
        weights = [torch.randn(rows, width).to(dtype) for rows in ROWS]
        indices = [torch.randint(rows, (bags,)) for rows in ROWS]
        offsets = [torch.arange(bags) for _ in ROWS]
        joined = torch.cat(indices), torch.arange(bags * len(ROWS))
        separate = embedding_bags(weights, indices, offsets)
        (together,) = embedding_bags(weights, [joined[0]], [joined[1]])
        for weight, own, output in zip(weights, indices, separate):
            assert torch.equal(output, weight[own])
        assert torch.equal(together, torch.cat(separate, dim=1))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_one_index_each_of_every_value_of_16_bits(self, dtype: torch.dtype) -> None:
        weight = torch.arange(-(2**15), 2**15).short().view(dtype).view(-1, 64)
        order = torch.randperm(len(weight))
        (output,) = embedding_bags([weight], [order], [torch.arange(len(weight))])
        torch.testing.assert_close(output, weight[order], rtol=0, atol=0, equal_nan=True)

    def test_tables_that_change_between_calls(self) -> None:
        weights, bags = tables(16), new_bags(ROWS)
        embedding_bags(weights, *bags, include_last_offset=True)
        whole = torch.randint(-8, 8, (ROWS[0], 5)).float()  # their sums are exact
        for data in (whole, whole.t().contiguous().t()):
            weights[0].data = data
            output = embedding_bags(weights, *bags, include_last_offset=True)[0]
            assert torch.equal(output, expected(data, bags.indices[0], bags.offsets[0]))
        weights[0].data = whole.double()
        with pytest.raises(TypeError, match=r"weight 1 has dtype torch\.float32"):
            embedding_bags(weights, *bags, include_last_offset=True)

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("padding", [None, 0, -1])
    @pytest.mark.parametrize("sparse", [False, True])
    def test_sample_weights_and_padding(
        self, dtype: torch.dtype, padding: int | None, sparse: bool
    ) -> None:
        weights, bags = tables(65, dtype), new_bags(ROWS, most=MOST)
        samples = [torch.rand(len(i)).to(dtype).requires_grad_() for i in bags.indices]
        outputs = embedding_bags(
            weights,
            *bags,
            samples,
            padding_idx=[padding] * len(ROWS),
            include_last_offset=True,
            sparse=sparse,
        )
        grads = [torch.randn_like(output) for output in outputs]
        own = torch.autograd.grad(outputs, [*weights, *samples], grads)
        for t, output in enumerate(outputs):
            inputs = [weights[t].detach().double(), samples[t].detach().double()]
            results = []
            for weight, factors, grad in (
                (*inputs, grads[t].double()),
                (*(x.abs() for x in inputs), grads[t].double().abs()),
            ):
                leaves = weight.requires_grad_(), factors.requires_grad_()
                y = expected(weight, *(x[t] for x in bags), "sum", factors, padding)
                results.append((y.detach(), *torch.autograd.grad(y, leaves, grad)))
            wanted, sizes = results
            most = [MOST, len(bags.indices[t]), weights[t].shape[1]]
            found = output.detach(), own[t], own[len(weights) + t]
            assert found[1].is_sparse == sparse
            for x, y, size, terms in zip(found, wanted, sizes, most):
                # torch's own operations round each product to the dtype.
                error = bag_errors(size, terms, dtype)
                error = error * (terms + 3) if sparse or terms == most[2] else error
                assert_within(x.to_dense() if x.is_sparse else x, y, error, "result")

    def test_sparse_gradients_are_torchs(self) -> None:
        weights, bags = tables(), new_bags(ROWS)
        outputs = embedding_bags(weights, *bags, include_last_offset=True, sparse=True)
        own = torch.autograd.grad([y.sum() for y in outputs], weights)
        for t, weight in enumerate(weights):
            y = torch.nn.functional.embedding_bag(
                *(bags.indices[t], weight, bags.offsets[t]),
                mode="sum",
                sparse=True,
                include_last_offset=True,
            )
            (grad,) = torch.autograd.grad(y.sum(), weight)
            assert torch.equal(own[t]._indices(), grad._indices())
            assert torch.equal(own[t]._values(), grad._values())

    @pytest.mark.parametrize("has_last_offset", [False, True])
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_forms_give_the_same_bits(self, has_last_offset: bool, dtype: torch.dtype) -> None:
        weights, bags = tables(64), new_bags(ROWS, dtype=dtype)
        offsets = [x if has_last_offset else x[:-1] for x in bags.offsets]
        one = embedding_bags(weights, bags.indices, offsets, include_last_offset=has_last_offset)
        values, starts = bags.joined
        starts = starts if has_last_offset else starts[:-1]
        (joined,) = embedding_bags(weights, [values], [starts], include_last_offset=has_last_offset)
        assert torch.equal(torch.cat(one, 1), joined)
        grad = torch.randn_like(joined)
        parts = grad.split([y.shape[1] for y in one], dim=1)
        first = torch.autograd.grad(one, weights, parts)
        for x, y in zip(first, torch.autograd.grad(joined, weights, grad)):
            assert torch.equal(x, y)

    def test_threads_give_the_same_bits(self) -> None:
        rows = (4000, 50, 60)
        weights = [torch.randn(count, 64, requires_grad=True) for count in rows]
        bags = new_bags(rows, bags=3000, most=20)
        grads = [torch.randn(3000, 64) for _ in rows]

        def both() -> list[Tensor]:
            outputs = embedding_bags(weights, *bags, include_last_offset=True)
            return [*outputs, *torch.autograd.grad(outputs, weights, grads)]

        first, *others = at_each_thread_count(both)
        for other in others:
            assert all(map(torch.equal, first, other))

    @pytest.mark.parametrize(
        ("rows", "bags"), [((0, 5), 0), ((0, 5), 3), ((5, 5), 0), ((1 << 17, 3), 2)]
    )
    def test_empty(self, rows: tuple[int, ...], bags: int) -> None:
        weights = [torch.randn(count, 20, requires_grad=True) for count in rows]
        empty = torch.zeros(0, dtype=torch.int64)
        outputs = embedding_bags(weights, [empty] * 2, [torch.zeros(bags).long()] * 2)
        assert all(torch.equal(y, torch.zeros(bags, 20)) for y in outputs)
        torch.autograd.backward([y.sum() for y in outputs])
        assert all(w.grad is None or not w.grad.any() for w in weights)

    @pytest.mark.parametrize("sparse", [False, True])
    def test_tables_that_are_updated_before_the_backward_pass(self, sparse: bool) -> None:
        """The gradients do not depend on the tables, so nothing saves these, as in torch."""
        weights, bags = tables(), new_bags(ROWS)
        options: Any = {"include_last_offset": True, "sparse": sparse}
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: [saved.append(x), x][1], Tensor):
            embedding_bags(weights, *bags, **options)
        assert {x.dtype for x in saved} == {torch.int64}
        one, other = (embedding_bags(weights, *bags, **options) for _ in range(2))
        grads = [torch.randn_like(y) for y in one]
        wanted = torch.autograd.grad(one, weights, grads)
        with torch.no_grad():
            torch._foreach_add_(weights, 1.0)
        for x, y in zip(torch.autograd.grad(other, weights, grads), wanted):
            assert torch.equal(x.to_dense(), y.to_dense())

    def test_tables_that_change_shape_before_the_backward_pass(self) -> None:
        weights, bags = tables(), new_bags(ROWS)
        outputs = embedding_bags(weights, *bags, include_last_offset=True)
        weights[0].data = weights[0].data[:2]
        with pytest.raises(RuntimeError, match="a table's shape, dtype or device changed"):
            torch.autograd.backward([y.sum() for y in outputs])

    def test_unused_outputs_and_frozen_tables(self) -> None:
        weights, bags = tables(), new_bags(ROWS)
        weights[2].requires_grad_(False)
        outputs = embedding_bags(weights, *bags, include_last_offset=True)
        (outputs[0].sum() + outputs[2].sum()).backward()
        assert weights[0].grad is not None
        assert weights[2].grad is None
        assert weights[3].grad is None

    def test_strided_inputs(self) -> None:
        weights, bags = tables(16), new_bags(ROWS)
        strided = [w.detach().t().contiguous().t().requires_grad_() for w in weights]
        indices = [i.repeat_interleave(2)[::2] for i in bags.indices]
        one = embedding_bags(weights, *bags, include_last_offset=True)
        other = embedding_bags(strided, indices, bags.offsets, include_last_offset=True)
        for x, y in zip(one, other):
            assert torch.equal(x, y)
        grads = [torch.randn(y.shape[::-1]).t() for y in one]
        for x, y in zip(
            torch.autograd.grad(one, weights, grads), torch.autograd.grad(other, strided, grads)
        ):
            assert torch.equal(x, y)

    def test_gradcheck(self) -> None:
        rows = (5, 1, 7, 9)
        weights, bags = tables(5, torch.float64, rows), new_bags(rows)
        samples = [torch.rand(len(i)).double().requires_grad_() for i in bags.indices]

        def weighted(*leaves: Tensor) -> list[Tensor]:
            own, factors = list(leaves[:4]), list(leaves[4:])
            return embedding_bags(own, *bags, factors, include_last_offset=True)

        torch.autograd.gradcheck(weighted, (*weights, *samples))


def operands(case: str, joined: bool) -> tuple[Any, ...]:
    """Arguments of the operator: tables, bags, sample weights and options."""
    bags = new_bags(ROWS)
    samples = [torch.rand(len(i)) for i in bags.indices] if case == "sample weights" else []
    indices, offsets = ([x] for x in bags.joined) if joined else bags
    samples = [torch.cat(samples)] if joined and samples else samples
    means = [case == "means"] * len(ROWS)
    paddings = [-1, -1, 0, 2] if case != "sums" else [-1] * len(ROWS)
    options = means, paddings, True, case == "sparse"
    return tables(), indices, offsets, [x.requires_grad_() for x in samples], *options


CASES = [
    ("sums", False),
    ("means", True),
    ("sample weights", False),
    ("sample weights", True),
    ("sparse", False),
    ("sparse", True),
]


class TestTracing:
    @pytest.mark.parametrize(("case", "joined"), CASES)
    def test_opcheck(self, case: str, joined: bool) -> None:
        torch.library.opcheck(OP, operands(case, joined))

    @pytest.mark.parametrize("joined", [False, True])
    def test_opcheck_of_gradients(self, joined: bool) -> None:
        def check(op: Any, *args: Any) -> None:
            torch.library.opcheck(op.default, args, test_utils=("test_schema", "test_faketensor"))

        of, weights = torch.ops.fusedoptim, [w.detach() for w in tables()]
        grads = [torch.randn(9, w.shape[1]) for w in weights]
        _, indices, offsets, _, means, paddings, last, _ = operands("means", joined)
        grads = [torch.cat(grads, 1)] if joined else grads
        rest = weights, indices, offsets
        for op in (of.embedding_bags_dense_gradients, of.embedding_bags_row_gradients):
            check(op, grads, *rest, [], means, paddings, last)
        check(of.embedding_bags_sample_gradients, grads, *rest, paddings, last)

    def test_opcheck_of_updates(self) -> None:
        merged, bags = MergedEmbeddingBag([(rows, 20) for rows in ROWS], "adagrad"), new_bags(ROWS)
        weights = [bag.weight for bag in merged]
        optimizer: Any = merged.optimizer()
        grads = [torch.randn(9, 20) for _ in ROWS]
        options, last = ([False] * 4, [-1] * 4), (True, optimizer.number)
        torch.library.opcheck(
            torch.ops.fusedoptim.update_embedding_bags.default,
            (weights, grads, *bags, [], *options, range(4), *last),
        )
        torch.library.opcheck(
            torch.ops.fusedoptim.updated_embedding_bags.default,
            (torch.zeros((), requires_grad=True), weights, *bags, [], *options, *last),
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )

    @pytest.mark.filterwarnings("ignore:.*torch.jit")  # inductor uses it
    @pytest.mark.parametrize(
        ("case", "joined", "backend"),
        [(*case, "aot_eager") for case in CASES]
        + [(*case, "inductor") for case in (CASES[0], CASES[2], CASES[5])],
    )
    def test_compiled(self, case: str, joined: bool, backend: str) -> None:
        torch.compiler.reset()
        compiled = torch.compile(_bags_of, backend=backend, fullgraph=True)
        for _ in range(2):  # the second batch has other numbers of indices
            weights, indices, offsets, samples, *rest = operands(case, joined)
            args = weights, indices, offsets, samples, *rest
            one, other = _bags_of(*args), compiled(*args)
            grads = [torch.randn_like(y) for y in one]
            gradients = [torch.autograd.grad(y, [*weights, *samples], grads) for y in (one, other)]
            for x, y in zip([*one, *gradients[0]], [*other, *gradients[1]]):
                assert x.is_sparse == y.is_sparse
                assert torch.equal(x.to_dense(), y.to_dense())


def _bags_of(
    weights: Any, indices: Any, offsets: Any, samples: Any, means: Any, paddings: Any, *rest: Any
) -> list[Tensor]:
    last, sparse = rest
    return embedding_bags(
        weights,
        indices,
        offsets,
        samples,
        mean=means,
        padding_idx=[None if i < 0 else i for i in paddings],
        include_last_offset=last,
        sparse=sparse,
    )


class TestRefused:
    TABLES = (torch.ones(4, 2), torch.ones(5, 3))
    INDICES = (torch.tensor([0, 1, 3]), torch.tensor([4, 4]))
    OFFSETS = (torch.tensor([0, 1]), torch.tensor([0, 0]))

    @pytest.mark.parametrize(
        ("changed", "error", "message"),
        [
            ({"indices": (INDICES[0], torch.tensor([4, 5]))}, IndexError,
             "table 1 has 5 rows, and its index 1 is 5"),
            ({"indices": (torch.tensor([0, -1, 1]), INDICES[1])}, IndexError,
             "table 0 has 4 rows, and its index 1 is -1"),
            ({"offsets": (torch.tensor([0, 2, 1]), OFFSETS[1])}, RuntimeError,
             "offset 2 of offsets 0 is 1, but the previous offset is 2 and"),
            ({"offsets": (torch.tensor([0, 4]), OFFSETS[1])}, RuntimeError,
             "offset 1 of offsets 0 is 4"),
            ({"offsets": (torch.tensor([-1, 1]), OFFSETS[1])}, RuntimeError, "offset 0 of"),
            ({"offsets": (OFFSETS[0], torch.tensor([1, 2]))}, RuntimeError,
             "offset 0 of offsets 1 is 1; it has to be 0"),
            ({"offsets": (torch.tensor([3]), OFFSETS[1])}, RuntimeError,
             "offset 0 of offsets 0 is 3; it has to be 0"),
            ({"indices": (INDICES[0].float(), INDICES[1])}, TypeError, "indices 0 are"),
            ({"offsets": (OFFSETS[0], OFFSETS[1].short())}, TypeError, "offsets 1 are"),
            ({"indices": [[0, 1, 3], INDICES[1]]}, TypeError, "indices 0 are of type list; pass"),
            ({"offsets": [*map(Tensor.numpy, OFFSETS)]}, TypeError,
             "offsets 0 are of type ndarray; pass a tensor, such as torch.as_tensor of them"),
            ({"offsets": None}, TypeError, "offsets are of type NoneType; pass a list of tensors"),
            ({"per_sample_weights": (None, None)}, TypeError,
             "per_sample_weights 0 are of type NoneType"),
            ({"offsets": OFFSETS[:1]}, ValueError, "1 of offsets"),
            ({"weights": (TABLES[0], TABLES[1].double())}, TypeError, "weight 1 has dtype"),
            ({"weights": (TABLES[0].int(), TABLES[1].int())}, TypeError, "weights have dtype"),
            ({"weights": (TABLES[0], torch.ones(3))}, ValueError, "weight 1 has shape"),
            ({"weights": (TABLES[0], TABLES[1].to("meta"))}, ValueError, "weight 1 is on meta"),
            ({"weights": ()}, ValueError, "no tables"),
            ({"weights": [None, TABLES[1]]}, TypeError, "weights 0 are of type NoneType; pass a"),
            ({"weights": [TABLES[0], TABLES[1].numpy()]}, TypeError, "weights 1 are of type nd"),
            ({"weights": None}, TypeError, "weights are of type NoneType; pass a list of tensors"),
            ({"weights": [TABLES[0].to_sparse(), TABLES[1]]}, TypeError,
             "weights[0] has layout torch.sparse_coo; pass weights[0].to_dense()"),
            ({"weights": [TABLES[0], TABLES[1].to_sparse()]}, TypeError,
             "weights[1] has layout torch.sparse_coo; pass weights[1].to_dense()"),
            ({"per_sample_weights": (torch.ones(2), torch.ones(2))}, ValueError,
             "per_sample_weights 0 have shape"),
            ({"per_sample_weights": (torch.ones(3), torch.ones(2)), "mean": True}, ValueError,
             "are for sums"),
            ({"per_sample_weights": (torch.ones(3).double(), torch.ones(2))}, TypeError,
             "per_sample_weights 0 have dtype"),
            ({"offsets": (OFFSETS[0], OFFSETS[1][:0]), "include_last_offset": True}, RuntimeError,
             "offsets 1 are empty"),
            ({"padding_idx": [None, 5]}, RuntimeError, "padding_idx of table 1 is 5"),
            ({"padding_idx": [-5, None]}, RuntimeError, "pass one from -4 to 3"),
            ({"padding_idx": [1]}, ValueError, "padding_idx has 1 for 2 tables"),
            ({"padding_idx": [1, 1, 1]}, ValueError, "padding_idx has 3 for 2 tables"),
            ({"mean": [True]}, ValueError, "mean has 1 for 2 tables"),
            ({"mean": [True, True, False]}, ValueError, "mean has 3 for 2 tables"),
            ({"include_last_offset": 2}, TypeError, "include_last_offset=2 is of type int; pass"),
            ({"sparse": "x"}, TypeError, "sparse='x' is of type str; pass True or False"),
            ({"padding_idx": [None, 1.7]}, TypeError, "padding_idx[1]=1.7 is of type float; pass"),
            ({"padding_idx": 1}, TypeError, "padding_idx=1 is of type int; pass a list with one"),
            ({"mean": [2, False]}, TypeError, "mean[0]=2 is of type int; pass True or False"),
            ({"mean": [False, 0.5]}, TypeError, "mean[1]=0.5 is of type float; pass True or"),
            ({"mean": "mean"}, TypeError, "mean='mean' is of type str; pass True or False, or"),
        ],
    )  # fmt: skip
    def test_wrong(self, changed: dict[str, Any], error: Any, message: str) -> None:
        given = {"weights": self.TABLES, "indices": self.INDICES, "offsets": self.OFFSETS}
        with pytest.raises(error, match=re.escape(message)):
            embedding_bags(**{**given, **changed})

    @pytest.mark.parametrize("last", [False, True])
    @pytest.mark.parametrize("bags", [1, 300])
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    @pytest.mark.parametrize("joined", [False, True])
    def test_first_offset(self, joined: bool, dtype: torch.dtype, bags: int, last: bool) -> None:
        """The first offset has to be 0: of one tensor for all tables, or of each table."""
        given = new_bags((3, 5, 9), bags, dtype=dtype)
        indices, offsets = ([x] for x in given.joined) if joined else given
        offsets = [x if last else x[:-1] for x in offsets]
        weights = [torch.randn(rows, 20) for rows in (3, 5, 9)]
        embedding_bags(weights, indices, offsets, include_last_offset=last)
        offsets[-1][0] = 1
        message = f"offset 0 of offsets {len(offsets) - 1} is 1; it has to be 0"
        with pytest.raises(RuntimeError, match=message):
            embedding_bags(weights, indices, offsets, include_last_offset=last)

    @pytest.mark.parametrize("last", [False, True])
    @pytest.mark.parametrize("offsets", [[], [0], [0, 0], [1], [1, 1], [3], [0, 3], [0, 4], [0, 2]])
    @pytest.mark.parametrize("indices", [[], [0, 1, 2]])
    def test_as_torch(self, indices: list[int], offsets: list[int], last: bool) -> None:
        """Results and errors are torch's, also without bags or indices, and with other tables."""
        weight = torch.randint(-8, 8, (4, 2)).float()
        own, starts = (torch.tensor(x, dtype=torch.int64) for x in (indices, offsets))
        given = [weight], [own], [starts]
        beside = [weight, *self.TABLES], [own, *self.INDICES], [starts, *self.OFFSETS]
        wanted = None
        with contextlib.suppress(RuntimeError):
            wanted = torch.nn.functional.embedding_bag(
                own, weight, starts, mode="sum", include_last_offset=last
            )
        for args in (given, beside):
            if wanted is not None:
                assert torch.equal(embedding_bags(*args, include_last_offset=last)[0], wanted)
            else:
                with pytest.raises(RuntimeError, match="offset"):
                    embedding_bags(*args, include_last_offset=last)

    @pytest.mark.parametrize("padding", [-5, -4, -1, 0, 3, 4, 6])
    def test_padding_as_torch(self, padding: int) -> None:
        weight, (indices, _), (offsets, _) = torch.randn(4, 2), self.INDICES, self.OFFSETS
        args = [weight], [indices], [offsets]
        if -4 <= padding < 4:
            wanted = torch.nn.functional.embedding_bag(
                indices, weight, offsets, mode="sum", padding_idx=padding
            )
            assert torch.equal(embedding_bags(*args, padding_idx=[padding])[0], wanted)
        else:
            with pytest.raises(RuntimeError, match="padding_idx must be within"):
                torch.nn.functional.embedding_bag(indices, weight, offsets, padding_idx=padding)
            with pytest.raises(RuntimeError, match="padding_idx of table 0"):
                embedding_bags(*args, padding_idx=[padding])

    def test_tensors_without_a_list(self) -> None:
        joined = torch.cat(self.INDICES), torch.tensor([0, 3])
        (wanted,) = embedding_bags(self.TABLES, *([tensor] for tensor in joined))
        assert wanted.shape == (1, 5)
        with pytest.raises(TypeError, match="indices are one tensor; pass a list with it"):
            embedding_bags(self.TABLES, *joined)
        with pytest.raises(TypeError, match="offsets are one tensor; pass a list with it"):
            embedding_bags(self.TABLES, [joined[0]], joined[1])

    def test_joined_bags_do_not_divide(self) -> None:
        with pytest.raises(ValueError, match="3 bags for 2 tables"):
            embedding_bags(self.TABLES, [self.INDICES[0]], [torch.tensor([0, 1, 2])])

    def test_second_derivative(self) -> None:
        weights = [torch.randn(4, 2, requires_grad=True)]
        (y,) = embedding_bags(weights, self.INDICES[:1], self.OFFSETS[:1])
        (grad,) = torch.autograd.grad(y.square().sum(), weights, create_graph=True)
        with pytest.raises(RuntimeError):
            grad.sum().backward()

    @pytest.mark.parametrize("used", [1, 2])
    @pytest.mark.parametrize("is_trained", [False, True])
    def test_second_derivative_of_sample_weights(self, used: int, is_trained: bool) -> None:
        """It raises for tables without gradients, and where a table's bags are not used, too."""
        weights = [torch.randn(5, 2, requires_grad=is_trained) for _ in range(2)]
        samples = [torch.rand(len(i), requires_grad=True) for i in self.INDICES]
        outputs = embedding_bags(weights, self.INDICES, self.OFFSETS, samples)
        loss = torch.stack([y.square().sum() for y in outputs[:used]]).sum()
        grads = torch.autograd.grad(loss, samples[:used], create_graph=True)
        for grad in grads:
            assert grad.requires_grad
            with pytest.raises(RuntimeError, match="Trying to backward through fusedoptim"):
                grad.sum().backward(retain_graph=True)
