"""``merge_embedding_bags``: what it computes, saves and refuses, and that ``restore`` undoes it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedoptim
import transforms as transforms_package
from fusedoptim import transforms
from fusedoptim.nn import MergedEmbeddingBag
from tests.interrupts import InterruptAt, at, polls_of, stopping_at
from tests.tolerances import assert_as_exact
from tests.transforms.helpers import (
    assert_same_state,
    copied,
    fingerprint,
    hooks,
    through_torch_save,
    without_addresses,
)
from transforms.reports import conclude

KNOB = "merge_embedding_bags"
WIDTHS = (8, 16, 17)


class Inner(nn.Module):
    """A model with bags, whose forward calls the merged module if there is one."""

    def __init__(self, rows: int = 20, kind: Callable[[list[nn.EmbeddingBag]], Any] | None = None):
        super().__init__()
        self.before = nn.Linear(1, 1)
        bags = [nn.EmbeddingBag(rows, width, mode="sum") for width in WIDTHS]
        self.tables: Any = (kind or nn.ModuleList)(bags)
        self.after = nn.Linear(sum(WIDTHS), 3)

    def forward(self, indices: list[Tensor], offsets: list[Tensor]) -> Tensor:
        if isinstance(self.tables, MergedEmbeddingBag):
            bags = self.tables(indices, offsets)
        else:
            bags = [bag(i, o) for bag, i, o in zip(self.tables, indices, offsets)]
        result: Tensor = self.after(torch.cat(bags, dim=1))
        return result


class Looping(Inner):
    """A model whose forward loops over its bags."""

    def forward(self, indices: list[Tensor], offsets: list[Tensor]) -> Tensor:
        bags = [bag(i, o) for bag, i, o in zip(self.tables, indices, offsets)]
        result: Tensor = self.after(torch.cat(bags, dim=1))
        return result


class Outer(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = Inner() if inner is None else inner

    def forward(self, *args: Any) -> Any:
        return self.inner(*args)


def batch() -> tuple[list[Tensor], list[Tensor]]:
    """Bags of several sizes, one of them empty."""
    indices = [torch.randint(20, (11,)) for _ in WIDTHS]
    return indices, [torch.tensor([0, 1, 1, 7]) for _ in WIDTHS]


def merged(model: nn.Module, name: str = "inner.tables", **options: Any) -> Any:
    return transforms.merge_embedding_bags(model, name, **options)


def test_computes_the_same_and_has_the_same_gradients() -> None:
    model, (indices, offsets) = Outer(), batch()
    result = merged(model)
    exact = copy.deepcopy(model).double()
    assert_as_exact([result(indices, offsets)], lambda: [exact(indices, offsets)], torch.float32)
    for each in (model, result):
        each(indices, offsets).square().sum().backward()
    expected = dict(model.named_parameters())
    for name, param in result.named_parameters():
        grad = expected[name].grad
        assert (param.grad is None) == (grad is None)
        if grad is not None:
            torch.testing.assert_close(param.grad, grad)


def test_a_copy_unless_in_place() -> None:
    model = Outer()
    before = fingerprint(model)
    result = merged(model, optimizer="sgd")
    assert fingerprint(model) == before
    assert isinstance(result.inner.tables, MergedEmbeddingBag)
    assert not {*map(id, model.parameters())} & {*map(id, result.parameters())}
    assert merged(model, inplace=True) is model


@pytest.mark.parametrize("options", [{}, {"optimizer": "sgd"}, {"optimizer": "adagrad"}])
def test_restored_exactly(options: dict[str, Any]) -> None:
    model = Outer().train()
    before, state = fingerprint(model), copied(model.state_dict())
    container, bags = model.inner.tables, [*model.inner.tables]
    merged(model, inplace=True, **options)
    assert_same_state(model.state_dict(), state)
    assert [*model.inner.tables] == bags
    assert model.inner.tables[1] is bags[1]
    assert transforms.restore(model) is model
    assert fingerprint(model) == before
    assert model.inner.tables is container
    assert all(p.requires_grad for p in model.parameters())
    assert not any(bag._forward_pre_hooks for bag in bags)
    with pytest.raises(ValueError, match="no report"):
        transforms.report(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_split_tables_become_what_they_were(dtype: torch.dtype) -> None:
    model = Outer()
    model.inner.tables.to(dtype)
    state = copied(model.state_dict())
    merged(model, inplace=True, optimizer="sgd", split=True)
    assert model.inner.tables[0].weight.dtype == torch.bfloat16
    transforms.restore(model)
    assert_same_state(model.state_dict(), state)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("package", [fusedoptim, transforms_package])
def test_an_interrupted_merge_changes_nothing(package: Any) -> None:
    """In either package; if it comes at the very end, the tables are merged and can be restored."""
    model = Outer()
    untouched = copy.deepcopy(model)

    def merge() -> None:
        merged(model, optimizer="adagrad", split=True, inplace=True)

    merge()  # fills caches
    model = copy.deepcopy(untouched)
    since = "merge" if package is transforms_package else "__init__"
    places = polls_of(merge, within=package, since=since)
    assert len(places) > 20
    for place in places if package is transforms_package else places[::5] + places[-5:]:
        model = copy.deepcopy(untouched)
        before = fingerprint(model)
        with InterruptAt(place, "polls", within=package, since=since) as interrupt:
            merge()
        assert interrupt.has_raised
        if isinstance(model.inner.tables, MergedEmbeddingBag):
            transforms.restore(model)
            assert_same_state(model.state_dict(), untouched.state_dict())
        else:
            assert without_addresses(fingerprint(model)) == without_addresses(before)
        assert all(bag.weight.requires_grad for bag in model.inner.tables)
        assert not hooks(model)


def test_an_interrupted_merge_keeps_an_earlier_one() -> None:
    model = Outer()
    others = [nn.EmbeddingBag(20, 8, mode="sum") for _ in range(2)]
    model.inner.others = nn.ModuleList(others)
    merged(model, inplace=True)
    earlier, report = model.inner.tables, transforms.report(model)
    with pytest.raises(KeyboardInterrupt), stopping_at(at(conclude, "call")):
        transforms.merge_embedding_bags(model, "inner.others", inplace=True)
    assert (model.inner.tables, transforms.report(model)) == (earlier, report)
    assert [*model.inner.others] == others
    transforms.restore(model)
    assert type(model.inner.tables) is type(model.inner.others) is nn.ModuleList


def test_optimizer_trains_the_tables_and_restore_keeps_it() -> None:
    """SGD's step in the backward pass equals torch's."""
    model, (indices, offsets) = Outer(), batch()
    result = merged(model, optimizer="sgd", lr=0.1)
    optimizer = torch.optim.SGD(model.inner.tables.parameters(), lr=0.1)
    for each in (model, result):
        each(indices, offsets).square().sum().backward()
    optimizer.step()
    transforms.restore(result)
    for ours, theirs in zip(result.inner.tables, model.inner.tables):
        torch.testing.assert_close(ours.weight, theirs.weight)
        assert ours.weight.grad is None


@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_frozen_tables_are_restored_frozen(optimizer: str | None) -> None:
    model = merged(Outer(), optimizer=optimizer)
    model.inner.tables.requires_grad_(False)
    tables = transforms.restore(model).inner.tables
    assert not any(p.requires_grad for p in tables.parameters())


def test_a_plain_call_that_would_train_nothing_raises() -> None:
    model = merged(Outer(Looping()), optimizer="sgd")
    with pytest.raises(RuntimeError, match=r"inner\.tables .* self\.tables\(indices, offsets\)"):
        model(*batch())
    with torch.no_grad():
        model(*batch())
    model.eval()(*batch())
    transforms.restore(model)
    model.train()(*batch()).sum().backward()
    assert model.inner.tables[0].weight.grad is not None


def test_a_loop_over_the_bags_computes_what_it_did() -> None:
    model, data = Outer(Looping()), batch()
    result = merged(model)
    assert torch.equal(result(*data), model(*data))


@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_that_are_no_submodules(kind: Any) -> None:
    model, data = Outer(Inner(kind=kind)), batch()
    container, state, expected = model.inner.tables, copied(model.state_dict()), model(*data)
    merged(model, inplace=True)
    torch.testing.assert_close(model(*data), expected)
    assert_same_state(model.state_dict(), state)
    assert transforms.restore(model).inner.tables is container


@pytest.mark.parametrize("copying", [copy.deepcopy, through_torch_save])
@pytest.mark.parametrize("options", [{}, {"optimizer": "adagrad"}])
def test_copies_are_restored_by_themselves(copying: Any, options: dict[str, Any]) -> None:
    model = merged(Outer(), **options)
    twin = copying(model)
    transforms.restore(twin)
    assert type(twin.inner.tables) is nn.ModuleList
    assert type(model.inner.tables) is MergedEmbeddingBag
    twin(*batch()).sum().backward()
    assert twin.inner.tables[0].weight.grad is not None
    assert model.inner.tables[0].weight.grad is None
    if options:
        with pytest.raises(RuntimeError, match="called by itself"):
            model.inner.tables[0](torch.tensor([[0]]))


def test_report_and_optimize() -> None:
    """``optimize`` reports what could be merged; one ``restore`` undoes both."""
    model = Outer().eval()
    state = copied(model.state_dict())
    optimized = transforms.optimize(model)
    (entry,) = transforms.report(optimized).left(KNOB)
    assert entry.where == "inner.tables"
    result = merged(optimized)
    report = transforms.report(result)
    assert [e.where for e in report.done(KNOB)] == ["inner.tables"]
    assert not report.left(KNOB)
    assert {"fuse", KNOB} <= {*report.passes}
    again = transforms.optimize(result, dtype=torch.bfloat16)
    assert transforms.report(again).done("dtype")
    assert [e.where for e in transforms.report(again).done(KNOB)] == ["inner.tables"]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        again(*batch())
    assert_same_state(again.state_dict(), state)
    transforms.restore(again)
    assert type(again.inner.tables) is nn.ModuleList
    assert_same_state(again.state_dict(), state)
    optimizer = torch.optim.Adagrad(model.parameters())
    assert transforms.report(transforms.optimize(model.train(), optimizer)[0]).left(KNOB)


@pytest.mark.parametrize("options", [{}, {"optimizer": "sgd"}])
def test_optimized_for_training(options: dict[str, Any]) -> None:
    """The tables stay float32, as the merged module calls no hook that would cast."""
    model = merged(Outer(), **options)
    state = copied(model.state_dict())
    pair = model, torch.optim.Adagrad(model.parameters(), lr=0.1)
    model, optimizer = transforms.optimize(*pair, dtype=torch.bfloat16)
    left = {entry.where for entry in transforms.report(model).left("split_master_weight_for_bf16")}
    assert left == {f"inner.tables.{t}.weight" for t in range(len(WIDTHS))}
    assert_same_state(model.state_dict(), state)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(*batch())
    output.float().square().sum().backward()
    optimizer.step()
    model, _ = transforms.restore(model, optimizer)
    assert type(model.inner.tables) is nn.ModuleList
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())
    for name, value in model.inner.tables.state_dict(prefix="inner.tables.").items():
        assert not torch.equal(value, state[name])


def _with(t: int, bag: Any) -> nn.Module:
    model = Outer()
    model.inner.tables[t] = bag
    return model


def _changed(change: Callable[[Any], object]) -> nn.Module:
    model = Outer()
    change(model.inner.tables)
    return model


class Own(nn.EmbeddingBag):
    """A subclass of EmbeddingBag."""


def _sharing(tables: Any) -> None:
    tables[1] = nn.EmbeddingBag(20, 8, mode="sum")
    tables[1].weight.data = tables[0].weight.data


def _bag(**options: Any) -> nn.EmbeddingBag:
    return nn.EmbeddingBag(20, 8, **{"mode": "sum", **options})


def _tied() -> nn.Module:
    model: Any = Outer()
    model.tied = nn.Linear(8, 20, bias=False)
    model.tied.weight = model.inner.tables[0].weight
    return model  # type: ignore[no-any-return]


REFUSED: dict[str, tuple[Callable[[], nn.Module], str, type[Exception], str]] = {
    "no such path": (Outer, "outer.tables", AttributeError, "name='outer.tables'.*named_modules"),
    "no such name": (Outer, "inner.bags", AttributeError, "name='inner.bags'.*no 'bags'"),
    "the model": (Outer, "", AttributeError, "name=''"),
    "no list": (Outer, "inner.after", TypeError, "is of type Linear; name a torch.nn.ModuleList"),
    "a Linear": (
        lambda: _with(1, nn.Linear(1, 1)),
        "inner.tables",
        TypeError,
        "tables.1 is of type Lin",
    ),
    "a subclass": (
        lambda: _with(1, Own(20, 8, mode="sum")),
        "inner.tables",
        TypeError,
        "tables.1 is of type Own",
    ),
    "none": (
        lambda: Outer(Inner(kind=lambda _: nn.ModuleList())),
        "inner.tables",
        ValueError,
        r"tables=\[\]",
    ),
    "max": (lambda: _with(1, _bag(mode="max")), "inner.tables", ValueError, "table 1.*'max'"),
    "max_norm": (
        lambda: _with(1, _bag(max_norm=1.0)),
        "inner.tables",
        ValueError,
        "table 1 has max_norm=1.0",
    ),
    "scale_grad_by_freq": (
        lambda: _with(1, _bag(scale_grad_by_freq=True)),
        "inner.tables",
        ValueError,
        "table 1 has s",
    ),
    "dtypes": (
        lambda: _changed(lambda t: t[1].double()),
        "inner.tables",
        TypeError,
        "table 1 has dtype",
    ),
    "hook": (
        lambda: _changed(lambda t: t[1].register_forward_hook(print)),
        "inner.tables",
        ValueError,
        "tables.1 has hooks",
    ),
    "hook of the list": (
        lambda: _changed(lambda t: t.register_state_dict_pre_hook(print)),
        "inner.tables",
        ValueError,
        "the ModuleList has hooks; remove",
    ),
    "parametrized": (
        lambda: _changed(
            lambda t: nn.utils.parametrizations.weight_norm(t[1]),
        ),
        "inner.tables",
        ValueError,
        "tables.1 has a weight that is computed",
    ),
}
REFUSED_WITH_OPTIMIZER: dict[str, tuple[Callable[[], nn.Module], type[Exception], str]] = {
    "shared memory": (lambda: _changed(_sharing), ValueError, "tables.1.weight shares memory"),
    "twice": (
        lambda: _changed(lambda t: t.__setitem__(2, t[0])),
        ValueError,
        "tables.2.weight is also a parameter of inner.tables.0",
    ),
    "frozen": (
        lambda: _changed(lambda t: t[1].requires_grad_(False)),
        ValueError,
        "tables.1.weight is fro",
    ),
    "hook of a table": (
        lambda: _changed(lambda t: t[1].weight.register_hook(print)),
        ValueError,
        "tables.1.weight has hooks for its gradient",
    ),
    "tied": (_tied, ValueError, "inner.tables.0.weight is also a parameter of tied"),
    "optimized": (
        lambda: transforms.optimize(Outer().eval(), dtype=torch.bfloat16),
        ValueError,
        "optimized for inference",
    ),
}


def _check_refused(
    model: nn.Module, name: str, error: type[Exception], message: str, **options: Any
) -> None:
    before = fingerprint(model)
    flags = [p.requires_grad for p in model.parameters()]
    for inplace in (False, True):
        with pytest.raises(error, match=message):
            merged(model, name, inplace=inplace, **options)
    assert fingerprint(model) == before
    assert [p.requires_grad for p in model.parameters()] == flags


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_refused(what: str, optimizer: str | None) -> None:
    make, name, error, message = REFUSED[what]
    _check_refused(make(), name, error, message, optimizer=optimizer)


@pytest.mark.parametrize("what", REFUSED_WITH_OPTIMIZER)
def test_refused_with_an_optimizer(what: str) -> None:
    make, error, message = REFUSED_WITH_OPTIMIZER[what]
    _check_refused(make(), "inner.tables", error, message, optimizer="adagrad")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.1}, "lr is for an optimizer"),
        ({"optimizer": "adam"}, "optimizer='adam' is not one of"),
        ({"optimizer": "sgd", "lr": -1.0}, "-1.0"),
    ],
)
def test_refused_options(options: dict[str, Any], message: str) -> None:
    _check_refused(Outer(), "inner.tables", ValueError, re.escape(message), **options)


def test_gradients_from_before() -> None:
    """Their optimizer would still apply them; a copy has none."""
    model: Any = Outer()
    bags = model.inner.tables
    for bag in bags:
        bag.weight.grad = torch.ones_like(bag.weight)
    before = fingerprint(model)
    with pytest.raises(ValueError, match="weight of table 0 has a gradient"):
        merged(model, "inner.tables", inplace=True, optimizer="sgd")
    assert fingerprint(model) == before
    assert all(bag.weight.requires_grad for bag in bags)
    copied = merged(model, "inner.tables", optimizer="sgd")
    assert all(bag.weight.grad is None for bag in copied.inner.tables)
    assert all(bag.weight.grad is not None for bag in bags)
    model.zero_grad()
    merged(model, "inner.tables", inplace=True, optimizer="sgd")


def test_refused_twice() -> None:
    model = merged(Outer())
    _check_refused(model, "inner.tables", TypeError, r"already; .*transforms\.restore\(model\)")
