"""Sparse gradients, such as those of embeddings, against torch in float64."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from fusedoptim import FusedSGD, SplitSGD
from fusedoptim.step.sparse_gradient import stable_order
from tests.fusedoptim.helpers import assert_same_bits, bits, step_alike, through_a_file
from tests.fusedoptim.step.sparse_cases import (
    SOME,
    SPLIT,
    WHOLE,
    Pair,
    each_of,
    new_gradient,
    new_pair,
    new_table,
    random_values,
)
from tests.optimizer_cases import ADAGRAD, SGD, Kwargs, OptimizerCase, configuration_id

pytestmark = pytest.mark.usefixtures("checked_invariants")

WITHOUT_SPARSE_STATE = [WHOLE[0], WHOLE[6], SPLIT[0], SPLIT[6]]
DTYPES = (*ADAGRAD.dtypes, torch.complex64, torch.complex128)


class TestParity:
    """Parameters and state equal torch's in float64."""

    @pytest.mark.parametrize(
        ("case", "kwargs", "dtype"),
        [(*configuration, dtype) for configuration in WHOLE for dtype in DTYPES]
        + [(*split, dtype) for split in SPLIT for dtype in (torch.float32, torch.bfloat16)],
        ids=configuration_id,
    )
    def test_rows_of_all_kinds(
        self, case: OptimizerCase, kwargs: Kwargs, dtype: torch.dtype
    ) -> None:
        """Rows may repeat, change at each step, be missing, or be all in random order."""
        pair = Pair(case, kwargs, [new_table(20, 5, dtype=dtype)])
        assert pair.params[0].dtype == (torch.bfloat16 if pair.case.is_split else dtype)
        pair.check_rows([7, 3, 7, 7], [19, 3, 0], [], torch.randperm(20), [4, 4], [0])

    @pytest.mark.parametrize(
        ("case", "kwargs", "width"),
        [(*some, width) for some in SOME for width in (1, 15, 16, 17, 64, 1000, 4097, 32769, 70001)]
        + [(*some, 0) for some in WITHOUT_SPARSE_STATE],
        ids=configuration_id,
    )
    def test_row_widths(self, case: OptimizerCase, kwargs: Kwargs, width: int) -> None:
        """Around the SIMD width, longer than one chunk, and zero."""
        pair = new_pair(case, kwargs, 6, width)
        pair.check_rows([5, 0, 5], [1, 5])

    @each_of(WITHOUT_SPARSE_STATE)
    def test_other_dimensions_at_each_step(self, case: OptimizerCase, kwargs: Kwargs) -> None:
        """Without sparse state, rows may change their width."""
        pair = new_pair(case, kwargs, 6, 40_000)
        (p,) = pair.params
        for sparse_dim in (1, 2, 1, 2):
            indices = torch.stack([torch.randint(n, (50,)) for n in p.shape[:sparse_dim]])
            values = random_values((50, *p.shape[sparse_dim:]), p.dtype)
            pair.check_with(torch.sparse_coo_tensor(indices, values, p.shape))

    @each_of(SOME)
    def test_many_rows(self, case: OptimizerCase, kwargs: Kwargs) -> None:
        pair = new_pair(case, kwargs, 30_000, 3)
        pair.check_rows(*(torch.randperm(30_000)[:10_000] for _ in range(3)))

    @each_of(SOME)
    @pytest.mark.parametrize("shape", [(9,), (4, 5), (2, 3, 4), (4, 0), (0, 4)], ids=str)
    def test_sparse_and_dense_dimensions(
        self, case: OptimizerCase, kwargs: Kwargs, shape: tuple[int, ...]
    ) -> None:
        """Any number of dimensions may be sparse, from one to all."""
        for sparse_dim in range(1, len(shape) + 1):
            pair = new_pair(case, kwargs, *shape)
            (p,) = pair.params
            for _ in range(3):
                count = 4 if p.numel() else 0
                sizes = shape[:sparse_dim]
                indices = torch.stack([torch.randint(max(n, 1), (count,)) for n in sizes])
                values = random_values((count, *shape[sparse_dim:]), p.dtype)
                pair.check_with(torch.sparse_coo_tensor(indices, values, shape))

    @each_of(SOME)
    @pytest.mark.parametrize("mode", ["embedding", "sum", "mean"])
    def test_gradients_of_layers(self, case: OptimizerCase, kwargs: Kwargs, mode: str) -> None:
        pair = new_pair(case, kwargs, 12, 8)
        (p,) = pair.params
        if mode == "embedding":
            layer: torch.nn.Module = torch.nn.Embedding(12, 8, sparse=True, _weight=p.data)
        else:
            layer = torch.nn.EmbeddingBag(12, 8, sparse=True, mode=mode, _weight=p.data)
        layer.weight = p
        for _ in range(3):
            p.grad = None
            out = layer(torch.randint(12, (6, 4)))
            out.backward(random_values(tuple(out.shape), p.dtype))
            assert p.grad is not None
            assert p.grad.is_sparse
            pair.check_with(p.grad)

    @each_of(SOME)
    def test_several_tables_and_dense_parameters(self, case: OptimizerCase, kwargs: Kwargs) -> None:
        shapes = ((20, 5), (7, 16), (3, 3), (20, 1))
        pair = Pair(case, kwargs, [new_table(*shape, case=case) for shape in shapes])
        for i in range(4):
            grads: list[Tensor | None] = [
                random_values(tuple(p.shape), p.dtype)
                if j == 2
                else new_gradient(p, torch.randint(len(p), (5,)))
                for j, p in enumerate(pair.params)
            ]
            if i == 2:
                grads[0] = grads[2] = None
            pair.check_with(*grads)

    @each_of(SOME)
    @pytest.mark.parametrize("layout", ["transposed", "strided", "offset"])
    def test_table_in_odd_memory(self, case: OptimizerCase, kwargs: Kwargs, layout: str) -> None:
        made = {
            "transposed": lambda p: p.data.t().contiguous().t(),
            "strided": lambda p: p.data.repeat_interleave(2, 1)[:, ::2],
            "offset": lambda p: torch.cat([p.data, p.data, p.data])[10:20],
        }
        p = new_table(10, 6, case=case)
        p.data = made[layout](p)
        pair = Pair(case, kwargs, [p])
        pair.check_rows([1, 1, 9], [0, 1], [])

    @each_of(SOME)
    def test_memory_beside_the_table_stays(self, case: OptimizerCase, kwargs: Kwargs) -> None:
        whole = new_table(30, 17, case=case).detach()
        before = whole.clone()
        p = Parameter(whole[10:20])
        optimizer = case.make([p], **kwargs)
        for rows in (range(10), [0, 9]):
            p.grad = new_gradient(p, list(rows))
            optimizer.step()
        assert torch.equal(bits(whole[:10]), bits(before[:10]))
        assert torch.equal(bits(whole[20:]), bits(before[20:]))

    @each_of([*WHOLE, *SPLIT])
    @pytest.mark.parametrize("first", ["sparse", "dense"])
    def test_sparse_and_dense_gradients_in_turn(
        self, case: OptimizerCase, kwargs: Kwargs, first: str
    ) -> None:
        """The reference's gradients are dense: torch cannot add those to a sparse momentum."""
        pair = new_pair(case, kwargs, 10, 6)
        pair.takes_sparse = False
        (p,) = pair.params
        for i in range(5):
            grad = new_gradient(p, [2, 2, 7, i])
            sparse = (i % 2 == 0) == (first == "sparse")
            pair.check_with(grad if sparse else grad.to_dense())

    def test_lazily_conjugated_values(self) -> None:
        pair = Pair(SGD, {"lr": 0.1}, [new_table(6, 4, dtype=torch.complex64)])
        grad = new_gradient(pair.params[0], [3, 1])
        pair.check_with(torch.sparse_coo_tensor(grad._indices(), grad._values().conj(), grad.shape))

    @pytest.mark.parametrize(
        ("cls", "dtype"),
        [(FusedSGD, torch.bfloat16), (FusedSGD, torch.float16), (SplitSGD, torch.bfloat16)],
        ids=configuration_id,
    )
    def test_a_row_that_occurs_a_thousand_times(self, cls: type[Any], dtype: torch.dtype) -> None:
        """A sum of ones in 16 bits would stop at 256 (bfloat16) or 2048 (float16)."""
        p = Parameter(torch.zeros(3, 2, dtype=dtype))
        p.grad = torch.sparse_coo_tensor(
            torch.ones(1, 4096, dtype=torch.long), torch.ones(4096, 2, dtype=dtype), (3, 2)
        )
        cls([p], lr=0.5).step()
        assert p.tolist() == [[0.0, 0.0], [-2048.0, -2048.0], [0.0, 0.0]]

    def test_zero_dimensional_parameter(self) -> None:
        p = Parameter(torch.tensor(1.0))
        p.grad = torch.tensor(0.5).to_sparse()
        FusedSGD([p], lr=0.5).step()
        assert p.item() == 0.75


