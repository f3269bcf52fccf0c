"""Modules that do nothing any more, under their names and with their attributes.

A module's class is exchanged, as ``torch.nn.utils.parametrize`` does it, and not the module:
whoever holds it, under however many names, holds the same object before, after, and once it is
restored.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from transforms.rewrites import plain_tensors

_CLASS, _DIMENSIONS = "_fusedoptim_class", "_fusedoptim_dimensions"
_ANY = 0


class SkippedDropout(nn.Identity):
    """A Dropout of any kind, which does nothing in eval mode."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        """Return ``input``, as a Dropout in eval mode.

        Raises:
            RuntimeError: the module is in training mode.
        """
        if self.training:
            raise RuntimeError(
                "this Dropout was optimized away for inference, and is in training mode: call "
                "transforms.restore(model) before training, or model.eval()"
            )
        return input


class FoldedBatchNorm(nn.Identity):
    """A BatchNorm whose arithmetic is in the weights of the module before it."""

    _version = 2  # of the checkpoint, which is a BatchNorm's

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        """Return ``input``.

        Raises:
            RuntimeError: the module is in training mode; or the channels are not in the dimension
                into whose weights they were folded.
        """
        if self.training:
            raise RuntimeError(
                "this BatchNorm was optimized away for inference, and is in training mode: call "
                "transforms.restore(model) before training, or model.eval()"
            )
        expected: int = self._fusedoptim_dimensions  # type: ignore[assignment]
        # What torch.fx traces with is no tensor, and has no number of dimensions.
        if expected > 0 and isinstance(input, Tensor) and input.dim() != expected:
            raise RuntimeError(
                "a BatchNorm1d was folded into what comes before it for inputs of "
                f"{expected} dimensions, and this one has {input.dim()}, whose channels lie "
                "elsewhere: optimize with linear_bn_folding=False (after a Conv1d, "
                "conv_bn_folding=False)"
            )
        return input

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        rewrite = plain_tensors.find(self)
        if rewrite is None:  # the model was finalized
            super()._load_from_state_dict(*args, **kwargs)
            return
        rewrite.check()
        rewrite.undo()
        self._load_from_state_dict(*args, **kwargs)  # the BatchNorm's


def stand_in(module: nn.Module, kind: type[nn.Identity], dimensions: int = _ANY) -> None:
    """Make ``module`` one of ``kind``; it takes inputs of so many dimensions, 0 being any."""
    vars(module)[_CLASS] = type(module)
    vars(module)[_DIMENSIONS] = dimensions
    module.__class__ = kind


def is_stand_in(module: nn.Module) -> bool:
    """Whether ``module`` is one."""
    return _CLASS in vars(module)


def revert(module: nn.Module) -> None:
    """Make ``module`` what it was."""
    if _CLASS in vars(module):
        del vars(module)[_DIMENSIONS]
        module.__class__ = vars(module).pop(_CLASS)


def revert_all(model: nn.Module) -> None:
    """Make all stand-ins in ``model`` what they were."""
    for module in model.modules():
        revert(module)
