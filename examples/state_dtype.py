"""Trains with AdamW's moments in float32, in bfloat16 and in 8 bits, and compares the last losses.

Run ``python examples/state_dtype.py``; it takes some minutes. docs/benchmarks/convergence.md has
the results.

Three networks train from five seeds each, with the same weights and batches for each state_dtype:
one on handwritten digits, a small convolutional one on the same digits, and a small GPT on the help
texts of Python's own pydoc, character by character. The last loss is the mean over the last tenth
of the steps. A state_dtype passes if its mean over the seeds is at most two standard deviations
away from float32's. With ``--torchao``, torchao's optimizers with 8-bit state train too; they need
torch.compile and a C++ compiler, and compile for some minutes.
"""

from __future__ import annotations

import pydoc_data.topics
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from convergence import make_network, print_table
from digits import argument_parser, load_data
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fusedoptim import FusedAdamW

SEEDS = 5
STATES: tuple[Any, ...] = (torch.float32, torch.bfloat16, "float8")
TORCHAO = ("AdamW8bit", "AdamWFp8")
CONTEXT, WIDTH, LAYERS, HEADS = 64, 96, 2, 4  # of the GPT

Batches = Callable[[torch.Generator], tuple[Tensor, Tensor]]


class Task(NamedTuple):
    """A network, its data, and the length of its training run."""

    name: str
    make_network: Callable[[], nn.Module]
    batch: Batches
    steps: int
    lr: float


class GPT(nn.Module):
    """A small transformer that predicts the next character."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(characters, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH,
            HEADS,
            4 * WIDTH,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, characters)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of each next character."""
        x = self.tokens(tokens) + self.positions.weight
        x = self.layers(x, mask=self.mask, is_causal=True)
        logits: Tensor = self.head(x)
        return logits.flatten(0, 1)


def make_cnn() -> nn.Module:
    """Two convolutions with BatchNorm, and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )


def tasks() -> tuple[Task, ...]:
    images, labels, _, _ = load_data(0)
    images = images.view(-1, 1, 8, 8)
    text = "\n".join(pydoc_data.topics.topics.values())
    alphabet = sorted(set(text))
    codes = torch.tensor([alphabet.index(character) for character in text])

    def digits(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(images), (64,), generator=generator)
        return images[rows], labels[rows]

    def characters(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(codes) - CONTEXT, (16, 1), generator=generator)
        places = starts + torch.arange(CONTEXT)
        return codes[places], codes[places + 1].flatten()

    return (
        Task("digits, linear", make_network, digits, 400, 2e-3),
        Task("digits, CNN", make_cnn, digits, 300, 1e-3),
        Task("GPT on pydoc", lambda: GPT(len(alphabet)), characters, 300, 1e-3),
    )


def make_optimizer(model: nn.Module, state: Any, lr: float) -> torch.optim.Optimizer:
    """FusedAdamW with a state_dtype, or the class of torchao with that name."""
    if state not in TORCHAO:
        return FusedAdamW(model.parameters(), lr=lr, state_dtype=state)
    import torchao.optim

    made: torch.optim.Optimizer = getattr(torchao.optim, state)(model.parameters(), lr=lr)
    return made


def train(task: Task, state: Any, seed: int) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(seed)
    model = task.make_network()
    optimizer = make_optimizer(model, state, task.lr)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(task.steps):
        inputs, targets = task.batch(generator)
        loss = cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        optimizer.step()
        losses.append(loss.item())
    return losses


def last_loss(losses: Sequence[float]) -> float:
    return statistics.mean(losses[-(len(losses) // 10) :])


def save_picture(path: Path, curves: dict[str, dict[Any, list[list[float]]]]) -> None:
    """Draw all seeds' curves of all tasks, each on top of wider ones."""
    figure = Figure(figsize=(16, 4.8), layout="constrained")  # unlike pyplot's, needs no display
    for axes, (name, by_state) in zip(figure.subplots(1, len(curves)), curves.items()):
        for i, (state_dtype, runs) in enumerate(by_state.items()):
            for k, run in enumerate(runs):
                label = str(state_dtype).removeprefix("torch.") if k == 0 else None
                width = 3 * 0.4**i
                axes.plot(run, color=f"C{i}", linewidth=width, alpha=0.6, label=label)
        axes.set(title=name, xlabel="step", ylabel="loss", yscale="log")
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Train, show the results, and exit with an error if a state_dtype does not pass."""
    description = "Train with AdamW's moments in float32, bfloat16 and 8 bits."
    parser = argument_parser(description, "out/state_dtype.png")
    parser.add_argument("--torchao", action="store_true", help="train with torchao's too")
    arguments = parser.parse_args()
    states = STATES + TORCHAO if arguments.torchao else STATES
    seeds = range(arguments.seed, arguments.seed + SEEDS)
    curves: dict[str, dict[Any, list[list[float]]]] = {}
    rows, wrong = [["last loss, mean and deviation", *map(str, states)]], []
    for task in tasks():
        curves[task.name] = {s: [train(task, s, seed) for seed in seeds] for s in states}
        ends = {s: list(map(last_loss, runs)) for s, runs in curves[task.name].items()}
        mean, spread = statistics.mean(ends[torch.float32]), statistics.stdev(ends[torch.float32])
        rows.append(
            [
                f"{task.name}, {task.steps} steps",
                *(f"{statistics.mean(e):.4f} {statistics.stdev(e):.4f}" for e in ends.values()),
            ]
        )
        wrong += [
            f"{task.name}, {s}"
            for s, e in ends.items()
            if abs(statistics.mean(e) - mean) > 2 * spread
        ]
    print_table(f"AdamW, {SEEDS} seeds", rows)
    save_picture(arguments.output, curves)
    print(f"\nCurves: {arguments.output}")
    if wrong:
        sys.exit(f"error: not within the spread of float32: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
