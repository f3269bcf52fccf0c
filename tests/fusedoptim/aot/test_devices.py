"""Machine code for Intel GPUs where ocloc is installed, and the errors where it is not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fusedoptim import aot
from fusedoptim.aot import DeviceError, _devices

needs_ocloc = pytest.mark.skipif(
    shutil.which("ocloc") is None, reason="ocloc: apt install intel-opencl-icd"
)


@needs_ocloc
def test_machine_code_for_each_device(sources: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "x.fob"
    compiled = aot.build(sources[1:], output, devices="skl, dg2,pvc:")
    assert [each.target for each in compiled] == ["SPIR-V", "skl", "dg2", "pvc:"]
    (module,) = aot.load(output).modules
    assert {name: file[:4] for name, file in module.binaries.items()} == {
        "skl": b"\x7fELF",
        "dg2": b"\x7fELF",
        "pvc:": module.binaries["pvc:"][:4],  # one file, or several if several devices are newer
    }
    assert [len(module.binaries[each.target]) for each in compiled[1:]] == [
        each.size for each in compiled[1:]
    ]
    assert module.ocloc == _devices.ocloc_version()
    again = tmp_path / "again.fob"
    aot.build(sources[1:], again, devices=["pvc:", "dg2", "skl"])
    assert again.read_bytes() == output.read_bytes()


@needs_ocloc
@pytest.mark.parametrize("device", ["rtx4090", "skl:rtx4090", ":", "", "-file"])
def test_unknown_device(device: str, sources: list[Path], tmp_path: Path) -> None:
    with pytest.raises(
        DeviceError, match=r"ocloc does not know the device .*; it knows .*skl.*pvc"
    ):
        aot.build(sources, tmp_path / "x.fob", devices=["skl", device])
    assert not list(tmp_path.iterdir())


@needs_ocloc
def test_device_for_which_it_does_not_compile(tmp_path: Path) -> None:
    source = tmp_path / "half.cl"
    source.write_text("kernel void half_of(global double *x) { x[get_global_id(0)] /= 2; }")
    with pytest.raises(DeviceError, match=r"for 'dg2':\n[\s\S]*Double .*[\s\S]*IGC_EnableDP"):
        aot.build([source], tmp_path / "x.fob", devices="dg2")
    assert list(tmp_path.iterdir()) == [source]


def test_without_ocloc(
    sources: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    _devices.known_devices.cache_clear()
    with pytest.raises(DeviceError, match="not installed: apt install intel-opencl-icd"):
        aot.build(sources, tmp_path / "x.fob", devices="skl")
