"""Check every call and claim in docs/migrating-from-ipex.md that can be checked without IPEX."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fusedoptim import nn as fused_nn
from fusedoptim import ops, runtime
from fusedoptim import transforms as ipex
from fusedoptim.runtime import _cores
from transforms.passes import INFERENCE, KNOBS, TRAINING

PAGE = (Path(__file__).parents[2] / "docs" / "migrating-from-ipex.md").read_text()


def make() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(), nn.Flatten(), nn.Linear(8, 4)]
    return nn.Sequential(*layers[:3], nn.AdaptiveAvgPool2d(1), *layers[3:])


def rows(heading: str) -> dict[str, list[str]]:
    """Return the table under a heading: each row's other cells by its first one."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    cells = [
        [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("|")
    ]
    return {row[0]: row[1:] for row in cells[2:]}


def test_the_example() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    assert ipex.report(names["model"]).done("conv_bn_folding")
    assert names["output"].shape == (2, 4, 6, 6)
    assert names["output"].dtype == torch.bfloat16


def test_every_knob_is_in_the_table_with_its_defaults() -> None:
    table = rows("Knobs")
    for each in (*INFERENCE, *TRAINING):
        if each.knob != "dtype":
            at_o1 = each.knob != "graph_mode"  # whose first call is slow
            assert table[each.knob][:2] == ["off", "on" if at_o1 else "off"]
            assert [each.default(level) for level in ("O0", "O1")] == [False, at_o1]
    assert set(table) == {*KNOBS, "inplace", "sample_input"}
    assert set(table) < set(inspect.signature(ipex.optimize).parameters)


def test_quantization() -> None:
    for loader in ([torch.randn(2, 3, 8, 8)], None):
        quantized = ipex.quantize(make().eval(), loader)
        with torch.no_grad():
            assert quantized(torch.randn(2, 3, 8, 8)).shape == (2, 4)


def test_recommendation_models() -> None:
    """DLRM's interaction, and merged tables by either of the two calls."""
    features = [torch.randn(3, 4) for _ in range(3)]
    assert ops.interaction(*features).shape == (3, 4 + 3)
    assert torch.equal(
        ops.interaction(features[0], torch.cat(features[1:], dim=1)), ops.interaction(*features)
    )
    for kind in (fused_nn.MergedEmbeddingBagWithSGD, fused_nn.MergedEmbeddingBagWithAdagrad):
        tables = [nn.EmbeddingBag(5, 4, mode="sum") for _ in range(2)]
        merged = kind.from_embeddingbag_list(tables, lr=0.1)
        assert len(merged) == len(tables)
    model = nn.Module()
    model.tables = nn.ModuleList(nn.EmbeddingBag(5, 4, mode="sum") for _ in range(2))
    model = ipex.merge_embedding_bags(model, "tables", optimizer="sgd", lr=0.1)
    assert ipex.report(model).done("merge_embedding_bags")


def test_torch_has_the_launcher() -> None:
    assert importlib.util.find_spec("torch.backends.xeon.run_cpu") is not None


def test_knobs_that_do_not_exist() -> None:
    for name in rows("Knobs that do not exist"):
        for value in (None, False, True):
            with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
                ipex.optimize(make().eval(), **{name: value})


def _pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_calls() -> None:
    model, optimizer = _pair()
    ipex.optimize(model, optimizer=optimizer)
    ipex.optimize(model, optimizer)
    _, its = ipex.optimize(model, optimizer=optimizer, dtype=torch.bfloat16)
    fused: Any = ipex.optimize(model, optimizer)[1]
    assert its.fused is fused.fused is True  # type: ignore[attr-defined]
    assert fused._original_step.__func__ is torch.optim.SGD.step
    model.eval()
    for dtype in (None, torch.float32, torch.bfloat16, torch.float16):
        optimized = ipex.optimize(model, dtype=dtype)
        assert "Sequential for inference" in str(ipex.report(optimized))
        ipex.restore(optimized)
    ipex.enable_auto_channels_last()
    ipex.disable_auto_channels_last()


def _without_fused_step() -> object:
    model = make()
    return ipex.optimize(model, torch.optim.RMSprop(model.parameters()), fuse_update_step=True)


DIFFERENT: dict[str, tuple[type[Exception], Callable[[], object]]] = {
    "training mode without an optimizer": (ValueError, lambda: ipex.optimize(make())),
    "eval mode with an optimizer": (ValueError, lambda: ipex.optimize(make().eval(), _pair()[1])),
    "unknown `level": (ValueError, lambda: ipex.optimize(make().eval(), level="O3")),
    "unknown `dtype": (ValueError, lambda: ipex.optimize(make().eval(), dtype=torch.int8)),
    "optimizer of another model": (ValueError, lambda: ipex.optimize(make(), _pair()[1])),
    "optimizer without a fused step": (TypeError, _without_fused_step),
    "training with `torch.bfloat16` at level O0": (
        ValueError,
        lambda: ipex.optimize(*_pair(), dtype=torch.bfloat16, level="O0"),
    ),
    "training with `torch.float16": (
        ValueError,
        lambda: ipex.optimize(*_pair(), dtype=torch.float16),
    ),
}


@pytest.mark.parametrize("row", DIFFERENT)
def test_what_is_different(row: str) -> None:
    error, call = DIFFERENT[row]
    assert error.__name__ in rows("What is different")[row][1]
    with pytest.raises(error):
        call()


def test_verbose_names_packed_products(capfd: pytest.CaptureFixture[str]) -> None:
    model = ipex.optimize(nn.Linear(257, 515).eval())
    with torch.no_grad(), torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        model(torch.randn(65, 257))
    assert "primitive,exec,cpu,inner_product" in capfd.readouterr().out


def test_the_runtime_extension() -> None:
    """The runtime extension's calls work, and those that replace others of its calls."""
    model, x = torch.nn.Linear(4, 2), torch.randn(3, 4)
    cores = sorted(os.sched_getaffinity(0))
    pool = runtime.CPUPool(core_ids=cores)
    node = next(number for number, own in _cores.nodes().items() if own & set(cores))
    assert set(runtime.CPUPool(node_id=node).core_ids) <= set(cores)
    with runtime.pin(pool):
        expected = model(x)
    with pool:
        future = pool.submit(model, x)
        assert torch.equal(future.result(), expected)
