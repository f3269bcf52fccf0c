"""Operators whose kernels are written in Python, registered with torch as ``torch.ops.fusedoptim``.

They work under autograd, ``torch.autocast``, fake tensors and ``torch.compile(fullgraph=True)``,
for tensors on the CPU and on Intel GPUs. They do not work in ``torch.func`` transforms, and
raise NotImplementedError in forward-mode differentiation: torch has no rules for either. Modules
built on them are in :mod:`fusedoptim.nn`.
"""

from fusedoptim.ops._cross_entropy import cross_entropy
from fusedoptim.ops._dropout import alpha_dropout, dropout
from fusedoptim.ops._embedding_bags import embedding_bags
from fusedoptim.ops._gelu import gelu_tanh
from fusedoptim.ops._interaction import interaction
from fusedoptim.ops._nms import batched_nms, nms
from fusedoptim.ops._roi_align import roi_align
from fusedoptim.ops._torchvision import Replacement, replace_torchvision

__all__ = [
    "Replacement",
    "alpha_dropout",
    "batched_nms",
    "cross_entropy",
    "dropout",
    "embedding_bags",
    "gelu_tanh",
    "interaction",
    "nms",
    "replace_torchvision",
    "roi_align",
]
