"""Trains a recommendation model (DLRM) on clicks, with torch's operators and with ours.

Run ``python examples/dlrm.py``, with ``--small`` for a few seconds. The data is generated from a
seed. It consists of indices into 26 tables, few of which are frequent, and of numbers. From both, a
hidden model computes the probability of a click. Both models start from the same weights, and
alternate on the same batches, as other load on the machine varies. "AUC" is the probability that in
new samples a clicked one gets a higher score than one that was not clicked. The hidden model's AUC
is the highest that can be reached.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import Adagrad, Optimizer
from tqdm import tqdm

from fusedoptim import transforms
from fusedoptim.nn import MergedEmbeddingBag
from fusedoptim.ops import interaction
from fusedoptim.runtime import keep_memory

TABLES, DENSE, LR = 26, 13, 0.02


class Size(NamedTuple):
    """The size of the model and of its training run."""

    rows: int
    width: int
    batch: int
    iterations: int
    test_samples: int


FULL = Size(rows=20_000, width=64, batch=2048, iterations=300, test_samples=50_000)
SMALL = Size(rows=50, width=16, batch=512, iterations=100, test_samples=5000)


class Batch(NamedTuple):
    """Samples, and whether they were clicked."""

    dense: Tensor
    indices: Tensor
    """The index of one row of each table for each sample: (tables, batch)."""
    clicked: Tensor
    chances: Tensor
    """The hidden model's logits."""


class Clicks:
    """The hidden model: a number for each row of each table, and weights of the dense features."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.of_rows = torch.randn(TABLES, rows) / TABLES**0.5
        self.of_dense = torch.randn(DENSE) / DENSE**0.5

    def batch(self, samples: int) -> Batch:
        """New samples; half of the indices are among an eighth of the rows."""
        dense = torch.randn(samples, DENSE)
        indices = (self.rows * torch.rand(TABLES, samples) ** 3).long()
        logits = 2 * self.of_rows.gather(1, indices).sum(0) + dense @ self.of_dense
        clicked = torch.bernoulli(torch.sigmoid(logits))
        return Batch(dense, indices, clicked, logits)


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers, each followed by a ReLU."""
    layers: list[nn.Module] = []
    for pair in itertools.pairwise(widths):
        layers += [nn.Linear(*pair), nn.ReLU()]
    return nn.Sequential(*layers)


class DLRM(nn.Module):
    """The model with torch's operators; a table looks up one row for each sample."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        vectors = TABLES + 1
        self.bottom = mlp(DENSE, 512, 256, size.width)
        self.tables: nn.ModuleList | MergedEmbeddingBag = nn.ModuleList(
            nn.EmbeddingBag(size.rows, size.width, mode="sum", sparse=True) for _ in range(TABLES)
        )
        self.top = nn.Sequential(
            mlp(size.width + vectors * (vectors - 1) // 2, 512, 256), nn.Linear(256, 1)
        )
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1), persistent=False)

    def features(self, dense: Tensor, indices: Tensor) -> Tensor:
        """The input of the last layers."""
        bottom = self.bottom(dense)
        bags = [table(rows.unsqueeze(1)) for table, rows in zip(self.tables, indices)]
        vectors = torch.stack([bottom, *bags], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        i, j = self.pairs
        return torch.cat([bottom, products[:, i, j]], 1)

    def forward(self, dense: Tensor, indices: Tensor) -> Tensor:
        """The logit of each sample's click."""
        logits: Tensor = self.top(self.features(dense, indices))
        return logits.squeeze(1)


class MergedDLRM(DLRM):
    """The model with merged tables, updated in the backward pass, and one kernel for products."""

    def __init__(self, size: Size, plain: DLRM) -> None:
        super().__init__(size)
        self.load_state_dict(plain.state_dict())
        tables = [copy.deepcopy(table) for table in plain.tables]
        self.tables = MergedEmbeddingBag(tables, optimizer="adagrad", lr=LR)

    def features(self, dense: Tensor, indices: Tensor) -> Tensor:
        """The input of the last layers."""
        bags = self.tables(indices.flatten(), torch.arange(indices.numel()))
        return interaction(self.bottom(dense), bags)


