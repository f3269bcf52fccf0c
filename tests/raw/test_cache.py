"""The disk cache: what it keeps, what it notices, and where it cannot be."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

from fusedoptim.launch import cache
from fusedoptim.launch.cache import cached
from fusedoptim.raw import RawKernel, kernel

PARTS = ("kind", "source")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "cache"
    monkeypatch.setenv("FUSEDOPTIM_CACHE_DIR", str(place))
    return place


class Builds:
    def __init__(self, module: bytes = b"module") -> None:
        self.count = 0
        self.module = module

    def __call__(self) -> bytes:
        self.count += 1
        return self.module


def test_built_once(place: Path) -> None:
    build = Builds()
    for _ in range(3):
        assert cached(PARTS, build) == b"module"
    assert build.count == 1
    cached(("kinds", "ource"), build)  # other parts, though the same characters
    assert build.count == 2
    assert [path.suffix for path in place.iterdir()] == [".spvcache"] * 2


def test_kernels_are_kept_by_source_and_options(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    compile_now = kernel.compile_opencl_c

    def counting(source: str, options: tuple[str, ...]) -> bytes:
        compiled.append(options)
        return compile_now(source, options)

    monkeypatch.setattr(kernel, "compile_opencl_c", counting)
    text = "kernel void kept(global int *x) { x[0] = N; }"
    for _ in range(2):
        kernel._shared.cache_clear()  # as in another process
        for options in (("-DN=1",), ("-DN=2",)):
            RawKernel(text, options=options).compile()
    assert compiled == [("-DN=1",), ("-DN=2",)]
    monkeypatch.setattr(kernel, "compiler_version", lambda: "another")
    kernel._shared.cache_clear()
    RawKernel(text, options=("-DN=1",)).compile()
    assert len(compiled) == 3
    assert RawKernel(text, options=("-DN=1",)).spirv is RawKernel(text, options=["-DN=1"]).spirv


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: content + b"more",
        lambda content: b"another version\n" + content,
        lambda content: content.replace(b"module", b"modulo"),
    ],
)
def test_damaged_files_are_made_again(place: Path, damage) -> None:
    build = Builds()
    cached(PARTS, build)
    (path,) = place.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(RuntimeWarning, match=f"{path.name} is truncated or damaged"):
        assert cached(PARTS, build) == b"module"
    assert cached(PARTS, build) == b"module"
    assert build.count == 2


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("FUSEDOPTIM_CACHE_DIR", str(tmp_path / "file" / "cache"))
    build = Builds()
    with pytest.warns(RuntimeWarning, match="cannot be kept in .*set FUSEDOPTIM_CACHE_DIR"):
        assert cached(PARTS, build) == b"module"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it warns once
        assert cached(PARTS, build) == b"module"
    assert build.count == 2


def test_a_write_that_fails_leaves_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        cached(PARTS, Builds())
    assert not list(place.iterdir())


def test_an_interrupt_after_the_exchange(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = os.replace

    def interrupted(*args: str) -> None:
        exchange(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(cache.os, "replace", interrupted)
    build = Builds()
    with pytest.raises(KeyboardInterrupt):
        cached(PARTS, build)
    assert cached(PARTS, build) == b"module"
    assert build.count == 1


def test_the_longest_unused_go_first(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LIMIT", 3 * 1200)
    builds = [Builds(bytes(1000)) for _ in range(4)]
    for i in range(3):
        cached((str(i),), builds[i])
        (newest,) = set(place.iterdir()) - {p for p in place.iterdir() if p.stat().st_mtime < 100}
        os.utime(newest, (i + 1, i + 1))
    cached(("0",), builds[0])  # used again
    cached(("3",), builds[3])
    for i in (0, 2, 3, 1):
        cached((str(i),), builds[i])
    assert [build.count for build in builds] == [1, 2, 1, 1]


def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of/mine")
    monkeypatch.delenv("FUSEDOPTIM_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.folder() == Path("/home/of/mine/.cache/fusedoptim")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache.folder() == Path("/caches/fusedoptim")
    monkeypatch.setenv("FUSEDOPTIM_CACHE_DIR", "/kernels")
    assert cache.folder() == Path("/kernels")
    monkeypatch.setenv("FUSEDOPTIM_CACHE_DIR", "")
    assert cache.folder() is None
    build = Builds()
    assert cached(PARTS, build) == cached(PARTS, build) == b"module"
    assert build.count == 2
