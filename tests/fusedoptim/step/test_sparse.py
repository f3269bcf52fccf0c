"""Sparse gradients, such as those of embeddings, against torch in float64."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_

from fusedoptim import FusedAdagrad, FusedAdam, FusedAdamW, FusedLamb, FusedSGD, SplitSGD
from fusedoptim.step.checks import check_candidate
from fusedoptim.step.rule import Candidate
from fusedoptim.step.sparse_gradient import stable_order
from tests.fusedoptim.helpers import (
    SideBySide,
    assert_same_bits,
    bits,
    exact_values,
    refused,
    step_alike,
    through_a_file,
    upper_half,
    widened,
)
from tests.optimizer_cases import (
    ADAGRAD,
    SGD,
    SPLIT_CASES,
    SPLIT_SGD,
    OptimizerCase,
    configuration_id,
)

Kwargs = dict[str, Any]
SPLIT_ADAGRAD = next(case for case in SPLIT_CASES if case.cls is FusedAdagrad)
SGD_KWARGS: tuple[Kwargs, ...] = (
    {"lr": 0.1},
    {"lr": torch.tensor(0.1), "maximize": True},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    {"lr": 0.1, "momentum": 0.9, "maximize": True},
)
ADAGRAD_KWARGS: tuple[Kwargs, ...] = (
    {"lr": 0.1},
    {"lr": 0.1, "lr_decay": 0.1},
    {"lr": 0.1, "maximize": True, "initial_accumulator_value": 0.5, "eps": 1e-6},
)
WHOLE, SPLIT = (
    [(sgd, kwargs) for kwargs in SGD_KWARGS] + [(adagrad, kwargs) for kwargs in ADAGRAD_KWARGS]
    for sgd, adagrad in ((SGD, ADAGRAD), (SPLIT_SGD, SPLIT_ADAGRAD))
)
SOME = [WHOLE[3], WHOLE[7], SPLIT[3], SPLIT[7]]
WITHOUT_SPARSE_STATE = [WHOLE[0], WHOLE[6], SPLIT[0], SPLIT[6]]
DTYPES = (*ADAGRAD.dtypes, torch.complex64, torch.complex128)


def _each(configurations: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("case", "kwargs"), configurations, ids=configuration_id)


@pytest.fixture(autouse=True)
def _checked_invariants() -> Iterator[None]:
    with torch.sparse.check_sparse_tensor_invariants(True):
        yield


def _values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Eighths up to 1: the sum of 32 of them is exact in every dtype."""
    eighths = torch.randint(-8, 9, (*shape, 2), dtype=torch.float64) / 8
    if dtype.is_complex:
        return torch.view_as_complex(eighths).to(dtype)
    return eighths[..., 0].to(dtype)


def _gradient(table: Tensor, rows: list[int] | Tensor) -> Tensor:
    """A gradient of the named rows, which may occur more than once and in any order."""
    indices = torch.as_tensor(rows, dtype=torch.long).reshape(1, -1)
    values = _values((indices.shape[1], *table.shape[1:]), table.dtype)
    return torch.sparse_coo_tensor(indices, values, table.shape)


def _table(
    rows: int, *width: int, dtype: torch.dtype = torch.float32, case: OptimizerCase = SGD
) -> Parameter:
    dtype = torch.bfloat16 if case.is_split else dtype
    return Parameter(torch.randn(rows, *width, dtype=torch.float64).to(dtype))


