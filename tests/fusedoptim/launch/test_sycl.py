"""Building a module: the driver compiles while other threads run."""

from __future__ import annotations

import sys
import threading

import pytest

from fusedoptim.allocator import queue
from fusedoptim.launch.arguments import ONE_ADDRESS
from fusedoptim.launch.backend import BuildError
from fusedoptim.launch.modules import load_module
from fusedoptim.launch.sycl import SyclCompiler


def compiler() -> SyclCompiler:
    return SyclCompiler.of(queue("cpu"), is_ordered=True)


def test_kernel_of_a_program() -> None:
    module = load_module("sgd", "f32")
    program = compiler().compile(module.spirv)
    assert program.program.has_sycl_kernel(module.name)
    kernel = program.kernel(queue("cpu"), module.name, ONE_ADDRESS)
    del program
    assert kernel.handle.get_function_name() == module.name


def test_options_reach_the_driver() -> None:
    module = load_module("sgd", "f32")
    assert compiler().compile(module.spirv, "-cl-opt-disable") is not None
    with pytest.raises(BuildError):
        compiler().compile(module.spirv, "-no-such-option")


def test_other_threads_run_meanwhile() -> None:
    spirv = load_module("sgd", "f32").spirv
    compiler().compile(spirv)
    go, went = threading.Event(), threading.Event()

    def wait() -> None:
        go.wait()
        went.set()

    thread = threading.Thread(target=wait)
    interval = sys.getswitchinterval()
    thread.start()
    sys.setswitchinterval(1000)  # seconds: nobody is made to give the lock away
    try:
        go.set()
        compiler().compile(spirv)
        assert went.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()
