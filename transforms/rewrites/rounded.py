"""Parameters rounded to 16 bits, and the residues that make them float32 again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from fusedoptim.split.pages import has_sole_owner
from transforms.rewrites import plain_tensors, residues


class RoundedParameter:
    """A float32 Parameter rounded to 16 bits, and its residue; shared by its modules."""

    def __init__(self, param: Parameter, dtype: torch.dtype) -> None:
        self.param = param
        self.dtype = dtype
        self._grad: Tensor | None = None
        """The float32 gradient from before the parameter was rounded."""
        self._is_trained = False
        """Whether the parameter had a 16-bit gradient when it last became float32."""
        self.residue: residues.Residue | None = None

    def round(self) -> None:
        """Round the parameter if it is float32."""
        if self.param.dtype != torch.float32 or self.param.is_meta:
            return
        is_used_up = has_sole_owner(self.param)
        values, grad = self.param.data, self.param.grad
        low: Tensor | None = None
        try:
            low, residue = residues.split(values, self.dtype, is_used_up)
            rounded = plain_tensors.shared_as(low, values)
            low_grad = grad.to(self.dtype) if self._is_trained and grad is not None else None
            self.param.data = rounded
            self.param.grad = low_grad
            self.residue, self._grad = residue, grad if low_grad is None else None
        except BaseException:  # an interrupt
            if low is not None and is_used_up:
                values.copy_(residues.join(low, residue))
            self.param.data, self.param.grad = values, grad
            raise

    def fits(self) -> bool:
        """Whether the parameter has the shape that it was rounded in."""
        return self.residue is None or self.residue.differences.shape == self.param.shape

    def values(self) -> Tensor:
        """The exact float32 values."""
        if self.residue is None or self.param.dtype != self.dtype:
            return self.param.data
        return residues.join(self.param.data, self.residue)

    def restore(self) -> None:
        """Make the parameter float32 again if it is rounded; an interrupted call is repeated."""
        if self.residue is None:
            return
        values, grad = self.values(), self.param.grad
        if self.param.dtype == self.dtype:  # else the interrupted call has set the flag
            self._is_trained = grad is not None
        grad = self._grad if grad is None else grad.to(values.dtype)
        self.param.data = values
        self.param.grad = grad
        self.residue = self._grad = None  # last: until then, this can be repeated


class RoundedParameters:
    """A :class:`~transforms.rewrites.plain_tensors.Rewrite`: one module's parameters in 16 bits."""

    def __init__(self, module: nn.Module, rounded: dict[str, RoundedParameter]) -> None:
        self._module = module
        self._rounded = rounded

    def plain(self, module: nn.Module) -> Mapping[str, Tensor | None]:
        """The float32 tensors of a checkpoint."""
        rounded = {id(each.param): each for each in self._rounded.values()}
        own = module._parameters.items()  # pruning may have renamed a parameter
        return {name: rounded[id(p)].values() for name, p in own if id(p) in rounded}

    def reason_undone(self, module: nn.Module) -> None:
        """None: a move to another dtype does what its caller asked for."""

    def check(self) -> None:
        """Raise if a rounded weight is the input of a parametrization, or has another shape."""
        own = set(map(id, self._module._parameters.values()))
        for name, rounded in self._rounded.items():
            if not rounded.fits():
                raise plain_tensors.changed(self._module, f"got a {name} of another shape")
            if name not in self._module._parameters and id(rounded.param) not in own:
                raise plain_tensors.changed(self._module, f"got a parametrization of its {name}")

    def kept(self) -> Iterator[Tensor]:
        """The residues."""
        for rounded in self._rounded.values():
            if rounded.residue is not None:
                yield from rounded.residue

    def undo(self) -> None:
        """Make the parameters float32."""
        for rounded in self._rounded.values():
            rounded.restore()

    def redo(self) -> None:
        """Round the parameters; loading or moving may have replaced them."""
        for name, rounded in self._rounded.items():
            param = self._module._parameters.get(name)
            if param is not None and param is not rounded.param:
                # Other modules may still share the replaced parameter.
                self._rounded[name] = RoundedParameter(param, rounded.dtype)
            self._rounded[name].round()
