"""``transforms.quantize``: what it quantizes, reports, refuses and undoes."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fusedoptim import transforms
from tests.transforms.helpers import (
    assert_same_state,
    copied,
    fingerprint,
    without_addresses,
)
from transforms.quantization import calibration
from transforms.quantization.calibration import Times, fastest
from transforms.quantization.ranges import OBSERVERS
from transforms.rewrites.int8 import Int8Conv2d, Int8Linear, is_quantized

KNOB = "quantize"


def network() -> nn.Sequential:
    """Convolutions with BatchNorms, one that cannot be quantized, and Linears."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 16),
        nn.ReLU(),
        nn.Linear(16, 4),
    ).eval()
    nn.init.uniform_(model[1].running_var, 0.5, 1.5)
    return model


def batches(count: int = 2) -> list[Tensor]:
    return [torch.randn(8, 3, 12, 12) for _ in range(count)]


def names(entries: list[transforms.Entry]) -> set[str]:
    return {entry.where for entry in entries}


def test_signature() -> None:
    parameters = list(inspect.signature(transforms.quantize).parameters.values())
    assert [p.name for p in parameters[:2]] == ["model", "loader"]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters[2:])


class TestStatic:
    def test_layers_and_report(self) -> None:
        plain = network()
        ours = transforms.quantize(plain, batches())
        assert [type(each) for each in (ours[0], ours[7], ours[9])] == [
            Int8Conv2d, Int8Linear, Int8Linear,
        ]  # fmt: skip
        report = transforms.report(ours)
        assert names(report.done(KNOB)) == {"0", "7", "9"}
        assert report.left(KNOB)[0].what.startswith("has padding_mode='reflect'")
        assert names(report.done("conv_bn_folding")) == {"1"}
        found = [entry.error for entry in report.done(KNOB)]
        assert all(error is not None and 0 < error < 0.05 for error in found)
        assert found == sorted(found, reverse=True)
        assert report.bytes_saved(KNOB) == 3 * sum(ours[i].weight.numel() for i in (0, 7, 9))
        assert "INT8, error" in str(report)
        assert not is_quantized(plain)

    def test_errors_are_those_of_the_layers(self) -> None:
        model, batch = nn.Sequential(nn.Linear(64, 32)).eval(), torch.randn(50, 64)
        ours = transforms.quantize(model, [batch])
        with torch.no_grad():
            expected = model(batch)
            error = torch.dist(ours(batch), expected) / expected.norm()
        (entry,) = transforms.report(ours).done(KNOB)
        assert entry.error == pytest.approx(error.item(), rel=1e-4)

    @pytest.mark.parametrize("ranges", OBSERVERS)
    def test_output_is_near(self, ranges: str) -> None:
        plain, data = network(), batches(4)
        ours = transforms.quantize(plain, data, ranges=ranges)
        with torch.no_grad():
            for batch in data:
                expected = plain(batch)
                assert torch.dist(ours(batch), expected) < 0.05 * expected.norm()

    def test_inplace(self) -> None:
        model = network()
        assert transforms.quantize(model, batches(), inplace=True) is model
        assert is_quantized(model)

    def test_optimized_model(self) -> None:
        once = transforms.optimize(network())
        ours = transforms.quantize(once, batches())
        assert names(transforms.report(ours).done("conv_bn_folding")) == {"1"}
        assert names(transforms.report(ours).done(KNOB)) == {"0", "7", "9"}

    def test_hooks_see_what_they_saw(self) -> None:
        model = network()
        seen: list[str] = []
        model[7].register_forward_pre_hook(lambda *_: seen.append("before"))
        model[7].register_forward_hook(lambda *_: seen.append("after"))
        ours = transforms.quantize(model, batches())
        seen.clear()
        with torch.no_grad():
            ours(batches()[0])
        assert seen == ["before", "after"]

    def test_uncalled_layers_stay(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

            def forward(self, x: Tensor) -> Tensor:
                return self.used(input=x)  # type: ignore[no-any-return]

        ours = transforms.quantize(Net().eval(), [torch.randn(5, 4)])
        assert isinstance(ours.used, Int8Linear)
        (entry,) = transforms.report(ours).left(KNOB)
        assert (entry.where, entry.what) == ("unused", "was not called in calibration")

    @torch.no_grad()
    @pytest.mark.parametrize("is_static", [False, True])
    def test_layers_in_torchs_fast_path(self, is_static: bool) -> None:
        """It reads their weights without calling them, so it has to be turned off first."""
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
        x = torch.randn(4, 5, 16)
        loader = [x] if is_static else None
        with pytest.raises(
            ValueError, match=r"torch\.backends\.mha\.set_fastpath_enabled\(False\)"
        ):
            transforms.quantize(model, loader)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            ours = transforms.quantize(model, loader)
            assert names(transforms.report(ours).done(KNOB)) == {
                "layers.0.linear1",
                "layers.0.linear2",
            }
            assert not torch.equal(ours(x), model(x))
        finally:
            torch.backends.mha.set_fastpath_enabled(True)

    def test_layers_that_stay(self) -> None:
        class Own(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x) + 1

        own = nn.Linear(4, 4)
        own.forward = torch.relu  # type: ignore[method-assign]
        parametrized = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        infinite = nn.Linear(4, 4)
        nn.init.constant_(infinite.weight, torch.inf)
        layers = [nn.Linear(4, 4), Own(4, 4), own, parametrized, infinite, nn.Linear(4, 4).double()]
        model = nn.ModuleList([*layers, nn.ConvTranspose1d(4, 4, 1)]).eval()
        ours = transforms.quantize(model, [torch.randn(5, 4)], run=lambda model, x: model[0](x))
        reasons = {entry.where: entry.what for entry in transforms.report(ours).left(KNOB)}
        for name, reason in (
            ("1", "overrides its methods: Own"), ("2", "overrides its methods: Linear"),
            ("3", "a parametrization"), ("4", "infinite or NaN"), ("5", "is torch.float64"),
            ("6", "is a transposed convolution"),
        ):  # fmt: skip
            assert reason in reasons[name]

    def test_loaders(self) -> None:
        """Batches may be a tensor, a tuple, a list or a dict, or pairs of images and labels."""

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(4, 2)

            def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
                return self.linear(x if y is None else x + y)  # type: ignore[no-any-return]

        model, x = Net().eval(), torch.randn(16, 4)
        tokens = transformers.BatchEncoding({"x": x, "y": x})
        for batch in (x, (x,), (x, x), [x, x], {"x": x, "y": x}, tokens):
            assert is_quantized(transforms.quantize(model, iter([batch])))
        pairs = DataLoader(TensorDataset(x, torch.arange(16)), batch_size=4)
        ours = transforms.quantize(model, pairs, run=lambda model, batch: model(batch[0]))
        assert is_quantized(ours)

    def test_max_batches(self) -> None:
        taken = []

        def loader() -> Iterator[Tensor]:
            for batch in batches(5):
                taken.append(batch)
                yield batch

        transforms.quantize(network(), loader(), max_batches=3)
        assert len(taken) == 3

    def test_a_loader_that_reuses_its_memory(self) -> None:
        """Errors are measured on the first batches, after the last one."""
        memory = torch.empty(8, 3, 12, 12)
        data = batches(4)

        def loader() -> Iterator[Tensor]:
            for batch in data:
                yield memory.copy_(batch)

        model = network()
        found = [transforms.quantize(model, each) for each in (loader(), data)]
        reports = [{e.where: e.error for e in transforms.report(ours).done(KNOB)} for ours in found]
        assert reports[0] == pytest.approx(reports[1])


class TestKeep:
    def test_names_patterns_and_parents(self) -> None:
        model = nn.ModuleDict(
            {"body": network(), "head": nn.Linear(4, 2), "tail": nn.Linear(2, 2)}
        ).eval()

        def run(model: Any, x: Tensor) -> Tensor:
            return model["tail"](model["head"](model["body"](x)))  # type: ignore[no-any-return]

        for keep, kept in (
            ("head", {"head"}), (["*ea*", "tail"], {"head", "tail"}),
            ("body", {"body.0", "body.3", "body.7", "body.9"}), (["body.0"], {"body.0"}),
        ):  # fmt: skip
            ours = transforms.quantize(model, batches(), keep=keep, run=run)
            report = transforms.report(ours)
            assert names(report.left(KNOB)) == kept | {"body.3"}
            assert any(entry.what.startswith("keep=") for entry in report.left(KNOB))

    def test_any_name_of_a_shared_module(self) -> None:
        block = nn.Sequential(nn.Linear(4, 4))
        model = nn.Sequential(block, block, nn.Linear(4, 4)).eval()
        for keep in ("0", "1", "0.0", "1.0"):
            report = transforms.report(transforms.quantize(model, keep=keep))
            assert [(entry.where, entry.what) for entry in report.left(KNOB)] == [
                ("0.0", f"keep={keep!r}")
            ]

    def test_max_error(self) -> None:
        model, data = network(), batches()
        errors = {
            e.where: e.error for e in transforms.report(transforms.quantize(model, data)).done(KNOB)
        }
        worst = max(errors, key=lambda name: errors[name] or 0)
        bound = sorted(error for error in errors.values() if error is not None)[-2]
        report = transforms.report(transforms.quantize(model, data, max_error=bound * 1.001))
        assert names(report.done(KNOB)) == errors.keys() - {worst}
        (entry,) = (entry for entry in report.left(KNOB) if entry.where == worst)
        assert "above max_error=" in entry.what
        assert entry.error == pytest.approx(errors[worst])


class TestDynamic:
    def test_linears_only(self) -> None:
        ours = transforms.quantize(network())
        report = transforms.report(ours)
        assert names(report.done(KNOB)) == {"7", "9"}
        assert {e.where: e.what for e in report.left(KNOB)}["0"].endswith("so pass a loader")
        assert all(entry.error is None for entry in report.done(KNOB))

    def test_with_a_loader_it_reports_errors(self) -> None:
        ours = transforms.quantize(network(), batches(), dynamic=True)
        found = transforms.report(ours).done(KNOB)
        assert names(found) == {"7", "9"}
        assert all(entry.error for entry in found)
        assert ours[7]._fusedoptim_int8.range is None


class TestUndone:
    def test_restore_restores_every_bit(self) -> None:
        plain = network()
        before = without_addresses(fingerprint(plain))
        for is_optimized in (False, True):
            if is_optimized:
                transforms.optimize(plain, inplace=True)
            transforms.quantize(plain, batches(), inplace=True)
            transforms.restore(plain)
            assert without_addresses(fingerprint(plain)) == before

    def test_state_dict_is_the_plain_models(self) -> None:
        plain = network()
        before = copied(plain.state_dict())
        ours = transforms.quantize(plain, batches())
        assert_same_state(ours.state_dict(), before)

    def test_another_checkpoint(self) -> None:
        """Loading a checkpoint folds and quantizes its weights; the range of the images stays."""
        data = batches()
        first, second = (network()[:2].eval() for _ in range(2))
        expected = transforms.quantize(second, data)
        ours = transforms.quantize(first, data)
        with torch.no_grad():
            assert not torch.equal(ours(data[0]), expected(data[0]))
            ours.load_state_dict(second.state_dict())
            assert torch.equal(ours(data[0]), expected(data[0]))

    def test_copies_and_pickles(self) -> None:
        ours, batch = transforms.quantize(network(), batches()), batches(1)[0]
        with torch.no_grad():
            expected = ours(batch)
            for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
                assert torch.equal(twin(batch), expected)
                transforms.restore(twin)
                assert not is_quantized(twin)
        assert is_quantized(ours)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
    def test_moves(self, dtype: torch.dtype) -> None:
        """A model that is moved computes as the plain one does after that move."""
        plain = network()
        ours = transforms.quantize(plain, batches()).to(dtype)
        batch = batches(1)[0].to(dtype)
        with torch.no_grad():
            torch.testing.assert_close(ours(batch), plain.to(dtype)(batch), rtol=1e-2, atol=1e-2)
        assert_same_state(ours.state_dict(), plain.state_dict())

    def test_training_needs_restore(self) -> None:
        ours = transforms.quantize(nn.Sequential(nn.Linear(4, 4)).eval()).train()
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"transforms\.restore\(model\) first"):
            transforms.optimize(ours, optimizer)
        transforms.restore(ours)(torch.randn(2, 4)).sum().backward()
        assert ours[0].weight.grad is not None

    @torch.no_grad()
    def test_a_kept_layer_forgets_its_activation(self) -> None:
        """It applied the activation before, which is plain now."""
        plain = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8)).eval()
        x = torch.randn(64, 256)
        ours = transforms.quantize(transforms.optimize(plain), keep="0")
        again = transforms.optimize(ours, fuse=False)
        assert type(again[0]).__name__ == "PackedLinear"
        torch.testing.assert_close(again[:2](x), plain[:2](x))
        transforms.restore(again)
        assert [vars(module).keys() for module in again] == [vars(m).keys() for m in plain]

    def test_optimize_afterwards_leaves_it(self) -> None:
        ours, batch = transforms.quantize(network(), batches()), batches(1)[0]
        again = transforms.optimize(ours)
        with torch.no_grad():
            assert torch.equal(again(batch), ours(batch))


