"""Merged embedding bags whose tables, state, options or saved tensors changed since they were made.

An update writes through addresses, so nothing may be written where something no longer fits.
"""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fusedoptim.nn import MergedEmbeddingBag
from tests.fusedoptim.bag_cases import ROWS, new_bags
from tests.fusedoptim.nn.merged_bags import (
    LR,
    OPTIMIZERS,
    new_batches,
    new_module,
    train,
    weights_of,
)


def _grow(module: MergedEmbeddingBag) -> None:
    weight = module[0].weight
    weight.data = torch.cat([weight.data, torch.zeros(1000, weight.shape[1])])


def _shrink(module: MergedEmbeddingBag) -> None:
    module[0].weight.data = module[0].weight.data[:10].clone()


def _transpose(module: MergedEmbeddingBag) -> None:
    module[0].weight.data = module[0].weight.data.t().contiguous().t()


def _check_unchanged(
    module: MergedEmbeddingBag,
    call: Callable[[], Any],
    message: str,
    error: Any = (RuntimeError, ValueError),
) -> None:
    optimizer = module.optimizer()
    before = [w.clone() for w in weights_of(module)], copy.deepcopy(optimizer.state_dict())
    with pytest.raises(error, match=re.escape(message)):
        call()
    assert all(map(torch.equal, before[0], weights_of(module)))
    assert repr(optimizer.state_dict()) == repr(before[1])


class TestTables:
    @pytest.mark.parametrize(
        ("optimizer", "split", "change", "message"),
        [
            ("adagrad", False, torch.nn.Module.double, "the 'sum' of table 0 is torch.float32"),
            ("rowwise_adagrad", False, torch.nn.Module.double, "the table now needs torch.float64"),
            ("adagrad", False, _grow, "the table now needs torch.float32 of shape (1050, 20)"),
            ("rowwise_adagrad", False, _grow, "the table now needs torch.float32 of shape (1050,)"),
            ("sgd", False, _transpose, "table 0 has strides (1, 50); the update takes contiguous"),
            ("adagrad", False, _transpose, "table 0 has strides (1, 50); the update takes"),
            ("sgd", True, torch.nn.Module.float, "its upper half has become torch.float32"),
            ("adagrad", True, torch.nn.Module.double, "its upper half has become torch.float64"),
        ],
    )
    @pytest.mark.parametrize("is_dispatched", [False, True])
    def test_changed(
        self, optimizer: str, split: bool, change: Any, message: str, is_dispatched: bool
    ) -> None:
        module = new_module(optimizer, split=split)
        train(module, new_batches(module, 1))
        change(module)

        def step() -> None:
            with torch.device("cpu") if is_dispatched else torch.enable_grad():
                train(module, new_batches(module, 1))

        _check_unchanged(module, step, message)
        with torch.no_grad():
            module(*new_bags(ROWS))

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("change", [_shrink, torch.nn.Module.double])
    @pytest.mark.parametrize("used", [1, len(ROWS)])
    def test_changed_before_the_backward_pass(self, optimizer: str, change: Any, used: int) -> None:
        module, bags = new_module(optimizer), new_bags(ROWS)
        loss = torch.stack([y.sum() for y in module(*bags)[:used]]).sum()
        change(module)
        _check_unchanged(module, loss.backward, "a table's shape, dtype or device changed")

    def test_sgd_in_another_dtype(self) -> None:
        module = new_module("sgd", lr=LR)
        module.double()
        exact = copy.deepcopy(module)
        indices, offsets = [torch.tensor([0])] * 4, [torch.tensor([0, 1])] * 4
        sum(y.sum() for y in module(indices, offsets)).backward()
        for mine, before in zip(weights_of(module), weights_of(exact)):
            before[0] -= LR
            assert torch.equal(mine, before)

    @pytest.mark.parametrize("optimizer", ["adagrad", "rowwise_adagrad"])
    def test_state_is_converted_by_loading_it(self, optimizer: str) -> None:
        module = new_module(optimizer, lr=LR)
        train(module, new_batches(module, 1))
        sums = [state["sum"].clone() for state in module.optimizer().state.values()]
        module.double()
        module.optimizer().load_state_dict(module.optimizer().state_dict())
        states = module.optimizer().state.values()
        assert all(torch.equal(s["sum"], old.double()) for s, old in zip(states, sums))
        train(module, new_batches(module, 1))

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_replaced(self, optimizer: str) -> None:
        """Another Parameter in a table's place is not the one that the optimizer updates."""
        message = "the weight of table 0 is not the one that the optimizer updates"
        module, ((bags, _),) = new_module(optimizer), new_batches(new_module(optimizer), 1)
        others = {name: torch.randn_like(p) for name, p in module.named_parameters()}

        def functional() -> None:
            torch.func.functional_call(module, others, tuple(bags))

        _check_unchanged(module, functional, message)
        module.load_state_dict(others, assign=True)
        _check_unchanged(module, lambda: module(*bags), message)
        with torch.no_grad():
            module(*bags)
        with torch.device("meta"):
            empty = MergedEmbeddingBag([(4, 2)], optimizer)
        empty.to_empty(device="cpu")
        with pytest.raises(RuntimeError, match=message):
            empty([torch.tensor([0])], [torch.tensor([0])])


