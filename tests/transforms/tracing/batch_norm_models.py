"""Models whose BatchNorms stay: their code, or what they hold, may use a convolution elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.transforms.models import Block
from tests.transforms.tracing.batch_norm_choices import Chooses
from tests.transforms.tracing.batch_norm_forwards import LEFT_BY_FORWARD, Left, Outer, add_models
from tests.transforms.tracing.batch_norm_variables import Attributes, Behind, Collects, Variables


class CallsTwice(Block):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) + self.conv(x)


class OwnConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).abs()


def _held_by_closure() -> nn.Module:
    class Closes(Outer):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 1e9 else self.block(x) + held.block.conv(x)

    model = held = Closes()
    return model


def _reads(read: Callable[[Block], Any]) -> Left:
    """A model that adds something that it finds in its own weights or statistics."""

    class Reads(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + read(self)

    return Left(Reads)


def _untraceable(reach: Callable[[Any], Any]) -> Left:
    """A model that cannot be traced, and calls the convolution of its block in some other way."""

    class Reaches(Outer):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 1e9 else self.block(x) + reach(self)(x)

    return Left(Reaches)


def _sequence(reason: str, *modules: nn.Module) -> Left:
    return Left(lambda: nn.Sequential(*copy.deepcopy(modules)), reason)


def _changed(reason: str, change: Callable[[Any], object]) -> Left:
    """A block, changed in some way."""

    def make() -> nn.Module:
        model = Block()
        change(model)
        return model

    return Left(make, reason)


def hook(*_: Any) -> None: ...


def _tied() -> nn.Module:
    model = nn.Sequential(Block(), Block())
    model[1].conv.weight = model[0].conv.weight
    return model


for namespace in (Chooses, Collects, Variables, Attributes, Behind):
    add_models(namespace)
_CONV, _NORM = nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)
LEFT = LEFT_BY_FORWARD | {
    "overrides __call__": Left(CallsTwice, "overrides __call__"),
    "held by a closure": Left(_held_by_closure),
    "weight tied": Left(_tied, "shares its weight"),
    "conv shared": _sequence("also feeds", _CONV, _NORM, _CONV, nn.ReLU()),
    "conv shared by norms": _sequence("also feeds", _CONV, _NORM, _CONV, nn.BatchNorm2d(3)),
    "norm shared": _sequence("follows", _CONV, _NORM, nn.Conv2d(3, 3, 3), _NORM),
    "conv with code": _sequence("follows abs", OwnConv(3, 3, 3), _NORM),
    "no statistics": _sequence(
        "no running statistics", _CONV, nn.BatchNorm2d(3, track_running_stats=False)
    ),
    "norm first": _sequence("follows the argument", _NORM, _CONV),
    "activation between": _sequence(r"follows 1 \(ReLU\)", _CONV, nn.ReLU(), _NORM),
    "synchronised": _sequence("overrides its methods", _CONV, nn.SyncBatchNorm(3)),
    "mixed dtypes": _sequence("differs in dtype", nn.Conv2d(3, 3, 3).bfloat16(), _NORM),
    "hook on conv": _changed("conv has hooks", lambda m: m.conv.register_forward_hook(hook)),
    "hook on norm": _changed("norm has hooks", lambda m: m.norm.register_forward_hook(hook)),
    "pre-hook": _changed("conv has hooks", lambda m: m.conv.register_forward_pre_hook(hook)),
    "backward hook": _changed("norm has hooks", lambda m: m.norm.register_full_backward_hook(hook)),
    "parametrized": _changed("computed from", lambda m: parametrizations.weight_norm(m.conv)),
    "forward replaced": _changed(
        "overrides its methods", lambda m: setattr(m.conv, "forward", lambda x: x * 2)
    ),
    "not finite": _changed("infinite or NaN", lambda m: m.norm.running_var.fill_(torch.nan)),
    "parameters()": _reads(lambda m: sum(p.sum() for p in m.parameters())),
    "one of parameters()": _reads(lambda m: next(m.parameters()).mean()),
    "named_parameters()": _reads(lambda m: dict(m.named_parameters())["conv.weight"].sum()),
    "buffers()": _reads(lambda m: sum(b.sum() for b in m.buffers())),
    "modules()": _reads(lambda m: sum(c.weight.sum() for c in [*m.modules()][1:])),
    "children()": _reads(lambda m: next(m.children()).weight.sum()),
    "named_modules()": _reads(lambda m: dict(m.named_modules())["conv"].weight.sum()),
    "state_dict()": _reads(lambda m: m.state_dict()["norm.running_var"].sum()),
    "vars(self)": _reads(lambda m: vars(m)["_modules"]["conv"]._parameters["weight"].sum()),
    "self._modules": _reads(lambda m: m._modules["conv"].bias.sum()),
    "self.__dict__": _reads(lambda m: m.__dict__["_modules"]["norm"]._buffers["running_var"].sum()),
    "getattr(self, name)": _reads(lambda m: getattr(m, "co" + "nv").weight.sum()),
    "get_submodule": _reads(lambda m: m.get_submodule("conv").weight.sum()),
    "get_parameter": _reads(lambda m: m.get_parameter("conv.weight").sum()),
    "get_buffer": _reads(lambda m: m.get_buffer("norm.running_mean").sum()),
    "numpy()": _reads(lambda m: float(next(m.conv.parameters()).detach().numpy().sum())),
    "item()": _reads(lambda m: next(m.conv.parameters()).flatten()[0].item()),
    "untraceable, modules()": _untraceable(lambda m: [*m.modules()][2]),
    "untraceable, _modules": _untraceable(lambda m: m._modules["block"].conv),
    "untraceable, get_submodule": _untraceable(lambda m: m.get_submodule("block.conv")),
    "untraceable, vars": _untraceable(lambda m: vars(m)["_modules"]["block"].conv),
    "untraceable, getattr": _untraceable(lambda m: getattr(m, "blo" + "ck").conv),
    "untraceable, buffers": _untraceable(lambda m: lambda x: x + sum(b.sum() for b in m.buffers())),
}
