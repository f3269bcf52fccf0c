"""In training runs on real data, the fused optimizers follow torch's, and SplitSGD does not stall.

Seeds are fixed: a training run is one long sequence of roundings, and these bounds are for its end.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

# An example imports its neighbors by their bare names, as a script does.
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import convergence
from convergence import PAIRS, Pair, Task, Training, train, train_pair, train_stall

SEED = 0

DIGITS_EPOCHS = 10
LAYERS = 3

each_pair = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.fused.__name__)


@pytest.fixture(scope="module")
def digits() -> Task:
    return convergence.digits_task(SEED)._replace(epochs=DIGITS_EPOCHS)


@pytest.fixture(scope="module")
def diabetes() -> Task:
    return convergence.diabetes_task(SEED)


def weight_error(training: Training, truth: list[torch.Tensor]) -> float:
    """The largest difference between the weights and ``truth``, which is float64."""
    weights = training.model.parameters()
    return max((p.double() - q).abs().max().item() for p, q in zip(weights, truth))


@each_pair
def test_a_training_ends_as_near_to_float64_as_torch_does(pair: Pair, digits: Task) -> None:
    reference, fused = train_pair(digits, pair, SEED)
    exact = train(digits, "float64", pair.reference, pair.digits, SEED, dtype=torch.float64)
    truth = [p.detach() for p in exact.model.parameters()]

    # Most of the error comes from the roundings of forward and backward, which both runs have; the
    # factor of 3 is for the step's own roundings, which add up differently in each.
    assert weight_error(fused, truth) <= 3 * weight_error(reference, truth)
    # Later steps do not amplify a step's rounding: one unit roundoff for each step.
    assert fused.loss == pytest.approx(
        exact.loss, rel=digits.steps * torch.finfo(torch.float32).eps / 2
    )
    one_sample = 1 / len(digits.test_targets)
    assert fused.score == pytest.approx(reference.score, abs=1.01 * one_sample)
    assert fused.score > 0.9
    assert fused.loss < 0.1 * fused.curve[0][1]


@each_pair
def test_a_convex_training_ends_where_torch_does(pair: Pair, diabetes: Task) -> None:
    reference, fused = train_pair(diabetes, pair, SEED)
    exact = convergence.exact_weights(diabetes)

    # A gradient in float32 is off by a rounding of its terms, which are as large as the weights
    # times the largest curvature; it vanishes where the weights are off by that over the smallest
    # curvature, so by the condition number times a rounding.
    inputs = diabetes.train_inputs.double()
    condition = torch.linalg.cond(inputs.T @ inputs).item()
    tolerance = condition * torch.finfo(torch.float32).eps * exact.abs().max().item()
    torch_weights = [p.detach().double() for p in reference.model.parameters()]
    assert weight_error(fused, torch_weights) <= tolerance
    if pair.fused.__name__ in ("FusedSGD", "FusedAdam"):  # the example says why only these
        assert weight_error(fused, [exact]) <= tolerance
    assert fused.score == pytest.approx(reference.score, abs=tolerance)
    assert fused.loss - diabetes.minimum < 1e-3 * fused.curve[0][1]


def test_split_sgd_trains_on_where_bfloat16_stalls(digits: Task) -> None:
    task = digits._replace(epochs=convergence.STALL_EPOCHS)
    exact, plain, split = train_stall(task, SEED)
    losses_at_drop = {
        run.label: next(
            loss for step, loss in run.curve if step >= task.steps * convergence.DROP_AT
        )
        for run in (exact, plain, split)
    }

    # The reference's pass rounds the weights to bfloat16, SplitSGD's truncates them: in each layer
    # they, and so the outputs, differ by less than the spacing of bfloat16.
    truncation = LAYERS * torch.finfo(torch.bfloat16).eps
    assert split.loss == pytest.approx(exact.loss, rel=truncation)
    assert split.score == pytest.approx(exact.score, abs=truncation)
    assert split.unmoved < 0.01
    assert exact.unmoved < 0.01

    # Until the rate drops, plain bfloat16 keeps up; then it stalls.
    assert losses_at_drop[plain.label] == pytest.approx(losses_at_drop[exact.label], rel=0.05)
    assert plain.unmoved > 0.95
    assert plain.loss > 1.8 * split.loss
    assert plain.score < split.score - 0.03
    assert [p.dtype for p in split.model.parameters()] == [
        p.dtype for p in plain.model.parameters()
    ]
