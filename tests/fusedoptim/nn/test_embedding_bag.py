"""MergedEmbeddingBag: its optimizer, checkpoints, tracing, errors."""

from __future__ import annotations

import copy
import io
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode

from fusedoptim import nn
from fusedoptim.nn import MergedEmbeddingBag
from tests.fusedoptim.bag_cases import ROWS, new_bags
from tests.fusedoptim.helpers import each_way_to_copy, through_a_file
from tests.fusedoptim.nn.merged_bags import (
    LR,
    OPTIMIZERS,
    new_batches,
    new_module,
    train,
    weights_of,
)


class _Sizes(TorchDispatchMode):
    """A mode that finds the largest number of elements that an operator returned."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.most = max([self.most, *(x.numel() for x in [result] if isinstance(x, Tensor))])
        return result


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

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("split", [False, True])
    @pytest.mark.parametrize("used", [1, len(ROWS)])
    @pytest.mark.parametrize("backend", [None, "aot_eager"])
    def test_checkpoint_that_is_loaded_before_the_backward_pass(
        self, optimizer: str, split: bool, used: int, backend: str | None
    ) -> None:
        torch.compiler.reset()
        source = new_module(optimizer, lr=LR, split=split)
        batches = new_batches(source)
        train(source, batches)
        late = new_module(optimizer, lr=LR, split=split)
        train(late, batches[:1])
        early, states = copy.deepcopy(late), []
        for module in late, early:
            checkpoint = copy.deepcopy(source.optimizer().state_dict())
            if module is early:
                module.optimizer().load_state_dict(checkpoint)
            called = torch.compile(module, backend=backend, fullgraph=True) if backend else module
            loss = torch.stack([y.square().sum() for y in called(*batches[1][0])[:used]]).sum()
            if module is late:
                module.optimizer().load_state_dict(checkpoint)
            if backend is None:  # a compiled graph cannot go back twice
                loss.backward(retain_graph=True)
            loss.backward()
            state = module.optimizer().state_dict()["state"]
            states.append([tensor for _, of in sorted(state.items()) for tensor in of.values()])
        assert all(map(torch.equal, weights_of(late), weights_of(early)))
        assert all(map(torch.equal, *states))

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
        """The state of a table with strides has strides in torch, and is loaded as contiguous."""
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

    @pytest.mark.parametrize("optimizer", ["adagrad", "rowwise_adagrad"])
    def test_shared_memory(self, optimizer: str) -> None:
        module: Any = new_module(optimizer, lr=LR).share_memory()
        other, batches = copy.deepcopy(module), new_batches(module, 1)
        module.optimizer().share_memory()
        for one in (module, other):
            train(one, batches)
        assert all(state["sum"].is_shared() for state in module.optimizer().state.values())
        assert all(map(torch.equal, weights_of(module), weights_of(other)))

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

    @pytest.mark.filterwarnings("ignore:.*torch.jit")  # inductor uses it
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
    OFFSETS = torch.tensor([0])
    ROW_BAGS = torch.tensor([[0, 1], [2, 3]])

    @pytest.mark.parametrize(
        ("tables", "options", "error", "message"),
        [
            ([], {}, ValueError, "tables=[] is empty"),
            ([3], {}, TypeError, "table 0 is of type int"),
            (BAG, {}, TypeError, "tables is one EmbeddingBag; pass a list"),
            (None, {}, TypeError, "tables=None is not a list; pass a list of EmbeddingBags"),
            (5, {"optimizer": "sgd"}, TypeError, "tables=5 is not a list; pass a list"),
            ([(4, 2)], {"optimizer": "sgd", "eps": 0.1}, ValueError,
             "eps is for optimizer='adagrad' and 'rowwise_adagrad', and 'sgd' takes lr, weight"),
            ([(4, 2)], {"optimizer": "sgd", "split": "yes"}, TypeError, "split is 'yes'; pass"),
            ([(4, 2)], {"optimizer": "adam"}, ValueError, "optimizer='adam' is not one of"),
            ([(4, 2)], {"lr": 0.1}, ValueError, "lr is for an optimizer"),
            ([(4, 2)], {"split": True}, ValueError, "split is for an optimizer"),
            ([(4, 2)], {"optimizer": "sgd", "lr": -1.0}, ValueError, "Invalid learning rate"),
            ([torch.nn.EmbeddingBag(4, 2, mode="max")], {}, ValueError, "table 0 has mode='max'"),
            ([torch.nn.EmbeddingBag(4, 2, max_norm=1.0)], {}, ValueError, "max_norm=1.0"),
            ([torch.nn.EmbeddingBag(4, 2, mode="sum", include_last_offset=2)], {}, TypeError,
             "table 0: include_last_offset=2 is of type int; pass True or False"),
            ([BAG, torch.nn.EmbeddingBag(4, 2, mode="sum", sparse=1)], {"optimizer": "sgd"},
             TypeError, "table 1: sparse=1 is of type int; pass True or False"),
            ([(4, 2), torch.nn.EmbeddingBag(4, 2, sparse=True)], {}, ValueError, "sparse=True"),
            ([(4, 2), torch.nn.EmbeddingBag(4, 2, dtype=torch.float64)], {}, TypeError,
             "table 1 has dtype torch.float64"),
            ([BAG, BAG], {"optimizer": "sgd"}, ValueError, "table 1 shares memory"),
            ([BAG, torch.nn.EmbeddingBag.from_pretrained(torch.ones(4, 2), mode="sum")],
             {"optimizer": "sgd"}, ValueError, "the weight of table 1 is frozen"),
        ],
    )  # fmt: skip
    def test_wrong(self, tables: Any, options: Any, error: Any, message: str) -> None:
        with pytest.raises(error, match=re.escape(message)):
            MergedEmbeddingBag(tables, **options)
        with pytest.raises(error, match=re.escape(message)):
            MergedEmbeddingBag.from_embedding_bags(tables, **options)

    def test_a_gradient_from_before(self) -> None:
        """Its optimizer would apply it in a later step, beside the updates of backward passes."""
        bag = torch.nn.EmbeddingBag(4, 2, mode="sum")
        optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
        bag(torch.tensor([1]), self.OFFSETS).sum().backward()
        with pytest.raises(ValueError, match=r"weight of table 0 has a gradient \(\.grad\), which"):
            MergedEmbeddingBag([bag], "sgd")
        assert bag.weight.requires_grad
        MergedEmbeddingBag([bag])
        optimizer.zero_grad()
        MergedEmbeddingBag([bag], "sgd")

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
        """A bag called by itself raises in training, where it would learn nothing."""
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

    def test_a_copy_of_a_bag_is_trained_by_itself(self) -> None:
        bag = copy.deepcopy(new_module("sgd")[0]).requires_grad_()
        bag(torch.tensor([1]), torch.tensor([0, 1])).sum().backward()
        assert bag.weight.grad is not None

    def test_sample_weights_of_another_shape(self) -> None:
        indices, samples = torch.randint(4, (2, 3)), torch.rand(3, 2)
        with pytest.raises(ValueError, match="must have the same shape"):
            self.BAG(indices, per_sample_weights=samples)
        message = re.escape("per_sample_weights 0 have shape (3, 2), and input 0 has (2, 3)")
        with pytest.raises(ValueError, match=message):
            MergedEmbeddingBag([self.BAG])([indices], None, [samples])

    @pytest.mark.parametrize("optimizer", [None, "sgd"])
    @pytest.mark.parametrize(
        ("args", "message"),
        [
            ((None,), "input is of type NoneType; pass one tensor, or a list"),
            (([None],), "input 0 is of type NoneType; pass a tensor"),
            (([[1]], [OFFSETS]), "indices 0 are of type list; pass a tensor"),
            (([OFFSETS.numpy()], [OFFSETS]), "indices 0 are of type ndarray"),
            (([OFFSETS], [OFFSETS.numpy()]), "offsets 0 are of type ndarray"),
            ((OFFSETS, OFFSETS, [1.0]), "per_sample_weights 0 are of type list"),
        ],
    )
    def test_no_tensors(self, optimizer: str | None, args: Any, message: str) -> None:
        with pytest.raises(TypeError, match=re.escape(message)):
            MergedEmbeddingBag([(4, 2)], optimizer)(*args)

    @pytest.mark.parametrize(
        ("args", "error", "message"),
        [
            ((ROW_BAGS, [OFFSETS]), TypeError, "input is one tensor and offsets are a list"),
            (([ROW_BAGS],), ValueError, "there are 2 tables, 1 inputs, 2 offsets and 2 per_sample"),
            (([ROW_BAGS, OFFSETS],), ValueError, "input 1 has shape (1,) and no offsets"),
            (
                ([ROW_BAGS] * 2, None, [ROW_BAGS.float(), None]),
                ValueError,
                "some tables have per_sample_weights and others None; pass ones",
            ),
        ],
    )
    def test_one_argument_for_each_table(
        self, args: Any, error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=re.escape(message)):
            MergedEmbeddingBag([(4, 2), (4, 2)])(*args)

    def test_optimizer_of_none(self) -> None:
        with pytest.raises(RuntimeError, match="construct it with optimizer='sgd'"):
            new_module(None).optimizer()


def _weight_norm(bag: Any) -> None:
    with pytest.warns(FutureWarning, match="deprecated"):
        torch.nn.utils.weight_norm(bag)


class TestBagsThatDoMore:
    """A merged module does not call its bags, so it refuses those that do more than look up."""

    @pytest.mark.parametrize("optimizer", [None, "sgd"])
    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            (_weight_norm, ValueError, "has a weight that is computed from others"),
            (
                lambda bag: prune.random_unstructured(bag, "weight", 0.5),
                ValueError,
                "has a weight that is computed from others",
            ),
            (lambda bag: bag.register_forward_hook(print), ValueError, "has hooks, which"),
            (lambda bag: bag.register_forward_pre_hook(print), ValueError, "has hooks, which"),
            (lambda bag: bag.register_full_backward_hook(print), ValueError, "has hooks, which"),
            (
                lambda bag: setattr(bag, "forward", print),
                TypeError,
                "is of type EmbeddingBag with methods of its own",
            ),
        ],
    )
    def test_refused(
        self, optimizer: str | None, change: Callable[[Any], object], error: Any, message: str
    ) -> None:
        bags = [torch.nn.EmbeddingBag(4, 2, mode="sum") for _ in range(2)]
        change(bags[1])
        for make in (MergedEmbeddingBag, MergedEmbeddingBag.from_embedding_bags):
            with pytest.raises(error, match=f"table 1 {message}"):
                make(bags, optimizer=optimizer)

    def test_classes(self) -> None:
        class Own(torch.nn.EmbeddingBag):
            def forward(self, *args: Any, **kwargs: Any) -> Tensor:
                return super().forward(*args, **kwargs) / 2

        class Renamed(torch.nn.EmbeddingBag): ...

        with pytest.raises(TypeError, match="table 0 is of type Own with methods of its own"):
            MergedEmbeddingBag([Own(4, 2, mode="sum")])
        MergedEmbeddingBag([Renamed(4, 2, mode="sum")])

    @pytest.mark.parametrize(
        "register", [Tensor.register_hook, Tensor.register_post_accumulate_grad_hook]
    )
    def test_hooks_of_a_table(self, register: Any) -> None:
        """Only without an optimizer are there gradients for which the hooks are called."""
        bag = torch.nn.EmbeddingBag(4, 2, mode="sum")
        register(bag.weight, lambda _: None)
        with pytest.raises(ValueError, match="the weight of table 0 has hooks for its gradient"):
            MergedEmbeddingBag([bag], "sgd")
        MergedEmbeddingBag([bag])

    def test_a_parametrized_table(self) -> None:
        """It is computed in each call; an optimizer would not find it."""
        bag = torch.nn.EmbeddingBag(4, 2, mode="sum")
        torch.nn.utils.parametrizations.weight_norm(bag)
        args = torch.tensor([1, 3, 3]), torch.tensor([0, 2])
        merged = MergedEmbeddingBag([bag])
        for _ in range(2):
            assert torch.equal(merged([args[0]], [args[1]])[0], bag(*args))
            torch.nn.init.normal_(bag.parametrizations.weight.original1)
        with pytest.raises(ValueError, match="table 0 has a weight that is computed from others"):
            MergedEmbeddingBag([bag], "sgd")

    def test_merged_again(self) -> None:
        """The hooks of the module that trains the bags do not matter."""
        trained, bags = new_module("sgd"), new_bags(ROWS)
        again = MergedEmbeddingBag([*trained])
        assert all(map(torch.equal, again(*bags), trained(*bags)))


class TestModules:
    def test_slices(self) -> None:
        """Bags are found as in the ModuleList that the module replaces."""
        module = new_module(None)
        bags = torch.nn.ModuleList(module)
        for part in (slice(0, 1), slice(1, None), slice(None, None, 2), slice(4, 9)):
            assert isinstance(module[part], torch.nn.ModuleList)
            assert [*module[part]] == [*bags[part]]
        assert module[-1] is bags[-1]
        with pytest.raises(IndexError):
            module[len(ROWS)]

    @pytest.mark.parametrize("optimizer", [None, "sgd"])
    def test_submodules_besides_the_bags(self, optimizer: str | None) -> None:
        module, bags = new_module(optimizer), new_bags(ROWS)
        wanted = module(*bags)
        module.after = torch.nn.Linear(2, 2)
        assert all(map(torch.equal, module(*bags), wanted))
        assert len([*module]) == len(module) == len(ROWS)


def test_sample_weights_of_bags_in_rows() -> None:
    bags = [torch.nn.EmbeddingBag(rows, 3, mode="sum") for rows in (5, 7)]
    for bag in bags:
        torch.nn.init.constant_(bag.weight, 2.0)
    indices = [torch.randint(5, (4, 2)), torch.randint(7, (4, 6))]
    samples = [torch.randint(9, i.shape).float() for i in indices]  # sums of integers are exact
    sums = MergedEmbeddingBag.from_embedding_bags(bags)(indices, None, samples)
    for bag, i, s, own in zip(bags, indices, samples, sums):
        assert torch.equal(own, bag(i, per_sample_weights=s))


def test_names_of_ipex() -> None:
    for cls in (nn.MergedEmbeddingBagWithSGD, nn.MergedEmbeddingBagWithAdagrad):
        bags = torch.nn.ModuleList([torch.nn.EmbeddingBag(10, 4, mode="sum")])
        module = cls.from_embeddingbag_list(bags, lr=0.5)
        assert module[0] is bags[0]
        assert module.optimizer().param_groups[0]["lr"] == 0.5
