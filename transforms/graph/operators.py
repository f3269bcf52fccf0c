"""What a node of a captured graph calls, what it may write into, and what its result may alias.

An unknown function is assumed to write into all its inputs and to return a part of them.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import Node

_Function = TypeVar("_Function", bound=Callable[..., Any])
_F = torch.nn.functional
_NN = torch._C._nn
_SEEDED = torch.Tag.nondeterministic_seeded

_OPERATORS: dict[Any, str] = {
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.truediv: "div",
    operator.pow: "pow",
    operator.neg: "neg",
    operator.abs: "abs",
    operator.and_: "bitwise_and",
    operator.or_: "bitwise_or",
    operator.xor: "bitwise_xor",
    operator.invert: "bitwise_not",
    operator.matmul: "matmul",
    operator.getitem: "getitem",
    operator.eq: "eq",
    operator.ne: "ne",
    operator.lt: "lt",
    operator.le: "le",
    operator.gt: "gt",
    operator.ge: "ge",
    operator.iadd: "add_",
    operator.isub: "sub_",
    operator.imul: "mul_",
    operator.itruediv: "div_",
    operator.setitem: "setitem_",
    torch.linalg.vector_norm: "linalg_vector_norm",
}
"""The names of functions outside the namespaces below."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FRESH = _words(
    """
    abs adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d add addmm
    amax amin arange argmax argmin avg_pool1d avg_pool2d avg_pool3d baddbmm batch_norm bitwise_and
    bitwise_not bitwise_or bitwise_xor bmm cat ceil celu clamp clone conv1d conv2d conv3d
    conv_transpose1d conv_transpose2d conv_transpose3d cos cumsum diff div elu embedding eq erf exp
    eye floor fold full full_like gather ge gelu group_norm gt hardsigmoid hardswish hardtanh
    index_select interpolate layer_norm le leaky_relu linalg_vector_norm linear linspace log
    log_softmax logical_and logical_not logical_or logsigmoid lt masked_fill matmul max max_pool2d
    maximum mean min minimum mish mm mul ne neg new_full new_ones new_zeros norm normalize ones
    ones_like pad pow prelu reciprocal relu relu6 rms_norm round rsqrt scaled_dot_product_attention
    selu sigmoid sign silu sin softmax softplus sqrt square stack std sub sum tanh tril triu trunc
    var where zeros zeros_like
    """
)
"""Functions whose result shares no memory with their inputs, and depends on nothing else."""
_VIEWS = _words(
    """
    bfloat16 bool chunk contiguous detach double einsum expand expand_as flatten flip float getitem
    half int long moveaxis movedim narrow permute repeat reshape reshape_as roll select split
    squeeze swapaxes swapdims t to transpose type_as unbind unflatten unfold unsqueeze view view_as
    """
)
"""Functions that depend on their inputs only, and may return a part of them."""
_WRITE_STATISTICS = ("fused_moving_avg_obs_fake_quant", "rrelu_with_noise")
_OWN: set[Any] = set()
"""Functions of this package whose result is fresh."""
_RANDOM = _words(
    """
    dropout1d dropout2d dropout3d fractional_max_pool2d fractional_max_pool3d
    fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices gumbel_softmax lobpcg
    manual_seed multi_head_attention_forward pca_lowrank seed set_rng_state svd_lowrank
    """
)
"""Functions in Python that use torch's random numbers. Operators say so themselves, by a tag."""
_GRADIENTS = "_set_grad_enabled"
_CONTEXTS = (
    *("_enter_autocast", "_exit_autocast", _GRADIENTS),
    *("_enter_inference_mode", "_exit_inference_mode"),
)
_TRANSFORMS = ("torch._functorch", "torch._C._functorch", "torch.autograd.forward_ad")
CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
TRANSPOSED = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
ATTENTION = "scaled_dot_product_attention"
PARAMETERS: dict[str, tuple[str, ...]] = {
    "linear": ("input", "weight", "bias"),
    **dict.fromkeys(
        CONVOLUTIONS, ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    ),
    **dict.fromkeys(
        TRANSPOSED,
        (
            *("input", "weight", "bias", "stride", "padding"),
            *("output_padding", "groups", "dilation"),
        ),
    ),
    "batch_norm": (
        *("input", "weight", "bias", "running_mean", "running_var"),
        *("training", "momentum", "eps", "cudnn_enabled"),
    ),
    ATTENTION: ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
    "gelu": ("input", "approximate"),
    "add": ("input", "other", "alpha"),
    "mul": ("input", "other"),
    "addmm": ("input", "mat1", "mat2"),
    "pad": ("input", "pad", "mode", "value"),
    "leaky_relu": ("input", "negative_slope"),
    "hardtanh": ("input", "min_val", "max_val"),
    **dict.fromkeys(
        ("relu", "relu6", "sigmoid", "tanh", "silu", "hardswish", "hardsigmoid"), ("input",)
    ),
}
"""The arguments of functions without a signature that Python can read."""