class _Pair(SideBySide):
    """An optimizer with sparse gradients; torch's, in float64, with sparse and with dense ones."""

    def __init__(self, case: OptimizerCase, kwargs: Kwargs, params: list[Parameter]):
        super().__init__(case, kwargs, params)
        self.sparse = [Parameter(p.detach().clone()) for p in self.references]
        self.sparse_torchs = case.make_reference(self.sparse, **self.kwargs)
        # torch squares complex values in sparse gradients, and their parts in dense ones.
        self.takes_sparse = not (self.dtype.is_complex and case is ADAGRAD)

    def step_with(self, *grads: Tensor | None) -> None:
        """Step each with its form of these gradients."""
        for p, dense, sparse, grad in zip(self.params, self.references, self.sparse, grads):
            p.grad = grad
            wide = None if grad is None else widened(grad)
            sparse.grad = wide
            dense.grad = wide.to_dense() if wide is not None and wide.is_sparse else wide
        if self.ours.max_grad_norm is not None:
            clip_grad_norm_(self.references, self.ours.max_grad_norm)
        self.step()
        if self.takes_sparse:
            self.sparse_torchs.step()

    def check_with(self, *grads: Tensor | None) -> None:
        """Step with these gradients, and compare."""
        self.step_with(*grads)
        self.assert_equal()

    def check_rows(self, *steps: list[int] | Tensor) -> None:
        """Step once for each list of rows that have a gradient, and compare after each."""
        for rows in steps:
            self.check_with(_gradient(self.params[0], rows))

    def assert_equal(self) -> None:
        """Compare values with the dense reference, and the rows with state with the sparse one."""
        super().assert_equal()
        values = exact_values(self.ours)
        for p, reference, sparse in zip(self.params, self.references, self.sparse):
            if self.case.is_split:
                assert torch.equal(p, upper_half(values[p]))
            if self.takes_sparse:
                torch.testing.assert_close(sparse, reference)
                state, expected = self.ours.state.get(p, {}), self.torchs.state.get(reference, {})
                for key, value in self.sparse_torchs.state.get(sparse, {}).items():
                    torch.testing.assert_close(value.to_dense(), expected[key])
                    if value.is_sparse and state[key].is_sparse:
                        rows = state[key].coalesce().indices()
                        assert torch.equal(rows, value.coalesce().indices())


