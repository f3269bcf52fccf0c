"""Models whose BatchNorms stay, as their ``forward`` may use a convolution elsewhere."""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import Proxy

from tests.transforms.models import Block


class Left(NamedTuple):
    """A model whose BatchNorms stay."""

    make: Callable[[], nn.Module]
    reason: str = ""
    """A regular expression for the reason that the report gives."""


LEFT_BY_FORWARD: dict[str, Left] = {}
SHARED: dict[str, nn.Module] = {}
"""Modules that a model's code finds in a global variable."""


def stays(reason: str = "", **attributes: Callable[[Any], object]) -> Any:
    """Give a model of :func:`add_models` a reason, and attributes that are made from the model."""

    def mark(method: Any) -> Any:
        method.stays = (reason, attributes)
        return method

    return mark


def add_models(namespace: type[nn.Module]) -> None:
    """Add a model to :data:`LEFT_BY_FORWARD` for each public method, its ``forward``."""

    def add(name: str, forward: Any) -> None:
        reason, attributes = getattr(forward, "stays", ("", {}))
        cls = type(name, (namespace,), {"forward": forward})

        def make() -> nn.Module:
            model = cls()
            for attribute, value in attributes.items():
                setattr(model, attribute, value(model))
            return model

        LEFT_BY_FORWARD[name] = Left(make, reason)

    for name, value in list(vars(namespace).items()):
        if isinstance(value, types.FunctionType) and not name.startswith("_"):
            add(name, value)


def _weight(model: nn.Module) -> nn.Parameter:
    return nn.Parameter(torch.randn(3, 3, 3, 3))


calls = 0
COUNTS = {"calls": 0}
CACHE: list[Tensor] = []
NUMBERS = np.zeros(1)
NESTED = ([0],)
STATE = types.SimpleNamespace(calls=[])
_OPEN = "a condition that may differ in another call"


