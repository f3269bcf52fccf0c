"""Merged embedding bags where something is wrong, very large, shared, or killed."""

from __future__ import annotations

import copy
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedoptim.nn import MergedEmbeddingBag
from fusedoptim.ops import embedding_bags
from tests.fusedoptim.bag_cases import ROWS, Bags, new_bags
from tests.fusedoptim.helpers import run_script
from tests.running import at_each_thread_count

OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad"]
WIDTH, BAGS = 20, 9


def new_module(optimizer: str, rows: tuple[int, ...] = ROWS, split: bool = False) -> Any:
    bags = [
        torch.nn.EmbeddingBag(count, WIDTH, mode="sum", include_last_offset=True) for count in rows
    ]
    return MergedEmbeddingBag(bags, optimizer, lr=0.1, split=split)


def values_of(module: Any) -> list[Tensor]:
    """All that training changes: the tables, and the optimizer's state of them."""
    states = [
        value
        for state in module.optimizer().state_dict()["state"].values()
        for value in state.values()
    ]
    tensors = [*(bag.weight for bag in module), *map(torch.as_tensor, states)]
    return [tensor.detach().clone() for tensor in tensors]


def train(module: Any, first: int, last: int) -> None:
    """Take steps whose batches depend on the number of the step alone."""
    for step in range(first, last):
        torch.manual_seed(step)
        outputs = module(*new_bags(ROWS, BAGS))
        torch.autograd.backward(outputs, [torch.randn_like(y) for y in outputs])
        module.optimizer().step()


def killed_training(file: str, optimizer: str, split: str, where: str) -> None:
    """Train, save after the third step, and get killed between two later ones or in one of them."""
    torch.manual_seed(0)
    module = new_module(optimizer, split=split == "True")
    train(module, 0, 3)
    torch.save([module.state_dict(), module.optimizer().state_dict()], file)
    if where == "between":
        train(module, 3, 4)
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
    train(module, 3, 1 << 40)


class TestKilled:
    @pytest.mark.parametrize("where", ["between", "within"])
    @pytest.mark.parametrize(
        ("optimizer", "split"), [("sgd", True), ("adagrad", False), ("rowwise_adagrad", True)]
    )
    def test_resumed(self, optimizer: str, split: bool, where: str, tmp_path: Path) -> None:
        file = tmp_path / "checkpoint"
        run_script(
            "import sys; from tests.fusedoptim.nn.test_embedding_bag_faults import *; "
            "killed_training(*sys.argv[1:])",
            *(str(file), optimizer, str(split), where),
            returncode=-signal.SIGKILL,
        )
        torch.manual_seed(0)
        whole = new_module(optimizer, split=split)
        resumed = new_module(optimizer, split=split)
        train(whole, 0, 6)
        weights, state = torch.load(file)
        resumed.load_state_dict(weights)
        resumed.optimizer().load_state_dict(state)
        train(resumed, 3, 6)
        assert all(map(torch.equal, values_of(whole), values_of(resumed)))


