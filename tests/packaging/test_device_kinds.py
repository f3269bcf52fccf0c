"""Which modules ask what kind a device is: those that define kinds, and few others, each listed."""

from __future__ import annotations

import ast

from tests.packaging.test_structure import PACKAGES, modules

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
    "transforms.inputs.sample": "any other device is synchronized, and has its own random numbers",
}
"""A new kind of device changes nothing there."""
FOR_CPUS = {
    "transforms.front_end": "which dtypes are slow depends on the processor",
    "transforms.graph.attention": "oneDNN's products in 16 bits",
    "transforms.graph.constants": "what is worth keeping was measured in the host's memory",
    "transforms.graph.lookups": "torch's lookups were measured on the CPU",
    "transforms.graph.products": "oneDNN's products",
    "transforms.graph.sources": "tensors are compared byte by byte in the host's memory",
    "transforms.passes.channels_last": "the layout was measured on the CPU",
    "transforms.passes.graph_mode": "the backend is for the CPU",
    "transforms.passes.pack_weights": "oneDNN's packed weights",
    "transforms.passes.parallel_dropout": "only on the CPU does torch draw masks on one thread",
    "transforms.rewrites.for_training": "oneDNN's products",
    "transforms.rewrites.int8": "oneDNN's INT8",
    "transforms.rewrites.packed": "oneDNN's packed weights",
    "transforms.rewrites.registered_attention": "as in transforms.passes.parallel_dropout",
    "transforms.tracing.modules": "oneDNN's products and its INT8",
}
"""What these do, they do on the CPU alone. Models and tensors on any other device are
left to torch, also on one of a new kind."""
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
        for package in PACKAGES
        for name, (_, tree) in modules(package).items()
        if any(map(_asks, ast.walk(tree)))
    }
    assert asking == DEFINE.keys() | ASK.keys() | FOR_CPUS.keys()
