"""The front end: knobs, errors, copies, undoing and the report."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel

from fusedoptim import FusedSGD, transforms
from tests.transforms.helpers import (
    assert_right,
    assert_same_state,
    copied,
    fingerprint,
    randomise,
    without_addresses,
)
from tests.transforms.models import Net, images


def trained(optimizer_class: Any = torch.optim.SGD, **kwargs: Any) -> tuple[nn.Module, Any]:
    """A model in training mode, and its optimizer after one step."""
    model = Net()
    optimizer = optimizer_class(model.parameters(), lr=0.1, momentum=0.9, **kwargs)
    model(images()).sum().backward()
    optimizer.step()
    return model, optimizer


def test_signature() -> None:
    parameters = inspect.signature(transforms.optimize).parameters
    expected = [
        "model",
        "optimizer",
        "dtype",
        "level",
        "inplace",
        "conv_bn_folding",
        "linear_bn_folding",
        "replace_dropout_with_identity",
        "split_master_weight_for_bf16",
        "fuse_update_step",
        "auto_channels_last",
        "sample_input",
    ]
    assert list(parameters) == expected
    for name in list(parameters)[2:]:
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
    assert (parameters["level"].default, parameters["inplace"].default) == ("O1", False)


def test_everything_at_once() -> None:
    model = randomise(Net())
    before = fingerprint(model)
    optimized = transforms.optimize(model)
    assert type(optimized) is Net
    assert fingerprint(model) == before
    x = images()
    assert_right(optimized, model, x)
    assert [name for name, _ in optimized.named_modules()] == [n for n, _ in model.named_modules()]
    assert optimized.dropout.p == 0.3


def test_level_0_does_what_is_asked_for() -> None:
    model = randomise(Net())
    report = transforms.report(transforms.optimize(model, level="O0"))
    assert report.passes == {}
    report = transforms.report(transforms.optimize(model, level="O0", conv_bn_folding=True))
    assert list(report.passes) == ["conv_bn_folding"]
    report = transforms.report(transforms.optimize(model, level="O0", dtype=torch.bfloat16))
    assert list(report.passes) == ["dtype"]


def test_false_is_off() -> None:
    knobs = ("conv_bn_folding", "linear_bn_folding", "replace_dropout_with_identity")
    for knob in (*knobs, "auto_channels_last"):
        optimized = transforms.optimize(randomise(Net()), **{knob: False})
        assert knob not in transforms.report(optimized).passes


def test_dropouts_of_all_kinds() -> None:
    kinds = [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d]
    kinds += [nn.AlphaDropout, nn.FeatureAlphaDropout]
    model = nn.Sequential(*(kind(0.4) for kind in kinds)).eval()
    model.extra = nn.Dropout()
    model.extra.train()  # on purpose, as for Monte Carlo dropout
    optimized = transforms.optimize(model)
    assert all(isinstance(optimized[i], nn.Identity) for i in range(len(kinds)))
    (left,) = transforms.report(optimized).left("replace_dropout_with_identity")
    assert left.where == "extra"
    assert "training mode" in left.what
    assert repr(transforms.restore(optimized)) == repr(model)


class _Mine(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def _compiled() -> nn.Module:
    return torch.compile(randomise(Net()))


def _compiled_in_place() -> nn.Module:
    model = randomise(Net())
    model.compile()
    return model


def _mixed_devices() -> nn.Module:
    model = randomise(Net())
    model.out.to("meta")
    return model


def _lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3)).eval()


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = {
    "no module": (lambda: [1], {}, TypeError, "not a torch.nn.Module"),
    "traced": (
        lambda: torch.jit.trace(nn.Linear(2, 2).eval(), torch.ones(1, 2)),
        {},
        TypeError,
        "optimize the model first",
    ),
    "compiled": (_compiled, {}, TypeError, "optimize the model first, then torch.compile"),
    "compiled in place": (_compiled_in_place, {}, TypeError, "then torch.compile"),
    "DataParallel": (lambda: DataParallel(Net()).eval(), {}, TypeError, r"DataParallel.*\.module"),
    "mixed devices": (_mixed_devices, {}, ValueError, r"several devices \(cpu, meta\)"),
    "meta": (lambda: Net().eval().to("meta"), {}, ValueError, "load its weights first"),
    "lazy": (_lazy, {}, ValueError, "run it once"),
    "level": (Net, {"level": "O2"}, ValueError, "level='O2' is unknown"),
    "dtype": (Net, {"dtype": torch.int8}, ValueError, "dtype=torch.int8"),
    "float64": (Net, {"dtype": torch.float64}, ValueError, "dtype=torch.float64"),
    "dtype by name": (Net, {"dtype": "bf16"}, TypeError, "not a torch.dtype"),
    "knob of another type": (Net, {"conv_bn_folding": 1}, TypeError, "not True, False or None"),
    "train without optimizer": (Net, {}, ValueError, r"call model.eval\(\) first.*optimizer"),
    "eval with optimizer": (
        lambda: Net().eval(),
        {"optimizer": torch.optim.SGD(Net().parameters())},
        ValueError,
        r"call model.train\(\) first",
    ),
    "other model's optimizer": (
        Net,
        {"optimizer": torch.optim.SGD(Net().parameters())},
        ValueError,
        "of the 14 parameters of the optimizer are not in this Net",
    ),
    "no optimizer": (Net, {"optimizer": "sgd"}, TypeError, "not a torch.optim.Optimizer"),
    "IPEX's order": (Net, {"optimizer": torch.bfloat16}, TypeError, "dtype=torch.bfloat16"),
    "fuse in eval": (
        lambda: Net().eval(),
        {"fuse_update_step": True},
        ValueError,
        "fuse_update_step=True is for a model in train mode",
    ),
    "fold in training": (
        Net,
        {"conv_bn_folding": True},
        ValueError,
        "conv_bn_folding=True is for a model in eval mode",
    ),
    "sample that fails": (
        lambda: Net().eval(),
        {"sample_input": torch.ones(3)},
        ValueError,
        "sample_input: Net fails with it",
    ),
}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_refused_and_unchanged(name: str, inplace: bool) -> None:
    make, arguments, error, message = REFUSED[name]
    model = make()
    before = None
    if isinstance(model, Net) and name != "mixed devices" and name != "meta":
        before = fingerprint(model)
    with pytest.raises(error, match=message):
        transforms.optimize(model, inplace=inplace, **arguments)
    if before is not None:
        assert fingerprint(model) == before


@pytest.mark.parametrize("inplace", ["no", 1, None])
def test_inplace_of_another_type(inplace: Any) -> None:
    with pytest.raises(TypeError, match=f"inplace={inplace!r} is not True or False"):
        transforms.optimize(Net().eval(), inplace=inplace)


def test_training_options_that_exclude_each_other() -> None:
    model, optimizer = trained()
    for arguments, message in (
        ({"dtype": torch.float16}, "float16 is for inference"),
        ({"split_master_weight_for_bf16": True}, "needs dtype=torch.bfloat16"),
        (
            {"dtype": torch.bfloat16, "split_master_weight_for_bf16": False},
            "trains on split weights",
        ),
        ({"dtype": torch.bfloat16, "level": "O0"}, "trains on split weights"),
        ({"dtype": torch.bfloat16, "fuse_update_step": False}, "needs fuse_update_step=True"),
    ):
        with pytest.raises(ValueError, match=message):
            transforms.optimize(model, optimizer, **arguments)


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, FusedSGD])
def test_copy_of_a_pair(optimizer_class: Any) -> None:
    model, optimizer = trained(optimizer_class)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before, state = fingerprint(model), copied(optimizer.state_dict()["state"])
    new_model, new = transforms.optimize(model, optimizer, auto_channels_last=True)
    assert type(optimizer) is optimizer_class
    assert isinstance(new, optimizer_class)
    assert fingerprint(model) == before
    assert [id(p) for p in new.param_groups[0]["params"]] == [id(p) for p in new_model.parameters()]
    for old_p, new_p in zip(model.parameters(), new_model.parameters()):
        old_buffer = optimizer.state[old_p]["momentum_buffer"]
        assert torch.equal(new.state[new_p]["momentum_buffer"], old_buffer)
        assert new.state[new_p]["momentum_buffer"] is not old_buffer
    x = images()
    new_model(x).sum().backward()
    new.step()  # the scheduler's wrapper is the old optimizer's
    assert calls == ["hook"]
    assert fingerprint(model) == before
    for key, value in state.items():
        assert torch.equal(
            optimizer.state_dict()["state"][key]["momentum_buffer"], value["momentum_buffer"]
        )
    assert not torch.equal(new_model.out.weight, model.out.weight)
    del scheduler


def test_attributes_that_a_class_adds_to_its_optimizer_are_copied() -> None:
    class Adan(torch.optim.SGD):
        def __init__(self, params: Any, **kwargs: Any) -> None:
            super().__init__(params, **kwargs)
            self.use_gc = True
            self.known = [p for group in self.param_groups for p in group["params"]]

    model, optimizer = trained(Adan)
    new_model, new = transforms.optimize(model, optimizer)
    assert new.use_gc
    assert [id(p) for p in new.known] == [id(p) for p in new_model.parameters()]


def test_inplace_returns_the_same_objects() -> None:
    model, optimizer = trained()
    assert transforms.optimize(model, optimizer, inplace=True) == (model, optimizer)
    model = randomise(Net())
    ids = {name: id(p) for name, p in model.named_parameters()}
    assert transforms.optimize(model, inplace=True) is model
    assert ids.items() >= {n: id(p) for n, p in model.named_parameters() if n in ids}.items()


def test_model_that_cannot_be_copied() -> None:
    model = randomise(Net())
    model.lock = (_ for _ in ())
    with pytest.raises(TypeError, match="inplace=True"):
        transforms.optimize(model)
    del model.lock
    transforms.optimize(model, inplace=True)


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


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_restore(dtype: torch.dtype | None) -> None:
    model = randomise(Net())
    before, x = fingerprint(model), images()
    output = model(x)
    transforms.optimize(model, dtype=dtype, inplace=True, auto_channels_last=True)
    assert transforms.restore(model) is model
    assert without_addresses(fingerprint(model)) == without_addresses(before)
    assert torch.equal(model(x), output)
    with pytest.raises(ValueError, match="has no report"):
        transforms.restore(model)


def test_restore_keeps_what_was_trained() -> None:
    model, optimizer = trained()
    transforms.optimize(model, optimizer, inplace=True, auto_channels_last=True)
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    optimizer.zero_grad()
    model(images()).sum().backward()
    optimizer.step()
    weight = model.conv.weight.detach().clone()
    assert transforms.restore(model, optimizer) == (model, optimizer)
    assert torch.equal(model.conv.weight, weight)
    assert model.conv.weight.is_contiguous()


def test_restore_with_another_optimizer() -> None:
    model, optimizer = trained()
    transforms.optimize(model, optimizer, inplace=True)
    other = torch.optim.SGD(Net().parameters())
    with pytest.raises(ValueError, match="not in this Net"):
        transforms.restore(model, other)


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_an_optimized_model(copy_of: Callable[[nn.Module], nn.Module]) -> None:
    model = randomise(Net())
    optimized = transforms.optimize(model, dtype=torch.bfloat16)
    other = copy_of(optimized)
    assert_same_state(other.state_dict(), model.state_dict())
    transforms.restore(other)
    x = images()
    assert torch.equal(other(x), model(x))
    with torch.autocast("cpu"):
        assert torch.equal(optimized(x), copy_of(optimized)(x))  # not restored with it


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


@pytest.mark.parametrize(
    "arguments",
    [
        {"conv_bn_folding": True},
        {"linear_bn_folding": True},
        {"replace_dropout_with_identity": True},
        {"auto_channels_last": True},
        {"dtype": torch.bfloat16},
    ],
)
def test_no_effect(arguments: dict[str, Any]) -> None:
    (knob,) = arguments
    model = nn.Sequential(nn.ReLU(), nn.LayerNorm(3)).eval()
    with pytest.warns(transforms.NoEffectWarning, match=f"{knob} changed nothing"):
        transforms.optimize(model, **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        transforms.optimize(model)
        with pytest.raises(transforms.NoEffectWarning):
            transforms.optimize(model, inplace=True, **arguments)
    with pytest.raises(ValueError, match="has no report"):
        transforms.report(model)


def test_sample_inputs_of_all_kinds() -> None:
    x = images()
    for sample in (x, (x,), {"x": x}):
        optimized = transforms.optimize(randomise(Net()), sample_input=sample)
        assert len(transforms.report(optimized).passes["auto_channels_last"]) == 2


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return x.view(x.shape[0], -1)


def test_channels_last_is_safe_by_default() -> None:
    model = Views().eval()
    optimized = transforms.optimize(model)
    (left,) = transforms.report(optimized).left("auto_channels_last")
    assert "Views.forward uses view" in left.what
    x = images()
    assert torch.equal(optimized(x), model(x))


def test_channels_last_by_call_and_by_setting() -> None:
    def is_last(**arguments: Any) -> bool:
        optimized = transforms.optimize(randomise(Net()), **arguments)
        return optimized.conv.weight.is_contiguous(memory_format=torch.channels_last)

    assert is_last()
    assert not is_last(level="O0")
    transforms.disable_auto_channels_last()
    assert not is_last()
    assert is_last(auto_channels_last=True)
    transforms.enable_auto_channels_last()
    assert is_last(level="O0")
    assert not is_last(auto_channels_last=False)
    model = randomise(nn.Sequential(nn.Linear(3, 3)))
    transforms.optimize(model)  # nothing to do, and nobody asked this call


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_last_in_three_dimensions_and_transposed(channels: int) -> None:
    model = nn.Sequential(nn.Conv3d(channels, 4, 3), nn.ConvTranspose3d(4, 2, 3)).eval()
    optimized = transforms.optimize(model)
    for module in optimized:
        assert module.weight.is_contiguous(memory_format=torch.channels_last_3d)
    assert_right(optimized, model, torch.randn(2, channels, 6, 6, 6))


def test_channels_last_of_a_shared_weight() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)).eval()
    model[1].weight = model[0].weight
    strides = model[0].weight.stride()
    optimized = transforms.optimize(model)
    assert optimized[1].weight.is_contiguous(memory_format=torch.channels_last)
    assert transforms.restore(optimized)[1].weight.stride() == strides


def test_weight_shared_with_what_stays_float32() -> None:
    linear = nn.Linear(6, 6)
    model = nn.Sequential(linear, _Mine(linear)).eval()
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


def test_importing_and_refusing_does_not_import_the_compiler() -> None:
    script = (
        "import sys, torch\nfrom fusedoptim import transforms\n"
        "transforms.optimize(torch.nn.Sequential(torch.nn.Dropout()).eval())\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


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


def test_gradients_are_copied() -> None:
    model, optimizer = trained()
    new_model, _ = transforms.optimize(model, optimizer)
    assert new_model.out.weight.grad is not model.out.weight.grad
    assert torch.equal(new_model.out.weight.grad, model.out.weight.grad)
