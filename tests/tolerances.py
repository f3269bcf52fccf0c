"""How far a result may be from the float64 reference: derived from the dtypes, in this file only.

A kernel computes in the arithmetic dtype and rounds once, when it stores. In one step a
parameter's new value so carries at most

* half a unit in the last place of its own dtype, from the store: ``u_storage * |value|``;
* for each of the at most OPERATIONS arithmetic operations, ``u_arithmetic * |operand|``;
* half of the smallest subnormal, where the value is near zero.

Errors of earlier steps are carried along with a factor of at most 1, as long as the learning
rate times the weight decay is below 1; so after n steps they add up to n times that. Magnitudes are
bounded by ``scale``, the largest magnitude met in the reference.
"""

from __future__ import annotations

import torch

OPERATIONS = 8
ARITHMETIC = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


def _unit_roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def param_tolerance(dtype: torch.dtype, steps: int, scale: float) -> float:
    """Largest allowed error of a parameter of ``dtype`` after ``steps`` steps."""
    relative = _unit_roundoff(dtype) + OPERATIONS * _unit_roundoff(ARITHMETIC[dtype])
    return steps * (relative * scale + torch.finfo(dtype).smallest_normal)


def state_tolerance(
    dtype: torch.dtype, steps: int, scale: float, weight_decay: float, param_error: float
) -> float:
    """Largest allowed error of state kept in the arithmetic dtype.

    Weight decay adds a share of the parameter's error to each step's gradient.
    """
    rounding = steps * OPERATIONS * _unit_roundoff(ARITHMETIC[dtype]) * scale
    return rounding + steps * weight_decay * param_error
