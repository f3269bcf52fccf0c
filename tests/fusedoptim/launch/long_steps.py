"""Steps long enough for a launch on several threads, and what they must not leave behind."""

from __future__ import annotations

import ctypes

import torch
from torch.nn import Parameter

from fusedoptim import FusedSGD
from fusedoptim.launch.openmp import WORTH_SLEEPING
from fusedoptim.step import dense

MANY = dense._MANY_WRITTEN
"""A number of parameters from which on writes are counted while the kernel runs."""


def is_in_region() -> bool:
    """Whether the calling thread is in an OpenMP parallel region."""
    return bool(ctypes.CDLL(None).omp_in_parallel())


def long_step(lr: float = 0.5) -> tuple[Parameter, FusedSGD]:
    """A parameter of zeros with gradients of one, and its optimizer."""
    param = Parameter(torch.zeros(4, WORTH_SLEEPING // 3))
    param.grad = torch.ones_like(param)
    return param, FusedSGD([param], lr=lr)


def many_params() -> tuple[list[Parameter], FusedSGD]:
    """Parameters of ones with gradients of one, and their optimizer."""
    params = [Parameter(torch.ones(1000)) for _ in range(MANY)]
    for p in params:
        p.grad = torch.ones_like(p)
    return params, FusedSGD(params, lr=0.5)
