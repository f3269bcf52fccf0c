"""A step under torch's dispatch modes and transforms: it is right, or raises and changes nothing.

A tensor made under a mode may have no memory, and a kernel would write to address 0. A failure ends
the process, so these tests run in processes of their own.
"""

from __future__ import annotations

from tests.fusedoptim.helpers import run_script

SETUP = """
import warnings
import pytest
import torch
from torch.nn import Parameter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from tests.fusedoptim import helpers
from tests.optimizer_cases import CASES

warnings.simplefilter("error")


def make(case, **kwargs):
    values = torch.arange(1.0, 11.0)
    # The second is updated through a dense copy of its own.
    params = [Parameter(values[:5].clone()), Parameter(values.clone()[::2])]
    optimizer = case.make(params, **(kwargs or case.kwargs[-1]))
    for p in params:
        p.grad = torch.ones_like(p)
    return params, optimizer


def copies(params):
    return [p.detach().clone() for p in params]


def steps(case, around, steps_before):
    "The values after some steps, ``around`` the next of them, and a further one."
    params, optimizer = make(case)
    for _ in range(steps_before):
        optimizer.step()
    around(optimizer, params)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return copies(params)


def nothing(optimizer, params):
    pass


def one_step(optimizer, params):
    optimizer.step()


class Wrapping(TorchDispatchMode):
    "What an operation makes is a wrapper, without memory of its own."

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        is_new = isinstance(result, torch.Tensor) and not any(result is a for a in args)
        return TwoTensor(result, result) if is_new else result


def assert_like(expected, around):
    for case in CASES:
        for steps_before in (0, 2):
            print(around.__name__, case.name, steps_before, flush=True)
            pairs = zip(*(steps(case, each, steps_before) for each in (expected, around)))
            assert all(torch.equal(*pair) for pair in pairs), case.name
"""


def run(script: str) -> None:
    run_script(SETUP + script)


def test_refused_where_torch_traces() -> None:
    """Tracing is refused in the first step, which once cached a fake constant forever, and later.

    Splits would replace the parameter's values with fake ones.
    """
    run("""
from torch.fx.experimental.proxy_tensor import make_fx
from fusedoptim import FusedSGD, SplitSGD

params, optimizer = make(CASES[0])
with pytest.raises(RuntimeError), FakeTensorMode():
    optimizer.step()
optimizer.step()
assert not torch.equal(params[0], torch.arange(1.0, 6.0))


def under(mode):
    def inside(call):
        with mode:
            call()
    return inside


INSIDE = {
    "FakeTensorMode": under(FakeTensorMode()),
    " FakeTensorMode": under(FakeTensorMode(allow_non_fake_inputs=True)),
    "FunctionalTensorMode": under(FunctionalTensorMode()),
    "ProxyTorchDispatchMode": lambda call: make_fx(lambda x: (call(), x)[1])(torch.ones(2)),
    "a torch.func transform":
        lambda call: torch.func.grad(lambda x: (call(), x.sum())[1])(torch.ones(2)),
}
for name, inside in INSIDE.items():
    message = f"step.. was called inside {name.strip()}, .*call it outside"

    def refused(optimizer, params):
        with helpers.refused(optimizer, RuntimeError, message):
            inside(optimizer.step)

    assert_like(nothing, refused)

for inside in (INSIDE[" FakeTensorMode"], INSIDE["FunctionalTensorMode"]):
    p, q = (Parameter(torch.ones(3)) for _ in range(2))
    optimizer = FusedSGD([p, q], lr=0.1)
    optimizer.split_params([q])
    for call in (
        lambda: optimizer.split_params([p]),
        lambda: optimizer.merge_params([q]),
        lambda: SplitSGD([p], lr=0.1),
    ):
        with helpers.refused(optimizer, RuntimeError, "was called inside F.*TensorMode"):
            inside(call)
        assert (type(p.data), p.dtype, q.dtype) == (torch.Tensor, torch.float32, torch.bfloat16)
""")


def test_tensors_of_modes() -> None:
    """Modes that replace tensors see nothing; fake tensors outside of their mode are refused."""
    run("""
from fusedoptim import FusedSGD


def wrapped(optimizer, params):
    with Wrapping():
        optimizer.step()


assert_like(one_step, wrapped)

values = torch.randn(20)
p = Parameter(values.clone())
p.grad = torch.ones(20)
optimizer = FusedSGD([p], lr=0.1)
with Wrapping():
    optimizer.split_params([p])
assert (type(p.data), type(p.grad), p.dtype) == (torch.Tensor, torch.Tensor, torch.bfloat16)
assert type(optimizer.halves.trail(p)) is torch.Tensor
with Wrapping():
    optimizer.merge_params([p])
assert (type(p.data), type(p.grad), p.dtype) == (torch.Tensor, torch.Tensor, torch.float32)
assert torch.equal(p, values) and torch.equal(p.grad, torch.ones(20))


def fake(tensor):
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.ones_like(tensor.detach())


def loss_scale(optimizer, params):
    optimizer.grad_scale = fake(torch.ones(()))
    with helpers.refused(optimizer, TypeError, "grad_scale is a FakeTensor"):
        optimizer.step()
    optimizer.grad_scale = None


def gradient(optimizer, params):
    for i, p in enumerate(params):
        kept, p.grad = p.grad, fake(p)
        message = f"parameter {i} .*gradient with no memory of its own"
        with helpers.refused(optimizer, TypeError, message):
            optimizer.step()
        p.grad = kept


assert_like(nothing, loss_scale)
assert_like(nothing, gradient)

with torch.sparse.check_sparse_tensor_invariants(False), FakeTensorMode():
    grad = torch.sparse_coo_tensor(torch.zeros(1, 2, dtype=torch.long), torch.ones(2, 3), (4, 3))
p = Parameter(torch.ones(4, 3))
p.grad = grad
optimizer = FusedSGD([p], lr=0.1)
with helpers.refused(optimizer, TypeError, "gradient with no memory of its own"):
    optimizer.step()

warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # of a step count
for case in CASES:
    for key in case.state_keys:
        print(key, case.name, flush=True)
        params, optimizer = make(case)
        optimizer.step()
        state = optimizer.state[params[1]]
        kept, state[key] = state[key], fake(state[key])
        message = f"{case.name}: the state {key!r} of parameter 1 is a FakeTensor with no"
        with pytest.raises(TypeError, match=message):
            optimizer.step()
        state[key] = kept
        before = copies(params)
        optimizer.step()
        assert not torch.equal(params[1], before[1])

for case in CASES:
    if case.is_split:
        continue
    with FakeTensorMode():
        params, optimizer = make(case, lr=0.1)
        with pytest.raises(RuntimeError, match="inside FakeTensorMode"):
            optimizer.step()
    with pytest.raises(TypeError, match="parameter 0.* is a FakeTensor with no memory"):
        optimizer.step()
""")
