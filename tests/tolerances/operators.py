"""The most by which the results of operators, and their gradients, may be off."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.tolerances.units import ARITHMETIC, BUILTIN_ULPS, LANES, unit_roundoff


def cross_entropy_errors(
    logits: Tensor, target: Tensor, smoothing: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The most by which the loss of each row, and the gradient of the loss's sum, may be off.

    Args:
        logits: (N, C), in float64, with values of ``dtype``.
        target: a class for each row.
        smoothing: of the labels.
        dtype: of the logits and their gradient; the kernels compute in its arithmetic dtype.
    """
    u = unit_roundoff(ARITHMETIC[dtype])
    classes = logits.shape[1]
    sums = math.ceil(classes / LANES) + LANES  # additions that a term passes through
    largest = logits.max(1, keepdim=True).values
    p = torch.softmax(logits, 1)
    # A rounding of x - max is a relative error of its exponential.
    distances = (p * (largest - logits)).sum(1, keepdim=True)
    log_total = torch.logsumexp(logits - largest, 1, keepdim=True)
    off = u * (distances + sums + 2 * BUILTIN_ULPS["exp"])
    off = off + 2 * BUILTIN_ULPS["log"] * u * log_total

    of_class = logits.gather(1, target[:, None])
    loss = (largest - of_class).abs() + log_total
    spread = smoothing * (of_class.abs() + (sums + 2) * logits.abs().mean(1, keepdim=True))
    loss_error = off + u * (3 * loss + 4 * spread)

    log_sum = largest + log_total
    relative = off + u * (log_sum.abs() + (logits - log_sum).abs() + 2 * BUILTIN_ULPS["exp"])
    wanted = smoothing / classes + (1 - smoothing) * (logits == of_class)
    error = relative * p + 4 * u * (p + wanted)
    stored = error + unit_roundoff(dtype) * (p + wanted + error) + torch.finfo(dtype).tiny
    return loss_error.squeeze(1), stored


def bag_errors(magnitudes: Tensor, terms: Tensor | int, dtype: torch.dtype) -> Tensor:
    """The most by which sums over the rows of a table, or their means, may be off.

    A product and a sum round once, by ``u`` of the sum so far, which is at most the sum of the
    magnitudes; a mean rounds its factor and the product by it.

    Args:
        magnitudes: the sums of the terms' magnitudes, in float64.
        terms: their number, at most.
        dtype: of the result.
    """
    units = (terms + 3) * unit_roundoff(ARITHMETIC[dtype])
    error = units / (1 - units) * magnitudes
    return error + unit_roundoff(dtype) * (magnitudes + error) + torch.finfo(dtype).tiny


