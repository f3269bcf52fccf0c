"""The disk cache: what it keeps, what it notices, and where it cannot be."""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fusedoptim.launch import cache
from fusedoptim.launch.cache import cached
from fusedoptim.raw import RawKernel, _sources
from tests.running import in_fork

PARTS = ("kind", "source")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "cache"
    monkeypatch.setenv("FUSEDOPTIM_CACHE_DIR", str(place))
    return place


def new_build(module: bytes = b"module") -> mock.Mock:
    """A function that makes a module, and counts its calls."""
    return mock.Mock(return_value=module)


def test_built_once(place: Path) -> None:
    build = new_build()
    for _ in range(3):
        assert cached(PARTS, build) == b"module"
    assert build.call_count == 1
    cached(("kinds", "ource"), build)  # different parts with the same characters
    assert build.call_count == 2
    assert [path.suffix for path in place.iterdir()] == [".spvcache"] * 2


def test_kernels_are_kept_by_source_and_options(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    compile_now = _sources.compile_opencl_c

    def counting(source: str, options: tuple[str, ...]) -> bytes:
        compiled.append(options)
        return compile_now(source, options)

    monkeypatch.setattr(_sources, "compile_opencl_c", counting)
    text = "kernel void kept(global int *x) { x[0] = N; }"
    for _ in range(2):
        _sources._shared.cache_clear()  # as in another process
        for options in (("-DN=1",), ("-DN=2",)):
            RawKernel(text, options=options).compile()
    assert compiled == [("-DN=1",), ("-DN=2",)]
    monkeypatch.setattr(_sources, "compiler_version", lambda: "another")
    _sources._shared.cache_clear()
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
    build = new_build()
    cached(PARTS, build)
    (path,) = place.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(RuntimeWarning, match=f"{path.name} is truncated or damaged"):
        assert cached(PARTS, build) == b"module"
    assert cached(PARTS, build) == b"module"
    assert build.call_count == 2


def test_a_damaged_file_where_warnings_are_errors(place: Path) -> None:
    build = new_build()
    cached(PARTS, build)
    (path,) = place.iterdir()
    path.write_bytes(b"")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="truncated or damaged"):
            cached(PARTS, build)
        assert cached(PARTS, build) == b"module"
    assert build.call_count == 2


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("FUSEDOPTIM_CACHE_DIR", str(tmp_path / "file" / "cache"))
    build = new_build()
    with pytest.warns(RuntimeWarning, match="cannot be kept in .*set FUSEDOPTIM_CACHE_DIR"):
        assert cached(PARTS, build) == b"module"
    assert cached(PARTS, build) == b"module"  # it warns once
    assert build.call_count == 2


def test_a_write_that_fails_leaves_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        cached(PARTS, new_build())
    assert not list(place.iterdir())


def test_what_a_killed_process_left_unfinished(place: Path) -> None:
    place.mkdir(mode=0o700)
    old, new, foreign = (place / f"{name}.tmp" for name in ("a.spvcache.1", "b.spvcache.2", "c"))
    for path in (old, new, foreign):
        path.touch()
    for path in (old, foreign):
        os.utime(path, (1, 1))
    cached(PARTS, new_build())
    assert not old.exists()
    assert new.exists()
    assert foreign.exists()


