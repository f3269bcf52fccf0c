"""Which modules ask what kind a device is: those that define kinds, and few others, each listed."""

from __future__ import annotations

import ast

from tests.packaging.test_structure import modules

DEFINE = {
    "allocator.runtime.kinds": "what the allocator has to know",
    "fusedoptim.launch.cpu": "the backend",
    "fusedoptim.launch.xpu": "the backend",
}
ASK = {
    "allocator.exchange.devices": "how torch names what DLPack numbers",
    "allocator.monitoring.trace": "torch's profiler also records other memory than the host's",
    "allocator.runtime.isa": "only the CPU's driver reads the variable",
    "allocator.runtime.queues": "Intel's driver is preferred for the CPU",
    "fusedoptim._torch_private": "the default device that changes nothing",
    "fusedoptim.nn.functional": "torch's attention with dropout is slow on the CPU alone",
    "fusedoptim.ops._nms": "torchvision's limits",
    "fusedoptim.ops._registering": "a faster question before the general one",
    "fusedoptim.raw.kernel": "the default of an argument",
}
"""A new kind of device changes nothing there."""
_NAMES = {"cpu", "gpu", "xpu", "cuda"}
_ATTRIBUTES = {f"is_{name}" for name in _NAMES}


def _is_name(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value in _NAMES


def _asks(node: ast.AST) -> bool:
    """Whether this is an attribute such as is_cpu, a comparison with "cpu", or a key "cpu"."""
    if isinstance(node, ast.Attribute):
        return node.attr in _ATTRIBUTES
    if isinstance(node, ast.Compare):
        return any(map(_is_name, (node.left, *node.comparators)))
    if isinstance(node, ast.Dict):
        return any(map(_is_name, node.keys))
    return isinstance(node, ast.Constant) and node.value == "xpu"


def test_few_modules_ask_for_the_kind() -> None:
    asking = {
        name
        for package in ("allocator", "fusedoptim")
        for name, (_, tree) in modules(package).items()
        if any(map(_asks, ast.walk(tree)))
    }
    assert asking == DEFINE.keys() | ASK.keys()
