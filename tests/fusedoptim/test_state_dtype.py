"""FusedAdam and FusedAdamW whose moments are bfloat16, or 8-bit numbers with a scale a block."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from fusedoptim import FusedAdam, FusedAdamW, transforms
from fusedoptim.launch.block import Chunks
from fusedoptim.launch.devices import BACKENDS
from fusedoptim.step import dense
from fusedoptim.step.step_counts import MOST_STEPS
from tests.fusedoptim.helpers import make_params, params_of
from tests.fusedoptim.reduced_state import (
    MOMENTS,
    REDUCED,
    SIZES,
    TILE,
    assert_same_values,
    each_dtype,
    values_of,
    vectors,
)


def run(optimizer: Any, steps: range) -> None:
    """Take steps with gradients that depend on the number of the step alone."""
    for k in steps:
        generator = torch.Generator().manual_seed(k)
        for p in params_of(optimizer):
            spread = torch.randn(p.shape, generator=generator).exp()
            p.grad = (torch.randn(p.shape, generator=generator) * spread).to(p.dtype)
        optimizer.step()


@each_dtype
def test_steps_that_float32_does_not_count(state_dtype: Any) -> None:
    """A step raises, and changes nothing, rather than draw the same words again and again."""
    params = vectors([1000, 17, 300])
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    optimizer = FusedAdamW(groups, state_dtype=state_dtype)
    run(optimizer, range(1))
    optimizer.state[params[2]]["step"].fill_(MOST_STEPS - 1)
    run(optimizer, range(1, 2))
    assert optimizer.state[params[2]]["step"] == MOST_STEPS
    before = copy.deepcopy(optimizer)
    with pytest.raises(RuntimeError, match=r"set state\['step'\] of all parameters to 8388608"):
        run(optimizer, range(2, 3))
    assert_equal(optimizer, before)
    assert [optimizer.state[p]["step"].item() for p in params] == [2, 2, MOST_STEPS]
    optimizer.state[params[2]]["step"].fill_(MOST_STEPS // 2)
    run(optimizer, range(2, 3))
    assert optimizer.state[params[2]]["step"] == MOST_STEPS // 2 + 1
    exact = FusedAdamW(params[:1])
    run(exact, range(1))
    exact.state[params[0]]["step"].fill_(MOST_STEPS)
    run(exact, range(1, 2))  # float32 state has no such limit, as in torch


@each_dtype
def test_chunks_do_not_matter(state_dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for limit in (BACKENDS["cpu"].shape.chunk, TILE, 2 * TILE):
        monkeypatch.setattr(dense, "Chunks", lambda numels, _, limit=limit: Chunks(numels, limit))
        optimizer = FusedAdam(vectors(SIZES), state_dtype=state_dtype)
        run(optimizer, range(4))
        runs.append(optimizer)
    for other in runs[1:]:
        assert_equal(runs[0], other)


def assert_equal(one: Any, other: Any) -> None:
    """The same parameters and the same moments, bit by bit."""
    for p, q in zip(params_of(one), params_of(other)):
        assert_same_values(p, q)
        for name in MOMENTS:
            assert_same_values(values_of(one, p)[name], values_of(other, q)[name])


def saved(optimizer: Any) -> dict[str, Any]:
    """An optimizer's state_dict, through a file."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@each_dtype
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resume_is_bit_for_bit(state_dtype: Any, split: bool, dtype: torch.dtype) -> None:
    def make() -> Any:
        params = make_params(dtype, ("17", "1000", "65537", "channels_last", "empty", "0-d"))
        return FusedAdamW(params, state_dtype=state_dtype, split=split)

    optimizer = make()
    run(optimizer, range(5))
    resumed, copied = make(), copy.deepcopy(optimizer)
    with torch.no_grad():
        for p, q in zip(params_of(resumed), params_of(optimizer)):
            p.copy_(q)
    resumed.load_state_dict(saved(optimizer))
    for each in (optimizer, resumed, copied):
        run(each, range(5, 12))
    assert_equal(optimizer, resumed)
    assert_equal(optimizer, copied)


@pytest.mark.parametrize("target", [torch.float32, *REDUCED], ids=str)
@pytest.mark.parametrize("source", ["torch", torch.float32, *REDUCED], ids=str)
def test_checkpoints_are_converted(source: Any, target: Any) -> None:
    """Checkpoints of torch's class and of any state_dtype load, to the nearest number."""
    given: Any = torch.optim.AdamW(vectors(SIZES))
    if source != "torch":
        given = FusedAdamW(vectors(SIZES), state_dtype=source)
    run(given, range(3))
    optimizer = FusedAdamW(vectors(SIZES), state_dtype=target)
    optimizer.load_state_dict(saved(given))
    for p in params_of(optimizer):
        p.grad = torch.zeros_like(p)
    loaded = {p: values_of(optimizer, p) for p in params_of(optimizer)}
    for p, q in zip(params_of(optimizer), params_of(given)):
        for name in MOMENTS:
            assert_same_values(loaded[p][name], values_of(given, q)[name])
    run(optimizer, range(3, 4))
    assert {str(optimizer.state[p]["exp_avg_sq"].dtype) for p in params_of(optimizer)} == {
        str({"float8": torch.uint8}.get(target, target))
    }


