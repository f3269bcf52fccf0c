"""Models whose forward asks layers what they are, and returns something else for other answers."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Layers(nn.Module):
    """A list with a layer of each kind that a pass may rewrite; subclasses ask it something."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 3, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Dropout(),
            nn.Conv2d(32, 32, 3),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(32 * 16, 16),
            nn.GELU(approximate="tanh"),
        )

    def forward(self, x: Tensor) -> Any:
        found = []
        for layer in self.layers:
            x = layer(x)
            if self.asks(layer):
                found.append(x)
        return [*found, x]

    def asks(self, layer: nn.Module) -> bool:
        raise NotImplementedError


class IsInstance(Layers):
    kind: type[nn.Module] | tuple[type[nn.Module], ...] = nn.ReLU

    def asks(self, layer: nn.Module) -> bool:
        return isinstance(layer, self.kind)


class IsNorm(IsInstance):
    kind = nn.BatchNorm2d


class IsDropout(IsInstance):
    kind = nn.Dropout


class IsIdentity(IsInstance):
    kind = nn.Identity


class IsAnyActivation(IsInstance):
    kind = (nn.SiLU, nn.GELU)


class HasType(Layers):
    def asks(self, layer: nn.Module) -> bool:
        return type(layer) in (nn.Conv2d, nn.Linear, nn.GELU, nn.Dropout)


class HasClass(Layers):
    def asks(self, layer: nn.Module) -> bool:
        return layer.__class__ is nn.Linear


class HasName(Layers):
    def asks(self, layer: nn.Module) -> bool:
        return layer.__class__.__name__.endswith("Conv2d")


class HasRepr(Layers):
    def asks(self, layer: nn.Module) -> bool:
        return repr(layer).startswith("ReLU")


class HasStatistics(Layers):
    def asks(self, layer: nn.Module) -> bool:
        return hasattr(layer, "running_mean")


class HasBias(Layers):
    def asks(self, layer: nn.Module) -> bool:
        return getattr(layer, "bias", None) is not None


class HasParameters(Layers):
    def asks(self, layer: nn.Module) -> bool:
        return len(list(layer.parameters())) > 1


class Matches(Layers):
    def asks(self, layer: nn.Module) -> bool:
        match layer:
            case nn.ReLU() | nn.BatchNorm2d():
                return True
        return False


class Counts(Layers):
    """Counts parameters: a number, not a branch, depends on them."""

    def forward(self, x: Tensor) -> Any:
        return self.layers(x) * sum(1 for _ in self.parameters())


class CountsInTensor(Layers):
    def forward(self, x: Tensor) -> Any:
        return self.layers(x) * torch.tensor(float(len(list(self.parameters()))))


class Comprehends(Layers):
    def forward(self, x: Tensor) -> Any:
        kept = [layer for layer in self.layers if not isinstance(layer, nn.SiLU)]
        return nn.Sequential(*kept)(x) if len(kept) == 9 else self.layers(x) + len(kept)


class Maps(Layers):
    def forward(self, x: Tensor) -> Any:
        kinds = list(map(type, self.layers))
        return self.layers(x) * (1 + kinds.index(nn.ReLU) if nn.ReLU in kinds else 1)


@functools.singledispatch
def weight_of(layer: nn.Module) -> int:
    return 1


@weight_of.register
def _(layer: nn.ReLU) -> int:
    return 2


class Dispatches(Layers):
    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x) * weight_of(layer)
        return x


class FindsByName(Layers):
    def forward(self, x: Tensor) -> Any:
        y = self.layers(x)
        return 2 * y if isinstance(getattr(self.layers, "2"), nn.ReLU) else y


class Returns(Layers):
    def pick(self, place: int) -> nn.Module:
        return self.layers[place]

    def forward(self, x: Tensor) -> Any:
        return self.layers(x) * (2 if type(self.pick(7)) is nn.Linear else 1)


class _Untraceable(Layers):
    """A forward that torch.fx cannot trace: a value decides."""

    def forward(self, x: Tensor) -> Any:
        y = x if x.sum() > 1e9 else x / 2
        return super().forward(y)