class TestWrong:
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("joined", [False, True])
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    @pytest.mark.parametrize(
        ("table", "position", "value"),
        [(0, 0, -1), (0, 5, 50), (2, 3, 2**31 - 1), (3, -1, 300), (3, 7, -(2**31))],
    )
    def test_index(
        self,
        optimizer: str,
        joined: bool,
        dtype: torch.dtype,
        table: int,
        position: int,
        value: int,
    ) -> None:
        """The error names the table, position and value, and nothing has been written."""
        module, bags = new_module(optimizer), new_bags(ROWS, 400, dtype=dtype)
        before = values_of(module)
        bags.indices[table][position] = value
        position %= len(bags.indices[table])
        message = f"table {table} has {ROWS[table]} rows, and its index {position} is {value};"
        for raised in at_each_thread_count(lambda: _error_of(module, bags, joined)):
            assert isinstance(raised, IndexError)
            assert message in str(raised)
        assert all(map(torch.equal, before, values_of(module)))

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("joined", [False, True])
    def test_offsets_that_fall(self, optimizer: str, joined: bool) -> None:
        module, bags = new_module(optimizer), new_bags(ROWS, 400)
        before = values_of(module)
        bags.offsets[3][200] = bags.offsets[3][199] - 1
        raised = _error_of(module, bags, joined)
        assert isinstance(raised, RuntimeError)
        assert re.search(
            r"offset \d+ of offsets [03] is \d+, but the previous offset is \d+", str(raised)
        )
        assert all(map(torch.equal, before, values_of(module)))

    @pytest.mark.parametrize("has_last", [False, True])
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_offsets_whose_difference_overflows(self, dtype: torch.dtype, has_last: bool) -> None:
        bag = torch.nn.EmbeddingBag(10, 4, mode="sum", include_last_offset=has_last)
        least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        for wrong in ([most, -2], [most, least], [most, least, 6], [2, most, least, 4]):
            offsets = torch.tensor([0, *wrong, 6], dtype=dtype)
            with pytest.raises(
                RuntimeError, match=r"offset \d of offsets 0 is -?\d+, but the prev"
            ):
                MergedEmbeddingBag([bag])(torch.arange(6), offsets)

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("joined", [False, True])
    @pytest.mark.parametrize("is_compiled", [False, True])
    def test_first_offset(self, optimizer: str, joined: bool, is_compiled: bool) -> None:
        torch.compiler.reset()
        module, bags = new_module(optimizer), new_bags(ROWS)
        called = torch.compile(module, backend="aot_eager") if is_compiled else module
        before, given = values_of(module), bags.joined if joined else bags
        called(*given)
        starts = given[1] if joined else bags.offsets[3]
        starts[0] = 1
        message = f"offset 0 of offsets {0 if joined else 3} is 1; it has to be 0"
        with pytest.raises(RuntimeError, match=message):
            called(*given)
        assert all(map(torch.equal, before, values_of(module)))

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize(
        ("spoil", "message"),
        [
            (lambda bags: bags.indices.__setitem__(1, bags.indices[1].float()), "indices 1 are"),
            (lambda bags: bags.offsets.__setitem__(2, bags.offsets[2].short()), "offsets 2 are"),
        ],
    )
    def test_dtypes(self, optimizer: str, spoil: Callable[[Bags], None], message: str) -> None:
        module, bags = new_module(optimizer), new_bags(ROWS)
        before = values_of(module)
        spoil(bags)
        with pytest.raises(TypeError, match=message):
            module(*bags)
        assert all(map(torch.equal, before, values_of(module)))

    @pytest.mark.parametrize("what", ["indices", "offsets"])
    def test_changed_before_the_backward_pass(self, what: str) -> None:
        """Changed indices or offsets raise, as only the original ones were checked."""
        module, bags = new_module("sgd"), new_bags(ROWS)
        before = values_of(module)
        outputs = module(*bags)
        getattr(bags, what)[3].add_(1000)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.backward([y.sum() for y in outputs])
        assert all(map(torch.equal, before, values_of(module)))


def _error_of(module: Any, bags: Bags, joined: bool) -> Exception | None:
    try:
        module(*(bags.joined if joined else bags))
    except (IndexError, RuntimeError) as error:
        return error
    return None


