"""Fused PyTorch optimizers for Intel GPUs and x86 CPUs.

Each optimizer is a drop-in for its ``torch.optim`` namesake whose step is one launch of a kernel
written in Python. Importing the package touches no device.
"""

from fusedoptim._modules import ModuleError
from fusedoptim._version import __version__
from fusedoptim.adagrad import FusedAdagrad
from fusedoptim.adam import FusedAdam, FusedAdamW
from fusedoptim.lamb import FusedLamb
from fusedoptim.sgd import FusedSGD
from fusedoptim.split_sgd import SplitSGD

__all__ = [
    "FusedAdagrad",
    "FusedAdam",
    "FusedAdamW",
    "FusedLamb",
    "FusedSGD",
    "ModuleError",
    "SplitSGD",
    "__version__",
]