class TestOptions:
    @pytest.mark.parametrize("optimizer", [None, "sgd"])
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("mode", "max"),
            ("padding_idx", 0),
            ("max_norm", 1.0),
            ("scale_grad_by_freq", True),
            ("include_last_offset", False),
            ("sparse", True),
        ],
    )
    def test_of_a_bag(self, optimizer: str | None, name: str, value: Any) -> None:
        module, bags = new_module(optimizer), new_bags(ROWS)
        before = getattr(module[1], name)
        setattr(module[1], name, value)
        message = re.escape(f"table 1 has {name}={value!r}, and had {before!r} when it was merged")
        with pytest.raises(RuntimeError, match=message):
            module(*bags)
        setattr(module[1], name, before)
        module(*bags)

    @pytest.mark.parametrize(
        ("optimizer", "name", "value"),
        [("sgd", "momentum", 0.9), ("sgd", "maximize", True), ("adagrad", "lr_decay", 0.1)],
    )
    def test_that_the_update_lacks(self, optimizer: str, name: str, value: Any) -> None:
        module = new_module(optimizer)
        ((bags, grads),) = new_batches(module, 1)
        outputs = module(*bags)
        module.optimizer().param_groups[0][name] = value
        message = f"param_groups have {name}={value}, which the update in the backward pass lacks"
        _check_unchanged(module, lambda: torch.autograd.backward(outputs, grads), message)

    @pytest.mark.parametrize(
        ("optimizer", "name"), [("sgd", "lr"), ("adagrad", "eps"), ("rowwise_adagrad", "lr")]
    )
    @pytest.mark.parametrize(
        ("value", "error"),
        [
            (float("nan"), ValueError),
            (torch.tensor(torch.nan), ValueError),
            ("x", TypeError),
            (None, TypeError),
            (1e300, OverflowError),
        ],
    )
    def test_that_are_no_numbers(
        self, optimizer: str, name: str, value: Any, error: type[Exception]
    ) -> None:
        module = new_module(optimizer)
        ((bags, grads),) = new_batches(module, 1)
        outputs = module(*bags)
        module.optimizer().param_groups[0][name] = value
        message = f"{name} is {value}; set it to a number of at most 3.403e+38"
        _check_unchanged(module, lambda: torch.autograd.backward(outputs, grads), message, error)

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_cycles(self, optimizer: str) -> None:
        """Schedulers that change momentum refuse to be made, unless they are told not to."""
        of_new = new_module(optimizer, lr=LR)
        for module in (of_new, copy.deepcopy(of_new)):
            for scheduler, rates in (("OneCycleLR", (LR, 9)), ("CyclicLR", (LR, 2 * LR))):
                cycle: Any = getattr(torch.optim.lr_scheduler, scheduler)
                with pytest.raises(ValueError, match=r"must support momentum .* `cycle_momentum`"):
                    cycle(module.optimizer(), *rates)
                cycle(module.optimizer(), *rates, cycle_momentum=False)
                train(module, new_batches(module, 1))

    def test_momentum(self) -> None:
        module = new_module("sgd")
        (group,) = module.optimizer().param_groups
        assert group["momentum"] == 0  # torch's SGD, which loads the group, reads it
        group["momentum"] = 0.9
        message = "param_groups have momentum=0.9, which the update in the backward pass lacks"
        with pytest.raises(ValueError, match=message):
            train(module, new_batches(module, 1))

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_another_group(self, optimizer: str) -> None:
        module = new_module(optimizer)
        group = {"params": [torch.nn.Parameter(torch.zeros(2))]}
        call = module.optimizer().add_param_group
        _check_unchanged(module, lambda: call(group), "updates only its tables")
        train(module, new_batches(module, 1))


