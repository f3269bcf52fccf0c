"""What an inference-optimized model learns, or is given by writes in place, is kept."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel

from fusedoptim import FusedSGD, transforms
from tests.transforms.helpers import assert_right, assert_same_state, copied, randomise
from tests.transforms.models import FOLDED
from transforms.rewrites.fold_arithmetic import unfolded

each_kind = pytest.mark.parametrize("kind", FOLDED)


def make(kind: str = "conv2d") -> tuple[nn.Sequential, Tensor]:
    layers, shape = FOLDED[kind]
    model = nn.Sequential(*layers(), nn.Tanh())
    randomise(model)
    return model, torch.randn(shape)


def train(model: nn.Module, x: Tensor, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()


def assert_kept(optimized: nn.Sequential, plain: nn.Sequential, x: Tensor) -> None:
    """Assert that the state_dict and the restored model compute what ``optimized`` does."""
    assert isinstance(optimized[1], nn.Identity)
    learnt = copy.deepcopy(plain)
    learnt.load_state_dict(optimized.state_dict())
    assert_right(optimized, learnt, x)
    before = copied(optimized.state_dict())
    assert_same_state(optimized.state_dict(), before)  # the same each time
    transforms.restore(optimized)
    assert isinstance(optimized[1], nn.modules.batchnorm._BatchNorm)
    assert_same_state(optimized.state_dict(), before)
    with torch.no_grad():
        assert torch.equal(optimized(x), learnt(x))


@each_kind
def test_trained_on(kind: str) -> None:
    plain, x = make(kind)
    optimized = transforms.optimize(plain)
    with torch.no_grad():
        before = plain(x)
    train(optimized, x)
    assert not torch.allclose(optimized(x), before, atol=0.01)
    assert_kept(optimized, plain, x)


def test_by_an_optimizer_of_ours() -> None:
    """It writes by address."""
    plain, x = make()
    optimized = transforms.optimize(plain)
    optimizer = FusedSGD(optimized.parameters(), lr=0.3)
    optimized(x).sum().backward()
    optimizer.step()
    assert_kept(optimized, plain, x)


def test_what_was_not_written_to_keeps_its_bits() -> None:
    plain, x = make()
    optimized = transforms.optimize(plain)
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


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "init": nn.init.xavier_normal_,
    "no_grad": lambda p: torch.no_grad()(p.mul_)(0.5),
    "data": lambda p: p.data.add_(0.1),
    "data exchanged": lambda p: setattr(p, "data", torch.randn(p.shape)),
    "numpy": lambda p: p.detach().numpy().fill(0.25),
    "a view": lambda p: p.detach()[1].fill_(0.5),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
def test_written_to(write: Callable[[nn.Parameter], object]) -> None:
    plain, x = make()
    optimized = transforms.optimize(plain)
    write(optimized[0].weight)
    with torch.no_grad():
        assert not torch.equal(optimized(x), plain(x))
    assert_kept(optimized, plain, x)


@pytest.mark.parametrize("options", [{}, {"auto_channels_last": True}])
def test_loaded_after_training_and_trained_after_loading(options: dict[str, Any]) -> None:
    plain, x = make("no bias")
    optimized = transforms.optimize(plain, **options)
    optimizer = torch.optim.SGD(optimized.parameters(), lr=0.3)
    train(optimized, x)
    other, _ = make("no bias")
    optimized.load_state_dict(other.state_dict())
    assert_same_state(optimized.state_dict(), other.state_dict())
    optimizer.zero_grad()
    optimized(x).sum().backward()
    bias = optimized[0].bias.detach().clone()
    optimizer.step()
    assert not torch.equal(optimized[0].bias, bias)  # the optimizer has this parameter still
    optimized.load_state_dict({"1.num_batches_tracked": torch.tensor(7)}, strict=False)
    assert optimized.state_dict()["1.num_batches_tracked"] == 7
    assert not torch.equal(optimized.state_dict()["0.weight"], other.state_dict()["0.weight"])
    assert_kept(optimized, plain, x)


def _from_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("copy_of", [copy.deepcopy, _from_file, transforms.optimize])
def test_copies(copy_of: Callable[[Any], Any]) -> None:
    plain, x = make()
    optimized = transforms.optimize(plain)
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
    plain, x = make()
    optimized = transforms.optimize(plain)
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
    """As timm's, which are written into the tensors that state_dict() gives."""
    plain, x = make()
    optimized = transforms.optimize(plain)
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
    plain, x = make(kind)
    optimized = transforms.optimize(plain, dtype=dtype)
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
    learnt = {name: p.detach().clone() for name, p in optimized.named_parameters()}
    for name, value in optimized.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value.to(dtype), learnt[name])
    transforms.restore(optimized)
    for p, gradient in zip(optimized.parameters(), gradients, strict=True):
        assert p.grad is not None
        assert p.grad.dtype == torch.float32
        assert torch.equal(p.grad, gradient.float())
        assert torch.equal(
            p.to(dtype), learnt[next(n for n, q in optimized.named_parameters() if q is p)]
        )


