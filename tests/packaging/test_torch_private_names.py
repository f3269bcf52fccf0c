"""Private names of torch are in ``fusedoptim/_torch_private.py``, or listed here with their tests.

``_torch_private.py`` has those that need an explanation. The names below stand where they are used:
operators of torch's that begin with an underscore, and the attributes of torch's own classes.
"""

from __future__ import annotations

import ast
import pkgutil
import re
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.packaging.test_structure import PACKAGES, ROOT, modules

_TORCH_PRIVATE = "fusedoptim._torch_private"
_PRIVATE = re.compile(r"_(?!_)")

_PASSES, _REWRITES = "tests/transforms/passes", "tests/transforms/rewrites"
_GRAPH, _TRACING = "tests/transforms/graph", "tests/transforms/tracing"
_OFFLOAD = "tests/fusedoptim/offload/test_offload.py"
_WRITES = f"{_REWRITES}/test_writes.py"
_PREPACK = f"{_PASSES}/test_pack_weights.py"

NAMES = {
    # of tensors and their storage
    "Tensor._indices": "tests/fusedoptim/step/test_sparse.py",
    "Tensor._values": "tests/fusedoptim/step/test_sparse.py",
    "Tensor._version": _WRITES,
    "Tensor._backward_hooks": "tests/transforms/inputs/test_copies.py",
    "Tensor._post_accumulate_grad_hooks": "tests/transforms/inputs/test_copies.py",
    "UntypedStorage._cdata": "tests/fusedoptim/split/test_pages.py",
    # of modules: hooks and tensors must be replaced without calling a user's __setattr__
    "Module._apply": f"{_REWRITES}/test_moves.py",
    "Module._buffers": f"{_PASSES}/test_fold_batch_norm.py",
    "Module._call_impl": f"{_PASSES}/test_graph_mode.py",
    "Module._compiled_call_impl": f"{_PASSES}/test_graph_mode.py",
    "Module._forward_hooks": "tests/fusedoptim/nn/test_tracing.py",
    "Module._forward_pre_hooks": "tests/fusedoptim/nn/test_tracing.py",
    "Module._load_from_state_dict": f"{_PASSES}/test_frozen_batch_norm.py",
    "Module._load_state_dict_pre_hooks": _WRITES,
    "Module._modules": "tests/transforms/test_embedding_bags.py",
    "Module._non_persistent_buffers_set": f"{_TRACING}/test_clones.py",
    "Module._parameters": f"{_PASSES}/test_fold_batch_norm.py",
    "Module._state_dict_hooks": _WRITES,
    "LSTM._flat_weights_names": f"{_PASSES}/test_packed_lstm.py",
    # torch.jit.script writes into the model that it is given
    "torch.jit._script": f"{_REWRITES}/test_scripting.py",
    # base classes that torch does not export
    "torch.nn.modules.batchnorm._BatchNorm": f"{_PASSES}/test_fold_batch_norm.py",
    "torch.nn.modules.dropout._DropoutNd": f"{_PASSES}/test_parallel_dropout.py",
    # operators
    "OpOverload._schema": f"{_GRAPH}/test_changes.py",
    "torch._foreach_add_": "tests/fusedoptim/nn/test_embedding_bag_updates.py",
    "torch._foreach_copy_": _OFFLOAD,
    "torch._foreach_div_": _OFFLOAD,
    "torch._foreach_norm": _OFFLOAD,
    "torch.ops.mkldnn._is_mkldnn_fp16_supported": _PREPACK,
    "torch.ops.mkldnn._linear_pointwise": _PREPACK,
    "torch.ops.mkldnn._reorder_linear_weight": _PREPACK,
    "torch.ops.mkldnn._reorder_mkldnn_rnn_layer_weight": f"{_PASSES}/test_packed_lstm.py",
    # modules of torch
    "torch._C._from_dlpack": "tests/allocator/exchange/test_dlpack.py",
    "torch._C._functorch": f"{_GRAPH}/test_standing_aside.py",
    "torch._C._nn": f"{_GRAPH}/test_changes.py",
    "torch._C._profiler._EventType": "tests/allocator/monitoring/test_profiler.py",
    "torch._dynamo.utils.counters": f"{_PASSES}/test_graph_mode.py",
    "torch._ops": f"{_GRAPH}/test_changes.py",
    "torch.utils._pytree": "tests/transforms/inputs/test_sample.py",
    "torch.xpu._is_compiled": "tests/allocator/exchange/test_dlpack.py",
}
"""The test that fails when torch changes a name."""

_OWNERS = {
    "UntypedStorage": torch.ones(1).untyped_storage(),
    "Tensor": torch.ones(1),  # has a _cdata too, which nothing uses
    "Module": nn.Module(),
    "LSTM": nn.LSTM(1, 1),
    "OpOverload": torch.ops.aten.add.Tensor,
}


def _owner_of(attribute: str) -> str | None:
    return next((name for name, owner in _OWNERS.items() if hasattr(owner, attribute)), None)


def _of_imports(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and not node.level:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _used(tree: ast.Module) -> Iterator[str]:
    """The private names of torch in a module; an attribute has the name of its owner's class."""
    for node in ast.walk(tree):
        yield from (n for n in _of_imports(node) if re.match(r"torch\.(.*\.)?_(?!_)", n))
        if isinstance(node, ast.Attribute) and _PRIVATE.match(node.attr):
            text = ast.unparse(node)
            owner = _owner_of(node.attr)
            if text.startswith("torch."):
                yield text
            elif owner and not text.startswith(("self.", "cls.")):
                yield f"{owner}.{node.attr}"


def test_all_are_listed() -> None:
    trees = {
        name: tree
        for package in PACKAGES
        for name, (_, tree) in modules(package).items()
        if name != _TORCH_PRIVATE
    }
    used = {name: set(_used(tree)) - {"torch._C"} for name, tree in trees.items()}
    new = {name: names - NAMES.keys() for name, names in used.items() if names - NAMES.keys()}
    assert not new, f"use a public name, or add to {_TORCH_PRIVATE}, or to NAMES here: {new}"
    assert NAMES.keys() == set().union(*used.values())


@pytest.mark.parametrize("name", NAMES)
def test_torch_has_it(name: str) -> None:
    owner, _, attribute = name.partition(".")
    if owner == "torch":
        pkgutil.resolve_name(name)
    else:
        assert hasattr(_OWNERS[owner], attribute)
    assert (ROOT / NAMES[name]).exists()


def test_new_ones_are_found() -> None:
    source = (
        "from torch._C import x\nimport torch._y\ntorch.z._w(p._version, p._ours, self._values)"
    )
    assert set(_used(ast.parse(source))) == {
        "torch._C.x",
        "torch._y",
        "torch.z._w",
        "Tensor._version",
    }