class UntraceableInstance(_Untraceable, IsInstance):
    kind = (nn.ReLU, nn.BatchNorm2d, nn.Dropout)


class UntraceableLoop(Layers):
    def forward(self, x: Tensor) -> Any:
        found = []
        for layer in self.layers:
            x = layer(x)
            if type(layer) in (nn.Conv2d, nn.GELU) and x.sum() < 1e9:
                found.append(x)
        return [*found, x]


class UntraceableChild(Layers):
    def forward(self, x: Tensor) -> Any:
        y = self.layers(x)
        if x.sum() < 1e9 and isinstance(self.layers[2], nn.ReLU):
            y = y + 1
        return y * 2 if self.layers[7].__class__ is nn.Linear else y


class UntraceableList(Layers):
    def forward(self, x: Tensor) -> Any:
        y = self.layers(x) if x.sum() < 1e9 else x
        _, *others = list(self.layers.children())
        names = [type(each).__name__ for each in others]
        return y * (1 + names.count("Linear") + names.count("ReLU"))


def doubled_if_linear(layer: nn.Module, y: Tensor) -> Tensor:
    return y * 2 if type(layer) is nn.Linear else y


class UntraceableHelper(Layers):
    def forward(self, x: Tensor) -> Any:
        y = self.layers(x) if x.sum() < 1e9 else x
        return doubled_if_linear(self.layers[7], y)


def doubled_if_small(layer: nn.Module, y: Tensor) -> Tensor:
    """A function that torch.fx cannot trace."""
    if y.sum() > 1e9:
        return y
    return y * 2 if isinstance(layer, nn.ReLU) else y


class UntraceableFunction(Layers):
    def forward(self, x: Tensor) -> Any:
        return doubled_if_small(self.layers[2], self.layers(x))


class DidNotRun(Layers):
    """Asks only if it gets a list, which no trace gives it."""

    def forward(self, x: Any) -> Any:
        if isinstance(x, list):
            x = x[0] * (2 if isinstance(self.layers[2], nn.ReLU) else 1)
            return [
                y for layer in self.layers if type(layer) is nn.Conv2d and (y := x + 1) is not x
            ]
        return self.layers(x)


class Remembers(Layers):
    """Computes the same in each trace only from the second on."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = _kinds

    def forward(self, x: Tensor) -> Any:
        return self.layers(x) * self.kinds(tuple(self.layers))


_SCALES: list[int] = []


def _scale() -> int:
    if not _SCALES:
        _SCALES.append(3)
    return _SCALES[0]


def _kinds(layers: tuple[nn.Module, ...]) -> int:
    return _scale() * sum(isinstance(layer, nn.ReLU) for layer in layers)


class AsksTwice(Layers):
    """One class decides one answer alone; two others decide another together."""

    def forward(self, x: Tensor) -> Any:
        y = self.layers(x)
        if isinstance(self.layers[3], nn.Dropout):
            y = y * 2
        kinds = (nn.ReLU, nn.BatchNorm2d)
        return y * (3 if any(isinstance(layer, kinds) for layer in self.layers) else 1)


class HasModule(Layers):
    def asks(self, layer: nn.Module) -> bool:
        return type(layer).__module__.startswith("torch.nn")


class AsksInEvaluation(Layers):
    def forward(self, x: Tensor) -> Any:
        y = self.layers(x)
        if not self.training and type(self.layers[3]) is nn.Dropout:
            y = y * 2
        return y


class UntraceableGenerator(_Untraceable):
    def kinds(self) -> Iterator[str]:
        for layer in self.layers:
            yield type(layer).__name__

    def asks(self, layer: nn.Module) -> bool:
        return "Dropout" in self.kinds()


class UntraceableProperty(_Untraceable):
    @property
    def has_dropout(self) -> bool:
        return any(isinstance(layer, nn.Dropout) for layer in self.layers)

    def asks(self, layer: nn.Module) -> bool:
        return self.has_dropout


@dataclasses.dataclass
class Holder:
    layer: nn.Module

    def is_linear(self) -> bool:
        return type(self.layer) is nn.Linear


class UntraceableHolder(_Untraceable):
    def asks(self, layer: nn.Module) -> bool:
        return Holder(layer).is_linear()


class UntraceableDisplay(_Untraceable):
    def asks(self, layer: nn.Module) -> bool:
        found = {"a": layer} | {"b": [*self.layers][3]}
        return isinstance(found["b"], nn.Dropout)


class UntraceableAttribute(_Untraceable):
    def asks(self, layer: nn.Module) -> bool:
        return hasattr(layer, "eps")


class UntraceableBias(_Untraceable):
    def asks(self, layer: nn.Module) -> bool:
        return getattr(layer, "bias", None) is None


def doubled_if_any_dropout(y: Tensor, *layers: nn.Module) -> Tensor:
    """A function that torch.fx cannot trace."""
    if y.sum() > 1e9:
        return y
    return y * 2 if any(map(is_dropout, layers)) else y


def is_dropout(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Dropout)


class UntraceableStarred(Layers):
    def forward(self, x: Tensor) -> Any:
        return doubled_if_any_dropout(self.layers(x), *self.layers)


class Checkpoints(nn.Module):
    """Its body is called by torch's code alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body = IsDropout()

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.body, x, use_reentrant=False)


