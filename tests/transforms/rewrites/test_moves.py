"""An optimized model moved to another dtype or device is like the plain model moved there."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusedoptim import transforms
from tests.transforms.helpers import (
    assert_right,
    assert_same_state,
    copied,
    randomise,
    through_torch_save,
)
from tests.transforms.models import Net, images

Move = Callable[[nn.Module], nn.Module]
MOVES: dict[str, Move] = {
    "double": lambda m: m.double(),
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "float": lambda m: m.float(),
    "to(dtype)": lambda m: m.to(torch.float64),
    "to(device)": lambda m: m.to("cpu"),
    "cpu": lambda m: m.cpu(),
    "share_memory": lambda m: m.share_memory(),
    "type": lambda m: m.type(torch.float64),
    "half, then float": lambda m: m.half().float(),
    "bfloat16, then double": lambda m: m.bfloat16().double(),
    "to(memory_format)": lambda m: m.to(memory_format=torch.channels_last),
}
each_move = pytest.mark.parametrize("move", MOVES.values(), ids=list(MOVES))
OPTIONS: dict[str, dict[str, Any]] = {
    "folded": {"auto_channels_last": False},
    "channels_last": {"auto_channels_last": True},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "bfloat16, not folded": {
        "dtype": torch.bfloat16,
        "conv_bn_folding": False,
        "linear_bn_folding": False,
    },
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))


def assert_runs_right(optimized: nn.Module, plain: nn.Module, cast: torch.dtype | None) -> None:
    """Assert that ``optimized`` computes what ``plain`` would, in its dtype or cast to another."""
    dtype = next(plain.parameters()).dtype
    x = images().to(dtype)
    is_cast = cast is not None and dtype == torch.float32
    assert_right(optimized, plain, x, dtype=cast if is_cast else dtype)


@each_option
@each_move
def test_is_the_plain_model_moved(move: Move, options: dict[str, Any]) -> None:
    plain = randomise(Net())
    optimized = transforms.optimize(plain, **options)
    assert move(optimized) is optimized
    move(plain)
    assert_same_state(optimized.state_dict(), plain.state_dict())
    assert_runs_right(optimized, plain, options.get("dtype"))
    x = images().to(plain.out.weight.dtype)
    transforms.restore(optimized)
    assert_same_state(optimized.state_dict(), plain.state_dict())
    assert {p.dtype for p in optimized.parameters()} == {p.dtype for p in plain.parameters()}
    with torch.no_grad():
        assert torch.equal(optimized(x), plain(x))


@each_option
def test_loading_after_a_move(options: dict[str, Any]) -> None:
    plain, other = randomise(Net()).double(), randomise(Net()).double()
    optimized = transforms.optimize(copy.deepcopy(plain).float(), **options).double()
    optimized.load_state_dict(other.state_dict())
    assert_same_state(optimized.state_dict(), other.state_dict())
    assert_runs_right(optimized, other, options.get("dtype"))


@pytest.mark.parametrize("device", ["meta", "cpu"])
@each_option
def test_emptied_and_loaded(options: dict[str, Any], device: str) -> None:
    plain = randomise(Net())
    optimized = transforms.optimize(plain, **options)
    state = copied(optimized.state_dict())
    optimized.to(device)
    assert {t.device.type for t in optimized.state_dict().values()} == {device}
    optimized.to_empty(device="cpu")
    optimized.load_state_dict(state)
    assert_same_state(optimized.state_dict(), plain.state_dict())
    assert_runs_right(optimized, plain, options.get("dtype"))
    transforms.restore(optimized)
    assert_same_state(optimized.state_dict(), plain.state_dict())


@each_option
def test_what_computes_is_in_shared_memory(options: dict[str, Any]) -> None:
    optimized = transforms.optimize(randomise(Net()), **options).share_memory()
    assert all(p.is_shared() for p in optimized.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_one_module_of_a_pair(dtype: torch.dtype) -> None:
    """The modules are moved one by one; the state_dicts agree in every mixture of dtypes."""
    plain = randomise(Net())
    optimized = transforms.optimize(plain)
    for name in ("conv", "norm", "up_norm", "up", "linear", "norm1d", "tied", "out"):
        for model in (plain, optimized):
            model.get_submodule(name).to(dtype)
        assert_same_state(optimized.state_dict(), plain.state_dict())
    assert_runs_right(optimized, plain, None)


def test_fold_that_overflows_when_moved_stays_undone() -> None:
    """The plain weights fit into float16, but their product with the scale does not."""
    plain = randomise(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    with torch.no_grad():
        plain[0].weight.mul_(100)
        plain[1].running_var.fill_(1e-4)
        plain[1].weight.fill_(1e3)
    optimized = transforms.optimize(plain)
    optimized.half()
    plain.half()
    assert_same_state(optimized.state_dict(), plain.state_dict())
    x = torch.rand(1, 3, 4, 4).half() * 1e-4
    with torch.no_grad():
        assert torch.equal(optimized(x), plain(x))
    report = transforms.report(optimized)
    assert report.done("conv_bn_folding") == []
    (left,) = report.left("conv_bn_folding")
    assert left.where == "1"
    assert "would become infinite or NaN if folded" in left.what
    assert (left.bytes_saved, report.kept_bytes) == (0, 0)
    optimized.double()
    report = transforms.report(optimized)
    assert len(report.done("conv_bn_folding")) == 1
    assert report.left("conv_bn_folding") == []
    assert report.kept_bytes > 0
    assert isinstance(optimized[1], nn.Identity)
    assert_same_state(transforms.restore(optimized).state_dict(), plain.double().state_dict())


def test_modules_with_a_move_of_their_own() -> None:
    class Counting(nn.Module):
        moves = 0

        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            self.moves += 1
            return super()._apply(fn, recurse)

    class CountingConv(Counting, nn.Conv2d): ...

    class CountingNorm(Counting, nn.BatchNorm2d): ...

    layers = [nn.Conv2d(3, 8, 3), CountingNorm(8), nn.ReLU(), CountingConv(8, 4, 3)]
    plain = randomise(nn.Sequential(*layers))
    optimized = transforms.optimize(plain, dtype=torch.bfloat16)
    assert isinstance(optimized[1], nn.Identity)
    assert optimized[3].weight.dtype == torch.bfloat16
    optimized.double()
    assert (optimized[1].moves, optimized[3].moves) == (1, 1)
    assert_same_state(optimized.state_dict(), plain.double().state_dict())
    assert not any("_apply" in vars(m) for m in transforms.restore(optimized).modules())


@pytest.mark.parametrize(
    "copy_of", [copy.deepcopy, through_torch_save, lambda m: pickle.loads(pickle.dumps(m))]
)
@each_option
def test_copies_stand_alone(copy_of: Move, options: dict[str, Any]) -> None:
    plain, x = randomise(Net()), images()
    double = copy.deepcopy(plain).double()
    optimized = transforms.optimize(plain, **options)
    twin, moved = copy_of(optimized), copy_of(optimized).double()
    assert_same_state(moved.state_dict(), double.state_dict())
    assert torch.equal(transforms.restore(twin)(x), plain(x))
    assert_same_state(optimized.state_dict(), plain.state_dict())
    with torch.autocast("cpu", enabled="dtype" in options):
        assert torch.equal(optimized(x), copy_of(optimized)(x))
    optimized.half()
    assert_same_state(moved.state_dict(), double.state_dict())
    assert_same_state(optimized.state_dict(), plain.half().state_dict())


def test_optimized_again_after_a_move() -> None:
    plain = randomise(Net())
    optimized = transforms.optimize(plain).double()
    transforms.optimize(optimized, inplace=True, auto_channels_last=True)
    plain.double()
    assert_same_state(optimized.state_dict(), plain.state_dict())
    assert_same_state(transforms.restore(optimized).state_dict(), plain.state_dict())


@pytest.mark.parametrize("setting", ["overwrite", "swap"])
def test_settings_of_torch(setting: str) -> None:
    plain = randomise(Net())
    optimized = transforms.optimize(plain, dtype=torch.bfloat16)
    name = f"set_{setting}_module_params_on_conversion"
    getattr(torch.__future__, name)(True)
    try:
        optimized.double()
        plain.double()
        assert_same_state(optimized.state_dict(), plain.state_dict())
        optimized.float()
        plain.float()
    finally:
        getattr(torch.__future__, name)(False)
    assert_same_state(optimized.state_dict(), plain.state_dict())
    assert_runs_right(optimized, plain, torch.bfloat16)


def _pair() -> tuple[nn.Module, Any]:
    model = nn.Sequential(
        nn.Embedding(7, 3), nn.Flatten(), nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
    )
    model.append(nn.Linear(4, 4))
    model[5].weight = model[4].weight
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _split_pair(steps: int = 1) -> tuple[nn.Module, Any]:
    model, optimizer = _pair()
    transforms.optimize(model, optimizer, dtype=torch.bfloat16, inplace=True)
    for _ in range(steps):
        _step(model, optimizer, is_split=True)
    return model, optimizer


def _step(model: nn.Module, optimizer: Any, is_split: bool) -> Tensor:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_split):
        output = model(torch.tensor([[1, 2], [3, 4], [5, 6]]))
    output.square().mean().backward()
    optimizer.step()
    return output.detach()


@pytest.mark.parametrize("name", MOVES)
def test_split_weights(name: str) -> None:
    model, optimizer = _split_pair()
    plain, its = _pair()
    plain.load_state_dict(model.state_dict())
    transforms.optimize(plain, its, inplace=True)
    gradient = model[2].weight.grad.clone()
    for each in (plain, model):
        MOVES[name](each)
    assert_same_state(model.state_dict(), plain.state_dict())
    if name in ("float", "to(device)", "cpu", "share_memory", "to(memory_format)"):
        assert model[2].weight.dtype == torch.bfloat16  # still split
        assert torch.equal(model[2].weight.grad, gradient)
        assert all(p.is_shared() for p in model.parameters()) == (name == "share_memory")
        _step(model, optimizer, is_split=True)
    else:
        assert torch.equal(_step(model, optimizer, False), _step(plain, its, False))
        assert_same_state(model.state_dict(), plain.state_dict())
    before = copied(model.state_dict())
    transforms.restore(model, optimizer)
    assert_same_state(model.state_dict(), before)
    _step(model, optimizer, is_split=False)


def test_copy_of_split_weights_moves_alone() -> None:
    model, _optimizer = _split_pair()
    exact = copied(model.state_dict())
    twin = copy.deepcopy(model)
    assert_same_state(twin.float().state_dict(), exact)
    twin.double()
    assert_same_state(
        twin.state_dict(), {k: v.double() if v.is_floating_point() else v for k, v in exact.items()}
    )
    assert_same_state(model.state_dict(), exact)
    assert twin(torch.tensor([[1, 2], [3, 4]])).dtype == torch.float64


def test_split_weights_that_lost_their_lower_halves() -> None:
    model, optimizer = _split_pair()
    optimizer.state.clear()
    with pytest.raises(ValueError, match="lost its lower half"):
        model[2].double()
    assert model[2].weight.dtype == torch.bfloat16
