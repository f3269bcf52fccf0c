"""Trains with fused and with torch's optimizers, and shows how bfloat16 stalls without SplitSGD.

Run ``python examples/convergence.py``; it takes about a minute. docs/benchmarks/convergence.md has
the results.

Each fused optimizer is compared with its torch counterpart. Both train from the same weights on the
same batches:

* on handwritten digits, with a network;
* on diabetes data, with a linear model of 10 weights. The problem is ill-conditioned, but least
  squares finds its minimum in float64, so each training run is also compared with the exact
  solution. SGD and Adam reach it. AdamW decays the weights, and Adagrad's steps shrink: both miss
  it. Lamb's step has the length of the weights times the rate, however small the gradient, so near
  a minimum it moves chaotically. Its rate is so small that the training run ends before.

torch has no Lamb; FusedLamb's counterpart is the class below.

Then three training runs on the digits compute outputs and gradients in bfloat16, with a learning
rate that soon drops to a fiftieth: with float32 weights under autocast; with plain bfloat16
weights, which lose an update below half a unit in the last place; and with SplitSGD. Only the
arithmetic of the update differs, except that SplitSGD's network sees weights truncated to bfloat16
where autocast rounds them.
"""

from __future__ import annotations

import copy
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from digits import argument_parser, largest_difference, load_data, timed_step
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from fusedoptim import FusedAdagrad, FusedAdam, FusedAdamW, FusedLamb, FusedSGD, SplitSGD

HIDDEN = 64
POINTS = 60  # of a loss curve
STALL_EPOCHS = 60
DROP_AT = 3 / STALL_EPOCHS  # share of the steps
STALL_RATES = 0.05, 0.001  # learning rates before and after the drop

Kwargs = dict[str, Any]
Schedule = Callable[[float], float]
"""Maps the share of the steps that are done to a factor of the learning rate."""


class Lamb(torch.optim.Optimizer):
    """Lamb in plain torch, FusedLamb's counterpart."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # it never calls a closure
        """Update each parameter that has a gradient."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                m = state["m"].lerp_(p.grad, 1 - beta1) / (1 - beta1 ** state["step"])
                v = state["v"].lerp_(p.grad.square(), 1 - beta2) / (1 - beta2 ** state["step"])
                update = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * p
                norms = p.norm().item(), update.norm().item()
                ratio = norms[0] / norms[1] if all(norms) else 1.0
                p.sub_(update, alpha=group["lr"] * ratio)


class Pair(NamedTuple):
    """A fused optimizer, its counterpart, and the arguments of both on each task."""

    fused: type[torch.optim.Optimizer]
    reference: type[torch.optim.Optimizer]
    digits: Kwargs
    diabetes: Kwargs


