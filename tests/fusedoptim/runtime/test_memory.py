"""keep_memory() and release_memory(): page faults, undoing, other mallocs, forks, threads."""

from __future__ import annotations

import ctypes
import itertools
import os
import textwrap
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest

from fusedoptim import runtime
from fusedoptim.runtime import memory
from tests.interrupts import InterruptAt
from tests.running import check_script, in_fork, in_threads

TOOLS = """
import ctypes, resource, threading
from fusedoptim.runtime import keep_memory, release_memory
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]

def faults():
    "Page faults of two rounds of allocations, once the heap has settled: three pairs fault alike."
    import torch
    def of_a_pair():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for size in 2 * (5, 20, 36, 48):  # MiB
            blocks = [torch.ones(size << 18), torch.ones(size << 16)]
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    found = [of_a_pair() for _ in range(3)]
    while max(found[-3:]) - min(found[-3:]) > 50 and len(found) < 20:
        found.append(of_a_pair())
    return found[-1]

def is_mapped(size):
    "Whether a block of so many MiB is a mapping of its own: a bit of the word before it."
    block = libc.malloc(ctypes.c_size_t(size << 20))
    mapped = ctypes.c_size_t.from_address(block - 8).value & 2
    libc.free(block)
    return bool(mapped)

def resident():
    "In MiB."
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) // 256
"""
MANY, FEW = 10_000, 100
"""Two rounds touch 70,000 pages."""


def run(script: str, *arguments: str, **variables: str) -> list[str]:
    """The lines that a script with these tools prints; malloc has its initial settings.

    A new interpreter, which malloc's variables need, does not import torch, which is slow.
    """
    return check_script(TOOLS + textwrap.dedent(script), *arguments, **variables).splitlines()


def test_kept_memory_is_not_faulted_in_again() -> None:
    before, kept, kept_twice, released, returned, kept_again = map(
        int,
        run("""
            print(faults())
            assert keep_memory()
            print(faults())
            assert keep_memory()
            print(faults())
            before = resident()
            release_memory()
            returned = before - resident()
            release_memory()
            print(faults())
            print(returned)
            keep_memory()
            print(faults())
        """),
    )
    assert min(before, released) > MANY
    assert max(kept, kept_twice, kept_again) < FEW
    assert returned > 40


def test_free_memory_is_returned_unless_it_is_kept() -> None:
    found = run(
        """
        import torch
        from fusedoptim.runtime.memory import return_free_memory

        def free():
            "Free 1,000 blocks of 96 KiB below one that keeps the heap from shrinking."
            blocks = [torch.ones(24 << 10) for _ in range(1000)]
            top = torch.ones(24 << 10)
            del blocks
            before = resident()
            return_free_memory()
            return before - resident()

        print(free())
        keep_memory()
        print(free())
        """
    )
    returned, kept = map(int, found)
    assert returned > 60
    assert kept < 20


def test_threads_keep_memory_too() -> None:
    """Threads that start after the call keep memory too, as they use the main heap."""
    script = """
        import sys
        if sys.argv[1:] == ["kept"]:
            keep_memory()
        for _ in range(2):
            thread = threading.Thread(target=lambda: print(faults()))
            thread.start()
            thread.join()
    """
    assert min(map(int, run(script))) > MANY
    assert max(map(int, run(script, "kept"))) < FEW


def test_forked_processes() -> None:
    """A child has the parent's setting; neither changes the other's."""
    script = """
        import os
        def in_child(*calls):
            if not (child := os.fork()):
                print(*(call() for call in calls), flush=True)
                os._exit(0)
            os.waitpid(child, 0)
        in_child(keep_memory, faults)
        print(faults(), flush=True)
        keep_memory()
        in_child(faults, release_memory, faults)
        print(faults())
    """
    kept_in_child, parent, released_in_child, kept = run(script)
    assert int(kept_in_child.split()[1]) < FEW
    assert int(parent) > MANY
    first, _, second = released_in_child.split()
    assert int(first) < FEW
    assert int(second) > MANY
    assert int(kept) < FEW


