"""What steps with sparse gradients write: their rows, and nothing at all where they are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from fusedoptim import FusedAdagrad, FusedAdam, FusedAdamW, FusedLamb, FusedSGD, SplitSGD
from fusedoptim.step.checks import check_candidate
from fusedoptim.step.rule import Candidate
from tests.fusedoptim.helpers import bits, refused
from tests.fusedoptim.step.sparse_cases import (
    SOME,
    SPLIT,
    WHOLE,
    each_of,
    new_gradient,
    new_pair,
    new_table,
)
from tests.optimizer_cases import Kwargs, OptimizerCase, configuration_id

pytestmark = pytest.mark.usefixtures("checked_invariants")


class TestWhatChanges:
    """Both halves of the rows with a gradient change, and nothing else does."""

    ODD = (float("nan"), -float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, 1e38, -3.0)

    @each_of([*WHOLE, *SPLIT])
    def test_untouched_rows_keep_their_bits(self, case: OptimizerCase, kwargs: Kwargs) -> None:
        p = Parameter(torch.tensor([self.ODD] * 6))
        optimizer = case.make([p], **kwargs)
        (before,) = optimizer.master_params()
        state = {k: v.clone() for k, v in optimizer.state.get(p, {}).items()}
        for rows in ([1, 4, 1], [4]):
            p.grad = new_gradient(p, rows)
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
        """Untouched rows are not updated, as that would be 0 / 0."""
        p = Parameter(torch.zeros(2, 3).t() if layout == "columns" else torch.zeros(3, 2))
        p.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (3, 2))
        FusedAdagrad([p], lr=1.0, eps=0).step()
        assert p.tolist() == [[0.0, 0.0], [-1.0, -1.0], [0.0, 0.0]]

    @each_of([SPLIT[0], SPLIT[3], SPLIT[6]])
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

    @each_of(SOME)
    def test_gradient_keeps_its_values(self, case: OptimizerCase, kwargs: Kwargs) -> None:
        p = new_table(10, 6, case=case)
        optimizer = case.make([p], **kwargs)
        for rows in ([3, 1, 3], [1, 3]):
            grad = p.grad = new_gradient(p, rows)
            before = grad.clone()
            for _ in range(2):
                optimizer.step()
            assert p.grad is grad
            assert not grad.is_coalesced()
            assert torch.equal(grad._indices(), before._indices())
            assert torch.equal(grad._values(), before._values())

    @each_of(SOME)
    def test_momentum_is_not_the_gradients_memory(
        self, case: OptimizerCase, kwargs: Kwargs
    ) -> None:
        """Momentum is a copy, even of a coalesced gradient, whose values equal the first buffer."""
        pair = new_pair(case, kwargs, 10, 6)
        (p,) = pair.params
        pair.step_with(new_gradient(p, [1, 3]).coalesce())
        p.grad._values().fill_(7)
        pair.check_with(new_gradient(p, [1, 3]).coalesce())

    @each_of(SOME)
    def test_autograd_sees_the_write(self, case: OptimizerCase, kwargs: Kwargs) -> None:
        p = new_table(10, 6, case=case)
        optimizer = case.make([p], **kwargs)
        loss = (p * p).sum()
        p.grad = new_gradient(p, [1])
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_momentum_has_only_the_rows_that_were_touched(self) -> None:
        p = new_table(1000, 3)
        optimizer = FusedSGD([p], lr=0.1, momentum=0.9)
        for rows in ([5, 2], [999, 5]):
            p.grad = new_gradient(p, rows)
            optimizer.step()
        buffer = optimizer.state[p]["momentum_buffer"]
        assert buffer.is_sparse
        assert buffer.is_coalesced()
        assert buffer.shape == p.shape
        assert buffer.indices().tolist() == [[2, 5, 999]]


ADAGRADS_MESSAGE = "weight_decay option is not compatible with sparse gradients"
ADAMS_MESSAGE = "Adam does not support sparse gradients, please consider SparseAdam instead"


class TestRefused:
    """An error comes before anything is written, including the optimizer's dense parameters."""

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
        table, dense = new_table(10, 6), new_table(5, 5)
        params = [table, dense] if sparse_first else [dense, table]
        optimizer = cls(params, lr=0.1, **kwargs)
        for _ in range(2):
            table.grad, dense.grad = new_gradient(table, [3, 3]), torch.randn(5, 5).to(dense.dtype)
            with refused(optimizer, RuntimeError, message) as raised:
                optimizer.step()
            assert "\\" in message or str(raised.value) == message
            table.grad = None  # the second error comes after a step
            optimizer.step()

    @each_of(SOME)
    @pytest.mark.parametrize("indices", [[[0, 4]], [[0, -1]], [[4, 0]], [[0, 0], [1, 2]]], ids=str)
    def test_rows_that_do_not_exist(
        self, case: OptimizerCase, kwargs: Kwargs, indices: list[list[int]]
    ) -> None:
        p = new_table(4, 2, case=case)
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
        p = new_table(6, 2)
        optimizer = FusedAdagrad([p], lr=0.1)
        p.grad = new_gradient(p, [1])
        p.data = change(p.data)
        with refused(optimizer, RuntimeError, message):
            optimizer.step()

    @pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
    def test_compressed_rows(self) -> None:
        """torch itself refuses to assign a CSR gradient to a strided parameter."""
        p = new_table(6, 2)
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
        p.grad = new_gradient(p, [1, 3])
        optimizer.step()
        p.grad = torch.eye(4)[:, :2].to_sparse()
        before = whole.clone()
        with refused(optimizer, RuntimeError, "has 2 sparse dimensions, and the state"):
            optimizer.step()
        assert torch.equal(whole, before)

    def test_momentum_of_another_model(self) -> None:
        larger = new_table(12, 2)
        other = FusedSGD([larger], lr=0.1, momentum=0.9)
        larger.grad = new_gradient(larger, [3, 11])
        other.step()
        whole = torch.randn(16, 2)
        p = Parameter(whole[:4])
        optimizer = FusedSGD([p], lr=0.1)
        optimizer.load_state_dict(other.state_dict())
        p.grad = new_gradient(p, [1])
        before = whole.clone()
        with refused(optimizer, ValueError, r"shape \(12, 2\)"):
            optimizer.step()
        assert torch.equal(whole, before)
