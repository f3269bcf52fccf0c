"""Raw kernels and the life of a process: imports, faults, output, exit and fork."""

from __future__ import annotations

import signal
import subprocess

from tests.fusedoptim.helpers import run_script
from tests.running import UNBUFFERED

PRELUDE = """
import os, sys, torch
from fusedoptim.raw import RawKernel
"""


def run(script: str, returncode: int = 0) -> subprocess.CompletedProcess[str]:
    return run_script(PRELUDE + script, returncode=returncode)


def test_import_print_fork_and_exit() -> None:
    script = """
loaded = {"dpctl", "numba", "numba_dpex", "dpnp", "llvmlite"} & set(sys.modules)
assert not loaded, loaded
kernel = RawKernel('kernel void f(global int *x) { x[0] += 1; printf("x is %d\\\\n", x[0]); }')
x = torch.zeros(1, dtype=torch.int32)
if os.fork() == 0:  # before the driver runs, a child may use it
    kernel(1, 1, (x,))
    os._exit(0)
os.wait()
kernel(1, 1, (x,))
if os.fork() == 0:
    try:
        kernel(1, 1, (x,))
    except RuntimeError as error:
        print(error, x.item(), flush=True)
    os._exit(0)
os.wait()
kernel(1, 1, (x,))
kernel(1, 1, (torch.zeros(1, dtype=torch.int32),), wait=False)
"""
    done = run(UNBUFFERED + script)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert sorted(lines[:2]) == ["x is 1", "x is 1"]
    assert "set_start_method('spawn')" in lines[2]
    assert lines[2].endswith(" 1")
    assert lines[3:] == ["x is 2", "x is 1"]


def test_a_write_outside_of_all_memory_ends_the_process() -> None:
    done = run(
        """
kernel = RawKernel("kernel void f(global float *x, ulong i) { x[get_global_id(0) + i] = 1; }")
kernel(16, 16, (torch.zeros(16), 1 << 44))
print("went on")
""",
        -signal.SIGSEGV,
    )
    assert "went on" not in done.stdout


def test_a_signal_handler_launches_what_is_being_built() -> None:
    done = run("""
import signal
from fusedoptim.raw import _build
x = torch.zeros(1, dtype=torch.int32)
kernel = RawKernel('kernel void f(global int *x) { x[0] += 1; }')
check = _build.check_capabilities
def signalled(*arguments):
    _build.check_capabilities = check
    os.kill(os.getpid(), signal.SIGUSR1)
    check(*arguments)
_build.check_capabilities = signalled
signal.signal(signal.SIGUSR1, lambda *_: kernel(1, 1, (x,)))
kernel(1, 1, (x,))
print(x.item())
""")
    assert done.stderr == ""
    assert done.stdout == "2\n"


def test_a_list_of_arguments_that_is_used_again() -> None:
    """A list may be reused while a kernel writes to a tensor that only the list referred to."""
    done = run("""
from fusedoptim import allocator
fill = RawKernel('''kernel void fill(global float *x, ulong n) {
    float v = 0;
    for (int i = 0; i < 30000000; i++) v = v * 0.5f + 1;
    for (size_t i = get_global_id(0); i < n; i += get_global_size(0)) x[i] = v;
}''')
n = 1 << 24  # so large that its memory goes back to the system
arguments = [torch.zeros(n), n]
fill(16, 16, arguments, wait=False)
arguments[:] = [torch.zeros(16), 16]
fill(16, 16, arguments, wait=False)
allocator.queue("cpu").wait()
print(arguments[0].tolist() == [2.0] * 16)
""")
    assert done.stdout == "True\n"


def test_fork_while_another_thread_compiles() -> None:
    script = """
import signal, threading
from fusedoptim.raw import RawModule, kernel
compile_source = kernel.compile_source

def slowly(*arguments):
    if threading.current_thread() is thread:
        compiling.set()
        forked.wait()
    return compile_source(*arguments)

kernel.compile_source = slowly
compiling, forked = threading.Event(), threading.Event()
source = "kernel void f(global int *x) { x[0] = 1; }"
thread = threading.Thread(target=lambda: RawModule(source).names)
thread.start()
compiling.wait()
if os.fork() == 0:
    signal.alarm(60)  # instead of a child that waits forever
    print(RawModule(source).names, flush=True)
    os._exit(0)
os.wait()
forked.set()
thread.join()
"""
    assert run(script).stdout == "('f',)\n"
