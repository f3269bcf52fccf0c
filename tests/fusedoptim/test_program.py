"""Building a module: the driver compiles while other threads run."""

from __future__ import annotations

import sys
import threading

import pytest

from fusedoptim.allocator import queue
from fusedoptim.launch.modules import load_module
from fusedoptim.launch.sycl import BuildError, build


def test_kernel_of_a_program() -> None:
    module = load_module("sgd", "f32")
    program = build(queue("cpu"), module.spirv)
    assert program.has_sycl_kernel(module.name)
    kernel = program.get_sycl_kernel(module.name)
    del program
    assert kernel.get_function_name() == module.name


def test_options_reach_the_driver() -> None:
    module = load_module("sgd", "f32")
    assert build(queue("cpu"), module.spirv, "-cl-opt-disable") is not None
    with pytest.raises(BuildError):
        build(queue("cpu"), module.spirv, "-no-such-option")


def test_other_threads_run_meanwhile() -> None:
    spirv = load_module("sgd", "f32").spirv
    build(queue("cpu"), spirv)
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
        build(queue("cpu"), spirv)
        assert went.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()