@pytest.mark.parametrize("most", [1, 2**16, 2**16 + 1, 2**40, 2**63])
def test_order_of_rows(most: int) -> None:
    """Equal rows stay in order, so that their gradients are summed in order."""
    numbers = np.random.default_rng(torch.initial_seed()).integers(most, size=1000)
    numbers[::3] = numbers[0]
    assert np.array_equal(stable_order(numbers), np.argsort(numbers, kind="stable"))


class TestState:
    """Sparse momentum is saved, loaded and copied."""

    ROWS = ([7, 3, 7], [19, 3], [0, 7])

    @pytest.mark.parametrize("dampening", [0.0, 0.5])
    def test_state_dict_moves_both_ways(self, dampening: float) -> None:
        kwargs = {"lr": 0.1, "momentum": 0.9, "dampening": dampening}
        pair = Pair(SGD, kwargs, [new_table(20, 5, dtype=torch.float64)])
        pair.check_rows(*self.ROWS)
        ours, torchs = pair.ours.state_dict(), pair.sparse_torchs.state_dict()
        pair.ours = FusedSGD(pair.params)
        pair.sparse_torchs = torch.optim.SGD(pair.sparse, foreach=False)
        pair.ours.load_state_dict(torchs)
        pair.sparse_torchs.load_state_dict(ours)
        pair.check_rows(*self.ROWS)

    @pytest.mark.parametrize("dtype", DTYPES[:4], ids=configuration_id)
    @pytest.mark.parametrize("how", ["file", "deepcopy", "pickle"])
    @pytest.mark.filterwarnings("ignore:Validating sparse tensor")  # by torch.load, from 2.15 on
    def test_copies_take_the_same_steps(self, dtype: torch.dtype, how: str) -> None:
        p = new_table(20, 5, dtype=dtype)
        optimizer = FusedSGD([p], lr=0.1, momentum=0.9)
        p.grad = new_gradient(p, [7, 3])
        optimizer.step()
        if how == "file":
            twin = FusedSGD([Parameter(p.detach().clone())])
            twin.load_state_dict(through_a_file(optimizer.state_dict()))
        elif how == "deepcopy":
            twin = copy.deepcopy(optimizer)
        else:
            twin = pickle.loads(pickle.dumps(optimizer))
        (q,) = twin.param_groups[0]["params"]
        assert q is not p
        for rows in self.ROWS:
            step_alike(optimizer, twin, grads=[new_gradient(p, rows)])
        assert_same_bits(optimizer, twin)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert all(value.dtype == wide for value in optimizer.state[p].values())

    @each_of(SPLIT)
    def test_split_goes_through_a_file(self, case: OptimizerCase, kwargs: Kwargs) -> None:
        p = new_table(20, 5)
        q = Parameter(p.detach().clone())
        optimizer, twin = (case.make([param], **kwargs) for param in (p, q))
        for i, rows in enumerate(self.ROWS):
            step_alike(optimizer, twin, grads=[new_gradient(p, rows)])
            if i == 0:
                saved = copy.deepcopy(twin.state_dict())
                twin = case.make([q], lr=0.7)
                twin.load_state_dict(saved)
        assert_same_bits(optimizer, twin)
        assert "trail" in twin.state[q]

    def test_state_taken_away_between_steps(self) -> None:
        pair = Pair(SGD, {"lr": 0.1, "momentum": 0.9}, [new_table(20, 5)])
        (p,) = pair.params
        for rows in self.ROWS:
            pair.step_with(new_gradient(p, rows))
            for optimizer in (pair.ours, pair.torchs, pair.sparse_torchs):
                optimizer.state.clear()
            pair._errors[pair.references[0]].pop("momentum_buffer")
        pair.check_with(new_gradient(p, [1]))


