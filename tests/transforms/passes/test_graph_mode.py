"""``optimize(graph_mode=True)`` and the backend are right, reported, undone, and not copied."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusedoptim import transforms
from tests.fusedoptim.helpers import run_script
from tests.project import PROJECT
from tests.transforms.graph.helpers import LAST, Encoder, Residual, Squeezed, assert_as_eager
from tests.transforms.helpers import (
    assert_right,
    assert_same_state,
    copied,
    exactly,
    fingerprint,
    randomise,
    without_addresses,
)
from transforms.graph import products
from transforms.graph.plan import Plan
from transforms.rewrites.compiled_call import is_entered
from transforms.rewrites.packed import supported_dtypes
from transforms.rewrites.watched_parameter import WatchedParameter

KNOB = "graph_mode"


@pytest.fixture(autouse=True)
def _nothing_is_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def images() -> Tensor:
    return torch.randn(2, 3, 9, 9).to(memory_format=LAST)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_right_reported_and_restored(dtype: torch.dtype | None) -> None:
    model, x = randomise(Residual()), images()
    before, state = fingerprint(model), copied(model.state_dict())
    ours = transforms.optimize(
        model, inplace=True, graph_mode=True, auto_channels_last=True, dtype=dtype, sample_input=x
    )
    assert ours is model
    (entry,) = transforms.report(ours).done(KNOB)
    done = "1 graph; "
    if dtype is None or dtype in supported_dtypes():
        done += "products packed: 4, activations fused: 4, additions fused: 2, "
    assert entry.what.startswith(done)
    assert_same_state(ours.state_dict(), state)
    plain = randomise(Residual())
    plain.load_state_dict(state)
    for _ in range(2):
        assert_right(ours, plain, images(), dtype=dtype or torch.float32)
    transforms.restore(ours)
    assert without_addresses(fingerprint(ours)) == without_addresses(before)
    assert all(type(p) is nn.Parameter for p in ours.parameters())
    assert ours._compiled_call_impl is None


@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize(
    ("part", "done"),
    [
        ("fuse", "products packed: 3, results in place: 2, constants kept: 4"),
        (
            "fold_constants",
            "products packed: 3, activations fused: 1, results in place: 4, constants kept: 3",
        ),
    ],
)
def test_without_a_part(part: str, done: str, level: str) -> None:
    model, x = randomise(Encoder()), torch.randn(3, 31, 96)
    options = {"level": level, "graph_mode": True, "sample_input": x, part: False}
    ours = transforms.optimize(model, **options)
    assert transforms.report(ours).done(KNOB)[0].what == f"1 graph; {done}"
    for _ in range(2):
        assert_right(ours, exactly(model, x), x)


def test_convolutions_without_fusing() -> None:
    """oneDNN Graph would fuse too, so nothing is computed in C++."""
    model, x = randomise(Residual()).to(memory_format=LAST), images()
    ours = transforms.optimize(model, graph_mode=True, fuse=False, sample_input=x)
    (entry,) = transforms.report(ours).done(KNOB)
    assert "products packed: 4" in entry.what
    assert "fused" not in entry.what
    for _ in range(3):
        assert_right(ours, model, x)
    assert not any(each for plan in _plans() for each in plan._kept.scripts.values())


@pytest.mark.parametrize("make", [Squeezed, Encoder])
def test_alone(make: type[nn.Module]) -> None:
    model = randomise(make())
    x = torch.randn(33, 24, 9, 9) if make is Squeezed else torch.randn(3, 31, 96)
    ours = transforms.optimize(model, level="O0", graph_mode=True)
    assert list(transforms.report(ours).passes) == [KNOB]
    assert transforms.report(ours).done(KNOB)[0].what == "captured at the first call"
    right = exactly(model, x)
    for _ in range(2):
        assert_right(ours, right, x)
    assert any(type(p) is WatchedParameter for p in ours.parameters())
    transforms.restore(ours)
    assert not any(type(p) is WatchedParameter for p in ours.parameters())


def test_hooks_run() -> None:
    model = randomise(Residual())
    seen: list[object] = []
    ours = transforms.optimize(model, graph_mode=True)
    ours.register_forward_hook(lambda *args: seen.append(1))
    ours.second.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.second.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    assert_right(ours, model, images())
    assert seen


class Interrupted(Residual):
    """torch captures its forward in two parts."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return super().forward(x + y.sum() * 1e-3) if y.sum() < 1e9 else y


