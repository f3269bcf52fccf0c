"""Building bundles: what is compiled, and what is refused before anything is written."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from fusedoptim import aot
from fusedoptim.raw import InvalidModuleError, KernelCompileError

HAS_COMPILER = importlib.util.find_spec("numba_dpex") is not None
SQUARE = """
from __future__ import annotations
from dataclasses import dataclass
from neighbour import power
from fusedoptim.raw.language import Float32, Global, global_id

@dataclass
class Unused:
    size: int = 4

def square(x: Global[Float32]) -> None:
    i = global_id()
    x[i] = power(x[i])
"""


def test_options_reach_the_compiler(sources: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "x.fob"
    aot.build(sources[:1], output, options=["-DFACTOR=3", "-cl-mad-enable"])
    bundle = aot.load(output)
    y = torch.zeros(4)
    bundle["saxpy"](4, None, (4, 1.0, torch.ones(4), y))
    assert y.tolist() == [3.0] * 4
    assert bundle.modules[0].options == ["-DFACTOR=3", "-cl-mad-enable"]
    assert bundle["saxpy"].options == ("-cl-mad-enable",)


def test_what_was_compiled_is_returned(sources: list[Path], tmp_path: Path) -> None:
    compiled = aot.build(sources, tmp_path / "x.fob")
    assert [(each.kernels, each.target) for each in compiled] == [
        (("saxpy", "twice"), "SPIR-V"),
        (("sgd_f32",), "SPIR-V"),
    ]
    assert compiled[1].size == sources[1].stat().st_size
    assert all(each.seconds > 0 for each in compiled)


def test_python(tmp_path: Path) -> None:
    (tmp_path / "square.py").write_text(SQUARE)
    (tmp_path / "neighbour.py").write_text("def power(x):\n    return x * x\n")
    output = tmp_path / "x.fob"
    source = f"{tmp_path / 'square.py'}:square"
    if not HAS_COMPILER:
        with pytest.raises(ImportError, match="numba-dpex is not installed"):
            aot.build([source], output)
        return
    aot.build([source], output)
    bundle = aot.load(output)
    x = torch.tensor([2.0, 3.0])
    bundle["square"](2, None, (x,))
    assert x.tolist() == [4.0, 9.0]
    (module,) = bundle.modules
    assert (module.kind, module.source) == ("Python", "square.py:square")
    assert module.tools["numba-dpex"] == "0.23.0"
    assert aot.verify(output) == []


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("kernel.txt", ValueError, r"is not a \.cl or \.spv file, module\.py:function"),
        ("kernel.py", ValueError, r"is not a \.cl or \.spv file, module\.py:function"),
        ("a folder:f", ValueError, r"is not a \.cl or \.spv file"),
        ("none.cl", FileNotFoundError, r"none\.cl"),
        ("none.py:f", FileNotFoundError, r"there is no file .*none\.py"),
        ("no_such_package:f", ModuleNotFoundError, "no_such_package"),
        ("math:cosinus", ValueError, "math has no function 'cosinus'"),
        ("latin.cl", ValueError, r"latin\.cl is not UTF-8 text"),
        ("empty.spv", InvalidModuleError, "not a SPIR-V module"),
        ("wrong.cl", KernelCompileError, "undeclared identifier"),
    ],
)
def test_bad_source(
    source: str,
    error: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("latin.cl").write_bytes("// é".encode("latin-1"))
    Path("empty.spv").write_bytes(b"")
    Path("wrong.cl").write_text("kernel void f(global int *x) { x[0] = y; }")
    with pytest.raises(error, match=message):
        aot.build([source], "x.fob")
    assert not list(tmp_path.glob("x.fob*"))


def test_no_sources(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sources is empty"):
        aot.build([], tmp_path / "x.fob")


@pytest.mark.parametrize("source", ["lion.cl", Path("lion.cl")])
def test_one_source_without_a_list(source: object, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"lion\.cl'\)? is one source; pass a list, \["):
        aot.build(source, tmp_path / "x.fob")  # type: ignore[arg-type]


def test_options_that_a_source_has_not(sources: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="SPIR-V has no option '-DN=4'"):
        aot.build(sources, tmp_path / "x.fob", options=["-DN=4"])


def test_output_of_another_kind(sources: list[Path]) -> None:
    with pytest.raises(ValueError, match=r"is not a \.fob file"):
        aot.build(sources, sources[0])
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        aot.build(sources, sources[0] / "no" / "x.fob")


def test_one_name_in_two_sources(sources: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other.cl"
    other.write_text(sources[0].read_text())
    with pytest.raises(ValueError, match=r"both saxpy\.cl and other\.cl have a kernel 'saxpy'"):
        aot.build([sources[0], other], tmp_path / "x.fob")


def test_failed_write_leaves_the_old_bundle(copy: Path, sources: list[Path]) -> None:
    before = copy.read_bytes()
    with pytest.raises(KernelCompileError):
        aot.build(sources[:1], copy, options=["-DFACTOR=nothing"])
    assert copy.read_bytes() == before
    assert list(copy.parent.iterdir()) == [copy]
