"""Fused PyTorch optimizers for Intel GPUs and x86 CPUs.

Each optimizer but FusedLamb is a drop-in for its ``torch.optim`` namesake. Its step is one launch
of a kernel written in Python for each parameter group, device and dtype; FusedLamb's is two, or
three in several processes. Importing the package touches no device. torch is loaded when a class
or a submodule is first accessed, so ``python -m fusedoptim`` works where torch does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fusedoptim._version import __version__

if TYPE_CHECKING:
    from fusedoptim.adagrad import FusedAdagrad
    from fusedoptim.adam import FusedAdam, FusedAdamW
    from fusedoptim.lamb import FusedLamb
    from fusedoptim.launch.modules import ModuleError
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

_HOMES = {
    "FusedAdagrad": "adagrad",
    "FusedAdam": "adam",
    "FusedAdamW": "adam",
    "FusedLamb": "lamb",
    "FusedSGD": "sgd",
    "ModuleError": "launch.modules",
    "SplitSGD": "split_sgd",
}
_SUBMODULES = frozenset(
    {"allocator", "aot", "doctor", "isa", "nn", "offload", "ops", "raw", "runtime", "transforms"}
)
"""Those for users, which are imported when they are first accessed."""


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"fusedoptim.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"fusedoptim.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
