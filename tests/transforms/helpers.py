"""Shared by the tests of transforms: models with statistics, comparisons, small training runs."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves, tree_map_only

import transforms as package
from fusedoptim import transforms
from tests.fusedoptim.helpers import bits
from tests.interrupts import InterruptAt, polls_of
from tests.optimizer_cases import TORCHS_CASES, OptimizerCase, configuration_id
from tests.tolerances import Exact, assert_as_exact, computed_exactly
from tests.transforms.models import TASKS, Task
from transforms.passes.fuse_step import fuse_update_step
from transforms.rewrites.packed import supported_dtypes


def randomise(model: nn.Module) -> nn.Module:
    """Set eval mode, and running statistics and affine parameters other than 0 and 1."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            if module.running_mean is not None and module.running_var is not None:
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 1.5)
                if module.bias is not None:
                    nn.init.normal_(module.bias)
    return model.eval()


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state_dict with copies of the values."""
    return {k: v.clone() if isinstance(v, Tensor) else copy.deepcopy(v) for k, v in state.items()}


def assert_same_state(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Assert that two state_dicts agree bit for bit, in keys and their order too."""
    assert list(actual) == list(expected)
    assert_same(dict(actual), dict(expected))


def fingerprint(model: nn.Module) -> list[Any]:
    """List all that must not change in a model left alone, by identity, layout and bits."""
    facts: list[Any] = []
    for name, module in model.named_modules():
        facts.append((name, id(module), type(module), module.training, sorted(vars(module))))
        for dictionary in (module._parameters, module._buffers):
            for key, t in dictionary.items():
                if t is not None:
                    layout, values = (t.shape, t.stride()), bits(t).numpy().tobytes()
                    facts.append((key, id(t), t.data_ptr(), layout, t.dtype, values))
    return facts


