"""Helpers of the optimizers' tests.

Parameters of every relevant layout, an optimizer compared with its float64 reference, and
assertions that a call changes nothing.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests import running
from tests.conftest import SEED
from tests.optimizer_cases import ALL_CASES, CASES, OptimizerCase, configuration_id
from tests.running import in_threads
from tests.tolerances import ARITHMETIC, Bounded, clipping, joined, number

each_class = pytest.mark.parametrize("case", CASES, ids=configuration_id)
"""Each class, in its default form."""
each_case = pytest.mark.parametrize("case", ALL_CASES, ids=configuration_id)
"""Each class, and each with ``split=True``."""
each_case_and_dtype = pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, dtype) for case in ALL_CASES for dtype in case.dtypes],
    ids=configuration_id,
)
each_way_to_copy = pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))],
    ids=["copy", "pickle"],
)


def _dense(*shape: int) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: torch.randn(shape, dtype=torch.float64).to(dtype)


def _channels_last(*shape: int) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: _dense(*shape)(dtype).to(memory_format=torch.channels_last)


# Sizes around the SIMD width, beyond one chunk with a tail, empty, 0-d, and all kinds of strides.
LAYOUTS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "1": _dense(1),
    "15": _dense(15),
    "16": _dense(16),
    "17": _dense(17),
    "1000": _dense(1000),
    "65537": _dense(65537),
    "3x4x5": _dense(3, 4, 5),
    "strided": lambda dtype: _dense(34, 10)(dtype)[::2, 1::3],
    "transposed": lambda dtype: _dense(5, 7)(dtype).t(),
    "channels_last": _channels_last(2, 3, 5, 7),
    "1x8x1x1 channels_last": _channels_last(1, 8, 1, 1),
    "empty": _dense(0),
    "3x0": _dense(3, 0),
    "0-d": _dense(),
}

# One of each kind, for tests that need no particular size.
FEW_LAYOUTS = ("17", "1000", "strided", "channels_last", "empty", "0-d")


def make_params(dtype: torch.dtype, layouts: Sequence[str] = tuple(LAYOUTS)) -> list[Parameter]:
    return [Parameter(LAYOUTS[layout](dtype)) for layout in layouts]


def nested_tensor(*parts: Tensor) -> Tensor:
    """A nested tensor that says it is strided, but has no strides."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # they are a prototype
        return torch.nested.nested_tensor(list(parts))


def random_like(param: Tensor) -> Tensor:
    """A gradient with no element near zero, where dividing by the magnitude has no meaning."""
    grad = torch.randn_like(param)
    parts = torch.view_as_real(grad) if grad.is_complex() else grad
    parts += torch.where(parts < 0, -0.5, 0.5)
    return grad


def single(
    case: OptimizerCase, layout: str = "17", dtype: torch.dtype = torch.float32, **kwargs: Any
) -> tuple[Parameter, Any]:
    """A parameter with a gradient, and its optimizer: by default in the last configuration."""
    (p,) = make_params(dtype, [layout])
    optimizer = case.make([p], **(kwargs or case.kwargs[-1]))
    p.grad = random_like(p)
    return p, optimizer


