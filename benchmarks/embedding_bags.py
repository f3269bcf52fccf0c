"""Times merged embedding bags: ``python -m benchmarks.embedding_bags [--save]``.

There are 26 tables of 100,000 rows, as in a DLRM, with new indices in each round. "varying" bags
differ in their number of indices. An iteration is forward, backward and the update of the tables.
The base is 26 ``EmbeddingBag(sparse=True)`` and a torch optimizer. "joined" is fusedoptim with one
tensor of indices for all tables; "huge pages" has called ``use_huge_pages``. "forward" has no
backward pass, but is recorded for one. "touched" reads and writes each row that the round's indices
name, once, by torch's index_select and index_copy_. Freed memory is kept in all.
"""

from __future__ import annotations

import functools

from torch import Tensor

from benchmarks import _command
from benchmarks._embedding_bags import WORKLOADS, Bags, in_huge_pages, joined, ours
from benchmarks._harness import Contender, Report, time_interleaved
from fusedoptim.runtime import keep_memory

_ROUNDS = 20


class _Bags(Bags):
    """The bags of a workload, and the rows that a round's indices name."""

    def draw(self) -> None:
        """Draw new indices."""
        super().draw()
        self._distinct = [i.unique() for i in self.indices]

    def touch(self) -> None:
        """Read and write the rows."""
        for table, rows in zip(self.tables, self._distinct):
            weight: Tensor = table.weight.detach()
            weight.index_copy_(0, rows, weight.index_select(0, rows))


def _measure(name: str, rounds: int | None) -> Report:
    keep_memory()
    bags = _Bags(WORKLOADS[name])
    contenders = [
        Contender("torch", bags.step),
        Contender("fusedoptim", ours(bags)),
        Contender("joined", joined(bags)),
        Contender("huge pages", in_huge_pages(bags)),
        Contender("touched", bags.touch),
    ]
    return Report(name, time_interleaved(contenders, rounds or _ROUNDS, bags.draw))


if __name__ == "__main__":
    measures = {name: functools.partial(_measure, name) for name in WORKLOADS}
    _command.run("embedding_bags", __doc__, measures)
