"""Modules built on :mod:`fusedoptim.ops`: drop-ins for ``torch.nn``'s classes of the same names."""

from fusedoptim.nn import functional
from fusedoptim.nn.activation import GELU
from fusedoptim.nn.attention import MultiheadAttention
from fusedoptim.nn.dropout import AlphaDropout, Dropout
from fusedoptim.nn.embedding_bag import (
    MergedEmbeddingBag,
    MergedEmbeddingBagWithAdagrad,
    MergedEmbeddingBagWithSGD,
)
from fusedoptim.nn.loss import CrossEntropyLoss

__all__ = [
    "GELU",
    "AlphaDropout",
    "CrossEntropyLoss",
    "Dropout",
    "MergedEmbeddingBag",
    "MergedEmbeddingBagWithAdagrad",
    "MergedEmbeddingBagWithSGD",
    "MultiheadAttention",
    "functional",
]
