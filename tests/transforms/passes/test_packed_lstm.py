"""LSTMs with packed weights compute what torch's do, and see every change."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusedoptim import transforms
from tests.tolerances import assert_as_exact
from tests.transforms.helpers import operators_called
from transforms.rewrites import packed_lstm
from transforms.rewrites.packed import supported_dtypes
from transforms.rewrites.packed_lstm import PackedLSTM

KNOB = "weights_prepack"
CASES: dict[str, dict[str, Any]] = {
    "one-layer": {},
    "three-layers": {"num_layers": 3},
    "both-directions": {"num_layers": 2, "bidirectional": True},
    "no-bias": {"bias": False, "bidirectional": True},
    "batch-first": {"batch_first": True, "num_layers": 2, "dropout": 0.5},
}


def network(case: str, width: int = 17, hidden: int = 33) -> nn.Module:
    return nn.LSTM(width, hidden, **CASES[case]).eval()


def optimized(model: nn.Module, **arguments: Any) -> Any:
    return transforms.optimize(model, weights_prepack=True, inplace=True, **arguments)


def flat(results: Any) -> list[Tensor]:
    output, (h, c) = results
    return [output, h, c]


def state_of(model: Any, batch: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    layers = model.num_layers * (2 if model.bidirectional else 1)
    shape = layers, batch, model.hidden_size
    return torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)


def assert_equal(ours: nn.Module, plain: nn.Module, *args: Any) -> None:
    """Assert that results are equal, in dtypes, strides and shapes too."""
    with torch.no_grad():
        actual, expected = flat(ours(*args)), flat(plain(*args))
    for a, b in zip(actual, expected):
        assert (a.dtype, a.stride()) == (b.dtype, b.stride())
    torch.testing.assert_close(actual, expected)


def is_packed(model: nn.Module, x: Tensor) -> bool:
    """Whether the last call used packed weights."""
    with torch.no_grad():
        return "aten::lstm" not in operators_called(lambda: model(x))


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (7, 17)])
@pytest.mark.parametrize("case", CASES)
def test_equals_float64_and_torch(case: str, shape: tuple[int, int]) -> None:
    plain = network(case)
    ours = optimized(copy.deepcopy(plain))
    assert isinstance(ours, PackedLSTM)
    batch = shape[0] if plain.batch_first else shape[1]
    x, state = torch.randn(*shape, 17), state_of(plain, batch)
    assert is_packed(ours, x)
    for args in ((x,), (x, state)):
        assert_equal(ours, plain, *args)
        exact = copy.deepcopy(plain).double()
        given = [x.double(), *(t.double() for t in state)][: 1 if len(args) == 1 else 3]

        def in_float64(exact: Any = exact, given: Any = given) -> list[Tensor]:
            x, *state = given
            return flat(exact(x, tuple(state) or None))

        with torch.no_grad():
            assert_as_exact(flat(ours(*args)), in_float64, torch.float32)


@pytest.mark.parametrize("case", CASES)
def test_under_autocast_and_in_bfloat16(case: str) -> None:
    plain = network(case)
    ours = optimized(copy.deepcopy(plain))
    x = torch.randn(5, 3, 17)
    with torch.autocast("cpu", torch.bfloat16):
        if torch.bfloat16 in supported_dtypes():
            assert_equal(ours, plain, x)
        else:
            for module in (ours, plain):
                with torch.no_grad(), pytest.raises(RuntimeError, match="LSTM forward"):
                    module(x)
    assert_equal(ours.bfloat16(), plain.bfloat16(), x.bfloat16())
    assert_equal(ours.double(), plain.double(), x.double())


@pytest.mark.parametrize("shape", [(0, 3, 17), (3, 0, 17)])
@pytest.mark.parametrize("case", ["both-directions", "batch-first"])
def test_empty_inputs_are_torchs(case: str, shape: tuple[int, ...]) -> None:
    plain = network(case)
    ours = optimized(copy.deepcopy(plain))

    def outcome(model: nn.Module) -> object:
        try:
            with torch.no_grad():
                return [t.shape for t in flat(model(torch.randn(shape)))]
        except RuntimeError as error:
            return str(error)

    assert outcome(ours) == outcome(plain)


def test_other_inputs_are_torchs() -> None:
    plain = network("both-directions")
    ours = optimized(copy.deepcopy(plain))
    sequence = nn.utils.rnn.pack_sequence([torch.randn(5, 17), torch.randn(3, 17)])
    with torch.no_grad():
        assert torch.equal(ours(sequence)[0].data, plain(sequence)[0].data)
        assert torch.equal(ours(torch.ones(4, 17))[0], plain(torch.ones(4, 17))[0])
    x = torch.randn(5, 3, 17, requires_grad=True)
    for each in (ours, plain):
        each(x)[0].sum().backward()
    torch.testing.assert_close(ours.weight_hh_l1.grad, plain.weight_hh_l1.grad)
    for wrong in (
        (torch.zeros(5, 3, 16),),
        (torch.zeros(5, 3, 17), state_of(plain, 2)),
        (torch.zeros(5, 3, 17), (torch.zeros(3, 33), torch.zeros(3, 33))),
        (torch.zeros(5, 3, 17, dtype=torch.float64),),
    ):
        with torch.no_grad(), pytest.raises((RuntimeError, ValueError)) as theirs:
            plain(*wrong)
        with torch.no_grad(), pytest.raises(theirs.type) as of_ours:
            ours(*wrong)
        assert str(of_ours.value) == str(theirs.value)


@pytest.mark.parametrize("name", ["weight_ih_l0", "weight_hh_l1_reverse", "bias_hh_l1"])
def test_sees_changes(name: str) -> None:
    plain = network("both-directions")
    ours, x = optimized(copy.deepcopy(plain)), torch.randn(5, 3, 17)
    for write in (
        lambda p: p.detach().add_(1),
        lambda p: p.data.mul_(2),
        lambda p: setattr(p, "data", p.detach() + 1),
    ):
        assert_equal(ours, plain, x)
        for each in (ours, plain):
            write(getattr(each, name))
        assert_equal(ours, plain, x)
    for each in (ours, plain):
        setattr(each, name, nn.Parameter(torch.ones_like(getattr(plain, name))))
    assert_equal(ours, plain, x)
    state = network("both-directions").state_dict()
    for each in (ours, plain):
        each.load_state_dict(state)
    assert_equal(ours, plain, x)
    assert is_packed(ours, x)


def test_copies_and_restores() -> None:
    plain = network("both-directions")
    ours, x = optimized(copy.deepcopy(plain)), torch.randn(5, 3, 17)
    assert_equal(ours, plain, x)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), copy.copy(ours)):
        assert_equal(other, plain, x)
    restored = transforms.restore(ours)
    assert type(restored) is nn.LSTM
    assert all(type(p) is nn.Parameter for p in restored.parameters())
    assert vars(restored).keys() == vars(plain).keys()
    assert_equal(restored, plain, x)


def test_report(monkeypatch: pytest.MonkeyPatch) -> None:
    normed = nn.utils.parametrizations.weight_norm(nn.LSTM(3, 3), "weight_hh_l0")
    model = nn.ModuleList([nn.LSTM(3, 3), normed, nn.LSTM(3, 4, proj_size=2), nn.GRU(3, 3)]).eval()
    report = transforms.report(transforms.optimize(model))
    assert [entry.where for entry in report.done(KNOB)] == ["0"]
    assert [entry.what for entry in report.left(KNOB)] == [
        "has a weight or bias that is computed from others (a parametrization)",
        "has projections (proj_size), which oneDNN's operator lacks",
        "torch's operators of oneDNN have no GRU",
    ]
    monkeypatch.setitem(packed_lstm._ATEN, "mkldnn_rnn_layer", "another")
    with pytest.warns(
        transforms.NoEffectWarning, match="this torch differs from torch 2.13 in mkldnn_rnn_layer"
    ):
        optimized(nn.LSTM(3, 3).eval())


def test_with_graph_mode() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(17, 33), nn.Linear(33, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0])

    plain, x = Tagger().eval(), torch.randn(5, 3, 17)
    ours = transforms.optimize(plain, graph_mode=True, sample_input=x, weights_prepack=True)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), plain(x))
    transforms.restore(ours)
