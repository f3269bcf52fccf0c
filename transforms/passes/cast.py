"""Pass: cast the weights of convolutions, Linears and embeddings to 16 bits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from transforms.inputs.options import DTYPE, Options
from transforms.passes.protocol import Job, Pass
from transforms.reports import Entry
from transforms.rewrites import plain_tensors
from transforms.rewrites.fold import fold_of
from transforms.rewrites.rounded import RoundedParameter, RoundedParameters
from transforms.tracing.modules import (
    COMPUTED,
    CONVOLUTIONS,
    TRANSPOSED,
    computes_like,
    has_computed_tensors,
    owners,
)

_KINDS = (*CONVOLUTIONS, *TRANSPOSED, nn.Linear, nn.Embedding, nn.EmbeddingBag)


class Cast(Pass):
    """Rounds the float32 weights and biases of modules that compute faster in 16 bits.

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
        rounded: dict[int, RoundedParameter] = {}
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
                    if id(p) not in rounded:
                        rounded[id(p)] = RoundedParameter(p, dtype)
                        undo.callback(rounded[id(p)].restore)
                        rounded[id(p)].round()
                undo.callback(plain_tensors.detach, module)
                own = {name: rounded[id(p)] for name, p in params.items()}
                plain_tensors.attach(module, RoundedParameters(module, own))
            if reason is None:
                saved = sum(p.nbytes for p in module.parameters(recurse=False))  # half of the bytes
                what = str(dtype).removeprefix("torch.")
                entries.append(Entry(name, what, bytes_saved=saved))
            else:
                entries.append(Entry(name, reason, done=False))
        return entries


def _reasons(model: nn.Module, dtype: torch.dtype) -> dict[str, str | None]:
    """For each module, by name: why its weights must stay float32, or None."""
    sharers = owners(model)
    reasons = {name: _objection(module, dtype) for name, module in model.named_modules()}
    while True:  # a shared bias that stays may force another module's weight to stay
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
    if not computes_like(module, _KINDS):
        return f"{type(module).__name__} is not one of torch's layers that compute in 16 bits"
    if has_computed_tensors(module):
        return COMPUTED
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
