"""An optimizer and the life of its process: exit, fork, an error in the middle."""

from __future__ import annotations

from tests.fusedoptim.helpers import run_script
from tests.optimizer_cases import CASES

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


def test_exit_right_after_a_step() -> None:
    output = run("optimizer.step()")
    assert output == ""


def test_optimizer_alive_at_exit_in_a_cycle() -> None:
    output = run("optimizer.step(); import sys; optimizer.me = optimizer; sys.keep = optimizer")
    assert output == ""


def test_fork_after_a_step() -> None:
    output = run(
        "optimizer.step()\n"
        "if os.fork() == 0:\n"
        "    before = p.detach().clone()\n"
        "    try:\n"
        "        optimizer.step()\n"
        "    except RuntimeError as error:\n"
        "        print(error, torch.equal(p, before), flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "optimizer.step()\n"
    )
    assert "set_start_method('spawn')" in output
    assert output.endswith(" True\n")


def test_fork_before_the_first_step() -> None:
    output = run(
        "if os.fork() == 0:\n"
        "    optimizer.step()\n"
        "    print(p.sum().item(), flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "optimizer.step()\n"
        "print(p.sum().item())\n"
    )
    assert output == "500.0\n500.0\n"


def test_openmp_works_after_a_large_step() -> None:
    """A large step has torch's idle OpenMP threads sleep; torch's next operation wakes them."""
    output = run(
        "q = torch.nn.Parameter(torch.ones(2_000_000)); q.grad = torch.ones_like(q)\n"
        "large = FusedSGD([q], lr=0.5)\n"
        "for _ in range(20):\n"
        "    large.step()\n"
        "    assert torch.ones(2_000_000).sum() == 2_000_000\n"
    )
    assert output == ""


ONE_CORE = "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
BITS = """
import hashlib
from tests.conftest import SEED
from tests.optimizer_cases import CASES
for case in CASES:
    torch.manual_seed(SEED)
    params = [torch.nn.Parameter(torch.randn(n)) for n in (300_001, 5, 40_000)]
    optimizer = case.make(params, **case.kwargs[-1], max_grad_norm=1.0)
    for _ in range(5):
        for p in params:
            p.grad = torch.randn(p.shape).to(p.dtype)
        optimizer.step()
    digest = hashlib.sha256()
    for p in optimizer.master_params():
        digest.update(p.numpy().tobytes())
    print(case.name, digest.hexdigest())
"""


def test_the_same_bits_whatever_the_number_of_threads() -> None:
    """The driver obeys the process's affinity and its own variable."""
    outputs = [run(BITS), run(ONE_CORE + BITS)]
    outputs += [run(BITS, CL_CONFIG_CPU_TBB_NUM_WORKERS=workers) for workers in ("1", "5")]
    assert len(outputs[0].splitlines()) == len(CASES)
    assert len(set(outputs)) == 1
