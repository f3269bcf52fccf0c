"""Only BatchNorms that follow a convolution in all that a model's code may do are folded."""

from __future__ import annotations

import copy
import importlib
import logging
import re
import sys
import threading
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fusedoptim import transforms
from tests.transforms.helpers import CONV, assert_right, assert_same, fold, randomise
from tests.transforms.models import Block, images
from tests.transforms.tracing.batch_norm_forwards import SHARED
from tests.transforms.tracing.batch_norm_models import LEFT, hook
from tests.transforms.tracing.batch_norm_variables import pair

LOGGER = logging.getLogger(__name__)


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "in place"])
@pytest.mark.parametrize("name", LEFT)
@pytest.mark.filterwarnings("ignore:SyncBatchNorm")
def test_left_alone_and_why(name: str, inplace: bool) -> None:
    model = LEFT[name].make().eval() if name == "not finite" else randomise(LEFT[name].make())
    plain = copy.deepcopy(model)
    SHARED["block"] = getattr(model, "block", model)
    optimized, report = fold(model, inplace=inplace)
    assert report.done(CONV) == []
    assert len(report.left(CONV)) == sum(isinstance(m, _BatchNorm) for m in model.modules())
    reasons = " | ".join(entry.what for entry in report.left(CONV))
    assert re.search(LEFT[name].reason, reasons), reasons
    if name not in ("synchronised", "not finite"):
        x = images().bfloat16() if name == "mixed dtypes" else images()
        expected = outputs(plain, x)
        assert expected
        assert_same(outputs(optimized, x), expected)


_BY_GROUP = """
from tests.transforms.models import Block

class ByGroup(Block):
    def forward(self, x):
        try:
            x.tensors
        except* AttributeError:
            y = self.conv(x)
        else:
            y = self.norm(self.conv(x))
        return y
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="except* is new in Python 3.11")
def test_except_star(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "by_group.py").write_text(_BY_GROUP)
    monkeypatch.syspath_prepend(tmp_path)
    model = randomise(importlib.import_module("by_group").ByGroup())
    optimized, report = fold(model)
    assert report.done(CONV) == []
    x = images()
    assert_same(outputs(optimized, x), outputs(model, x))


def outputs(model: nn.Module, x: Tensor) -> list[Any]:
    """The output for a tensor, and for a list, if the model takes one."""
    SHARED["block"] = getattr(model, "block", model)
    found = []
    with torch.no_grad():
        for each in (x, [x]):
            try:
                found.append(model(each))
            except (TypeError, AttributeError):  # not for lists
                continue
    return found


ACTIVATIONS = {"relu": torch.relu}


class Harmless(Block):
    """A model with conditions and reads that do not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv2 = nn.Conv2d(3, 3, 1)
        self.norm2 = nn.BatchNorm2d(3)
        self.shortcut = None
        self.config = types.SimpleNamespace(act="relu", scale=2.0)
        self.taps = [1]
        self.widths = {"first": (3, 3)}
        self.seen: list[int] = []
        self.layers = nn.ModuleList([nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)])

    def forward(self, x: Any, scale: Tensor | None = None, names: Any = None) -> Any:
        if isinstance(x, (list, tuple)):
            x = torch.cat(tuple(x))
        x = x.to(next(self.parameters()).dtype).to(self.conv.weight.device)
        if not hasattr(x, "shape"):
            raise TypeError(f"no tensor: {x}")
        x = self.conv(x)
        if self.norm is not None and self.widths["first"][0] == 3 and len(self.taps) == 1:
            x = self.norm(x)
        if self.config.act in ACTIVATIONS:
            activation = ACTIVATIONS[self.config.act]
            x = activation(x)
        x = torch.relu(x) if self.config.act.lower() == "relu" else self.conv(x)
        outputs = []
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i in self.taps:
                outputs.append(x)
        identity = x if self.shortcut is None else self.shortcut(x)
        y = self.conv2(x)
        if self.seen is not None:
            self.seen.append(len(self.layers))
        y = self.norm2(y) + identity
        if scale is not None:
            y = y * scale
        if torch.jit.is_scripting():
            warnings.warn("scripted", stacklevel=2)
        return [torch.flatten(y, 1), *outputs] if names is None else y


