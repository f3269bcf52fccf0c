"""Dropouts that draw their masks on all cores, and again in the backward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedoptim.nn import functional
from fusedoptim.nn._scripting import refuse_script
from fusedoptim.nn._tracing import traced_call

__all__ = ["AlphaDropout", "Dropout"]


class Dropout(torch.nn.Dropout):
    """``torch.nn.Dropout`` with a kernel that draws random numbers on all cores.

    The random numbers are those of Philox-4x32-10 with a seed from torch's default generator. They
    are the same after ``torch.manual_seed``, but differ from torch's. No mask is kept for the
    backward pass, which draws it again.

    Args:
        p: the probability of zeroing an element.
        inplace: whether to write the result into the input.

    Raises:
        ValueError: p is not between 0 and 1.

    Example:
        >>> import torch
        >>> Dropout(0.1)(torch.ones(2, 3)).shape
        torch.Size([2, 3])

    Semantics: ``torch.nn.Dropout`` of torch 2.13; see
    :func:`fusedoptim.nn.functional.dropout` for what it takes.
    """

    __prepare_scriptable__ = refuse_script

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        """Drop elements in training mode; return ``input`` in eval mode.

        Args:
            input: a tensor of any shape.
        """
        traced: Tensor | None = traced_call(self, input)
        if traced is not None:
            return traced
        return functional.dropout(input, self.p, self.training, self.inplace)


class AlphaDropout(torch.nn.AlphaDropout):
    """``torch.nn.AlphaDropout`` with the random numbers of :class:`Dropout`.

    Args:
        p: the probability of replacing an element.
        inplace: has no effect, as in torch; the function
            :func:`fusedoptim.nn.functional.alpha_dropout` can write into its input.

    Raises:
        ValueError: p is not between 0 and 1.

    Example:
        >>> import torch
        >>> AlphaDropout(0.1)(torch.ones(2, 3)).shape
        torch.Size([2, 3])

    Semantics: ``torch.nn.AlphaDropout`` of torch 2.13; see
    :func:`fusedoptim.nn.functional.alpha_dropout` for what it takes.
    """

    __prepare_scriptable__ = refuse_script

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        """Replace elements in training mode; return ``input`` in eval mode.

        Args:
            input: a tensor of any shape.
        """
        traced: Tensor | None = traced_call(self, input)
        if traced is not None:
            return traced
        return functional.alpha_dropout(input, self.p, self.training)
