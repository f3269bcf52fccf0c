"""What all operators have in common."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from fusedoptim import ops

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


OFFSETS, INDICES = torch.tensor([0, 2]), torch.tensor([1, 0, 1])
BY_ONE_TENSOR: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: ops.dropout(x, torch.tensor(7), 0.5),
    "interaction": lambda x: ops.interaction(x, x.detach()),
    "a list": lambda x: ops.embedding_bags([x], [INDICES], [OFFSETS])[0],
    "roi_align": lambda x: ops.roi_align(x[None, None], [torch.tensor([[0.0, 0, 2, 2]])], 2),
}


@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's first use of forward mode
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", BY_ONE_TENSOR)
def test_forward_mode_raises(name: str, requires_grad: bool) -> None:
    """A tangent is never lost; a tensor without one passes."""
    function, x = BY_ONE_TENSOR[name], torch.randn(4, 8, requires_grad=requires_grad)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(function, (x,), (x,))
    with forward_ad.dual_level():
        assert torch.equal(function(x), function(x))
        dual = forward_ad.make_dual(x, torch.ones_like(x))  # type: ignore[no-untyped-call]  # torch's
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            function(dual)