def _pair(case: OptimizerCase, kwargs: Kwargs, *shape: int) -> _Pair:
    return _Pair(case, kwargs, [_table(*shape, case=case)])


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
        """Repeated rows, other rows at each step, no rows, all rows in random order."""
        pair = _Pair(case, kwargs, [_table(20, 5, dtype=dtype)])
        assert pair.params[0].dtype == (torch.bfloat16 if pair.case.is_split else dtype)
        pair.check_rows([7, 3, 7, 7], [19, 3, 0], [], torch.randperm(20), [4, 4], [0])

    @pytest.mark.parametrize(
        ("case", "kwargs", "width"),
        [(*some, width) for some in SOME for width in (1, 15, 16, 17, 64, 1000, 32769, 70001)]
        + [(*some, 0) for some in WITHOUT_SPARSE_STATE],
        ids=configuration_id,
    )
    def test_row_widths(self, case: OptimizerCase, kwargs: Kwargs, width: int) -> None:
        """Around the SIMD width, longer than one chunk, and zero."""
        pair = _pair(case, kwargs, 6, width)
        pair.check_rows([5, 0, 5], [1, 5])

    @_each(WITHOUT_SPARSE_STATE)
    def test_other_dimensions_at_each_step(self, case: OptimizerCase, kwargs: Kwargs) -> None:
        """Without sparse state, rows may change their width."""
        pair = _pair(case, kwargs, 6, 40_000)
        (p,) = pair.params
        for sparse_dim in (1, 2, 1, 2):
            indices = torch.stack([torch.randint(n, (50,)) for n in p.shape[:sparse_dim]])
            values = _values((50, *p.shape[sparse_dim:]), p.dtype)
            pair.check_with(torch.sparse_coo_tensor(indices, values, p.shape))

    @_each(SOME)
    def test_many_rows(self, case: OptimizerCase, kwargs: Kwargs) -> None:
        pair = _pair(case, kwargs, 30_000, 3)
        pair.check_rows(*(torch.randperm(30_000)[:10_000] for _ in range(3)))

    @_each(SOME)
    @pytest.mark.parametrize("shape", [(9,), (4, 5), (2, 3, 4), (4, 0), (0, 4)], ids=str)
    def test_sparse_and_dense_dimensions(
        self, case: OptimizerCase, kwargs: Kwargs, shape: tuple[int, ...]
    ) -> None:
        """From one sparse dimension to all."""
        for sparse_dim in range(1, len(shape) + 1):
            pair = _pair(case, kwargs, *shape)
            (p,) = pair.params
            for _ in range(3):
                count = 4 if p.numel() else 0
                sizes = shape[:sparse_dim]
                indices = torch.stack([torch.randint(max(n, 1), (count,)) for n in sizes])
                values = _values((count, *shape[sparse_dim:]), p.dtype)
                pair.check_with(torch.sparse_coo_tensor(indices, values, shape))

    @_each(SOME)
    @pytest.mark.parametrize("mode", ["embedding", "sum", "mean"])
    def test_gradients_of_layers(self, case: OptimizerCase, kwargs: Kwargs, mode: str) -> None:
        pair = _pair(case, kwargs, 12, 8)
        (p,) = pair.params
        if mode == "embedding":
            layer: torch.nn.Module = torch.nn.Embedding(12, 8, sparse=True, _weight=p.data)
        else:
            layer = torch.nn.EmbeddingBag(12, 8, sparse=True, mode=mode, _weight=p.data)
        layer.weight = p
        for _ in range(3):
            p.grad = None
            out = layer(torch.randint(12, (6, 4)))
            out.backward(_values(tuple(out.shape), p.dtype))
            assert p.grad is not None
            assert p.grad.is_sparse
            pair.check_with(p.grad)

    @_each(SOME)
    def test_several_tables_and_dense_parameters(self, case: OptimizerCase, kwargs: Kwargs) -> None:
        shapes = ((20, 5), (7, 16), (3, 3), (20, 1))
        pair = _Pair(case, kwargs, [_table(*shape, case=case) for shape in shapes])
        for i in range(4):
            grads: list[Tensor | None] = [
                _values(tuple(p.shape), p.dtype)
                if j == 2
                else _gradient(p, torch.randint(len(p), (5,)))
                for j, p in enumerate(pair.params)
            ]
            if i == 2:
                grads[0] = grads[2] = None
            pair.check_with(*grads)

    @_each(SOME)
    @pytest.mark.parametrize("layout", ["transposed", "strided", "offset"])
    def test_table_in_odd_memory(self, case: OptimizerCase, kwargs: Kwargs, layout: str) -> None:
        made = {
            "transposed": lambda p: p.data.t().contiguous().t(),
            "strided": lambda p: p.data.repeat_interleave(2, 1)[:, ::2],
            "offset": lambda p: torch.cat([p.data, p.data, p.data])[10:20],
        }
        p = _table(10, 6, case=case)
        p.data = made[layout](p)
        pair = _Pair(case, kwargs, [p])
        pair.check_rows([1, 1, 9], [0, 1], [])

    @_each(SOME)
    def test_memory_beside_the_table_stays(self, case: OptimizerCase, kwargs: Kwargs) -> None:
        whole = _table(30, 17, case=case).detach()
        before = whole.clone()
        p = Parameter(whole[10:20])
        optimizer = case.make([p], **kwargs)
        for rows in (range(10), [0, 9]):
            p.grad = _gradient(p, list(rows))
            optimizer.step()
        assert torch.equal(bits(whole[:10]), bits(before[:10]))
        assert torch.equal(bits(whole[20:]), bits(before[20:]))

    @_each([*WHOLE, *SPLIT])
    @pytest.mark.parametrize("first", ["sparse", "dense"])
    def test_sparse_and_dense_gradients_in_turn(
        self, case: OptimizerCase, kwargs: Kwargs, first: str
    ) -> None:
        """The reference has dense gradients: torch cannot add one to a sparse momentum."""
        pair = _pair(case, kwargs, 10, 6)
        pair.takes_sparse = False
        (p,) = pair.params
        for i in range(5):
            grad = _gradient(p, [2, 2, 7, i])
            sparse = (i % 2 == 0) == (first == "sparse")
            pair.check_with(grad if sparse else grad.to_dense())

    def test_lazily_conjugated_values(self) -> None:
        pair = _Pair(SGD, {"lr": 0.1}, [_table(6, 4, dtype=torch.complex64)])
        grad = _gradient(pair.params[0], [3, 1])
        pair.check_with(torch.sparse_coo_tensor(grad._indices(), grad._values().conj(), grad.shape))

    @pytest.mark.parametrize(
        ("cls", "dtype"),
        [(FusedSGD, torch.bfloat16), (FusedSGD, torch.float16), (SplitSGD, torch.bfloat16)],
        ids=configuration_id,
    )
    def test_a_row_that_occurs_a_thousand_times(self, cls: type[Any], dtype: torch.dtype) -> None:
        """In 16 bits the sum of ones stops at 256 (bfloat16) and 2048 (float16)."""
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
    """Equal ones stay in order, so that their gradients are summed in order."""
    numbers = np.random.default_rng(torch.initial_seed()).integers(most, size=1000)
    numbers[::3] = numbers[0]
    assert np.array_equal(stable_order(numbers), np.argsort(numbers, kind="stable"))


