"""MergedEmbeddingBag: its updates, its optimizer, checkpoints, tracing, errors."""

from __future__ import annotations

import copy
import io
import itertools
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusedoptim import nn
from fusedoptim.nn import MergedEmbeddingBag
from tests.fusedoptim.bag_cases import ROWS, WIDTHS, Bags, expected, new_bags
from tests.fusedoptim.helpers import assert_within, each_way_to_copy, through_a_file
from tests.optimizer_cases import FLOATS
from tests.references import adagrad, sgd
from tests.running import at_each_thread_count
from tests.tolerances import ARITHMETIC, Bounded, bag_errors

OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad"]
LR, DECAY, EPS = 0.1, 0.01, 1e-3
STEPS = 4


def new_module(
    optimizer: str | None,
    width: int = 20,
    dtype: torch.dtype = torch.float32,
    modes: Sequence[str] = ("sum",),
    **options: Any,
) -> MergedEmbeddingBag:
    bags = [
        torch.nn.EmbeddingBag(
            rows,
            width + 3 * t,
            mode=modes[t % len(modes)],
            dtype=dtype,
            include_last_offset=True,
        )
        for t, rows in enumerate(ROWS)
    ]
    return MergedEmbeddingBag.from_embedding_bags(bags, optimizer=optimizer, **options)


def weights_of(module: MergedEmbeddingBag) -> list[Tensor]:
    return [bag.weight.detach() for bag in module]


def train(module: MergedEmbeddingBag, batches: Sequence[tuple[Bags, list[Tensor]]]) -> None:
    for bags, grads in batches:
        outputs = module(*bags)
        torch.autograd.backward(outputs, [g.to(y.dtype) for g, y in zip(grads, outputs)])
        module.optimizer().step()


def new_batches(module: MergedEmbeddingBag, count: int = STEPS) -> list[tuple[Bags, list[Tensor]]]:
    return [
        (new_bags(ROWS), [torch.randn(9, bag.embedding_dim) for bag in module])
        for _ in range(count)
    ]


class _Reference:
    """A table in float64, whose rows take steps with bounds on how far a kernel's may be."""

    def __init__(self, weight: Tensor, optimizer: str, options: dict[str, float]) -> None:
        self.dtype = torch.float32 if weight.dtype == torch.float32 else weight.dtype
        arithmetic = ARITHMETIC[weight.dtype]
        self.theta = Bounded(weight.double().clone(), 0.0, arithmetic)
        self.optimizer, self.options = optimizer, options
        self.sum = Bounded(torch.zeros_like(self.theta.value), 0.0, arithmetic)

    def step(self, indices: Tensor, offsets: Tensor, mode: str, grad: Tensor) -> None:
        grads = []
        for of_bags in (grad.double(), grad.double().abs()):
            leaf = torch.zeros_like(self.theta.value).requires_grad_()
            y = expected(leaf, indices, offsets, mode)
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
        self.theta = _where(touched, theta.stored(self.dtype), self.theta)
        self.sum = _where(touched, state["sum"], self.sum)


def _where(condition: Tensor, x: Bounded, y: Bounded) -> Bounded:
    value = torch.where(condition, x.value, y.value)
    return Bounded(value, torch.where(condition, x.error, y.error), y.arithmetic)


