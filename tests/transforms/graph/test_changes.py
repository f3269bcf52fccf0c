"""Every change of a parameter or buffer is seen before the next call."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusedoptim import transforms
from tests.transforms.graph.helpers import LAST, Compiled, Encoder, Residual, assert_as_eager
from tests.transforms.helpers import copied, randomise
from transforms.rewrites import packed


def write(tensor: Any) -> None:
    with torch.no_grad():
        tensor.add_(0.5)


def write_data(tensor: Any) -> None:
    tensor.data.add_(0.5)


def set_data(tensor: Any) -> None:
    tensor.data = tensor.detach() + 0.5


def write_detached(tensor: Any) -> None:
    tensor.detach().add_(0.5)


def write_data_of_detached(tensor: Any) -> None:
    tensor.detach().data.add_(0.5)


def write_in_inference_mode(tensor: Any) -> None:
    with torch.inference_mode():
        tensor.mul_(1.5)


TENSORS: dict[str, Callable[[Any], Any]] = {
    "convolution": lambda model: model.first.weight,
    "BatchNorm's weight": lambda model: model.norm.weight,
    "mean": lambda model: model.norm.running_mean,
    "variance": lambda model: model.norm.running_var,
    "bias": lambda model: model.second.bias,
}
WRITES = [
    *(write, write_data, set_data, write_detached, write_data_of_detached),
    write_in_inference_mode,
]


def residual() -> tuple[nn.Module, Compiled, Tensor]:
    model = randomise(Residual()).to(memory_format=LAST)
    return model, Compiled(model), torch.randn(2, 3, 9, 9).to(memory_format=LAST)


def test_every_write_into_every_tensor() -> None:
    model, ours, x = residual()
    with torch.no_grad():
        assert_as_eager(ours, model, x)
        for tensor in TENSORS.values():
            for change in WRITES:
                for calls in (1, 3, 2):
                    change(tensor(model))
                    for _ in range(calls):
                        assert_as_eager(ours, model, x)
        assert ours.is_kept()


def test_held_data() -> None:
    """While someone holds a weight's ``data``, nothing computed from the weights is kept."""
    model, ours, x = residual()
    held = model.first.weight.data
    with torch.no_grad():
        for _ in range(3):
            held.mul_(1.25)
            assert_as_eager(ours, model, x)
            assert not ours.is_kept()
        del held
        for _ in range(3):
            assert_as_eager(ours, model, x)
        assert ours.is_kept()


def test_forward_that_detaches_its_weights() -> None:
    class Detaching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + nn.functional.linear(x, self.weight.detach())

    plain, x = Detaching(257, 515).eval(), torch.randn(65, 257)
    ours = Compiled(copy.deepcopy(plain))
    with torch.no_grad():
        for _ in range(3):
            assert_as_eager(ours, plain, x)
        kept = ours.plans[-1]._kept
        assert_as_eager(ours, plain, x)
        assert ours.is_computed()
        assert ours.plans[-1]._kept is kept


def test_writes_that_another_consumer_saw_first() -> None:
    """If a packed module notices a use of ``data``, the plan must see it too, and vice versa."""
    model = nn.Sequential(nn.Linear(257, 515)).eval()
    ours = transforms.optimize(model, inplace=True)
    compiled, x = Compiled(ours), torch.randn(65, 257)
    with torch.no_grad():
        for order in ((ours, compiled), (compiled, ours)) * 2:
            plain = copy.deepcopy(ours[0].weight.detach()).mul(1.5)
            ours[0].weight.data.mul_(1.5)
            expected = nn.functional.linear(x, plain, ours[0].bias)
            for call in order:
                torch.testing.assert_close(call(x), expected)
    assert isinstance(ours[0], packed.PackedModule)


def test_other_tensors_and_states() -> None:
    model, ours, x = residual()
    other = randomise(Residual())
    with torch.no_grad():
        assert_as_eager(ours, model, x)
        model.load_state_dict(copied(other.state_dict()))
        assert_as_eager(ours, model, x)
        model.load_state_dict(copied(randomise(Residual()).state_dict()), assign=True)
        assert_as_eager(ours, model, x)
        model.second.weight = nn.Parameter(torch.randn_like(model.second.weight))
        assert_as_eager(ours, model, x)
        model.norm.running_mean = torch.randn_like(model.norm.running_mean)
        assert_as_eager(ours, model, x)
        model.to(torch.bfloat16)
        assert_as_eager(ours, model, x.bfloat16())
        model.to(torch.float64)
        assert_as_eager(ours, model, x.double())


def test_weights_that_change_before_every_call() -> None:
    model, ours, x = residual()
    with torch.no_grad():
        for _ in range(4):
            write(model.second.weight)
            assert_as_eager(ours, model, x)
        # Nothing was packed at the last calls, since it would have served only one call each.
        assert not ours.is_computed()
        assert_as_eager(ours, model, x)
        assert ours.is_computed()