class TestWhatChanges:
    """Both halves of the rows with a gradient, and nothing else."""

    ODD = (float("nan"), -float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, 1e38, -3.0)

    @_each([*WHOLE, *SPLIT])
    def test_untouched_rows_keep_their_bits(self, case: OptimizerCase, kwargs: Kwargs) -> None:
        p = Parameter(torch.tensor([self.ODD] * 6))
        optimizer = case.make([p], **kwargs)
        (before,) = optimizer.master_params()
        state = {k: v.clone() for k, v in optimizer.state.get(p, {}).items()}
        for rows in ([1, 4, 1], [4]):
            p.grad = _gradient(p, rows)
            p.grad._values()[:, -1].abs_().add_(1)  # so that no two gradients cancel
            optimizer.step()
        (after,) = optimizer.master_params()
        untouched = [0, 2, 3, 5]
        assert torch.equal(bits(after[untouched]), bits(before[untouched]))
        for key in ("sum", "trail"):
            if key in state:
                assert torch.equal(
                    bits(optimizer.state[p][key][untouched]), bits(state[key][untouched])
                )
        assert not torch.equal(after[[1, 4], -1], before[[1, 4], -1])
        if "sum" in state:
            assert not torch.equal(optimizer.state[p]["sum"][[1, 4]], state["sum"][[1, 4]])

    @pytest.mark.parametrize("layout", ["rows", "columns"])
    def test_untouched_rows_without_eps(self, layout: str) -> None:
        """They are not updated, which would be 0 / 0."""
        p = Parameter(torch.zeros(2, 3).t() if layout == "columns" else torch.zeros(3, 2))
        p.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (3, 2))
        FusedAdagrad([p], lr=1.0, eps=0).step()
        assert p.tolist() == [[0.0, 0.0], [-1.0, -1.0], [0.0, 0.0]]

    @_each([SPLIT[0], SPLIT[3], SPLIT[6]])
    def test_both_halves_change(self, case: OptimizerCase, kwargs: Kwargs) -> None:
        p = Parameter(torch.full((4, 3), 1.0))
        optimizer = case.make([p], **(kwargs | {"lr": 0.01}))
        p.grad = torch.sparse_coo_tensor([[2]], torch.full((1, 3), 0.7).bfloat16(), (4, 3))
        optimizer.step()
        assert (p[2] != 1).all()
        assert (optimizer.state[p]["trail"][2] != 0).all()
        assert (p[[0, 1, 3]] == 1).all()
        assert (optimizer.state[p]["trail"][[0, 1, 3]] == 0).all()

    def test_updates_too_small_for_bfloat16_add_up(self) -> None:
        p = Parameter(torch.ones(4, 3, dtype=torch.bfloat16))
        optimizer = SplitSGD([p], lr=2.0**-12)
        for _ in range(64):
            p.grad = torch.sparse_coo_tensor([[2]], torch.ones(1, 3).bfloat16(), (4, 3))
            optimizer.step()
        (master,) = optimizer.master_params()
        assert master[2].tolist() == [1 - 2.0**-6] * 3

    @_each(SOME)
    def test_gradient_keeps_its_values(self, case: OptimizerCase, kwargs: Kwargs) -> None:
        p = _table(10, 6, case=case)
        optimizer = case.make([p], **kwargs)
        for rows in ([3, 1, 3], [1, 3]):
            grad = p.grad = _gradient(p, rows)
            before = grad.clone()
            for _ in range(2):
                optimizer.step()
            assert p.grad is grad
            assert not grad.is_coalesced()
            assert torch.equal(grad._indices(), before._indices())
            assert torch.equal(grad._values(), before._values())

    @_each(SOME)
    def test_momentum_is_not_the_gradients_memory(
        self, case: OptimizerCase, kwargs: Kwargs
    ) -> None:
        """Not even that of a coalesced gradient, whose values equal the first buffer."""
        pair = _pair(case, kwargs, 10, 6)
        (p,) = pair.params
        pair.step_with(_gradient(p, [1, 3]).coalesce())
        p.grad._values().fill_(7)
        pair.check_with(_gradient(p, [1, 3]).coalesce())

    @_each(SOME)
    def test_autograd_sees_the_write(self, case: OptimizerCase, kwargs: Kwargs) -> None:
        p = _table(10, 6, case=case)
        optimizer = case.make([p], **kwargs)
        loss = (p * p).sum()
        p.grad = _gradient(p, [1])
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_momentum_has_only_the_rows_that_were_touched(self) -> None:
        p = _table(1000, 3)
        optimizer = FusedSGD([p], lr=0.1, momentum=0.9)
        for rows in ([5, 2], [999, 5]):
            p.grad = _gradient(p, rows)
            optimizer.step()
        buffer = optimizer.state[p]["momentum_buffer"]
        assert buffer.is_sparse
        assert buffer.is_coalesced()
        assert buffer.shape == p.shape
        assert buffer.indices().tolist() == [[2, 5, 999]]


