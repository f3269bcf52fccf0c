"""Statements of docs/migrating-from-torch-optim.md that its code blocks do not test."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from fusedoptim import FusedAdamW
from tests.fusedoptim.helpers import run_script
from tests.optimizer_cases import TORCHS_CASES, OptimizerCase, configuration_id

PAGE = (Path(__file__).parents[2] / "docs" / "migrating-from-torch-optim.md").read_text()


@pytest.mark.parametrize("case", TORCHS_CASES, ids=configuration_id)
def test_the_page_has_every_argument(case: OptimizerCase) -> None:
    arguments = inspect.signature(case.cls).parameters
    assert [argument for argument in arguments if f"`{argument}`" not in PAGE] == []


def test_a_step_in_a_whole_graph_is_refused() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedAdamW([param])
    param.grad = torch.ones(3)
    compiled = torch.compile(optimizer.step, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="should not be traced"):
        compiled()
    assert param.eq(1).all()


SEVERAL_PROCESSES = """
import sys
import warnings

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from fusedoptim import FusedAdamW
from tests.conftest import SEED

warnings.filterwarnings("ignore", module="torch.*")
torch.distributed.init_process_group(
    "gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1
)


def trained(wrap, make):
    torch.manual_seed(SEED)
    model = wrap(torch.nn.Linear(3, 2))
    optimizer = make(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
    return list(model.parameters())


def zero(params):
    # It also puts all arguments into its groups.
    return ZeroRedundancyOptimizer(
        params, optimizer_class=FusedAdamW, lr=1e-3, max_grad_norm=1e9, state_dtype=torch.float32
    )


def fsdp(model):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def fsdp2(model):
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


plain = trained(lambda model: model, torch.optim.AdamW)
for wrap, make in [
    (DistributedDataParallel, FusedAdamW), (DistributedDataParallel, zero),
    (fsdp, FusedAdamW), (fsdp2, FusedAdamW),
]:
    for theirs, ours in zip(plain, trained(wrap, make)):
        ours = ours.full_tensor() if wrap is fsdp2 else ours
        torch.testing.assert_close(ours, theirs)
try:
    trained(fsdp2, lambda params: FusedAdamW(params, split=True))
except TypeError as error:
    assert "DTensor" in str(error) and "model.bfloat16() before fully_shard()" in str(error), error
else:
    raise AssertionError("accepted")
torch.distributed.destroy_process_group()
"""


def test_several_processes(tmp_path: Path) -> None:
    run_script(SEVERAL_PROCESSES, str(tmp_path / "store"))
