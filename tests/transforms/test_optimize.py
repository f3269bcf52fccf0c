"""Optimizing for inference: knobs, repetition, checkpoints, reports and what comes after."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusedoptim import nn as ours
from fusedoptim import transforms
from tests.fusedoptim.helpers import run_script
from tests.transforms.helpers import (
    CONV,
    LINEAR,
    assert_right,
    assert_same_state,
    copied,
    fingerprint,
    hooks,
    interrupts_of,
    randomise,
    without_addresses,
)
from tests.transforms.models import Net, images

DROPOUT, CHANNELS_LAST = "replace_dropout_with_identity", "auto_channels_last"


def passes(model: nn.Module, **arguments: Any) -> list[str]:
    return list(transforms.report(transforms.optimize(model, **arguments)).passes)


def test_levels_and_knobs() -> None:
    model = randomise(Net())
    assert passes(model, level="O0") == []
    assert passes(model, level="O0", conv_bn_folding=True) == [CONV]
    assert passes(model, level="O0", dtype=torch.bfloat16) == ["dtype"]
    for knob in (CONV, LINEAR, DROPOUT, CHANNELS_LAST):
        assert knob not in passes(model, **{knob: False})


def test_dropouts_of_all_kinds() -> None:
    kinds = [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d]
    kinds += [nn.AlphaDropout, nn.FeatureAlphaDropout, ours.Dropout, ours.AlphaDropout]
    model = nn.Sequential(*(kind(0.4) for kind in kinds)).eval()
    model.extra = nn.Dropout()
    model.extra.train()  # on purpose, as for Monte Carlo dropout
    optimized = transforms.optimize(model)
    assert all(isinstance(optimized[i], nn.Identity) for i in range(len(kinds)))
    (left,) = transforms.report(optimized).left(DROPOUT)
    assert left.where == "extra"
    assert "training mode" in left.what
    assert repr(transforms.restore(optimized)) == repr(model)


def test_inplace_keeps_the_parameters() -> None:
    model = randomise(Net())
    ids = {name: id(p) for name, p in model.named_parameters()}
    assert transforms.optimize(model, inplace=True) is model
    assert ids.items() >= {n: id(p) for n, p in model.named_parameters() if n in ids}.items()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_twice_changes_nothing_more(dtype: torch.dtype | None) -> None:
    model = randomise(Net())
    arguments = {"dtype": dtype, "conv_bn_folding": True, "auto_channels_last": True}
    once = transforms.optimize(model, inplace=True, **arguments)
    before, report = fingerprint(once), str(transforms.report(once))
    twice = transforms.optimize(once, inplace=True, **arguments)
    assert twice is once
    assert fingerprint(twice) == before
    assert str(transforms.report(twice)) == report


def test_in_steps_is_as_at_once() -> None:
    model = randomise(Net())
    at_once = transforms.optimize(model, dtype=torch.bfloat16, auto_channels_last=True)
    in_steps = transforms.optimize(model, level="O0", auto_channels_last=True)
    in_steps = transforms.optimize(in_steps, level="O0", conv_bn_folding=True)
    in_steps = transforms.optimize(in_steps, dtype=torch.bfloat16)
    for a, b in zip(at_once.parameters(), in_steps.parameters()):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()
    assert_same_state(in_steps.state_dict(), model.state_dict())


def test_checkpoint_inside_another_model() -> None:
    model = randomise(Net())
    outer = nn.ModuleDict({"net": transforms.optimize(model, dtype=torch.bfloat16)})
    expected = nn.ModuleDict({"net": model}).state_dict()
    assert_same_state(outer.state_dict(), expected)
    outer.load_state_dict(nn.ModuleDict({"net": randomise(Net())}).state_dict())
    outer.load_state_dict(expected)
    assert_same_state(outer.state_dict(), expected)
    assert_same_state(outer["net"].norm.state_dict(), model.norm.state_dict())


@pytest.mark.parametrize("assign", [False, True])
def test_loading_folds_anew(assign: bool) -> None:
    optimized = transforms.optimize(randomise(Net()))
    other = randomise(Net())
    optimized.load_state_dict(copied(other.state_dict()), assign=assign)
    x = images()
    assert_right(optimized, other, x)
    transforms.restore(optimized)
    assert torch.equal(optimized(x), other(x))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_assigned_parameters_of_another_model_stay_unchanged(dtype: torch.dtype | None) -> None:
    optimized, other = transforms.optimize(randomise(Net()), dtype=dtype), randomise(Net())
    before = fingerprint(other)
    optimized.load_state_dict(other.state_dict(keep_vars=True), assign=True)
    with torch.no_grad():
        optimized.conv.weight.mul_(2)
    optimized.state_dict()
    assert fingerprint(other) == before
    optimized.load_state_dict(other.state_dict(keep_vars=True), assign=True)
    assert_same_state(optimized.state_dict(), other.state_dict())
    transforms.restore(optimized)
    assert_right(optimized, other, images())
    assert fingerprint(other) == before


def test_loading_what_does_not_fit() -> None:
    model = randomise(Net())
    optimized = transforms.optimize(model)
    state = model.state_dict()
    state["conv.weight"] = torch.ones(1)
    del state["norm.running_var"]
    with pytest.raises(RuntimeError, match=r"norm.running_var[\s\S]*size mismatch for conv.weight"):
        optimized.load_state_dict(state)
    assert_right(optimized, model, images())


def test_finalize() -> None:
    model = randomise(Net())
    optimized = transforms.optimize(model, dtype=torch.bfloat16)
    assert transforms.report(optimized).kept_bytes > 0
    x = images()
    with torch.autocast("cpu"):
        before = optimized(x)
        assert torch.equal(transforms.finalize(optimized)(x), before)
    assert transforms.report(optimized).kept_bytes == 0
    assert optimized.state_dict()["conv.weight"].dtype == torch.bfloat16
    assert not any("norm" in key for key in optimized.state_dict())
    with pytest.raises(ValueError, match="finalized"):
        transforms.restore(optimized)


@pytest.mark.filterwarnings("ignore:the model was optimized for inference:UserWarning")
@pytest.mark.parametrize("again", ["optimize", "quantize"])
def test_a_finalized_model_stays_final(again: str) -> None:
    model = transforms.finalize(transforms.optimize(randomise(Net())))
    rewritten = (
        transforms.quantize(model, [images()])
        if again == "quantize"
        else transforms.optimize(model)
    )
    with pytest.raises(ValueError, match="finalized"):
        transforms.restore(rewritten)
    with torch.no_grad():
        rewritten(images())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="the model was finalized"):
        transforms.optimize(model.train(), optimizer)
    with pytest.raises(RuntimeError, match="a finalized model is only for inference"):
        model(images())


def test_a_finalized_part_stays_final_in_a_restored_model() -> None:
    plain = randomise(nn.Sequential(Net(), nn.Dropout()))
    model = nn.Sequential(transforms.finalize(transforms.optimize(plain)), nn.Dropout()).eval()
    restored = transforms.restore(transforms.optimize(model))
    assert type(restored[1]) is nn.Dropout
    assert restored.state_dict().keys() == model.state_dict().keys()
    assert_right(restored, plain, images())
    optimizer = torch.optim.SGD(restored.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="0 was finalized"):
        transforms.optimize(restored.train(), optimizer)


def test_report_in_a_terminal_and_in_jupyter() -> None:
    class Odd(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return super().forward(x) + self.norm(y).mean() + y.mean()

    report = transforms.report(transforms.optimize(randomise(Odd())))
    text, html = str(report), report._repr_html_()
    for shown in ("conv_bn_folding", "norm", "conv also feeds", "Odd for inference"):
        assert shown in text
        assert shown in html
    assert html.startswith("<table>")
    assert report.bytes_saved("linear_bn_folding") == 4 * 5 * 4
    with pytest.raises(ValueError, match="has no report"):
        transforms.report(Net())


def test_a_second_restore() -> None:
    model = transforms.restore(transforms.optimize(randomise(Net())))
    with pytest.raises(ValueError, match=r"has no report.*restored already"):
        transforms.restore(model)


@pytest.mark.parametrize(
    "arguments",
    [
        {CONV: True},
        {LINEAR: True},
        {DROPOUT: True},
        {CHANNELS_LAST: True},
        {"dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_no_effect(arguments: dict[str, Any]) -> None:
    (knob,) = arguments
    model = nn.Sequential(nn.ReLU(), nn.LayerNorm(3)).eval()
    with pytest.warns(transforms.NoEffectWarning, match=f"{knob} changed nothing") as warned:
        transforms.optimize(model, **arguments)
    assert {warning.filename for warning in warned} == {__file__}
    transforms.optimize(model)  # without a warning
    with pytest.raises(transforms.NoEffectWarning):  # raised as an error, it undoes everything
        transforms.optimize(model, inplace=True, **arguments)
    with pytest.raises(ValueError, match="has no report"):
        transforms.report(model)


def test_sample_inputs_of_all_kinds() -> None:
    x = images()
    for sample in (x, (x,), {"x": x}):
        optimized = transforms.optimize(randomise(Net()), sample_input=sample)
        assert len(transforms.report(optimized).passes["auto_channels_last"]) == 2


def test_weight_shared_with_what_stays_float32() -> None:
    class Mine(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.weight = linear.weight

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    linear = nn.Linear(6, 6)
    model = nn.Sequential(linear, Mine(linear)).eval()
    with pytest.warns(transforms.NoEffectWarning):
        optimized = transforms.optimize(model, dtype=torch.bfloat16)
    assert optimized[0].weight.dtype == torch.float32
    left = transforms.report(optimized).left("dtype")
    assert "shares its weight with 1" in left[0].what


def test_float16_that_would_overflow() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).eval()
    nn.init.constant_(model[0].weight, 1e5)
    optimized = transforms.optimize(model, dtype=torch.float16)
    assert optimized[0].weight.dtype == torch.float32
    assert optimized[1].weight.dtype == torch.float16


def test_importing_and_optimizing_do_not_import_the_compiler() -> None:
    script = (
        "import sys, torch\nfrom fusedoptim import transforms\n"
        "transforms.optimize(torch.nn.Sequential(torch.nn.Dropout()).eval())\n"
        "print('torch._dynamo' in sys.modules)"
    )
    assert run_script(script).stdout == "False\n"


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "compiled",
    [
        lambda model, x: torch.jit.script(model),
        torch.jit.trace,
        lambda model, x: torch.export.export(model, (x,)).module(),
        lambda model, x: torch.fx.symbolic_trace(model),
    ],
    ids=["script", "trace", "export", "fx"],
)
def test_what_comes_after(compiled: Callable[[nn.Module, Tensor], Any]) -> None:
    model, x = randomise(Net()), images()
    assert_right(compiled(transforms.optimize(model), x), model, x)


def test_transformer_encoder() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        assert torch.equal(transforms.optimize(model)(x), model(x))


@pytest.mark.parametrize("is_training", [False, True])
def test_a_dtype_without_onednn(monkeypatch: pytest.MonkeyPatch, is_training: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4)).train(is_training)
    pair = (model, torch.optim.SGD(model.parameters())) if is_training else (model,)
    monkeypatch.setattr("transforms.front_end.supported_dtypes", lambda: (torch.float32,))
    with pytest.warns(transforms.SlowDtypeWarning, match="dtype=torch.bfloat16: oneDNN") as warned:
        transforms.optimize(*pair, dtype=torch.bfloat16)
    assert [warning.filename for warning in warned] == [__file__]
    before = fingerprint(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        transforms.optimize(*pair)
        with pytest.raises(transforms.SlowDtypeWarning):  # nothing was changed
            transforms.optimize(*pair, dtype=torch.bfloat16, inplace=True)
    assert fingerprint(model) == before


def test_in_a_fork_while_another_thread_traces() -> None:
    """torch.fx traces one model at a time; the thread that holds the lock is not in the child."""
    script = """
    import os, signal, threading
    import torch
    from torch import nn
    from fusedoptim import transforms

    class Slow(nn.Module):
        def forward(self, x):
            if threading.current_thread() is thread:
                traced.set()
                left.wait()
            return x

    traced, left = threading.Event(), threading.Event()
    model = nn.Sequential(Slow(), nn.Linear(4, 4), nn.ReLU()).eval()
    thread = threading.Thread(target=transforms.optimize, args=(model,))
    thread.start()
    traced.wait()
    if os.fork() == 0:
        signal.alarm(60)  # instead of a child that waits forever
        transforms.optimize(nn.Sequential(Slow(), nn.Linear(4, 4), nn.ReLU()).eval())
        print("done", flush=True)
        os._exit(0)
    os.wait()
    left.set()
    thread.join()
    """
    assert run_script(script).stdout == "done\n"


BFLOAT16 = {"dtype": torch.bfloat16}


def quantized(model: nn.Module) -> None:
    transforms.quantize(model, [torch.randn(4, 3, 4, 4)], inplace=True)


def optimized_with(**arguments: Any) -> Callable[[nn.Module], Any]:
    return lambda model: transforms.optimize(model, inplace=True, **arguments)


class TestInterrupted:
    """After an interrupt, restore() gives the exact plain model, if it is not plain already."""

    @staticmethod
    def make() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.Flatten()]
        layers += [nn.Linear(16, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 2)]
        return randomise(nn.Sequential(*layers))

    @staticmethod
    def facts(model: nn.Module) -> list[Any]:
        return [without_addresses(fingerprint(model)), hooks(model)]

    def restore(self, model: nn.Module) -> None:
        if "_fusedoptim_report" in vars(model):
            transforms.restore(model)

    rewritten = pytest.mark.parametrize(
        "rewrite",
        [
            pytest.param(optimized_with(), id="float32"),
            pytest.param(optimized_with(**BFLOAT16), id="bfloat16"),
            pytest.param(quantized, id="int8"),
        ],
    )

    @rewritten
    def test_restore(self, rewrite: Callable[[nn.Module], Any]) -> None:
        model = self.make()
        expected, state = self.facts(model), copied(model.state_dict())

        def restore() -> None:
            transforms.restore(model)

        for _ in interrupts_of(restore, lambda: rewrite(model), since="restore", every=23):
            assert_same_state(model.state_dict(), state)
            self.restore(model)
            assert self.facts(model) == expected

    @rewritten
    def test_rewrite(self, rewrite: Callable[[nn.Module], Any]) -> None:
        model = self.make()
        expected = self.facts(model)

        def prepare() -> None:
            self.restore(model)

        for _ in interrupts_of(lambda: rewrite(model), prepare, since="attach", every=211):
            self.restore(model)  # if it came last
            assert self.facts(model) == expected

    def test_large_weight(self) -> None:
        """Its pages are freed while it is rounded."""
        model = nn.Sequential(nn.Linear(1 << 10, 1 << 9)).eval()
        expected = self.facts(model)

        def prepare() -> None:
            self.restore(model)

        def cast() -> None:
            transforms.optimize(model, inplace=True, level="O0", dtype=torch.bfloat16)

        for _ in interrupts_of(cast, prepare, since="round", every=2):
            self.restore(model)
            assert self.facts(model) == expected

    @pytest.mark.parametrize("dtype", [None, torch.bfloat16])
    def test_load(self, dtype: torch.dtype | None) -> None:
        model = self.make()
        before, other = copied(model.state_dict()), self.make()
        for p in other.parameters():
            p.data.mul_(2)
        state, expected = other.state_dict(), other(x := torch.randn(2, 3, 4, 4))
        transforms.optimize(model, inplace=True, dtype=dtype)

        def load() -> None:
            model.load_state_dict(state)

        def prepare() -> None:
            model.load_state_dict(before)

        for _ in interrupts_of(load, prepare, since="_before_load", every=13):
            for name, tensor in model.state_dict().items():  # each is loaded, or as before
                assert torch.equal(tensor, state[name]) or torch.equal(tensor, before[name])
            load()
            assert_same_state(model.state_dict(), state)
            if dtype is None:
                torch.testing.assert_close(model(x), expected)
        transforms.restore(model)
        assert_same_state(model.state_dict(), state)