@pytest.mark.parametrize("kind", ["conv2d", "no bias", "no bias in the norm", "transposed, groups"])
@pytest.mark.parametrize("gamma", [0.0, 1e-42, -0.0])
def test_channels_that_the_norm_switches_off(kind: str, gamma: float) -> None:
    """What they learn cannot be divided by their scale: the scale becomes 1."""
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


def test_in_training_mode() -> None:
    """It says so before anything is learnt."""
    plain, x = make()
    optimized = transforms.optimize(plain)
    optimized.train()
    with pytest.raises(RuntimeError, match=r"call transforms.restore\(model\) before training"):
        optimized(x)


def test_optimized_further_finalized_and_moved_after_training() -> None:
    plain, x = make()
    optimized = transforms.optimize(plain)
    train(optimized, x)
    learnt = copy.deepcopy(plain)
    learnt.load_state_dict(optimized.state_dict())
    double = copy.deepcopy(optimized).double()
    assert_same_state(double.state_dict(), copy.deepcopy(learnt).double().state_dict())
    lower = transforms.optimize(optimized, dtype=torch.bfloat16)
    assert_same_state(lower.state_dict(), learnt.state_dict())
    with torch.no_grad():
        output = optimized(x)
        assert torch.equal(transforms.finalize(optimized)(x), output)


def test_only_one_of_the_two_was_frozen() -> None:
    plain, x = make()
    optimized = transforms.optimize(plain)
    optimized[0].weight.requires_grad_(False)
    train(optimized, x)
    assert torch.equal(optimized.state_dict()["0.weight"], plain.state_dict()["0.weight"])
    assert not torch.equal(optimized.state_dict()["1.bias"], plain.state_dict()["1.bias"])
    assert_kept(optimized, plain, x)


@each_kind
@pytest.mark.parametrize("frozen_before", [False, True])
def test_frozen_or_unfrozen_when_folded(kind: str, frozen_before: bool) -> None:
    """As the plain model would be, also the BatchNorm, which computes nothing itself."""
    plain, _ = make(kind)
    plain.requires_grad_(not frozen_before)
    optimized = transforms.optimize(plain)
    optimized.requires_grad_(frozen_before)
    optimized = copy.deepcopy(optimized).double()
    transforms.restore(optimized)
    flags = {name: p.requires_grad for name, p in optimized.named_parameters()}
    assert flags == dict.fromkeys(dict(plain.named_parameters()), frozen_before)


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "1.weight", "1.bias"])
def test_what_was_frozen_before_folding_stays_so(frozen: str) -> None:
    plain, _ = make()
    plain.get_parameter(frozen).requires_grad_(False)
    optimized = transforms.restore(transforms.optimize(plain).double())
    assert [n for n, p in optimized.named_parameters() if not p.requires_grad] == [frozen]


