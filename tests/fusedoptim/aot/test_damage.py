"""A damaged bundle is refused, or gives the modules that were built."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedoptim import aot
from fusedoptim.aot import BundleError, _bundle


@pytest.mark.parametrize("size", [0, 10, 1000, -30])
def test_truncated(copy: Path, size: int) -> None:
    copy.write_bytes(copy.read_bytes()[:size])
    with pytest.raises(
        BundleError, match=r"is not a bundle, or is truncated or damaged .*aot build"
    ):
        aot.load(copy)


def test_flipped_bit_in_a_module(copy: Path) -> None:
    content = bytearray(copy.read_bytes())
    content[content.index(b"\x03\x02\x23\x07") + 100] ^= 1
    copy.write_bytes(content)
    with pytest.raises(BundleError, match=r"damaged .*CRC"):
        aot.load(copy)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of 1.4 kB with one kernel and stand-in machine code."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "f.cl").write_text("kernel void f(global float *x) { x[0] = 1; }")
    aot.build([folder / "f.cl"], folder / "f.fob")
    (module,) = _bundle.read(folder / "f.fob")
    _bundle.write(folder / "f.fob", [module._replace(binaries={"skl": b"machine code"})])
    return folder / "f.fob"


def repacked(path: Path, compression: int) -> bytes:
    """The bytes of a bundle that another program has packed with compression."""
    packed = io.BytesIO()
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(packed, "w", compression) as other:
        for name in archive.namelist():
            other.writestr(name, archive.read(name))
    return packed.getvalue()


def assert_refused_or_the_same(damaged: bytes, path: Path, expected: list[Any]) -> None:
    path.write_bytes(damaged)
    try:
        found = aot.load(path).modules
    except BundleError as error:
        assert str(path) in str(error)  # noqa: PT017  # some bits are of dates, which nobody reads
    else:
        assert found == expected


def test_any_flipped_bit(small: Path, tmp_path: Path) -> None:
    """Flip each bit of the headers and the index, and one bit in each byte of the contents."""
    content = small.read_bytes()
    expected = aot.load(small).modules
    held: set[int] = set()
    with zipfile.ZipFile(small) as archive:
        for entry in archive.infolist():
            start = entry.header_offset + zipfile.sizeFileHeader + len(entry.filename)
            held.update(range(start, start + entry.file_size))
    for i in range(len(content)):
        bits = [int(torch.randint(8, ()))] if i in held else range(8)
        for bit in bits:
            damaged = bytearray(content)
            damaged[i] ^= 1 << bit
            assert_refused_or_the_same(bytes(damaged), tmp_path / "damaged.fob", expected)
            if i in held:
                with pytest.raises(BundleError, match=r"damaged .*CRC"):
                    aot.load(tmp_path / "damaged.fob")


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_flipped_bits_of_a_repacked_bundle(small: Path, tmp_path: Path, compression: int) -> None:
    content = repacked(small, compression)
    expected = aot.load(small).modules
    path = tmp_path / "damaged.fob"
    path.write_bytes(content)
    assert aot.load(path).modules == expected
    for place in torch.randperm(8 * len(content))[:500].tolist():
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        assert_refused_or_the_same(bytes(damaged), path, expected)


def test_other_damage(small: Path, tmp_path: Path) -> None:
    """A bundle that is cut, overwritten, moved or extended is refused or loads the same modules."""
    content = small.read_bytes()
    expected = aot.load(small).modules
    size = len(content)
    for start in torch.randperm(size)[:100].tolist():
        for damaged in (
            content[:start],
            content[start:],
            content[:start] + bytes(64) + content[start + 64 :],
            content[:start] + content[start + 64 :],
            content[:start] + content[: size - start],
            content + content[start:],
        ):
            assert_refused_or_the_same(damaged, tmp_path / "damaged.fob", expected)
