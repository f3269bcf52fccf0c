"""Steps long enough for a launch on several threads, and what they must not leave behind."""

from __future__ import annotations

import ctypes

import torch
from torch.nn import Parameter

from fusedoptim import FusedSGD
from fusedoptim.launch.openmp import WORTH_SLEEPING


def is_in_region() -> bool:
    """Whether the calling thread is in an OpenMP parallel region."""
    return bool(ctypes.CDLL(None).omp_in_parallel())


def long_step(lr: float = 0.5) -> tuple[Parameter, FusedSGD]:
    """A parameter of zeros with gradients of one, and its optimizer."""
    param = Parameter(torch.zeros(4, WORTH_SLEEPING // 3))
    param.grad = torch.ones_like(param)
    return param, FusedSGD([param], lr=lr)
