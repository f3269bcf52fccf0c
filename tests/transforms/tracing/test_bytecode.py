"""What code calls is found in the bytecode of each version of CPython."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transforms.tracing.bytecode import names_called, stored_attributes


def plain(x: Tensor) -> Tensor:
    return chosen(x)


def of_a_module(x: Tensor) -> Tensor:
    return F.gelu(x) + torch.alpha_dropout(x, 0.5, True)


def of_a_package(x: Tensor) -> Tensor:
    return nn.functional.gelu(torch.nn.functional.gelu(x))


def with_keywords(x: Tensor) -> Tensor:
    return F.gelu(input=nn.functional.gelu(x, approximate="tanh"))


def with_many_arguments(*args: Tensor, **options: Any) -> Tensor:
    return F.gelu(*args) + chosen(*args, **options)


def with_a_condition(x: Tensor) -> Tensor:
    return F.gelu(F.silu(x) if x.dim() else x) + 1


def not_called(x: Tensor) -> Any:
    functions = [F.gelu, chosen, x + 1]
    x.chosen = nn.functional.gelu
    return chosen(x, F.gelu, other=nn.functional.gelu), x + torch.pi, functions, F


def chosen(x: Tensor, *others: Any, **more: Any) -> Tensor:
    return x


@pytest.mark.parametrize(
    ("function", "called"),
    [
        (plain, {"chosen"}),
        (of_a_module, {"F.gelu", "torch.alpha_dropout"}),
        (of_a_package, {"nn.functional.gelu", "torch.nn.functional.gelu"}),
        (with_keywords, {"F.gelu", "nn.functional.gelu"}),
        (with_many_arguments, {"F.gelu", "chosen"}),
        (with_a_condition, {"F.gelu", "F.silu"}),
        (not_called, {"chosen"}),
    ],
)
def test_names_called(function: Callable[..., Any], called: set[str]) -> None:
    assert set(map(".".join, names_called(function.__code__))) == called


def test_names_called_by_code_with_many_names() -> None:
    """Large numbers of names take two instructions."""
    lines = ["def function(x):", *(f"    x.name{i}" for i in range(300))]
    variables: dict[str, Any] = {}
    exec("\n".join([*lines, "    return F.silu(x) + nn.functional.gelu(x)"]), variables)
    function: types.FunctionType = variables["function"]
    assert names_called(function.__code__) == [("F", "silu"), ("nn", "functional", "gelu")]


def test_stored_attributes() -> None:
    assert stored_attributes(not_called.__code__) == {"chosen"}
