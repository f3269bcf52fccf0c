"""A transformer whose optimizer is on the host, and the cost of its copies and updates."""

from __future__ import annotations

import contextlib
import time
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from fusedoptim.offload._bucket import Bucket
from fusedoptim.offload._link import Link

SIZES = {"tiny": (1_000, 64, 2), "bert-base": (30_522, 768, 12), "1.3B": (50_257, 2048, 24)}
"""Vocabulary, width and layers."""
BF16 = torch.bfloat16


class Transformer(nn.Module):
    """Predicts tokens, with torch's own layers."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    width, width // 64, 4 * width, 0.0, batch_first=True, norm_first=True
                )
                for _ in range(layers)
            )
        )
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of predicting each token from all tokens."""
        logits = self.head(self.layers(self.words(tokens)))
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def new_model(size: str, device: torch.device, dtype: torch.dtype = BF16) -> Transformer:
    """A model with the same weights each time."""
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return Transformer(*SIZES[size])
    finally:
        torch.set_default_dtype(default)


class Counted:
    """Counts the bytes that go each way, and the seconds that the host waits and updates."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Restart all counts at zero."""
        self.fetched = self.sent = 0
        self.waited = self.updated = 0.0

    def __enter__(self) -> Counted:
        own_fetch, own_send, own_wait = Link.fetch, Link.send, Link.wait
        own_update = Bucket.update

        def wait(event: Any) -> None:
            start = time.perf_counter()
            own_wait(event)
            self.waited += time.perf_counter() - start

        def update(bucket: Bucket, *args: Any) -> None:
            start, waited = time.perf_counter(), self.waited
            own_update(bucket, *args)
            self.updated += time.perf_counter() - start - (self.waited - waited)

        def fetch(link: Link, flat: Tensor | None, targets: list[Tensor], sources: Any) -> None:
            self.fetched += sum(target.nbytes for target in targets)
            own_fetch(link, flat, targets, sources)

        def send(link: Link, flat: Tensor | None, sources: Any, targets: list[Tensor]) -> None:
            self.sent += sum(target.nbytes for target in targets)
            own_send(link, flat, sources, targets)

        self._patches = contextlib.ExitStack()
        self._patches.enter_context(
            mock.patch.multiple(Link, fetch=fetch, send=send, wait=staticmethod(wait))
        )
        self._patches.enter_context(mock.patch.object(Bucket, "update", update))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()
