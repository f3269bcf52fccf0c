"""Real models with random weights, their inputs, and the ways to run them.

Only torch is imported at the start, as the Python of :data:`PEERS` has no fusedoptim.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import _models

DTYPES = ("float32", "bfloat16")
Inputs = tuple[Tensor, ...]
Infer = Callable[[], Any]
"""Runs a model once, and returns its output."""

_WARM_UP, _LEAST, _LEAST_SECONDS = 3, 10, 2.0


class Task(NamedTuple):
    """A model in eval mode and its arguments."""

    model: nn.Module
    inputs: Inputs


class Record(NamedTuple):
    """The measurements of one process, in seconds."""

    first: float
    """Time from before the model's conversion or compilation to its first output."""
    seconds: list[float]
    """Times of the later inferences, without a few of the first."""


def _classifier(new_model: Callable[[], nn.Module], batch: int) -> Task:
    """Images of 224 by 224 pixels."""
    return Task(new_model().eval(), (torch.randn(batch, 3, 224, 224),))


def _convolutional(new_model: Callable[[], nn.Module], batch: int) -> Task:
    """Like :func:`_classifier`, with BatchNorms that keep activations at an ordinary size.

    A trained network does so too.
    """
    model = new_model()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None  # the statistics become those of the next batch alone
    with torch.no_grad():
        model.train()(torch.randn(8, 3, 224, 224))
    for norm in norms:
        norm.momentum = 0.1
    return _classifier(lambda: model, batch)


def _convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(num_labels=1000)
    return ConvNextForImageClassification(config)


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(num_labels=1000))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig())


def _distilbert() -> nn.Module:
    from transformers import DistilBertConfig, DistilBertModel

    return DistilBertModel(DistilBertConfig())


def _encoder(new_model: Callable[[], nn.Module], batch: int) -> Task:
    """Sequences of 128 tokens."""
    return Task(new_model().eval(), (torch.randint(30_000, (batch, 128)),))


def _dlrm(batch: int) -> Task:
    """Samples with one row from each of 26 tables of 20,000 rows of 64."""
    tables, rows = 26, 20_000
    model = _models.DLRM([rows] * tables, width=64)
    return Task(model.eval(), (torch.randn(batch, 13), torch.randint(rows, (tables, batch))))


class Workload(NamedTuple):
    """How to make the task of a batch, and the sizes of batches."""

    make: Callable[[int], Task]
    batches: tuple[int, ...] = (1, 16)


WORKLOADS = {
    "ResNet-50": Workload(functools.partial(_convolutional, _models.resnet50)),
    "MobileNetV3-large": Workload(functools.partial(_convolutional, _models.mobilenet_v3_large)),
    "EfficientNet-B0": Workload(functools.partial(_convolutional, _models.efficientnet_b0)),
    "ConvNeXt-tiny": Workload(functools.partial(_classifier, _convnext)),
    "ViT-B/16": Workload(functools.partial(_classifier, _vit)),
    "BERT-base": Workload(functools.partial(_encoder, _bert)),
    "DistilBERT": Workload(functools.partial(_encoder, _distilbert)),
    "DLRM": Workload(_dlrm, (16, 2048)),
}


def new_task(model: str, batch: int) -> Task:
    """A model and its arguments, the same in each process."""
    torch.manual_seed(0)
    return WORKLOADS[model].make(batch)


def _eager(task: Task, dtype: torch.dtype) -> Infer:
    """The unchanged model, in bfloat16 under autocast."""

    def infer() -> Any:
        with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            return task.model(*task.inputs)

    return infer


def _cast(task: Task, dtype: torch.dtype) -> Infer:
    """The model and its inputs, cast to the dtype."""
    inputs = tuple(t.to(dtype) if t.is_floating_point() else t for t in task.inputs)
    return _eager(Task(task.model.to(dtype), inputs), torch.float32)


def _optimized(
    task: Task, dtype: torch.dtype, knows_batch: bool, graph_mode: bool = False
) -> Infer:
    from fusedoptim import transforms

    sample = {"sample_input": task.inputs} if knows_batch else {}
    model = transforms.optimize(
        task.model, dtype=dtype, inplace=True, graph_mode=graph_mode, **sample
    )
    return _eager(task._replace(model=model), dtype)


def _memory_kept(task: Task, dtype: torch.dtype) -> Infer:
    from fusedoptim.runtime import keep_memory

    keep_memory()
    return _optimized(task, dtype, knows_batch=True)


