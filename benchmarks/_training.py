"""Real models with random weights, the batches they train on, and the ways to train them."""

from __future__ import annotations

import contextlib
import functools
import resource
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks._models import DLRM, digits_network, resnet50

LR = 1e-5
"""Small, so that weights keep an ordinary size in hundreds of iterations on one batch."""


CrossEntropy = Callable[[Tensor, Tensor], Tensor]


class Task(NamedTuple):
    """A model, and a function that computes a batch's loss, given a cross-entropy function."""

    model: nn.Module
    loss: Callable[[nn.Module, CrossEntropy], Tensor]


class Training(NamedTuple):
    """A model, its optimizer, the context of its forward pass and the function of its loss."""

    model: nn.Module
    optimizer: Optimizer
    autocast: bool = False
    cross_entropy: CrossEntropy = functional.cross_entropy

    def precision(self) -> contextlib.AbstractContextManager[object]:
        """The context of the forward pass."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.autocast)


class Record(NamedTuple):
    """The measurements of one process: seconds of each iteration, memory in bytes."""

    first: float
    """Time from before the optimizer's construction to the end of the first iteration."""
    forward: list[float]
    backward: list[float]
    step: list[float]
    faults: list[int]
    """Page faults of each iteration."""
    peak: int = 0
    """Largest resident memory of the process."""

    @property
    def iteration(self) -> list[float]:
        """Seconds of each whole iteration."""
        return [sum(parts) for parts in zip(self.forward, self.backward, self.step)]

    @property
    def rest(self) -> list[float]:
        """Seconds of each iteration without its step."""
        return [sum(parts) for parts in zip(self.forward, self.backward)]


def new_gpt(words: int, layers: int, width: int, heads: int) -> nn.Module:
    """GPT-2 for sequences of up to 128 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=words,
        n_positions=128,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


def gpt() -> Task:
    """GPT-2 with 6 layers of width 384 and a vocabulary of 20,000; 4 sequences of 128 tokens."""
    words = 20_000
    model = new_gpt(words, layers=6, width=384, heads=6)
    tokens = torch.randint(words, (4, 129))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    def loss(model: nn.Module, cross_entropy: CrossEntropy) -> Tensor:
        logits = model(input_ids=inputs, use_cache=False).logits
        return cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Task(model, loss)


def bert() -> Task:
    """BERT with 6 layers of width 384, and a head of two classes; 8 sequences of 64 tokens."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536
    )
    tokens, labels = torch.randint(config.vocab_size, (8, 64)), torch.randint(2, (8,))
    return Task(
        BertForSequenceClassification(config),
        lambda model, cross_entropy: cross_entropy(model(input_ids=tokens).logits, labels),
    )


def resnet() -> Task:
    """ResNet-50; 8 images of 128 by 128 pixels."""
    return _classifier(resnet50(), torch.randn(8, 3, 128, 128), classes=1000)


def digits() -> Task:
    """The network of examples/digits.py; 64 images of 8 by 8 pixels."""
    return _classifier(digits_network(), torch.randn(64, 1, 8, 8), classes=10)


def _classifier(model: nn.Module, images: Tensor, classes: int) -> Task:
    labels = torch.randint(classes, (len(images),))
    return Task(model, lambda model, cross_entropy: cross_entropy(model(images), labels))


def dlrm() -> Task:
    """DLRM with 26 tables of 20,000 rows of 64; 2,048 samples with one row from each table."""
    tables, rows, batch = 26, 20_000, 2048
    dense, clicked = torch.randn(batch, 13), torch.randint(2, (batch, 1)).float()
    indices = torch.randint(rows, (tables, batch))
    return Task(
        DLRM([rows] * tables, width=64),
        lambda model, _: functional.binary_cross_entropy_with_logits(
            model(dense, indices), clicked
        ),
    )


class Workload(NamedTuple):
    """How to make a task, the size of its batch in words, and how many iterations to time."""

    make: Callable[[], Task]
    batch: str
    iterations: int


WORKLOADS = {
    "GPT": Workload(gpt, "4 x 128", 20),
    "ResNet-50": Workload(resnet, "8 at 128", 20),
    "BERT": Workload(bert, "8 x 64", 20),
    "DLRM": Workload(dlrm, "2,048", 20),
    "digits": Workload(digits, "64", 200),
}


def _torch(model: nn.Module, **options: Any) -> Training:
    return Training(model, AdamW(model.parameters(), lr=LR, **options))


