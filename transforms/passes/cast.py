"""Pass: cast the weights of convolutions, Linears and embeddings to 16 bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from fusedoptim.split.pages import has_sole_owner
from transforms.inputs.options import DTYPE, Options
from transforms.passes.fold_batch_norm import CONVOLUTION_KINDS, fold_of
from transforms.passes.protocol import Job, Pass
from transforms.reports import Entry
from transforms.rewrites import plain_tensors, residues
from transforms.tracing.modules import has_computed_tensors, owners, plain_kind

_KINDS = (*CONVOLUTION_KINDS, nn.Linear, nn.Embedding, nn.EmbeddingBag)


class Cast(Pass):
    """Rounds the float32 weights and biases of the modules that compute faster in 16 bits.

    Normalization layers stay float32: torch's kernels accept that with 16-bit inputs. Run the model
    under ``torch.autocast``, which converts the values between layers.
    """

    knob = DTYPE

    def is_on(self, options: Options) -> bool:
        """Whether the call has a dtype of 16 bits."""
        return options.dtype is not None

    def run(self, job: Job) -> list[Entry]:
        """Round; entries are the modules with a float32 weight of at least two dimensions."""
        model, dtype, undo = job.model, job.options.dtype, job.undo
        assert dtype is not None
        found = [(name, module, _float32(module)) for name, module in model.named_modules()]
        reasons = _reasons(model, dtype)
        lowered: dict[int, _Lowered] = {}
        entries = []
        for name, module, params in found:
            if not any(p.dim() > 1 for p in params.values()):
                continue
            reason, fold = reasons[name], fold_of(module)
            if reason is None and fold is not None:
                undo.callback(fold.round_to, fold.dtype)
                reason = fold.round_to(dtype)
            elif reason is None:
                for p in params.values():
                    if id(p) not in lowered:
                        lowered[id(p)] = _Lowered(p, dtype)
                        undo.callback(lowered[id(p)].lift)
                        lowered[id(p)].lower()
                undo.callback(plain_tensors.detach, module)
                own = {name: lowered[id(p)] for name, p in params.items()}
                plain_tensors.attach(module, RoundedParameters(module, own))
            done = _entry(name, dtype, module)
            entries.append(done if reason is None else Entry(name, reason, done=False))
        return entries

    def undo(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Make the weights float32 again."""
        plain_tensors.undo_all(model)


def _entry(name: str, dtype: torch.dtype, module: nn.Module) -> Entry:
    saved = sum(p.nbytes for p in module.parameters(recurse=False))  # half of the bytes
    return Entry(name, str(dtype).removeprefix("torch."), bytes_saved=saved)


def _reasons(model: nn.Module, dtype: torch.dtype) -> dict[str, str | None]:
    """By the name of each module, why its weights must stay float32, if they must."""
    sharers = owners(model)
    reasons = {name: _objection(module, dtype) for name, module in model.named_modules()}
    while True:  # a bias that one module shares may keep the weight of another
        for name, module in model.named_modules():
            shared = {other for p in _float32(module).values() for other in sharers[id(p)]}
            others = sorted(other for other in shared if reasons[other])
            if others and reasons[name] is None:
                reasons[name] = f"shares its weight with {', '.join(others)}, which stays float32"
                break
        else:
            return reasons


def _float32(module: nn.Module) -> dict[str, Parameter]:
    return {
        name: param
        for name, param in module.named_parameters(recurse=False)
        if param.dtype == torch.float32
    }


def _objection(module: nn.Module, dtype: torch.dtype) -> str | None:
    """Why the module's weights must stay float32, if they must."""
    if plain_kind(module, _KINDS) is None:
        return f"{type(module).__name__} is not one of torch's layers that compute in 16 bits"
    if has_computed_tensors(module):
        return "has a weight that is computed from others (a parametrization)"
    if getattr(module, "max_norm", None) is not None:
        return "renormalizes its weight (max_norm), which would lose accuracy in 16 bits"
    most = torch.finfo(dtype).max
    if any(p.numel() and _largest(p.detach()) > most for p in _float32(module).values()):
        return f"has weights that overflow {dtype}"
    return None


def _largest(values: Tensor) -> float:
    """The largest magnitude, without a temporary tensor."""
    least, most = values.aminmax()
    return max(-least.item(), most.item())


class _Lowered:
    """A float32 Parameter rounded to 16 bits, and its residue; shared by its modules."""

    def __init__(self, param: Parameter, dtype: torch.dtype) -> None:
        self.param = param
        self.dtype = dtype
        self._grad: Tensor | None = None
        """The float32 gradient from before the parameter was rounded."""
        self._is_trained = False
        """Whether the parameter had a 16-bit gradient when it last became float32."""
        self.residue: residues.Residue | None = None

    def lower(self) -> None:
        if self.param.dtype != torch.float32 or self.param.is_meta:
            return
        is_used_up = has_sole_owner(self.param)
        self._grad, self.param.grad = self.param.grad, None
        values = self.param.data
        rounded, self.residue = residues.split(values, self.dtype, is_used_up)
        self.param.data = plain_tensors.shared_as(rounded, values)
        if self._is_trained and self._grad is not None:
            self.param.grad, self._grad = self._grad.to(self.dtype), None

    def values(self) -> Tensor:
        """The exact float32 values."""
        if self.residue is None or self.param.dtype != self.dtype:
            return self.param.data
        return residues.join(self.param.data, self.residue)

    def lift(self) -> None:
        if self.residue is not None:
            values, self.residue = self.values(), None
            grad, self.param.grad = self.param.grad, None
            self.param.data = values
            self._is_trained = grad is not None
            if grad is not None:
                self._grad = grad.to(values.dtype)
        if self._grad is not None:
            self.param.grad, self._grad = self._grad, None


class RoundedParameters:
    """A :class:`~transforms.rewrites.plain_tensors.Rewrite`: one module's parameters in 16 bits."""

    def __init__(self, module: nn.Module, lowered: dict[str, _Lowered]) -> None:
        self._module = module
        self._lowered = lowered

    def plain(self, module: nn.Module) -> Mapping[str, Tensor | None]:
        """The float32 tensors of a checkpoint."""
        lowered = {id(each.param): each for each in self._lowered.values()}
        own = module._parameters.items()  # pruning may have renamed a parameter
        return {name: lowered[id(p)].values() for name, p in own if id(p) in lowered}

    def check(self) -> None:
        """Raise if a rounded weight has become the input of a parametrization."""
        own = set(map(id, self._module._parameters.values()))
        for name, lowered in self._lowered.items():
            if name not in self._module._parameters and id(lowered.param) not in own:
                raise plain_tensors.changed(self._module, f"got a parametrization of its {name}")

    def kept(self) -> Iterator[Tensor]:
        """The residues."""
        for lowered in self._lowered.values():
            if lowered.residue is not None:
                yield from lowered.residue

    def undo(self) -> None:
        """Make the parameters float32."""
        for lowered in self._lowered.values():
            lowered.lift()

    def redo(self) -> None:
        """Round the parameters; loading or moving may have replaced them."""
        for name, lowered in self._lowered.items():
            param = self._module._parameters.get(name)
            if param is not None and param is not lowered.param:
                # Other modules may still share the replaced parameter.
                self._lowered[name] = _Lowered(param, lowered.dtype)
            self._lowered[name].lower()
