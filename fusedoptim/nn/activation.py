"""GELU with one kernel forward and one backward."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedoptim.nn import functional
from fusedoptim.nn._scripting import refuse_script
from fusedoptim.nn._tracing import traced_call

__all__ = ["GELU"]


class GELU(torch.nn.GELU):
    """``torch.nn.GELU`` whose tanh approximation is one kernel forward and one backward.

    Args:
        approximate: "tanh", or "none" for torch's own exact function.

    Raises:
        RuntimeError: another ``approximate``, in the call.

    Example:
        >>> import torch
        >>> GELU("tanh")(torch.ones(2, 3)).shape
        torch.Size([2, 3])

    Semantics: ``torch.nn.GELU`` of torch 2.13; see :func:`fusedoptim.nn.functional.gelu` for what
    the kernel takes.
    """

    __prepare_scriptable__ = refuse_script

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        """The activation.

        Args:
            input: a tensor of any shape.
        """
        traced: Tensor | None = traced_call(self, input)
        if traced is not None:
            return traced
        return functional.gelu(input, approximate=self.approximate)
