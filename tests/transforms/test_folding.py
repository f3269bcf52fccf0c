"""BatchNorms folded: right where they are, and left alone where folding would be wrong."""

from __future__ import annotations

import copy
import functools
import re
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.utils import parametrizations

from fusedoptim import transforms
from tests.transforms.helpers import assert_right, fingerprint, randomise
from tests.transforms.models import FOLDED, images
from transforms.rewrites import fold

CONV, LINEAR = "conv_bn_folding", "linear_bn_folding"


def optimize(model: nn.Module) -> tuple[nn.Module, transforms.Report]:
    optimized = transforms.optimize(model, auto_channels_last=False)
    return optimized, transforms.report(optimized)


@pytest.mark.parametrize("name", FOLDED)
def test_sequence_is_folded(name: str) -> None:
    make, shape = FOLDED[name]
    model = randomise(nn.Sequential(*make()))
    optimized, report = optimize(model)
    assert isinstance(optimized[1], nn.Identity)
    assert type(optimized[0]) is type(model[0])
    assert [entry.where for entry in report.done(CONV) + report.done(LINEAR)] == ["1"]
    assert sum(p.numel() for p in optimized[1].parameters()) == 0
    assert_right(optimized, model, torch.randn(shape))


def test_folded_weight_is_rounded_once() -> None:
    model = randomise(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
    conv, norm = model[0], model[1]
    scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    weight = conv.weight.double() * scale.reshape(-1, 1, 1, 1)
    bias = norm.bias.double() + scale * (conv.bias.double() - norm.running_mean.double())
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        optimized = transforms.optimize(model, dtype=dtype)
        assert torch.equal(optimized[0].weight, weight.to(dtype))
        assert torch.equal(optimized[0].bias, bias.to(dtype))


class Block(nn.Module):
    """A convolution and a BatchNorm, used in some way."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu()


class TwoConsumers(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.norm(y) + y


class ReturnsBoth(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.conv(x)
        return self.norm(y), y


class ChangedBetween(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y += 1
        return self.norm(y)


class ChangedInPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y[0].zero_()
        return self.norm(y)


class KeepsOutput(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.last = self.conv(x)
        return self.norm(self.last)


class KeepsInList(Block):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.clear()
        y = self.conv(x)
        self.seen.append(y)
        return self.norm(y), self.seen[0]


class KeepsInObject(Block):
    def __init__(self) -> None:
        super().__init__()
        self.seen = types.SimpleNamespace()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.last = self.conv(x)
        return self.norm(self.seen.last)


class ReadsWeight(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)) + self.conv.weight.sum()


class ReadsNorm(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)) + self.norm.running_mean.sum()


class CalledTwice(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)) + self.conv(x)


class NormCalledTwice(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)) + self.norm(x)


class DependsOnArgument(Block):
    def forward(self, x: Tensor, raw: Tensor | None = None) -> Tensor:
        y = self.conv(x)
        return self.norm(y) if raw is None else y + raw


class DependsOnGivenArgument(Block):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = self.conv(x)
        return y if scale is None else self.norm(y) * scale


class DependsOnType(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y + self.norm(y) if isinstance(x, Tensor) else self.norm(y)


class DependsOnData(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.norm(y) if x.sum() > 0 else y


class ReachesIn(nn.Module):
    """Cannot be traced, and uses the convolution of its block by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            return x
        return self.block(x) + self.block.conv(x)


class Iterates(nn.Module):
    """Cannot be traced, and collects what each layer returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        outputs = []
        for layer in self.layers:
            x = layer(x)
            if x.sum() > -1e9:
                outputs.append(x)
        return outputs


class NestedLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3))])

    def forward(self, x: Tensor) -> list[Tensor]:
        outputs = []
        for stage in self.stages:
            for layer in stage:
                x = layer(x)
                if x.sum() > -1e9:
                    outputs.append(x)
        return outputs


class CallsTwice(Block):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) + self.conv(x)


class HoldsBesides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.extra = [self.block.conv]

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            return x
        return self.block(x) + self.extra[0](x)


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            return x
        return self.block(x) + getattr(self, "block").conv(x)  # noqa: B009


class OwnConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).abs()


def _sequence(*modules: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*copy.deepcopy(modules))


def _tied() -> nn.Module:
    model = nn.Sequential(Block(), Block())
    model[1].conv.weight = model[0].conv.weight
    return model


def _shared_conv() -> nn.Module:
    conv = nn.Conv2d(3, 3, 3)
    return nn.Sequential(conv, nn.BatchNorm2d(3), conv, nn.ReLU())


def _shared_conv_two_norms() -> nn.Module:
    conv = nn.Conv2d(3, 3, 3)
    return nn.Sequential(conv, nn.BatchNorm2d(3), conv, nn.BatchNorm2d(3))


def _shared_norm() -> nn.Module:
    norm = nn.BatchNorm2d(3)
    return nn.Sequential(nn.Conv2d(3, 3, 3), norm, nn.Conv2d(3, 3, 3), norm)


def _hooked(register: str, where: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Block()
        getattr(getattr(model, where), register)(lambda *_: None)
        return model

    return make


def _parametrized() -> nn.Module:
    model = Block()
    parametrizations.weight_norm(model.conv)
    return model


def _replaced_forward() -> nn.Module:
    model = Block()
    model.conv.forward = lambda x: x * 2
    return model


def _infinite() -> nn.Module:
    model = Block()
    model.norm.running_var.fill_(float("nan"))
    return model


LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "two consumers": (TwoConsumers, "also feeds"),
    "returned too": (ReturnsBoth, "also feeds what forward returns"),
    "changed between": (ChangedBetween, "follows"),
    "changed in place": (ChangedInPlace, "also feeds"),
    "kept": (KeepsOutput, "stored where other code may read it"),
    "kept in a list": (KeepsInList, "also feeds|stored"),
    "kept in an object": (KeepsInObject, "stored where other code may read it"),
    "own __call__": (CallsTwice, "overrides __call__"),
    "in a list besides": (HoldsBesides, "cannot be traced and also holds it in extra"),
    "weight read": (ReadsWeight, "conv has tensors that forward reads directly"),
    "norm read": (ReadsNorm, "norm has tensors that forward reads directly"),
    "conv called twice": (CalledTwice, "also feeds"),
    "norm called twice": (NormCalledTwice, "follows"),
    "by argument": (DependsOnArgument, "in use where forward evaluates a condition"),
    "by given argument": (
        DependsOnGivenArgument,
        "code of DependsOnGivenArgument that did",
    ),
    "by type": (DependsOnType, "also feeds"),
    "by data": (DependsOnData, "called by DependsOnData, whose forward cannot be traced"),
    "reached into": (ReachesIn, "does more with block than call it"),
    "reached by name": (ByName, "does more with block than call it"),
    "iterated over": (Iterates, "does more with layers than call it"),
    "iterated over in lists": (NestedLists, "does more with stages than call it"),
    "weight tied": (_tied, "shares its weight"),
    "conv shared": (_shared_conv, "also feeds"),
    "conv shared by two norms": (_shared_conv_two_norms, "also feeds"),
    "norm shared": (_shared_norm, "follows"),
    "forward hook on conv": (_hooked("register_forward_hook", "conv"), "conv has hooks"),
    "forward hook on norm": (_hooked("register_forward_hook", "norm"), "norm has hooks"),
    "pre-hook on conv": (_hooked("register_forward_pre_hook", "conv"), "conv has hooks"),
    "backward hook": (_hooked("register_full_backward_hook", "norm"), "norm has hooks"),
    "parametrized": (_parametrized, "computed from others"),
    "forward replaced": (_replaced_forward, "overrides its methods"),
    "conv with code": (_sequence(OwnConv(3, 3, 3), nn.BatchNorm2d(3)), "follows abs"),
    "no statistics": (
        _sequence(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3, track_running_stats=False)),
        "no running statistics",
    ),
    "norm first": (_sequence(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3)), "follows the argument"),
    "activation between": (
        _sequence(nn.Conv2d(3, 3, 3), nn.ReLU(), nn.BatchNorm2d(3)),
        r"follows 1 \(ReLU\)",
    ),
    "synchronised": (_sequence(nn.Conv2d(3, 3, 3), nn.SyncBatchNorm(3)), "overrides its methods"),
    "mixed dtypes": (
        _sequence(nn.Conv2d(3, 3, 3).bfloat16(), nn.BatchNorm2d(3)),
        "differs in dtype",
    ),
    "not finite": (_infinite, "infinite or NaN"),
}


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.filterwarnings("ignore:SyncBatchNorm")
def test_left_alone_and_why(name: str) -> None:
    make, reason = LEFT[name]
    model = make()
    if name == "not finite":
        model.eval()
    else:
        randomise(model)
    optimized, report = optimize(model)
    assert report.done(CONV) == []
    reasons = " | ".join(entry.what for entry in report.left(CONV))
    assert re.search(reason, reasons), reasons
    if name not in ("synchronised", "not finite"):
        x = images().bfloat16() if name == "mixed dtypes" else images()
        with torch.no_grad():
            _assert_equal(optimized(x), copy.deepcopy(model)(x))


def _assert_equal(actual: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert torch.equal(actual, expected)
    else:
        for a, e in zip(actual, expected):
            _assert_equal(a, e)


@torch.fx.wrap
def _first_of(block: nn.Module, x: Tensor) -> Tensor:
    """torch.fx cannot trace it."""
    return block.conv(x) if x.sum() > -1e9 else x


def _calls_conv_alone(block: nn.Module, x: Tensor) -> Tensor:
    """Nor can it trace this one."""
    return block.conv(x) if x.sum() > -1e9 else x


def _applies(function: Any, x: Tensor) -> Tensor:
    """Nor this one, whatever it is given."""
    return function(x) if x.sum() > -1e9 else x


_SHARED: dict[str, nn.Module] = {}


def _reads(read: Callable[[Block], Any]) -> Callable[[], nn.Module]:
    """Adds something that it finds in its own weights or statistics."""

    class Reads(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + read(self)

    return Reads


class ExchangesWeight(Block):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.randn(3, 3, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        weights = {"weight": self.other}
        return self.norm(torch.func.functional_call(self.conv, weights, (x,)))


class WritesWeight(Block):
    def forward(self, x: Tensor) -> Tensor:
        for p in self.conv.parameters():
            p.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class SetsWeight(Block):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.randn(3, 3, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.conv.weight.data = self.other.data
        return super().forward(x)


class HandsOverParent(nn.Module):
    function: Any = staticmethod(_first_of)

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + _first_of(self.block, x)


class HandsOverParentUnmarked(HandsOverParent):
    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + _calls_conv_alone(self.block, x)


class HandsOverSelf(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + _calls_conv_alone(self, x)


class HandsOverGlobal(HandsOverParent):
    def __init__(self) -> None:
        super().__init__()
        _SHARED["block"] = self.block

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            return x
        return self.block(x) + _SHARED["block"].conv(x)


class HandsOverMethod(HandsOverParent):
    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + _applies(self.block.conv.forward, x)


class HoldsInObject(HandsOverParent):
    def __init__(self) -> None:
        super().__init__()
        self.extra = types.SimpleNamespace(first=functools.partial(self.block.conv))

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            return x
        return self.block(x) + self.extra.first(x)


def _held_by_closure() -> nn.Module:
    class Closes(HandsOverParent):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 1e9:
                return x
            return self.block(x) + held.block.conv(x)

    model = held = Closes()
    return model


class Forwards(nn.Module):
    """Cannot be traced, and finds the attributes of its block as its own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            return x
        return self.block(x) + self.conv(x)


def _untraceable(reach: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    """Cannot be traced, and calls the convolution of its block by some way around."""

    class Reaches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 1e9:
                return x
            return self.block(x) + reach(self)(x)

    return Reaches


class IfList(Block):
    def forward(self, x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [self.conv(each) for each in x]
        return self.norm(self.conv(x))


class IfListInline(Block):
    def forward(self, x: Any) -> Any:
        return self.conv(x[0]) if isinstance(x, list) else self.norm(self.conv(x))


class IfListBetween(Block):
    def forward(self, x: Any) -> Any:
        y = self.conv(x[0] if isinstance(x, list) else x)
        if not isinstance(x, list):
            y = self.norm(y)
        return y


class IfListLater(Block):
    def forward(self, x: Any) -> Any:
        y = self.conv(x[0] if isinstance(x, list) else x)
        z = self.norm(y)
        if isinstance(x, list):
            return y
        return z


class IfListElsewhere(Block):
    """The condition is in another function."""

    def normed(self, y: Tensor, x: Any) -> Tensor:
        if type(x) is list:
            return y
        return self.norm(y)

    def forward(self, x: Any) -> Any:
        y = self.conv(x[0] if isinstance(x, list) else x)
        return self.normed(y, x)


class IfListByFlag(Block):
    def forward(self, x: Any) -> Any:
        is_many = False
        if isinstance(x, list):
            x, is_many = x[0], True
        y = self.conv(x)
        return y if is_many else self.norm(y)


class IfListHelper(Block):
    def raw(self, x: Any) -> Tensor:
        return self.conv(x[0])

    def forward(self, x: Any) -> Any:
        if isinstance(x, list):
            return self.raw(x)
        return super().forward(x)


class IfExactTensor(Block):
    def forward(self, x: Any) -> Any:
        y = self.conv(x)
        if type(x) is Tensor:
            return y
        return self.norm(y)


class IfAttribute(Block):
    def forward(self, x: Any) -> Any:
        y = self.conv(x)
        return self.norm(y) if hasattr(x, "mask") else y


class IfGradients(Block):
    def forward(self, x: Any) -> Any:
        if torch.is_grad_enabled():
            return self.norm(self.conv(x))
        return self.conv(x)


class IfCounted(Block):
    calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        y = self.conv(x)
        return self.norm(y) if self.calls % 2 else y


class IfFails(Block):
    def forward(self, x: Any) -> Any:
        try:
            return self.norm(self.conv(x.contiguous()))
        except AttributeError:
            return self.conv(x[0])


class IfMatches(Block):
    def forward(self, x: Any) -> Any:
        match x:
            case [first, *_]:
                return self.conv(first)
        return self.norm(self.conv(x))


class IfListInDict(Block):
    def many(self, x: Any) -> Tensor:
        return self.conv(x[0])

    def forward(self, x: Any) -> Any:
        return {list: self.many}.get(type(x), super().forward)(x)


class IfListInTable(IfListInDict):
    def __init__(self) -> None:
        super().__init__()
        self.table = {list: self.many, Tensor: super().forward, Proxy: super().forward}

    def forward(self, x: Any) -> Any:
        return self.table[type(x)](x)


class IfListByIndex(Block):
    def forward(self, x: Any) -> Any:
        is_list = isinstance(x, list)
        y = self.conv(x[0] if is_list else x)
        return [self.norm, nn.Identity()][is_list](y)


class IfListBySubmodule(Block):
    def __init__(self) -> None:
        super().__init__()
        self.ends = nn.ModuleList([self.norm, nn.Identity()])

    def forward(self, x: Any) -> Any:
        return self.ends[isinstance(x, list)](self.conv(x[0] if isinstance(x, list) else x))


class IfListInIterator(Block):
    def steps(self, x: Any) -> Any:
        yield self.conv
        if not isinstance(x, list):
            yield self.norm

    def forward(self, x: Any) -> Any:
        y = x[0] if isinstance(x, list) else x
        for step in self.steps(x):
            y = step(y)
        return y


class IfListByAttribute(Block):
    def forward(self, x: Any) -> Any:
        self.is_list = isinstance(x, list)
        return self.rest(x[0] if self.is_list else x)

    def rest(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y if self.is_list else self.norm(y)


class IfListByDispatch(Block):
    @functools.singledispatchmethod
    def run(self, x: Any) -> Tensor:
        return self.norm(self.conv(x))

    @run.register
    def _(self, x: list) -> Tensor:
        return self.conv(x[0])

    def forward(self, x: Any) -> Any:
        return self.run(x)


HIDDEN: dict[str, Callable[[], nn.Module]] = {
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
    "exchanges the weight": ExchangesWeight,
    "writes the weight": WritesWeight,
    "sets the weight": SetsWeight,
    "parent handed over": HandsOverParent,
    "parent handed over, unmarked": HandsOverParentUnmarked,
    "self handed over": HandsOverSelf,
    "held by a global dict": HandsOverGlobal,
    "method handed over": HandsOverMethod,
    "held by an object": HoldsInObject,
    "held by a closure": _held_by_closure,
    "__getattr__": Forwards,
    "untraceable, modules()": _untraceable(lambda m: [*m.modules()][2]),
    "untraceable, _modules": _untraceable(lambda m: m._modules["block"].conv),
    "untraceable, get_submodule": _untraceable(lambda m: m.get_submodule("block.conv")),
    "untraceable, vars": _untraceable(lambda m: vars(m)["_modules"]["block"].conv),
    "untraceable, getattr": _untraceable(lambda m: getattr(m, "blo" + "ck").conv),
    "untraceable, buffers": _untraceable(lambda m: lambda x: x + sum(b.sum() for b in m.buffers())),
    "list": IfList,
    "list, inline": IfListInline,
    "list, between": IfListBetween,
    "list, later": IfListLater,
    "list, elsewhere": IfListElsewhere,
    "list, by a flag": IfListByFlag,
    "list, in a method": IfListHelper,
    "list, in a dict": IfListInDict,
    "list, in a table": IfListInTable,
    "list, by an index": IfListByIndex,
    "list, by a submodule": IfListBySubmodule,
    "list, in an iterator": IfListInIterator,
    "list, by an attribute": IfListByAttribute,
    "list, by dispatch": IfListByDispatch,
    "exact type": IfExactTensor,
    "hasattr": IfAttribute,
    "gradient mode": IfGradients,
    "count of calls": IfCounted,
    "exception": IfFails,
    "match": IfMatches,
}


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "in place"])
@pytest.mark.parametrize("name", HIDDEN)
def test_what_tracing_does_not_see(name: str, inplace: bool) -> None:
    model = randomise(HIDDEN[name]())
    plain = copy.deepcopy(model)
    optimized = transforms.optimize(model, auto_channels_last=False, inplace=inplace)
    report = transforms.report(optimized)
    assert report.done(CONV) == []
    assert len(report.left(CONV)) == 1
    _SHARED["block"] = getattr(plain, "block", plain)
    expected = []
    samples = [images(), [images()]]
    with torch.no_grad():
        for x in samples:
            try:
                expected.append(plain(x))
            except (TypeError, AttributeError):  # not for lists
                continue
        _SHARED["block"] = getattr(optimized, "block", optimized)
        _assert_equal([optimized(x) for x, _ in zip(samples, expected)], expected)


class Harmless(Block):
    """Conditions and reads that do not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv2 = nn.Conv2d(3, 3, 1)
        self.norm2 = nn.BatchNorm2d(3)
        self.shortcut = None
        self.config = types.SimpleNamespace(act="relu", scale=2.0)
        self.taps = [1]
        self.layers = nn.ModuleList([nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)])

    def forward(self, x: Any, scale: Tensor | None = None, names: Any = None) -> Any:
        if isinstance(x, (list, tuple)):
            x = torch.cat(tuple(x))
        x = x.to(next(self.parameters()).dtype).to(self.conv.weight.device)
        if not hasattr(x, "shape"):
            raise TypeError(f"no tensor: {x}")
        x = self.conv(x)
        if self.norm is not None:
            x = self.norm(x)
        x = torch.relu(x) if self.config.act.lower() == "relu" else self.conv(x)
        outputs = []
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i in self.taps:
                outputs.append(x)
        identity = x if self.shortcut is None else self.shortcut(x)
        y = self.norm2(self.conv2(x)) + identity
        if scale is not None:
            y = y * scale
        if torch.jit.is_scripting():
            warnings.warn("scripted", stacklevel=2)
        return [torch.flatten(y, 1), *outputs] if names is None else y


def test_harmless_code_is_no_objection() -> None:
    model = randomise(Harmless())
    optimized, report = optimize(model)
    assert report.left(CONV) == []
    assert len(report.done(CONV)) == 3
    assert_right(optimized, model, images())
    assert_right(optimized, model, images(), torch.randn(3, 1, 1))
    with torch.no_grad():
        x = images()
        assert torch.equal(optimized([x[:1], x[1:]], names="y"), optimized(x, names="y"))


class DependsOnFlag(Block):
    """torch.fx cannot trace a flag, which is no tensor."""

    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        y = self.norm(self.conv(x))
        if twice:
            y = y * 2
        return y


def test_optional_flag_is_no_objection() -> None:
    model = randomise(DependsOnFlag())
    optimized, report = optimize(model)
    assert len(report.done(CONV)) == 1
    assert_right(optimized, model, images())
    assert_right(optimized, model, images(), True)


def test_norm_in_training_mode_is_left() -> None:
    model = randomise(Block())
    model.norm.train()
    _, report = optimize(model)
    assert "in training mode" in report.left(CONV)[0].what


def test_linear_and_a_norm_over_another_dimension() -> None:
    """BatchNorm1d takes the channels of three dimensions from the middle one: never wrong."""
    model = randomise(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    optimized, _ = optimize(model)
    with pytest.raises(RuntimeError, match="linear_bn_folding=False"):
        optimized(torch.randn(7, 8, 8))
    kept = transforms.optimize(model, linear_bn_folding=False)
    x = torch.randn(7, 8, 8)
    assert torch.equal(kept(x), model(x))


OTHER_DIMENSION: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...]]] = {
    "linear, 1d": (lambda: [nn.Linear(8, 8), nn.BatchNorm1d(5)], (7, 5, 8)),
    "linear, 2d": (lambda: [nn.Linear(8, 8), nn.BatchNorm2d(8)], (7, 8, 8, 8)),
    "linear, 3d": (lambda: [nn.Linear(8, 8), nn.BatchNorm3d(8)], (2, 8, 3, 4, 8)),
    "conv1d, no batch": (lambda: [nn.Conv1d(8, 8, 1), nn.BatchNorm1d(6)], (8, 6)),
    "conv2d, no batch": (lambda: [nn.Conv2d(8, 8, 1), nn.BatchNorm1d(8)], (8, 8, 8)),
    "conv3d, no batch": (lambda: [nn.Conv3d(8, 8, 1), nn.BatchNorm2d(8)], (8, 8, 8, 8)),
    "transposed 3d, no batch": (
        lambda: [nn.ConvTranspose3d(8, 8, 1), nn.BatchNorm2d(6)],
        (8, 6, 8, 8),
    ),
}


@pytest.mark.parametrize("name", OTHER_DIMENSION)
def test_norm_over_another_dimension_is_left(name: str) -> None:
    make, shape = OTHER_DIMENSION[name]
    model = randomise(nn.Sequential(*make()))
    optimized, report = optimize(model)
    assert report.done(CONV) + report.done(LINEAR) == []
    assert len(report.left(CONV) + report.left(LINEAR)) == 1
    x = torch.randn(shape)
    assert torch.equal(optimized(x), model(x))


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_pass_that_changes_the_output_for_the_sample_is_undone(
    monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    """Whatever the cause: here the arithmetic of the fold itself is wrong."""
    exact = fold.folded

    def wrong(*args: Any) -> tuple[Tensor, Tensor]:
        weight, bias = exact(*args)
        return weight * 1.01, bias

    monkeypatch.setattr(fold, "folded", wrong)
    model = randomise(nn.Sequential(Block(), nn.Dropout(), nn.Flatten(), nn.Linear(243, 2)))
    before, x = fingerprint(model), images()
    knobs = {CONV: True, "replace_dropout_with_identity": True, "auto_channels_last": False}
    with pytest.warns(transforms.NoEffectWarning, match=f"{CONV} changed nothing.*undone"):
        optimized = transforms.optimize(model, inplace=True, level=level, sample_input=x, **knobs)
    report = transforms.report(optimized)
    assert [(e.where, e.done) for e in report.passes[CONV]] == [("0.norm", False)]
    assert "undone: the output for sample_input changed by" in report.left(CONV)[0].what
    assert len(report.done("replace_dropout_with_identity")) == 1
    transforms.restore(model)
    assert fingerprint(model) == before


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_rounding_is_no_change_of_the_output(dtype: torch.dtype | None) -> None:
    model = randomise(nn.Sequential(*[Block() for _ in range(8)]))
    optimized = transforms.optimize(model, dtype=dtype, sample_input=images())
    assert len(transforms.report(optimized).done(CONV)) == 8
    low = randomise(nn.Sequential(*[Block() for _ in range(8)])).to(dtype)
    optimized = transforms.optimize(low, sample_input=images().to(dtype))
    assert len(transforms.report(optimized).done(CONV)) == 8


def test_model_whose_output_is_random_is_not_compared() -> None:
    class Noisy(Block):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator()

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.randn(x.shape, generator=self.generator)
            return super().forward(x) + noise

    optimized = transforms.optimize(randomise(Noisy()), inplace=True, sample_input=images())
    assert len(transforms.report(optimized).done(CONV)) == 1


class Untraceable(nn.Module):
    """What it only calls is folded."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.rest = nn.ModuleList([Block(), Block()])
        self.tail = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.sum() > 1e9:
            return x
        for i, block in enumerate(self.rest):
            if i < len(self.rest):
                x = block(x)
        return self.tail(x)


def test_inside_what_cannot_be_traced() -> None:
    model = randomise(nn.Sequential(Untraceable(), nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2)))
    optimized, report = optimize(model)
    assert len(report.done(CONV)) == 5
    assert report.left(CONV) == []
    assert_right(optimized, model, images())


def test_block_shared_whole_is_folded() -> None:
    block = Block()
    model = randomise(nn.Sequential(block, nn.ReLU(), block))
    optimized, report = optimize(model)
    assert len(report.done(CONV)) == 1
    assert_right(optimized, model, images())


def test_pair_across_containers() -> None:
    model = randomise(
        nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3)), nn.Sequential(nn.BatchNorm2d(4)))
    )
    optimized, report = optimize(model)
    assert len(report.done(CONV)) == 1
    assert_right(optimized, model, images())


