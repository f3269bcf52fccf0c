"""MergedEmbeddingBag's gradients, and the updates of its tables in the backward pass."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import BaseTorchFunctionMode

from fusedoptim.nn import MergedEmbeddingBag
from tests.fusedoptim.bag_cases import ROWS, WIDTHS, expected, new_bags
from tests.fusedoptim.helpers import assert_within
from tests.fusedoptim.nn.merged_bags import (
    LR,
    OPTIMIZERS,
    new_batches,
    new_module,
    train,
    weights_of,
)
from tests.optimizer_cases import FLOATS
from tests.references import adagrad, sgd
from tests.running import at_each_thread_count
from tests.tolerances import ARITHMETIC, Bounded, bag_errors

DECAY, EPS = 0.01, 1e-3


class _Reference:
    """A table in float64 whose rows take steps, with bounds on how far a kernel's may be off."""

    def __init__(self, weight: Tensor, optimizer: str, options: dict[str, float]) -> None:
        self.dtype = torch.float32 if weight.dtype == torch.float32 else weight.dtype
        arithmetic = ARITHMETIC[weight.dtype]
        self.theta = Bounded(weight.double().clone(), 0.0, arithmetic)
        self.optimizer, self.options = optimizer, options
        self.sum = Bounded(torch.zeros_like(self.theta.value), 0.0, arithmetic)

    def step(
        self,
        indices: Tensor,
        offsets: Tensor,
        mode: str,
        samples: Tensor | None,
        padding: int | None,
        grad: Tensor,
    ) -> None:
        factors = None if samples is None else samples.double()
        grads = []
        for of_bags in (grad.double(), grad.double().abs()):
            leaf = torch.zeros_like(self.theta.value).requires_grad_()
            y = expected(leaf, indices, offsets, mode, factors, padding)
            grads += torch.autograd.grad(y, leaf, of_bags)
        g = Bounded(
            grads[0],
            bag_errors(grads[1], len(indices), self.theta.arithmetic),
            self.theta.arithmetic,
        )
        state: Any = {"sum": self.sum}
        algorithm: Any = sgd.step if self.optimizer == "sgd" else adagrad.step
        theta = algorithm(self.theta, g, state, 1, **self.options)
        touched = torch.zeros(len(grad := grads[0]), 1, dtype=torch.bool)
        touched[indices.long()] = True
        if padding is not None:
            touched[padding] = False
        self.theta = _where(touched, theta.stored(self.dtype), self.theta)
        self.sum = _where(touched, state["sum"], self.sum)


def _where(condition: Tensor, x: Bounded, y: Bounded) -> Bounded:
    value = torch.where(condition, x.value, y.value)
    return Bounded(value, torch.where(condition, x.error, y.error), y.arithmetic)


