"""Models whose BatchNorms stay, as their ``forward`` has the convolution in a variable."""

from __future__ import annotations

import collections
import functools
from typing import Any

from torch import Tensor, nn

from tests.transforms.tracing.batch_norm_forwards import stays


def pair() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3))


class Collects(nn.Module):
    """Code that cannot be traced, and returns the output of each layer."""

    @stays("does more with layers than call it", layers=lambda m: pair())
    def iterated_over(self, x: Tensor) -> list[Tensor]:
        outputs = []
        for layer in self.layers:
            x = layer(x)
            if x.sum() > -1e9:
                outputs.append(x)
        return outputs

    @stays("does more with stages than call it", stages=lambda m: nn.ModuleList([pair()]))
    def iterated_over_in_lists(self, x: Tensor) -> list[Tensor]:
        outputs = []
        for stage in self.stages:
            for layer in stage:
                x = layer(x)
                if x.sum() > -1e9:
                    outputs.append(x)
        return outputs


_NOT_RUN = "code of .* that did not run"


class Variables(nn.Module):
    """Code that uses its convolutions alone under a condition that tracing does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList([pair(), pair()])

    @stays(_NOT_RUN)
    def in_a_loop(self, x: Any) -> Any:
        found = []
        for conv, norm in self.pairs:
            found.append(conv(x[0]) if isinstance(x, list) else norm(conv(x)))
        return found

    @stays(_NOT_RUN)
    def in_a_loop_that_ends_early(self, x: Any) -> Any:
        for conv, norm in self.pairs:
            y = conv(x[0]) if isinstance(x, list) else norm(conv(x))
            if norm is self.pairs[1][1]:
                break
            x = [y] if isinstance(x, list) else y
        return y

    @stays(_NOT_RUN)
    def in_a_list(self, x: Any) -> Any:
        return [c(x[0]) if isinstance(x, list) else n(c(x)) for c, n in self.pairs]

    @stays(_NOT_RUN)
    def in_a_dict(self, x: Any) -> Any:
        pairs = enumerate(self.pairs)
        return {i: c(x[0]) if isinstance(x, list) else n(c(x)) for i, (c, n) in pairs}

    @stays(_NOT_RUN)
    def in_an_iterator(self, x: Any) -> Any:
        return tuple(c(x[0]) if isinstance(x, list) else n(c(x)) for c, n in self.pairs)

    @stays(_NOT_RUN)
    def in_a_variable_that_changes(self, x: Any) -> Any:
        conv, norm = self.pairs[0]
        y = conv(x[0]) if isinstance(x, list) else norm(conv(x))
        conv, norm = self.pairs[1]
        return y, conv(x[0]) if isinstance(x, list) else norm(conv(x))


class Attributes(nn.Module):
    """Code that uses a convolution's attribute under a condition that tracing does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = pair()

    @stays(_NOT_RUN)
    def weight(self, x: Any) -> Tensor:
        conv, norm = self.layers
        if isinstance(x, list):
            return conv.weight.sum()
        return norm(conv(x))

    @stays(_NOT_RUN)
    def statistics(self, x: Any) -> Tensor:
        conv, norm = self.layers
        if isinstance(x, list):
            return norm.running_mean.sum()
        return norm(conv(x))

    @stays(_NOT_RUN)
    def own_forward(self, x: Any) -> Tensor:
        conv, norm = self.layers
        if isinstance(x, list):
            return conv.forward(x[0])
        return norm(conv(x))

    @stays(_NOT_RUN)
    def items(self, x: Any) -> Tensor:
        layers = self.layers
        if isinstance(x, list):
            return layers.__getitem__(0)(x[0])
        return layers(x)

    @stays("has tensors that forward reads directly")
    def weight_in_a_list(self, x: Any) -> Tensor:
        weights = [self.layers[0].weight]
        if isinstance(x, list):
            return weights[0].sum()
        return self.layers(x)


class _Slot:
    __slots__ = ("module",)

    def __init__(self, module: nn.Module) -> None:
        self.module = module


class Behind(Attributes):
    """Code that uses a convolution behind another object in a variable."""

    @stays(_NOT_RUN)
    def in_a_partial(self, x: Any) -> Tensor:
        alone = functools.partial(_apply, self.layers[0])
        if isinstance(x, list):
            return alone(x[0])
        return self.layers(x)

    @stays(_NOT_RUN)
    def in_a_partial_next_to_a_module(self, x: Any) -> Tensor:
        both = [nn.Identity(), functools.partial(_apply, self.layers[0])]
        if isinstance(x, list):
            return both[1](x[0])
        return self.layers(x)

    @stays(_NOT_RUN)
    def in_a_slot(self, x: Any) -> Tensor:
        slot = _Slot(self.layers[0])
        if isinstance(x, list):
            return slot.module(x[0])
        return self.layers(x)

    @stays(_NOT_RUN)
    def in_a_queue(self, x: Any) -> Tensor:
        waiting = collections.deque([self.layers[0]])
        if isinstance(x, list):
            return waiting.pop()(x[0])
        return self.layers(x)

    @stays(_NOT_RUN)
    def in_a_generator(self, x: Any) -> Tensor:
        layers = self.layers
        outputs = (layer(x[0]) for layer in layers)
        if isinstance(x, list):
            return next(outputs)
        return layers(x)

    @stays(_NOT_RUN)
    def in_a_method(self, x: Any) -> Tensor:
        alone = self.layers[0].forward
        if isinstance(x, list):
            return alone(x[0])
        return self.layers(x)

    @stays(_NOT_RUN)
    def in_a_closure(self, x: Any) -> Tensor:
        conv = self.layers[0]

        def alone() -> Tensor:
            return conv(x[0])

        if isinstance(x, list):
            return alone()
        return self.layers(x)


def _apply(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)