@each_dtype
def test_ours_load_in_torchs(state_dtype: Any) -> None:
    ours = FusedAdamW(vectors(SIZES), state_dtype=state_dtype)
    run(ours, range(3))
    theirs = torch.optim.AdamW(vectors(SIZES))
    theirs.load_state_dict(saved(ours))
    for p, q in zip(params_of(ours), params_of(theirs)):
        assert set(theirs.state[q]) == {"step", *MOMENTS}
        for name in MOMENTS:
            assert theirs.state[q][name].dtype == torch.float32
            assert_same_values(theirs.state[q][name].double(), values_of(ours, p)[name])
    run(theirs, range(3, 4))


@each_dtype
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30, 3.5e20])
def test_a_gradient_that_is_not_finite(state_dtype: Any, bad: float) -> None:
    """A gradient that is not finite, or whose square is too large, affects no other element."""
    n, where = 3 * TILE, TILE + 37
    pair = [FusedAdam([Parameter(torch.ones(n))], state_dtype=state_dtype) for _ in range(2)]
    others = torch.arange(n) != where
    for k in range(4):
        for optimizer, value in zip(pair, (0.0, bad if k == 1 else 0.0)):
            (p,) = params_of(optimizer)
            generator = torch.Generator().manual_seed(k)
            p.grad = torch.randn(n, generator=generator)
            p.grad[where] = value
            optimizer.step()
        for name in MOMENTS:
            a, b = (values_of(o, params_of(o)[0])[name] for o in pair)
            assert_same_values(a[others], b[others])
        if k:
            found = values_of(pair[1], params_of(pair[1])[0])["exp_avg_sq"][where]
            assert found.isnan() if state_dtype == "float8" else not found < 1e38
    p, q = (params_of(o)[0] for o in pair)
    assert_same_values(p[others], q[others])


@each_dtype
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_moments_that_a_user_sets_are_values(state_dtype: Any, dtype: torch.dtype) -> None:
    """They are saved, and the next step takes them, as those of a checkpoint."""
    (p,), (q,) = vectors([1000]), vectors([1000])
    pair = [FusedAdamW([each], lr=0.1, state_dtype=state_dtype) for each in (p, q)]
    for optimizer in pair:
        run(optimizer, range(2))
    value = torch.linspace(-2, 2, 1000).to(dtype)
    pair[0].state[p]["exp_avg"] = value
    assert torch.equal(pair[0].state_dict()["state"][0]["exp_avg"].float(), value.float())
    checkpoint = pair[1].state_dict()
    checkpoint["state"][0]["exp_avg"] = value.float()
    pair[1].load_state_dict(checkpoint)
    for optimizer in pair:
        run(optimizer, range(2, 4))
    assert_equal(*pair)


def test_codes_without_scales() -> None:
    (p,) = vectors([1000])
    optimizer = FusedAdamW([p], state_dtype="float8")
    run(optimizer, range(1))
    before = p.detach().clone()
    for name in MOMENTS:
        scales = optimizer.state[p].pop(f"{name}_scale")
        with pytest.raises(ValueError, match=f"the state '{name}' of .* without '{name}_scale'"):
            run(optimizer, range(1, 2))
        optimizer.state[p][f"{name}_scale"] = scales
    assert torch.equal(p, before)


@each_dtype
def test_a_pickled_optimizer(state_dtype: Any) -> None:
    """An optimizer is pickled whole, as multiprocessing and torch.save do it."""
    optimizer = FusedAdamW(vectors(SIZES), state_dtype=state_dtype)
    run(optimizer, range(3))
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    copies = [pickle.loads(pickle.dumps(optimizer)), torch.load(file, weights_only=False)]
    for each in (optimizer, *copies):
        run(each, range(3, 5))
    for each in copies:
        assert_equal(optimizer, each)


@pytest.mark.parametrize(("gradient", "is_finite"), [(2.9e20, True), (2.95e20, False)])
def test_the_largest_gradient_in_8_bits(gradient: float, is_finite: bool) -> None:
    """The pages name it: its second moment is just below 2 to the 126."""
    p = Parameter(torch.ones(100))
    optimizer = FusedAdamW([p], state_dtype="float8")
    for _ in range(2):
        p.grad = torch.ones(100)
        p.grad[7] = gradient
        optimizer.step()
        gradient = 1.0
    assert p.isfinite().tolist() == [is_finite or i != 7 for i in range(100)]


def test_bytes() -> None:
    """8-bit state takes at most 2.1 bytes a weight."""
    p = Parameter(torch.zeros(1 << 20))
    optimizer = FusedAdamW([p], state_dtype="float8")
    run(optimizer, range(1))
    state = optimizer.state[p]
    assert sum(state[k].nbytes for k in state if k != "step") <= 2.1 * p.numel()
    assert set(state) == {"step", *MOMENTS, *(f"{name}_scale" for name in MOMENTS)}


