"""``python -m fusedoptim aot``, as the command line's own parser runs it."""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fusedoptim.aot import _command


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    _command.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["aot", *map(str, arguments)])
    status: int = parsed.run(parsed)
    return status


def said_to_be_compressed(content: bytes) -> bytes:
    """A bundle whose first file is not compressed, and whose index says that it is."""
    method = content.index(b"PK\1\2") + 10
    return content[:method] + b"\x08" + content[method + 1 :]


def test_build_list_verify_warmup(
    sources: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "mine.fob"
    devices = ["--devices", "skl"] if shutil.which("ocloc") else []
    assert run("build", sources[0], "-o", output, "--options=-DFACTOR=2 -w", *devices) == 0
    table = capsys.readouterr().out
    assert re.search(r"^saxpy, twice +SPIR-V +[\d,]+ +\d+$", table, re.MULTILINE)
    assert bool(re.search(r"^saxpy, twice +skl +[\d,]+ +\d+$", table, re.MULTILINE)) == bool(
        devices
    )
    assert run("list", output) == 0
    table = capsys.readouterr().out
    assert "u32 n, f32 a, const f32 *x, f32 *y  saxpy.cl -DFACTOR=2 -w" in table
    assert run("verify", output) == 0
    assert capsys.readouterr().out == f"{output}: ok\n"
    assert run("warmup", output) == 0
    assert re.search(r"^saxpy +\d+\.\d$", capsys.readouterr().out, re.MULTILINE)


def test_verify_fails(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy.write_bytes(copy.read_bytes()[:-1])
    assert run("verify", copy) == 1
    captured = capsys.readouterr()
    assert captured.out == f"{copy}: 1 problem\n"
    assert "truncated" in captured.err


@pytest.mark.parametrize("command", ["list", "verify", "warmup"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: b"", "is not a bundle"),
        (lambda content: content[::-1], "is not a bundle"),
        (said_to_be_compressed, "is not a bundle"),
        (None, "Is a directory"),
    ],
)
def test_damaged_bundles(
    command: str,
    damage: Callable[[bytes], bytes] | None,
    message: str,
    copy: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if damage is None:
        copy.unlink()
        copy.mkdir()
    else:
        copy.write_bytes(damage(copy.read_bytes()))
    assert run(command, copy) == 1
    error = capsys.readouterr().err
    assert message in error
    assert str(copy) in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("build", "none.cl", "-o", "x.fob"), "none.cl"),
        (("build", "wrong.cl", "-o", "x.fob"), "undeclared identifier 'y'"),
        (("list", "none.fob"), "none.fob"),
        (("warmup", "wrong.cl"), "is not a bundle"),
        (("verify", "none.fob"), "none.fob"),
    ],
)
def test_errors_are_printed(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wrong.cl").write_text("kernel void f(global int *x) { x[0] = y; }")
    assert run(*arguments) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err


def test_nothing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run()
    assert "<command>" in capsys.readouterr().err
