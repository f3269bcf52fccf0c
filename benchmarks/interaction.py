"""Times DLRM's interaction, forward and backward: ``python -m benchmarks.interaction [--save]``.

There are 2,048 samples of 27 features. Each feature is a tensor, as from the embedding bags of a
DLRM, or all are in two tensors, as from merged bags. Contenders are torch's operations as in
Facebook's DLRM, which are the base, ours, and our forward pass alone. ``small`` has 128 samples and
runs 20 times.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks import _command
from benchmarks._harness import Contender, Report, repeated, time_interleaved
from fusedoptim.ops import interaction

_ROUNDS = 40
_SPARSE = 26
_SMALL, _SMALL_REPEATS = 128, 20

_WORKLOADS: dict[str, tuple[int, int, torch.dtype, bool]] = {
    "64": (2048, 64, torch.float32, False),
    "64-merged": (2048, 64, torch.float32, True),
    "64-bfloat16": (2048, 64, torch.bfloat16, False),
    "128": (2048, 128, torch.float32, False),
    "128-merged": (2048, 128, torch.float32, True),
    "128-bfloat16": (2048, 128, torch.bfloat16, False),
    "16": (2048, 16, torch.float32, False),
    "small": (_SMALL, 64, torch.float32, False),
}
"""Samples, width, dtype, and whether the sparse features are one tensor."""


def _torchs(features: Sequence[Tensor], i: Tensor, j: Tensor) -> Tensor:
    dense = features[0]
    vectors = torch.cat(list(features), 1).view(len(dense), -1, dense.shape[1])
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    return torch.cat([dense, products[:, i, j]], 1)


def _measure(name: str, rounds: int | None) -> Report:
    samples, width, dtype, is_merged = _WORKLOADS[name]
    widths = [width, width * _SPARSE] if is_merged else [width] * (_SPARSE + 1)
    features = [torch.randn(samples, of).to(dtype).requires_grad_() for of in widths]
    i, j = torch.tril_indices(_SPARSE + 1, _SPARSE + 1, -1)
    grad = torch.randn(samples, width + len(i)).to(dtype)
    repeats = _SMALL_REPEATS if samples == _SMALL else 1
    moved = repeats * (3 * sum(feature.nbytes for feature in features) + 2 * grad.nbytes)

    def contender(label: str, function: Callable[[Sequence[Tensor]], Tensor]) -> Contender:
        def both_ways() -> None:
            torch.autograd.grad(function(features), features, grad)

        return Contender(label, repeated(both_ways, repeats), moved)

    def forward(function: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                function()

        return repeated(run, repeats)

    contenders = [
        contender("torch", lambda features: _torchs(features, i, j)),
        contender("fusedoptim", lambda features: interaction(*features)),
        Contender("torch, forward", forward(lambda: _torchs(features, i, j))),
        Contender("fusedoptim, forward", forward(lambda: interaction(*features))),
    ]
    return Report(name, time_interleaved(contenders, rounds or _ROUNDS))


if __name__ == "__main__":
    measures = {name: functools.partial(_measure, name) for name in _WORKLOADS}
    _command.run("interaction", __doc__, measures)
