"""Classes of modules that were optimized away but keep their names and attributes.

Only the module's class is replaced, as in ``torch.nn.utils.parametrize``. The object stays the
same, so all references to it stay valid, also after it is restored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from transforms.rewrites import plain_tensors
from transforms.rewrites.exchanged_class import become

_CLASS, _DIMENSIONS = "_fusedoptim_class", "_fusedoptim_dimensions"


class SkippedDropout(nn.Identity):
    """A Dropout of any kind that returns its input."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        """Return ``input``; raise RuntimeError in training mode."""
        if self.training:
            raise RuntimeError(
                "this Dropout was removed for inference, but is in training mode: call "
                "transforms.restore(model) before training, or model.eval(); a finalized model "
                "is only for inference"
            )
        return input


class FoldedBatchNorm(nn.Identity):
    """A BatchNorm whose arithmetic was folded into the module before it."""

    _version = 2  # of the checkpoint format, as for BatchNorm

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        """Return ``input``; raise in training mode, or for another number of dimensions."""
        if self.training:
            raise RuntimeError(
                "this BatchNorm was folded for inference, but is in training mode: call "
                "transforms.restore(model) before training, or model.eval(); a finalized model "
                "is only for inference"
            )
        # Not annotated in the class: TorchScript cannot read an annotation that is a string.
        expected: int = self._fusedoptim_dimensions  # type: ignore[assignment]
        # A torch.fx proxy has no dim(). TorchScript cannot compile the test for a proxy. (It parses
        # "type: ignore" comments as code, so the one below must have no text after it.)
        is_traced = False
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            is_traced = isinstance(input, fx.Proxy)
        if not is_traced and input.dim() != expected:
            if expected > 3 or input.dim() not in (2, 3):  # no BatchNorm takes it either
                raise ValueError(
                    f"expected {expected}D input (got {input.dim()}D input): pass a batch"
                )
            raise RuntimeError(
                "a BatchNorm1d was folded into the module before it for inputs of "
                f"{expected} dimensions, but this input has {input.dim()}, with its channels in "
                "another dimension: optimize with linear_bn_folding=False (after a Conv1d, "
                "conv_bn_folding=False)"
            )
        return input

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        rewrite = plain_tensors.find(self)
        if rewrite is None:  # the model was finalized
            super()._load_from_state_dict(*args, **kwargs)
            return
        rewrite.check()
        with torch.inference_mode(False):
            rewrite.undo()
        self._load_from_state_dict(*args, **kwargs)  # the BatchNorm's


def stand_in(module: nn.Module, kind: type[nn.Identity], dimensions: int = 0) -> None:
    """Replace the module's class; a FoldedBatchNorm takes inputs of ``dimensions`` dimensions."""
    vars(module)[_CLASS] = type(module)
    vars(module)[_DIMENSIONS] = dimensions
    become(module, kind)


def is_stand_in(module: nn.Module) -> bool:
    """Whether the class of ``module`` was replaced, and can be reverted."""
    return _CLASS in vars(module)


def revert(module: nn.Module) -> None:
    """Give ``module`` its own class again."""
    own = vars(module)
    if _CLASS in own:
        become(module, own[_CLASS])
        own.pop(_DIMENSIONS, None)
        del own[_CLASS]  # last: until then, revert() can be repeated


def revert_all(model: nn.Module) -> None:
    """Give all modules of ``model`` their own classes again."""
    for module in model.modules():
        revert(module)


def keep_all(model: nn.Module) -> None:
    """Make the classes of all stand-ins in ``model`` permanent."""
    for module in model.modules():
        vars(module).pop(_CLASS, None)
