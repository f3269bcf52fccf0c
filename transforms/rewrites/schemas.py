"""Checks that torch's operators are those that a rewrite was written for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch


def changed(namespace: str, schemas: Mapping[str, str]) -> list[str]:
    """The operators that this torch lacks, or has with another signature.

    Args:
        namespace: the namespace of the operators.
        schemas: the expected schemas by name, such as "convolution" or "convolution.binary".
    """
    return [name for name, schema in schemas.items() if _schema(namespace, name) != schema]


def difference(operators: Sequence[str]) -> str | None:
    """Why a rewrite is off where these operators are missing or changed; None if there are none."""
    return f"this torch differs from torch 2.13 in {', '.join(operators)}" if operators else None


def _schema(namespace: str, name: str) -> str | None:
    operator, _, overload = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    found = getattr(packet, overload or "default", None)
    return None if found is None else str(found._schema)