class TestMustPay:
    def test_slower_layers_stay_in_floating_point(self, monkeypatch: pytest.MonkeyPatch) -> None:
        data = batches()
        # Each batch calls the three layers in this order.
        turns = [Times(0.001, 0.002), Times(0.003, 0.002), Times(0.001, 0.001)] * len(data)
        remaining = iter(turns)
        monkeypatch.setattr(calibration, "fastest", lambda *calls: next(remaining))
        plain = network()
        ours = transforms.quantize(plain, data, must_pay=True)
        report = transforms.report(ours)
        assert names(report.done(KNOB)) == {"0"}
        left = {entry.where: entry for entry in report.left(KNOB)}
        assert left["7"].what == "not faster on the first batches: 6 ms instead of 4 ms"
        assert left["9"].what == "not faster on the first batches: 2 ms instead of 2 ms"
        assert left["7"].error is not None
        assert type(ours[7]) is nn.Linear
        assert type(ours[7].weight) is nn.Parameter
        assert_same_state(ours.state_dict(), plain.state_dict())

    def test_nothing_is_faster(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(calibration, "fastest", lambda *calls: Times(2.0, 1.0))
        ours = transforms.quantize(network(), batches(), must_pay=True)
        report = transforms.report(ours)
        assert not is_quantized(ours)
        assert not report.done(KNOB)
        assert report.done("conv_bn_folding")
        assert type(transforms.restore(ours)[1]) is nn.BatchNorm2d

    def test_by_default_nothing_is_timed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(calibration, "fastest", None)
        ours = transforms.quantize(network(), batches())
        assert names(transforms.report(ours).done(KNOB)) == {"0", "7", "9"}

    def test_the_two_ways_take_turns(self) -> None:
        calls: list[str] = []
        found = fastest(lambda: calls.append("int8"), lambda: calls.append("plain"))
        assert calls[:4] == ["int8", "plain"] * 2
        assert calls.count("int8") == calls.count("plain")
        assert min(found) >= 0


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = {
    "no module": (lambda: [1], {}, TypeError, "not a torch.nn.Module"),
    "training mode": (lambda: network().train(), {}, ValueError, r"call model\.eval\(\)"),
    "quantized": (
        lambda: transforms.quantize(network()), {}, ValueError, r"already: call transforms\.res",
    ),
    "nothing": (lambda: nn.Sequential(nn.ReLU()).eval(), {}, ValueError, "no convolutions and no"),
    "nothing but convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3)).eval(), {}, ValueError, "pass a loader",
    ),
    "all kept": (lambda: nn.Linear(4, 4).eval(), {"loader": []}, ValueError, "no batches"),
    "empty loader": (network, {"loader": []}, ValueError, "loader has no batches"),
    "no loader": (network, {"loader": 3}, TypeError, "loader is of type int"),
    "one batch": (network, {"loader": torch.ones(2, 3, 8, 8)}, TypeError, r"pass \[batch\]"),
    "one batch by name": (
        network, {"loader": {"x": torch.ones(2, 3, 8, 8)}}, TypeError,
        r"is of type dict.*pass \[batch\]",
    ),
    "another batch": (network, {"loader": [{"x": 1}]}, ValueError, r"with batch 0.*run=lambda"),
    "labels too": (
        network, {"loader": [(torch.ones(2, 3, 8, 8), torch.ones(2))]}, ValueError, "batch 0",
    ),
    "no batch": (network, {"loader": [3]}, ValueError, "a batch is of type int"),
    "NaN": (
        network, {"loader": [torch.full((2, 3, 8, 8), torch.nan)]}, ValueError,
        "input of 0 is infinite or NaN",
    ),
    "gradients": (
        network, {
            "loader": [torch.ones(2, 3, 8, 8)],
            "run": torch.enable_grad()(lambda model, x: model(x.requires_grad_())),
        },
        ValueError, r"records gradients in 0, .* keep=\['0'\]",
    ),
    "unknown ranges": (network, {"ranges": "max"}, ValueError, "'min-max', 'percentile', 'mse'"),
    "ranges of another type": (network, {"ranges": ["mse"]}, ValueError, "is unknown"),
    "ranges without loader": (
        network, {"ranges": "percentile"}, ValueError, "'percentile' needs a loader",
    ),
    "ranges of dynamic": (
        network, {"ranges": "min-max", "dynamic": True, "loader": [torch.ones(2, 3, 8, 8)]},
        ValueError, "'min-max' needs a loader and static quantization",
    ),
    "unknown name": (network, {"keep": "head"}, ValueError, "'head' is not the name of a module"),
    "keep of another type": (network, {"keep": [3]}, TypeError, "not a name"),
    "dynamic of another type": (network, {"dynamic": 1}, TypeError, "not True or False"),
    "must_pay without loader": (network, {"must_pay": True}, ValueError, "needs a loader"),
    "must_pay of another type": (network, {"must_pay": 1}, TypeError, "not True or False"),
    "inplace of another type": (network, {"inplace": 1}, TypeError, "not True or False"),
    "static without loader": (network, {"dynamic": False}, ValueError, "needs a loader"),
    "max_error": (network, {"max_error": 0, "loader": [0]}, ValueError, "is not positive"),
    "max_error of another type": (network, {"max_error": "x", "loader": [0]}, TypeError, "='x' is"),
    "max_error without loader": (network, {"max_error": 0.1}, ValueError, "needs a loader"),
    "max_batches": (network, {"max_batches": 0}, ValueError, "positive number"),
    "max_batches of a bool": (network, {"max_batches": True}, ValueError, "=True is not a"),
    "run": (network, {"run": 3}, TypeError, "cannot be called"),
    "run raises": (
        network, {"loader": [torch.ones(2, 3, 8, 8)], "run": lambda model, batch: model(batch[9])},
        ValueError, r"^run=<function .*> fails with batch 0 \(IndexError: index 9 ",
    ),
    "run without loader": (network, {"run": lambda *_: None}, ValueError, "run needs a loader"),
    "max_batches without loader": (network, {"max_batches": 1}, ValueError, "es needs a loader"),
    "progress without loader": (network, {"progress": True}, ValueError, "ss needs a loader"),
    "max_error too small": (
        network, {"loader": [torch.ones(2, 3, 8, 8)], "max_error": 1e-9}, ValueError,
        "nothing to quantize: 0: its error would be",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_changes(case: str) -> None:
    make, arguments, kind, message = REFUSED[case]
    model = make()
    is_module = isinstance(model, nn.Module)
    before = without_addresses(fingerprint(model)) if is_module else None
    for inplace in ({"inplace": True}, {}) if "inplace" not in arguments else ({},):
        with pytest.raises(kind, match=message) as caught:
            transforms.quantize(model, **arguments, **inplace)
        assert caught.type is kind
        if is_module:
            assert without_addresses(fingerprint(model)) == before


class TestProgress:
    def test_bar(self, capsys: pytest.CaptureFixture[str]) -> None:
        transforms.quantize(network(), batches(3), progress=True)
        assert "calibrating: 100%" in capsys.readouterr().err

    def test_without_tqdm(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
        transforms.quantize(network(), batches(3), progress=True)
        assert capsys.readouterr().err.endswith("calibrating: 3/3 batches\n")
        transforms.quantize(network(), iter(batches(3)), progress=True)
        assert capsys.readouterr().err.endswith("calibrating: 3 batches\n")

    def test_silent(self, capsys: pytest.CaptureFixture[str]) -> None:
        transforms.quantize(network(), batches(9))
        transforms.quantize(network(), batches(9), progress=False)
        assert capsys.readouterr().err == ""