class TestSavedTensors:
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("pack", [Tensor.clone, Tensor.tolist])
    def test_indices_are_those_that_hooks_return(self, optimizer: str, pack: Any) -> None:
        """A buffer that gets the next batch before the backward pass is read as it was packed."""
        module = new_module(optimizer, lr=LR)
        other, ((bags, grads),) = copy.deepcopy(module), new_batches(module, 1)
        train(other, [(copy.deepcopy(bags), grads)])
        with saved_tensors_hooks(pack, torch.as_tensor):
            outputs = module(*bags)
        for indices in bags.indices:
            indices.zero_()
        torch.autograd.backward(outputs, grads)
        assert all(map(torch.equal, weights_of(module), weights_of(other)))

    @pytest.mark.parametrize("optimizer", [None, *OPTIMIZERS])
    @pytest.mark.parametrize("used", [1, len(ROWS)])
    def test_indices_that_hooks_let_change(self, optimizer: str | None, used: int) -> None:
        """The hooks switch off autograd's check that saved tensors are unchanged."""
        module, bags = new_module(optimizer), new_bags(ROWS)
        bags.indices[0][-1] = 0
        before = [w.clone() for w in weights_of(module)]
        with saved_tensors_hooks(lambda t: t, lambda t: t):
            outputs = module(*bags)
        bags.indices[0][-1] = 1 << 20
        with pytest.raises(IndexError, match="table 0 has 50 rows"):
            torch.autograd.backward([y.sum() for y in outputs[:used]])
        assert all(map(torch.equal, before, weights_of(module)))

    def test_trained_sample_weights_after_an_update(self) -> None:
        """Their gradients need the tables as they were, so an update in between is noticed."""
        module, bags = new_module("sgd"), new_bags(ROWS)
        samples = [torch.rand(len(i), requires_grad=True) for i in bags.indices]
        first, second = ([y.sum() for y in module(*bags, samples)] for _ in range(2))
        torch.autograd.backward(first)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.backward(second)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_module_that_is_gone(optimizer: str) -> None:
    module = new_module(optimizer, lr=LR)
    other, ((bags, grads),) = copy.deepcopy(module), new_batches(module, 1)
    train(other, [(bags, grads)])
    weights, outputs = [bag.weight for bag in module], module(*bags)
    del module
    gc.collect()
    torch.autograd.backward(outputs, grads)
    assert all(map(torch.equal, weights, weights_of(other)))


def test_compiled_module_that_is_gone() -> None:
    """A compiled graph has the number of the optimizer alone."""
    torch.compiler.reset()
    module = new_module("sgd")
    ((bags, grads),) = new_batches(module, 1)
    outputs = torch.compile(module, backend="aot_eager")(*bags)
    torch.compiler.reset()
    del module
    gc.collect()
    with pytest.raises(RuntimeError, match="the module was deleted before the backward pass"):
        torch.autograd.backward(outputs, grads)