class _Sizes(TorchDispatchMode):
    """The largest number of elements that an operator returned."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.most = max([self.most, *(x.numel() for x in [result] if isinstance(x, Tensor))])
        return result


class TestUpdates:
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
    @pytest.mark.parametrize("decay", [0.0, DECAY])
    def test_four_steps(self, optimizer: str, dtype: torch.dtype, decay: float) -> None:
        options = {"lr": LR, "weight_decay": decay}
        if optimizer == "adagrad":
            options["eps"] = EPS
        module = new_module(optimizer, dtype=dtype, modes=("sum", "sum", "mean"), **options)
        references = [_Reference(w, optimizer, options) for w in weights_of(module)]
        for bags, grads in new_batches(module):
            train(module, [(bags, grads)])
            for t, reference in enumerate(references):
                grad = grads[t].to(dtype)
                reference.step(bags.indices[t], bags.offsets[t], module[t].mode, grad)
        for weight, reference in zip(weights_of(module), references):
            assert_within(weight, reference.theta.value, reference.theta.error, "weight")

    @pytest.mark.parametrize("width", WIDTHS)
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_widths(self, optimizer: str, width: int) -> None:
        """Another implementation of the same: torch's operations in float64."""
        module = (
            new_module(optimizer, width, torch.float64, lr=LR, weight_decay=DECAY, eps=EPS)
            if (optimizer != "sgd")
            else new_module(optimizer, width, torch.float64, lr=LR, weight_decay=DECAY)
        )
        weights = [w.clone() for w in weights_of(module)]
        sums: list[Any] = [0.0] * len(weights)
        for bags, grads in new_batches(module):
            outputs = module(*bags)
            torch.autograd.backward(outputs, [g.double() for g in grads])
            for t, weight in enumerate(weights):
                leaf = torch.zeros_like(weight).requires_grad_()
                y = expected(leaf, bags.indices[t], bags.offsets[t])
                (g,) = torch.autograd.grad(y, leaf, grads[t].double())
                touched = torch.zeros(len(weight), 1, dtype=torch.float64)
                touched[bags.indices[t]] = 1
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

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_forms_and_threads_give_the_same_bits(self, optimizer: str) -> None:
        bags = new_bags(ROWS, bags=3000, most=20)
        first = new_module(optimizer, 64)
        grads = [torch.randn(3000, bag.embedding_dim) for bag in first]

        def updated(joined: bool = False) -> list[Tensor]:
            module = copy.deepcopy(first)
            if joined:
                module(*bags.joined).backward(torch.cat(grads, 1))
            else:
                torch.autograd.backward(module(*bags), grads)
            return weights_of(module)

        wanted = updated(joined=True)
        for weights in at_each_thread_count(updated):
            assert all(map(torch.equal, weights, wanted))

    def test_sample_weights_have_gradients_of_the_weights_before(self) -> None:
        module, bags = new_module("sgd", lr=LR), new_bags(ROWS)
        before = [w.clone().requires_grad_() for w in weights_of(module)]
        samples = [torch.rand(len(i), requires_grad=True) for i in bags.indices]
        own = [s.detach().clone().requires_grad_() for s in samples]
        sum(y.sum() for y in module(*bags, own)).backward()
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

    def test_a_bag_called_by_itself_without_an_optimizer(self) -> None:
        module = new_module(None)
        module[0](torch.tensor([1, 2]), torch.tensor([0, 2])).sum().backward()
        assert module[0].weight.grad is not None
        assert module[0].weight.grad[[1, 2]].eq(1).all()

    def test_a_table_twice_without_an_optimizer(self) -> None:
        """As in torch's list of bags, its gradient is the sum."""
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
        """What was saved of a table for another gradient is no longer what it was."""
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


