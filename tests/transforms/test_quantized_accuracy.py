"""INT8's accuracy: the observed ranges, and how often trained models' classes agree."""

from __future__ import annotations

import functools
import pydoc_data.topics
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from fusedoptim import FusedAdamW, FusedSGD, transforms
from tests.conftest import SEED
from transforms.quantization.ranges import OBSERVERS, LeastError, MinMax, Percentile
from transforms.rewrites.int8 import Int8Module

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


class TestRanges:
    @pytest.mark.parametrize("observer", OBSERVERS.values())
    def test_of_one_batch_or_of_many(self, observer: Any) -> None:
        """A range that grows keeps what was counted before, up to the width of a bin."""
        values = torch.cat([torch.randn(1000) * scale for scale in (0.1, 3, 1)])
        whole, parts = observer(), observer()
        whole.add(values)
        for part in values.split(500):
            parts.add(part)
        for one, other in zip(whole.range(), parts.range()):
            assert one == pytest.approx(other, abs=0.1 * values.abs().max().item())

    def test_min_max_clips_nothing(self) -> None:
        values = torch.randn(100)
        observer = MinMax()
        observer.add(values)
        assert observer.range() == (values.min().item(), values.max().item())

    def test_least_error_is_at_most_min_maxs(self) -> None:
        """An outlier in many values is clipped."""
        values = torch.cat([torch.randn(1_000_000), torch.tensor([20.0])])

        def squared_error(observer: Any) -> float:
            observer.add(values)
            low, high = observer.range()
            step = (high - min(low, 0)) / 255
            rounded = (values.double() / step).round() * step
            clipped = rounded.clamp(min(low, 0), high)
            return (clipped - values).square().mean().item()

        least, all_of_them = squared_error(LeastError()), squared_error(MinMax())
        assert least < 0.6 * all_of_them

    def test_percentile_clips_outliers(self) -> None:
        values = torch.cat([torch.rand(100_000), torch.tensor([100.0, -100.0])])
        observer = Percentile()
        observer.add(values)
        low, high = observer.range()
        assert -1 < low <= 0
        assert 0.9 < high < 2


class TestRealData:
    def test_digits(self) -> None:
        """A network that was trained on the digits puts at least 99% of them in the same class."""
        from digits import load_data, train
        from quantize import agreement, quantized

        digits = load_data(seed=0)
        plain = train("FusedSGD", FusedSGD, digits, epochs=2, seed=0).model.eval()
        images = torch.cat([digits.test_images, digits.train_images])[:1000]
        assert agreement(plain, quantized(plain, digits), images) >= 0.99

    @pytest.mark.parametrize("is_dynamic", [False, True])
    def test_sentences(self, is_dynamic: bool) -> None:
        """A BERT trained to tell topics of Python's help apart agrees on 98% of 1,000 sentences."""
        model, tokens = classifier_of_topics()
        loader = None if is_dynamic else list(tokens[1000:1256].split(64))
        ours = transforms.quantize(model, loader)
        assert sum(isinstance(module, Int8Module) for module in ours.modules()) == 14
        with torch.no_grad():
            same = model(tokens[:1000]).logits.argmax(1) == ours(tokens[:1000]).logits.argmax(1)
        assert same.double().mean().item() >= 0.98


WORDS = 16
"""The number of words in a sentence."""


@functools.cache
def classifier_of_topics() -> tuple[nn.Module, Tensor]:
    """A small BERT that tells from which of the longest help texts words come, and the words.

    It is trained once, from this run's seed, so that it is the same for any of the tests alone.
    """
    torch.manual_seed(SEED)
    texts = sorted(pydoc_data.topics.topics.values(), key=len)[-6:]
    words = [re.findall(r"\w+", text.lower()) for text in texts]
    vocabulary = {word: i for i, word in enumerate(sorted({w for text in words for w in text}))}
    numbers = [torch.tensor([vocabulary[word] for word in text]) for text in words]
    rows = [each.unfold(0, WORDS, 5) for each in numbers]
    tokens = torch.cat(rows)
    labels = torch.cat([torch.full((len(each),), i) for i, each in enumerate(rows)])
    order = torch.randperm(len(tokens))
    tokens, labels = tokens[order], labels[order]
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=128, num_labels=len(rows), max_position_embeddings=WORDS,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).train()
    optimizer = FusedAdamW(model.parameters(), lr=2e-3)
    for _ in range(3):
        for x, y in zip(tokens.split(64), labels.split(64)):
            model(x, labels=y).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.eval(), tokens