ADAGRADS_MESSAGE = "weight_decay option is not compatible with sparse gradients"
ADAMS_MESSAGE = "Adam does not support sparse gradients, please consider SparseAdam instead"


class TestRefused:
    """An error before anything is written, dense parameters of the same optimizer included."""

    @pytest.mark.parametrize("sparse_first", [True, False])
    @pytest.mark.parametrize(
        ("cls", "kwargs", "message"),
        [
            (FusedSGD, {"weight_decay": 0.1}, r"weight_decay=0\.1"),
            (FusedSGD, {"weight_decay": 0.1, "momentum": 0.9}, r"weight_decay=0\.1"),
            (SplitSGD, {"weight_decay": 0.1}, r"weight_decay=0\.1"),
            (FusedAdagrad, {"weight_decay": 0.1}, ADAGRADS_MESSAGE),
            (FusedAdam, {}, ADAMS_MESSAGE),
            (FusedAdamW, {"amsgrad": True}, ADAMS_MESSAGE),
            (FusedLamb, {}, "Lamb does not support sparse gradients"),
        ],
        ids=configuration_id,
    )
    def test_by_the_optimizer(
        self, cls: type[Any], kwargs: Kwargs, message: str, sparse_first: bool
    ) -> None:
        table, dense = _table(10, 6), _table(5, 5)
        params = [table, dense] if sparse_first else [dense, table]
        optimizer = cls(params, lr=0.1, **kwargs)
        for _ in range(2):
            table.grad, dense.grad = _gradient(table, [3, 3]), torch.randn(5, 5).to(dense.dtype)
            with refused(optimizer, RuntimeError, message) as raised:
                optimizer.step()
            assert "\\" in message or str(raised.value) == message
            table.grad = None  # the second time, after a step
            optimizer.step()

    @_each(SOME)
    @pytest.mark.parametrize("indices", [[[0, 4]], [[0, -1]], [[4, 0]], [[0, 0], [1, 2]]], ids=str)
    def test_rows_that_do_not_exist(
        self, case: OptimizerCase, kwargs: Kwargs, indices: list[list[int]]
    ) -> None:
        p = _table(4, 2, case=case)
        optimizer = case.make([p], **kwargs)
        values = torch.ones(2, *p.shape[len(indices) :], dtype=p.dtype)
        p.grad = torch.sparse_coo_tensor(indices, values, (4, 2), check_invariants=False)
        with refused(optimizer, IndexError, "has an index beyond it"):
            optimizer.step()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda data: data.reshape(4, 3), r"gradient whose shape differs: \(6, 2\)"),
            (Tensor.double, "gradient whose dtype differs: torch.float32"),
        ],
    )
    def test_gradient_of_another_shape_or_dtype(self, change: Any, message: str) -> None:
        p = _table(6, 2)
        optimizer = FusedAdagrad([p], lr=0.1)
        p.grad = _gradient(p, [1])
        p.data = change(p.data)
        with refused(optimizer, RuntimeError, message):
            optimizer.step()

    @pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
    def test_compressed_rows(self) -> None:
        """torch itself refuses to assign one to a strided parameter."""
        p = _table(6, 2)
        grad = torch.ones(6, 2).to_sparse_csr()
        with pytest.raises(RuntimeError, match="different type"):
            p.grad = grad
        with pytest.raises(TypeError, match=r"layout torch\.sparse_csr; make it strided or COO"):
            check_candidate("FusedSGD", Candidate(p, grad, "parameter 0"))

    def test_other_dimensions_than_the_momentum(self) -> None:
        """torch refuses it too: "expected 'self' and 'other' to have same density"."""
        whole = torch.randn(16, 2)  # a write beyond the parameter would be seen, not crash
        p = Parameter(whole[:4])
        optimizer = FusedSGD([p], lr=0.1, momentum=0.9)
        p.grad = _gradient(p, [1, 3])
        optimizer.step()
        p.grad = torch.eye(4)[:, :2].to_sparse()
        before = whole.clone()
        with refused(optimizer, RuntimeError, "has 2 sparse dimensions, and the state"):
            optimizer.step()
        assert torch.equal(whole, before)

    def test_momentum_of_another_model(self) -> None:
        larger = _table(12, 2)
        other = FusedSGD([larger], lr=0.1, momentum=0.9)
        larger.grad = _gradient(larger, [3, 11])
        other.step()
        whole = torch.randn(16, 2)
        p = Parameter(whole[:4])
        optimizer = FusedSGD([p], lr=0.1)
        optimizer.load_state_dict(other.state_dict())
        p.grad = _gradient(p, [1])
        before = whole.clone()
        with refused(optimizer, ValueError, r"shape \(12, 2\)"):
            optimizer.step()
        assert torch.equal(whole, before)


