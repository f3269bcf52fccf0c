"""Do the fused optimizers train as torch's do, and does SplitSGD train where plain bfloat16 stalls?

First, each fused optimizer is trained beside its torch counterpart, from the same weights on the
same batches, on two data sets that scikit-learn brings:

* handwritten digits, with a network: many steps of a problem without a known answer;
* diabetes, with a linear model: it has only 10 weights and is ill-conditioned, but its minimum is
  unique and linear algebra finds it in float64. So each training is held not only against its twin
  but against the truth. SGD and Adam get there. AdamW decays the weights, and Adagrad's steps
  shrink: both stay off it. Lamb's step has the length of the weights times the rate, however small
  the gradient, so near a minimum it hops around chaotically, where a start changed by 1e-14 changes
  the path; its rate is chosen to end before.

torch's optimizers run as they come, which on the CPU is a loop over the tensors. torch has no Lamb;
FusedLamb's counterpart is the class below.

Then three trainings on the digits, whose learning rate soon drops to a fiftieth:

* float32 weights and torch's SGD: the reference;
* bfloat16 weights and torch's SGD (not its fused one, which skips most bfloat16 weights on the
  CPU): an update below half a unit in a weight's last place, 1/512 of the weight or so, is lost;
* SplitSGD: bfloat16 weights whose lower 16 bits are kept by the optimizer.

All three compute their outputs and gradients in bfloat16, the reference under autocast, which
rounds its weights for each pass. A reference that computes in float32 would differ in its
gradients too; so the arithmetic of the update is all that differs, but for one thing: SplitSGD's
network sees the upper half of a weight, which is the weight truncated, not rounded.

Run it with ``python examples/convergence.py``; it takes about a minute.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from digits import largest_difference, load_data, timed_step
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
DROP_AT = 3 / STALL_EPOCHS  # of the steps
STALL_RATES = 0.05, 0.001  # before and after the drop

Kwargs = dict[str, Any]
Schedule = Callable[[float], float]
"""From the share of the steps that are done to a factor of the learning rate."""


class Lamb(torch.optim.Optimizer):
    """Lamb in plain torch, what FusedLamb is held against."""

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
    """A fused optimizer, what it stands for, and the arguments of both on each task."""

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
    """Data, a network, and how to judge it."""

    name: str
    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    make_network: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    score: Callable[[Tensor, Tensor], float]
    """of outputs and targets; 1 is perfect."""
    batch: int
    epochs: int
    minimum: float = 0.0
    """of the loss, where it is known."""

    @property
    def steps(self) -> int:
        """Of a whole training; an epoch's last batch may be smaller."""
        return self.epochs * -(-len(self.train_inputs) // self.batch)


class Training(NamedTuple):
    """What one training left behind."""

    label: str
    model: nn.Module
    curve: list[tuple[int, float]]
    """(steps done, loss over all training data), at least POINTS times."""
    score: float
    """on the test data, at the end."""
    step_seconds: list[float]
    unmoved: float
    """The share of weights that a step of the last epoch left as they were, though they have a
    gradient (a pixel that is always blank gives none)."""

    @property
    def loss(self) -> float:
        """Over all training data, at the end."""
        return self.curve[-1][1]


def make_network() -> nn.Module:
    """Three linear layers. GELU is smooth: it does not amplify roundings, as ReLU's kink does."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, HIDDEN),
        nn.GELU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.GELU(),
        nn.Linear(HIDDEN, 10),
    )


def make_linear() -> nn.Module:
    """A linear model of centred data, which needs no bias."""
    return nn.Linear(10, 1, bias=False)


def accuracy(outputs: Tensor, labels: Tensor) -> float:
    """The share of the largest outputs that are at the label."""
    return int((outputs.argmax(dim=1) == labels).sum()) / len(labels)


def r2(outputs: Tensor, targets: Tensor) -> float:
    """The share of the targets' variance that the outputs explain."""
    return 1 - (mse_loss(outputs, targets) / targets.var(correction=0)).item()


def digits_task(seed: int) -> Task:
    """Handwritten digits, in batches of 64."""
    data = load_data(seed)
    return Task("digits", *data, make_network, cross_entropy, accuracy, batch=64, epochs=20)


def diabetes_task(seed: int) -> Task:
    """Progression of diabetes, by ten measurements, standardized; the whole data in each step."""
    bundle = load_diabetes()
    columns = torch.from_numpy(bundle.data), torch.from_numpy(bundle.target).unsqueeze(1)
    train, test = train_test_split(range(len(bundle.target)), test_size=0.2, random_state=seed)
    train_inputs, train_targets, test_inputs, test_targets = (
        ((values[rows] - values[train].mean(dim=0)) / values[train].std(dim=0)).float()
        for rows in (train, test)
        for values in columns
    )
    task = Task(
        "diabetes",
        train_inputs,
        train_targets,
        test_inputs,
        test_targets,
        make_linear,
        mse_loss,
        r2,
        batch=len(train),
        epochs=1200,
    )
    residuals = task.train_inputs.double() @ exact_weights(task).T - task.train_targets
    return task._replace(minimum=residuals.square().mean().item())


def exact_weights(task: Task) -> Tensor:
    """The weights of a linear ``task`` that least squares finds in float64."""
    inputs, targets = task.train_inputs.double(), task.train_targets.double()
    solution: Tensor = torch.linalg.lstsq(inputs, targets).solution
    return solution.T


def cosine(done: float) -> float:
    """From 1 to 0 along half a wave."""
    return (1 + math.cos(math.pi * done)) / 2


def drop(done: float) -> float:
    """From 1 to a fiftieth, at once."""
    return 1.0 if done < DROP_AT else STALL_RATES[1] / STALL_RATES[0]


def dtype_of(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def outputs_of(model: nn.Module, inputs: Tensor, autocast: bool) -> Tensor:
    """Outputs computed in the model's dtype, or by autocast in bfloat16; losses want float32."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs: Tensor = model(inputs.to(dtype_of(model)))
    return outputs.float() if outputs.dtype == torch.bfloat16 else outputs


def loss_of(task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss, in the dtype of ``outputs``."""
    return task.loss(outputs, targets.to(outputs.dtype) if targets.is_floating_point() else targets)


@torch.no_grad()
def judge(task: Task, model: nn.Module, autocast: bool) -> tuple[float, float]:
    """The loss over all training data and the score on the test data.

    Computed as in training if that is in bfloat16, else in float64, so as to compare weights only.
    """
    if not autocast and dtype_of(model) == torch.float32:
        model = copy.deepcopy(model).double()
    loss = loss_of(task, outputs_of(model, task.train_inputs, autocast), task.train_targets)
    return loss.item(), task.score(outputs_of(model, task.test_inputs, autocast), task.test_targets)


def current_weights(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of the weights; SplitSGD's with both halves."""
    if isinstance(optimizer, SplitSGD):
        return list(optimizer.master_params())
    return [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]


def unmoved_share(
    before: list[Tensor], after: list[Tensor], gradients: Iterable[Tensor | None]
) -> float:
    """The share of weights with a gradient that are the same before and after a step."""
    moving = same = 0
    for old, new, gradient in zip(before, after, gradients):
        if gradient is not None:
            moving += int((gradient != 0).sum())
            same += int(((gradient != 0) & (old == new)).sum())
    return same / moving


def train(
    task: Task,
    label: str,
    optimizer_class: type[torch.optim.Optimizer],
    kwargs: Kwargs,
    seed: int,
    bar: tqdm[Any],
    *,
    schedule: Schedule = cosine,
    dtype: torch.dtype = torch.float32,
    autocast: bool = False,
) -> Training:
    """Train a new network; equal seeds give equal weights to start from and equal batches."""
    torch.manual_seed(seed)
    model = task.make_network().to(dtype)
    optimizer = optimizer_class(model.parameters(), **kwargs)
    scheduler = LambdaLR(optimizer, lambda step: schedule(step / task.steps))
    curve = [(0, judge(task, model, autocast)[0])]
    step_seconds: list[float] = []
    unmoved: list[float] = []
    for epoch in range(task.epochs):
        for batch in torch.split(torch.randperm(len(task.train_inputs)), task.batch):
            outputs = outputs_of(model, task.train_inputs[batch], autocast)
            loss = loss_of(task, outputs, task.train_targets[batch])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
            before = current_weights(optimizer) if epoch == task.epochs - 1 else []
            step_seconds.append(timed_step(optimizer))
            if before:
                gradients = [p.grad for p in model.parameters()]
                unmoved.append(unmoved_share(before, current_weights(optimizer), gradients))
            scheduler.step()
            bar.update()
        if (epoch + 1) % max(1, task.epochs // POINTS) == 0 or epoch == task.epochs - 1:
            curve.append((len(step_seconds), judge(task, model, autocast)[0]))
    score = judge(task, model, autocast)[1]
    return Training(label, model, curve, score, step_seconds, statistics.mean(unmoved))


def progress(what: str, steps: int) -> tqdm[Any]:
    """A bar for several trainings."""
    return tqdm(total=steps, desc=f"{what:<15}", unit="step", ncols=88)


def train_pair(
    task: Task, pair: Pair, seed: int, bar: tqdm[Any], **options: Any
) -> tuple[Training, Training]:
    """Train with the reference and with the fused optimizer."""
    kwargs = getattr(pair, task.name)
    reference, fused = (
        train(task, cls.__name__, cls, kwargs, seed, bar, **options)
        for cls in (pair.reference, pair.fused)
    )
    return reference, fused


def train_stall(task: Task, seed: int, bar: tqdm[Any]) -> tuple[Training, Training, Training]:
    """Train with float32 weights, with bfloat16 ones, and with SplitSGD's."""
    kwargs = {"lr": STALL_RATES[0], "momentum": 0.9}
    sgd = torch.optim.SGD
    return (
        train(task, "float32, SGD", sgd, kwargs, seed, bar, schedule=drop, autocast=True),
        train(task, "bfloat16, SGD", sgd, kwargs, seed, bar, schedule=drop, dtype=torch.bfloat16),
        train(task, "SplitSGD", SplitSGD, kwargs, seed, bar, schedule=drop),
    )


def microseconds(training: Training) -> str:
    return f"{statistics.median(training.step_seconds) * 1e6:.0f}"


def print_pairs(task: Task, score: str, pairs: list[tuple[Training, Training]]) -> None:
    """Print a row for each pair: torch's number, then the fused optimizer's."""
    weights = sum(p.numel() for p in task.make_network().parameters())
    loss = "loss - minimum" if task.minimum else "loss at the end"
    print(
        f"\n{task.name}: {len(task.train_inputs)} to train on, {len(task.test_inputs)} to test on; "
        f"{weights:,} weights, {task.steps:,} steps\n\n"
        f"{'':<13}{loss:^22}{score:^20}{'largest weight':>16}{'step, us':^17}\n"
        f"{'':<13}{'torch':>10}{'fused':>11} {'torch':>10}{'fused':>9}{'difference':>15} "
        f"{'torch':>8}{'fused':>7}"
    )
    for reference, fused in pairs:
        losses = [
            f"{run.loss - task.minimum:.1e}" if task.minimum else f"{run.loss:.5f}"
            for run in (reference, fused)
        ]
        print(
            f"{fused.label:<13}{losses[0]:>10}{losses[1]:>11} "
            f"{reference.score:>10.4f}{fused.score:>9.4f}"
            f"{largest_difference(reference.model, fused.model):>15.1e} "
            f"{microseconds(reference):>8}{microseconds(fused):>7}"
        )


def print_stall(task: Task, runs: tuple[Training, ...]) -> None:
    """Print a row for each of the three trainings."""
    print(
        f"\n{task.name}, {task.steps:,} steps computed in bfloat16; learning rate "
        f"{STALL_RATES[0]}, after {DROP_AT:.0%} of them {STALL_RATES[1]}\n\n"
        f"{'weights, optimizer':<20}{'loss at drop':>14}{'at the end':>14}{'accuracy':>12}"
        f"{'weights unmoved by a step':>28}"
    )
    for run in runs:
        at_drop = next(loss for step, loss in run.curve if step >= DROP_AT * task.steps)
        print(
            f"{run.label:<20}{at_drop:>14.4f}{run.loss:>14.4f}{run.score:>12.4f}{run.unmoved:>28.2%}"
        )


def draw_pairs(axes: Axes, task: Task, pairs: list[tuple[Training, Training]]) -> None:
    """Draw torch's curves broad and pale, and the fused ones thin, on top of them."""
    for i, pair in enumerate(pairs):
        for run, width, alpha in zip(pair, (7.0, 1.3), (0.3, 1.0)):
            steps, losses = zip(*run.curve)
            # What is less is the rounding of the loss, and may be negative.
            excess = [max(loss - task.minimum, 1e-15) for loss in losses]
            axes.plot(steps, excess, color=f"C{i}", linewidth=width, alpha=alpha)
    handles = [Line2D([], [], color=f"C{i}", label=run.label) for i, (_, run) in enumerate(pairs)]
    handles.append(Line2D([], [], color="gray", linewidth=7, alpha=0.3, label="torch's (broad)"))
    axes.legend(handles=handles, fontsize="small")


def save_picture(
    path: Path,
    tasks: tuple[Task, Task],
    pairs: tuple[list[tuple[Training, Training]], list[tuple[Training, Training]]],
    stall_task: Task,
    stall: tuple[Training, ...],
) -> None:
    """Draw both tasks' pairs and the three trainings in bfloat16."""
    # A Figure of its own, not pyplot's: it needs no display and no choice of a backend.
    figure = Figure(figsize=(16, 4.8), layout="constrained")
    digits_axes, diabetes_axes, stall_axes = figure.subplots(1, 3)
    draw_pairs(digits_axes, tasks[0], pairs[0])
    digits_axes.set(title="Digits: fused and torch", ylabel="cross-entropy, all training data")
    draw_pairs(diabetes_axes, tasks[1], pairs[1])
    diabetes_axes.set(
        title="Diabetes: above the exact minimum", ylabel="mean squared error - its minimum"
    )
    for run, color, width, alpha in zip(
        stall, ("tab:orange", "tab:red", "tab:blue"), (7.0, 1.5, 1.5), (0.4, 1.0, 1.0)
    ):
        label = f"{run.label}: {run.unmoved:.1%} of weights unmoved by a step"
        stall_axes.plot(*zip(*run.curve), color=color, linewidth=width, alpha=alpha, label=label)
    stall_axes.axvline(
        DROP_AT * stall_task.steps, color="gray", linestyle="--", linewidth=1, label="rate drops"
    )
    stall_axes.set(
        title="Digits in bfloat16: small updates lost and kept",
        ylabel="cross-entropy, all training data",
    )
    stall_axes.legend(fontsize="small")
    for axes in (digits_axes, diabetes_axes, stall_axes):
        axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train with fused and with torch's optimizers, in float32 and bfloat16."
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the splits, the weights and the batches; default: %(default)s",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("out/convergence.png"), help="default: %(default)s"
    )
    return parser.parse_args()


def main() -> None:
    """Train, show, and exit with an error if two that should agree do not."""
    arguments = parse_arguments()
    seed = arguments.seed
    tasks = digits_task(seed), diabetes_task(seed)
    stall_task = tasks[0]._replace(epochs=STALL_EPOCHS)
    pairs = []
    for task in tasks:
        with progress(task.name, 2 * len(PAIRS) * task.steps) as bar:
            pairs.append([train_pair(task, pair, seed, bar) for pair in PAIRS])
    with progress("digits, bf16", 3 * stall_task.steps) as bar:
        stall = train_stall(stall_task, seed, bar)
    print_pairs(tasks[0], "accuracy", pairs[0])
    print_pairs(tasks[1], "R2", pairs[1])
    print_stall(stall_task, stall)
    save_picture(arguments.output, tasks, (pairs[0], pairs[1]), stall_task, stall)
    print(f"\nCurves: {arguments.output}")
    for reference, fused in [*pairs[0], *pairs[1], (stall[0], stall[2])]:
        if abs(reference.score - fused.score) > 0.01:
            sys.exit(
                f"error: {fused.label} scored {fused.score:.4f}, {reference.label} "
                f"{reference.score:.4f}"
            )


if __name__ == "__main__":
    main()
