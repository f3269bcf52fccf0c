"""Calls that torch records or differentiates are refused: it does not see what a kernel does."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from fusedoptim.raw import ElementwiseKernel, RawKernel, ReductionKernel
from tests.compiling import another_thread_compiles, another_thread_exports
from tests.fusedoptim.helpers import run_script

twice = ElementwiseKernel("T x", "T y", "y = 2 * x", "twice")
total = ReductionKernel("T x", "T y", "x", "a + b", "y = a", "0", "total")
raw = RawKernel("kernel void raw(global const float *x, global float *y) { y[0] = 2 * x[0]; }")


def run_raw(x: Tensor) -> Tensor:
    y = torch.zeros(1)
    raw(1, 1, (x, y))
    return y


Call = Callable[[Tensor], Tensor]


@pytest.fixture(params=["twice", "total", "raw"])
def call(request: pytest.FixtureRequest) -> Iterator[Call]:
    """A call of a kernel, which has been made before: later calls skip some checks."""
    calls: dict[str, Call] = {"twice": twice, "total": total, "raw": run_raw}
    for _ in range(3):
        calls[request.param](torch.ones(1))
    yield calls[request.param]
    torch.compiler.reset()


class Module(torch.nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


def traced(call: Call, x: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates torch.jit
        return torch.jit.trace(Module(call), (x,), check_trace=False)


def exported(call: Call, x: Tensor) -> Any:
    return torch.export.export(Module(call), (x,)).module()


RECORDERS: dict[str, Callable[[Call, Tensor], Any]] = {
    "torch.jit.trace": traced,
    "make_fx": lambda call, x: make_fx(lambda x: call(x))(x),
    "torch.export": exported,
}


@pytest.mark.parametrize("recorder", RECORDERS)
def test_recorded(call: Call, recorder: str) -> None:
    text = rf"(twice|total|raw): called inside {recorder}, which does not see .*custom_op"
    with pytest.raises(RuntimeError, match=text):
        RECORDERS[recorder](call, torch.ones(1))


@pytest.mark.parametrize("other", [another_thread_compiles, another_thread_exports])
def test_another_thread_is_recorded(call: Call, other: Callable[[], Any]) -> None:
    with other():
        assert call(torch.full((1,), 3.0)).item() in (3, 6)  # total adds up, the others double


@pytest.mark.parametrize("recorder", RECORDERS)
def test_recorded_as_a_custom_operator(call: Call, recorder: str) -> None:
    """What the message says to do."""
    name = f"fusedoptim_tests::seen_{uuid.uuid4().hex}"

    @torch.library.custom_op(name, mutates_args=())
    def operator(x: Tensor) -> Tensor:
        return call(x)

    operator.register_fake(torch.empty_like)
    graph = RECORDERS[recorder](lambda x: operator(x) + 1, torch.ones(1))
    right = call(torch.full((1,), 5.0)) + 1
    assert torch.equal(graph(torch.full((1,), 5.0)).view(1), right.view(1))


@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # make_dual's own
def test_tangents(call: Call) -> None:
    x = torch.ones(1)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones(1))
        with pytest.raises(RuntimeError, match=r"an argument has a tangent.*unpack_dual"):
            call(dual)
        assert torch.equal(call(forward_ad.unpack_dual(dual).primal), call(x))


@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # make_dual's own
def test_an_output_with_a_tangent() -> None:
    with forward_ad.dual_level():
        y = forward_ad.make_dual(torch.zeros(1), torch.ones(1))
        for call in (lambda: twice(torch.ones(1), y), lambda: raw(1, 1, (torch.ones(1), y))):
            with pytest.raises(RuntimeError, match="an argument has a tangent"):
                call()
        assert forward_ad.unpack_dual(y).primal.item() == 0


@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # make_dual's own
def test_in_a_function_with_a_jvp() -> None:
    """What the message says to do."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return twice(x)

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:
            return 2 * tangent

    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.ones(1), torch.full((1,), 3.0))
        y = forward_ad.unpack_dual(Twice.apply(x))
    assert (y.primal.item(), y.tangent.item()) == (2, 6)


def test_a_kernel_that_outlives_the_package() -> None:
    """At exit, Python clears modules while objects that use them live."""
    done = run_script("""
        import torch
        from fusedoptim.launch import opencl_api
        from fusedoptim.raw import RawKernel
        kernel = RawKernel("kernel void f(global float *x) { x[0] = 1; }")
        kernel(1, 1, (torch.zeros(1),))
        opencl_api._ended = None
    """)
    assert done.stderr == ""


def test_a_launch_while_a_cycle_is_collected() -> None:
    """Python finalizes its objects in any order, so maybe the kernel's before the user's."""
    done = run_script("""
        import gc
        import torch
        from fusedoptim.raw import RawKernel

        class User:
            def __init__(self, n):
                code = f"kernel void f{n}(global int *x) {{ x[get_global_id(0)] += 1; }}"
                self.kernel, self.itself = RawKernel(code), self
                self.kernel(300_000, None, (torch.zeros(300_000, dtype=torch.int32),))

            def __del__(self):
                x = torch.zeros(3, dtype=torch.int32)
                self.kernel(3, None, (x,))
                print(x.sum().item())

        for n in range(20):
            User(n)
            gc.collect()
    """)
    assert done.stdout.split() == ["3"] * 20, done.stderr