class TestOptimizer:
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("split", [False, True])
    def test_resumed_from_a_checkpoint(self, optimizer: str, split: bool) -> None:
        module = new_module(optimizer, lr=LR, split=split)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(module.optimizer(), 0.5)
        batches = new_batches(module)
        train(module, batches[:2])
        scheduler.step()
        file = io.BytesIO()
        torch.save([module.state_dict(), module.optimizer().state_dict()], file)
        file.seek(0)
        saved = torch.load(file)
        resumed = new_module(optimizer, lr=LR, split=split)
        resumed.load_state_dict(saved[0])
        resumed.optimizer().load_state_dict(saved[1])
        for one in (module, resumed):
            train(one, batches[2:])
        assert all(map(torch.equal, weights_of(module), weights_of(resumed)))

    def test_learning_rate_of_a_scheduler(self) -> None:
        module, bags = new_module("sgd", lr=LR), new_bags(ROWS)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            module.optimizer(), lambda step: float(step < 1)
        )
        train(module, [(bags, [torch.randn(9, bag.embedding_dim) for bag in module])])
        scheduler.step()
        before = [w.clone() for w in weights_of(module)]
        train(module, new_batches(module, 1))
        assert all(map(torch.equal, before, weights_of(module)))

    def test_state_is_torchs(self) -> None:
        module = new_module("adagrad", lr=LR)
        batches = new_batches(module)
        train(module, batches[:2])
        plain = [copy.deepcopy(bag).requires_grad_() for bag in module]
        theirs = torch.optim.Adagrad([bag.weight for bag in plain], lr=LR)
        theirs.load_state_dict(through_a_file(module.optimizer().state_dict()))
        back = new_module("adagrad", lr=LR)
        back.load_state_dict(module.state_dict())
        back.optimizer().load_state_dict(through_a_file(theirs.state_dict()))
        for one in (module, back):
            train(one, batches[2:])
        assert all(map(torch.equal, weights_of(module), weights_of(back)))
        assert int(theirs.state[plain[0].weight]["step"]) == 2

    @pytest.mark.parametrize("count", [3, torch.tensor(3.0)])
    def test_steps_are_counted(self, count: Any) -> None:
        optimizer = new_module("adagrad").optimizer()
        states = [optimizer.state[weight] for weight in optimizer.param_groups[0]["params"]]
        for state in states:
            state["step"] = copy.deepcopy(count)
        optimizer.step()
        assert [float(state["step"]) for state in states] == [4.0] * len(states)

    @pytest.mark.parametrize(("saver", "loader"), [*itertools.permutations(OPTIMIZERS, 2)])
    def test_checkpoint_of_another_optimizer(self, saver: str, loader: str) -> None:
        saved, optimizer = new_module(saver).optimizer(), new_module(loader).optimizer()
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(ValueError, match=r"checkpoint is one of|'sum' of table 0 has shape"):
            optimizer.load_state_dict(saved.state_dict())
        assert repr(optimizer.state_dict()) == repr(before)

    @pytest.mark.parametrize(
        ("optimizer", "theirs", "option"),
        [
            ("sgd", torch.optim.SGD, {"momentum": 0.9}),
            ("sgd", torch.optim.SGD, {"maximize": True}),
            ("adagrad", torch.optim.Adagrad, {"lr_decay": 0.1}),
        ],
    )
    def test_checkpoint_with_an_option_that_is_not_here(
        self, optimizer: str, theirs: Any, option: dict[str, Any]
    ) -> None:
        module = new_module(optimizer)
        saved = theirs([torch.nn.Parameter(w) for w in weights_of(module)], **option)
        ((name, value),) = option.items()
        with pytest.raises(ValueError, match=f"checkpoint has {name}={value}, which the update"):
            module.optimizer().load_state_dict(saved.state_dict())

    def test_state_with_strides(self) -> None:
        """As torch's is, of a table with strides: the kernels take it as contiguous."""
        module = new_module("adagrad", lr=LR)
        train(module, new_batches(module, 1))
        saved = copy.deepcopy(module.optimizer().state_dict())
        for state in saved["state"].values():
            state["sum"] = state["sum"].t().contiguous().t()
        other = copy.deepcopy(module)
        other.optimizer().load_state_dict(saved)
        batches = new_batches(module, 2)
        for one in (module, other):
            train(one, batches)
        assert all(map(torch.equal, weights_of(module), weights_of(other)))

    def test_rowwise_state_takes_no_memory_of_the_tables_size(self) -> None:
        bag = torch.nn.EmbeddingBag(100, 20, mode="sum")
        with _Sizes() as sizes:
            MergedEmbeddingBag([bag], "rowwise_adagrad")
        assert sizes.most == 100

    def test_keys_are_those_of_the_bags(self) -> None:
        bags = torch.nn.ModuleList(torch.nn.EmbeddingBag(5, 4, mode="sum") for _ in range(3))
        module = MergedEmbeddingBag.from_embedding_bags(list(bags), optimizer="sgd")
        assert list(module.state_dict()) == list(bags.state_dict())
        assert [p for p in module.parameters() if p.requires_grad] == []

    @each_way_to_copy
    def test_copies_are_updated_by_their_own(self, copied: Any) -> None:
        module = new_module("adagrad", lr=LR)
        other = copied(module)
        other.optimizer().param_groups[0]["lr"] = 0.0
        before = [w.clone() for w in weights_of(module)]
        train(other, new_batches(other, 1))
        assert all(map(torch.equal, before, weights_of(module)))
        assert all(map(torch.equal, before, weights_of(other)))
        train(module, new_batches(module, 1))
        assert not torch.equal(before[0], module[0].weight)

    @pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # inductor uses it
    @pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
    @pytest.mark.parametrize("optimizer", [None, *OPTIMIZERS])
    def test_compiled(self, optimizer: str | None, backend: str) -> None:
        torch.compiler.reset()
        module = new_module(optimizer)
        other = copy.deepcopy(module)
        compiled = torch.compile(other, backend=backend, fullgraph=True)
        bags = new_bags(ROWS)
        for step in range(3):
            grads = [torch.randn(9, bag.embedding_dim) for bag in module]
            for one, of in ((module, module), (compiled, other)):
                torch.autograd.backward(one(*bags), grads)
                if optimizer is not None:
                    of.optimizer().param_groups[0]["lr"] = 0.1 / (step + 1)
        for one, two in zip(module, other):
            assert torch.equal(one.weight, two.weight)
            if optimizer is None:
                assert torch.equal(one.weight.grad, two.weight.grad)


