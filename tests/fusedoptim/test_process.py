"""An optimizer and the life of its process: exit, fork, an error in the middle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.conftest import SEED
from tests.fusedoptim.helpers import run_script
from tests.optimizer_cases import CASES
from tests.running import ONE_CORE, at_each_thread_count

PRELUDE = """
import os, torch
from fusedoptim import FusedLamb, FusedSGD
p = torch.nn.Parameter(torch.ones(1000))  # torch's own threads do not survive a fork
p.grad = torch.ones_like(p)
optimizer = FusedSGD([p], lr=0.5, momentum=0.9)
"""


def run(script: str, **variables: str) -> str:
    """The output of a script that must print no error."""
    done = run_script(PRELUDE + script, **variables)
    assert done.stderr == ""
    return done.stdout


def test_exit_after_steps() -> None:
    """A process exits with an optimizer in a cycle; OpenMP threads put to sleep wake for torch."""
    output = run("""
q = torch.nn.Parameter(torch.ones(2_000_000))
q.grad = torch.ones_like(q)
large = FusedSGD([q], lr=0.5)
for _ in range(20):
    large.step()
    assert torch.ones(2_000_000).sum() == 2_000_000
import sys
optimizer.me = sys.keep = optimizer
optimizer.step()
""")
    assert output == ""


def test_training_does_not_load_torchs_compiler() -> None:
    """Making one of torch.optim's optimizers loads the compiler; ours do not."""
    output = run("""
import sys
for optimizer in FusedSGD([p], lr=0.5), FusedLamb([p]):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(2):
        p.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
print("torch._dynamo" in sys.modules)
torch.compile(lambda: optimizer.zero_grad())()
print("torch._dynamo" in sys.modules)
""")
    assert output == "False\nTrue\n"


def test_fork() -> None:
    """Before the first step, either process may take steps; afterwards, a forked child cannot."""
    output = run("""
if os.fork() == 0:
    optimizer.step()
    print(p.sum().item(), flush=True)
    os._exit(0)
os.wait()
optimizer.step()
print(p.sum().item(), flush=True)
if os.fork() == 0:
    before = p.detach().clone()
    try:
        optimizer.step()
    except RuntimeError as error:
        print(error, torch.equal(p, before), flush=True)
    os._exit(0)
os.wait()
optimizer.step()
""")
    first, second, *refusal = output.splitlines()
    assert first == second == "500.0"
    assert "set_start_method('spawn')" in refusal[0]
    assert refusal[-1].endswith(" True")


def test_fork_while_another_thread_saves() -> None:
    """The child can save: the lock that the other thread holds is free there."""
    output = run("""
import signal, threading
from fusedoptim.offload import OffloadOptimizer
for saved in optimizer, OffloadOptimizer([p], FusedSGD, lr=0.5):
    entered, left = threading.Event(), threading.Event()
    wait = saved.register_state_dict_post_hook(lambda *_: (entered.set(), left.wait()) and None)
    thread = threading.Thread(target=saved.state_dict)
    thread.start()
    entered.wait()
    if os.fork() == 0:
        signal.alarm(60)  # instead of a child that waits forever
        wait.remove()
        print(saved.state_dict()["param_groups"][0]["lr"], flush=True)
        os._exit(0)
    os.wait()
    left.set()
    thread.join()
""")
    assert output == "0.5\n0.5\n"


def final_weights() -> dict[str, list[Tensor]]:
    """The weights that each class reaches after five steps from one seed."""
    weights = {}
    for case in CASES:
        torch.manual_seed(SEED)
        params = [torch.nn.Parameter(torch.randn(n)) for n in (300_001, 5, 40_000)]
        optimizer = case.make(params, **case.kwargs[-1], max_grad_norm=1.0)
        for _ in range(5):
            for p in params:
                p.grad = torch.randn(p.shape).to(p.dtype)
            optimizer.step()
        weights[case.name] = [p.detach().clone() for p in optimizer.master_params()]
    return weights


@pytest.mark.filterwarnings("ignore:Validating sparse tensor")  # by torch.load, from 2.15 on
def test_the_same_bits_whatever_the_number_of_threads(tmp_path: Path) -> None:
    """The bits are equal even if the process's affinity decides the number of threads."""
    first, *others = at_each_thread_count(final_weights)
    saved = tmp_path / "weights.pt"
    script = f"""
from tests.fusedoptim.test_process import final_weights
torch.save(final_weights(), {str(saved)!r})
"""
    assert run(ONE_CORE + script, FUSEDOPTIM_TEST_SEED=str(SEED)) == ""
    for other in (*others, torch.load(saved)):
        assert other.keys() == first.keys()
        for name, weights in first.items():
            assert all(map(torch.equal, weights, other[name])), name