class TestUpdates:
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
    @pytest.mark.parametrize("decay", [0.0, DECAY])
    @pytest.mark.parametrize(
        ("is_weighted", "padding"), [(False, None), (False, 0), (True, None), (True, -1)]
    )
    def test_four_steps(
        self,
        optimizer: str,
        dtype: torch.dtype,
        decay: float,
        is_weighted: bool,
        padding: int | None,
    ) -> None:
        options = {"lr": LR, "weight_decay": decay}
        if optimizer == "adagrad":
            options["eps"] = EPS
        modes = ("sum",) if is_weighted else ("sum", "sum", "mean")
        module = new_module(optimizer, dtype=dtype, modes=modes, padding=padding, **options)
        references = [_Reference(w, optimizer, options) for w in weights_of(module)]
        for bags, grads in new_batches(module):
            grads = [grad.to(dtype) for grad in grads]
            samples = [torch.rand(len(i)).to(dtype) for i in bags.indices] if is_weighted else None
            torch.autograd.backward(module(*bags, samples), grads)
            for t, reference in enumerate(references):
                own = None if samples is None else samples[t]
                args = bags.indices[t], bags.offsets[t], module[t].mode
                reference.step(*args, own, padding, grads[t])
        for weight, reference in zip(weights_of(module), references):
            assert_within(weight, reference.theta.value, reference.theta.error, "weight")

    @pytest.mark.parametrize(
        ("width", "is_weighted", "padding"),
        [*((width, False, None) for width in WIDTHS), (20, True, 0), (64, False, -1)],
    )
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_widths(
        self, optimizer: str, width: int, is_weighted: bool, padding: int | None
    ) -> None:
        """Updates equal those of another implementation, by torch's operations in float64."""
        options = {} if optimizer == "sgd" else {"eps": EPS}
        module = new_module(
            *(optimizer, width, torch.float64),
            padding=padding,
            lr=LR,
            weight_decay=DECAY,
            **options,
        )
        weights = [w.clone() for w in weights_of(module)]
        sums: list[Any] = [0.0] * len(weights)
        for bags, grads in new_batches(module):
            samples = [torch.rand(len(i)).double() for i in bags.indices] if is_weighted else None
            outputs = module(*bags, samples)
            torch.autograd.backward(outputs, [g.double() for g in grads])
            for t, weight in enumerate(weights):
                leaf = torch.zeros_like(weight).requires_grad_()
                own = None if samples is None else samples[t]
                y = expected(leaf, bags.indices[t], bags.offsets[t], "sum", own, padding)
                (g,) = torch.autograd.grad(y, leaf, grads[t].double())
                touched = torch.zeros(len(weight), 1, dtype=torch.float64)
                touched[bags.indices[t]] = 1
                if padding is not None:
                    touched[padding] = 0
                g = (g + DECAY * weight) * touched
                if optimizer != "sgd":
                    squares = g * g
                    sums[t] = sums[t] + (
                        squares if optimizer == "adagrad" else squares.mean(1, keepdim=True)
                    )
                    g = g / (sums[t].sqrt() + EPS)
                weight -= LR * g
        for weight, wanted in zip(weights_of(module), weights):
            torch.testing.assert_close(weight, wanted, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_split_is_exact(self, optimizer: str) -> None:
        whole = new_module(optimizer, lr=LR)
        halves = new_module(optimizer, lr=LR, split=True)
        exact: Any = halves.optimizer()
        for bag, master in zip(whole, exact.master_params()):
            bag.weight.data = master
        batches = new_batches(whole)
        train(halves, batches)
        train(whole, [(bags, [g.bfloat16().float() for g in grads]) for bags, grads in batches])
        assert halves[0].weight.dtype == torch.bfloat16
        for mine, weight in zip(exact.master_params(), weights_of(whole)):
            assert torch.equal(mine, weight)

    @pytest.mark.parametrize(
        ("optimizer", "is_compiled"), [*((name, False) for name in OPTIMIZERS), ("adagrad", True)]
    )
    def test_split_tables_with_other_values(self, optimizer: str, is_compiled: bool) -> None:
        """Lower halves do not stay with values that are loaded before the first update."""
        torch.compiler.reset()
        whole = new_module(optimizer, lr=LR)
        halves = new_module(optimizer, lr=LR, split=True)
        called = torch.compile(halves, backend="aot_eager") if is_compiled else halves
        for bag in whole:
            bag.weight.data = bag.weight.data.bfloat16().float()
        exact: Any = halves.optimizer()
        bags, grads = new_batches(whole, 1)[0]
        grads = [g.bfloat16() for g in grads]
        called(*bags)  # without an update
        halves.load_state_dict(whole.state_dict())
        torch.autograd.backward(called(*bags), grads)
        torch.autograd.backward(whole(*bags), [g.float() for g in grads])
        assert all(map(torch.equal, exact.master_params(), weights_of(whole)))

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("kind", ["float32", "bfloat16", "split"])
    def test_forms_and_threads_give_the_same_bits(self, optimizer: str, kind: str) -> None:
        """Tables of 16 bits are weighted and padded, too."""
        bags, is_whole, split = (
            new_bags(ROWS, bags=3000, most=20),
            kind == "float32",
            kind == "split",
        )
        dtype, padding = (torch.float32, None) if is_whole else (torch.bfloat16, 0)
        of = torch.float32 if split else dtype
        first = new_module(optimizer, 64, of, padding=padding, split=split)
        grads = [torch.randn(3000, bag.embedding_dim).to(dtype) for bag in first]
        samples = None if is_whole else [torch.rand(len(i)).to(dtype) for i in bags.indices]

        def updated(joined: bool = False) -> list[Tensor]:
            module = copy.deepcopy(first)
            if joined:
                whole = None if samples is None else torch.cat(samples)
                module(*bags.joined, whole).backward(torch.cat(grads, 1))
            else:
                torch.autograd.backward(module(*bags, samples), grads)
            exact: Any = module.optimizer()
            return list(exact.master_params())

        wanted = updated(joined=True)
        for weights in at_each_thread_count(updated):
            assert all(map(torch.equal, weights, wanted))

    @pytest.mark.parametrize("is_compiled", [False, True])
    def test_sample_weights_have_gradients_of_the_weights_before(self, is_compiled: bool) -> None:
        torch.compiler.reset()
        module, bags = new_module("sgd", lr=LR), new_bags(ROWS)
        called = torch.compile(module, backend="aot_eager", fullgraph=True)
        before = [w.clone().requires_grad_() for w in weights_of(module)]
        samples = [torch.rand(len(i), requires_grad=True) for i in bags.indices]
        own = [s.detach().clone().requires_grad_() for s in samples]
        sum(y.sum() for y in (called if is_compiled else module)(*bags, own)).backward()
        for t, weight in enumerate(before):
            y = expected(weight, bags.indices[t], bags.offsets[t], "sum", samples[t])
            y.sum().backward()
            torch.testing.assert_close(own[t].grad, samples[t].grad)
            assert weight.grad is not None
            torch.testing.assert_close(module[t].weight, weight.detach() - LR * weight.grad)

    def test_bags_without_gradients_stay(self) -> None:
        module, bags = new_module("adagrad"), new_bags(ROWS)
        before = [w.clone() for w in weights_of(module)]
        module(*bags)[0].sum().backward()
        same = [torch.equal(x, y) for x, y in zip(before, weights_of(module))]
        assert same == [False, True, True, True]

    def test_no_gradients(self) -> None:
        module, bags = new_module("sgd"), new_bags(ROWS)
        before = [w.clone() for w in weights_of(module)]
        with torch.no_grad():
            assert not module(*bags)[0].requires_grad
        assert all(map(torch.equal, before, weights_of(module)))

    @pytest.mark.parametrize("optimizer", [None, "adagrad"])
    def test_frozen(self, optimizer: str | None) -> None:
        module, bags = new_module(optimizer), new_bags(ROWS)
        module.after = torch.nn.Linear(2, 2)
        before = [w.clone() for w in weights_of(module)]
        assert not any(p.requires_grad for p in module.requires_grad_(False).parameters())
        samples = [torch.rand(len(i), requires_grad=True) for i in bags.indices]
        assert not module(*bags)[0].requires_grad
        sum(y.sum() for y in copy.deepcopy(module)(*bags, samples)).backward()
        sum(y.sum() for y in module(*bags, samples)).backward()
        assert samples[0].grad is not None
        assert all(map(torch.equal, before, weights_of(module)))
        assert module.requires_grad_().after.weight.requires_grad
        sum(y.sum() for y in module(*bags)).backward()
        assert torch.equal(before[0], weights_of(module)[0]) == (optimizer is None)

    def test_a_bag_called_by_itself_without_an_optimizer(self) -> None:
        module = new_module(None)
        module[0](torch.tensor([1, 2]), torch.tensor([0, 2])).sum().backward()
        assert module[0].weight.grad is not None
        assert module[0].weight.grad[[1, 2]].eq(1).all()

    def test_a_table_twice_without_an_optimizer(self) -> None:
        """The table's gradient is the sum, as in torch's list of bags."""
        bag = torch.nn.EmbeddingBag(50, 4, mode="sum", include_last_offset=True)
        bags = [
            bag,
            bag,
            torch.nn.EmbeddingBag.from_pretrained(
                bag.weight, freeze=False, mode="sum", include_last_offset=True
            ),
        ]
        given = new_bags((50, 50, 50))
        torch.autograd.backward([y.sum() for y in MergedEmbeddingBag(bags)(*given)])
        own = bag.weight.grad
        bag.weight.grad = None
        torch.autograd.backward([b(*args).sum() for b, *args in zip(bags, *given)])
        assert own is not None
        assert bag.weight.grad is not None
        assert torch.equal(own, bag.weight.grad)

    @pytest.mark.parametrize("is_compiled", [False, True])
    def test_autograd_sees_the_update(self, is_compiled: bool) -> None:
        """A table that was saved for another gradient is known to have changed."""
        torch.compiler.reset()
        module = new_module("sgd")
        ((bags, grads),) = new_batches(module, 1)
        called = torch.compile(module, backend="aot_eager") if is_compiled else module
        saved = torch.randn(20, requires_grad=True) * module[0].weight
        torch.autograd.backward(called(*bags), grads)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.sum().backward()

    def test_two_dimensions(self) -> None:
        module = MergedEmbeddingBag([(10, 4), (20, 8)])
        indices = [torch.randint(10, (5, 3)) for _ in range(2)]
        for t, y in enumerate(module(indices)):
            assert torch.equal(y, module[t](indices[t]))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_plain_calls_have_the_bits_of_the_operators(optimizer: str) -> None:
    """Under a mode of torch functions, calls go through torch's dispatcher."""
    plain = new_module(optimizer, lr=LR)
    dispatched, batches = copy.deepcopy(plain), new_batches(plain)
    train(plain, batches)
    with BaseTorchFunctionMode():
        train(dispatched, batches)
    assert all(map(torch.equal, weights_of(plain), weights_of(dispatched)))


def test_modules_of_one_shape_take_turns() -> None:
    """The modules use the same launches, whose arguments differ for each."""
    summing = new_module("sgd", lr=LR)
    means = MergedEmbeddingBag.from_embedding_bags(
        [
            torch.nn.EmbeddingBag.from_pretrained(
                bag.weight.clone(), freeze=False, mode="mean", include_last_offset=True
            )
            for bag in summing
        ],
        optimizer="sgd",
        lr=LR,
    )
    modules = [summing, means]
    alone, batches = copy.deepcopy(modules), new_batches(summing)
    for module in alone:
        train(module, batches)
    for batch in batches:
        for module in modules:
            train(module, [batch])
    for module, other in zip(modules, alone):
        assert all(map(torch.equal, weights_of(module), weights_of(other)))


@pytest.mark.parametrize("joined", [False, True])
def test_batches_of_other_numbers_of_indices(joined: bool) -> None:
    """Equally many bags have few or many indices, in one part of a table and in several."""
    bags, width, lr = 16, 128, 1.0
    tables = [torch.nn.EmbeddingBag(rows, width, mode="sum") for rows in ROWS]
    for table in tables:
        table.weight.data = torch.randint(-8, 8, table.weight.shape).float()  # all sums are exact
    merged = MergedEmbeddingBag.from_embedding_bags(copy.deepcopy(tables), optimizer="sgd", lr=lr)
    for most in (1, 40, 300, 41, 300, 3):
        lengths = [torch.randint(most + 1, (bags,)) for _ in ROWS]
        indices = [torch.randint(rows, (int(own.sum()),)) for rows, own in zip(ROWS, lengths)]
        offsets = [own.cumsum(0) - own for own in lengths]
        grads = [torch.randint(-1, 2, (bags, width)).float() for _ in ROWS]
        if joined:
            own = torch.cat(lengths)
            result = merged(torch.cat(indices), own.cumsum(0) - own)
            outputs = list(result.split(width, dim=1))
        else:
            outputs = merged(indices, offsets)
        torch.autograd.backward(outputs, grads)
        for t, table in enumerate(tables):
            wanted = table(indices[t], offsets[t])
            (grad,) = torch.autograd.grad(wanted, table.weight, grads[t])
            table.weight.data -= lr * grad
            assert torch.equal(outputs[t], wanted)
            assert torch.equal(merged[t].weight, table.weight)


def test_backward_twice_updates_twice() -> None:
    module = new_module("sgd", lr=LR)
    other, ((bags, grads),) = copy.deepcopy(module), new_batches(module, 1)
    outputs = module(*bags)
    torch.autograd.backward(outputs, grads, retain_graph=True)
    torch.autograd.backward(outputs, grads)
    train(other, [(bags, grads)] * 2)
    assert all(map(torch.equal, weights_of(module), weights_of(other)))


def test_indices_that_change_before_the_backward_pass() -> None:
    module = new_module("sgd", lr=LR)
    ((bags, grads),) = new_batches(module, 1)
    before, outputs = copy.deepcopy(weights_of(module)), module(*bags)
    bags[0][0].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(outputs, grads)
    assert all(map(torch.equal, weights_of(module), before))


def test_gradients_without_memory() -> None:
    """The gradients are zeros of autograd's that no kernel could read."""
    module = new_module("sgd", lr=LR)
    ((bags, _),) = new_batches(module, 1)
    before, outputs = copy.deepcopy(weights_of(module)), module(*bags)
    torch.autograd.backward(outputs, [torch._efficientzerotensor(y.shape) for y in outputs])
    assert all(map(torch.equal, weights_of(module), before))