def own(function: _Function) -> _Function:
    """Register a function of this package: its result is fresh, and no context changes it."""
    _OWN.add(function)
    return function


def is_own(node: Node) -> bool:
    """Whether a node calls a registered function of this package."""
    return node.op == "call_function" and node.target in _OWN


def name(node: Node) -> str | None:
    """The name of torch's function that a node calls; None if it calls anything else.

    A function that writes into its first argument has a name that ends with an underscore.
    """
    if node.op == "call_method":
        found = str(node.target)
        if found.startswith("__"):  # it may write, as __iadd__ does
            return None
    elif node.op == "call_function":
        target: Any = node.target
        known = _OPERATORS.get(target) or _functions().get(target)
        if known is None:
            return None
        found = known
    else:
        return None
    return f"{found}_" if arguments(node).get("inplace") else found


@functools.cache
def _functions() -> dict[Any, str]:
    """The names of torch's functions, by function object."""
    kinds = (types.FunctionType, types.BuiltinFunctionType)
    known = _FRESH | _VIEWS
    found: dict[Any, str] = {}
    for namespace in (_F, torch, _NN):
        for key, value in vars(namespace).items():
            if isinstance(value, kinds) or type(value).__name__ == "builtin_function_or_method":
                if key in known:  # torch.mm equals torch.dsmm, which comes first
                    found[value] = key
                found.setdefault(value, key)
    return found


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of a node by name, with defaults; only keywords if no names are known."""
    target: Any = node.target
    if isinstance(target, types.FunctionType):
        bound = _signature(target).bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)
    if node.op == "call_method":
        known = PARAMETERS.get(str(target))
    else:
        known = PARAMETERS.get(_OPERATORS.get(target) or _functions().get(target) or "")
    if known is None or len(node.args) > len(known):
        return dict(node.kwargs)
    return {**dict(zip(known, node.args)), **node.kwargs}


def set_arguments(node: Node, given: Mapping[str, Any]) -> None:
    """Give a node other arguments, by the names in :data:`PARAMETERS`."""
    rest = dict(given)
    leading = itertools.takewhile(rest.__contains__, PARAMETERS[str(name(node))])
    node.args = tuple(rest.pop(key) for key in list(leading))
    node.kwargs = rest


@functools.cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def dependencies(nodes: Iterable[Node]) -> set[Node]:
    """These nodes, and all on which their results depend."""
    pending, found = list(nodes), set()
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def _is_functional(node: Node) -> bool:
    """Whether a node calls an operator whose schema says that it writes and shares nothing."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    schema = target._schema
    return not schema.is_mutable and all(each.alias_info is None for each in schema.returns)


def value(node: Any) -> Any:
    """The value of a node during capture: a fake tensor, a number, or None."""
    return node.meta.get("example_value") if isinstance(node, Node) else None


def replace(node: Node, result: Node) -> None:
    """Use another node, with the same value during capture, wherever a node is used; erase it."""
    result.meta["example_value"] = value(node)
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)


def is_tensor(node: Any) -> bool:
    """Whether a node returns one tensor."""
    return isinstance(value(node), Tensor)


