"""What all operators have in common."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from fusedoptim import nn, ops

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


ROWS, BOXES, SCORES = torch.randn(4, 8), torch.rand(4, 5), torch.rand(4)
MERGED = nn.MergedEmbeddingBag([(4, 8)], "sgd")
BY_ARGUMENT: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("dropout", "x"): lambda to: ops.dropout(to(ROWS), torch.tensor(7), 0.5),
    ("gelu_tanh", "x"): lambda to: ops.gelu_tanh(to(ROWS)),
    ("cross_entropy", "logits"): lambda to: ops.cross_entropy(to(ROWS), INDICES),
    ("interaction", "features[1]"): lambda to: ops.interaction(ROWS, to(ROWS)),
    ("embedding_bags", "weights[0]"): lambda to: ops.embedding_bags(
        [to(ROWS)], [INDICES], [OFFSETS]
    ),
    ("embedding_bags", "per_sample_weights[0]"): lambda to: ops.embedding_bags(
        [ROWS], [INDICES], [OFFSETS], [to(torch.ones(3))]
    ),
    ("updated_embedding_bags", "indices[0]"): lambda to: MERGED([to(INDICES)], [OFFSETS]),
    ("updated_embedding_bags", "offsets[0]"): lambda to: MERGED([INDICES], [to(OFFSETS)]),
    ("roi_align", "boxes"): lambda to: ops.roi_align(ROWS[None, None], to(BOXES), 2),
    ("roi_align", "boxes[0]"): lambda to: ops.roi_align(ROWS[None, None], [to(BOXES[:, 1:])], 2),
    ("nms", "boxes"): lambda to: ops.nms(to(BOXES[:, 1:]), SCORES, 0.5),
    ("batched_nms", "scores"): lambda to: ops.batched_nms(BOXES[:, 1:], to(SCORES), INDICES, 0.5),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("to", [Tensor.to_sparse, Tensor.to_sparse_csr, Tensor.to_mkldnn])
@pytest.mark.parametrize(("name", "argument"), BY_ARGUMENT)
def test_tensors_that_are_not_dense(
    name: str, argument: str, to: Callable[[Tensor], Tensor], requires_grad: bool
) -> None:
    def other(x: Tensor) -> Tensor:
        if x.dim() == 1 or not x.is_floating_point():
            return x.to_sparse()
        return to(x.clone().requires_grad_(requires_grad))

    message = re.escape(f"{name}: {argument} has layout ") + ".*" + re.escape(f"; pass {argument}.")
    with pytest.raises(TypeError, match=message):
        BY_ARGUMENT[name, argument](other)
