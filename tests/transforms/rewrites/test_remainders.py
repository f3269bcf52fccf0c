"""A plain weight is recovered, bit for bit, from the folded one and two bits for each element."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from fusedoptim import transforms
from fusedoptim.split import pages
from tests.transforms.helpers import assert_same_state, copied, randomise
from transforms.rewrites import remainders
from transforms.rewrites.fold import Fold, fold_of


@pytest.fixture(autouse=True)
def small_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_MIN_BYTES", 0)
    monkeypatch.setattr(remainders, "CHUNK", 50)


def pair(transposed: bool = False) -> nn.Module:
    feeder: nn.Module = nn.Conv2d(6, 10, 3, groups=2, bias=False)
    if transposed:
        feeder = nn.ConvTranspose2d(6, 10, 3, groups=2)
    return randomise(nn.Sequential(feeder, nn.BatchNorm2d(10)))


def optimized(model: nn.Module) -> nn.Module:
    return transforms.optimize(model, inplace=True, weights_prepack=False)


def fold(model: nn.Module) -> Fold:
    found = fold_of(model[0])  # type: ignore[index]
    assert found is not None
    return found


def bits(t: Tensor) -> Tensor:
    return t.detach().view(torch.int32)


@pytest.mark.parametrize("scale", [1e-40, 1e-3, 1.0, 3.0, 1e30])
@pytest.mark.parametrize("shape", [(1,), (7, 5), (16, 3, 3, 3), (0, 4)])
def test_split_and_join(shape: tuple[int, ...], scale: float) -> None:
    plain = torch.randn(shape)
    if plain.dim() == 4:
        plain = plain.to(memory_format=torch.channels_last)
    factor = scale * (0.5 + torch.rand(shape[0], *[1] * (len(shape) - 1), dtype=torch.float64))
    folded = (plain * factor).float()
    remainder = remainders.split(plain, folded, factor)
    if remainder is None:
        assert scale < 1e-38  # the products have fewer bits
        return
    joined = remainders.join(folded, remainder)
    assert joined.stride() == plain.stride()
    assert torch.equal(bits(joined), bits(plain))
    pieces = len(list(remainders.row_pieces(plain)))
    assert remainder.differences.nbytes <= plain.numel() // 4 + pieces


def test_values_that_do_not_fit_are_stored() -> None:
    plain = torch.randn(100, 3)
    plain[0, 0], plain[50, 1], plain[50, 2] = -0.0, 1e-44, 3e38
    factor = torch.ones(100, 1, dtype=torch.float64)
    factor[4] = 0.0
    factor[50] = 1e-3
    folded = (plain * factor).float()
    remainder = remainders.split(plain, folded, factor)
    assert remainder is not None
    assert 3 <= remainder.originals.numel() <= 6
    assert torch.equal(bits(remainders.join(folded, remainder)), bits(plain))


@pytest.mark.parametrize("transposed", [False, True])
def test_restores_and_saves_every_bit(transposed: bool) -> None:
    model = pair(transposed)
    plain = copied(model.state_dict())
    strides = model[0].weight.stride()  # type: ignore[index,union-attr]
    ours = optimized(model)
    kept = sum(t.nbytes for t in fold(ours).kept())
    assert fold(ours)._remainder is not None
    assert kept < model[0].weight.nbytes  # type: ignore[index,union-attr]
    assert_same_state(ours.state_dict(), plain)
    assert_same_state(copy.deepcopy(ours).state_dict(), plain)
    restored = transforms.restore(ours)
    assert_same_state(restored.state_dict(), plain)
    assert restored[0].weight.stride() == strides


@pytest.fixture(params=["float64", "bfloat16", "meta"])
def other_default(request: pytest.FixtureRequest) -> Iterator[None]:
    """Another default dtype or device."""
    if request.param == "meta":
        with torch.device("meta"):
            yield
        return
    torch.set_default_dtype(getattr(torch, request.param))
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("other_default")
def test_default_dtype_and_device_do_not_matter() -> None:
    with torch.device("cpu"):
        model = pair().float()
    plain = copied(model.state_dict())
    ours = optimized(model)
    assert fold(ours)._remainder is not None
    assert_same_state(ours.state_dict(), plain)
    ours.load_state_dict(plain)
    assert_same_state(transforms.restore(ours).state_dict(), plain)


@pytest.mark.parametrize("has_zero", [False, True])
def test_what_was_written_folds_to_itself(has_zero: bool) -> None:
    model = pair()
    if has_zero:
        with torch.no_grad():
            model[1].weight[3] = 0  # type: ignore[index,operator]
    before = model[0].weight.detach().clone()  # type: ignore[index,union-attr,operator]
    ours = optimized(model)
    weight = ours[0].weight  # type: ignore[index]
    with torch.no_grad():
        weight[2] *= 3  # type: ignore[index]
        weight[3, 0] += 1  # type: ignore[index]
    x = torch.randn(2, 6, 5, 5)
    expected = ours(x)
    restored = transforms.restore(ours)
    torch.testing.assert_close(restored(x), expected)
    untouched = [0, 1, *range(4, 10)]
    assert torch.equal(restored[0].weight[untouched], before[untouched])


def test_a_weight_that_others_hold_is_kept() -> None:
    model = pair()
    held = model[0].weight.detach()  # type: ignore[index,union-attr,operator]
    values = held.clone()
    ours = optimized(model)
    assert fold(ours)._remainder is None
    assert torch.equal(held, values)
    assert transforms.restore(ours)[0].weight.data_ptr() == held.data_ptr()