class Training:
    """A model with its optimizer, and the time of its iterations."""

    def __init__(self, name: str, model: DLRM, optimizer: Optimizer) -> None:
        self.name, self.model, self.optimizer = name, model, optimizer
        self.seconds: list[float] = []

    def iteration(self, batch: Batch) -> float:
        """Take one step; return the loss before it."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        logits = self.model(batch.dense, batch.indices)
        loss = binary_cross_entropy_with_logits(logits, batch.clicked)
        loss.backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)
        return loss.item()

    @torch.no_grad()
    def auc(self, batch: Batch) -> float:
        """The AUC of the model on these samples."""
        parts = zip(batch.dense.split(1000), batch.indices.split(1000, 1))
        return auc(torch.cat([self.model(*part) for part in parts]), batch.clicked)


def auc(scores: Tensor, clicked: Tensor) -> float:
    """The area under the curve of true over false positives, from the ranks of the scores."""
    ranks = torch.empty_like(scores, dtype=torch.float64)
    ranks[scores.argsort()] = torch.arange(1.0, len(scores) + 1, dtype=torch.float64)
    clicks = clicked.sum().item()
    above = ranks[clicked.bool()].sum().item() - clicks * (clicks + 1) / 2
    return above / (clicks * (len(scores) - clicks))


def training_runs(size: Size) -> list[Training]:
    """Training runs with torch's operators and with ours, from the same weights."""
    plain = DLRM(size)
    merged = MergedDLRM(size, plain)
    mlps = [*merged.bottom.parameters(), *merged.top.parameters()]
    # A fused step, and on some processors faster products.
    merged, fused = transforms.optimize(merged, Adagrad(mlps, lr=LR), inplace=True)
    return [
        Training("torch", plain, Adagrad(plain.parameters(), lr=LR)),
        Training("fusedoptim", merged, fused),
    ]


def print_table(compared: Sequence[Training], test: Batch) -> None:
    """Times and AUCs, and the hidden model's AUC."""
    base = compared[0]
    print(f"\n{'':<14}{'minimum':>12}{'median':>12}{'ratio':>8}{'ratio':>8}{'AUC':>9}")
    for training in compared:
        times = [function(training.seconds) for function in (min, statistics.median)]
        of_base = [function(base.seconds) for function in (min, statistics.median)]
        ratios = "".join(f"{mine / theirs:>8.2f}" for mine, theirs in zip(times, of_base))
        in_ms = "".join(f"{1e3 * seconds:>9.2f} ms" for seconds in times)
        print(f"{training.name:<14}{in_ms}{ratios}{training.auc(test):>9.4f}")
    print(f"{'hidden model':<14}{'':>40}{auc(test.chances, test.clicked):>9.4f}")


def main() -> None:
    """Train both models, and compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="small tables, few iterations")
    parser.add_argument("--iterations", type=int, help="of training")
    parser.add_argument("--seed", type=int, default=0, help="of data and weights")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    keep_memory()
    # Otherwise torch warns about its own sparse gradients.
    torch.sparse.check_sparse_tensor_invariants.disable()
    size = SMALL if args.small else FULL
    clicks = Clicks(size.rows)
    compared = training_runs(size)
    progress = tqdm(range(args.iterations or size.iterations), unit="batch", disable=None)
    for _ in progress:
        batch = clicks.batch(size.batch)
        losses = {training.name: training.iteration(batch) for training in compared}
        progress.set_postfix({name: f"{loss:.4f}" for name, loss in losses.items()})
    print_table(compared, clicks.batch(size.test_samples))


if __name__ == "__main__":
    main()
