"""A bundle gives the kernels that were built, or says what is wrong with it."""

from __future__ import annotations

import functools
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


def test_iterators(sources: list[Path], tmp_path: Path) -> None:
    """Options from an iterator are those of every source."""
    given, path = ["-cl-fast-relaxed-math"], tmp_path / "kernels.fob"
    chosen = [source for source in sources if source.suffix == ".cl"]
    aot.build(chosen, path, options=given)
    expected = path.read_bytes()
    aot.build(iter(chosen), path, options=iter(given))  # type: ignore[arg-type]  # what users may pass
    assert path.read_bytes() == expected
    with pytest.raises(ValueError, match="sources is empty"):
        aot.build(iter([]), path)  # type: ignore[arg-type]  # as above


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


def test_permissions_and_links(copy: Path) -> None:
    """As ``open`` does: the umask is for new files, others keep theirs, and links are followed."""
    modules, new, link = _bundle.read(copy), copy.with_name("new.fob"), copy.with_name("link.fob")
    link.symlink_to("new.fob")
    mask = os.umask(0o077)
    try:
        _bundle.write(link, modules)
        assert new.stat().st_mode & 0o777 == 0o600
        new.chmod(0o664)
        _bundle.write(link, modules)
    finally:
        os.umask(mask)
    assert new.stat().st_mode & 0o777 == 0o664
    assert link.is_symlink()
    assert _bundle.read(new) == modules
    assert {path.name for path in copy.parent.iterdir()} == {"copy.fob", "link.fob", "new.fob"}


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
