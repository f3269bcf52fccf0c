"""Finding the driver, and the one queue of each device."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import allocator
from allocator.runtime import libraries, maps, queues
from allocator.runtime.kinds import DEVICE_KINDS
from tests.running import check_script, in_fork, in_threads, run_script

KINDS = ", ".join(f"'{kind.name}'" for kind in DEVICE_KINDS)


def test_one_queue_for_each_device() -> None:
    assert allocator.queue("cpu") is allocator.queue("cpu")
    assert allocator.queue().sycl_device.is_cpu
    assert allocator.queue().is_in_order


def test_names_of_one_device() -> None:
    """Tensors and optimizers find a pool by its queue, so all names of its device share one."""
    own = allocator.queue("cpu")
    for name in (own.sycl_device.filter_string, "cpu:0", "opencl:cpu"):
        assert allocator.queue(name) is own
        with allocator.Pool(name) as pool:
            assert allocator.current_pool() is pool


def test_devices_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    own = allocator.queue("cpu")
    for device in (torch.ones(1).device, torch.device("cpu", 0), own):
        assert allocator.queue(device) is own
        assert allocator.default_pool(device) is allocator.default_pool("cpu")
        assert allocator.named_pool("of a device of torch", device).sycl_queue is own
        assert allocator.memory_allocated(device) == allocator.memory_allocated()
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)  # the CPU's own queue stands in
    stream = SimpleNamespace(sycl_queue=own.addressof_ref())
    monkeypatch.setattr(torch.xpu, "current_stream", lambda device: stream)
    for index in (None, 0):
        assert allocator.queue(torch.device("xpu", index)) == own
    with pytest.raises(allocator.DeviceNotFoundError, match=r"index=1\) is not among .*1 found"):
        allocator.queue(torch.device("xpu", 1))
    with pytest.raises(TypeError, match="device=0 is not a device; pass a SYCL filter string"):
        allocator.memory_allocated(0)


def test_threads_get_the_same_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "_queues", {})
    found: list[object] = []
    in_threads(lambda: found.append(allocator.queue("cpu")), count=8)
    assert len(set(map(id, found))) == 1


def test_unknown_device() -> None:
    with pytest.raises(allocator.DeviceNotFoundError, match=r"'level_zero:gpu:7'.*apt install"):
        allocator.queue("level_zero:gpu:7")


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("cpu:1", "use one of those found"),
        ("opencl:cpu:7", "use one of those found"),
        ("CPU", f"use {KINDS} or one of those found"),
        ("cuda", f"use {KINDS} or one of those found"),
        ("xpu", f"use {KINDS} or one of those found"),
        ("", f"use {KINDS} or one of those found"),
    ],
)
def test_misnamed_device(name: str, cure: str) -> None:
    """Nothing is missing: a CPU is found."""
    found = rf"'{name}' \(devices found: .*opencl:cpu:0.*\); {cure}$"
    with pytest.raises(allocator.DeviceNotFoundError, match=found):
        allocator.queue(name)


@pytest.mark.parametrize("names", [["Portable Computing Language", "Intel(R) OpenCL"], ["Other"]])
def test_another_cpu_driver_ranks_higher(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of devices stands in for a system with PoCL, where this was seen."""
    devices = [SimpleNamespace(sycl_platform=SimpleNamespace(name=name)) for name in names]
    dpctl = SimpleNamespace(
        SyclDevice=lambda device: devices[0], get_devices=lambda device_type: devices
    )
    monkeypatch.setattr(queues, "load_dpctl", lambda: dpctl)
    assert queues._found("cpu") is devices[-1]
    assert queues._found("opencl:cpu:0") is devices[0]


def test_fresh_process_finds_the_cpu_without_help() -> None:
    script = "import allocator; print(allocator.queue('cpu').sycl_device.is_cpu)"
    done = run_script(script, LD_LIBRARY_PATH="")
    assert (done.stdout, done.stderr, done.returncode) == ("True\n", "", 0)


def test_users_driver_list_is_respected() -> None:
    done = run_script(
        "import allocator; allocator.queue('cpu')", OCL_ICD_FILENAMES="/nonexistent.so"
    )
    assert "pip install intel-opencl-rt" in done.stderr
    assert "unset OCL_ICD_FILENAMES=/nonexistent.so" in done.stderr


def test_device_hidden_by_a_selector() -> None:
    done = run_script(
        "import allocator; allocator.queue('cpu')", ONEAPI_DEVICE_SELECTOR="level_zero:gpu"
    )
    assert "unset ONEAPI_DEVICE_SELECTOR=level_zero:gpu, which may hide it" in done.stderr


