"""Run the shortest benchmark of each kind in this process, for one round."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.traffic import Traffic
from tests.running import check_script


@pytest.mark.parametrize(
    ("name", "workload"),
    [
        ("attention", "small"),
        ("convolution", "small"),
        ("dropout", "small"),
        ("elementwise", "small"),
        ("elementwise", "sums-1000"),
        ("interaction", "small"),
        ("pool", "hit"),
        ("raw", "launch"),
        ("small_operators", "sum-of-rows"),
        ("sparse", "unique"),
    ],
)
def test_shortest(
    name: str,
    workload: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--workload", workload, "--rounds", "1"])
    runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    assert workload in capsys.readouterr().out


def test_iterations() -> None:
    """A whole training, which is otherwise in a process of its own."""
    printed = check_script(
        """
        import sys
        from benchmarks import _fresh, iteration
        _fresh.measured = lambda name, *arguments, **_: getattr(_fresh, name)(*arguments)
        sys.argv[1:] = "--rounds 1 --model digits --configuration".split()
        sys.argv += ["fusedoptim, float32"]
        iteration.main()
        """
    )
    assert "1 processes of 200 iterations" in printed
    assert re.search(r"^fusedoptim, float32( +[0-9.]+ \([0-9.]+\)){4} ", printed, re.M)


def test_versions() -> None:
    """The checkout is compared with itself, as if it were another one."""
    command = [sys.executable, "-m", "benchmarks.versions", ".", "--rounds", "2"]
    command += ["--optimizer", "FusedAdam", "--workload", "8192"]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    assert "FusedAdam, 8192 (2 rounds)" in done.stdout


def test_versions_of_what_is_no_checkout(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.versions", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert f"FOLDER={str(tmp_path)!r} has no package fusedoptim" in done.stderr


def test_traffic_moves_every_byte() -> None:
    """Parameters descend along the previous step's gradient, which the buffer keeps."""
    params = [torch.nn.Parameter(torch.randn(n)) for n in (1, 17, 40_000)]
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.randn_like(p)
    traffic = Traffic(params)
    traffic.read_gradients()
    traffic.step()
    traffic.step()
    for p, start in zip(params, before):
        assert p.grad is not None
        assert torch.equal(p.detach(), start - p.grad)