def interaction_errors(features: Tensor, grad: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The most by which an interaction's products, and the features' gradients, may be off.

    Args:
        features: (B, n, d), in float64, with values of ``dtype``.
        grad: of the products, a symmetric matrix for each sample; the gradient of the output's
            first columns is one more term, of the size of its own.
        dtype: of the features; the kernels compute in its arithmetic dtype.
    """
    u, stored, tiny = (
        unit_roundoff(ARITHMETIC[dtype]),
        unit_roundoff(dtype),
        torch.finfo(dtype).tiny,
    )
    _, count, width = features.shape
    sizes = features.abs()

    def allowed(terms: int, total: Tensor) -> Tensor:
        return (terms * u + stored) * (1 + terms * u) * total + tiny

    return allowed(width, sizes @ sizes.mT), allowed(count, grad.abs() @ sizes)


def gelu_errors(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The most by which GELU by tanh, and its derivative, may be off.

    Args:
        x: in float64, with values of ``dtype``.
        dtype: of the values; the kernels compute in its arithmetic dtype.
    """
    arithmetic = ARITHMETIC[dtype]
    u, tiny = unit_roundoff(arithmetic), torch.finfo(arithmetic).tiny
    slope = 2 * math.sqrt(2 / math.pi)
    exponent = slope * x * (1 + 0.044715 * x**2)
    sigma = torch.sigmoid(exponent)
    # Of e^-2u: six roundings of its exponent, and its own. 1 + e^-2u is 1 / sigma.
    off = (1 - sigma) * u * (6 * exponent.abs() + 2 * BUILTIN_ULPS["exp"])
    off = off + u * (1 + 5)  # _QUOTIENT, of float32
    value = x.abs() * sigma
    error = (off + u) * value + tiny * x.abs()
    factor = x.abs() * slope * (1 + 3 * 0.044715 * x**2)
    term = factor * sigma
    complement = sigma * off + u * (1 - sigma)
    of_term = term * (complement + (1 - sigma) * (off + 6 * u)) + tiny * (
        2 + factor
    )  # sigma may be flushed to zero
    of_slope = of_term + off * sigma + 2 * u * (term * (1 - sigma) + sigma)
    stored = (unit_roundoff(dtype) * (1 + off), torch.finfo(dtype).tiny)
    slopes = sigma + term * (1 - sigma)
    return (
        error + stored[0] * value + stored[1],
        of_slope + stored[0] * slopes + stored[1],
    )


def int8_errors(magnitudes: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The most by which a product of 8-bit codes may be off.

    Codes are multiplied and summed in integers, which rounds nothing. Then seven roundings to
    float32 are possible: of the sum, of the zero point's share in it and of their difference; of
    both scales' product, and by it; of the sum with the bias; and of the bias itself.

    Args:
        magnitudes: the sum of the products' magnitudes, with the zero point's, in float64.
        bias: broadcast to them.
        dtype: of the result.
    """
    sizes = magnitudes if bias is None else magnitudes + bias.abs()
    return (7 * unit_roundoff(torch.float32) + unit_roundoff(dtype)) * sizes


def attention_errors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kept: Tensor,
    scale: float,
    grad: Tensor,
    dtype: torch.dtype,
) -> list[Tensor]:
    """The most by which attention, and its gradients of query, key and value, may be off.

    To first order, as products of two roundings are far below the bound's own slack.

    Args:
        query: (..., L, E), in float64, with values of ``dtype``, like all tensors.
        key: (..., S, E).
        value: (..., S, V).
        mask: added to the scores.
        kept: the factor of each weight in dropout.
        scale: of the scores.
        grad: of the output.
        dtype: of the tensors, and of the matrices of weights and of their gradients.
    """
    u, real = unit_roundoff(dtype), unit_roundoff(ARITHMETIC[dtype])
    rows, columns = kept.shape[-2:]
    # A sum of products in any order, and the factors' own roundings by scale and dropout.
    sums = (max(rows, columns, query.shape[-1], value.shape[-1]) + 3) * real
    scores, sizes = scale * query @ key.mT, abs(scale) * query.abs() @ key.abs().mT
    if mask is not None:
        scores, sizes = scores + mask, sizes + mask.abs().nan_to_num(posinf=0.0)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    distances = (scores.amax(-1, keepdim=True) - scores).nan_to_num(posinf=0.0) * (weights > 0)
    # A rounding of a score is a relative error of its exponential, and of the sum of them.
    of_scores = sums * sizes.amax(-1, keepdim=True) + real * distances.amax(-1, keepdim=True)
    of_weights = 2 * of_scores + sums + 4 * BUILTIN_ULPS["exp"] * real + u
    dropped = weights * kept
    output = dropped @ value.abs() * (of_weights + sums + 2 * u)
    of_value = (dropped * (of_weights + sums + 2 * u)).mT @ grad.abs()
    of_products = kept * (grad.abs() @ value.abs().mT)
    total = weights * (of_products + (weights * of_products).sum(-1, keepdim=True))
    of_scores = total * (2 * of_weights + 2 * sums + 4 * u)
    of_query = abs(scale) * (of_scores + total * (sums + u)) @ key.abs()
    of_key = abs(scale) * (of_scores + total * (sums + u)).mT @ query.abs()
    smallest = torch.finfo(dtype).smallest_normal  # what lies below it may become zero
    return [error + smallest for error in (output, of_query, of_key, of_value)]


def roi_align_error(magnitudes: Tensor, terms: int, dtype: torch.dtype) -> Tensor:
    """The most by which ROIAlign, or its gradient, may be off where its weights are exact.

    A weight is a product of two; a sum of products in any order rounds each term ``terms`` times.

    Args:
        magnitudes: the same of the absolute values, in float64.
        terms: the most that are added up.
        dtype: of maps and results.
    """
    u = unit_roundoff(ARITHMETIC[dtype])
    error = (terms + 4) * u * magnitudes
    if dtype != ARITHMETIC[dtype]:
        error = error + unit_roundoff(dtype) * (magnitudes + error)
    return error + torch.finfo(dtype).smallest_normal


def roi_align_position_error(largest: float, reach: float, dtype: torch.dtype) -> float:
    """The same for any bins, in maps whose values are at most ``largest``.

    A position is off by eight roundings of numbers up to ``reach``, and so is each of the four
    weights of a sample; no sample is where the weights jump.
    """
    u = unit_roundoff(ARITHMETIC[dtype])
    return largest * u * (4 * 8 * reach + 64)
