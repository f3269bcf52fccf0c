"""Code that torch.compile traces may use the data of a watched Parameter, as all other code may."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fusedoptim import transforms
from tests.transforms.helpers import assert_right
from transforms.rewrites.watched_parameter import WatchedParameter, uses


class Scaled(nn.Module):
    """Reads the data of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(1024, 1024), nn.Parameter(torch.rand(1024))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.scale.data
        return y + self.linear.weight.data[0]


@torch.no_grad()
@pytest.mark.parametrize("way", ["graph mode", "eager", "aot_eager"])
def test_data_is_read(way: str) -> None:
    model = Scaled().eval()
    ours = transforms.optimize(model, graph_mode=way == "graph mode")
    ours(torch.randn(8, 1024))  # from now on parameters are watched
    assert type(ours.linear.weight) is WatchedParameter
    compiled = ours if way == "graph mode" else torch.compile(ours, backend=way)
    for rows in (8, 8, 9, 10):
        assert_right(compiled, model, torch.randn(rows, 1024))
    with torch.no_grad():
        ours.scale.data.mul_(2)
        model.scale.data.mul_(2)
    assert_right(compiled, model, torch.randn(8, 1024))


@torch.no_grad()
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_writes_into_data_are_noticed(backend: str) -> None:
    plain = nn.Linear(1024, 1024).eval()
    ours, x = transforms.optimize(plain), torch.randn(8, 1024)

    @torch.compile(backend=backend)
    def average(param: Tensor, other: Tensor) -> None:
        param.data.mul_(0.5).add_(other, alpha=0.5)
        param.detach().sum()

    for turn in range(3):
        assert_right(ours, plain, x)  # packs
        before = uses(ours.weight)
        other = torch.randn(1024, 1024)
        with torch._dynamo.config.patch(error_on_recompile=turn > 0):
            average(ours.weight, other)
        plain.weight.mul_(0.5).add_(other, alpha=0.5)
        assert uses(ours.weight) != before
        assert_right(ours, plain, x)
