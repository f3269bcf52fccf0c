"""Models with statistics that matter, and what must not change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tests.tolerances import assert_as_exact


def randomise(model: nn.Module) -> nn.Module:
    """In eval mode, with running statistics and affine parameters that are not 0 and 1."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            if module.running_mean is not None and module.running_var is not None:
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 1.5)
                if module.bias is not None:
                    nn.init.normal_(module.bias)
    return model.eval()


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state_dict with values of its own."""
    return {k: v.clone() if isinstance(v, Tensor) else copy.deepcopy(v) for k, v in state.items()}


def assert_same_state(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Assert that two state_dicts agree bit for bit, in keys and their order too."""
    assert list(actual) == list(expected)
    for key, value in expected.items():
        assert actual[key].dtype == value.dtype, key
        assert torch.equal(actual[key], value), key


def fingerprint(model: nn.Module) -> list[Any]:
    """All that must not change in a model that is left alone, by identity, layout and value."""
    facts: list[Any] = []
    for name, module in model.named_modules():
        facts.append((name, id(module), type(module), module.training, sorted(vars(module))))
        for dictionary in (module._parameters, module._buffers):
            for key, t in dictionary.items():
                if t is not None:
                    facts.append((key, id(t), t.data_ptr(), t.stride(), t.dtype, t.tolist()))
    return facts


def without_addresses(facts: list[Any]) -> list[Any]:
    """A fingerprint less where values lie: those that were rounded are computed anew."""
    return [(*f[:2], *f[3:]) if len(f) == 6 else f for f in facts]


def tensors(output: Any) -> list[Tensor]:
    """The floating-point tensors of what a model returned."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return [t for item in output for t in tensors(item)]
    return []


def assert_right(
    optimized: Callable[..., Any],
    plain: nn.Module,
    *args: Any,
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> None:
    """Assert that ``optimized`` returns what ``plain`` would in float64, but for ``dtype``.

    For 16 bits it runs under autocast, unless it was moved to that dtype, which its inputs have.
    """
    double = copy.deepcopy(plain).double()

    def widened(value: Any) -> Any:
        is_real = isinstance(value, Tensor) and value.is_floating_point()
        return value.double() if is_real else value

    exact_args = [widened(a) for a in args]
    exact_kwargs = {k: widened(v) for k, v in kwargs.items()}
    is_moved = any(t.dtype == dtype for t in tensors([*args, kwargs]))
    is_cast = dtype in (torch.bfloat16, torch.float16) and not is_moved

    def exact() -> Sequence[Tensor]:
        module = double
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            module = _rounded(double, dtype)
        return tensors(module(*exact_args, **exact_kwargs))

    with torch.no_grad():
        with torch.autocast("cpu", dtype=dtype if is_cast else None, enabled=is_cast):
            results = tensors(optimized(*args, **kwargs))
        assert_as_exact(results, exact, dtype)


def _rounded(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A float64 copy whose parameters were rounded to ``dtype``; its mode of dispatch applies."""
    result = copy.deepcopy(model)
    for param in result.parameters():
        u = torch.finfo(dtype).eps / 2
        param.mul_(1 + u * (torch.randint_like(param, 2) * 2 - 1))
    return result