def test_driver_that_cannot_be_loaded() -> None:
    script = """
        import resource
        import allocator, numpy
        from allocator.runtime.libraries import load_dpctl
        load_dpctl()
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (30 << 20), -1))
        allocator.queue("cpu")
        """
    errors = run_script(script).stderr
    assert "intel-opencl-rt is installed, but cannot be loaded: " in errors
    assert "libintelocl.so" in errors


def test_environment_is_left_as_it_was() -> None:
    done = run_script(
        "import os; before = dict(os.environ)\n"
        "import allocator; allocator.queue('cpu')\n"
        "assert dict(os.environ) == before"
    )
    assert (done.stderr, done.returncode) == ("", 0)


def test_signal_handlers_are_left_as_they_were() -> None:
    """The driver has signal handlers of its own, and keeps SIGUSR1 to itself."""
    done = run_script(
        "import os, signal, torch, fusedoptim.raw\n"
        "seen = []\n"
        "numbers = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP]\n"
        "for number in numbers: signal.signal(number, lambda number, frame: seen.append(number))\n"
        # A job in the background begins with SIGINT ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "p = torch.nn.Parameter(torch.ones(4)); p.grad = torch.ones(4)\n"
        "fusedoptim.FusedSGD([p]).step()\n"
        "fusedoptim.raw.RawKernel('kernel void f() {}')(1, 1, ())\n"
        "for number in numbers * 2: os.kill(os.getpid(), number)\n"
        "assert seen == numbers * 2, seen\n"
        "try: os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt: print('interrupted')\n",
        FUSEDOPTIM_CACHE_DIR="",  # so that every kernel is compiled
    )
    assert (done.stdout, done.stderr, done.returncode) == ("interrupted\n", "", 0)


def test_drivers_of_the_system_are_kept(tmp_path: Path) -> None:
    """Our driver is added to the system's list, whose drivers are still loaded."""
    vendors = Path("/etc/OpenCL/vendors")
    if not list(vendors.glob("*.icd")):
        pytest.skip("the system registers no OpenCL driver (apt install intel-opencl-icd)")
    libraries = {icd.read_text().strip() for icd in vendors.glob("*.icd")}
    # A GPU driver that finds no GPU is unloaded again, so ask the dynamic linker what it loaded.
    done = run_script("import allocator; allocator.queue('cpu')", LD_DEBUG="files")
    for library in libraries:
        assert library in done.stderr


def test_deleted_working_directory() -> None:
    """Nothing has started, so it works from an existing folder, and the process exits."""
    check_script(
        """
        import os, tempfile
        import allocator
        import pytest
        os.chdir(tempfile.mkdtemp())
        os.rmdir(os.getcwd())
        for start in (allocator.queue, allocator.devices):
            with pytest.raises(RuntimeError, match=r"working directory was deleted.*os.chdir"):
                list(start())
        os.chdir("/")
        allocator.queue()
        os.chdir(tempfile.mkdtemp())
        os.rmdir(os.getcwd())
        assert allocator.queue("opencl:cpu") is allocator.queue()
        """
    )


def test_a_missing_distribution_is_not_an_error() -> None:
    assert libraries._installed_file("no-such-distribution", "lib.so") is None
    assert libraries._installed_file("torch", "no-such-file") is None


def test_borrowed_queue() -> None:
    """A queue is borrowed by its address, as torch.xpu gives it; the CPU's own queue stands in."""
    own = allocator.queue("cpu")
    borrowed = allocator.borrowed_queue(own.addressof_ref())
    assert borrowed is allocator.borrowed_queue(own.addressof_ref())
    assert borrowed.sycl_device == own.sycl_device
    assert borrowed == own


def test_two_sycl_runtimes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "7f00 r-xp 0 0 0 /a/libsycl.so.8.0.0\n7f01 r-xp 0 0 0 /b/libsycl.so.9.0.0\n"
    path = tmp_path / "maps"
    path.write_text(text)
    monkeypatch.setattr(maps, "_MAPS", str(path))
    with pytest.raises(RuntimeError, match=r"different major versions \(8, 9\)"):
        queues._check_one_sycl_runtime()


def test_fork_after_use() -> None:
    allocator.queue("cpu")

    def child() -> None:
        with pytest.raises(RuntimeError, match=r"set_start_method\('spawn'\)"):
            allocator.queue("cpu")

    in_fork(child)
    allocator.queue("cpu")


def test_fork_before_use() -> None:
    script = """
        import os, allocator
        if os.fork() == 0:
            print(allocator.queue("cpu").sycl_device.is_cpu, flush=True)
            os._exit(0)
        os.wait()
    """
    assert check_script(script) == "True\n"
