"""An inference-optimized model keeps what it learns, and what is written into it in place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel

from fusedoptim import FusedSGD, transforms
from tests.transforms.helpers import (
    assert_right,
    assert_same,
    assert_same_state,
    copied,
    randomise,
    through_torch_save,
)
from tests.transforms.models import FOLDED
from transforms.rewrites.fold_arithmetic import unfolded

each_kind = pytest.mark.parametrize("kind", FOLDED)


def make(kind: str = "conv2d") -> tuple[nn.Sequential, Tensor]:
    layers, shape = FOLDED[kind]
    model = nn.Sequential(*layers(), nn.Tanh())
    randomise(model)
    return model, torch.randn(shape)


def folded(kind: str = "conv2d", **options: Any) -> tuple[nn.Sequential, Tensor, nn.Sequential]:
    """A plain model, an input, and the model optimized."""
    plain, x = make(kind)
    return plain, x, transforms.optimize(plain, **options)


def train(model: nn.Module, x: Tensor, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()


def assert_kept(optimized: nn.Sequential, plain: nn.Sequential, x: Tensor) -> None:
    """Assert that the state_dict and the restored model compute what ``optimized`` does."""
    assert isinstance(optimized[1], nn.Identity)
    learned = copy.deepcopy(plain)
    learned.load_state_dict(optimized.state_dict())
    assert_right(optimized, learned, x)
    before = copied(optimized.state_dict())
    assert_same_state(optimized.state_dict(), before)  # the same each time
    transforms.restore(optimized)
    assert isinstance(optimized[1], nn.modules.batchnorm._BatchNorm)
    with pytest.raises(ValueError, match="has no report"):
        transforms.restore(optimized)
    assert_same_state(optimized.state_dict(), before)
    with torch.no_grad():
        assert torch.equal(optimized(x), learned(x))


@each_kind
def test_trained_on(kind: str) -> None:
    plain, x, optimized = folded(kind)
    with torch.no_grad():
        before = plain(x)
    train(optimized, x)
    assert not torch.allclose(optimized(x), before, atol=0.01)
    assert_kept(optimized, plain, x)


def test_what_was_not_written_to_keeps_its_bits() -> None:
    plain, x, optimized = folded()
    with torch.no_grad():
        optimized[0].weight[2, 1] += 1
        optimized[0].bias[3] -= 1
    state, before = optimized.state_dict(), plain.state_dict()
    changed = torch.zeros(8, 3, 3, 3, dtype=torch.bool)
    changed[2, 1] = True
    assert torch.equal(state["0.weight"] != before["0.weight"], changed)
    assert torch.equal((state["1.bias"] != before["1.bias"]).nonzero(), torch.tensor([[3]]))
    for key in set(state) - {"0.weight", "1.bias"}:
        assert torch.equal(state[key], before[key])
    assert_kept(optimized, plain, x)


def _step_by_address(p: nn.Parameter) -> None:
    p.grad = torch.randn_like(p)
    FusedSGD([p], lr=0.3).step()


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "init": nn.init.xavier_normal_,
    "no_grad": lambda p: torch.no_grad()(p.mul_)(0.5),
    "data": lambda p: p.data.add_(0.1),
    "data exchanged": lambda p: setattr(p, "data", torch.randn(p.shape)),
    "numpy": lambda p: p.detach().numpy().fill(0.25),
    "an optimizer of ours": _step_by_address,
    "a view": lambda p: p.detach()[1].fill_(0.5),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
def test_written_to(write: Callable[[nn.Parameter], object]) -> None:
    plain, x, optimized = folded()
    write(optimized[0].weight)
    with torch.no_grad():
        assert not torch.equal(optimized(x), plain(x))
    assert_kept(optimized, plain, x)


@pytest.mark.parametrize("options", [{}, {"auto_channels_last": True}])
def test_loaded_after_training_and_trained_after_loading(options: dict[str, Any]) -> None:
    plain, x, optimized = folded("no bias", **options)
    optimizer = torch.optim.SGD(optimized.parameters(), lr=0.3)
    train(optimized, x)
    other, _ = make("no bias")
    optimized.load_state_dict(other.state_dict())
    assert_same_state(optimized.state_dict(), other.state_dict())
    optimizer.zero_grad()
    optimized(x).sum().backward()
    bias = optimized[0].bias.detach().clone()
    optimizer.step()
    assert not torch.equal(optimized[0].bias, bias)  # the optimizer still has this parameter
    optimized.load_state_dict({"1.num_batches_tracked": torch.tensor(7)}, strict=False)
    assert optimized.state_dict()["1.num_batches_tracked"] == 7
    assert not torch.equal(optimized.state_dict()["0.weight"], other.state_dict()["0.weight"])
    assert_kept(optimized, plain, x)


@pytest.mark.parametrize("copy_of", [copy.deepcopy, through_torch_save, transforms.optimize])
def test_copies(copy_of: Callable[[Any], Any]) -> None:
    plain, x, optimized = folded()
    untrained = copy_of(optimized)
    assert_same_state(untrained.state_dict(), plain.state_dict())
    train(optimized, x)
    trained = copy_of(optimized)
    assert_same_state(trained.state_dict(), optimized.state_dict())
    train(untrained, x)
    assert_same_state(untrained.state_dict(), optimized.state_dict())
    train(trained, x)
    for model in (trained, untrained, optimized):
        assert_kept(model, plain, x)


@pytest.mark.parametrize("decay", [0.5, 0.0, 1.0])
def test_averages(decay: float) -> None:
    plain, x, optimized = folded()
    average = AveragedModel(  # type: ignore[no-untyped-call]
        optimized, avg_fn=lambda mean, value, _: decay * mean + (1 - decay) * value
    )
    average.update_parameters(optimized)
    train(optimized, x)
    average.update_parameters(optimized)
    if decay == 1.0:
        assert_same_state(average.module.state_dict(), plain.state_dict())
    if decay == 0.0:
        assert_same_state(average.module.state_dict(), optimized.state_dict())
    assert_kept(average.module, plain, x)


def test_averages_of_state_dicts() -> None:
    """Averages such as timm's are written into the tensors that state_dict() returns."""
    _, x, optimized = folded()
    average = copy.deepcopy(optimized)
    train(optimized, x)
    expected = {}
    for name, mean in average.state_dict().items():
        expected[name] = mean.copy_(0.5 * mean + 0.5 * optimized.state_dict()[name]).clone()
    assert_same_state(average.state_dict(), expected)
    assert_same_state(transforms.restore(average).state_dict(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_kind
def test_rounded_and_trained(kind: str, dtype: torch.dtype) -> None:
    plain, x, optimized = folded(kind, dtype=dtype)
    with torch.autocast("cpu", dtype=dtype):
        train(optimized, x)
    gradient = optimized[0].weight.grad
    assert gradient is not None
    assert gradient.dtype == dtype
    weight = optimized[0].weight.detach().clone()
    assert not torch.equal(weight, transforms.optimize(plain, dtype=dtype)[0].weight)
    again = transforms.optimize(plain, dtype=dtype)
    again.load_state_dict(optimized.state_dict())
    torch.testing.assert_close(again[0].weight, weight)
    torch.testing.assert_close(again[0].bias, optimized[0].bias)
    transforms.restore(optimized)
    for p in optimized.parameters():
        assert p.grad is None or p.grad.dtype == p.dtype == torch.float32
    train(optimized, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_alone_and_trained(dtype: torch.dtype) -> None:
    plain = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8)).eval()
    optimized = transforms.optimize(plain, dtype=dtype)
    with torch.autocast("cpu", dtype=dtype):
        train(optimized, torch.randn(7, 5))
    gradients = [p.grad.clone() for p in optimized.parameters() if p.grad is not None]
    learned = {name: p.detach().clone() for name, p in optimized.named_parameters()}
    for name, value in optimized.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value.to(dtype), learned[name])
    transforms.restore(optimized)
    for (name, p), gradient in zip(optimized.named_parameters(), gradients, strict=True):
        assert_same(p.grad, gradient.float())
        assert torch.equal(p.to(dtype), learned[name])


