"""What all operators have in common."""

from __future__ import annotations

import pytest
import torch

import fusedoptim.ops  # noqa: F401  # it registers the operators

_NAMES = sorted(
    schema.name
    for schema in torch._C._jit_get_all_schemas()
    if schema.name.startswith("fusedoptim::")
)


@pytest.mark.parametrize("name", _NAMES)
def test_compilers_may_capture_them(name: str) -> None:
    """Dynamo can be told to capture only operators with this tag."""
    operator = getattr(torch.ops.fusedoptim, name.removeprefix("fusedoptim::")).default
    assert torch.Tag.pt2_compliant_tag in operator.tags
