"""Pages released during a conversion: only if nothing else uses them, and no value is lost."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fusedoptim import allocator
from fusedoptim.split import halves as split_halves
from fusedoptim.split import pages
from fusedoptim.split.pages import CHUNK, has_sole_owner, release_pages
from transforms.rewrites import residues

SHAPE = (3, CHUNK + 100)


def _param() -> nn.Parameter:
    return nn.Parameter(torch.randn(SHAPE))


def test_alone() -> None:
    param = _param()
    assert has_sole_owner(param)
    assert has_sole_owner(param)
    param.sum().backward()
    assert has_sole_owner(param)


HOLDERS: dict[str, Callable[[nn.Parameter], Any]] = {
    "detached": lambda p: p.detach(),
    "data": lambda p: p.data,
    "view": lambda p: p[1],
    "state_dict": lambda p: nn.ParameterDict({"p": p}).state_dict(),
    "storage": lambda p: p.untyped_storage(),
    "numpy": lambda p: p.detach().numpy(),
    "dlpack": lambda p: p.detach().__dlpack__(),
    "graph": lambda p: (p.detach().requires_grad_() * torch.ones(SHAPE, requires_grad=True)).sum(),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_held_by(holder: str) -> None:
    param = _param()
    held = HOLDERS[holder](param)
    assert not has_sole_owner(param)
    del held
    gc.collect()
    assert has_sole_owner(param) or holder == "numpy"  # torch may still count numpy's use


OTHERS: dict[str, Callable[[Path], Tensor]] = {
    "numpy's": lambda _: torch.from_numpy(np.zeros(SHAPE, np.float32)),
    "a buffer's": lambda _: torch.frombuffer(bytearray(8 * CHUNK), dtype=torch.float32),
    "a file's": lambda path: torch.from_file(
        str(path / "file"), shared=True, size=2 * CHUNK, dtype=torch.float32
    ),
    "shared": lambda _: torch.zeros(SHAPE).share_memory_(),
    "the pool's": lambda _: allocator.default_pool("cpu").zeros(SHAPE, torch.float32),
    "part of another's": lambda _: torch.zeros(2, *SHAPE)[0],
    "small": lambda _: torch.zeros(100),
    "on no device": lambda _: torch.zeros(SHAPE, device="meta"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_memory_of_others(other: str, tmp_path: Path) -> None:
    assert not has_sole_owner(OTHERS[other](tmp_path))


def test_without_torchs_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's use count is private, and may be removed."""
    monkeypatch.setattr(pages, "storage_use_count", None)
    pages._madvise.cache_clear()
    assert not has_sole_owner(_param())
    monkeypatch.undo()
    pages._madvise.cache_clear()
    assert has_sole_owner(_param())


def test_the_neighbours_stay() -> None:
    values = torch.ones(CHUNK)
    release_pages(values[1000:-1000])
    assert values[:1000].eq(1).all()
    assert values[-1000:].eq(1).all()
    values.fill_(2)  # the memory can still be written
    assert values.eq(2).all()


def _residues_inverse(halves: Any) -> Tensor:
    return residues.join(*halves)


CONVERSIONS: dict[str, tuple[Callable[[Tensor, bool], Any], Callable[[Any], Tensor]]] = {
    "halves": (split_halves.halves_of, lambda pair: split_halves.join(*pair)),
    "bfloat16": (lambda v, u: residues.split(v, torch.bfloat16, u), _residues_inverse),
    "float16": (lambda v, u: residues.split(v, torch.float16, u), _residues_inverse),
}
each_conversion = pytest.mark.parametrize("conversion", CONVERSIONS)


def _odd_values() -> Tensor:
    """Values of which some are not exact in 16 bits and a residue of 16 bits."""
    values = torch.randn(SHAPE)
    values[:, ::1000] = torch.tensor(1 + 2.0**-8)  # halfway between two bfloat16 numbers
    values[:, 7::1000] = 1e-7
    values[:, 9::1000] = float("inf")
    return values


@each_conversion
@pytest.mark.parametrize("is_used_up", [False, True])
def test_right(conversion: str, is_used_up: bool) -> None:
    convert, inverse = CONVERSIONS[conversion]
    values = _odd_values()
    expected = values.clone()
    result = convert(values, is_used_up)
    assert torch.equal(inverse(result), expected)
    assert torch.equal(values, expected) != is_used_up


@each_conversion
def test_interrupted(conversion: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The values are restored after an interrupt."""
    convert, _ = CONVERSIONS[conversion]
    values = _odd_values()
    expected = values.clone()
    pieces: list[Tensor] = []

    def interrupted(piece: Tensor) -> None:
        release_pages(piece)
        pieces.append(piece)
        if len(pieces) == 2:
            raise KeyboardInterrupt

    for module in ("fusedoptim.split.halves", "transforms.rewrites.residues"):
        monkeypatch.setattr(f"{module}.release_pages", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(values, True)
    assert torch.equal(values, expected)
    assert values.numel() > 2 * CHUNK


@each_conversion
def test_layouts(conversion: str) -> None:
    convert, inverse = CONVERSIONS[conversion]
    for values in (
        torch.randn(SHAPE).t(),
        torch.randn(2, 3, 300, 300).to(memory_format=torch.channels_last),
        torch.randn(SHAPE)[:, ::2],
        torch.randn(1, SHAPE[1]).expand(SHAPE),
    ):
        expected = values.clone()
        assert torch.equal(inverse(convert(values, True)), expected)
