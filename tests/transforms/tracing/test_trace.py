"""A traced value is a tensor for Python code that asks, not for C++; imports are not followed."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fusedoptim import transforms
from fusedoptim._torch_private import count_function_modes
from tests.transforms.helpers import CONV, assert_right, fingerprint, fold, randomise
from tests.transforms.models import Block, images
from transforms.tracing.watch import TensorReads, Watch


@functools.singledispatch
def _dispatched(x: object) -> bool:
    return False


@_dispatched.register
def _(x: Tensor) -> bool:
    return True


def _matches(x: object) -> bool:
    match x:
        case Tensor():
            return True
    return False


QUESTIONS: dict[str, Callable[[Any], object]] = {
    "isinstance": lambda x: isinstance(x, Tensor),
    "one of several": lambda x: isinstance(x, (Mapping, list, Tensor)),
    "union": lambda x: isinstance(x, list | Tensor),
    "is_tensor": torch.is_tensor,
    "class": lambda x: x.__class__ is Tensor,
    "pattern": _matches,
    "singledispatch": _dispatched,
    "no parameter": lambda x: not isinstance(x, nn.Parameter),
    "no mapping": lambda x: not isinstance(x, Mapping),
    "among calls": lambda x: len([isinstance(x, Tensor) and abs(-1)]) == 1,
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_code_that_asks_for_the_class_gets_that_of_a_tensor(name: str) -> None:
    class Asks(Block):
        def forward(self, x: Tensor) -> Tensor:
            if not QUESTIONS[name](x):
                return x
            return self.norm(self.conv(x))

    model = randomise(Asks())
    optimized, report = fold(model)
    assert len(report.done(CONV)) == 1, report
    assert_right(optimized, model, images())


def test_imports_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Following the lines of what forward imports, such as torch._dynamo, would take 20 seconds."""
    body = "import sys\ndef f(): return sys._getframe().f_trace is not None\nwas_followed = f()\n"
    (tmp_path / "imported_lazily.py").write_text(body)
    (tmp_path / "fails_to_import.py").write_text(f"{body}raise ImportError\n")
    monkeypatch.syspath_prepend(tmp_path)
    is_followed: list[bool] = []

    class Finder:
        """Python asks it for each module, as it asks pytest."""

        @staticmethod
        def find_spec(*_: object) -> None:
            if is_followed is not None:  # a condition
                is_followed.append(sys._getframe().f_trace is not None)

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])

    class Imports(Block):
        def forward(self, x: Tensor) -> Tensor:
            import imported_lazily  # type: ignore[import-not-found]  # made above

            try:
                import fails_to_import  # type: ignore[import-not-found]  # noqa: F401  # as above
            except ImportError:
                x = x + imported_lazily.was_followed
            return self.norm(self.conv(x))

    model = randomise(Imports())
    assert len(fold(model)[1].done(CONV)) == 1
    assert sys.modules.pop("imported_lazily").was_followed is False
    assert is_followed
    assert not any(is_followed)


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


def _scripted(x: Tensor) -> Tensor:
    result: Tensor = _script()(x)
    return result


@functools.cache
def _script() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script`")
        return torch.jit.script(_negative)


def _negative(x: Tensor) -> Tensor:
    return -x


def _nested(x: Tensor) -> Tensor:
    result: Tensor = torch.nested.nested_tensor([x[0], x[1]]).to_padded_tensor(0.0)
    return result


INTO_CPP: dict[str, Callable[[Tensor], Tensor]] = {
    "autograd function": _Double.apply,
    "scripted function": _scripted,
    "checkpoint": lambda x: checkpoint(_negative, x, use_reentrant=True),
    "nested tensor": _nested,
    "constructor": lambda x: torch.Tensor(x),
    "dlpack": lambda x: torch.from_dlpack(torch.utils.dlpack.to_dlpack(x)),
}


@pytest.mark.parametrize("name", INTO_CPP)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_code_in_cpp_cannot_be_traced(name: str) -> None:
    class Calls(Block):
        def forward(self, x: Tensor) -> Tensor:
            return INTO_CPP[name](self.norm(self.conv(x)))

    model = randomise(Calls())
    _script()  # outside of a trace
    others = []  # whatever has memory next to that of a traced value
    for _ in range(20):
        _, report = fold(model)
        assert "cannot be traced" in report.left(CONV)[0].what
        others.append(torch.randn(3))


class Catching(nn.Module):
    """Code that catches whatever is raised in it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.inner(x)
        except BaseException:
            return x

    def inner(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.norm(y) if self.training or len(y.shape) else y


@pytest.mark.parametrize("method", ["_begin", "_follow"])
def test_interrupts_of_the_trace_function(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """They are raised at the end of the trace: a trace function that raises may crash CPython."""
    model = Catching().eval()
    before = fingerprint(model)
    own: Any = getattr(Watch, method)

    def interrupted(*given: Any) -> Any:
        if any(getattr(each, "f_code", None) is Catching.inner.__code__ for each in given):
            raise KeyboardInterrupt
        return own(*given)

    with monkeypatch.context() as patched:
        patched.setattr(Watch, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            transforms.optimize(model, inplace=True)
    assert fingerprint(model) == before
    assert_right(transforms.optimize(model), model, images())


@pytest.mark.parametrize("recorder", [TensorReads, Watch])
def test_interrupts_of_an_exit(monkeypatch: pytest.MonkeyPatch, recorder: type) -> None:
    """What a trace has begun ends although an interrupt came first."""
    model = Catching().eval()
    before, tracer = fingerprint(model), sys.gettrace()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(recorder, "__exit__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            transforms.optimize(model, inplace=True)
    assert count_function_modes() == 0
    assert sys.gettrace() is tracer
    assert fingerprint(model) == before
    assert_right(transforms.optimize(model), model, images())