class ByNames(nn.Module):
    """Layers that a loop finds by names made of fixed values."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(4):
            setattr(self, f"conv{i}", nn.Conv2d(3, 3, 1))
            setattr(self, f"norm{i}", nn.BatchNorm2d(3))

    def forward(self, x: Tensor) -> Tensor:
        names, form = ("norm2", "norm3"), "conv{n}"
        for i in range(2):
            x = getattr(self, f"norm{i}")(getattr(self, f"conv{i}")(x))
            x = getattr(self, names[i])(getattr(self, form.format(n=i + 2))(x))
        return x


def test_layers_found_by_names() -> None:
    model = randomise(ByNames())
    optimized, report = fold(model)
    assert len(report.done(CONV)) == 4
    assert_right(optimized, model, images())


class Untraceable(nn.Module):
    """A model that cannot be traced, and that does no more with its children than call them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.rest = nn.ModuleList([Block(), Block()])
        self.tail = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.sum() > 1e9:
            return x
        for i, block in enumerate(self.rest):
            if i < len(self.rest):
                x = block(x)
        return self.tail(x)


class Logs(Untraceable):
    """Code with a logger, which leads to all others."""

    def forward(self, x: Tensor) -> Tensor:
        LOGGER.debug("a batch of %d", len(x))
        return super().forward(x)


class Flagged(Block):
    """torch.fx cannot trace a flag, which is not a tensor."""

    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        y = self.norm(self.conv(x))
        if twice:
            y = y * 2
        return y


class HeldElsewhere(Block):
    """A tuple that torch does not know of holds the modules, and the same ones after folding."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = (self.conv, self.norm)

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


def _shared_whole() -> nn.Module:
    block = Block()
    return nn.Sequential(block, nn.ReLU(), block)


def _hooked_container() -> nn.Module:
    model = nn.Sequential(pair())
    model[0].register_forward_hook(hook)
    return model


_CONV, _NORM = nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)
FOUND: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "harmless code": (Harmless, 3),
    "untraceable": (lambda: nn.Sequential(Untraceable(), nn.Conv2d(4, 3, 1), _NORM), 5),
    "block shared whole": (_shared_whole, 1),
    "across containers": (lambda: nn.Sequential(nn.Sequential(_CONV), nn.Sequential(_NORM)), 1),
    "inside a hooked container": (_hooked_container, 1),
    "held elsewhere": (HeldElsewhere, 1),
    "optional flag": (Flagged, 1),
}


@pytest.mark.parametrize("name", FOUND)
def test_folded_and_right(name: str) -> None:
    make, count = FOUND[name]
    model = randomise(make())
    optimized, report = fold(model)
    assert (len(report.done(CONV)), report.left(CONV)) == (count, [])
    assert_right(optimized, model, images())


def test_what_other_loggers_hold_does_not_matter() -> None:
    model, handler = randomise(Logs()), logging.NullHandler()
    plain = copy.deepcopy(model)
    handler.model = model.first  # type: ignore[attr-defined]  # as a handler of a trainer might
    other = logging.getLogger("another")
    other.addHandler(handler)
    try:
        optimized, report = fold(model, inplace=True)
    finally:
        other.removeHandler(handler)
    assert (len(report.done(CONV)), report.left(CONV)) == (4, [])
    assert_right(optimized, plain, images())


def test_harmless_arguments() -> None:
    model, x = randomise(Harmless()), images()
    optimized, _ = fold(model)
    assert_right(optimized, model, x, torch.randn(3, 1, 1))
    flagged = randomise(Flagged())
    assert_right(fold(flagged)[0], flagged, x, True)
    with torch.no_grad():
        assert torch.equal(optimized([x[:1], x[1:]], names="y"), optimized(x, names="y"))


def test_norm_in_training_mode_is_left() -> None:
    model = randomise(Block())
    model.norm.train()
    assert "in training mode" in fold(model)[1].left(CONV)[0].what


def test_hooks_of_containers_and_model_survive() -> None:
    model = randomise(nn.Sequential(Block(), nn.Sequential(nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4)))
    seen: list[Tensor] = []
    model.register_forward_hook(lambda m, i, o: seen.append(o))
    model[1].register_forward_hook(lambda m, i, o: seen.append(o))
    optimized, report = fold(model)
    assert seen == []  # tracing calls no hooks
    assert [entry.where for entry in report.done(CONV)] == ["0.norm"]  # the other would show in [1]
    x = images()
    optimized(x)
    before_norm, output = seen
    assert_right(lambda _: before_norm, model[:2], x)
    assert_right(lambda _: output, model, x)


def test_tracing_leaves_no_trace() -> None:
    class Counts(Block):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.count += 1
            return super().forward(x)

    model = randomise(Counts())
    transforms.optimize(model, inplace=True)
    assert model.calls == 0
    assert model.count == 0


UNREADABLE = """
class Net(Block):
    def forward(self, x, raw=False):
        y = self.conv(x)
        return y if raw else self.norm(y)