def has_fixed_shape(node: Node) -> bool:
    """Whether a node is a tensor, not a number, and all its sizes are known."""
    known = value(node)
    if isinstance(known, Tensor):
        return all(isinstance(size, int) for size in (*known.shape, *known.stride()))
    return not is_number(node)


def is_context(node: Node) -> bool:
    """Whether a node enters or leaves a context."""
    return getattr(node.target, "__name__", "") in _CONTEXTS


def records_gradients(node: Node) -> bool:
    """Whether a node turns the recording of gradients on, or belongs to ``torch.func``."""
    target: Any = node.target
    if node.op == "call_method":
        return bool(target == "requires_grad_")
    if node.op != "call_function":
        return False
    if getattr(target, "__name__", "") == _GRADIENTS:
        return node.args[:1] != (False,)
    module = str(getattr(target, "__module__", ""))
    return module.startswith(_TRANSFORMS) or target in _transforms()


@functools.cache
def _transforms() -> frozenset[Any]:
    functions = vars(torch._C._functorch).values()
    return frozenset(each for each in functions if isinstance(each, types.BuiltinFunctionType))


def is_fresh(node: Node) -> bool:
    """Whether the result shares no memory with anything else."""
    if is_own(node):
        return True
    is_known = _is_functional(node) or (name(node) in _FRESH and not is_writing(node))
    return is_known and not is_random(node)


def is_pure(node: Node) -> bool:
    """Whether the result depends on the inputs alone, and nothing is written."""
    if is_own(node):
        return True
    return name(node) in _FRESH | _VIEWS and not is_writing(node) and not is_random(node)


def is_random(node: Node) -> bool:
    """Whether a node may use torch's random numbers, as an unknown function may."""
    if not node.op.startswith("call") or is_own(node) or is_context(node):
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return _SEEDED in node.target.tags
    called = name(node)
    if called == ATTENTION:
        return bool(arguments(node).get("dropout_p", 0.0) != 0.0)
    return called is None or called.removesuffix("_") in _RANDOM or _is_seeded(called)


@functools.cache
def _is_seeded(called: str) -> bool:
    packet: Any = getattr(torch.ops.aten, called, None)
    if not hasattr(packet, "overloads"):
        return False
    return any(_SEEDED in getattr(packet, each).tags for each in packet.overloads())


def is_writing(node: Node) -> bool:
    """Whether a node may write into a tensor that existed before."""
    return any(True for _ in written(node))


def is_written_between(first: Node, last: Node) -> bool:
    """Whether a node after ``first`` and before ``last`` may write into a tensor."""
    node = first.next
    while node is not last:
        if is_writing(node):
            return True
        node = node.next
    return False


def written(node: Node) -> Iterator[Node]:
    """The inputs of a node into which it may write."""
    if not node.op.startswith("call") or is_context(node):
        return
    if is_own(node) or _is_functional(node):
        return
    called = name(node)
    if called is None or _writes_more(node, called):
        yield from (each for each in node.all_input_nodes if not is_number(each))
    elif called.endswith("_"):
        first = node.args[0] if node.args else node.kwargs.get("input")
        if isinstance(first, Node):
            yield first


def is_number(node: Node) -> bool:
    """Whether the result is a number, perhaps a symbolic one."""
    return isinstance(value(node), int | float | bool | torch.SymInt | torch.SymFloat)


def _writes_more(node: Node, called: str) -> bool:
    """Whether a function of torch may write into arguments other than the first."""
    given = arguments(node)
    return (
        given.get("out") is not None
        or (called.endswith("batch_norm") and _may_update_statistics(given, "training"))
        or (called == "instance_norm" and _may_update_statistics(given, "use_input_stats"))
        or (called in ("embedding", "embedding_bag") and given.get("max_norm") is not None)
        or called in _WRITE_STATISTICS
        or called.startswith("_")
    )


def _may_update_statistics(given: dict[str, Any], training: str) -> bool:
    """Whether a normalization with these arguments may write running statistics."""
    if given.get(training) is False:
        return False
    return not all(key in given and given[key] is None for key in ("running_mean", "running_var"))
