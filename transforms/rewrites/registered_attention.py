"""The attention function of transformers' models, chosen through that library's registry.

Its models look their attention up by the name in their config. Ours is the registered "sdpa" with
one call replaced, so everything around that call stays that of the installed transformers.
transformers itself is only used if a model's class comes from it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fusedoptim.nn import functional

NAME = "fusedoptim_sdpa"
"""The name of our attention in transformers' registry."""
_LEAST_VERSION = 5
"""The first version with registries of masks too, and with configs that leave inner configs
unchanged."""
_TORCHS = "sdpa"
_EXCHANGED = "_fusedoptim_attention"
_REGISTRY = "ALL_ATTENTION_FUNCTIONS"


class _OnAllCores(TorchFunctionMode):
    """Redirects calls of torch's attention to ours."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            func = functional.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


class _Registered:
    """Kept in a rewritten model, so that unpickling the model registers the function first."""

    def __init__(self) -> None:
        import transformers

        functions: Any = transformers.AttentionInterface
        masks: Any = transformers.AttentionMaskInterface
        if NAME not in functions():
            functions.register(NAME, _exchanged(functions()[_TORCHS]))
            masks.register(NAME, masks()[_TORCHS])

    def __reduce__(self) -> Any:
        return _Registered, ()


def _exchanged(sdpa: Callable[..., Any]) -> Callable[..., Any]:
    """The registered function, with our attention in training."""

    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return sdpa(module, *args, **kwargs)
        with _OnAllCores():
            return sdpa(module, *args, **kwargs)

    return attention


def pretrained(model: nn.Module) -> Iterator[tuple[str, list[Any]]]:
    """The models of transformers inside a model, by config: a name, and all models with the config.

    Only models whose config has some dropout, and whose code uses the registry.
    """
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return
    found: dict[int, tuple[str, list[Any]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, library.PreTrainedModel):
            found.setdefault(id(module.config), (name, []))[1].append(module)
    for name, modules in found.values():
        if _drops(modules[0].config) and any(_REGISTRY in code for code in _code(modules).values()):
            yield name, modules


def _drops(config: Any) -> bool:
    """Whether any dropout of a config is above zero, such as ``attn_pdrop``."""
    values = (value for name, value in vars(config).items() if "drop" in name)
    return any(isinstance(value, float) and value > 0 for value in values)


def _code(modules: list[Any]) -> dict[type, str]:
    """For each class in the models except torch's, the source of its file; empty if none."""
    classes = {type(part): None for module in modules for part in module.modules()}
    found = {}
    for cls in classes:
        package = cls.__module__.partition(".")[0]
        if package not in ("torch", "fusedoptim"):
            try:
                found[cls] = inspect.getsource(sys.modules[cls.__module__])
            except (KeyError, OSError, TypeError):
                found[cls] = ""
    return found


def is_exchanged(modules: list[Any]) -> bool:
    """Whether models with one config use our attention already."""
    return bool(modules[0].config._attn_implementation == NAME)


def objection(modules: list[Any]) -> str | None:
    """Why the attention of models with one config stays unchanged, if it does."""
    import transformers

    implementation = modules[0].config._attn_implementation
    if implementation != _TORCHS:
        return f'has "{implementation}" attention, whose dropout, if any, stays torch\'s'
    if int(transformers.__version__.partition(".")[0]) < _LEAST_VERSION:
        return f"transformers {transformers.__version__} is older than {_LEAST_VERSION}"
    if any(p.device.type != "cpu" for p in modules[0].parameters()):
        return "is not on the CPU, the one device where torch draws masks on one thread"
    for cls, code in _code(modules).items():
        if not code:
            return f"the code of {cls.__name__} cannot be read"
        if f'"{_TORCHS}"' in code or f"'{_TORCHS}'" in code:
            return f'the code of {cls.__name__} treats "{_TORCHS}" in its own way'
    return None


def exchange(modules: list[Any]) -> None:
    """Make models with one config use our attention."""
    for module in modules:
        vars(module)[_EXCHANGED] = _Registered()
    modules[0].config._attn_implementation = {"": NAME}  # keeps that of configs inside this one


def revert(model: nn.Module) -> None:
    """Undo :func:`exchange` in all models inside a model."""
    for module in model.modules():
        if _EXCHANGED in vars(module):
            config: Any = module.config
            if config._attn_implementation == NAME:
                config._attn_implementation = {"": _TORCHS}
            del vars(module)[_EXCHANGED]  # last: until then, revert() can be repeated