"""


@pytest.mark.parametrize("file", ["<stdin>", "<string>", "<torch_package_0>.net.py", "gone.py"])
def test_conditions_in_code_without_a_file_are_open(file: str) -> None:
    namespace: dict[str, Any] = {"Block": Block, "__name__": "__main__"}
    exec(compile(UNREADABLE, file, "exec"), namespace)
    model, x = randomise(namespace["Net"]()), images()
    optimized, report = fold(model)
    assert [entry.where for entry in report.left(CONV)] == ["norm"]
    for raw in (False, True):
        assert_right(optimized, model, x, raw)


def _in_a_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_another_thread_may_call_a_model_meanwhile() -> None:
    served, found = randomise(Block()), []

    class Waits(Block):
        """Code that waits until another thread has called another model."""

        def forward(self, x: Tensor) -> Tensor:
            _in_a_thread(lambda: found.append(served(images())))
            return super().forward(x)

    model = randomise(Waits())
    optimized, report = fold(model)
    assert {type(output) for output in found} == {Tensor}  # one for each trace
    assert [entry.where for entry in report.done(CONV)] == ["norm"]
    assert_right(optimized, model, images())


def test_methods_of_a_trace_that_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the end of a trace of torch in another thread, which began during this trace."""
    names = "__call__", "__getattr__"
    for name in names:
        monkeypatch.setattr(nn.Module, name, getattr(nn.Module, name))  # put back in the end
    found: list[dict[str, Any]] = []

    class Watches(Block):
        """Code that notes the methods of nn.Module during a trace."""

        def forward(self, x: Tensor) -> Tensor:
            found.append({name: vars(nn.Module)[name] for name in names})
            return super().forward(x)

    fold(randomise(Watches()))
    assert found[0]["__call__"] is not nn.Module.__call__
    for name, method in found[0].items():
        setattr(nn.Module, name, method)
    model = randomise(Block())
    optimized, report = fold(model)
    assert [entry.where for entry in report.done(CONV)] == ["norm"]
    assert_right(optimized, model, images())


def test_calls_in_threads_of_forward_count() -> None:
    class Threaded(Block):
        """Code that uses the convolution's output in another thread too."""

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            found: list[Tensor] = []
            _in_a_thread(lambda: found.append(self.conv(x)))
            return self.norm(self.conv(x)), found[0]

    model = randomise(Threaded())
    optimized, report = fold(model)
    assert report.done(CONV) == []
    assert_right(optimized, model, images())


def test_models_optimized_in_several_threads() -> None:
    models = [randomise(nn.Sequential(*(Block() for _ in range(10)))) for _ in range(3)]
    counts: list[list[int]] = [[] for _ in models]

    def optimize(model: nn.Module, count: list[int]) -> None:
        count.extend(len(fold(model)[1].done(CONV)) for _ in range(3))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that the threads take turns within a trace
    try:
        threads = [threading.Thread(target=optimize, args=both) for both in zip(models, counts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert counts == [[10, 10, 10]] * len(models)