@pytest.mark.parametrize("make", [Residual, Interrupted])
def test_hooks_come_and_go_after_the_first_call(make: type[Residual]) -> None:
    model, x = randomise(make()), images()
    ours = transforms.optimize(model, graph_mode=True, sample_input=x)

    def register(hooked: Any) -> list[Any]:
        return [
            hooked.register_forward_hook(lambda *args: args[-1] * 2),
            hooked.second.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
        ]

    for _ in range(2):
        assert_right(ours, model, x)
        handles = list(zip(register(ours), register(model), strict=True))
        assert_right(ours, model, x)
        for pair in handles:
            for handle in pair:
                handle.remove()
            assert_right(ours, model, x)
    seen: list[object] = []
    handle = nn.modules.module.register_module_forward_hook(lambda *args: seen.append(1))
    with torch.no_grad():
        model(x)
        expected = len(seen)
        ours(x)
    handle.remove()
    assert len(seen) == 2 * expected > 0


def test_many_changes_of_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures of earlier hooks stay in torch, so there is a limit; then nothing is captured."""
    monkeypatch.setattr("transforms.rewrites.compiled_call._MOST_CAPTURES", 2)
    model, x = randomise(Residual()), images()
    ours = transforms.optimize(model, graph_mode=True)
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    for factor in (1, 2, 3, 4):
        handles = [
            each.register_forward_hook(lambda *args, factor=factor: args[-1] * factor)
            for each in (ours, model)
        ]
        assert_right(ours, model, x)
        for handle in handles:
            handle.remove()
    assert graphs["unique_graphs"] == before + 2


def test_many_kinds_of_calls_are_captured() -> None:
    """There are more of them than torch.compile captures by default."""
    # Of two outputs, torch's own GELU is farther off than three draws of rounding errors allow.
    model = nn.Sequential(nn.Linear(3, 64), nn.GELU()).eval()
    ours = transforms.optimize(model, graph_mode=True)
    stats = torch._dynamo.utils.counters["stats"]
    before, kinds = stats["unique_graphs"], torch._dynamo.config.recompile_limit + 2
    for rank in range(1, kinds + 1):
        assert_right(ours, model, torch.randn(*[1] * (rank - 1), 3))
    assert stats["unique_graphs"] == before + kinds


def test_hooks_of_others_compile_nothing() -> None:
    model, x = randomise(Residual()), images()
    ours = transforms.optimize(model, graph_mode=True, sample_input=x)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    nn.ReLU().register_forward_hook(lambda *args: None)
    assert_right(ours, model, x)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


@torch.no_grad()
def test_parameters_replaced_by_others() -> None:
    """Parameters are replaced by None, by a tensor and by a buffer."""
    model, x = randomise(Residual()), images()
    ours = transforms.optimize(model, graph_mode=True, sample_input=x)
    bias, weight = torch.randn_like(model.second.bias), torch.randn_like(model.second.weight)
    for second in (model.second, ours.second):
        second.bias = None
    assert_as_eager(ours, model, x)
    for second in (model.second, ours.second):
        second.bias = nn.Parameter(bias.clone())
        del second.weight
        second.weight = weight.clone()
    assert_as_eager(ours, model, x)
    for second in (model.second, ours.second):
        del second.weight
        second.register_buffer("weight", 2 * weight)
    assert_as_eager(ours, model, x)
    for second in (model.second, ours.second):
        second.weight.mul_(3)
    assert_as_eager(ours, model, x)


def test_twice_and_copies() -> None:
    model, x = randomise(Residual()), images()
    ours = transforms.optimize(model, graph_mode=True, sample_input=x)
    entries, right = transforms.report(ours).passes[KNOB], exactly(model, x)
    assert transforms.optimize(ours, inplace=True, graph_mode=True) is ours
    assert transforms.report(ours).passes[KNOB] == entries
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert other._compiled_call_impl is None
        assert_right(other, right, x)
        (left,) = transforms.report(other).left(KNOB)
        assert "graph_mode=True, inplace=True" in left.what
        again = transforms.optimize(other, inplace=True, graph_mode=True)
        assert transforms.report(again).done(KNOB)
        assert_right(again, right, x)
        transforms.restore(again)
        assert again._compiled_call_impl is None


@pytest.mark.filterwarnings("ignore:the model was optimized for inference:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # by dynamo
def test_states_and_training() -> None:
    model, other = randomise(Residual()), randomise(Residual())
    ours = transforms.optimize(model, graph_mode=True)
    assert_right(ours, model, images())
    ours.load_state_dict(copied(other.state_dict()))
    assert_right(ours, other, images())
    ours.train()
    with pytest.raises(RuntimeError, match="folded for inference"):
        ours(images())
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"transforms\.restore\(model\) first"):
        transforms.optimize(ours, optimizer)
    with pytest.raises(ValueError, match="graph_mode=True is for a model in eval mode"):
        transforms.optimize(Residual(), torch.optim.SGD(Residual().parameters()), graph_mode=True)
    encoder = Encoder()
    ours = transforms.optimize(encoder.eval(), level="O0", graph_mode=True)
    encoder.train()
    ours.train()
    x = torch.randn(3, 31, 96)
    for each in (encoder, ours):
        torch.manual_seed(0)
        each(x).sum().backward()
    for a, b in zip(ours.parameters(), encoder.parameters()):
        torch.testing.assert_close(a.grad, b.grad)


def test_models_of_torchs_own_modules_alone() -> None:
    """There are more of them than torch.compile compiles for one function."""
    x = torch.randn(65, 257)
    for columns in range(515, 525):
        model = nn.Sequential(nn.Linear(257, columns), nn.GELU()).eval()
        ours = transforms.optimize(model, graph_mode=True, sample_input=x)
        (entry,) = transforms.report(ours).done(KNOB)
        assert entry.what == "1 graph; products packed: 1, activations fused: 1, constants kept: 1"
        assert_right(ours, model, x)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(257, 515)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = -x
        y: Tensor = self.linear(x)
        return y


def test_graph_breaks_are_reported() -> None:
    x = torch.randn(65, 257)
    ours = transforms.optimize(Branching().eval(), graph_mode=True, sample_input=x)
    report = transforms.report(ours)
    assert report.done(KNOB)[0].what.startswith("2 graphs; products packed: 1")
    assert any("ends early" in entry.what for entry in report.left(KNOB))


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            raise ValueError("not to be captured")
        return x + 1


class Batched(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: row + 1)(x)


@pytest.mark.parametrize("cls", [Failing, Batched])
def test_what_cannot_be_captured(cls: type[nn.Module]) -> None:
    model = cls().eval()
    with pytest.warns(transforms.NoEffectWarning, match="captured no graph"):
        ours = transforms.optimize(model, graph_mode=True, sample_input=torch.ones(3))
    assert ours._compiled_call_impl is None
    assert torch.equal(ours(torch.ones(3)), torch.full((3,), 2.0))


def test_a_result_that_differs_is_undone() -> None:
    class Honest(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if torch.compiler.is_compiling() else x

    with pytest.warns(transforms.NoEffectWarning, match="undone: the output for sample_input"):
        ours = transforms.optimize(Honest().eval(), graph_mode=True, sample_input=torch.ones(3))
    assert ours._compiled_call_impl is None


def test_another_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_BINARY", "another")
    message = "this torch differs from torch 2.13 in _convolution_pointwise.binary"
    with pytest.warns(transforms.NoEffectWarning, match=message):
        transforms.optimize(Residual().eval(), graph_mode=True)
    model, x = Encoder().eval(), torch.randn(3, 31, 96)
    compiled = torch.compile(model, backend=transforms.graph_backend)
    with torch.no_grad(), pytest.warns(UserWarning, match=message):
        assert torch.equal(compiled(x), model(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_jit_trace() -> None:
    x = torch.randn(3, 8)
    model = nn.Sequential(nn.Linear(8, 4), nn.GELU()).eval()
    ours = transforms.optimize(model, graph_mode=True, sample_input=x)
    with torch.no_grad():
        traced = torch.jit.trace(ours, x)
    assert_right(traced, model, torch.randn(3, 8))


def test_compiled_by_others() -> None:
    model = Residual().eval()
    model.compile(backend="eager")
    with pytest.raises(TypeError, match=r"then torch\.compile"):
        transforms.optimize(model, graph_mode=True)


@pytest.mark.parametrize("given", [{"mode": "max-autotune"}, {"options": {"a": 1}}])
def test_modes_and_options(given: dict[str, Any]) -> None:
    compiled = torch.compile(nn.Linear(3, 3), backend=transforms.graph_backend, **given)
    (name,) = given
    with pytest.raises(Exception, match=f"the backend 'fusedoptim' has no {name}"):
        compiled(torch.ones(2, 3))


def test_by_name(tmp_path: Path) -> None:
    """torch finds the backend by pyproject.toml's entry point, without an import of ours."""
    group = "torch_dynamo_backends"
    (point,) = PROJECT["project"]["entry-points"][group].items()
    info = tmp_path / "fusedoptim_backend-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fusedoptim-backend\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{point[0]} = {point[1]}\n")
    script = f"""
import sys, torch
sys.path.append({str(tmp_path)!r})
model = torch.nn.Linear(300, 4000).eval()
compiled = torch.compile(model, backend="fusedoptim", fullgraph=True)
with torch.inference_mode():
    x = torch.randn(65, 300)
    torch.testing.assert_close(compiled(x), model(x))
print("transforms.graph.plan" in sys.modules, type(model.weight).__name__)
"""
    assert run_script(script).stdout == "True WatchedParameter\n"
    assert sys.modules["transforms.graph.backend"].graph_backend is transforms.graph_backend