def test_workers_of_a_data_loader() -> None:
    """Workers have the setting of the process at their start; batches arrive unchanged."""
    found = run(
        """
        import torch
        from torch.utils.data import DataLoader, Dataset

        class Squares(Dataset):
            def __len__(self):
                return 6

            def __getitem__(self, i):
                return torch.full((300_000,), i * i), is_mapped(48)

        for change in (lambda: None, keep_memory, release_memory):
            change()
            batches = list(DataLoader(Squares(), 2, num_workers=2))
            squares = torch.cat([batch for batch, _ in batches])
            assert torch.equal(squares, torch.arange(6).square()[:, None].expand(6, 300_000))
            print(torch.cat([mapped for _, mapped in batches]).unique().tolist())
        """
    )
    assert found == ["[True]", "[False]", "[True]"]


def test_a_fork_while_another_thread_holds_the_lock(mallopt: Mallopt) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(memory._lock.acquire).result()
        try:
            in_fork(runtime.keep_memory)
        finally:
            pool.submit(memory._lock.release).result()


@pytest.mark.parametrize(
    ("variables", "mapped"),
    [
        ({}, "False True"),
        ({"MALLOC_MMAP_MAX_": "0"}, "False False"),
        ({"MALLOC_MMAP_THRESHOLD_": str(4 << 20)}, "True True"),
        ({"GLIBC_TUNABLES": f"glibc.malloc.mmap_threshold={4 << 20}"}, "True True"),
    ],
)
def test_release_restores_what_variables_set(variables: dict[str, str], mapped: str) -> None:
    """Changes of the variables after the start do not count, as malloc does not see them."""
    script = """
        import os
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "1"
        before = is_mapped(40)
        keep_memory()
        assert not is_mapped(40)
        release_memory()
        assert is_mapped(40) is before
        print(is_mapped(30), is_mapped(40))
    """
    assert run(script, **variables) == [mapped]


STATIC, DYNAMIC = 128 << 10, 32 << 20
ARENAS = 8 * len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("variables", "settings"),
    [
        ({}, (DYNAMIC, 2 * DYNAMIC, 65536, ARENAS)),
        ({"MALLOC_TOP_PAD_": "0x10000"}, (STATIC, STATIC, 65536, ARENAS)),
        ({"MALLOC_TRIM_THRESHOLD_": "-1"}, (STATIC, -1, 65536, ARENAS)),
        ({"MALLOC_TRIM_THRESHOLD_": "nonsense"}, (DYNAMIC, 2 * DYNAMIC, 65536, ARENAS)),
        ({"MALLOC_ARENA_MAX": "3"}, (DYNAMIC, 2 * DYNAMIC, 65536, 3)),
        ({"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}, (DYNAMIC, 2 * DYNAMIC, 65536, ARENAS)),
        (
            {"GLIBC_TUNABLES": "glibc.malloc.mmap_max=7:x", "MALLOC_MMAP_MAX_": "8"},
            (STATIC, STATIC, 7, ARENAS),
        ),
    ],
)
def test_settings_at_the_start(
    variables: dict[str, str], settings: tuple[int, int, int, int]
) -> None:
    assert memory._initial_settings(variables) == settings


def test_several_tunables() -> None:
    """glibc 2.36 overwrites the colons between them in the memory that /proc shows."""
    script = """
        from fusedoptim.runtime import memory
        print(*memory._initial_settings(memory._initial_environment())[:3])
        print(memory.is_kept(), is_mapped(40))
        keep_memory()
        release_memory()
        print(is_mapped(40))
    """
    trim = 1 << 40
    tunables = f"glibc.malloc.trim_threshold={trim}:glibc.malloc.mmap_max=0"
    expected = [f"{STATIC} {trim} 0", "True False", "False"]
    assert run(script, GLIBC_TUNABLES=tunables) == expected
    more = f"glibc.malloc.top_pad=4096:{tunables}:glibc.malloc.arena_max=3"
    assert run(script, GLIBC_TUNABLES=more) == expected


def test_imports_leave_malloc_alone() -> None:
    """glibc still adapts its thresholds, which any call of mallopt would have stopped."""
    script = """
        import allocator, fusedoptim, transforms, fusedoptim.raw
        release_memory()  # of what was never kept
        print(is_mapped(31), is_mapped(31))
    """
    assert run(script) == ["True False"]


def preload(distribution: str, name: str) -> dict[str, str]:
    """The variables that start a process with a library that pip installed."""
    files = metadata.files(distribution) or []
    path = next(file.locate() for file in files if file.name == name)
    path = Path(os.path.normpath(path))
    return {"LD_PRELOAD": str(path), "LD_LIBRARY_PATH": str(path.parent)}


def test_another_malloc_is_named_and_left_alone() -> None:
    script = """
        import warnings
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            print(keep_memory())
        release_memory()
        print(caught[0].category.__name__, caught[0].filename, caught[0].message)
    """
    answer, warning = run(script, **preload("tbb", "libtbbmalloc_proxy.so.2"))
    assert answer == "False"
    assert warning.startswith("RuntimeWarning <string> keep_memory() did nothing: ")
    assert "libtbbmalloc_proxy.so.2 serves malloc in this process, not glibc" in warning


def test_a_libc_that_is_not_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    musl = types.SimpleNamespace(posix_memalign=None)
    monkeypatch.setattr(memory, "_owner", lambda function: "/lib/ld-musl-x86_64.so.1")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: musl)
    with pytest.warns(RuntimeWarning, match=r"ld-musl-x86_64\.so\.1 serves malloc"):
        assert not runtime.keep_memory()