@pytest.mark.parametrize("kind", ["conv2d", "no bias", "no bias in the norm", "transposed, groups"])
@pytest.mark.parametrize("gamma", [0.0, 1e-42, -0.0])
def test_channels_that_the_norm_switches_off(kind: str, gamma: float) -> None:
    """What such channels learn cannot be divided by their scale, so the scale becomes 1."""
    plain, x = make(kind)
    with torch.no_grad():
        plain[1].weight[[1, 5]] = gamma
    optimized = transforms.optimize(plain)
    assert_same_state(optimized.state_dict(), plain.state_dict())
    train(optimized, x)
    state = optimized.state_dict()
    assert all(value.isfinite().all() for value in state.values())
    kept = [0, 2, 3, 4, 6, 7]
    assert torch.equal(state["1.weight"][kept], plain[1].weight[kept])
    assert_kept(optimized, plain, x)


@pytest.mark.filterwarnings("ignore:the model was optimized for inference:UserWarning")
def test_in_training_mode() -> None:
    """The model raises an error before anything is learned."""
    _, x, optimized = folded()
    optimized.train()
    with pytest.raises(RuntimeError, match=r"call transforms.restore\(model\) before training"):
        optimized(x)


def test_optimized_further_finalized_and_moved_after_training() -> None:
    plain, x, optimized = folded()
    train(optimized, x)
    learned = copy.deepcopy(plain)
    learned.load_state_dict(optimized.state_dict())
    double = copy.deepcopy(optimized).double()
    assert_same_state(double.state_dict(), copy.deepcopy(learned).double().state_dict())
    lower = transforms.optimize(optimized, dtype=torch.bfloat16)
    assert_same_state(lower.state_dict(), learned.state_dict())
    with torch.no_grad():
        output = optimized(x)
        assert torch.equal(transforms.finalize(optimized)(x), output)