@pytest.mark.parametrize("cls", [FusedAdam, FusedAdamW])
class TestRefused:
    @pytest.mark.parametrize("state_dtype", [torch.float16, torch.float64, "int8", None, 8, [1]])
    def test_a_dtype_that_is_not_offered(self, cls: Any, state_dtype: Any) -> None:
        with pytest.raises(ValueError, match=r"state_dtype is .*; pass one of torch\.float32"):
            cls(vectors([3]), state_dtype=state_dtype)

    @each_dtype
    def test_amsgrad(self, cls: Any, state_dtype: Any) -> None:
        with pytest.raises(ValueError, match="cannot be combined with amsgrad=True"):
            cls(vectors([3]), state_dtype=state_dtype, amsgrad=True)
        optimizer = cls(vectors([3]), state_dtype=state_dtype)
        run(optimizer, range(1))
        optimizer.param_groups[0]["amsgrad"] = True
        before = params_of(optimizer)[0].detach().clone()
        with pytest.raises(ValueError, match="cannot be combined with amsgrad=True"):
            run(optimizer, range(1, 2))
        assert_same_values(params_of(optimizer)[0].detach(), before)

    @each_dtype
    def test_amsgrad_of_a_checkpoint(self, cls: Any, state_dtype: Any) -> None:
        given = cls(vectors([3], seed=1), lr=0.5, amsgrad=True)
        run(given, range(2))
        ours, twin = (cls(vectors([3]), state_dtype=state_dtype) for _ in range(2))
        for optimizer in (ours, twin):
            run(optimizer, range(1))
        with pytest.raises(ValueError, match="with amsgrad=True, which the checkpoint has"):
            ours.load_state_dict(given.state_dict())
        assert not ours.param_groups[0]["amsgrad"]
        for optimizer in (ours, twin):
            run(optimizer, range(1, 3))
        assert_equal(ours, twin)

    @each_dtype
    @pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
    def test_dtypes_of_parameters(self, cls: Any, state_dtype: Any, dtype: torch.dtype) -> None:
        wide = Parameter(torch.zeros(3, dtype=dtype))
        with pytest.raises(TypeError, match=f"and one is {dtype}; convert the model"):
            cls([wide], state_dtype=state_dtype)
        optimizer = cls(vectors([3]), state_dtype=state_dtype)
        with pytest.raises(TypeError, match=f"and one is {dtype}"):
            optimizer.add_param_group({"params": iter([wide])})
        assert len(optimizer.param_groups) == 1
        params_of(optimizer)[0].data = torch.zeros(3, dtype=dtype)
        with pytest.raises(TypeError, match=f"and one is {dtype}"):
            optimizer.step()

    @each_dtype
    def test_sparse_gradients(self, cls: Any, state_dtype: Any) -> None:
        (p,) = vectors([3])
        p.grad = torch.tensor([1.0, 0.0, 0.0]).to_sparse()
        with pytest.raises(RuntimeError, match="does not support sparse gradients"):
            cls([p], state_dtype=state_dtype).step()


@each_dtype
def test_a_resume_after_an_earlier_group_has_grown(state_dtype: Any) -> None:
    """The random words depend on a parameter's place among all, as in the resumed optimizer."""
    values = [torch.randn(500) for _ in range(3)]
    params, others = ([Parameter(v.clone()) for v in values] for _ in range(2))
    groups = [{"params": params[:1]}, {"params": params[2:]}]
    optimizer = FusedAdamW(groups, state_dtype=state_dtype)
    run(optimizer, range(3))
    optimizer.param_groups[0]["params"].append(params[1])
    run(optimizer, range(3, 4))
    with torch.no_grad():
        for p, q in zip(others, params):
            p.copy_(q)
    groups = [{"params": others[:2]}, {"params": others[2:]}]
    resumed = FusedAdamW(groups, state_dtype=state_dtype)
    resumed.load_state_dict(saved(optimizer))
    for each in (optimizer, resumed):
        run(each, range(4, 5))
    assert_equal(optimizer, resumed)


@each_dtype
def test_group_added_again(state_dtype: Any) -> None:
    """Parameters that are frozen for a while keep their moments."""
    values = [torch.randn(500) for _ in range(2)]
    ours, twin = (
        FusedAdamW([{"params": [Parameter(v.clone())]} for v in values], state_dtype=state_dtype)
        for _ in range(2)
    )
    for optimizer in (ours, twin):
        run(optimizer, range(2))
    ours.add_param_group(ours.param_groups.pop())
    for optimizer in (ours, twin):
        run(optimizer, range(2, 4))
    assert_equal(ours, twin)


def test_float64_parameters_keep_their_state() -> None:
    p = Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = FusedAdam([p], state_dtype=torch.float32)
    p.grad = torch.ones(3, dtype=torch.float64)
    optimizer.step()
    assert optimizer.state[p]["exp_avg"].dtype == torch.float64


def test_an_optimizer_that_optimize_converts_has_float32_state() -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = transforms.optimize(model, optimizer=optimizer, inplace=True)
    assert optimizer.state_dtype == torch.float32
