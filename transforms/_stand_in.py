"""Modules that do nothing any more, under their names and with their attributes.

A module's class is exchanged, as ``torch.nn.utils.parametrize`` does it, and not the module:
whoever holds it, under however many names, holds the same object before, after, and once it is
restored.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

_CLASS, _DIMENSIONS = "_fusedoptim_class", "_fusedoptim_dimensions"


class _StandIn(nn.Identity):
    """Returns its input, as what it stands for would in a model that is optimized for inference."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        """Return ``input``.

        Raises:
            RuntimeError: the module is in training mode.
        """
        if self.training:
            was = vars(self).get(_CLASS, nn.Module).__name__
            raise RuntimeError(
                f"this {was} was optimized away for inference, and is in training mode: call "
                "transforms.restore(model) before training, or model.eval()"
            )
        return input


class SkippedDropout(_StandIn):
    """A Dropout of any kind, which does nothing in eval mode."""


class FoldedBatchNorm(_StandIn):
    """A BatchNorm whose arithmetic is in the weights of the module before it."""

    _version = 2  # of the checkpoint, which is a BatchNorm's

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        """Return ``input``.

        Raises:
            RuntimeError: the module is in training mode; or the channels are not in the dimension
                into whose weights they were folded.
        """
        expected = vars(self).get(_DIMENSIONS)
        if expected is not None and isinstance(input, Tensor) and input.dim() != expected:
            raise RuntimeError(
                f"a BatchNorm1d was folded into what comes before it for inputs of {expected} "
                f"dimensions, and this one has {input.dim()}, whose channels lie elsewhere: "
                "optimize with linear_bn_folding=False (conv_bn_folding=False after a Conv1d)"
            )
        return super().forward(input)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        for hook in self._load_state_dict_pre_hooks.values():  # makes it a BatchNorm
            hook(self, *args, **kwargs)
        self._load_from_state_dict(*args, **kwargs)


def stand_in(module: nn.Module, kind: type[_StandIn], dimensions: int | None = None) -> None:
    """Make ``module`` one of ``kind``; it takes inputs of so many dimensions, or any."""
    vars(module)[_CLASS] = type(module)
    vars(module)[_DIMENSIONS] = dimensions
    module.__class__ = kind


def revert(module: nn.Module) -> None:
    """Make ``module`` what it was."""
    if _CLASS in vars(module):
        del vars(module)[_DIMENSIONS]
        module.__class__ = vars(module).pop(_CLASS)


def revert_all(model: nn.Module) -> None:
    """Make all stand-ins in ``model`` what they were."""
    for module in model.modules():
        revert(module)