class Forwards(Block):
    """Code that uses a convolution, or its BatchNorm, in another way too."""

    @stays(_OPEN)
    def counts_in_a_global_variable(self, x: Tensor) -> Tensor:
        global calls
        calls += 1
        y = self.conv(x)
        return y if calls > 1e9 else self.norm(y)

    @stays(_OPEN)
    def counts_in_a_global_dict(self, x: Tensor) -> Tensor:
        COUNTS["calls"] += 1
        y = self.conv(x)
        return y if COUNTS["calls"] > 1e9 else self.norm(y)

    @stays(_OPEN)
    def asks_a_global_list(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y if len(CACHE) > 0 else self.norm(y)

    @stays(_OPEN)
    def counts_in_a_global_array(self, x: Tensor) -> Tensor:
        NUMBERS[0] += 1
        y = self.conv(x)
        return y if NUMBERS[0] > 1e9 else self.norm(y)

    @stays(_OPEN)
    def counts_in_a_list_of_a_global_tuple(self, x: Tensor) -> Tensor:
        NESTED[0][0] += 1
        y = self.conv(x)
        return y if NESTED[0][0] > 1e9 else self.norm(y)

    @stays(_OPEN)
    def asks_a_list_of_a_global_object(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y if len(STATE.calls) > 1e9 else self.norm(y)

    @stays(_OPEN)
    def looks_up_what_it_adds_to_a_global_dict(self, x: Tensor) -> Tensor:
        COUNTS["calls"] += 1
        y = self.conv(x)
        return y if "raw" in COUNTS else self.norm(y)

    @stays(_OPEN, seen=lambda m: [])
    def counts_in_a_list(self, x: Tensor) -> Tensor:
        self.seen.append(1)
        y = self.conv(x)
        return y if len(self.seen) > 1e9 else self.norm(y)

    @stays(_OPEN, seen=lambda m: {"n": 0})
    def counts_in_a_dict(self, x: Tensor) -> Tensor:
        self._count()
        y = self.conv(x)
        return y if self.seen["n"] > 1e9 else self.norm(y)

    def _count(self) -> None:
        self.seen["n"] += 1

    @stays(_OPEN)
    def asks_the_environment(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y if os.environ.get("FUSEDOPTIM_TEST_RAW") else self.norm(y)

    @stays("also feeds")
    def two_consumers(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.norm(y) + y

    @stays("also feeds what forward returns")
    def returned_too(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.conv(x)
        return self.norm(y), y

    @stays("follows")
    def changed_between(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y += 1
        return self.norm(y)

    @stays("also feeds")
    def changed_in_place(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y[0].zero_()
        return self.norm(y)

    @stays("stored where other code may read it")
    def kept(self, x: Tensor) -> Tensor:
        self.last = self.conv(x)
        return self.norm(self.last)

    @stays("also feeds|stored", seen=lambda m: [])
    def kept_in_a_list(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.clear()
        y = self.conv(x)
        self.seen.append(y)
        return self.norm(y), self.seen[0]

    @stays("stored where other code may read it", seen=lambda m: types.SimpleNamespace())
    def kept_in_an_object(self, x: Tensor) -> Tensor:
        self.seen.last = self.conv(x)
        return self.norm(self.seen.last)

    @stays("conv has tensors that forward reads directly")
    def weight_read(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)) + self.conv.weight.sum()

    @stays("norm has tensors that forward reads directly")
    def norm_read(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)) + self.norm.running_mean.sum()

    @stays("also feeds")
    def conv_called_twice(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)) + self.conv(x)

    @stays("follows")
    def norm_called_twice(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)) + self.norm(x)

    @stays("in use where forward evaluates a condition")
    def by_argument(self, x: Tensor, raw: Tensor | None = None) -> Tensor:
        y = self.conv(x)
        return self.norm(y) if raw is None else y + raw

    @stays("code of by_given_argument that did")
    def by_given_argument(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = self.conv(x)
        return y if scale is None else self.norm(y) * scale

    @stays("also feeds")
    def by_type(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y + self.norm(y) if isinstance(x, Tensor) else self.norm(y)

    @stays("called by by_data, whose forward cannot be traced")
    def by_data(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.norm(y) if x.sum() > 0 else y

    @stays(other=_weight)
    def exchanges_weight(self, x: Tensor) -> Tensor:
        weights = {"weight": self.other}
        return self.norm(torch.func.functional_call(self.conv, weights, (x,)))

    def writes_weight(self, x: Tensor) -> Tensor:
        for p in self.conv.parameters():
            p.data.clamp_(-0.1, 0.1)
        return super().forward(x)

    @stays(other=_weight)
    def sets_weight(self, x: Tensor) -> Tensor:
        self.conv.weight.data = self.other.data
        return super().forward(x)

    def hands_itself_over(self, x: Tensor) -> Tensor:
        return super().forward(x) + _calls_conv_alone(self, x)


class Branches(Block):
    """Code that uses the convolution alone under a condition that tracing does not see."""

    calls = 0

    def if_list(self, x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [self.conv(each) for each in x]
        return self.norm(self.conv(x))

    def if_list_inline(self, x: Any) -> Any:
        return self.conv(x[0]) if isinstance(x, list) else self.norm(self.conv(x))

    def if_list_between(self, x: Any) -> Any:
        y = self.conv(x[0] if isinstance(x, list) else x)
        if not isinstance(x, list):
            y = self.norm(y)
        return y

    def if_list_later(self, x: Any) -> Any:
        y = self.conv(x[0] if isinstance(x, list) else x)
        z = self.norm(y)
        if isinstance(x, list):
            return y
        return z

    def _normed(self, y: Tensor, x: Any) -> Tensor:
        if type(x) is list:
            return y
        return self.norm(y)

    def if_list_elsewhere(self, x: Any) -> Any:
        y = self.conv(x[0] if isinstance(x, list) else x)
        return self._normed(y, x)

    def for_each_of_a_list(self, x: Any) -> Any:
        images = x if isinstance(x, list) else []
        outputs = []
        for image in images:
            outputs.append(self.conv(image))
        return outputs[0] if outputs else self.norm(self.conv(x))

    def for_else(self, x: Any) -> Any:
        for image in x if isinstance(x, list) else []:
            y = self.conv(image)
            break
        else:
            y = self.norm(self.conv(x))
        return y

    def while_on_one_line(self, x: Any) -> Any:
        while isinstance(x, list): return self.conv(x[0])  # fmt: skip  # noqa: E701  # its body is on its line
        return self.norm(self.conv(x))

    def if_list_by_flag(self, x: Any) -> Any:
        is_many = False
        if isinstance(x, list):
            x, is_many = x[0], True
        y = self.conv(x)
        return y if is_many else self.norm(y)

    def _raw(self, x: Any) -> Tensor:
        return self.conv(x[0])

    def if_list_in_a_method(self, x: Any) -> Any:
        if isinstance(x, list):
            return self._raw(x)
        return super().forward(x)

    def if_list_in_a_dict(self, x: Any) -> Any:
        return {list: self._raw}.get(type(x), super().forward)(x)

    def _one(self, x: Tensor) -> Tensor:
        return super().forward(x)

    @stays(table=lambda m: {list: m._raw, Tensor: m._one, Proxy: m._one})
    def if_list_in_a_table(self, x: Any) -> Any:
        return self.table[type(x)](x)

    def if_list_by_index(self, x: Any) -> Any:
        is_list = isinstance(x, list)
        y = self.conv(x[0] if is_list else x)
        return [self.norm, nn.Identity()][is_list](y)

    @stays(ends=lambda m: nn.ModuleList([m.norm, nn.Identity()]))
    def if_list_by_submodule(self, x: Any) -> Any:
        return self.ends[isinstance(x, list)](self.conv(x[0] if isinstance(x, list) else x))

    def _steps(self, x: Any) -> Any:
        yield self.conv
        if not isinstance(x, list):
            yield self.norm

    def if_list_in_an_iterator(self, x: Any) -> Any:
        y = x[0] if isinstance(x, list) else x
        for step in self._steps(x):
            y = step(y)
        return y

    def if_list_by_attribute(self, x: Any) -> Any:
        self.is_list = isinstance(x, list)
        return self._rest(x[0] if self.is_list else x)

    def _rest(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y if self.is_list else self.norm(y)

    def if_exact_type(self, x: Any) -> Any:
        y = self.conv(x)
        if type(x) is Tensor:
            return y
        return self.norm(y)

    def if_attribute(self, x: Any) -> Any:
        y = self.conv(x)
        return self.norm(y) if hasattr(x, "mask") else y

    def if_gradients(self, x: Any) -> Any:
        if torch.is_grad_enabled():
            return self.norm(self.conv(x))
        return self.conv(x)

    def if_count_of_calls(self, x: Any) -> Any:
        self.calls += 1
        y = self.conv(x)
        return self.norm(y) if self.calls % 2 else y

    def if_it_fails(self, x: Any) -> Any:
        try:
            return self.norm(self.conv(x.contiguous()))
        except AttributeError:
            return self.conv(x[0])

    def if_it_matches(self, x: Any) -> Any:
        match x:
            case [first, *_]:
                return self.conv(first)
        return self.norm(self.conv(x))


class Dispatches(Block):
    @functools.singledispatchmethod
    def run(self, x: Any) -> Tensor:
        return self.norm(self.conv(x))

    @run.register
    def _(self, x: list) -> Tensor:
        return self.conv(x[0])

    def if_list_by_dispatch(self, x: Any) -> Any:
        return self.run(x)


@torch.fx.wrap
def _first_of(block: nn.Module, x: Tensor) -> Tensor:
    """A function that torch.fx cannot trace."""
    return block.conv(x) if x.sum() > -1e9 else x


def _calls_conv_alone(block: nn.Module, x: Tensor) -> Tensor:
    """A function that torch.fx cannot trace, and that is not marked so."""
    return block.conv(x) if x.sum() > -1e9 else x


def _applies(function: Any, x: Tensor) -> Tensor:
    """A function that torch.fx cannot trace, whatever it is given."""
    return function(x) if x.sum() > -1e9 else x


@torch.fx.wrap
def _first_in(blocks: Any, x: Tensor) -> Tensor:
    """A function that torch.fx cannot trace, and that gets modules in a container."""
    return blocks[0].conv(x) if x.sum() > -1e9 else x


class Outer(nn.Module):
    """Code, most of which cannot be traced, that reaches into a block."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def hands_block_over(self, x: Tensor) -> Tensor:
        return self.block(x) + _first_of(self.block, x)

    def hands_block_over_unmarked(self, x: Tensor) -> Tensor:
        return self.block(x) + _calls_conv_alone(self.block, x)

    def hands_block_over_in_a_tuple(self, x: Tensor) -> Tensor:
        return self.block(x) + _first_in((self.block,), x)

    def hands_block_over_in_a_dict(self, x: Tensor) -> Tensor:
        return self.block(x) + _first_in({0: self.block}, x)

    def hands_method_over(self, x: Tensor) -> Tensor:
        return self.block(x) + _applies(self.block.conv.forward, x)

    @stays("does more with block than call it")
    def reached_into(self, x: Tensor) -> Tensor:
        return x if x.sum() > 1e9 else self.block(x) + self.block.conv(x)

    @stays("does more with block than call it")
    def reached_by_name(self, x: Tensor) -> Tensor:
        return x if x.sum() > 1e9 else self.block(x) + getattr(self, "block").conv(x)  # noqa: B009

    @stays("cannot be traced and also holds it in extra", extra=lambda m: [m.block.conv])
    def held_in_a_list(self, x: Tensor) -> Tensor:
        return x if x.sum() > 1e9 else self.block(x) + self.extra[0](x)

    @stays(extra=lambda m: types.SimpleNamespace(first=functools.partial(m.block.conv)))
    def held_by_an_object(self, x: Tensor) -> Tensor:
        return x if x.sum() > 1e9 else self.block(x) + self.extra.first(x)

    def held_by_a_global_dict(self, x: Tensor) -> Tensor:
        return x if x.sum() > 1e9 else self.block(x) + SHARED["block"].conv(x)


class FindsAttributesOfItsBlock(Outer):
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)

    def own_getattr(self, x: Tensor) -> Tensor:
        return x if x.sum() > 1e9 else self.block(x) + self.conv(x)


for namespace in (Forwards, Branches, Dispatches, Outer, FindsAttributesOfItsBlock):
    add_models(namespace)