def test_restored_twice() -> None:
    plain, x = make()
    optimized = transforms.optimize(plain)
    train(optimized, x)
    state = copied(transforms.restore(optimized).state_dict())
    with pytest.raises(ValueError, match="has no report"):
        transforms.restore(optimized)
    assert_same_state(optimized.state_dict(), state)


class TestHooksOfOthers:
    """Hooks registered before optimizing see plain tensors, each once."""

    @staticmethod
    def _rename(_: Any, state_dict: dict[str, Any], prefix: str, __: Any) -> None:
        state_dict[prefix + "kernel"] = state_dict.pop(prefix + "weight")

    def test_of_state_dict(self) -> None:
        plain, _ = make()
        plain[0].register_state_dict_post_hook(self._rename)
        optimized = transforms.optimize(plain)
        state, expected = optimized.state_dict(), plain.state_dict()
        assert state.keys() == expected.keys()
        assert torch.equal(state["0.kernel"], expected["0.kernel"])

    def test_of_state_dict_with_split_weights(self) -> None:
        model = nn.Sequential(nn.Linear(3, 4))
        exact = model[0].weight.detach().clone()
        model[0].register_state_dict_post_hook(self._rename)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        transforms.optimize(model, optimizer, dtype=torch.bfloat16, inplace=True)
        state = model.state_dict()
        assert state.keys() == {"0.kernel", "0.bias"}
        assert torch.equal(state["0.kernel"], exact)

    def test_of_load_state_dict(self) -> None:
        plain, _ = make()
        seen: list[Any] = []
        plain[1].register_load_state_dict_pre_hook(lambda m, *_: seen.append(type(m)))
        plain[1].register_load_state_dict_post_hook(lambda m, _: seen.append(type(m)))
        transforms.optimize(plain).load_state_dict(plain.state_dict())
        assert seen == [nn.BatchNorm2d, nn.BatchNorm2d]


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
    plain, x = make()
    optimized = transforms.optimize(plain, auto_channels_last=False)
    prune.l1_unstructured(optimized[0], "weight", 0.5)
    prune.remove(optimized[0], "weight")
    assert optimized[0].weight.count_nonzero() == 4 * 27
    assert optimized.state_dict()["0.weight"].count_nonzero() == 4 * 27
    assert_kept(optimized, plain, x)


def test_parameter_replaced_after_rounding() -> None:
    plain = nn.Sequential(nn.Linear(5, 8)).eval()
    optimized = transforms.optimize(plain, dtype=torch.bfloat16)
    weight = torch.randn(8, 5)
    optimized[0].weight = nn.Parameter(weight.clone())
    assert torch.equal(optimized.state_dict()["0.weight"], weight)
    assert torch.equal(transforms.restore(optimized)[0].weight, weight)


def test_pruned_after_rounding() -> None:
    plain = nn.Sequential(nn.Linear(5, 8)).eval()
    optimized = transforms.optimize(plain, dtype=torch.bfloat16)
    prune.identity(optimized[0], "weight")
    state = optimized.state_dict()
    assert "0.weight" not in state
    assert torch.equal(state["0.weight_orig"], plain[0].weight)
    transforms.restore(optimized)
    assert torch.equal(prune.remove(optimized[0], "weight").weight, plain[0].weight)


def test_parametrized_after_rounding() -> None:
    plain = nn.Sequential(nn.Linear(5, 8)).eval()
    optimized = transforms.optimize(plain, dtype=torch.bfloat16)
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


def test_unfolded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, x = make()
    optimized = transforms.optimize(plain)
    calls: list[int] = []

    def counted(*args: Any) -> Any:
        calls.append(1)
        return unfolded(*args)

    monkeypatch.setattr("transforms.rewrites.fold.unfolded", counted)
    optimized.state_dict()
    assert calls == []
    train(optimized, x)
    optimized.state_dict()
    optimized.state_dict()
    assert calls == [1]
    transforms.restore(optimized)
    assert calls == [1]