def test_only_one_of_the_two_was_frozen() -> None:
    plain, x, optimized = folded()
    optimized[0].weight.requires_grad_(False)
    train(optimized, x)
    assert torch.equal(optimized.state_dict()["0.weight"], plain.state_dict()["0.weight"])
    assert not torch.equal(optimized.state_dict()["1.bias"], plain.state_dict()["1.bias"])
    assert_kept(optimized, plain, x)


def _rename(_: Any, state_dict: dict[str, Any], prefix: str, __: Any) -> None:
    state_dict[prefix + "kernel"] = state_dict.pop(prefix + "weight")


@pytest.mark.parametrize("is_split", [False, True])
def test_hooks_of_others_see_plain_tensors(is_split: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).train(is_split)
    model[0].register_state_dict_post_hook(_rename)
    expected = copied(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if is_split else None
    dtype = torch.bfloat16 if is_split else None
    transforms.optimize(model, optimizer, dtype=dtype, inplace=True)
    assert_same(model.state_dict(), expected)


def test_hooks_of_others_are_called_once() -> None:
    plain, _ = make()
    seen: list[Any] = []
    plain[1].register_load_state_dict_pre_hook(lambda m, *_: seen.append(type(m)))
    plain[1].register_load_state_dict_post_hook(lambda m, _: seen.append(type(m)))
    transforms.optimize(plain).load_state_dict(plain.state_dict())
    assert seen == [nn.BatchNorm2d, nn.BatchNorm2d]


def test_a_hook_that_raises_leaves_nothing_behind() -> None:
    def refuse(*_: object) -> None:
        raise ValueError("refused")

    plain, _ = make()
    attributes = vars(plain[1]).keys()
    optimized = transforms.optimize(plain)
    optimized[1].register_load_state_dict_pre_hook(refuse)
    with pytest.raises(ValueError, match="refused"):
        optimized.load_state_dict(plain.state_dict())
    restored = transforms.restore(optimized)
    assert_same_state(restored.state_dict(), plain.state_dict())
    assert vars(restored[1]).keys() == attributes


def test_buffer_that_is_not_saved() -> None:
    plain, _ = make()
    plain[1].register_buffer("extra", torch.ones(3), persistent=False)
    optimized = transforms.optimize(plain)
    assert_same_state(optimized.state_dict(), plain.state_dict())
    plain.load_state_dict(optimized.state_dict())
    assert torch.equal(transforms.restore(optimized)[1].extra, torch.ones(3))


CHANGES: dict[str, Callable[[Any], object]] = {
    "pruned": lambda conv: prune.l1_unstructured(conv, "weight", 0.5),
    "parametrized": parametrizations.weight_norm,
    "of another shape": lambda conv: setattr(conv, "weight", nn.Parameter(torch.ones(4, 3, 3, 3))),
    "without the bias": lambda conv: setattr(conv, "bias", None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_folded_module_that_is_changed_otherwise(name: str) -> None:
    plain, _ = make()
    plain.append(nn.Conv2d(8, 3, 1)).append(nn.BatchNorm2d(3).eval())
    optimized = transforms.optimize(plain.eval(), auto_channels_last=False)
    CHANGES[name](optimized[3])
    types = [type(module) for module in optimized]
    actions: list[Callable[[], object]] = [
        optimized.state_dict,
        lambda: transforms.restore(optimized),
        optimized[3].double,
        lambda: optimized[3].load_state_dict({}, strict=False),
    ]
    for action in actions:
        with pytest.raises(RuntimeError, match=r"Conv2d .*transforms.finalize\(model\)"):
            action()
        assert [type(module) for module in optimized] == types
    transforms.report(optimized)
    transforms.finalize(optimized).state_dict()


def test_pruned_for_good_after_folding() -> None:
    plain, x, optimized = folded(auto_channels_last=False)
    prune.l1_unstructured(optimized[0], "weight", 0.5)
    prune.remove(optimized[0], "weight")
    assert optimized[0].weight.count_nonzero() == 4 * 27
    assert optimized.state_dict()["0.weight"].count_nonzero() == 4 * 27
    assert_kept(optimized, plain, x)


def rounded() -> tuple[nn.Sequential, nn.Sequential]:
    """A plain model, and the model optimized."""
    plain = nn.Sequential(nn.Linear(5, 8)).eval()
    return plain, transforms.optimize(plain, dtype=torch.bfloat16)


def test_parameter_replaced_after_rounding() -> None:
    _, optimized = rounded()
    weight = torch.randn(8, 5)
    optimized[0].weight = nn.Parameter(weight.clone())
    assert torch.equal(optimized.state_dict()["0.weight"], weight)
    assert torch.equal(transforms.restore(optimized)[0].weight, weight)


def test_another_shape_after_rounding() -> None:
    """As resize_token_embeddings of transformers gives it."""
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4)).eval()
    optimized = transforms.optimize(model, dtype=torch.bfloat16)
    optimized[0].weight.data = torch.zeros(10, 4, dtype=torch.bfloat16)
    for call in (optimized.state_dict, optimized.double, lambda: transforms.restore(optimized)):
        with pytest.raises(RuntimeError, match=r"^Embedding got a weight of another shape"):
            call()
    transforms.finalize(optimized)
    assert optimized.state_dict()["0.weight"].shape == (10, 4)


def test_pruned_after_rounding() -> None:
    plain, optimized = rounded()
    prune.identity(optimized[0], "weight")
    state = optimized.state_dict()
    assert "0.weight" not in state
    assert torch.equal(state["0.weight_orig"], plain[0].weight)
    transforms.restore(optimized)
    assert torch.equal(prune.remove(optimized[0], "weight").weight, plain[0].weight)


def test_parametrized_after_rounding() -> None:
    _, optimized = rounded()
    parametrizations.weight_norm(optimized[0])
    for action in (optimized.state_dict, lambda: transforms.restore(optimized)):
        with pytest.raises(RuntimeError, match=r"Linear .*transforms.finalize\(model\)"):
            action()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_finalized_model_loads_what_it_saves(dtype: torch.dtype | None) -> None:
    _, x = make()
    first, second = (transforms.optimize(make()[0], dtype=dtype) for _ in range(2))
    transforms.finalize(first).load_state_dict(transforms.finalize(second).state_dict())
    assert_same_state(first.state_dict(), second.state_dict())
    with torch.no_grad(), torch.autocast("cpu", enabled=dtype is not None):
        assert torch.equal(first(x), second(x))


def test_unfolded_once() -> None:
    _, x, optimized = folded()
    with mock.patch("transforms.rewrites.fold.unfolded", wraps=unfolded) as spy:
        optimized.state_dict()
        spy.assert_not_called()
        train(optimized, x)
        optimized.state_dict()
        optimized.state_dict()
        spy.assert_called_once()
        transforms.restore(optimized)
        spy.assert_called_once()


INSIDE: dict[str, Callable[[Any, nn.Module], Any]] = {
    "quantize": lambda model, other: transforms.quantize(model, [torch.randn(4, 5)]),
    "load": lambda model, other: (model.load_state_dict(other.state_dict()), model)[1],
    "restore": lambda model, other: transforms.restore(model),
}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("action", INSIDE)
def test_tensors_made_in_inference_mode_can_be_trained(
    action: str, dtype: torch.dtype | None
) -> None:
    """As those of a plain model: only what the user makes there is an inference tensor."""
    plain, other = (randomise(nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8))) for _ in range(2))
    model = transforms.optimize(plain, dtype=None if action == "quantize" else dtype)
    if action == "restore":
        with torch.no_grad():
            model[0].weight.mul_(2)  # so that the plain tensors are computed
    with torch.inference_mode():
        model = INSIDE[action](model, other)
    assert not any(t.is_inference() for t in (*model.parameters(), *model.buffers()))
    model.load_state_dict(other.state_dict())
    if action != "restore":
        transforms.restore(model)
    x = torch.randn(4, 5)
    assert_right(model, other, x)
    model.train()(x).sum().backward()