def test_shared_memory() -> None:
    model, ours, x = residual()
    model.share_memory()
    with torch.no_grad():
        assert_as_eager(ours, model, x)
        assert not ours.is_kept()


def test_infinite_statistics() -> None:
    """A BatchNorm that would fold to an infinite weight is not folded."""
    model, ours, x = residual()
    with torch.no_grad():
        assert_as_eager(ours, model, x)
        model.norm.running_var.fill_(-1)
        for _ in range(3):
            assert_as_eager(ours, model, x)
        assert ours.counts.folded == 0
        model.norm.running_var.fill_(2)
        assert_as_eager(ours, model, x)


def test_infinite_statistics_and_a_write() -> None:
    """The call that finds them has written nothing before the captured graph runs."""

    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32)

        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2)
            y: Tensor = self.norm(self.conv(x))
            return y

    model = randomise(Doubling())
    model.norm.running_var.fill_(-1)
    ours, plain = Compiled(model), copy.deepcopy(model)
    with torch.no_grad():
        for _ in range(2):
            assert_as_eager(ours, plain, torch.randn(2, 3, 9, 9))


class Counting(nn.Module):
    """A module with buffers that a call reads and writes."""

    count: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(257, 515)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(515))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x) - self.mean.exp()
        self.count += 1
        self.mean.mul_(0.5).add_(y.mean(0), alpha=0.5)
        return y * self.count, self.mean.exp()


def test_buffers_that_the_model_writes() -> None:
    plain = Counting().eval()
    model = copy.deepcopy(plain)
    ours, x = Compiled(model), torch.randn(65, 257)
    with torch.no_grad():
        for _ in range(4):
            assert_as_eager(ours, plain, x)
            torch.testing.assert_close(model.mean, plain.mean)
    assert ours.counts.packed == 1


def written_through_another(model: Any, x: Tensor) -> Tensor:
    model.all.add_(1)
    y: Tensor = x * model.part.exp()
    return y


def written_by_a_method(model: Any, x: Tensor) -> Tensor:
    before = model.all * 2
    model.all.__iadd__(1.0)
    y: Tensor = x + (model.all.exp() + before)[:4]
    return y


def written_by_batch_norm(model: Any, x: Tensor) -> Tensor:
    statistics = model.all[:4], model.all[4:]
    normal, *_ = torch.native_batch_norm(x.outer(x), None, None, *statistics, True, 0.5, 1e-5)
    y: Tensor = normal + model.all.exp()[:4]
    return y


@pytest.mark.parametrize(
    "function",
    [written_through_another, written_by_a_method, written_by_batch_norm],
)
def test_buffers_written_in_other_ways(function: Callable[[Any, Tensor], Tensor]) -> None:
    class Writing(nn.Module):
        """Two buffers that share memory."""

        def __init__(self) -> None:
            super().__init__()
            both = torch.randn(8)
            self.register_buffer("all", both)
            self.register_buffer("part", both[:4])

        def forward(self, x: Tensor) -> Tensor:
            return function(self, x)

    model = Writing()
    ours, plain = Compiled(model), Writing()
    plain.all.copy_(model.all)
    with torch.no_grad():
        for _ in range(3):
            assert_as_eager(ours, plain, torch.randn(4))


def test_constants_are_not_returned() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.bias = nn.Linear(257, 515), nn.Parameter(torch.randn(515))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            kept, returned = self.bias.exp(), self.bias.sin()
            return self.linear(x) + kept + returned, returned[None], self.bias[1:]

    model = Table()
    ours, x = Compiled(model), torch.randn(65, 257)
    with torch.no_grad():
        for _ in range(3):
            assert_as_eager(ours, model, x)
            for result in ours(x)[:2]:
                result.zero_()
        view = ours(x)[2]
        view.add_(1)
        assert torch.equal(view, model.bias[1:])
        assert_as_eager(ours, model, x)


def test_copies_have_plans_of_their_own() -> None:
    model = Encoder().eval()
    ours, x = Compiled(model), torch.randn(3, 31, 96)
    with torch.no_grad():
        assert_as_eager(ours, model, x)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            write_data(other.out.weight)
            assert_as_eager(Compiled(other), other, x)
        assert_as_eager(ours, model, x)


@pytest.mark.parametrize("kind", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_weights_stay_parameters(kind: Callable[[nn.Module], nn.Module]) -> None:
    model, ours, x = residual()
    with torch.no_grad():
        ours(x)
    assert all(isinstance(p, nn.Parameter) for p in kind(model).parameters())
    assert list(kind(model).state_dict()) == list(model.state_dict())
