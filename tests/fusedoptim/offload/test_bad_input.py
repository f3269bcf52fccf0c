"""Parameters and arguments that an OffloadOptimizer refuses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from fusedoptim import FusedAdamW, FusedLamb, FusedSGD, SplitSGD
from fusedoptim._torch_private import mark_flattened
from fusedoptim.offload import OffloadOptimizer
from tests.fusedoptim.distributed.processes import on_processes
from tests.fusedoptim.helpers import bits, nested_tensor, params_of, refused, step_alike
from tests.fusedoptim.offload.models import BF16


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: torch.ones(3, device="meta"), TypeError, "no memory of its own"),
        (
            lambda: torch.ones(3, dtype=torch.float16),
            TypeError,
            "split parameters are bfloat16",
        ),
    ],
)
def test_parameters_that_are_refused(
    make: Callable[[], Tensor], error: type[Exception], match: str
) -> None:
    good = Parameter(torch.ones(3))
    before = bits(good)
    with pytest.raises(error, match=match):
        OffloadOptimizer([good, Parameter(make())], FusedAdamW, split=True)
    assert good.dtype == torch.float32
    assert torch.equal(bits(good), before)
    optimizer = OffloadOptimizer([good], FusedAdamW, split=True)
    with refused(optimizer, error, match):
        optimizer.add_param_group({"params": [Parameter(make())]})


def test_a_later_group_that_is_refused_converts_nothing() -> None:
    good = Parameter(torch.ones(3))
    groups = [{"params": [good]}, {"params": [Parameter(torch.ones(3).double())]}]
    with pytest.raises(TypeError, match="split parameters are bfloat16"):
        OffloadOptimizer(groups, FusedAdamW, split=True)
    assert good.dtype == torch.float32
    assert not good._post_accumulate_grad_hooks


@pytest.mark.parametrize("cls", [FusedLamb, partial(FusedSGD, lr=0.1)])
def test_norms_of_pieces_are_refused(cls: Any) -> None:
    """FullyShardedDataParallel gives other processes the rest of the parameters."""
    p = Parameter(torch.ones(3))
    mark_flattened(p)
    options = {} if cls is FusedLamb else {"max_grad_norm": 1.0}
    optimizer = OffloadOptimizer([p], cls, **options)
    p.grad = torch.ones(3)
    with refused(optimizer, RuntimeError, "needs norms of whole parameters"):
        optimizer.step()
    with pytest.raises(TypeError, match="is a piece of a flat parameter"):
        OffloadOptimizer([p], SplitSGD, lr=0.1)
    assert p.dtype == torch.float32


@pytest.mark.parametrize("option", [{"foreach": True}, {"fused": False}])
def test_an_option_of_a_later_group_changes_nothing(option: dict[str, Any]) -> None:
    groups = [{"params": [Parameter(torch.ones(3))]} for _ in range(2)]
    optimizer = OffloadOptimizer(groups, FusedAdamW)
    for p in params_of(optimizer):
        p.grad = torch.ones(3)
    optimizer.param_groups[0].update(option)
    with refused(optimizer, RuntimeError, f"{next(iter(option))}"):
        optimizer.step()


def test_gradient_of_another_dtype() -> None:
    p = Parameter(torch.ones(3, dtype=BF16))
    p.grad_dtype = torch.float32
    p.grad = torch.ones(3)
    optimizer = OffloadOptimizer([p], FusedAdamW)
    with refused(optimizer, TypeError, "gradient .* is torch.float32, and the parameter"):
        optimizer.step()


def test_nested_parameter() -> None:
    nested = Parameter(nested_tensor(torch.ones(2), torch.ones(3)))
    with pytest.raises(TypeError, match="a parameter is a nested tensor, and only strided ones"):
        OffloadOptimizer([nested], FusedSGD)


def test_parameters_that_share_memory() -> None:
    values = torch.ones(8)
    with pytest.raises(RuntimeError, match="share memory"):
        OffloadOptimizer([Parameter(values), Parameter(values[2:])], FusedSGD)


def test_elements_that_share_memory() -> None:
    with pytest.raises(RuntimeError, match=r"has elements that share memory; clone\(\) it first"):
        OffloadOptimizer([Parameter(torch.ones(1).expand(4))], FusedSGD)


@on_processes(1)
def test_gradients_that_are_views_of_buckets() -> None:
    """DDP's writes into them leave no trace, so copies that backward made would be used."""
    model = nn.Linear(3, 2)
    wrapper = DistributedDataParallel(model, gradient_as_bucket_view=True)
    before = model.weight.detach().clone()
    optimizer = OffloadOptimizer(model.parameters(), FusedSGD, lr=0.1)
    wrapper(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="set copy_in_backward=False"):
        optimizer.step()
    assert torch.equal(model.weight, before)
    optimizer.copy_in_backward = False
    optimizer.step()
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("options", [{"bucket_cap_mb": 0}, {"max_grad_norm": -1.0}, {"lr": -1.0}])
def test_arguments_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Invalid"):
        OffloadOptimizer([Parameter(torch.ones(3))], FusedSGD, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer_class": "FusedSGD"}, "optimizer_class is of type str; pass a class"),
        ({"bucket_cap_mb": "100"}, "bucket_cap_mb is '100'; pass a number above 0"),
        ({"copy_in_backward": "no"}, "copy_in_backward is 'no'; pass True or False"),
    ],
)
def test_arguments_of_wrong_types(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        OffloadOptimizer([Parameter(torch.ones(3))], **({"optimizer_class": FusedSGD} | options))


@pytest.mark.parametrize(
    ("cls", "name", "value", "own"),
    [
        (torch.optim.SGD, "max_grad_norm", 1.0, 2.0),
        (FusedSGD, "max_grad_norm", 1.0, 2.0),
        (FusedSGD, "bucket_cap_mb", 50, 100),
        (FusedSGD, "copy_in_backward", False, True),
        (FusedSGD, "split", True, False),
    ],
)
def test_argument_for_all_groups_in_one(cls: Any, name: str, value: object, own: object) -> None:
    p, q = (Parameter(torch.ones(3)) for _ in range(2))
    optimizer = OffloadOptimizer([p], cls, lr=0.1, max_grad_norm=2.0)
    with pytest.raises(ValueError, match=f"a group has {name}={value}.*pass it to the con"):
        optimizer.add_param_group({"params": [q], name: value})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [q], name: own})
    step_alike(optimizer)