class TestClipping:
    """max_grad_norm takes the norm of the summed rows, over sparse and dense parameters."""

    @pytest.mark.parametrize("limit", [0.5, 1e3])
    @pytest.mark.parametrize("dtype", DTYPES, ids=configuration_id)
    @each_of([WHOLE[0], WHOLE[3], WHOLE[7]])
    def test_clips_as_by_hand(
        self, case: OptimizerCase, kwargs: Kwargs, dtype: torch.dtype, limit: float
    ) -> None:
        """torch has no norm of sparse gradients, so the reference has dense ones."""
        params = [
            new_table(20, 5, dtype=dtype),
            new_table(4, 4, dtype=dtype),
            new_table(9, 3, dtype=dtype),
        ]
        pair = Pair(case, kwargs, params)
        pair.ours.max_grad_norm = limit
        pair.takes_sparse = False
        for _ in range(3):
            grads = [
                new_gradient(params[0], [7, 3, 7, 7]),
                random_values((4, 4), dtype),
                new_gradient(params[2], [1]),
            ]
            before = [g.to_dense() for g in grads]
            pair.check_with(*grads)
            for grad, old in zip(grads, before):
                assert torch.equal(grad.to_dense(), old)

    @each_of(SOME)
    def test_below_the_limit_it_is_as_without(self, case: OptimizerCase, kwargs: Kwargs) -> None:
        p = new_table(10, 6, case=case)
        q = Parameter(p.detach().clone())
        optimizers = [case.make([p], **kwargs), case.make([q], max_grad_norm=1e6, **kwargs)]
        for rows in ([1, 1, 9], [0, 1], []):
            step_alike(*optimizers, grads=[new_gradient(p, rows)])
        assert_same_bits(*optimizers)