def _torch_bfloat16(model: nn.Module) -> Training:
    return _torch(model, fused=True)._replace(autocast=True)


def _compiled(model: nn.Module) -> Training:
    # model.compile() would compile a Sequential's blocks one by one.
    return _torch(model, fused=True)._replace(model=torch.compile(model))


def _fused_step(model: nn.Module) -> Training:
    from fusedoptim import FusedAdamW

    return Training(model, FusedAdamW(model.parameters(), lr=LR))


def _transforms(model: nn.Module, dtype: torch.dtype | None) -> Training:
    from fusedoptim import transforms

    optimizer = AdamW(model.parameters(), lr=LR)
    model, optimizer = transforms.optimize(model, optimizer, dtype=dtype, inplace=True)
    return Training(model, optimizer, autocast=dtype is not None)


def _fusedoptim(model: nn.Module, dtype: torch.dtype | None) -> Training:
    from fusedoptim.nn.functional import cross_entropy

    return _memory_kept(_transforms(model, dtype))._replace(cross_entropy=cross_entropy)


def _memory_kept(training: Training) -> Training:
    """The same training run; from now on malloc keeps freed memory."""
    from fusedoptim.runtime import keep_memory

    keep_memory()
    return training


def _ipex(model: nn.Module) -> Training:
    import intel_extension_for_pytorch as ipex

    optimizer = AdamW(model.parameters(), lr=LR)
    model, optimizer = ipex.optimize(model, optimizer=optimizer, dtype=torch.bfloat16, inplace=True)
    return Training(model, optimizer, autocast=True)


IPEX = "IPEX, bfloat16"
"""A configuration that needs torch 2.8, and so its own environment, without fusedoptim."""
CONFIGURATIONS: dict[str, Callable[[nn.Module], Training]] = {
    "torch, float32": _torch,
    "torch fused, float32": lambda model: _torch(model, fused=True),
    "torch.compile, float32": _compiled,
    "FusedAdamW alone, float32": _fused_step,
    "fusedoptim, float32": lambda model: _fusedoptim(model, None),
    IPEX: _ipex,
    "torch fused, bfloat16": _torch_bfloat16,
    "torch fused, bfloat16, memory kept": lambda model: _memory_kept(_torch_bfloat16(model)),
    "transforms alone, bfloat16": lambda model: _transforms(model, torch.bfloat16),
    "fusedoptim, bfloat16": lambda model: _fusedoptim(model, torch.bfloat16),
}


def train(model: str, configuration: str) -> Record:
    """Time a workload's iterations after the first two, which create state and fill caches."""
    torch.manual_seed(0)
    workload = WORKLOADS[model]
    task = workload.make()
    start = time.perf_counter()
    training = CONFIGURATIONS[configuration](task.model.train())
    _iteration(task, training)
    first = time.perf_counter() - start
    _iteration(task, training)
    times, faults = [], []
    for _ in range(workload.iterations):
        before = _faults()
        times.append(_iteration(task, training))
        faults.append(_faults() - before)
    forward, backward, step = map(list, zip(*times))
    return Record(first, forward, backward, step, faults)


class _Products(TorchDispatchMode):
    """Keeps the calls of matrix products and convolutions, with their arguments."""

    _NAMES = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in self._NAMES:
            self.calls.append(functools.partial(func, *args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


def products(model: str, configuration: str) -> list[float]:
    """Seconds of only an iteration's products, by torch's own operators, for each repetition."""
    torch.manual_seed(0)
    workload = WORKLOADS[model]
    task = workload.make()
    training = CONFIGURATIONS[configuration](task.model.train())
    _iteration(task, training)
    with _Products() as recorded:
        _iteration(task, training)
    seconds = []
    with torch.no_grad():
        for _ in range(2 + workload.iterations):
            start = time.perf_counter()
            for call in recorded.calls:
                call()
            seconds.append(time.perf_counter() - start)
    return seconds[2:]


def _iteration(task: Task, training: Training) -> tuple[float, float, float]:
    """Return the seconds of forward, backward and step."""
    start = time.perf_counter()
    training.optimizer.zero_grad()
    with training.precision():
        loss = task.loss(training.model, training.cross_entropy)
    computed = time.perf_counter()
    loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
    differentiated = time.perf_counter()
    training.optimizer.step()
    stepped = time.perf_counter()
    return computed - start, differentiated - computed, stepped - differentiated


def _faults() -> int:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt
