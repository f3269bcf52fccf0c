"""Plans that run in C++ compute what the captured graph does, and see every change."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusedoptim import _torch_private as private
from tests.running import check_script, in_fork
from tests.transforms.graph.helpers import (
    LAST,
    Compiled,
    Residual,
    Squeezed,
    assert_as_eager,
    images,
)
from tests.transforms.helpers import assert_right, needs_bfloat16_products, randomise
from transforms.graph import script


class Arithmetic(NamedTuple):
    """The dtype of models and images, and that of products, if it is another one."""

    dtype: torch.dtype
    products: torch.dtype | None

    def model(self, module: nn.Module) -> nn.Module:
        """A module for it, in eval mode and channels last."""
        return module.eval().to(memory_format=LAST, dtype=self.dtype)

    def images(self, *shape: int) -> Tensor:
        """Random images."""
        return images(*shape).to(self.dtype)


@pytest.fixture(
    params=[
        "float32",
        pytest.param("bfloat16", marks=needs_bfloat16_products),
        pytest.param("autocast", marks=needs_bfloat16_products),
    ]
)
def arithmetic(request: pytest.FixtureRequest) -> Iterator[Arithmetic]:
    """How products are computed: autocast is on where it is needed."""
    low, name = torch.bfloat16, request.param
    with torch.autocast("cpu", low, enabled=name == "autocast"):
        yield Arithmetic(
            low if name == "bfloat16" else torch.float32, low if name != "float32" else None
        )


@pytest.mark.parametrize("make", [Residual, Squeezed])
def test_blocks(make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """No C++ compiler can be started here, as none is needed."""
    for name in ("PATH", "CC", "CXX"):
        monkeypatch.setenv(name, "/bin/false")
    model = randomise(make()).to(memory_format=LAST)
    channels = 3 if make is Residual else 24
    ours, plain = Compiled(model), copy.deepcopy(model)  # which reads its weights' data
    for _ in range(4):
        assert_right(ours, plain, images(2, channels, 17, 15))
    assert ours.is_scripted()


class Chain(nn.Module):
    """A convolution, a function, and another convolution."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Conv2d(17, 33, 3, padding=1)
        self.function = function
        self.second = nn.Conv2d(33, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.function(self.first(x)))
        return y


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu, method": Tensor.relu,
    "relu6": F.relu6,
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 2.0),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "a slope of 0": lambda x: F.leaky_relu(x, 0.0),
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "elu": F.elu,
    "max_pool2d": lambda x: F.max_pool2d(x, 3, stride=2, padding=1),
    "max_pool2d, ceiling": lambda x: F.max_pool2d(x, 2, ceil_mode=True),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2, padding=1),
    "avg_pool2d, strides": lambda x: F.avg_pool2d(x, 3, (2, 1), 1, count_include_pad=False),
    "batch_norm": lambda x: F.batch_norm(x, torch.zeros(33), torch.ones(33)),
    "added": lambda x: F.relu(x + x.sigmoid()),
    "multiplied": lambda x: x * x.mean((2, 3), keepdim=True),
    "joined": lambda x: torch.cat([x[:, :16], x[:, :17]], 1),
    "clamped": lambda x: x.clamp(-1, 1),
    "last norm": lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (33,)).permute(0, 3, 1, 2),
}


@pytest.mark.usefixtures("gradients_off")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_nan_and_infinity_within(name: str, arithmetic: Arithmetic) -> None:
    model = arithmetic.model(Chain(FUNCTIONS[name]))
    ours, x = Compiled(model), arithmetic.images(4, 17, 9, 11)
    for i, number in enumerate((float("nan"), float("inf"), -float("inf"))):
        x[i, i, 3:5, 4] = number
    finite = arithmetic.images(4, 17, 9, 11)
    for _ in range(3):
        assert_as_eager(ours, model, finite, arithmetic=arithmetic.products)
        assert_as_eager(ours, model, x, arithmetic=arithmetic.products)


