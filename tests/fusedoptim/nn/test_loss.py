"""CrossEntropyLoss compared with torch's, with any arguments."""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fusedoptim.nn as ours
from fusedoptim import ops
from fusedoptim.nn.functional import MIN_CLASSES, MIN_FUSED, cross_entropy

ROWS, CLASSES = 40, MIN_FUSED // 40 + 1


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    target = torch.randint(CLASSES, (ROWS,))
    target[::7] = -100
    return torch.randn(ROWS, CLASSES, dtype=dtype), target


def is_fused(*arguments: Any, **options: Any) -> bool:
    with mock.patch.object(ops, "cross_entropy", wraps=ops.cross_entropy) as called:
        cross_entropy(*arguments, **options)
    return called.called


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"ignore_index": 3}])
def test_as_torchs(reduction: str, options: dict[str, Any]) -> None:
    logits, target = inputs(torch.float64)
    if "ignore_index" in options:
        target = target.clamp(min=0)
        target[::5] = 3
    results = []
    for module in (ours.CrossEntropyLoss, nn.CrossEntropyLoss):
        x = logits.clone().requires_grad_()
        loss = module(reduction=reduction, **options)(x, target)
        loss.sum().backward()
        results.append((loss.detach(), x.grad))
    torch.testing.assert_close(*results)
    assert is_fused(logits, target, reduction=reduction, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("is_autocast", [False, True])
def test_dtypes_are_torchs(dtype: torch.dtype, is_autocast: bool) -> None:
    logits, target = inputs(dtype)
    logits.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        loss = cross_entropy(logits, target)
        assert loss.dtype == nn.functional.cross_entropy(logits, target).dtype
        assert is_fused(logits, target)
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.dtype == dtype


@pytest.mark.parametrize("is_autocast", [False, True])
def test_meta_tensors(is_autocast: bool) -> None:
    arguments = [tensor.to("meta") for tensor in inputs(torch.bfloat16)]
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        found, expected = (
            module()(*arguments) for module in (ours.CrossEntropyLoss, nn.CrossEntropyLoss)
        )
    assert found.is_meta
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert is_fused(*arguments)


def test_one_row() -> None:
    logits, target = torch.randn(MIN_FUSED), torch.tensor(5)
    for reduction in ("mean", "none"):
        loss = cross_entropy(logits, target, reduction=reduction)
        expected = nn.functional.cross_entropy(logits, target, reduction=reduction)
        torch.testing.assert_close(loss, expected)
    assert is_fused(logits, target)


def test_rows_of_enough_classes() -> None:
    rows = MIN_FUSED // MIN_CLASSES
    logits, target = torch.randn(rows, MIN_CLASSES), torch.randint(MIN_CLASSES, (rows,))
    assert is_fused(logits, target)
    assert not is_fused(torch.randn(2 * rows, MIN_CLASSES - 1), target.repeat(2) // 2)


def test_all_rows_ignored() -> None:
    logits, target = inputs()
    target[:] = -100
    assert math.isnan(cross_entropy(logits, target))
    assert cross_entropy(logits, target, reduction="sum") == 0


@pytest.mark.parametrize(
    "options", [{"weight": torch.rand(CLASSES)}, {"size_average": False}, {"reduce": False}]
)
@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
def test_other_arguments_go_to_torch(options: dict[str, Any]) -> None:
    logits, target = inputs()
    expected = nn.functional.cross_entropy(logits, target, **options)
    assert torch.equal(cross_entropy(logits, target, **options), expected)
    assert not is_fused(logits, target, **options)
    module = ours.CrossEntropyLoss(**options)
    torch.testing.assert_close(module(logits, target), expected)


def test_other_inputs_go_to_torch() -> None:
    logits, _ = inputs()
    images = torch.randn(8, 4, 40, 40), torch.randint(4, (8, 40, 40))
    small = torch.randn(4, 5), torch.randint(5, (4,))
    rows = MIN_FUSED // 2
    short = torch.randn(rows, 2), torch.randint(2, (rows,))
    for x, target in (images, small, short, (logits, torch.softmax(logits, 1))):
        expected = nn.functional.cross_entropy(x, target)
        assert torch.equal(cross_entropy(x, target), expected)
        assert not is_fused(x, target)


@pytest.mark.parametrize(
    "arguments",
    [
        {"reduction": "average"},
        {"label_smoothing": 1.5},
        {"ignore_index": 2.0},
        {"ignore_index": True},
        {"ignore_index": 2**63},
        {"target": torch.zeros(3, dtype=torch.int64)},
        {"target": torch.zeros(ROWS, dtype=torch.int32)},
        {"target": [0] * ROWS},
        {"input": [[0.0, 1.0]] * ROWS},
    ],
)
def test_errors_are_torchs(arguments: dict[str, Any]) -> None:
    logits, target = inputs()
    given = {"input": logits, "target": target, **arguments}
    errors = []
    for function in (cross_entropy, nn.functional.cross_entropy):
        try:
            function(**given)
        except (ValueError, RuntimeError, IndexError, TypeError) as error:
            errors.append((type(error), str(error)))
    assert len(errors) == 2
    assert errors[0] == errors[1]


@pytest.mark.parametrize("label_smoothing", [2, 1.0000001, 1, True, 0, -0.5, math.nan, "0.1"])
@pytest.mark.parametrize("rows", [4, ROWS])
def test_label_smoothing_is_taken_as_torch_takes_it(label_smoothing: Any, rows: int) -> None:
    logits, target = (tensor[:rows] for tensor in inputs())
    outcomes: list[Any] = []
    for module in (ours.CrossEntropyLoss, nn.CrossEntropyLoss):
        try:
            outcomes.append(module(label_smoothing=label_smoothing)(logits, target))
        except (RuntimeError, TypeError) as error:
            outcomes.append((type(error), str(error)))
    if isinstance(outcomes[1], Tensor):
        torch.testing.assert_close(*outcomes)
    else:
        assert outcomes[0] == outcomes[1]


def test_func_transforms_are_torchs() -> None:
    logits, target = inputs()
    gradients = [
        torch.func.grad(loss)(logits, target)
        for loss in (ours.CrossEntropyLoss(), nn.CrossEntropyLoss())
    ]
    assert torch.equal(*gradients)


def test_signatures() -> None:
    for mine, torchs in (
        (ours.CrossEntropyLoss, nn.CrossEntropyLoss),
        (cross_entropy, nn.functional.cross_entropy),
    ):
        pair = [inspect.signature(function).parameters for function in (mine, torchs)]
        assert [(p.name, p.default) for p in pair[0].values()] == [
            (p.name, p.default) for p in pair[1].values()
        ]


def test_a_module_is_copied_and_described_as_torchs() -> None:
    module = ours.CrossEntropyLoss(ignore_index=4, label_smoothing=0.2)
    same = copy.deepcopy(module)
    assert (same.ignore_index, same.label_smoothing) == (4, 0.2)
    assert isinstance(same, nn.CrossEntropyLoss)
    assert repr(module) == repr(nn.CrossEntropyLoss(ignore_index=4, label_smoothing=0.2))