def params_of(optimizer: torch.optim.Optimizer) -> list[Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def step_alike(*optimizers: Any, grads: Sequence[Tensor] | None = None) -> None:
    """Step each optimizer with the same gradients, new ones unless ``grads`` are given."""
    if grads is None:
        grads = [random_like(p) for p in params_of(optimizers[0])]
    for optimizer in optimizers:
        for p, grad in zip(params_of(optimizer), grads):
            p.grad = grad.clone()
        optimizer.step()


def widened(tensor: Tensor) -> Tensor:
    """A copy in float64 (or complex128)."""
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.detach().to(wide, copy=True)


def upper_half(values: Tensor) -> Tensor:
    """The bfloat16 that is the first 16 bits of each float32: truncated, not rounded."""
    return (
        (values.detach().contiguous().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    )


def as_real(tensor: Tensor) -> Tensor:
    """The real and imaginary parts of a complex tensor; a real tensor unchanged."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def exact_values(optimizer: Any) -> dict[Tensor, Tensor]:
    """The value that each parameter stands for: its own, or that of both its halves."""
    return dict(zip(params_of(optimizer), optimizer.master_params()))


def snapshot(optimizer: Any) -> dict[Tensor, dict[str, Any]]:
    """Copies of an optimizer's state."""
    return {
        p: {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
        for p, state in optimizer.state.items()
    }


def assert_same_state(optimizer: Any, expected: dict[Tensor, dict[str, Any]]) -> None:
    """Assert that an optimizer's state is exactly ``expected``."""
    assert optimizer.state.keys() == expected.keys()
    for p, state in expected.items():
        assert optimizer.state[p].keys() == state.keys()
        for key, value in state.items():
            now = optimizer.state[p][key]
            assert now.layout == value.layout
            if not value.is_meta:
                assert torch.equal(now.to_dense(), value.to_dense())


def values_after(
    cls: type[Any], start: list[float], grads: Sequence[list[float]], **kwargs: Any
) -> list[float]:
    """The float64 values of one parameter after each step with these gradients."""
    p = Parameter(torch.tensor(start, dtype=torch.float64))
    optimizer = cls([p], lr=0.1, **kwargs)
    values = []
    for grad in grads:
        p.grad = torch.tensor(grad, dtype=torch.float64)
        optimizer.step()
        values += p.tolist()
    return values


def bits(tensor: Tensor) -> Tensor:
    """A copy of the values as bytes, which compare equal even where the values are NaN."""
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return dense.resolve_conj().resolve_neg().flatten().clone().view(torch.uint8)


def assert_same_bits(one: Any, other: Any) -> None:
    """The parameters, exact values and state of two optimizers."""
    for p, q in zip(params_of(one), params_of(other), strict=True):
        assert torch.equal(bits(p), bits(q))
        state, expected = one.state.get(p, {}), other.state.get(q, {})
        assert state.keys() == expected.keys()
        for key, value in state.items():
            assert (value.dtype, value.layout) == (expected[key].dtype, expected[key].layout)
            assert torch.equal(value.to_dense(), expected[key].to_dense())


@contextlib.contextmanager
def unchanged(optimizer: Any) -> Iterator[None]:
    """Assert that parameters, their versions, gradients and state are unchanged at the end."""
    params = [p for p in params_of(optimizer) if not p.is_meta]
    values, versions = [bits(p) for p in params], [p._version for p in params]
    grads = [p.grad for p in params]
    grad_values = [bits(grad) if type(grad) is Tensor else None for grad in grads]  # no fakes
    state = snapshot(optimizer)
    groups = len(optimizer.param_groups)
    yield
    assert len(optimizer.param_groups) == groups
    assert [p._version for p in params] == versions
    assert all(map(torch.equal, map(bits, params), values))
    for p, grad, value in zip(params, grads, grad_values):
        assert p.grad is grad
        assert value is None or torch.equal(bits(grad), value)
    assert_same_state(optimizer, state)


@contextlib.contextmanager
def refused(optimizer: Any, error: Any, match: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Assert that an error is raised and nothing changes."""
    with unchanged(optimizer), pytest.raises(error, match=match) as raised:
        yield raised


def through_a_file(state_dict: Any) -> Any:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file)


def run_script(
    script: str, *arguments: str, returncode: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script with this run's seed in another process, which must end with ``returncode``."""
    variables = {"FUSEDOPTIM_TEST_SEED": str(SEED), **variables}
    done = running.run_script(script, *arguments, **variables)
    assert done.returncode == returncode, (
        f"ended with {done.returncode}\n{done.stdout}{done.stderr}"
    )
    return done


def run_in_threads(*functions: Callable[[], object]) -> None:
    """Call each in a thread of its own; raise the first error."""
    in_threads(lambda function: function(), *functions)


def assert_lets_other_threads_run(action: Callable[[], object]) -> None:
    """Assert that an action releases the interpreter's lock without being forced to."""
    go, went = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: go.wait() and went.set())
    interval = sys.getswitchinterval()
    thread.start()
    sys.setswitchinterval(1000)  # seconds
    try:
        go.set()
        action()
        assert went.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()


def assert_within(actual: Tensor, expected: Tensor, error: Tensor | float, what: str) -> None:
    """Raise if an element is further from its expected value than its ``error``."""
    assert_all_within([(actual, expected, error, what)])


def assert_all_within(compared: Sequence[tuple[Tensor, Tensor, Tensor | float, str]]) -> None:
    """Do the same for several tensors: one comparison of many is as fast as of one."""
    pairs = [(as_real(a.to_dense()), as_real(e), error) for a, e, error, _ in compared]
    actual = torch.cat([a.flatten() for a, _, _ in pairs]).double()
    expected = torch.cat([e.flatten() for _, e, _ in pairs])
    errors = [torch.as_tensor(error, dtype=torch.float64) for _, _, error in pairs]
    error = torch.cat([err.expand_as(e).flatten() for (_, e, _), err in zip(pairs, errors)])
    off = (actual - expected).abs()
    good = off <= error
    if good.all() and off.sum().isfinite():
        return
    # Infinities and NaNs have no distance: they have to be equal.
    good = good & expected.isfinite() | (actual == expected)
    good |= actual.isnan() & expected.isnan()
    parts = (part.split([e.numel() for _, e, _ in pairs]) for part in (good, off, error))
    for *part, (_, _, _, what) in zip(*parts, compared):
        is_good, distance, allowed = part
        if not is_good.all():
            i = int((~is_good).nonzero()[0])
            raise AssertionError(
                f"{what}: element {i} is {distance[i]:.3g} off, and {allowed[i]:.3g} is allowed"
            )


_one_reference = threading.Lock()
"""Taken by each step of a reference: the small operations of several threads would spend most of
their time on handing Python's lock to each other."""


class SideBySide:
    """An optimizer and its float64 reference on the same values and gradients.

    The default is the case's last configuration, on a float32 parameter of each layout.
    """

    def __init__(
        self,
        case: OptimizerCase,
        kwargs: dict[str, Any] | None = None,
        params: list[Parameter] | None = None,
    ):
        self.case = case
        kwargs = case.kwargs[-1] if kwargs is None else kwargs
        params = make_params(torch.float32) if params is None else params
        self.kwargs = dict(kwargs)
        self.params = params
        self.ours = case.make(params, **kwargs)
        values = self._values()
        self.dtype = next(iter(values.values())).dtype
        self.references = [Parameter(widened(values[p])) for p in params]
        self.torchs = case.make_reference(self.references, **self.kwargs)
        self._errors: dict[Tensor, dict[str, Tensor]] = {}

    def _values(self) -> dict[Tensor, Tensor]:
        return exact_values(self.ours)

    def set_gradients(self, skip: Sequence[int] = ()) -> None:
        for i, (p, reference) in enumerate(zip(self.params, self.references)):
            if i in skip:
                p.grad = reference.grad = None
            else:
                p.grad = random_like(p)
                reference.grad = widened(p.grad)

    def step(self, ours: Callable[[], None] | None = None) -> None:
        """Step both; ``ours``, if given, is a function that steps our optimizer."""
        (ours or self.ours.step)()
        self._step_reference()

    def _step_reference(self) -> None:
        with _one_reference:
            self._carry_errors()
            self.torchs.step()

    def train(self, steps: int = 1, skip: Sequence[int] = (), **kwargs: Any) -> None:
        """Take steps with new gradients, and compare after each; :meth:`check` gets the rest."""
        for _ in range(steps):
            self.set_gradients(skip)
            self.check(**kwargs)

    def check(
        self,
        ours: Callable[[], None] | None = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
        limit: float | None = None,
        also: float = 1.0,
    ) -> None:
        """Step both with the gradients that they have, and compare.

        Args:
            ours: steps our optimizer.
            scaler: scales our gradients, and steps our optimizer instead.
            limit: to which the norm is clipped: the reference's before the step, ours in it.
            also: a further factor of our gradients, besides the scaler's.
        """
        if scaler is not None:
            self.scale_gradients(scaler, also)
            ours = functools.partial(scaler.step, self.ours)
        if limit is not None:
            self.ours.max_grad_norm = limit
            torch.nn.utils.clip_grad_norm_(self.references, limit)
        self.step(ours)
        if scaler is not None:
            scaler.update()
        self.assert_equal()

    def scale_gradients(self, scaler: torch.amp.GradScaler, also: float = 1.0) -> None:
        """Scale our gradients; the reference gets, in float64, what unscaling them gives."""
        scale = scaler.get_scale() * also
        for p, reference in zip(self.params, self.references):
            if p.grad is not None:
                p.grad.mul_(scale)
                reference.grad = widened(p.grad) / scale

    def _bounded(self, value: Tensor, error: Tensor | float = 0.0) -> Bounded:
        return Bounded(as_real(value), error, ARITHMETIC[self.dtype])

    def _carry_errors(self) -> None:
        """Bound how far ours may be from the reference's next step; see tests/tolerances.py."""
        clipped = self._clipping()
        carried: dict[Tensor, dict[str, Bounded]] = {}
        for group in self.torchs.param_groups:
            options = {k: _hosts(v) for k, v in self.case.hyper_parameters(group).items()}
            for t, params in self._alike(group["params"]):
                values = [carried[p] if p in carried else self._bounded_values(p) for p in params]
                state = {k: joined([each[k] for each in values]) for k in values[0]}
                grad = joined([self._bounded(p.grad) for p in params])
                if clipped is not None:
                    grad = grad * clipped
                new: Any = self.case.algorithm(state.pop("param"), grad, state, t, **options)
                state["param"] = new.stored(self.dtype)
                shapes = [as_real(p).shape for p in params]
                parts = {k: value.split(shapes) for k, value in state.items()}
                for i, p in enumerate(params):
                    carried[p] = {k: part[i] for k, part in parts.items()}
        for p, new in carried.items():
            self._errors[p] = {k: v.error for k, v in new.items()}

    def _alike(self, params: Sequence[Tensor]) -> list[tuple[int, list[Tensor]]]:
        """Step numbers, each with the parameters at that step that one formula can update.

        If the formula is elementwise, these are all parameters with the same kind of state, as one
        evaluation for many parameters is as fast as for one.
        """
        found: dict[Any, list[Tensor]] = {}
        for turn, p in enumerate(params):
            if p.grad is None:
                continue
            state = self.torchs.state.get(p, {})
            earlier = sum(other is p for other in params[:turn])  # a parameter may be given twice
            t = int(state.get("step", 0)) + 1 + earlier
            kind = (t, *state) if self.case.is_elementwise and not earlier else (t, turn)
            found.setdefault(kind, []).append(p)
        return [(kind[0], alike) for kind, alike in found.items()]

    def _bounded_values(self, p: Tensor) -> dict[str, Bounded]:
        """A reference's parameter and state, with the errors so far."""
        errors = self._errors.get(p, {})
        values = {k: v for k, v in self.torchs.state.get(p, {}).items() if k != "step"}
        values["param"] = p
        return {k: self._bounded(v, errors.get(k, 0.0)) for k, v in values.items()}

    def _clipping(self) -> Bounded | None:
        """Our clipping's part in the gradients' error; the reference's are already clipped."""
        if self.ours.max_grad_norm is None:
            return None
        params = params_of(self.ours)
        grads = [widened(p.grad) for p in params if p.grad is not None]
        dense = [as_real(grad.to_dense() if grad.is_sparse else grad) for grad in grads]
        if not dense:
            return None
        narrowest = min((ARITHMETIC[p.dtype] for p in params), key=lambda dtype: dtype.itemsize)
        return clipping(dense, self.ours.max_grad_norm, narrowest)

    def assert_equal(self) -> None:
        values = self._values()
        states = [
            {k: v for k, v in self.ours.state.get(p, {}).items() if k != "trail"}
            for p in self.params
        ]
        actual = self._whole([value for state in states for value in state.values()])
        self._compare(values, states, iter(actual))

    def _compare(
        self, values: dict[Tensor, Tensor], states: list[Any], actual: Iterator[Tensor]
    ) -> None:
        """Compare parameters and state, of which ``actual`` has the values in order."""
        compared: list[tuple[Tensor, Tensor, Tensor | float, str]] = []
        for i, (p, reference, state) in enumerate(zip(self.params, self.references, states)):
            errors = self._errors.get(reference, {})
            compared.append((values[p], reference, errors.get("param", 0.0), f"parameter {i}"))
            expected = self.torchs.state.get(reference, {})
            assert set(state) == set(expected) - {"trail"}
            for key in state:
                error = 0.0 if key == "step" else errors.get(key, 0.0)
                compared.append((next(actual), expected[key], error, f"{key} of parameter {i}"))
        assert_all_within(compared)

    @staticmethod
    def _whole(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return tensors


def few(case: OptimizerCase) -> SideBySide:
    """A pair with one parameter of each kind of layout."""
    return SideBySide(case, params=make_params(torch.float32, FEW_LAYOUTS))


def new_scaler(scale: float = 256.0, **kwargs: Any) -> torch.amp.GradScaler:
    """A GradScaler that has scaled a loss."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, **kwargs)
    scaler.scale(torch.ones(()))
    return scaler


def _hosts(value: Any) -> Any:
    """A hyper-parameter as the host computes with it."""
    if isinstance(value, tuple):
        return tuple(map(_hosts, value))
    return value if value is None or isinstance(value, bool) else number(value)