def _plans() -> list[Any]:
    """All plans that keep constants."""
    gc.collect()
    plans = [each for each in gc.get_objects() if type(each) is Plan]
    return [each for each in plans if each._kept is not None]


def _kept_tensors() -> int:
    """The packed weights and other constants of all plans."""
    return sum(len(each._kept.values) for each in _plans())


@pytest.mark.parametrize("end", ["restored", "deleted"])
def test_frees_packed_weights(end: str) -> None:
    before = _kept_tensors()
    model: Any = transforms.optimize(nn.Sequential(nn.Linear(257, 515)).eval(), graph_mode=True)
    with torch.inference_mode():
        for _ in range(2):
            model(torch.randn(65, 257))
    assert _kept_tensors() > before
    if end == "restored":
        transforms.restore(model)
    else:
        del model
    assert _kept_tensors() == before


@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.parametrize("is_inner", [False, True], ids=["whole", "a part"])
def test_quantized_in_place(is_inner: bool, calls: int) -> None:
    """Calibration is not captured, and finds what it finds in the plain model."""
    plain = randomise(nn.Sequential(Residual(), nn.ReLU()))
    batches = [images(), torch.randn(1, 3, 7, 8)]
    expected = transforms.quantize(plain, batches)
    ours = copy.deepcopy(plain)
    part = ours[0] if is_inner else ours
    transforms.optimize(part, inplace=True, graph_mode=True, conv_bn_folding=False, fuse=False)
    with torch.no_grad():
        for _ in range(calls):
            ours(images())
        transforms.quantize(ours, batches, inplace=True)
        found = [
            [(entry.where, entry.error) for entry in transforms.report(each).done("quantize")]
            for each in (ours, expected)
        ]
        assert found[0] == found[1]
        for x in batches:
            torch.testing.assert_close(ours(x), expected(x), rtol=1e-5, atol=1e-5)
    assert is_entered(part)
    assert [part] == [module for module in ours.modules() if is_entered(module)]
