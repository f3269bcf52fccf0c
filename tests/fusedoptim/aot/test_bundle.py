"""A bundle gives the kernels that were built, or says what is wrong with it."""

from __future__ import annotations

import functools
import io
import json
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedoptim import FusedAdam, aot
from fusedoptim.allocator import DeviceNotFoundError
from fusedoptim.aot import BundleError, _bundle, _warmup
from fusedoptim.launch.kernel import Kernel
from fusedoptim.launch.modules import shipped
from fusedoptim.raw import RawKernel


def altered(path: Path, changed: dict[str, bytes | None]) -> None:
    """Add or replace files in a bundle; None removes a file."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()} | changed
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            if content is not None:
                archive.writestr(name, content)


def with_manifest(path: Path, change: Callable[[Any], object]) -> None:
    manifest = json.loads(zipfile.ZipFile(path).read("manifest.json"))
    change(manifest)
    altered(path, {"manifest.json": json.dumps(manifest).encode()})


def test_kernels_by_name(built: Path) -> None:
    bundle = aot.load(built)
    assert bundle.names == ("saxpy", "twice", "sgd_f32")
    assert list(bundle) == list(bundle.names)
    assert len(bundle) == 3
    assert "twice" in bundle
    assert isinstance(bundle["twice"], RawKernel)
    assert repr(bundle) == f"<Bundle {built}: saxpy, twice, sgd_f32>"


def test_kernels_compute(built: Path) -> None:
    bundle = aot.load(built)
    x, y = torch.randn(1000), torch.randn(1000)
    expected = 2 * (y.double() + 0.5 * x.double())
    bundle["saxpy"](1024, 16, (1000, 0.5, x, y))
    bundle["twice"](1000, None, (y,))
    torch.testing.assert_close(y, expected.float())


def test_kernel_that_is_not_there(built: Path) -> None:
    with pytest.raises(KeyError, match="has no kernel 'thrice'; available: saxpy, twice, sgd_f32"):
        aot.load(built)["thrice"]


def test_loads_where_no_compiler_is(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise ImportError("no compiler is installed")

    monkeypatch.setattr("fusedoptim.raw._opencl_c.load_opencl_compiler", none)
    for name in ("fusedoptim.raw._python", "numba_dpex", "numba", "llvmlite"):
        monkeypatch.setitem(sys.modules, name, None)
    for kernel in aot.load(built).values():
        kernel.compile()


def test_same_sources_make_the_same_bytes(sources: list[Path], built: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.fob"
    aot.build(list(reversed(sources)), again)
    assert again.read_bytes() == built.read_bytes()


def test_manifest_says_where_modules_come_from(built: Path, sources: list[Path]) -> None:
    saxpy, sgd = aot.load(built).modules
    assert saxpy.kernels["saxpy"] == ["u32 n", "f32 a", "const f32 *x", "f32 *y"]
    assert (saxpy.kind, saxpy.source, saxpy.options) == ("OpenCL C", "saxpy.cl", [])
    assert list(saxpy.tools) == ["intel-opencl-rt"]
    assert (sgd.kind, sgd.source, sgd.tools) == ("SPIR-V", "sgd_f32.spv", {})
    assert sgd.spirv == sources[1].read_bytes()
    manifest = json.loads(zipfile.ZipFile(built).read("manifest.json"))
    assert manifest["abi"] == 1
    assert str(sources[0].parent) not in json.dumps(manifest)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.fob"):
        aot.load(tmp_path / "none.fob")


def test_interrupt_after_the_exchange(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = os.replace

    def interrupted(*arguments: Any) -> None:
        exchange(*arguments)
        raise KeyboardInterrupt

    modules = _bundle.read(copy)
    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _bundle.write(copy, modules)
    assert _bundle.read(copy) == modules


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


def test_files_that_cannot_be_read(copy: Path, tmp_path: Path) -> None:
    """The error is the one that ``open`` raises, which names the path."""
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        aot.load(tmp_path)
    if os.geteuid() != 0:  # root may read any file
        copy.chmod(0)
        with pytest.raises(PermissionError, match=str(copy)):
            aot.load(copy)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"manifest.json": b"[" * 100_000}, "a zip archive without a bundle's manifest"),
        ({"manifest.json": b"[]"}, "a zip archive without a bundle's manifest"),
        ({"saxpy.spv": b"other"}, r"saxpy\.spv in .* is not what was built: its SHA-256"),
        ({"saxpy.spv": None}, r"lacks saxpy\.spv"),
    ],
)
def test_other_files(copy: Path, changed: dict[str, bytes | None], message: str) -> None:
    altered(copy, changed)
    with pytest.raises(BundleError, match=message):
        aot.load(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda manifest: manifest.update(abi=0, fusedoptim="0.0.9"),
            r"has ABI 0, made by fusedoptim 0\.0\.9, .* reads ABI 1",
        ),
        (lambda manifest: manifest["modules"][0].pop("tools"), r"is damaged .*tools"),
        (
            lambda manifest: manifest["modules"][0]["kernels"].update(thrice=[]),
            r"damaged .*no kernel 'thrice'",
        ),
        *(
            (
                functools.partial(
                    lambda field, manifest: manifest["modules"][0].update({field: 7}), f
                ),
                r"the manifest\.json of .*/copy\.fob is damaged",
            )
            for f in ("kernels", "options", "tools", "kind", "ocloc", "binaries")
        ),
    ],
)
def test_other_manifests(copy: Path, change: Callable[[Any], object], message: str) -> None:
    with_manifest(copy, change)
    with pytest.raises(BundleError, match=message):
        aot.load(copy)


def test_verify(built: Path) -> None:
    assert aot.verify(built) == []


def test_verify_finds_another_signature(copy: Path) -> None:
    with_manifest(copy, lambda manifest: manifest["modules"][0]["kernels"].update(twice=["f64 x"]))
    (problem,) = aot.verify(copy)
    assert problem == (
        "twice: the SPIR-V has the parameters ['f32 *x'], and the manifest says ['f64 x']"
    )


def test_verify_of_a_damaged_file(copy: Path) -> None:
    copy.write_bytes(b"")
    (problem,) = aot.verify(copy)
    assert "truncated or damaged" in problem


def test_verify_reports_what_the_tools_say(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "spirv-val"
    tool.write_text("#!/bin/sh\necho 'error: line 7: bad' >&2\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    problems = aot.verify(built)
    assert problems == [
        "saxpy, twice: spirv-val: error: line 7: bad",
        "sgd_f32: spirv-val: error: line 7: bad",
    ]


def test_warmup_of_a_bundle(built: Path) -> None:
    bundle = aot.load(built)
    warmed = aot.warmup(bundle)
    assert [each.name for each in warmed] == list(bundle.names)
    assert all(bundle[name]._built for name in bundle)
    assert [each.name for each in aot.warmup(built)] == list(bundle.names)
    with pytest.raises(ValueError, match=r"load\(path, device='gpu'\)"):
        aot.warmup(bundle, device="gpu")


@pytest.mark.skipif(torch.xpu.is_available(), reason="there is an xpu")
def test_warmup_of_a_device_that_torch_lacks(built: Path) -> None:
    for bundle in (None, built):
        with pytest.raises(DeviceNotFoundError, match=r"'xpu' is not among .* \(none\); inst"):
            aot.warmup(bundle, device="xpu")


def test_warmup_of_the_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It builds what is shipped: here only Adam's, as the doctor's tests build each kernel."""
    ours = [(kernel, dtype) for kernel, dtype in shipped() if kernel == "adam"]
    assert ("adam", "f32") in ours
    monkeypatch.setattr(_warmup, "shipped", lambda: ours)
    assert [each.name for each in aot.warmup()] == [f"{kernel}_{dtype}" for kernel, dtype in ours]
    param = torch.nn.Parameter(torch.ones(10))
    param.grad = torch.ones(10)
    monkeypatch.delattr(Kernel, "__init__")  # makes a step that compiles fail
    FusedAdam([param]).step()
