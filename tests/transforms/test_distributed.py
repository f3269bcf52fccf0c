"""Wrapped models are refused with the cure, and the cure works: torch's own wrappers.

A process group of one process, on the CPU, in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PREPARED = """
import gc
import sys
import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fusedoptim import transforms

warnings.filterwarnings("ignore", module="torch.*")
torch.distributed.init_process_group(
    "gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1
)


def ddp(model):
    return DistributedDataParallel(model)


def fsdp(model):
    return FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=True
    )


def fsdp2(model):
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)
    )


def train(model, optimizer, dtype=None):
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
            output = model(torch.randn(4, 3, 4, 4, generator=generator))
        output.float().square().mean().backward()
        optimizer.step()


def refused(*arguments, **options):
    for inplace in (False, True):
        try:
            transforms.optimize(*arguments, inplace=inplace, **options)
        except TypeError as error:
            assert "optimize the model inside first, then wrap" in str(error), error
        else:
            raise AssertionError("accepted")


"""

REFUSED = """
model = {wrapper}(network())
weights = [p.detach().clone() for p in model.parameters()]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
refused(model, optimizer)
refused(model.eval())
inside = {inside}
if inside is not None:
    refused(inside.train(), torch.optim.SGD(inside.parameters()))
assert type(optimizer) is torch.optim.SGD
assert all(torch.equal(*pair) for pair in zip(model.parameters(), weights))
train(model.train(), optimizer)
"""

CURE = """
plain = {wrapper}(network())
its = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
train(plain, its)
for dtype in {dtypes}:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = transforms.optimize(
        model, optimizer, dtype=dtype, auto_channels_last={is_last}
    )
    wrapped = {wrapper}(model)
    if {makes_optimizer_anew}:  # as for any model: FSDP replaces the parameters
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    train(wrapped, optimizer, dtype)
    eps = torch.finfo(dtype or torch.float32).eps
    states = wrapped.state_dict(), plain.state_dict()
    assert states[0].keys() == states[1].keys()
    for key, value in states[0].items():
        assert value.dtype == states[1][key].dtype
        off = torch.dist(value.float(), states[1][key].float())
        assert off <= {roundings} * eps * states[1][key].float().norm(), (key, off)
    if not {makes_optimizer_anew}:
        transforms.restore(model, optimizer)
        assert type(optimizer) is torch.optim.SGD
"""

ENDED = """
main()
# The wrapper first, as it holds the group, with whose threads torch may abort at exit: pytorch
# issue 190489.
gc.collect()
torch.distributed.destroy_process_group()
"""


def _run(script: str, tmp_path: Path) -> None:
    main = "def main():\n" + textwrap.indent(script, "    ")
    done = subprocess.run(
        [sys.executable, "-c", PREPARED + main + ENDED, str(tmp_path / "store")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("wrapper", "inside"), [("ddp", "None"), ("fsdp", "model.module"), ("fsdp2", "model[4]")]
)
def test_refused(wrapper: str, inside: str, tmp_path: Path) -> None:
    _run(REFUSED.format(wrapper=wrapper, inside=inside), tmp_path)


@pytest.mark.parametrize(
    ("wrapper", "dtypes", "is_last"),
    [
        ("ddp", "(None, torch.bfloat16)", None),
        # Of channels_last weights fully_shard raises, and torch 2.13's FSDP computes what is wrong.
        ("fsdp", "(None,)", False),
        ("fsdp2", "(None,)", False),
    ],
)
def test_optimized_and_then_wrapped(
    wrapper: str, dtypes: str, is_last: bool | None, tmp_path: Path
) -> None:
    script = CURE.format(
        wrapper=wrapper,
        dtypes=dtypes,
        is_last=is_last,
        makes_optimizer_anew=wrapper != "ddp",
        # Three steps of a network of five layers, of whose roundings each counts a few times.
        roundings=3 * 5 * 4,
    )
    _run(script, tmp_path)