def _compiled(task: Task, dtype: torch.dtype, freezing: bool) -> Infer:
    from torch._inductor import config

    config.freezing = freezing
    return _eager(task._replace(model=torch.compile(task.model)), dtype)


def _openvino(task: Task, dtype: torch.dtype) -> Infer:
    import openvino

    shapes = [tuple(t.shape) for t in task.inputs]
    converted = openvino.convert_model(task.model, input=shapes, example_input=task.inputs)
    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": {torch.float32: "f32", torch.bfloat16: "bf16"}[dtype],
    }
    compiled = openvino.compile_model(converted, "CPU", options)
    arrays = [t.numpy() for t in task.inputs]

    def infer() -> Any:
        return compiled(arrays, share_outputs=True).to_tuple()

    return infer


def _onnx_runtime(task: Task, _: torch.dtype) -> Infer:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        torch.onnx.export(task.model, task.inputs, path, dynamo=True, verbose=False)
        session = onnxruntime.InferenceSession(path, options)
    names = [argument.name for argument in session.get_inputs()]
    arrays = dict(zip(names, (t.numpy() for t in task.inputs)))
    return lambda: session.run(None, arrays)


class Configuration(NamedTuple):
    """A way to run a model: the function that prepares it, its dtypes, and the least batch."""

    start: Callable[[Task, torch.dtype], Infer]
    dtypes: tuple[str, ...] = DTYPES
    least_batch: int = 1


EAGER = "eager"
PEERS = {
    "OpenVINO": Configuration(_openvino),
    "ONNX Runtime": Configuration(_onnx_runtime, ("float32",)),
}
"""Configurations that have their own environment, without fusedoptim."""
CONFIGURATIONS = {
    EAGER: Configuration(_eager),
    "eager, all in bfloat16": Configuration(_cast, ("bfloat16",)),
    "fusedoptim": Configuration(functools.partial(_optimized, knows_batch=False)),
    "fusedoptim, sample input": Configuration(functools.partial(_optimized, knows_batch=True)),
    "fusedoptim, graph mode": Configuration(
        functools.partial(_optimized, knows_batch=True, graph_mode=True)
    ),
    "sample input, memory kept": Configuration(_memory_kept, least_batch=16),
    "torch.compile": Configuration(functools.partial(_compiled, freezing=False)),
    "torch.compile, freezing": Configuration(functools.partial(_compiled, freezing=True)),
    **PEERS,
}


def infer(task: Task, dtype: str, configuration: str) -> tuple[Record, Tensor]:
    """Time a model's inferences; return also the first of its outputs."""
    start = time.perf_counter()
    run = CONFIGURATIONS[configuration].start(task, getattr(torch, dtype))
    output = run()
    first = time.perf_counter() - start
    return Record(first, _repeated(run)), _first_tensor(output)


def products(task: Task, dtype: str) -> list[float]:
    """Seconds of only an inference's Linears and convolutions, with packed weights."""
    calls: list[Infer] = []

    def record(module: nn.Module, args: Inputs, _: Tensor) -> None:
        calls.append(functools.partial(module, *args))

    infer = _optimized(task, getattr(torch, dtype), knows_batch=False)
    hooks = [
        module.register_forward_hook(record)
        for module in task.model.modules()  # optimized in place
        if isinstance(module, (nn.Linear, nn.Conv2d))
    ]
    infer()
    for hook in hooks:
        hook.remove()

    def run() -> None:
        with torch.no_grad():
            for call in calls:
                call()

    return _repeated(run)


def _repeated(run: Infer) -> list[float]:
    """The seconds of each of many calls."""
    for _ in range(_WARM_UP):
        run()
    seconds: list[float] = []
    while len(seconds) < _LEAST or sum(seconds) < _LEAST_SECONDS:
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return seconds


def deviation(output: Tensor, task: Task) -> float:
    """Distance of an output from the plain model's in float32, relative to the latter's norm."""
    expected = _first_tensor(_eager(task, torch.float32)())
    norm = torch.linalg.vector_norm
    return float(norm(output.double() - expected) / norm(expected.double()))


def _first_tensor(output: Any) -> Tensor:
    """A copy of the tensor or array that a model returned, or of the first of several."""
    first = output if isinstance(output, Tensor) else output[0]
    return torch.as_tensor(first).clone()