@pytest.mark.parametrize("depth", [0, 3])
def test_warnings_name_the_line_of_the_user(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """Warnings name the user's line however many functions of the package lie between."""
    _sources._shared.cache_clear()

    def use() -> None:
        cached(PARTS, new_build()) if depth == 0 else RawKernel(
            "kernel void f(global int *x) { int unused; x[0] = 1; }"
        ).compile()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        use()
    for path in place.iterdir():
        path.write_bytes(b"")
    _sources._shared.cache_clear()
    with pytest.warns(RuntimeWarning, match="truncated or damaged") as damaged:
        use()
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUSEDOPTIM_CACHE_DIR", str(tmp_path / "file" / f"cache {depth}"))
    _sources._shared.cache_clear()
    with pytest.warns(RuntimeWarning, match="cannot be kept") as unkept:
        use()
    assert {warning.filename for warning in [*damaged, *unkept]} == {__file__}


def test_an_interrupt_after_the_exchange(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = os.replace

    def interrupted(*args: Any, **kwargs: Any) -> None:
        exchange(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(cache.os, "replace", interrupted)
    build = new_build()
    with pytest.raises(KeyboardInterrupt):
        cached(PARTS, build)
    assert cached(PARTS, build) == b"module"
    assert build.call_count == 1


def test_the_longest_unused_go_first(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LIMIT", 3 * 1200)
    builds = [new_build(bytes(1000)) for _ in range(4)]
    for i in range(3):
        cached((str(i),), builds[i])
        (newest,) = set(place.iterdir()) - {p for p in place.iterdir() if p.stat().st_mtime < 100}
        os.utime(newest, (i + 1, i + 1))
    cached(("0",), builds[0])  # used again
    cached(("3",), builds[3])
    for i in (0, 2, 3, 1):
        cached((str(i),), builds[i])
    assert [build.call_count for build in builds] == [1, 2, 1, 1]


def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of/mine")
    monkeypatch.delenv("FUSEDOPTIM_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.folder() == Path("/home/of/mine/.cache/fusedoptim")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache.folder() == Path("/caches/fusedoptim")
    monkeypatch.setenv("FUSEDOPTIM_CACHE_DIR", "/kernels")
    assert cache.folder() == Path("/kernels")
    monkeypatch.setenv("FUSEDOPTIM_CACHE_DIR", "~/kernels")  # no shell expands it in a unit file
    assert cache.folder() == Path("/home/of/mine/kernels")
    monkeypatch.setenv("FUSEDOPTIM_CACHE_DIR", "")
    assert cache.folder() is None
    build = new_build()
    assert cached(PARTS, build) == cached(PARTS, build) == b"module"
    assert build.call_count == 2


def check_home_is_unknown(text: str) -> None:
    place = Path(text)
    with pytest.warns(RuntimeWarning, match=f"in {text} .*home folder is unknown.*CACHE_DIR"):
        assert cached(PARTS, new_build(), on_write_failure=lambda *_: None) == b"module"
    assert cache.folder() == place
    assert cache.danger_in(place) == "the home folder is unknown"
    assert os.listdir() == []


def test_home_of_a_user_that_does_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUSEDOPTIM_CACHE_DIR", "~nobody-of-this-name/kernels")
    check_home_is_unknown("~nobody-of-this-name/kernels")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def given_away(path: Path) -> None:
    os.chown(path, 4242, -1, follow_symlinks=False)


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@as_root
def test_user_without_a_home(tmp_path: Path) -> None:
    """A container may run as a user that the system does not know."""

    def child() -> None:
        for name in ("HOME", "XDG_CACHE_HOME", "FUSEDOPTIM_CACHE_DIR"):
            os.environ.pop(name, None)
        os.chdir(tmp_path)
        os.setuid(54321)
        check_home_is_unknown("~/.cache/fusedoptim")

    tmp_path.chmod(0o777)
    in_fork(child)


UNSAFE = [
    pytest.param(lambda path: path.chmod(path.stat().st_mode | 0o020), r"mode 0[67]20", id="g+w"),
    pytest.param(lambda path: path.chmod(path.stat().st_mode | 0o002), r"mode 0[67]02", id="o+w"),
    pytest.param(given_away, "owned by user 4242, .* runs as user 0", id="owner", marks=as_root),
]


class TestOtherUsers:
    """Files that other users can write are not run."""

    @pytest.fixture
    def planted(self, place: Path) -> Path:
        """A file that has the right name and is intact."""
        cached(PARTS, new_build(b"planted"))
        (path,) = place.iterdir()
        return path

    @pytest.fixture
    def default(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """The default folder, as version 0.1 made it under a umask of 002."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.delenv("FUSEDOPTIM_CACHE_DIR", raising=False)
        folder = tmp_path / "fusedoptim"
        cached(PARTS, new_build(b"planted"))
        folder.chmod(0o775)
        return folder

    @pytest.mark.parametrize(("change", "reason"), UNSAFE)
    def test_file(self, planted: Path, change: Callable[[Path], None], reason: str) -> None:
        change(planted)
        build = new_build()
        with pytest.warns(RuntimeWarning, match=f"{planted.name} is .*{reason}.*compiled again"):
            assert cached(PARTS, build) == b"module"
        assert cached(PARTS, build) == b"module"
        assert build.call_count == 1
        assert mode(planted) == 0o600
        assert planted.stat().st_uid == os.geteuid()

    @pytest.mark.parametrize(("change", "reason"), UNSAFE)
    def test_folder(
        self, place: Path, planted: Path, change: Callable[[Path], None], reason: str
    ) -> None:
        change(place)
        build = new_build()
        with pytest.warns(RuntimeWarning, match=f"in {place} .*{reason}.*FUSEDOPTIM_CACHE_DIR"):
            assert cached(PARTS, build, on_write_failure=lambda *_: None) == b"module"
        assert cached(PARTS, build) == b"module"  # it warns once
        assert build.call_count == 2
        assert list(place.iterdir()) == [planted]
        assert b"planted" in planted.read_bytes()

    @pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
    def test_what_is_no_file(self, tmp_path: Path, planted: Path, kind: str) -> None:
        elsewhere = tmp_path / "elsewhere"
        planted.rename(elsewhere)
        makers = {"link": lambda: planted.symlink_to(elsewhere), "pipe": lambda: os.mkfifo(planted)}
        makers.get(kind, planted.mkdir)()
        build = new_build()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert cached(PARTS, build) == b"module"
            assert cached(PARTS, build) == b"module"
        assert build.call_count == 1 + (kind == "folder")

    @pytest.mark.parametrize("nth", [1, 2])
    def test_exchanged_in_the_meantime(
        self, nth: int, place: Path, planted: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A folder or file that replaces one whose mode has been checked is not read."""
        look = os.fstat
        looks: list[int] = []

        def exchanging(descriptor: int) -> os.stat_result:
            found = look(descriptor)
            looks.append(descriptor)
            if len(looks) == nth:
                place.rename(place.with_name("moved"))
                place.mkdir()
                planted.write_bytes(b"of another user")
            return found

        monkeypatch.setattr(cache.os, "fstat", exchanging)
        assert cached(PARTS, new_build()) == b"planted"

    def test_new_files_and_folders(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        place = tmp_path / "above" / "cache"
        monkeypatch.setenv("FUSEDOPTIM_CACHE_DIR", str(place))
        umask = os.umask(0)
        try:
            cached(PARTS, new_build())
        finally:
            os.umask(umask)
        assert mode(place.parent) == mode(place) == 0o700
        assert [mode(path) for path in place.iterdir()] == [0o600]

    def test_folder_behind_a_link(
        self, place: Path, planted: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        link = place.with_name("link")
        link.symlink_to(place)
        monkeypatch.setenv("FUSEDOPTIM_CACHE_DIR", str(link))
        assert cached(PARTS, new_build()) == b"planted"
        place.chmod(0o770)
        with pytest.warns(RuntimeWarning, match=r"mode 0770"):
            assert cached(PARTS, new_build()) == b"module"
        place.chmod(0o700)
        if os.geteuid() == 0:
            given_away(link)
            with pytest.warns(RuntimeWarning, match="owned by user 4242"):
                assert cached(PARTS, new_build()) == b"module"

    @as_root
    def test_files_of_root(self, planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Files of root serve every user, such as in a cache that an administrator filled."""
        monkeypatch.setattr(cache.os, "geteuid", lambda: 4242)
        assert cached(PARTS, new_build()) == b"planted"

    def test_folder_of_version_0_1(self, default: Path) -> None:
        """The folder becomes private, and what others may have put there is dropped."""
        build = new_build()
        assert cached(PARTS, build) == cached(PARTS, build) == b"module"
        assert build.call_count == 1
        assert mode(default) == 0o700

    def test_folder_that_was_named(self, default: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A folder that the user named keeps its mode, as it may have other uses."""
        monkeypatch.setenv("FUSEDOPTIM_CACHE_DIR", str(default))
        with pytest.warns(RuntimeWarning, match="chmod go-w"):
            assert cached(PARTS, new_build()) == b"module"
        assert mode(default) == 0o775

    def test_link_in_place_of_the_default(self, default: Path) -> None:
        """A folder that the default is a link to keeps its mode."""
        moved = default.rename(default.with_name("moved"))
        default.symlink_to(moved)
        with pytest.warns(RuntimeWarning, match="mode 0775"):
            assert cached(PARTS, new_build()) == b"module"
        assert mode(moved) == 0o775

    def test_folder_whose_mode_cannot_change(
        self, default: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A folder whose mode cannot change is not used, such as on a file system without modes."""
        monkeypatch.setattr(cache.os, "fchmod", lambda *_: None)
        with pytest.warns(RuntimeWarning, match="mode 0775"):
            assert cached(PARTS, new_build()) == b"module"