class TestTaken:
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("dtypes", [("int32", "int64"), ("int64", "int32"), ("mixed", "int64")])
    def test_dtypes_of_indices(self, optimizer: str, dtypes: tuple[str, str]) -> None:
        """The dtypes of tables' indices, and of indices and offsets, may differ."""
        first, bags = new_module(optimizer), new_bags(ROWS)
        other = copy.deepcopy(first)
        mixed = ["int32", "int64", "int64", "int32"]
        of_indices, of_offsets = (mixed if d == "mixed" else [d] * len(ROWS) for d in dtypes)
        given = [
            [x.to(getattr(torch, dtype)) for x, dtype in zip(tensors, names)]
            for tensors, names in ((bags.indices, of_indices), (bags.offsets, of_offsets))
        ]
        for module, (indices, offsets) in ((first, bags), (other, given)):
            torch.autograd.backward([y.square().sum() for y in module(indices, offsets)])
        assert all(map(torch.equal, values_of(first), values_of(other)))

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_tables_without_rows_or_indices(self, optimizer: str) -> None:
        rows = (0, 5, 0, 7)
        module = new_module(optimizer, rows)
        before = [bag.weight.clone() for bag in module]
        none = torch.zeros(0, dtype=torch.int64)
        indices = [none, none, none, torch.tensor([6, 6])]
        offsets = [torch.zeros(3, dtype=torch.int64)] * 3 + [torch.tensor([0, 0, 2])]
        outputs = module(indices, offsets)
        assert not any(y.any() for y in outputs[:3])
        torch.autograd.backward([y.sum() for y in outputs])
        after = [bag.weight for bag in module]
        assert all(map(torch.equal, before[:3], after[:3]))
        assert torch.equal(before[3][:6], after[3][:6])
        assert (before[3][6] > after[3][6]).all()
        with pytest.raises(IndexError, match="table 0 has 0 rows, and its index 0 is 0"):
            module([torch.tensor([0]), *indices[1:]], [torch.tensor([0, 0, 1]), *offsets[1:]])

    def test_a_table_twice(self) -> None:
        """Without an optimizer, the table's gradient is the sum."""
        table, bags = torch.randn(50, WIDTH, requires_grad=True), new_bags((50, 50, 50))
        outputs = embedding_bags([table] * 3, *bags, include_last_offset=True)
        torch.autograd.backward([y.sum() for y in outputs])
        counts = torch.bincount(torch.cat(bags.indices), minlength=50)
        assert table.grad is not None
        assert torch.equal(table.grad, counts[:, None].expand(-1, WIDTH).to(table.dtype))

    @pytest.mark.parametrize("overlap", ["the same", "a view", "a part"])
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_shared_tables_are_refused(self, optimizer: str, overlap: str) -> None:
        memory = torch.randn(60, WIDTH)
        second = {
            "the same": memory[:40],
            "a view": memory[:40].view(40, WIDTH),
            "a part": memory[39:],
        }
        bags = [
            torch.nn.EmbeddingBag.from_pretrained(table, freeze=False, mode="sum")
            for table in (memory[:40], torch.randn(5, WIDTH), second[overlap])
        ]
        with pytest.raises(ValueError, match="table 2 shares memory with an earlier one"):
            MergedEmbeddingBag(bags, optimizer)

    def test_neighbours_in_memory(self) -> None:
        memory = torch.randn(60, WIDTH)
        before = memory.clone()
        bags = [
            torch.nn.EmbeddingBag.from_pretrained(
                table, freeze=False, mode="sum", include_last_offset=True
            )
            for table in (memory[:40], memory[40:])
        ]
        module = MergedEmbeddingBag(bags, "sgd", lr=1.0)
        rows = torch.tensor([39]), torch.tensor([0])
        outputs = module(list(rows), [torch.tensor([0, 1])] * 2)
        torch.autograd.backward([y.sum() for y in outputs])
        before[39:41] -= 1
        assert torch.equal(memory, before)

    @pytest.mark.parametrize("optimizer", [None, "sgd"])
    def test_more_than_two_to_the_31_elements(self, optimizer: str | None) -> None:
        """The table has 4 GiB of addresses, but Linux has pages for the touched rows alone."""
        width, rows = 64, (1 << 25) + 5
        table = torch.empty(rows, width, dtype=torch.bfloat16)
        indices = torch.tensor([rows - 1, 0, 1 << 25, (1 << 25) - 1, rows - 1])
        values = torch.randint(-8, 8, (rows_of := len(indices), width)).bfloat16()
        values[-1] = values[0]
        table[indices] = values
        bag = torch.nn.EmbeddingBag.from_pretrained(
            table, freeze=False, mode="sum", sparse=optimizer is None
        )
        module = MergedEmbeddingBag([bag], optimizer, **({"lr": 1.0} if optimizer else {}))
        (y,) = module([indices], [torch.arange(rows_of)])
        assert torch.equal(y, values)
        y.sum().backward()
        wanted = values.clone()
        if optimizer is None:
            torch.optim.SGD(module.parameters(), lr=1.0).step()
        wanted -= torch.tensor([2, 1, 1, 1, 2])[:, None]
        assert torch.equal(bag.weight.detach()[indices], wanted)
        with pytest.raises(IndexError, match=f"has {rows} rows, and its index 1 is {rows}"):
            module([torch.tensor([0, rows])], [torch.tensor([0])])
