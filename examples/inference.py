"""Optimizes a convolutional network and a transformer for inference, and compares times.

Run ``python examples/inference.py``, with ``--small`` for a few seconds. No model is downloaded.
Weights are random, which does not affect times.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, ResNetConfig, ResNetForImageClassification

from fusedoptim import transforms
from fusedoptim.runtime import keep_memory

ROUNDS = 15


class Task(NamedTuple):
    """A model in eval mode, and a batch for it."""

    model: nn.Module
    batch: dict[str, Tensor]


def cnn(small: bool) -> Task:
    """ResNet-50 and an image, or a smaller one."""
    sizes = {"depths": [1] * 4, "hidden_sizes": [64, 128, 256, 512]} if small else {}
    model = ResNetForImageClassification(ResNetConfig(**sizes))
    side = 64 if small else 224
    return Task(model.eval(), {"pixel_values": torch.randn(1, 3, side, side)})


def transformer(small: bool) -> Task:
    """BERT-base and 128 tokens, or fewer and narrower layers of it."""
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
    model = BertModel(BertConfig(num_hidden_layers=2, **sizes) if small else BertConfig())
    return Task(model.eval(), {"input_ids": torch.randint(1000, (1, 128))})


TASKS = {"cnn": cnn, "transformer": transformer}


def in_turn(calls: dict[str, Any], rounds: int) -> dict[str, float]:
    """The fastest run of each function, in seconds; runs alternate, as other load varies."""
    fastest = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            fastest[name] = min(fastest[name], time.perf_counter() - start)
    return fastest


def compare(name: str, small: bool) -> None:
    """Optimize the model in two ways, print the report, and compare times and outputs."""
    model, batch = TASKS[name](small)
    start = time.perf_counter()
    optimized = transforms.optimize(model, sample_input=batch)
    print(transforms.report(optimized))
    print(f"optimized and timed on the sample in {time.perf_counter() - start:.2f} s\n")
    rounded = transforms.optimize(model, dtype=torch.bfloat16)

    def in_bfloat16() -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return rounded(**batch)

    with torch.inference_mode():
        calls = {
            "torch": lambda: model(**batch),
            "optimized": lambda: optimized(**batch),
            "optimized, bfloat16": in_bfloat16,
        }
        outputs = {way: call()[0] for way, call in calls.items()}
        seconds = in_turn(calls, 2 if small else ROUNDS)
    print(f"{name:<22}{'time':>12}{'largest difference':>22}")
    for way, output in outputs.items():
        difference = (output - outputs["torch"]).abs().max() / outputs["torch"].abs().max()
        print(f"{way:<22}{seconds[way] * 1e3:>9.2f} ms{difference.item():>22.1e}")
    print()


def main() -> None:
    """Compare both models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=TASKS, help="only this one")
    parser.add_argument("--small", action="store_true", help="small models, few rounds")
    args = parser.parse_args()
    torch.manual_seed(0)
    keep_memory()
    for name in [args.model] if args.model else TASKS:
        compare(name, args.small)


if __name__ == "__main__":
    main()
