"""Models and arguments that optimize refuses, before it changes anything."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import remove_parametrizations

from fusedoptim import transforms
from tests.transforms.helpers import fingerprint
from tests.transforms.models import Net


def test_signature() -> None:
    parameters = inspect.signature(transforms.optimize).parameters
    assert list(parameters) == [
        *("model", "optimizer", "dtype", "level", "inplace"),
        *("conv_bn_folding", "linear_bn_folding", "replace_dropout_with_identity"),
        *("split_master_weight_for_bf16", "fuse_update_step", "parallel_dropout"),
        *(
            "fuse_gelu",
            "fuse_frozen_batch_norm",
            "onednn_products",
            "auto_channels_last",
            "conv_as_matmul",
            "weights_prepack",
            "fuse",
            "graph_mode",
            "fold_constants",
        ),
        "sample_input",
    ]
    for name in list(parameters)[2:]:
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
    assert (parameters["level"].default, parameters["inplace"].default) == ("O1", False)


class _Uncast(Net):
    """A model that fails under autocast, as torch's LSTM does on processors without AVX-512."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise ArithmeticError("no primitive")
        return super().forward(x)


def _eval() -> nn.Module:
    return Net().eval()


def _compiled_in_place() -> nn.Module:
    model = Net().eval()
    model.compile()
    return model


def _mixed_devices() -> nn.Module:
    model = Net().eval()
    model.out.to("meta")
    return model


def _traced() -> Any:
    return torch.jit.trace(nn.Linear(2, 2).eval(), torch.ones(1, 2))


_OTHERS = {"optimizer": torch.optim.SGD(Net().parameters())}
REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = {
    "no module": (lambda: [1], {}, TypeError, "not a torch.nn.Module"),
    "traced": (_traced, {}, TypeError, "optimize the model first"),
    "compiled": (lambda: torch.compile(_eval()), {}, TypeError, "first, then torch.compile"),
    "compiled in place": (_compiled_in_place, {}, TypeError, "then torch.compile"),
    "DataParallel": (lambda: DataParallel(Net()).eval(), {}, TypeError, r"DataParallel.*\.module"),
    "mixed devices": (_mixed_devices, {}, ValueError, r"several devices \(cpu, meta\)"),
    "meta": (lambda: _eval().to("meta"), {}, ValueError, "load its weights first"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)).eval(), {}, ValueError, "run it once"),
    "level": (Net, {"level": "O2"}, ValueError, "='O2' is unknown"),
    "dtype": (Net, {"dtype": torch.int8}, ValueError, "=torch.int8"),
    "float64": (Net, {"dtype": torch.float64}, ValueError, "=torch.float64"),
    "dtype by name": (Net, {"dtype": "bf16"}, TypeError, "not a torch.dtype"),
    "knob of another type": (Net, {"conv_bn_folding": 1}, TypeError, "not True, False or None"),
    "train without optimizer": (Net, {}, ValueError, r"call model.eval\(\) first.*optimizer"),
    "eval with optimizer": (_eval, _OTHERS, ValueError, r"call model.train\(\) first"),
    "other's optimizer": (Net, _OTHERS, ValueError, "the 14 parameters .* are not in this Net"),
    "no optimizer": (Net, {"optimizer": "sgd"}, TypeError, "not a torch.optim.Optimizer"),
    "IPEX's order": (Net, {"optimizer": torch.bfloat16}, TypeError, "dtype=torch.bfloat16"),
    "fuse in eval": (_eval, {"fuse_update_step": True}, ValueError, "True is for .* train mode"),
    "fold in training": (Net, {"conv_bn_folding": True}, ValueError, "True is for .* eval mode"),
    "sample of NumPy": (_eval, {"sample_input": np.ones(3)}, TypeError, "torch.from_numpy makes"),
    "sample of text": (
        _eval,
        {"sample_input": "x"},
        TypeError,
        "is of type str; pass a tensor, a tuple",
    ),
    "sample that fails": (_eval, {"sample_input": torch.ones(3)}, ValueError, "Net fails with it"),
    "cast sample that fails": (
        lambda: _Uncast().eval(),
        {"dtype": torch.bfloat16, "sample_input": torch.ones(2, 3, 9, 9)},
        ValueError,
        r"_Uncast fails with sample_input \(no primitive\); .*enabled=False",
    ),
}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by torch.jit
@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_refused_and_unchanged(name: str, inplace: bool) -> None:
    make, arguments, error, message = REFUSED[name]
    model = make()
    has_values = isinstance(model, Net) and not any(p.is_meta for p in model.parameters())
    before = fingerprint(model) if has_values else None
    if arguments and "optimizer" not in arguments:
        message = rf"{next(iter(arguments))}.*{message}"
    with pytest.raises(error, match=message):
        transforms.optimize(model, inplace=inplace, **arguments)
    assert before is None or fingerprint(model) == before


def test_a_sample_in_training() -> None:
    """No pass for training calls the model, so a sample would be ignored."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match=r"sample_input is for a model in eval mode"):
        transforms.optimize(model, optimizer, sample_input=torch.ones(3))


def test_what_restore_and_report_refuse() -> None:
    model = transforms.optimize(_eval())
    with pytest.raises(TypeError, match=r"optimizer is of type str, not a torch\.optim\.Optimizer"):
        transforms.restore(model, "x")  # type: ignore[arg-type]
    assert transforms.report(model).passes
    for function in (transforms.restore, transforms.report, transforms.finalize):
        with pytest.raises(TypeError, match=r"the model is of type tuple, not a torch\.nn\.Module"):
            function((model, None))


@torch.no_grad()
@pytest.mark.parametrize("rewrite", [transforms.optimize, transforms.quantize])
def test_what_is_parametrized_later(rewrite: Callable[[nn.Module], Any]) -> None:
    plain, x = nn.Sequential(nn.Linear(256, 256), nn.GELU()).eval(), torch.randn(64, 256)
    ours = rewrite(plain)
    weight_norm(ours[0])
    expected, classes = ours(x), [type(module) for module in ours.modules()]
    undoing = [transforms.restore]
    if rewrite is transforms.optimize:
        undoing.append(lambda model: transforms.quantize(model, inplace=True))
    for undo in undoing:
        with pytest.raises(RuntimeError, match="Linear was parametrized since"):
            undo(ours)
        assert [type(module) for module in ours.modules()] == classes
        assert torch.equal(ours(x), expected)
    remove_parametrizations(ours[0], "weight")
    restored = transforms.restore(ours)
    assert [type(module) for module in restored] == [nn.Linear, nn.GELU]
    torch.testing.assert_close(restored(x), plain(x))


@pytest.mark.parametrize("inplace", ["no", 1, None])
def test_inplace_of_another_type(inplace: Any) -> None:
    with pytest.raises(TypeError, match=f"inplace={inplace!r} is not True or False"):
        transforms.optimize(_eval(), inplace=inplace)


def test_part_of_graph_mode_without_it() -> None:
    with pytest.raises(ValueError, match="fold_constants=True needs graph_mode=True"):
        transforms.optimize(_eval(), fold_constants=True)


_BF16 = {"dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": torch.float16}, "float16 is for inference"),
        ({"split_master_weight_for_bf16": True}, "needs dtype=torch.bfloat16"),
        (_BF16 | {"split_master_weight_for_bf16": False}, "trains on split weights"),
        (_BF16 | {"level": "O0"}, "trains on split weights"),
        (_BF16 | {"fuse_update_step": False}, "needs fuse_update_step=True"),
    ],
)
def test_training_options_that_exclude_each_other(arguments: Any, message: str) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match=message):
        transforms.optimize(model, optimizer, **arguments)