class TestState:
    """Sparse momentum is saved, loaded and copied."""

    ROWS = ([7, 3, 7], [19, 3], [0, 7])

    @pytest.mark.parametrize("dampening", [0.0, 0.5])
    def test_state_dict_moves_both_ways(self, dampening: float) -> None:
        kwargs = {"lr": 0.1, "momentum": 0.9, "dampening": dampening}
        pair = _Pair(SGD, kwargs, [_table(20, 5, dtype=torch.float64)])
        pair.check_rows(*self.ROWS)
        ours, torchs = pair.ours.state_dict(), pair.sparse_torchs.state_dict()
        pair.ours = FusedSGD(pair.params)
        pair.sparse_torchs = torch.optim.SGD(pair.sparse, foreach=False)
        pair.ours.load_state_dict(torchs)
        pair.sparse_torchs.load_state_dict(ours)
        pair.check_rows(*self.ROWS)

    @pytest.mark.parametrize("dtype", DTYPES[:4], ids=configuration_id)
    @pytest.mark.parametrize("how", ["file", "deepcopy", "pickle"])
    def test_copies_take_the_same_steps(self, dtype: torch.dtype, how: str) -> None:
        p = _table(20, 5, dtype=dtype)
        optimizer = FusedSGD([p], lr=0.1, momentum=0.9)
        p.grad = _gradient(p, [7, 3])
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
            step_alike(optimizer, twin, grads=[_gradient(p, rows)])
        assert_same_bits(optimizer, twin)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert all(value.dtype == wide for value in optimizer.state[p].values())

    @_each(SPLIT)
    def test_split_goes_through_a_file(self, case: OptimizerCase, kwargs: Kwargs) -> None:
        p = _table(20, 5)
        q = Parameter(p.detach().clone())
        optimizer, twin = (case.make([param], **kwargs) for param in (p, q))
        for i, rows in enumerate(self.ROWS):
            step_alike(optimizer, twin, grads=[_gradient(p, rows)])
            if i == 0:
                saved = copy.deepcopy(twin.state_dict())
                twin = case.make([q], lr=0.7)
                twin.load_state_dict(saved)
        assert_same_bits(optimizer, twin)
        assert "trail" in twin.state[q]

    def test_state_taken_away_between_steps(self) -> None:
        pair = _Pair(SGD, {"lr": 0.1, "momentum": 0.9}, [_table(20, 5)])
        (p,) = pair.params
        for rows in self.ROWS:
            pair.step_with(_gradient(p, rows))
            for optimizer in (pair.ours, pair.torchs, pair.sparse_torchs):
                optimizer.state.clear()
            pair._errors[pair.references[0]].pop("momentum_buffer")
        pair.check_with(_gradient(p, [1]))