class OverridesCall(IsDropout):
    def __call__(self, x: Tensor) -> Any:
        y = super().__call__(x)
        return y if isinstance(self.layers[2], nn.ReLU) else y[:1]


def replaced_forward() -> Layers:
    model = Layers()
    model.forward = IsDropout.forward.__get__(model)  # type: ignore[method-assign]
    model.asks = IsAnyActivation.asks.__get__(model)  # type: ignore[method-assign,attr-defined]
    model.kind = nn.Dropout
    return model


class Outer(nn.Module):
    """Does something else in each call, and calls a child that asks."""

    def __init__(self) -> None:
        super().__init__()
        self.body = IsDropout()

    def forward(self, x: Tensor) -> Any:
        global _calls
        _calls += 1
        return [y + 0 * _calls for y in self.body(x)]


class Exits(Layers):
    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            if not layer.__class__.__module__.startswith("torch"):
                sys.exit("an unknown layer")
        return self.layers(x)


_calls = 0


class ChangesInEachCall(Layers):
    """No two traces are equal."""

    def forward(self, x: Tensor) -> Any:
        global _calls
        _calls += 1
        y = self.layers(x) + 0 * x.sum() * _calls
        return 2 * y if isinstance(self.layers[2], nn.ReLU) else y


ASKING: list[Callable[[], nn.Module]] = [
    *(IsInstance, IsNorm, IsDropout, IsIdentity, IsAnyActivation, HasType, HasClass, HasName),
    *(
        HasRepr,
        HasStatistics,
        HasBias,
        HasParameters,
        Matches,
        Counts,
        CountsInTensor,
        Comprehends,
        Maps,
    ),
    *(Dispatches, FindsByName, Returns, UntraceableInstance, UntraceableLoop, UntraceableChild),
    *(UntraceableList, UntraceableHelper, UntraceableFunction, DidNotRun, Remembers),
    *(ChangesInEachCall, AsksTwice, HasModule, AsksInEvaluation, UntraceableGenerator),
    *(UntraceableProperty, UntraceableHolder, UntraceableDisplay, UntraceableAttribute),
    *(
        UntraceableBias,
        UntraceableStarred,
        Checkpoints,
        OverridesCall,
        replaced_forward,
        Outer,
        Exits,
    ),
]


class Plain(Layers):
    """Asks nothing about its layers, though it asks about other things."""

    def forward(self, x: Tensor, scale: float | None = None) -> Any:
        if not isinstance(x, Tensor) or (scale is not None and type(scale) is not float):
            raise TypeError(f"{type(self).__name__} takes a tensor")
        y = self.layers(x)
        return y if getattr(self, "scale", None) is None else y * torch.tensor(2.0)


class PlainUntraceable(Plain):
    """Names a class in the text of an error alone."""

    def forward(self, x: Tensor, scale: float | None = None) -> Any:
        if x.sum() > 1e9:
            raise RuntimeError(f"{type(self.layers[0]).__name__} returns {x.sum()}")
        return super().forward(x, scale)