PAIRS = (
    Pair(
        FusedSGD,
        torch.optim.SGD,
        digits={"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4},
        diabetes={"lr": 0.1, "momentum": 0.9, "nesterov": True},
    ),
    Pair(FusedAdagrad, torch.optim.Adagrad, digits={"lr": 0.03}, diabetes={"lr": 0.3}),
    Pair(FusedAdam, torch.optim.Adam, digits={"lr": 0.004}, diabetes={"lr": 0.1}),
    Pair(
        FusedAdamW,
        torch.optim.AdamW,
        digits={"lr": 0.004, "weight_decay": 0.2},
        diabetes={"lr": 0.1},
    ),
    Pair(FusedLamb, Lamb, digits={"lr": 0.01, "weight_decay": 0.01}, diabetes={"lr": 0.005}),
)


class Task(NamedTuple):
    """Data, a network, a loss and a score, of which 1 is perfect."""

    name: str
    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    make_network: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    score: Callable[[Tensor, Tensor], float]
    batch: int
    epochs: int
    minimum: float = 0.0
    """The smallest possible loss, if it is known."""

    @property
    def steps(self) -> int:
        """Steps of a whole training run; an epoch's last batch may be smaller."""
        return self.epochs * -(-len(self.train_inputs) // self.batch)

    def forward(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, autocast: bool
    ) -> tuple[Tensor, Tensor]:
        """Return outputs and loss, computed in the model's dtype or under bfloat16 autocast."""
        dtype = next(model.parameters()).dtype
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outputs: Tensor = model(inputs.to(dtype))
        outputs = outputs.float() if outputs.dtype == torch.bfloat16 else outputs
        if targets.is_floating_point():
            targets = targets.to(outputs.dtype)
        return outputs, self.loss(outputs, targets)


class Training(NamedTuple):
    """The results of one training run."""

    label: str
    model: nn.Module
    curve: list[tuple[int, float]]
    """(steps done, loss over all training data), at least POINTS times."""
    score: float
    """The final score on the test data."""
    step_seconds: list[float]
    unmoved: float
    """The share of weights with a gradient that a step of the last epoch did not change."""

    @property
    def loss(self) -> float:
        """The final loss over all training data."""
        return self.curve[-1][1]


def make_network() -> nn.Module:
    """Three linear layers with GELU, which unlike ReLU's kink does not amplify roundings."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, HIDDEN),
        nn.GELU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.GELU(),
        nn.Linear(HIDDEN, 10),
    )


def accuracy(outputs: Tensor, labels: Tensor) -> float:
    return int((outputs.argmax(dim=1) == labels).sum()) / len(labels)


def r2(outputs: Tensor, targets: Tensor) -> float:
    """The share of the targets' variance that the outputs explain."""
    return 1 - (mse_loss(outputs, targets) / targets.var(correction=0)).item()


def digits_task(seed: int) -> Task:
    """Handwritten digits in batches of 64."""
    data = load_data(seed)
    return Task("digits", *data, make_network, cross_entropy, accuracy, batch=64, epochs=20)


def diabetes_task(seed: int) -> Task:
    """Progression of diabetes by ten measurements, standardized, all data in each step."""
    bundle = load_diabetes()
    columns = torch.from_numpy(bundle.data), torch.from_numpy(bundle.target).unsqueeze(1)
    train, test = train_test_split(range(len(bundle.target)), test_size=0.2, random_state=seed)
    data = [
        ((values[rows] - values[train].mean(dim=0)) / values[train].std(dim=0)).float()
        for rows in (train, test)
        for values in columns
    ]

    def make_linear() -> nn.Module:
        return nn.Linear(10, 1, bias=False)  # centered data needs no bias

    task = Task("diabetes", *data, make_linear, mse_loss, r2, batch=len(train), epochs=1200)
    residuals = task.train_inputs.double() @ exact_weights(task).T - task.train_targets
    return task._replace(minimum=residuals.square().mean().item())


def exact_weights(task: Task) -> Tensor:
    """The weights of a linear ``task`` by least squares in float64."""
    inputs, targets = task.train_inputs.double(), task.train_targets.double()
    solution: Tensor = torch.linalg.lstsq(inputs, targets).solution
    return solution.T


def cosine(done: float) -> float:
    return (1 + math.cos(math.pi * done)) / 2


def drop(done: float) -> float:
    return 1.0 if done < DROP_AT else STALL_RATES[1] / STALL_RATES[0]


@torch.no_grad()
def judge(task: Task, model: nn.Module, autocast: bool) -> tuple[float, float]:
    """Return the loss over all training data and the score on the test data.

    They are computed in bfloat16 if the training run is, otherwise in float64, so that only weights
    matter.
    """
    if not autocast and next(model.parameters()).dtype == torch.float32:
        model = copy.deepcopy(model).double()
    _, loss = task.forward(model, task.train_inputs, task.train_targets, autocast)
    outputs, _ = task.forward(model, task.test_inputs, task.test_targets, autocast)
    return loss.item(), task.score(outputs, task.test_targets)


def current_weights(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of the weights; SplitSGD's with both halves."""
    if isinstance(optimizer, SplitSGD):
        return list(optimizer.master_params())
    return [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]


def train(
    task: Task,
    label: str,
    optimizer_class: type[torch.optim.Optimizer],
    kwargs: Kwargs,
    seed: int,
    *,
    schedule: Schedule = cosine,
    dtype: torch.dtype = torch.float32,
    autocast: bool = False,
) -> Training:
    """Train a new network; equal seeds give equal initial weights and batches."""
    torch.manual_seed(seed)
    model = task.make_network().to(dtype)
    optimizer = optimizer_class(model.parameters(), **kwargs)
    scheduler = LambdaLR(optimizer, lambda step: schedule(step / task.steps))
    curve = [(0, judge(task, model, autocast)[0])]
    step_seconds: list[float] = []
    moving = unmoved = 0
    name = f"{task.name}: {label}"
    # A bar is shown only in a terminal, and disappears at the end.
    for epoch in tqdm(range(task.epochs), name, unit="epoch", leave=False, disable=None):
        is_last = epoch == task.epochs - 1
        for batch in torch.split(torch.randperm(len(task.train_inputs)), task.batch):
            data = task.train_inputs[batch], task.train_targets[batch]
            loss = task.forward(model, *data, autocast)[1]
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
            before = current_weights(optimizer) if is_last else []
            step_seconds.append(timed_step(optimizer))
            after = current_weights(optimizer) if is_last else []
            for old, new, parameter in zip(before, after, model.parameters()):
                has_gradient = parameter.grad != 0  # a pixel that is always blank gives none
                moving += int(has_gradient.sum())
                unmoved += int((has_gradient & (old == new)).sum())
            scheduler.step()
        if (epoch + 1) % max(1, task.epochs // POINTS) == 0 or is_last:
            curve.append((len(step_seconds), judge(task, model, autocast)[0]))
    score = judge(task, model, autocast)[1]
    return Training(label, model, curve, score, step_seconds, unmoved / moving)


def train_pair(task: Task, pair: Pair, seed: int, **options: Any) -> tuple[Training, Training]:
    """Train with the reference and with the fused optimizer."""
    kwargs = getattr(pair, task.name)
    reference, fused = (
        train(task, cls.__name__, cls, kwargs, seed, **options)
        for cls in (pair.reference, pair.fused)
    )
    return reference, fused


def train_stall(task: Task, seed: int) -> tuple[Training, Training, Training]:
    """Train with float32 weights, with bfloat16 weights, and with SplitSGD's."""
    kwargs = {"lr": STALL_RATES[0], "momentum": 0.9}
    sgd = torch.optim.SGD  # not fused: that skips most bfloat16 weights on the CPU
    return (
        train(task, "float32, SGD", sgd, kwargs, seed, schedule=drop, autocast=True),
        train(task, "bfloat16, SGD", sgd, kwargs, seed, schedule=drop, dtype=torch.bfloat16),
        train(task, "SplitSGD", SplitSGD, kwargs, seed, schedule=drop),
    )


def print_table(title: str, rows: Sequence[Sequence[str]]) -> None:
    """Print columns, the first aligned left and the others right; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    print(f"\n{title}\n")
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:])]
        print("  ".join([first.ljust(widths[0]), *cells]))


def print_pairs(task: Task, score: str, pairs: list[tuple[Training, Training]]) -> None:
    """Print a row for each pair; double columns have torch's figure first."""
    weights = sum(p.numel() for p in task.make_network().parameters())
    rows = [["", *("loss - minimum" if task.minimum else "loss", "fused"), score, "fused"]]
    rows[0] += ["largest difference", "step, us", "fused"]
    for pair in pairs:
        losses = [run.loss - task.minimum for run in pair]
        medians = [statistics.median(run.step_seconds) * 1e6 for run in pair]
        cells = [f"{loss:.1e}" if task.minimum else f"{loss:.5f}" for loss in losses]
        cells += [f"{run.score:.4f}" for run in pair]
        cells += [f"{largest_difference(*(run.model for run in pair)):.1e}"]
        rows.append([pair[1].label, *cells, *(f"{median:.0f}" for median in medians)])
    print_table(
        f"{task.name}: {len(task.train_inputs)} samples for training, {len(task.test_inputs)} for "
        f"testing; {weights:,} weights, {task.steps:,} steps",
        rows,
    )


def print_stall(task: Task, runs: tuple[Training, ...]) -> None:
    rows = [["weights, optimizer", "loss at drop", "at the end", "accuracy", "unmoved by a step"]]
    for run in runs:
        at_drop = next(loss for step, loss in run.curve if step >= DROP_AT * task.steps)
        figures = f"{at_drop:.4f}", f"{run.loss:.4f}", f"{run.score:.4f}", f"{run.unmoved:.2%}"
        rows.append([run.label, *figures])
    print_table(
        f"{task.name}, {task.steps:,} steps in bfloat16; learning rate {STALL_RATES[0]}, after "
        f"{DROP_AT:.0%} of them {STALL_RATES[1]}",
        rows,
    )


def draw_pairs(axes: Axes, task: Task, pairs: list[tuple[Training, Training]]) -> None:
    """Draw torch's curves wide and pale, and the fused ones thin on top of them."""
    for i, pair in enumerate(pairs):
        for run, width, alpha in zip(pair, (7.0, 1.3), (0.3, 1.0)):
            steps, losses = zip(*run.curve)
            # Smaller values are the rounding of the loss, and may be negative.
            excess = [max(loss - task.minimum, 1e-15) for loss in losses]
            axes.plot(steps, excess, color=f"C{i}", linewidth=width, alpha=alpha)
    handles = [Line2D([], [], color=f"C{i}", label=run.label) for i, (_, run) in enumerate(pairs)]
    handles.append(Line2D([], [], color="gray", linewidth=7, alpha=0.3, label="torch's (wide)"))
    axes.legend(handles=handles, fontsize="small")


def save_picture(
    path: Path,
    results: list[tuple[Task, list[tuple[Training, Training]]]],
    stall: tuple[Training, ...],
    drop_step: float,
) -> None:
    """Draw the pairs of both tasks and the three training runs in bfloat16."""
    figure = Figure(figsize=(16, 4.8), layout="constrained")  # unlike pyplot's, needs no display
    *pair_axes, stall_axes = figure.subplots(1, 3)
    for axes, (task, pairs) in zip(pair_axes, results):
        draw_pairs(axes, task, pairs)
        above = " above the minimum" if task.minimum else ""
        axes.set(title=f"{task.name}: fused and torch", ylabel=f"loss{above}, all training data")
    styles = zip(stall, ("tab:orange", "tab:red", "tab:blue"), (7.0, 1.5, 1.5), (0.4, 1.0, 1.0))
    for run, color, width, alpha in styles:
        label = f"{run.label}: {run.unmoved:.1%} of weights unmoved by a step"
        stall_axes.plot(*zip(*run.curve), color=color, linewidth=width, alpha=alpha, label=label)
    stall_axes.axvline(drop_step, color="gray", linestyle="--", linewidth=1, label="rate drops")
    stall_axes.set(title="digits in bfloat16", ylabel="loss, all training data")
    stall_axes.legend(fontsize="small")
    for axes in (*pair_axes, stall_axes):
        axes.set(yscale="log", xlabel="step")
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Train, show the results, and exit with an error if runs that should agree do not."""
    description = "Train with fused and with torch's optimizers, in float32 and bfloat16."
    arguments = argument_parser(description, "out/convergence.png").parse_args()
    seed = arguments.seed
    tasks = digits_task(seed), diabetes_task(seed)
    stall_task = tasks[0]._replace(epochs=STALL_EPOCHS)
    results = [(task, [train_pair(task, pair, seed) for pair in PAIRS]) for task in tasks]
    stall = train_stall(stall_task, seed)
    for (task, pairs), score in zip(results, ("accuracy", "R2")):
        print_pairs(task, score, pairs)
    print_stall(stall_task, stall)
    save_picture(arguments.output, results, stall, DROP_AT * stall_task.steps)
    print(f"\nCurves: {arguments.output}")
    for reference, fused in [*results[0][1], *results[1][1], (stall[0], stall[2])]:
        if abs(reference.score - fused.score) > 0.01:
            sys.exit(
                f"error: {fused.label} scored {fused.score:.4f}, {reference.label} "
                f"{reference.score:.4f}"
            )


if __name__ == "__main__":
    main()
