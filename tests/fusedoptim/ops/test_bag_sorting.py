"""The sort of embedding bags' indices, in one part and in several, compared with numpy's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from fusedoptim.nn import MergedEmbeddingBag
from fusedoptim.ops import _bag_batch, _bag_sorting
from fusedoptim.ops._bag_batch import Batch, Sorted
from fusedoptim.ops._bag_tables import Tables
from tests.running import at_each_thread_count

ROWS = (500_000, 1, 40, 3000)
TABLES = Tables(ROWS, (1,) * len(ROWS), torch.float32, torch.device("cpu"), True)


class Sorting(NamedTuple):
    """The results of the sort for each table."""

    keys: list[Any]
    factors: list[Tensor]
    bags_of: list[Tensor]


@pytest.fixture(params=[False, True], ids=["one part", "parts"])
def in_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whether tables are cut into parts, however small they are."""
    _bag_batch._places_of.cache_clear()  # cached places know their parts
    if request.param:
        monkeypatch.setattr(_bag_batch, "parts_of", lambda sizes, _: 1 + sizes // 7 % 20)
    yield
    _bag_batch._places_of.cache_clear()


def new_batch(counts: tuple[int, ...], weighted: bool = False, zipf: bool = False) -> Batch:
    """The bags of all tables. Some bags are empty, and a last bag may have most of the indices."""
    random = np.random.default_rng(int(torch.randint(1 << 31, ())))
    indices, offsets = [], []
    for rows, count in zip(ROWS, counts):
        own = random.zipf(1.2, count) % rows if zipf else random.integers(0, rows, count)
        starts = np.sort(random.integers(0, count + 1, random.integers(1, 60)))
        starts[:2] = 0
        indices.append(torch.from_numpy(own))
        offsets.append(torch.from_numpy(starts))
    samples = [torch.rand(count) for count in counts] if weighted else []
    return Batch(indices, offsets, samples, TABLES, False)


def sorting_of(batch: Batch, paddings: list[int], is_mean: bool) -> Sorting:
    found = Sorted(batch, paddings, [is_mean] * len(ROWS))
    memory = found._keys.view(-1)
    keys = []
    for t, address in enumerate(found.keys):
        begin = (int(address) - memory.data_ptr()) // 8
        keys.append(memory[begin : begin + int(found._counts[t, 0])].numpy().copy())
    factors = list(found._factors[:-1].split(batch.shape.bags.tolist())) if is_mean else []
    return Sorting(keys, factors, list(found._bags_of) if batch.sample_weights else [])


def bags_of(batch: Batch, t: int) -> Any:
    """The bag that each index of a table is in."""
    sizes = np.diff(batch._offsets[t].numpy(), append=len(batch._indices[t]))
    return np.repeat(np.arange(len(sizes)), sizes)


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("counts", [(7, 0, 1, 30), (6000, 50, 2000, 0), (70_000, 3, 16, 900)])
@pytest.mark.parametrize("padding", [-1, 0])
@pytest.mark.parametrize("kind", ["sum", "mean", "weighted"])
@pytest.mark.parametrize("zipf", [False, True])
def test_as_numpy(counts: tuple[int, ...], padding: int, kind: str, zipf: bool) -> None:
    batch = new_batch(counts, kind == "weighted", zipf)
    found = sorting_of(batch, [padding] * len(ROWS), kind == "mean")
    for t in range(len(ROWS)):
        rows, bags = batch._indices[t].numpy(), bags_of(batch, t)
        kept = np.flatnonzero(rows != padding)
        payload = kept if kind == "weighted" else bags[kept]
        order = np.argsort(rows[kept], kind="stable")
        assert np.array_equal(found.keys[t], rows[kept][order] << 32 | payload[order])
        if kind == "weighted":
            assert np.array_equal(found.bags_of[t].numpy()[kept], bags[kept])
        if kind == "mean":
            terms = np.bincount(bags[kept], minlength=int(batch.shape.bags[t]))
            wanted = np.float32(1) / np.maximum(terms, 1).astype(np.float32)
            assert np.array_equal(found.factors[t].numpy(), wanted)


def test_large_tables_are_cut() -> None:
    large, small = 1 << 20, 1 << 11
    for sizes, threads, parts in (
        ([large], 1, [1]),
        ([large], 2, [2]),
        ([large], 16, [16]),
        ([small], 16, [1]),
        ([small, large], 4, [1, 4]),
        ([large, large], 4, [2, 2]),
        ([large] * 26, 8, [1] * 26),
        ([], 8, []),
        ([0, 0], 8, [1, 1]),
    ):
        assert _bag_sorting.parts_of(np.array(sizes, np.int64), threads).tolist() == parts


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_threads_give_the_same_bits(optimizer: str) -> None:
    """The bits are equal even if several threads sort a table, and indices are very frequent."""
    count, width, rows = 1 << 19, 8, 20_000
    indices = torch.from_numpy(np.random.default_rng().zipf(1.3, count) % rows)
    offsets, grad = torch.arange(0, count, 16), torch.randn(count // 16, width)
    table = torch.randn(rows, width)

    def updated() -> Tensor:
        bag = torch.nn.EmbeddingBag.from_pretrained(table.clone(), freeze=False, mode="sum")
        merged = MergedEmbeddingBag([bag], optimizer, lr=0.1)
        merged([indices], [offsets])[0].backward(grad)
        return merged[0].weight.detach()

    first, *others = at_each_thread_count(updated)
    before = torch.get_num_threads()
    torch.set_num_threads(16)
    others.append(updated())
    torch.set_num_threads(before)
    assert not torch.equal(first, table)
    assert all(torch.equal(first, other) for other in others)