@contextlib.contextmanager
def optimized_twice(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Assert that a second ``optimize`` changes nothing, and ``restore`` restores every bit."""
    before = fingerprint(model)
    assert transforms.optimize(model, optimizer, inplace=True)[0] is model
    once, report = fingerprint(model), str(transforms.report(model))
    transforms.optimize(model, optimizer, inplace=True)
    assert (fingerprint(model), str(transforms.report(model))) == (once, report)
    yield
    transforms.restore(model, optimizer)
    assert fingerprint(model) == before


def without_addresses(facts: list[Any]) -> list[Any]:
    """Remove the addresses from a fingerprint: rounded values are recomputed into new memory."""
    return [(*f[:2], *f[3:]) if len(f) == 6 else f for f in facts]


def hooks(model: nn.Module) -> list[Any]:
    """List the numbers of all hooks, with the names of the dicts that hold them."""
    found = ((k, v) for m in model.modules() for k, v in vars(m).items() if "_hooks" in k)
    return [(name, list(numbers)) for name, numbers in found if numbers]


def interrupts_of(
    call: Callable[[], object], prepare: Callable[[], object], *, since: str, every: int
) -> Iterator[None]:
    """Interrupt a call at every n-th place at which Python looks for signals.

    Args:
        call: it takes much the same path each time.
        prepare: called before each.
        since: name of the function from whose first call on it is interrupted.
        every: n.
    """
    prepare()
    call()  # fills caches
    prepare()
    count = 0
    for place in polls_of(call, within=package, since=since)[::every]:
        prepare()
        with InterruptAt(place, "polls", within=package, since=since) as interrupt:
            call()
        if interrupt.has_raised:  # a place may be missing: memory is not always freed alike
            count += 1
            yield
    assert count > 10


def tensors(output: Any) -> list[Tensor]:
    """The floating-point tensors in a model's output."""
    if isinstance(output, Mapping):  # torch knows transformers' by registration only
        output = list(output.values())
    leaves = tree_leaves(output)
    return [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]


def operators_called(call: Callable[[], object]) -> set[str]:
    """The names of torch's operators that a call uses, such as ``aten::mm``."""
    with torch.profiler.profile() as profile:
        call()
    return {event.key for event in profile.key_averages()}


def exactly(
    plain: nn.Module, *args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any
) -> Exact:
    """Compute what ``plain`` returns in float64, once for several calls of :func:`assert_right`."""
    double = copy.deepcopy(plain).double()
    exact_args, exact_kwargs = tree_map_only(Tensor, _widened, (args, kwargs))

    def exact() -> Sequence[Tensor]:
        module = double
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            module = _rounded(double, dtype)
        return tensors(module(*exact_args, **exact_kwargs))

    with torch.no_grad():
        return computed_exactly(exact, dtype)


def assert_right(
    optimized: Callable[..., Any],
    plain: nn.Module | Exact,
    *args: Any,
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> None:
    """Assert that ``optimized`` returns what ``plain`` does in float64, up to ``dtype``'s rounding.

    For 16 bits it runs under autocast, unless inputs of that dtype show that it was moved there.
    """
    is_moved = any(t.dtype == dtype for t in tensors([*args, kwargs]))
    is_cast = dtype in (torch.bfloat16, torch.float16) and not is_moved
    # Before the optimized model might change what it shares with the plain one.
    right = plain if isinstance(plain, Exact) else exactly(plain, *args, dtype=dtype, **kwargs)
    with torch.no_grad(), torch.autocast("cpu", dtype if is_cast else None, enabled=is_cast):
        results = tensors(optimized(*args, **kwargs))
    assert_as_exact(results, right, dtype)


def _widened(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def _rounded(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a float64 copy whose parameters are off by a rounding to ``dtype``.

    An active dispatch mode applies to the copy, too.
    """
    result = copy.deepcopy(model)
    for param in result.parameters():
        u = torch.finfo(dtype).eps / 2
        param.mul_(1 + u * (torch.randint_like(param, 2) * 2 - 1))
    return result


RATES = {"FusedSGD": 0.01, "FusedAdagrad": 0.02, "FusedAdam": 0.002, "FusedAdamW": 0.002}
"""Learning rates with which no model of the tests diverges."""

SEED = 0
each_class = pytest.mark.parametrize("case", TORCHS_CASES, ids=configuration_id)
each_dtype = pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
needs_bfloat16_products = pytest.mark.skipif(
    torch.bfloat16 not in supported_dtypes(),
    reason="oneDNN does not compute in bfloat16 on this processor",
)
"""A mark of tests of what oneDNN computes in bfloat16; elsewhere such products are torch's."""


def converted(case: OptimizerCase) -> OptimizerCase:
    """Return the case with torch's own optimizer, converted, in place of ours."""

    def make(params: Any, **kwargs: Any) -> Any:
        optimizer = case.reference(params, **kwargs)
        fuse_update_step(optimizer)
        return optimizer

    return dataclasses.replace(case, cls=make)


def new_params() -> list[Parameter]:
    return [Parameter(torch.randn(5, 3)), Parameter(torch.randn(4))]


def new_twins(cls: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Make two optimizers on equal parameters."""
    params = new_params()
    return cls(params, **kwargs), cls([p.detach().clone() for p in params], **kwargs)


def task_and_kwargs(name: str, case: OptimizerCase) -> tuple[Task, dict[str, Any]]:
    """Return a task and the optimizer's options; skip the test if it cannot train the task."""
    task = TASKS[name]
    if task.has_sparse_gradients:
        if not case.supports_sparse_gradients:
            pytest.skip(f"{case.name} takes no sparse gradients")
        return task, {"lr": RATES[case.name]}
    momentum = {"momentum": 0.9} if case.name == "FusedSGD" else {}
    return task, {"lr": RATES[case.name], "weight_decay": 0.01, **momentum}


def autocast_loss(
    model: nn.Module, task: Task, generator: torch.Generator, dtype: torch.dtype | None
) -> Tensor:
    """The loss on the next batch, under autocast to bfloat16 if there is a ``dtype``."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is not None):
        return task.loss(model, generator)


def optimized(model: nn.Module, **arguments: Any) -> Any:
    """Return the model in training mode, optimized with torch's SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return transforms.optimize(model.train(), optimizer, **arguments)[0]


def assert_no_fused_step(optimizer: Any, error: type[Exception], message: str) -> None:
    """Assert that an optimizer is refused and left unchanged."""
    cls, attributes = type(optimizer), dict(vars(optimizer))
    with pytest.raises(error, match=message):
        fuse_update_step(optimizer)
    assert type(optimizer) is cls
    assert vars(optimizer) == attributes


def assert_same(a: Any, b: Any) -> None:
    """Assert that two state_dicts, or parts of them, are equal in structure, dtypes and bits."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_same(x, y)
    elif isinstance(a, Tensor):
        assert (a.dtype, a.layout, a.shape) == (b.dtype, b.layout, b.shape)
        assert torch.equal(a.to_dense(), b.to_dense())
    else:
        assert a == b


def saved(*objects: Any) -> list[Any]:
    """Return the objects' state_dicts, saved to and loaded from a file."""
    states: list[Any] = through_torch_save([o.state_dict() for o in objects], weights_only=True)
    return states


def through_torch_save(value: Any, weights_only: bool = False) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def train(model: nn.Module, optimizer: Any, steps: int = 2, seed: int = 0) -> None:
    """Train :func:`tests.transforms.models.small` under autocast."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(torch.randn(4, 3, 4, 4, generator=generator))
        output.float().square().mean().backward()
        optimizer.step()


CONV, LINEAR = "conv_bn_folding", "linear_bn_folding"


def fold(model: nn.Module, **arguments: Any) -> tuple[Any, transforms.Report]:
    """The model optimized for inference without a change of memory format, and the report."""
    optimized = transforms.optimize(model, auto_channels_last=False, **arguments)
    return optimized, transforms.report(optimized)


def levels_of(knob: str) -> list[tuple[dict[str, Any], bool]]:
    """Arguments of ``optimize``, and whether a pass that is on at level O1 runs with them."""
    off, bare = {knob: False}, {"level": "O0"}
    return [({}, True), (off, False), (bare, False), (bare | {knob: True}, True)]


def assert_gradients_for_many_vectors(output: Tensor, wanted: Sequence[Tensor]) -> None:
    """Assert that both of torch's ways to batch gradients give those of one vector at a time."""
    vectors = torch.randn(3, *output.shape)

    def gradients_for(vector: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, wanted, vector, retain_graph=True)

    one_by_one = [torch.stack(each) for each in zip(*map(gradients_for, vectors))]
    for found in (
        torch.vmap(gradients_for)(vectors),
        torch.autograd.grad(output, wanted, vectors, is_grads_batched=True),
    ):
        for each, right in zip(found, one_by_one):
            torch.testing.assert_close(each, right)


def reads_of_weight(module: nn.Module, x: Tensor) -> int:
    """How often a call computes the weight, by a parametrization that is registered now.

    Some parametrizations change in each read, as spectral_norm does.
    """

    class Counted(nn.Module):
        calls = 0

        def forward(self, weight: Tensor) -> Tensor:
            self.calls += 1
            return weight * 2

    counted = Counted()
    parametrize.register_parametrization(module, "weight", counted)
    counted.calls = 0
    module(x)
    return counted.calls