def test_hooks_of_containers_and_model_survive() -> None:
    model = randomise(nn.Sequential(Block(), nn.Sequential(nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4)))
    seen: list[Tensor] = []
    model.register_forward_hook(lambda m, i, o: seen.append(o))
    model[1].register_forward_hook(lambda m, i, o: seen.append(o))
    optimized, report = optimize(model)
    assert seen == []  # tracing calls no hooks
    assert [entry.where for entry in report.done(CONV)] == ["0.norm"]  # the other would show in [1]
    x = images()
    optimized(x)
    before_norm, output = seen
    assert_right(lambda _: before_norm, model[:2], x)
    assert_right(lambda _: output, model, x)


def test_held_elsewhere() -> None:
    """A list of modules that torch does not know of holds the same modules afterwards."""

    class Net(Block):
        def __init__(self) -> None:
            super().__init__()
            self.steps = (self.conv, self.norm)

        def forward(self, x: Tensor) -> Tensor:
            for step in self.steps:
                x = step(x)
            return x

    model = randomise(Net())
    optimized, report = optimize(model)
    assert len(report.done(CONV)) == 1
    assert_right(optimized, model, images())


def test_training_an_optimized_model_raises() -> None:
    optimized, _ = optimize(randomise(Block()))
    with pytest.raises(RuntimeError, match=r"transforms.restore\(model\) before training"):
        optimized.train()(images())


def test_tracing_leaves_no_trace() -> None:
    class Counts(Block):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.count += 1
            return super().forward(x)

    model = randomise(Counts())
    transforms.optimize(model, inplace=True)
    assert model.calls == 0
    assert model.count == 0


def test_inside_a_hooked_container() -> None:
    model = randomise(nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))))
    seen: list[Tensor] = []
    model[0].register_forward_hook(lambda m, i, o: seen.append(o))
    optimized, report = optimize(model)
    assert len(report.done(CONV)) == 1
    x = images()
    assert_right(optimized, model, x)
    assert len(seen) > 0