class Mallopt:
    """A stand-in for glibc's parameters: the values that were set, or None."""

    def __init__(self, refused: str | None = None) -> None:
        self.values: dict[str, int | None] = dict.fromkeys(
            ("M_MMAP_THRESHOLD", "M_TRIM_THRESHOLD", "M_MMAP_MAX", "M_ARENA_MAX")
        )
        self.refused = refused

    def set(self, name: str, value: int) -> None:
        if name == self.refused and value == KEPT[name]:
            raise RuntimeError(name)
        self.values[name] = value

    def is_kept(self) -> bool:
        return all(self.values[name] == value for name, value in KEPT.items())

    def is_released(self) -> bool:
        return all(value != KEPT.get(name) for name, value in self.values.items())


KEPT = {"M_TRIM_THRESHOLD": -1, "M_MMAP_MAX": 0, "M_ARENA_MAX": 1}


@pytest.fixture
def mallopt(monkeypatch: pytest.MonkeyPatch) -> Mallopt:
    """Stand-in parameters, so that nothing here changes this process's own."""
    mallopt = Mallopt()
    monkeypatch.setattr(memory, "_set", mallopt.set)
    monkeypatch.setattr(memory, "_is_kept", False)
    return mallopt


@pytest.mark.parametrize("refused", KEPT)
def test_a_refused_setting_changes_nothing(refused: str, mallopt: Mallopt) -> None:
    mallopt.refused = refused
    with pytest.raises(RuntimeError, match=refused):
        runtime.keep_memory()
    assert mallopt.is_released()
    assert not memory._is_kept


def test_glibc_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: types.SimpleNamespace(mallopt=lambda *_: 0))
    with pytest.raises(RuntimeError, match="glibc's mallopt refuses M_MMAP_MAX=0"):
        memory._set("M_MMAP_MAX", 0)


def test_sizes_that_mallopt_cannot_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """mallopt takes an int, in which -1 is the largest size."""
    taken = []
    process = types.SimpleNamespace(mallopt=lambda *given: taken.append(given) or 1)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: process)
    for value in (2**31 - 1, 2**31, 2**64 - 1, -1):
        memory._set("M_TRIM_THRESHOLD", value)
    assert taken == [(-1, 2**31 - 1), (-1, -1), (-1, -1), (-1, -1)]


def test_threads_that_keep_and_release_at_once(mallopt: Mallopt) -> None:
    def work(call: Callable[[], object]) -> None:
        for _ in range(200):
            call()

    in_threads(work, *[runtime.keep_memory, runtime.release_memory] * 3)
    assert mallopt.is_kept() if memory._is_kept else mallopt.is_released()


@pytest.mark.parametrize("call", [runtime.keep_memory, runtime.release_memory])
def test_interrupted_anywhere(call: Callable[[], object], mallopt: Mallopt) -> None:
    """After an interrupt, either call still does what it should."""
    other = {runtime.keep_memory: runtime.release_memory}.get(call, runtime.keep_memory)
    for n in itertools.count():
        for keeps in (True, False):
            other()
            with InterruptAt(n, "polls", within=memory) as interrupt:
                call()
            if keeps:
                runtime.keep_memory()
                assert mallopt.is_kept()
            else:
                runtime.release_memory()
                assert mallopt.is_released()
        if not interrupt.has_raised:
            break
    assert n > 2
