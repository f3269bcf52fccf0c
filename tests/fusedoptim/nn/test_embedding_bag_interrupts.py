"""A KeyboardInterrupt at each place where CPython looks for signals, in merged embedding bags."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedoptim
from fusedoptim.nn import MergedEmbeddingBag
from tests.fusedoptim.nn.merged_bags import OPTIMIZERS, new_batches, new_module, train
from tests.interrupts import InterruptAt, polls_of


def new_tables() -> list[torch.nn.EmbeddingBag]:
    return [torch.nn.EmbeddingBag(rows, 3, mode="sum") for rows in (4, 1)]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_constructor_changes_tables_last(optimizer: str, split: bool) -> None:
    """So an interrupt leaves them as they were."""
    originals = new_tables()

    def construct(tables: list[torch.nn.EmbeddingBag]) -> object:
        return MergedEmbeddingBag(tables, optimizer, lr=0.1, split=split)

    construct(copy.deepcopy(originals))  # fills caches
    tables = copy.deepcopy(originals)
    places = polls_of(lambda: construct(tables), within=fusedoptim, since="_update_by")
    assert places
    for place in places:
        tables = copy.deepcopy(originals)
        with InterruptAt(place, "polls", within=fusedoptim, since="_update_by") as interrupt:
            construct(tables)
        assert interrupt.has_raised
        for table, original in zip(tables, originals):
            assert table.weight.dtype == torch.float32
            assert torch.equal(table.weight, original.weight)
            assert table.weight.requires_grad
            assert not table._forward_pre_hooks


def everything(module: Any) -> list[Tensor]:
    """The exact tables, and what a checkpoint has beside them."""
    optimizer = module.optimizer()
    states = optimizer.state_dict()["state"].values()
    return [*optimizer.master_params(), *(state[k] for state in states for k in sorted(state))]


def is_same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_checkpoint_of_split_tables_is_loaded_or_not(optimizer: str, steps_before: int) -> None:
    """The next update agrees with the state on which of the two is in force."""
    first = new_module(optimizer, lr=0.1, split=True)
    source, batches = copy.deepcopy(first), new_batches(first)
    train(source, batches[:2])
    tables, checkpoint = source.state_dict(), source.optimizer().state_dict()
    train(first, batches[2 : 2 + steps_before])

    def new(loads: bool) -> Any:
        module = copy.deepcopy(first)
        module.load_state_dict(tables)
        if loads:
            module.optimizer().load_state_dict(checkpoint)
        return module

    expected = []
    for loads in (False, True):
        module = new(loads)
        train(module, batches[3:])
        expected.append(everything(module))
    outcomes = set()
    module = new(loads=False)
    load = module.optimizer().load_state_dict
    places = polls_of(lambda: load(checkpoint), within=fusedoptim, since="load_state_dict")
    for place in places[:-60:19] + places[-60:]:  # what comes first are checks
        module = new(loads=False)
        load = module.optimizer().load_state_dict
        with InterruptAt(place, "polls", within=fusedoptim, since="load_state_dict") as interrupt:
            load(checkpoint)
        assert interrupt.has_raised
        train(module, batches[3:])
        result = everything(module)
        (which,) = [i for i, tensors in enumerate(expected) if is_same(result, tensors)]
        outcomes.add(which)
    assert outcomes == {0, 1}