class TestClipping:
    """max_grad_norm takes the norm of the summed rows, over sparse and dense parameters."""

    @pytest.mark.parametrize("limit", [0.5, 1e3])
    @pytest.mark.parametrize("dtype", DTYPES, ids=configuration_id)
    @_each([WHOLE[0], WHOLE[3], WHOLE[7]])
    def test_clips_as_by_hand(
        self, case: OptimizerCase, kwargs: Kwargs, dtype: torch.dtype, limit: float
    ) -> None:
        """torch has no norm of sparse gradients, so the reference has dense ones."""
        params = [_table(20, 5, dtype=dtype), _table(4, 4, dtype=dtype), _table(9, 3, dtype=dtype)]
        pair = _Pair(case, kwargs, params)
        pair.ours.max_grad_norm = limit
        pair.takes_sparse = False
        for _ in range(3):
            grads = [
                _gradient(params[0], [7, 3, 7, 7]),
                _values((4, 4), dtype),
                _gradient(params[2], [1]),
            ]
            before = [g.to_dense() for g in grads]
            pair.check_with(*grads)
            for grad, old in zip(grads, before):
                assert torch.equal(grad.to_dense(), old)

    @_each(SOME)
    def test_below_the_limit_it_is_as_without(self, case: OptimizerCase, kwargs: Kwargs) -> None:
        p = _table(10, 6, case=case)
        q = Parameter(p.detach().clone())
        optimizers = [case.make([p], **kwargs), case.make([q], max_grad_norm=1e6, **kwargs)]
        for rows in ([1, 1, 9], [0, 1], []):
            step_alike(*optimizers, grads=[_gradient(p, rows)])
        assert_same_bits(*optimizers)
