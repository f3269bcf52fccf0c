"""A call of a packed module that equals the last one is quick, and any difference is seen."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusedoptim import transforms
from tests.fusedoptim.helpers import nested_tensor
from tests.transforms.passes.test_pack_weights import (
    CASES,
    assert_as_in_float64,
    linear,
    optimized,
    set_data,
    write,
    write_data,
)
from transforms.rewrites import packed, watched_parameter
from transforms.rewrites.packed import supported_dtypes


def other_version(ours: Any) -> None:
    write(ours.weight)


def other_memory(ours: Any) -> None:
    set_data(ours.weight)


def unseen_by_torch(ours: Any) -> None:
    write_data(ours.weight)


def state_dict(ours: Any) -> None:
    for tensor in ours.state_dict().values():
        tensor.data.mul_(2)


def other_weight(ours: Any) -> None:
    ours.weight = nn.Parameter(torch.randn_like(ours.weight))


def strided_bias(ours: Any) -> None:
    ours.bias = nn.Parameter(torch.randn(2 * len(ours.bias))[::2])


def no_bias(ours: Any) -> None:
    ours.bias = None


def shared_memory(ours: Any) -> None:
    ours.share_memory()
    write_data(ours.weight)


@pytest.mark.parametrize("case", ["linear", "conv2d", "conv3d", "transposed"])
@pytest.mark.parametrize(
    "change",
    [
        *(other_version, other_memory, unseen_by_torch, state_dict, other_weight),
        *(strided_bias, no_bias, shared_memory),
    ],
)
def test_repeated_call_sees_changes(case: str, change: Callable[[Any], None]) -> None:
    model, x = CASES[case]()
    ours = optimized(model)
    plain = copy.deepcopy(transforms.restore(copy.deepcopy(ours)))
    repeat(ours, x)
    change(ours)
    plain.weight.data = ours.weight.detach().clone()
    plain.bias = None if ours.bias is None else nn.Parameter(ours.bias.detach().clone())
    assert_as_in_float64(plain, ours, x, torch.float32)


def test_nested_input() -> None:
    model, x = CASES["linear"]()
    ours = optimized(model)
    plain = copy.deepcopy(transforms.restore(copy.deepcopy(ours)))
    repeat(ours, x)
    with torch.no_grad():
        results = [module(nested_tensor(x, x[:1])).unbind() for module in (ours, plain)]
    assert all(map(torch.equal, *results))


def repeat(ours: nn.Module, x: Tensor) -> None:
    """Call often enough that the last call has been remembered and repeated."""
    with torch.no_grad():
        for _ in range(3):
            ours(x)


def test_use_of_data_while_another_thread_settles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other thread takes ``data`` when this one has found that nobody holds it."""
    model, x = linear()
    plain, ours, taken = copy.deepcopy(model), optimized(model), []

    def take(param: Any) -> bool:
        taken.append(param.data)
        return False

    monkeypatch.setattr(watched_parameter, "_has_aliases", take)
    repeat(ours, x)
    monkeypatch.undo()
    for each in taken[-1], plain.weight.data:
        each.mul_(2)
    assert_as_in_float64(plain, ours, x, torch.float32)


OTHER_INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "shape": lambda x: torch.cat([x, x]),
    "strides": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "dtype": Tensor.double,
    "subclass": nn.Parameter,
}


@pytest.mark.parametrize("case", ["linear", "conv2d", "conv3d", "transposed"])
@pytest.mark.parametrize("other", OTHER_INPUTS)
def test_repeated_call_sees_another_input(case: str, other: str) -> None:
    model, x = CASES[case]()
    plain, ours = copy.deepcopy(model), optimized(model)
    repeat(ours, x)
    given = OTHER_INPUTS[other](x)
    if other == "dtype":
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"dtype|type"):
            ours(given)
    else:
        assert_as_in_float64(plain, ours, given, torch.float32)


@pytest.mark.parametrize("case", ["linear", "conv2d"])
def test_repeated_call_sees_another_mode(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = CASES[case]()
    plain, ours = copy.deepcopy(model).eval(), optimized(model)
    repeat(ours, x)
    assert ours(x).requires_grad
    for dtype in (torch.bfloat16, torch.float16):
        with torch.no_grad(), torch.autocast("cpu", dtype):
            assert ours(x).dtype == plain(x).dtype == dtype
        repeat(ours, x)
    with torch.no_grad():
        assert torch.equal(torch.vmap(ours)(x[:, None]), torch.vmap(plain)(x[:, None]))
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
        assert torch.equal(ours(x), plain(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["linear", "conv2d"])
def test_repeated_call_skips_the_checks(
    case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype not in supported_dtypes():
        pytest.skip("oneDNN does not compute in it on this processor")
    model, x = CASES[case]()
    ours = optimized(model)
    is_cast = dtype != torch.float32
    with torch.autocast("cpu", dtype if is_cast else None, enabled=is_cast):
        repeat(ours, x)
        monkeypatch.delattr(packed, "product_dtype")
        repeat(ours, x)


def test_the_report_tells_packed_weights_from_those_that_wait() -> None:
    module, x = linear()
    ours = transforms.optimize(nn.Sequential(module, nn.Linear(515, 2)).eval())
    later = "weight packed at the first call that is large enough"
    assert [e.what for e in transforms.report(ours).done("weights_prepack")] == [later, later]
    with torch.no_grad():
        ours(x)
    assert [e.what for e in transforms.report(ours).done("weights_prepack")] == [
        *("weight packed", later)
    ]
