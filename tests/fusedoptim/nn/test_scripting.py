"""torch.jit.script does not compile our modules, and says what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fusedoptim import nn as ours


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize(
    "module",
    [
        ours.AlphaDropout(0.5),
        ours.CrossEntropyLoss(),
        ours.Dropout(0.5),
        ours.GELU("tanh"),
        ours.MergedEmbeddingBag([(4, 2)]),
        ours.MultiheadAttention(8, 2, dropout=0.5),
    ],
)
def test_refused(module: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(8, 8), module)
    name = type(module).__name__
    with pytest.raises(
        TypeError, match=rf"compile fusedoptim\.nn\..*\.{name}, which calls kernels"
    ):
        torch.jit.script(model)
    assert model[1] is module
