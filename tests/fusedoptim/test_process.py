"""An optimizer and the life of its process: exit, fork, an error in the middle."""

from __future__ import annotations

import subprocess
import sys

PRELUDE = """
import os, torch
from fusedoptim import FusedLamb, FusedSGD
p = torch.nn.Parameter(torch.ones(1000))  # torch's own threads do not survive a fork
p.grad = torch.ones_like(p)
optimizer = FusedSGD([p], lr=0.5, momentum=0.9)
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + script], capture_output=True, text=True, timeout=120
    )


def test_exit_right_after_a_step() -> None:
    done = run("optimizer.step()")
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_optimizer_alive_at_exit_in_a_cycle() -> None:
    done = run("optimizer.step(); import sys; optimizer.me = optimizer; sys.keep = optimizer")
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_fork_after_a_step() -> None:
    done = run(
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
    assert "set_start_method('spawn')" in done.stdout
    assert done.stdout.endswith(" True\n")
    assert done.returncode == 0


def test_fork_before_the_first_step() -> None:
    done = run(
        "if os.fork() == 0:\n"
        "    optimizer.step()\n"
        "    print(p.sum().item(), flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "optimizer.step()\n"
        "print(p.sum().item())\n"
    )
    assert (done.stdout, done.returncode) == ("500.0\n500.0\n", 0)


def test_openmp_works_after_a_large_step() -> None:
    """A large step has torch's idle OpenMP threads sleep; torch's next operation wakes them."""
    done = run(
        "q = torch.nn.Parameter(torch.ones(2_000_000)); q.grad = torch.ones_like(q)\n"
        "large = FusedSGD([q], lr=0.5)\n"
        "for _ in range(20):\n"
        "    large.step()\n"
        "    assert torch.ones(2_000_000).sum() == 2_000_000\n"
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_the_same_bits_whatever_the_number_of_threads() -> None:
    script = """
import hashlib
torch.manual_seed(0)
q, r = (torch.nn.Parameter(torch.randn(300_001)) for _ in range(2))
large = FusedSGD([q], lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
with_sums = FusedLamb([r], lr=0.1, weight_decay=0.01, max_grad_norm=1.0)
for _ in range(5):
    q.grad, r.grad = torch.randn(300_001), torch.randn(300_001)
    large.step()
    with_sums.step()
print(hashlib.sha256(torch.cat([q, r]).detach().numpy().tobytes()).hexdigest())
"""
    one_core = "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"  # the driver obeys it
    digests = {run(limit + script).stdout for limit in (one_core, "")}
    assert len(digests) == 1
    assert len(digests.pop()) == 65
