"""Linears whose float32 products are computed by oneDNN in training.

torch computes everything else: small products, evaluation, autocast, other devices and dtypes,
subclasses of Tensor, ``torch.func``, forward-mode differentiation, tracing, export, and calls
inside a dispatch mode or function mode of the user.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from fusedoptim._processor import processor_facts
from fusedoptim._torch_private import is_forward_mode, transform_level
from fusedoptim.ops._linear import linear
from transforms.rewrites.for_training import ForTraining, are_plain, is_computed
from transforms.rewrites.packed import is_plain_call, missing_operators
from transforms.rewrites.schemas import difference

LEAST_PRODUCTS = 1 << 26
"""Multiplications of a forward pass for each thread, from which oneDNN gains more than the calls
cost."""


class OneDNNModule(ForTraining):
    """The base class of all kinds of Linears."""

    _fusedoptim_least_products: int
    """:data:`LEAST_PRODUCTS` for all threads together; dynamo cannot trace their number."""


class OneDNNLinear(OneDNNModule, nn.Linear):
    """:math:`y = x W^T + b` by oneDNN."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        """Compute as ``torch.nn.Linear`` does."""
        if self.training and not is_computed(self):
            weight, bias = self.weight, self.bias
            if is_served(input, weight, bias, self._fusedoptim_least_products):
                return linear(input, weight, bias)
        return super().forward(input)


def is_served(x: Tensor, weight: Tensor, bias: Tensor | None, least: int) -> bool:
    """Whether oneDNN computes the product.

    Args:
        x: the input.
        weight: (outputs, inputs); may be a transposed view.
        bias: (outputs,), or None.
        least: the least number of multiplications for which oneDNN is used.
    """
    if torch.compiler.is_compiling():
        is_transformed = transform_level() is not None or is_forward_mode()
        if torch.compiler.is_exporting() or is_transformed:
            return False
    elif not is_plain_call():
        return False
    return (
        are_plain(x, weight, bias)
        and x.dtype is weight.dtype is torch.float32
        and (bias is None or bias.dtype is torch.float32)
        and not torch.is_autocast_enabled("cpu")
        and x.dim() > 1
        and x.is_contiguous()
        and x.size(-1) == weight.size(1)
        and (bias is None or bias.shape == weight.shape[:1])  # torch expands others
        and x.numel() * weight.size(0) >= least
    )


def attributes() -> dict[str, int]:
    """The additional attributes of instances of our classes."""
    return {"_fusedoptim_least_products": LEAST_PRODUCTS * torch.get_num_threads()}


@functools.cache
def objection() -> str | None:
    """Why oneDNN's products are not used on this machine; None if they are."""
    if "_linear_pointwise" in missing_operators():
        return difference(["_linear_pointwise"])
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]  # untyped in torch
        return "this torch computes products without MKL"
    try:
        vendor = processor_facts().get("vendor_id")
    except OSError:
        return "the system does not name the processor's vendor"
    if vendor == "GenuineIntel":
        return "MKL is as fast as oneDNN on Intel's processors"
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return "oneDNN is no faster than MKL without AVX-512"
    return None