class TestRefused:
    BAG = torch.nn.EmbeddingBag(4, 2, mode="sum")

    @pytest.mark.parametrize(
        ("tables", "options", "error", "message"),
        [
            ([], {}, ValueError, "tables=[] has none"),
            ([3], {}, TypeError, "table 0 is a int"),
            (BAG, {}, TypeError, "tables is one EmbeddingBag; pass a list"),
            ([(4, 2)], {"optimizer": "sgd", "eps": 0.1}, ValueError,
             "eps is for optimizer='adagrad' and 'rowwise_adagrad', and 'sgd' takes lr, weight"),
            ([(4, 2)], {"optimizer": "sgd", "split": "yes"}, TypeError, "split is 'yes'; pass"),
            ([(4, 2)], {"optimizer": "adam"}, ValueError, "optimizer='adam' is none of"),
            ([(4, 2)], {"lr": 0.1}, ValueError, "lr is for an optimizer"),
            ([(4, 2)], {"split": True}, ValueError, "split is for an optimizer"),
            ([(4, 2)], {"optimizer": "sgd", "lr": -1.0}, ValueError, "Invalid learning rate"),
            ([torch.nn.EmbeddingBag(4, 2, mode="max")], {}, ValueError, "table 0 has mode='max'"),
            ([torch.nn.EmbeddingBag(4, 2, max_norm=1.0)], {}, ValueError, "max_norm=1.0"),
            ([(4, 2), torch.nn.EmbeddingBag(4, 2, sparse=True)], {}, ValueError, "sparse=True"),
            ([(4, 2), torch.nn.EmbeddingBag(4, 2, dtype=torch.float64)], {}, TypeError,
             "table 1 has dtype torch.float64"),
            ([BAG, BAG], {"optimizer": "sgd"}, ValueError, "table 1 shares memory"),
        ],
    )  # fmt: skip
    def test_wrong(self, tables: Any, options: Any, error: Any, message: str) -> None:
        with pytest.raises(error, match=re.escape(message)):
            MergedEmbeddingBag(tables, **options)

    @pytest.mark.parametrize("optimizer", [None, *OPTIMIZERS])
    def test_wrong_index_changes_nothing(self, optimizer: str | None) -> None:
        module, bags = new_module(optimizer), new_bags(ROWS)
        bags.indices[-1][-1] = ROWS[-1]
        before = [w.clone() for w in weights_of(module)]
        with pytest.raises(IndexError, match=f"table 3 has {ROWS[-1]} rows"):
            module(*bags)
        assert all(map(torch.equal, before, weights_of(module)))

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @each_way_to_copy
    def test_a_bag_called_by_itself(self, optimizer: str, copied: Any) -> None:
        """It would learn nothing where it is trained."""
        given = new_module(optimizer)
        message = r"bag of MergedEmbeddingBag .* merged\(indices, offsets\)"
        for module in (given, copied(given)):
            bag, args = module[0], (torch.tensor([1, 2]), torch.tensor([0, 2]))
            with pytest.raises(RuntimeError, match=message):
                bag(*args)
            with torch.no_grad():
                wanted = bag(*args)
            module.eval()
            assert torch.equal(bag(*args), wanted)
            module.train()
            train(module, new_batches(module, 1))

    def test_optimizer_of_none(self) -> None:
        with pytest.raises(RuntimeError, match="pass optimizer='sgd'"):
            new_module(None).optimizer()


def test_names_of_ipex() -> None:
    bags = torch.nn.ModuleList([torch.nn.EmbeddingBag(10, 4, mode="sum")])
    for cls in (nn.MergedEmbeddingBagWithSGD, nn.MergedEmbeddingBagWithAdagrad):
        module = cls.from_embeddingbag_list(bags, lr=0.5)
        assert module[0] is bags[0]
        assert module.optimizer().param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_plain_calls_have_the_bits_of_the_operators(optimizer: str) -> None:
    """A mode of functions makes calls go through torch's dispatcher."""
    plain = new_module(optimizer, lr=LR)
    dispatched, batches = copy.deepcopy(plain), new_batches(plain)
    train(plain, batches)
    with torch.device("cpu"):
        train(dispatched, batches)
    assert all(map(torch.equal, weights_of(plain), weights_of(dispatched)))


def test_modules_of_one_shape_take_turns() -> None:
    """They use the same launches, which have other arguments for each."""
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
    """Of as many bags each: few indices and many, in one part of a table and in several."""
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
    """Zeros of autograd's that no kernel could read."""
    module = new_module("sgd", lr=LR)
    ((bags, _),) = new_batches(module, 1)
    before, outputs = copy.deepcopy(weights_of(module)), module(*bags)
    torch.autograd.backward(outputs, [torch._efficientzerotensor(y.shape) for y in outputs])
    assert all(map(torch.equal, weights_of(module), before))
