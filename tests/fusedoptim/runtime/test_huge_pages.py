"""use_huge_pages(): what is moved, that nothing else changes, and what Linux refuses."""

from __future__ import annotations

import copy
import errno
import os
import re
import types
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fusedoptim import FusedAdagrad
from fusedoptim.nn import MergedEmbeddingBag
from fusedoptim.runtime import huge_pages, use_huge_pages

MIB = 1 << 20
SIZE = 8 * MIB
"""Of a tensor, in bytes. It has three or four huge pages."""

pytestmark = pytest.mark.filterwarnings("error")
can_move = pytest.mark.skipif(not huge_pages.can_move_pages(), reason="needs Linux 6.1")


def table() -> Tensor:
    return torch.randn(SIZE // 4)


def huge_bytes(tensor: Tensor) -> int:
    """How many bytes of the mapping in which a tensor lies are in huge pages."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            first, end = (int(bound, 16) for bound in bounds.groups())
            is_inside = first <= tensor.data_ptr() < end
        elif is_inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the tensor is in no mapping")


@can_move
def test_in_place() -> None:
    tensor = table()
    values, address = tensor.clone(), tensor.data_ptr()
    moved = use_huge_pages(tensor)
    assert moved in (6 * MIB, 8 * MIB)
    assert huge_bytes(tensor) >= moved
    assert tensor.data_ptr() == address
    assert torch.equal(tensor, values)
    assert use_huge_pages(tensor, tensor[5:], tensor) == moved


@can_move
def test_unwritten_memory() -> None:
    tensor = torch.zeros(64 * MIB)  # so large that Linux gives the zeros
    assert use_huge_pages(tensor) >= 252 * MIB
    assert not tensor.any()


@can_move
@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_merged_bags(name: str) -> None:
    """The next steps have the same bits as without the call."""
    bags = [torch.nn.EmbeddingBag(SIZE // 64 // 4, 64, mode="sum") for _ in range(2)]
    one, other = (
        MergedEmbeddingBag.from_embedding_bags(own, optimizer=name, lr=0.1)
        for own in (copy.deepcopy(bags), bags)
    )
    moved = use_huge_pages(one, one.optimizer())
    states = 2 if name == "adagrad" else 1
    assert 2 * 6 * MIB * states <= moved <= 2 * 8 * MIB * states
    indices = [torch.randint(bag.num_embeddings, (100,)) for bag in bags]
    for _ in range(2):
        for merged in (one, other):
            sum(bag.square().sum() for bag in merged(indices, [torch.arange(100)] * 2)).backward()
    for a, b in zip(one, other):
        assert torch.equal(a.weight, b.weight)


@can_move
def test_optimizer() -> None:
    """Its state and its parameters."""
    param = table().requires_grad_()
    moved = use_huge_pages(FusedAdagrad([param]))
    assert 2 * 6 * MIB <= moved <= 2 * 8 * MIB


def test_what_has_no_huge_page() -> None:
    assert use_huge_pages() == 0
    assert use_huge_pages(torch.ones(()), torch.empty(0), torch.nn.Linear(4, 4)) == 0
    assert use_huge_pages(torch.nn.Linear(4096, 4096, device="meta")) == 0


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        (torch.ones(4, device="meta"), ValueError, "a tensor on meta with layout torch.strided"),
        (torch.ones(4).to_sparse(), ValueError, "a tensor on cpu with layout torch.sparse_coo"),
        ([torch.ones(4)], TypeError, r"list is not a tensor.* use_huge_pages\(\*tensors\)"),
        (None, TypeError, "NoneType is not a tensor, module or optimizer"),
    ],
)
def test_other_targets(target: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"use_huge_pages: {message}"):
        use_huge_pages(target)  # type: ignore[arg-type]  # what is refused


def test_linux_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses an advice that it does not know."""
    system = types.SimpleNamespace(sysname="Linux", release="5.15.0-generic")
    monkeypatch.setattr(os, "uname", lambda: system)
    monkeypatch.setattr(huge_pages, "_MADV_COLLAPSE", 1000)
    message = r"left (\d) of \1 MiB in small pages: Linux 5.15.0-generic cannot.*THP_MEM_ALLOC"
    with pytest.warns(RuntimeWarning, match=message) as caught:
        assert use_huge_pages(table()) == 0
    assert caught[0].filename == __file__


@can_move
def test_none_free(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = table()
    first, *_ = addresses = list(huge_pages._pages(tensor.untyped_storage()))
    advise = huge_pages._advise
    monkeypatch.setattr(
        huge_pages,
        "_advise",
        lambda address, *given: errno.ENOMEM if address == first else advise(address, *given),
    )
    with pytest.warns(RuntimeWarning, match=r"left 2 of \d MiB .*'Cannot allocate memory'; free"):
        assert use_huge_pages(tensor) == (len(addresses) - 1) * 2 * MIB


@can_move
def test_mapped_file(tmp_path: Path) -> None:
    torch.save(table(), tmp_path / "table.pt")
    tensor = torch.load(tmp_path / "table.pt", mmap=True)
    values = tensor.clone()
    with pytest.warns(
        RuntimeWarning, match="Linux cannot move those of a mapped file; pass copies"
    ):
        assert use_huge_pages(tensor) == 0
    assert torch.equal(tensor, values)
    assert use_huge_pages(values) >= 6 * MIB
