"""Times sparse gradients against torch's optimizers: ``python -m benchmarks.sparse [--save]``.

The gradients are for 10,000 random rows of a table of a million rows of 64, with other rows and a
new gradient in each step. The base only reads and writes those rows. SGD has no momentum, which
would update every row that was ever touched.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from benchmarks import _command, _harness
from benchmarks._harness import Contender, Report
from benchmarks._workloads import LR
from fusedoptim import FusedAdagrad, FusedSGD, SplitSGD

ROWS, WIDTH, TOUCHED = 1_000_000, 64, 10_000
READ_AND_WRITTEN = "rows read and written"
REPEATS = {"unique": 1, "duplicates": 2}
"""How often a gradient contains each of its rows, by workload; 1 means coalesced."""

_ROUNDS = 100
_TIME_LIMIT = 60  # seconds


class _Table:
    """An embedding table in float32 and in bfloat16, and gradients for both."""

    def __init__(self, repeats: int) -> None:
        self.single = torch.randn(ROWS, WIDTH).requires_grad_()
        self.half = self.single.detach().bfloat16().requires_grad_()
        self._repeats = repeats
        self._read = torch.empty(TOUCHED, WIDTH)
        self.make_gradient()

    def make_gradient(self) -> None:
        """Touch other rows: in ascending order if each occurs once, otherwise shuffled."""
        self._rows = torch.randperm(ROWS)[:TOUCHED].sort().values
        rows = self._rows
        if self._repeats > 1:
            rows = rows.repeat(self._repeats)[torch.randperm(self._repeats * TOUCHED)]
        values = torch.randn(len(rows), WIDTH) * 1e-3
        self.single.grad = self._sparse(rows, values)
        self.half.grad = self._sparse(rows, values.bfloat16())

    def _sparse(self, rows: Tensor, values: Tensor) -> Tensor:
        return torch.sparse_coo_tensor(
            rows[None], values, (ROWS, WIDTH), is_coalesced=self._repeats == 1
        )

    def read_and_write_rows(self) -> None:
        """Move the bytes that every update moves, except the gradient."""
        table = self.single.detach()
        torch.index_select(table, 0, self._rows, out=self._read)
        table.index_copy_(0, self._rows, self._read)


def time_table(workload: str, rounds: int | None) -> Report:
    """Time all contenders on gradients with the repeats of ``workload``."""
    repeats = REPEATS[workload]
    table = _Table(repeats)
    params = [table.single]

    def contender(
        optimizer: torch.optim.Optimizer,
        read_and_written: int,
        peer: str | None = None,
        gradient: int = 4,
    ) -> Contender:
        """Return a contender that moves these bytes per element of the rows and of the gradient."""
        kind = type(optimizer)
        name = f"torch {kind.__name__}" if kind.__module__.startswith("torch") else kind.__name__
        moved = (read_and_written + repeats * gradient) * TOUCHED * WIDTH
        return Contender(name, optimizer.step, moved, peer)

    timings = _harness.time_interleaved(
        [
            Contender(READ_AND_WRITTEN, table.read_and_write_rows, 8 * TOUCHED * WIDTH),
            contender(torch.optim.SGD(params, lr=LR), 8),
            contender(FusedSGD(params, lr=LR), 8, "torch SGD"),
            contender(SplitSGD([table.half], lr=LR), 8, "torch SGD", gradient=2),
            contender(torch.optim.Adagrad(params, lr=LR), 16),
            contender(FusedAdagrad(params, lr=LR), 16, "torch Adagrad"),
        ],
        rounds or _ROUNDS,
        table.make_gradient,
        limit=_TIME_LIMIT if rounds is None else math.inf,
    )
    return Report(workload, timings, READ_AND_WRITTEN)


if __name__ == "__main__":
    # This is the default; setting it avoids a warning that torch's Adagrad triggers.
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]  # untyped in torch
    _command.run("sparse", __doc__, {w: functools.partial(time_table, w) for w in REPEATS})