@pytest.mark.usefixtures("gradients_off")
def test_what_is_scripted(arithmetic: Arithmetic) -> None:
    for name in FUNCTIONS:
        torch.compiler.reset()
        ours = Compiled(arithmetic.model(Chain(FUNCTIONS[name])))
        for _ in range(2):
            ours(arithmetic.images(2, 17, 9, 11))
        assert ours.is_scripted(), name
    for left in (lambda x: x + torch.rand_like(x), lambda x: x.sort(1).values):
        torch.compiler.reset()
        ours = Compiled(arithmetic.model(Chain(left)))
        for _ in range(2):
            ours(arithmetic.images(2, 17, 9, 11))
        assert not ours.is_scripted()


class Shared(nn.Module):
    """A model with values that several functions use, and that are returned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = F.relu(self.first(x))
        z = F.relu(self.second(y) + y)
        again = self.first(z) + y
        return again + x, y, z.permute(0, 2, 3, 1), self.second(x) * x, again.mean((2, 3))


@pytest.mark.usefixtures("gradients_off")
def test_values_that_are_used_again(arithmetic: Arithmetic) -> None:
    model = arithmetic.model(Shared())
    ours, x = Compiled(model), arithmetic.images(2, 16, 9, 7)
    for _ in range(3):
        assert_as_eager(ours, model, x, arithmetic=arithmetic.products)  # x is unchanged, too
    assert ours.is_scripted()
    kept = [each.clone() for each in ours(x)]
    results = ours(x)
    ours(arithmetic.images(2, 16, 9, 7))
    for a, b in zip(results, kept):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("gradients_off")
@pytest.mark.parametrize(
    "constant",
    [
        lambda conv, x: torch.zeros(4),
        lambda conv, x: conv.weight * 2,
        lambda conv, x: (conv.weight * 2)[0, 0].expand_as(x[0, 0, :3, :3]),
    ],
)
def test_results_that_depend_on_no_input(constant: Callable[[nn.Conv2d, Tensor], Tensor]) -> None:
    """The caller may write into them: each call returns new ones."""

    class Constant(nn.Conv2d):
        def forward(self, x: Tensor) -> Any:
            return F.relu(super().forward(x)), constant(self, x)

    model = Constant(16, 16, 3).eval().to(memory_format=LAST)
    ours, x = Compiled(model), images(2, 16, 9, 9)
    for _ in range(4):
        assert_as_eager(ours, model, x)
        ours(x)[1].add_(7)


Convolutions = list[Callable[[Tensor], Tensor]]


def _later(c: Convolutions, x: Tensor) -> Tensor:
    y = c[0](x)
    return c[2](c[1](x) + y) + c[3](y)


def _clamped(c: Convolutions, x: Tensor) -> Tensor:
    y = F.relu(c[0](x))
    return c[2](F.relu(c[1](x) + y)) + c[3](y)


def _in_place(c: Convolutions, x: Tensor) -> Tensor:
    y, z = torch.sigmoid(c[0](x)), c[1](x)
    z += y
    return c[2](z) + c[3](y)


def _twice(c: Convolutions, x: Tensor) -> Tensor:
    y = c[0](x)
    return c[3](c[1](x) + y) + c[4](torch.add(c[2](x), y))


def _joined(c: Convolutions, x: Tensor) -> Tensor:
    y = torch.cat([c[0](x)[:, :8], x[:, 8:]], 1)
    return torch.cat([c[1](x) + y, y], 1)


def _before(c: Convolutions, x: Tensor) -> Tensor:
    y = F.avg_pool2d(c[0](x), 3, 1, 1)
    earlier = torch.cat([y, x], 1)
    return torch.cat([c[2](c[1](x) + y), earlier], 1)


def _begun_before(c: Convolutions, x: Tensor) -> Tensor:
    y = c[0](x)
    begun = c[1](y)  # computed with its activation
    z = c[2](x) + y
    return c[3](torch.tanh(begun)) + c[4](z)


def _input_again(c: Convolutions, x: Tensor) -> Tensor:
    y = c[0](x)
    return torch.sigmoid(c[1](y) + c[2](x)) * y


def _input_added(c: Convolutions, x: Tensor) -> Tensor:
    y = c[0](x)
    return F.relu(c[1](y) + c[2](x)) * c[3](x) + y


def _computed_twice(c: Convolutions, x: Tensor) -> Tensor:
    y = c[0](x)
    return c[1](F.avg_pool2d(y, 3, 1, 1)) + x + F.avg_pool2d(y, 3, 1, 1)


_OVERWRITTEN = (_later, _clamped, _in_place, _twice, _joined, _before, _begun_before)
_TAKEN_TWICE = (_input_again, _input_added, _computed_twice)


@pytest.mark.usefixtures("gradients_off")
@pytest.mark.parametrize("function", [*_OVERWRITTEN, *_TAKEN_TWICE])
def test_terms_of_sums_that_are_used_again(
    function: Callable[..., Tensor], arithmetic: Arithmetic
) -> None:
    """The sum would be written over a term, unnoticed with zeros; or the process would end."""

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = (nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(5))
            self.layers = nn.ModuleList(layers)

        def forward(self, x: Tensor) -> Tensor:
            return function(list(self.layers), x)

    model = arithmetic.model(Summed())
    ours = Compiled(model)
    for _ in range(3):
        ours(0 * arithmetic.images(1, 16, 9, 9))
    assert ours.is_scripted()
    for _ in range(2):
        x = arithmetic.images(1, 16, 9, 9)
        assert_as_eager(ours, model, x, arithmetic=arithmetic.products)


@pytest.mark.usefixtures("gradients_off")
def test_sum_of_a_tensor_and_a_size() -> None:
    model = Chain(lambda x: x + x.shape[0]).eval().to(memory_format=LAST)
    ours = Compiled(model, dynamic=True)
    for _ in range(3):
        assert_as_eager(ours, model, images(2, 17, 9, 11))


@pytest.mark.usefixtures("gradients_off")
def test_operators_called_by_themselves_are_left_to_python() -> None:
    add = torch.ops.aten.add.Tensor
    model = Chain(lambda x: add(x, x.sigmoid())).eval().to(memory_format=LAST)
    ours = Compiled(model)
    for _ in range(3):
        assert_as_eager(ours, model, images(2, 17, 9, 11))
    assert not ours.is_scripted()


@pytest.mark.usefixtures("gradients_off")
def test_changes_and_how_often_is_compiled() -> None:
    model = randomise(Residual()).to(memory_format=LAST)
    ours, x = Compiled(model), images(2, 3, 16, 16)
    scripted = []
    for _ in range(4):
        for _ in range(9):
            assert_as_eager(ours, model, x)
        scripted.append(ours.is_scripted())
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.mul_(1.25)
    assert scripted == [True, True, True, False]  # at once, after 2 calls, after 6, after 14


class Headed(nn.Module):
    """A convolution and two Linears, of which only the first gets a packed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 256, 3, padding=1)
        self.wide, self.narrow = nn.Linear(256, 1024), nn.Linear(1024, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.narrow(self.wide(self.conv(x).mean((2, 3))))
        return y


@pytest.mark.usefixtures("gradients_off")
def test_new_data_of_each_parameter(arithmetic: Arithmetic) -> None:
    model = arithmetic.model(Headed()).requires_grad_(False)  # autocast keeps conversions of others
    for parameter in model.parameters():
        torch.compiler.reset()
        ours, x = Compiled(model), arithmetic.images(64, 3, 8, 8)
        for _ in range(3):
            assert_as_eager(ours, model, x, arithmetic=arithmetic.products)
        assert ours.is_scripted()
        parameter.data = parameter.data + 1
        assert_as_eager(ours, model, x, arithmetic=arithmetic.products)


@pytest.mark.usefixtures("gradients_off")
def test_memory_is_freed() -> None:
    model = randomise(Residual()).to(memory_format=LAST)
    ours, x = Compiled(model), images(2, 3, 16, 16)
    for _ in range(3):
        ours(x)
    assert ours.is_scripted()
    weight = weakref.ref(model.second.weight)
    storage = weight().untyped_storage()  # type: ignore[union-attr]  # the model is there
    del model, ours
    torch.compiler.reset()
    gc.collect()
    assert weight() is None
    assert private.storage_use_count(storage._cdata) == 1


@pytest.mark.usefixtures("gradients_off")
def test_another_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function in use stays right when oneDNN forgets what it has packed for another one."""
    model = randomise(Residual()).to(memory_format=LAST)
    ours, x = Compiled(model), images(2, 3, 16, 16)
    refused, its = Compiled(Chain(F.relu).to(memory_format=LAST)), images(2, 17, 9, 11)
    for _ in range(3):
        assert_as_eager(ours, model, x)
        with monkeypatch.context() as none:
            none.setattr(script, "_is_right_group", lambda *_: False)
            refused(its)
    assert ours.is_scripted()
    assert not refused.is_scripted()


def test_a_refused_one_leaves_no_packed_weights() -> None:
    """Its weights would be in memory three times: plain, packed by oneDNN, and by the plan."""
    grown = check_script("""
        import torch
        from torch import nn
        from benchmarks._fresh import _peak, _reset_peak
        from fusedoptim.runtime.memory import return_free_memory
        from tests.transforms.graph.helpers import Compiled
        from transforms.graph import script

        script._is_right_group = lambda *_: False

        def new(width):
            body = nn.Conv2d(3, 64, 1), nn.ReLU(), nn.Flatten()
            return nn.Sequential(*body, nn.Linear(64 * 64, width)).eval()

        x = torch.randn(16, 3, 8, 8)
        with torch.no_grad():
            for width in (1, 4096):  # the first one loads code
                ours = Compiled(new(width))
                return_free_memory()
                before = _reset_peak()
                for _ in range(3):
                    ours(x)
                return_free_memory()
                grown = _reset_peak() - before
        assert ours.counts.packed and not ours.is_scripted()
        print(grown / 2**20)
    """)
    assert 60 < float(grown) < 90  # MiB, of which a packed weight has 64


@pytest.mark.usefixtures("gradients_off")
def test_inference_mode_and_threads() -> None:
    model = randomise(Residual()).to(memory_format=LAST)
    ours, x = Compiled(model), images(2, 3, 16, 16)
    with torch.inference_mode():
        for _ in range(3):
            assert_as_eager(ours, model, x)
    for _ in range(3):
        ours(x)
    assert ours.is_scripted()
    inputs = [images(2, 3, 16, 16) for _ in range(4)]
    expected, found = [ours(each) for each in inputs], [[] for _ in inputs]

    def call(i: int) -> None:
        with torch.no_grad():
            found[i] += [ours(inputs[i]) for _ in range(20)]

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(inputs))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for results, right in zip(found, expected):
        assert len(results) == 20
        for result in results:
            torch.testing.assert_close(result, right, rtol=0, atol=0)


def test_a_fork_while_another_thread_compiles() -> None:
    def check() -> None:
        assert script._compiling.acquire(blocking=False)

    with script._compiling:
        in_fork(check)


@pytest.mark.usefixtures("gradients_off")
def test_the_switch_of_torch_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomise(Residual()).to(memory_format=LAST)
    assert not private.has_onednn_graph()
    ours, x = Compiled(model), images(2, 3, 16, 16)
    for _ in range(3):
        ours(x)
    assert ours.is_scripted()
    assert not private.has_onednn_graph()
    monkeypatch.setattr(private, "traced_graph", None)  # a torch without it
    torch.compiler.reset()
    ours = Compiled(model)
    for _ in range(3):
        assert_as_eager(ours, model, x)
    assert not ours.is_scripted()
    assert ours.counts.packed


@pytest.mark.usefixtures("gradients_off")
def test_an_interrupt_leaves_the_switch_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    switch = private.use_onednn_graph

    def interrupted(is_on: bool) -> None:
        switch(is_on)
        if is_on:
            raise KeyboardInterrupt

    ours, x = Compiled(nn.Conv2d(8, 8, 1)), images(1, 8, 4, 4)
    ours(x)
    monkeypatch.setattr(private, "use_onednn_graph", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ours(x)
    assert not private.has_onednn_graph()


@pytest.mark.usefixtures("gradients_off")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_are_left_to_python(dtype: torch.dtype) -> None:
    model = randomise(Residual()).to(memory_format=LAST, dtype=dtype)
    ours, x = Compiled(model), images(2, 3, 16, 16).to(dtype)
    for _ in range(3):
        assert_as_eager(ours, model, x)
    assert not ours.is_scripted()


def test_gradients_of_inputs() -> None:
    model: Any = randomise(Residual()).to(memory_format=LAST).requires_grad_(False)
    ours, x = Compiled(model), images(2, 3, 16, 16)
    for _ in range(3):
        assert_as_eager(ours, model, x)
    assert ours.is_scripted()
    x.requires_grad_()
    ours(x).sum().backward()
    actual, x.grad = x.grad, None
    model(x).sum().backward()
    torch.testing.assert_close(actual, x.grad)
