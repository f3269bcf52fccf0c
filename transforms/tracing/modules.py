"""Properties of modules that the passes ask for."""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from fusedoptim._torch_private import HOOKS
from transforms.rewrites import exchanged_class

Kinds = tuple[type[nn.Module], ...]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

_FROZEN = ("torchvision.ops.misc", "detectron2.layers.batch_norm")
"""The Python modules with a FrozenBatchNorm2d: a BatchNorm2d in eval mode with buffers only."""
_hooks_of = operator.attrgetter(*HOOKS)
GLOBAL_HOOKS: tuple[dict[int, Any], ...] = operator.attrgetter(
    *(f"_global{name}" for name in HOOKS)
)(torch_module)
"""The hooks of all modules."""
META_DATA = {"shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "itemsize"}
META_DATA |= {"is_cuda", "is_xpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "nbytes"}
META_DATA |= {"size", "dim", "ndimension", "numel", "nelement", "element_size", "get_device"}
META_DATA |= {"is_floating_point", "is_complex", "__len__", "__hash__"}
"""Attributes and methods of a tensor that do not depend on its values."""
_BEHAVIOUR = ("forward", "_conv_forward", "__call__", "_call_impl", "_output_padding")
"""The methods that compute."""
COMPUTED = "has a weight or bias that is computed from others (a parametrization)"
"""Why a module is left alone for which :func:`has_computed_tensors` is true."""
NO_PARAMETER = "has a weight or bias that is no Parameter"
"""Why a module is left alone for which :func:`has_own_parameters` is false."""


def transposed_linears() -> Kinds:
    """The class of GPT-2's Linears with a transposed weight; none if it is not imported."""
    kind = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return () if kind is None else (kind,)


def computes_like(module: nn.Module, kinds: Kinds) -> bool:
    """Whether the module is of one of these classes, or of a subclass with the same methods."""
    own = exchanged_class.own_class(module)
    kind = next((kind for kind in kinds if issubclass(own, kind)), None)
    if kind is None or has_replaced_methods(module):
        return False
    return all(getattr(own, name, None) is getattr(kind, name, None) for name in _BEHAVIOUR)


def has_replaced_methods(module: nn.Module) -> bool:
    """Whether a method that computes was replaced on the object itself."""
    return not vars(module).keys().isdisjoint(_BEHAVIOUR)


def is_plain(module: nn.Module, kinds: Kinds) -> bool:
    """Whether the module computes by one of these classes itself; subclasses may differ."""
    return type(module) in kinds and not has_replaced_methods(module)


def objection_to_exchange(
    module: nn.Module,
    kinds: Kinds,
    of_weight: tuple[type, ...] = (Tensor, nn.Parameter),
    elsewhere: str = "is on {device.type}: only the CPU's products are replaced",
) -> str | None:
    """Why the module's class cannot become one of ours for the CPU, or None.

    Args:
        module: has a weight.
        kinds: the classes that ours stand for.
        of_weight: the classes that the weight may have.
        elsewhere: what to say of a weight on another ``{device}``.
    """
    if has_computed_tensors(module):
        return COMPUTED
    if not is_plain(module, kinds):
        return f"overrides its methods: {type(module).__name__} may differ"
    weight: Any = module.weight
    if type(weight) not in of_weight:
        return f"has a weight of class {type(weight).__name__}"
    device = weight.device
    return None if device.type == "cpu" else elsewhere.format(device=device)


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks see or change the module's inputs, outputs or gradients."""
    return any(_hooks_of(module))


def all_hooks(module: nn.Module) -> list[dict[int, Any]]:
    """The hooks of forward and backward passes, one dict for each kind."""
    return list(_hooks_of(module))


def has_computed_tensors(module: nn.Module, weight: str = "weight") -> bool:
    """Whether the weight or bias is computed: a parametrization, pruning, the older weight norm."""
    if parametrize.is_parametrized(module):
        return True
    own = module._parameters.keys() | module._buffers.keys()
    has_bias = isinstance(getattr(module, "bias", None), Tensor)
    return weight not in own or (has_bias and "bias" not in own)


WEIGHT_AND_BIAS = ("weight", "bias")


def has_own_parameters(module: nn.Module, names: Collection[str] = WEIGHT_AND_BIAS) -> bool:
    """Whether these tensors are Parameters or None, neither buffers nor attributes."""
    return module._parameters.keys() >= {*names}


def is_batch_norm(module: nn.Module) -> bool:
    """Whether the module is a BatchNorm of torch, a frozen one, or of a class derived from one."""
    return isinstance(module, (_BatchNorm, *frozen_batch_norms()))


def frozen_batch_norms() -> Kinds:
    """The FrozenBatchNorm2d classes of the imported libraries."""
    libraries = (sys.modules.get(name) for name in _FROZEN)
    kinds = (getattr(library, "FrozenBatchNorm2d", None) for library in libraries)
    return tuple(kind for kind in kinds if kind is not None)


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The module's parameters and buffers, without those of its children."""
    for name, tensor in itertools.chain(module._parameters.items(), module._buffers.items()):
        if tensor is not None:
            yield name, tensor


def owners(model: nn.Module) -> dict[int, list[str]]:
    """The names of the modules that use each parameter, by the parameter's id."""
    found: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for _, param in module.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(id(param), []).append(path)
    return found
