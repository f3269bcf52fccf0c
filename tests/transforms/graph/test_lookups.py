"""Simpler lookups give the same values, and the same errors; other lookups stay torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from fusedoptim import transforms
from tests.transforms.graph.helpers import Compiled

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Bags(nn.Module):
    """Bags of indices of one table."""

    def __init__(self, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(50, 7, dtype=dtype, **{"mode": "sum", **options})

    def forward(self, indices: Tensor) -> Tensor:
        """Return a row for each row of indices."""
        result: Tensor = self.table(indices)
        return result


class Pairs(nn.Module):
    """Elements of matrices at constant places."""

    def __init__(self, rows: Tensor, columns: Tensor) -> None:
        super().__init__()
        self.register_buffer("rows", rows)
        self.register_buffer("columns", columns)

    def forward(self, matrices: Tensor) -> Tensor:
        """Return a row for each matrix."""
        return matrices[:, self.rows, self.columns]


def tril(size: int) -> Pairs:
    rows, columns = torch.tril_indices(size, size, -1)
    return Pairs(rows, columns)


def check(model: nn.Module, *args: Tensor, count: int = 1) -> None:
    """Assert the bits and strides of eager, and how many lookups were simplified."""
    run = Compiled(model.eval())
    with torch.no_grad():
        expected = model(*args)
        for _ in range(3):
            actual = run(*args)
            assert (actual.dtype, actual.stride()) == (expected.dtype, expected.stride())
            assert torch.equal(actual, expected)
            assert torch.equal(actual.signbit(), expected.signbit())
    assert run.counts.lookups == count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_one(mode: str, dtype: torch.dtype) -> None:
    model = Bags(dtype, mode=mode)
    with torch.no_grad():
        model.table.weight[3, :4] = torch.tensor([-0.0, torch.nan, torch.inf, -torch.inf])
    check(model, torch.tensor([[4], [49], [0], [4]]))
    with torch.no_grad():
        actual = Compiled(model)(torch.tensor([[3]]))
        assert torch.equal(actual.isnan(), model(torch.tensor([[3]])).isnan())
        assert not actual.signbit()[0, 0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_that_a_model_shapes(dtype: torch.dtype) -> None:
    """A column of a matrix, and what ``unsqueeze`` makes of a vector, as in a DLRM."""
    table = nn.EmbeddingBag(50, 7, mode="sum")

    class Model(nn.Module):
        def forward(self, indices: Tensor) -> Tensor:
            return table(indices[:, 1:2]) + table(indices[:, 0].unsqueeze(1))

    check(Model(), torch.randint(50, (9, 3), dtype=dtype), count=2)


@pytest.mark.parametrize(
    ("options", "width"), [({"mode": "max"}, 1), ({"padding_idx": 3}, 1), ({}, 2)]
)
def test_other_bags_stay_torchs(options: dict[str, Any], width: int) -> None:
    check(Bags(**options), torch.randint(50, (9, width)), count=0)


def test_weighted_bags_and_bags_with_offsets_stay_torchs() -> None:
    weight, factors = torch.randn(50, 7), torch.rand(9, 1)

    class Model(nn.Module):
        def forward(self, indices: Tensor) -> Tensor:
            weighted = embedding_bag(indices, weight, mode="sum", per_sample_weights=factors)
            return weighted + embedding_bag(indices.flatten(), weight, torch.arange(9), mode="sum")

    check(Model(), torch.randint(50, (9, 1)), count=0)


@pytest.mark.parametrize("index", [50, -1])
def test_a_missing_row_is_torchs_error(index: int) -> None:
    model = Bags().eval()
    run = Compiled(model)
    with torch.no_grad():
        run(torch.tensor([[1], [2]]))
        with pytest.raises(RuntimeError) as expected:
            model(torch.tensor([[1], [index]]))
        with pytest.raises(RuntimeError) as actual:
            run(torch.tensor([[1], [index]]))
    assert str(actual.value) == str(expected.value)


def test_a_large_result_and_an_unused_bag_are_left_to_torch() -> None:
    model = Bags()
    model.table = nn.EmbeddingBag(50, 129, mode="sum")
    check(model, torch.randint(50, (300, 1)))

    class Unused(nn.Module):
        def forward(self, indices: Tensor) -> Tensor:
            model.table(indices)
            return indices + 1

    run = Compiled(Unused())
    with torch.no_grad(), pytest.raises(RuntimeError, match="Index 0 of input takes value 77"):
        run(torch.tensor([[77]]))


@pytest.mark.parametrize("table", [torch.randn(0, 7), torch.randn(50, 7).to(torch.float8_e5m2)])
def test_odd_tables_stay_torchs(table: Tensor) -> None:
    class Model(nn.Module):
        def forward(self, indices: Tensor) -> Tensor:
            return embedding_bag(indices, table, mode="sum")

    run = Compiled(Model())
    with torch.no_grad(), pytest.raises(RuntimeError) as expected:
        Model()(torch.tensor([[3], [4]]))
    with torch.no_grad(), pytest.raises(RuntimeError) as actual:
        run(torch.tensor([[3], [4]]))
    assert str(expected.value) in str(actual.value)


@pytest.mark.parametrize("change", ["t_", "transpose_", "unsqueeze_"])
def test_shapes_that_change_after_a_lookup(change: str) -> None:
    """The capture knows the last shape of a value only."""
    arguments = {"t_": (), "transpose_": (0, 1), "unsqueeze_": (0,)}[change]
    model = Bags()

    class Model(nn.Module):
        def forward(self, indices: Tensor) -> Tensor:
            own = indices.clone()
            result = model(own)
            getattr(own, change)(*arguments)
            return result

    check(Model(), torch.tensor([[1, 2, 3]]), count=0)


def test_flattening_copies_nothing() -> None:
    """With another layout, the few elements are indexed."""
    model, wide = tril(2), torch.randn(64, 500, 500)
    run = Compiled(model)
    with torch.no_grad():
        for x in (wide.transpose(1, 2), wide[:, :, :400], wide):
            assert torch.equal(run(x), model(x))
            with torch.profiler.profile(profile_memory=True) as profile:
                run(x)
            assert max(event.cpu_memory_usage for event in profile.events()) < 1 << 16


@pytest.mark.parametrize("batch", [0, 1, 5])
@pytest.mark.parametrize("size", [2, 27])
def test_elements_at_constant_places(size: int, batch: int) -> None:
    check(tril(size), torch.randn(batch, size, size))


def test_elements_of_other_layouts_counted_from_the_end() -> None:
    rows, columns = torch.tensor([0, -1, 3, -5]), torch.tensor([-1, 5, -6, 0])
    check(Pairs(rows, columns), torch.randn(3, 6, 5).transpose(1, 2))


@pytest.mark.parametrize(("row", "column"), [(0, 6), (5, 0), (-6, 0), (0, -7)])
def test_places_outside_raise(row: int, column: int) -> None:
    """Also those that are within the flattened matrix."""
    model, x = Pairs(torch.tensor([1, row]), torch.tensor([1, column])), torch.randn(2, 5, 6)
    with torch.no_grad():
        with pytest.raises(IndexError) as expected:
            model(x)
        with pytest.raises(IndexError) as actual:
            Compiled(model)(x)
    assert str(actual.value) == str(expected.value)
    check(model, x[:0])  # torch does not look at the places of no matrices


def test_changed_places() -> None:
    model = tril(5)
    run = Compiled(model)
    x = torch.randn(3, 5, 5)
    with torch.no_grad():
        run(x)
        model.rows.fill_(4)
        assert torch.equal(run(x), model(x))


@pytest.mark.parametrize(
    "index",
    [
        lambda x, i: x[:, :, i, i],
        lambda x, i: x[0, :, i],
        lambda x, i: x[0][i, i],
        lambda x, i: x[0][:, i, i, None],
        lambda x, i: x[0][:, i[:, None], i],
        lambda x, i: x[0][:, i[:1], i],
        lambda x, i: x[0][:, i, 0],
        lambda x, i: x[0][:, i.int(), i],
    ],
)
def test_other_indices_stay_torchs(index: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("at", torch.tensor([0, 2, 3]))

        def forward(self, x: Tensor) -> Tensor:
            return index(x, self.at)

    check(Model(), torch.randn(2, 4, 4, 4), count=0)


def test_a_cast_that_changes_nothing_is_removed() -> None:
    """What is written into its result is written into its input."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.to(torch.float32).float()
            y.add_(1)
            return y.to(torch.float64) + x.double()

    ours = torch.randn(5)
    theirs = ours.clone()
    run, model = Compiled(Model()), Model()
    with torch.no_grad():
        assert torch.equal(run(ours), model(theirs))
    assert torch.equal(ours, theirs)


def test_the_report_counts_lookups() -> None:
    model = transforms.optimize(
        Bags().eval(), sample_input=torch.randint(50, (9, 1)), graph_mode=True
    )
    (entry,) = transforms.report(model).done("graph_mode")
    assert "lookups simplified: 1" in entry.what
