"""What only SplitSGD does, and the others with split=True."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from fusedoptim import FusedSGD, SplitSGD
from fusedoptim.allocator import OutOfMemoryError, Pool
from tests.fusedoptim.helpers import (
    exact_values,
    make_params,
    refused,
    step_alike,
    through_a_file,
    upper_half,
)
from tests.optimizer_cases import SPLIT_CASES, SPLIT_SGD, OptimizerCase, configuration_id

each_split_case = pytest.mark.parametrize("case", [SPLIT_SGD, *SPLIT_CASES], ids=configuration_id)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.int32)


class TestByHand:
    """1 + 2^-7 + 2^-8 is between two bfloat16 numbers, 1 + 2^-7 and 1 + 2^-6."""

    def test_truncated_not_rounded(self) -> None:
        p = Parameter(torch.tensor([1 + 2**-7 + 2**-8]))
        optimizer = SplitSGD([p], lr=0.5)
        assert p.item() == 1 + 2**-7
        assert optimizer.halves.trail(p).tolist() == [-(2**15)]  # 0x8000, half a unit
        (master,) = optimizer.master_params()
        assert master.item() == 1 + 2**-7 + 2**-8

    def test_small_steps_add_up(self) -> None:
        p = Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = SplitSGD([p], lr=2.0**-10)
        for i in range(1, 17):
            p.grad = -torch.ones_like(p)
            optimizer.step()
            (master,) = optimizer.master_params()
            assert master.tolist() == [1 + i * 2**-10] * 3
            # A unit is 2^-7: it is reached by the eighth step.
            assert p.tolist() == [1 + i // 8 * 2**-7] * 3
            assert optimizer.state[p]["trail"].tolist() == [_signed(i % 8 << 13)] * 3

    def test_momentum(self) -> None:
        # b = 0.5; 1 - 0.1 * 0.5; then b = 0.9 * 0.5 + 0.25 = 0.7; 0.95 - 0.07
        p = Parameter(torch.tensor([1.0]))
        optimizer = SplitSGD([p], lr=0.1, momentum=0.9)
        for grad, expected in ((0.5, 0.95), (0.25, 0.88)):
            p.grad = torch.tensor([grad], dtype=torch.bfloat16)
            optimizer.step()
            (master,) = optimizer.master_params()
            torch.testing.assert_close(master, torch.tensor([expected]))


def _signed(bits: int) -> int:
    return bits - 2**16 if bits >= 2**15 else bits


class TestConversion:
    @each_split_case
    def test_float32_model_is_converted_in_place(self, case: OptimizerCase) -> None:
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), torch.nn.Linear(4, 2)
        )
        params = list(model.parameters())
        before = [p.detach().clone() for p in params]
        optimizer = case.make(model.parameters(), lr=0.1)
        held = optimizer.param_groups[0]["params"]
        for p, now, kept, values in zip(params, model.parameters(), held, before):
            assert p is now
            assert p is kept
            assert (p.dtype, p.requires_grad, p.is_leaf) == (torch.bfloat16, True, True)
            assert p.stride() == values.stride()
            assert optimizer.halves.trail(p).dtype == torch.int16
            assert torch.equal(upper_half(values), p)
            assert torch.equal(_bits(exact_values(optimizer)[p]), _bits(values))

    def test_all_kinds_of_bits(self) -> None:
        """NaNs with their payloads, infinities, zeros and subnormals are preserved."""
        bits = torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int64).to(torch.int32)
        special = torch.tensor([0, 1, 0x7F800000, 0x7F800001, 0x7FFFFFFF, 0x007FFFFF, 0xFFFF])
        bits[:7] = special
        bits[7:14] = special.to(torch.int32) | -(2**31)
        p = Parameter(bits.view(torch.float32).clone())
        optimizer = SplitSGD([p], lr=0.1)
        (master,) = optimizer.master_params()
        assert torch.equal(master.view(torch.int32), bits)

    @each_split_case
    def test_bfloat16_model_begins_with_zeros(self, case: OptimizerCase) -> None:
        (p,) = make_params(torch.bfloat16, ["channels_last"])
        address, before = p.data_ptr(), p.detach().clone()
        optimizer = case.make([p], lr=0.1)
        assert p.data_ptr() == address
        assert torch.equal(p, before)
        assert not optimizer.halves.trail(p).any()
        (master,) = optimizer.master_params()
        assert torch.equal(master, before.float())

    @each_split_case
    @pytest.mark.parametrize(
        "dtype", [torch.float16, torch.float64, torch.complex64], ids=configuration_id
    )
    def test_other_dtypes(self, case: OptimizerCase, dtype: torch.dtype) -> None:
        good = Parameter(torch.randn(5))
        before = good.detach().clone()
        bad = Parameter(torch.ones(3, dtype=dtype))
        message = rf"{case.name}: parameter .*{dtype}.*model\.float\(\) or model\.bfloat16\(\)"
        for params in ([good, bad], [{"params": [good]}, {"params": [bad]}]):
            with pytest.raises(TypeError, match=message):
                case.make(params, lr=0.1)
            assert good.dtype == torch.float32
            assert torch.equal(good, before)

    @each_split_case
    def test_invalid_argument(self, case: OptimizerCase) -> None:
        for kwargs in (*case.invalid_kwargs, *case.refused_kwargs, {"max_grad_norm": -1.0}):
            p = Parameter(torch.randn(5))
            with pytest.raises((ValueError, RuntimeError)):
                case.make([p], **kwargs)
            assert p.dtype == torch.float32

    @each_split_case
    def test_group_added_later(self, case: OptimizerCase) -> None:
        first, second = (Parameter(torch.randn(5)) for _ in range(2))
        before = second.detach().clone()
        optimizer = case.make([first], **case.kwargs[-1])
        bad = Parameter(torch.ones(3).half())
        for _ in range(2):
            with refused(optimizer, TypeError, r"torch\.float16"):
                optimizer.add_param_group({"params": [second, bad]})
            assert second.dtype == torch.float32
        optimizer.add_param_group({"params": [second]})
        assert second.dtype == torch.bfloat16
        assert torch.equal(exact_values(optimizer)[second], before)
        step_alike(optimizer)
        assert not torch.equal(exact_values(optimizer)[second], before)

    def test_gradient_from_before(self) -> None:
        p = Parameter(torch.randn(5))
        p.grad = torch.full((5,), 0.5)
        optimizer = SplitSGD([p], lr=1.0)
        assert p.grad.dtype == torch.bfloat16
        before = exact_values(optimizer)[p]
        optimizer.step()
        torch.testing.assert_close(exact_values(optimizer)[p], before - 0.5)

    def test_tied_parameters(self) -> None:
        """A Parameter that two modules share is split once."""
        model = torch.nn.ModuleList([torch.nn.Linear(3, 3) for _ in range(2)])
        model[1].weight = model[0].weight
        SplitSGD(model.parameters(), lr=0.1)
        assert model[1].weight is model[0].weight
        assert model[1].weight.dtype == torch.bfloat16


class TestStep:
    @pytest.mark.parametrize("momentum", [0.0, 0.9])
    def test_equals_float32(self, momentum: float) -> None:
        """The bits of FusedSGD on float32 parameters, with the same gradients."""
        params = make_params(torch.float32)
        wide = [Parameter(p.detach().clone()) for p in params]
        kwargs: Any = {"lr": 0.1, "momentum": momentum, "weight_decay": 0.01}
        ours, reference = SplitSGD(params, **kwargs), FusedSGD(wide, **kwargs)
        for p, w, master in zip(params, wide, ours.master_params()):
            assert torch.equal(master, w)
            assert ours.halves.trail(p).shape == p.shape
        for _ in range(4):
            for p, w in zip(params, wide):
                p.grad = torch.randn_like(p)
                w.grad = p.grad.float()
            ours.step()
            reference.step()
        for p, w, master in zip(params, wide, ours.master_params()):
            assert torch.equal(master, w)
            assert torch.equal(p.contiguous(), upper_half(w))
            for key, value in reference.state[w].items():
                assert torch.equal(ours.state[p][key], value)

    def test_master_params_are_copies(self) -> None:
        p = Parameter(torch.randn(5))
        optimizer = SplitSGD([p], lr=0.1)
        before = exact_values(optimizer)[p].clone()
        (master,) = optimizer.master_params()
        assert not master.requires_grad
        master.zero_()
        assert torch.equal(exact_values(optimizer)[p], before)

    def test_master_params_of_an_optimizer_that_is_not_split(self) -> None:
        params = make_params(torch.bfloat16, ["17", "strided"])
        optimizer = FusedSGD([{"params": [p]} for p in params], lr=0.1)
        for p, master in zip(params, optimizer.master_params()):
            assert master.dtype == torch.bfloat16
            assert torch.equal(master, p)
            assert master.data_ptr() != p.data_ptr()

    @each_split_case
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=configuration_id)
    def test_model_converted_later(self, case: OptimizerCase, dtype: torch.dtype) -> None:
        """A parameter that is no longer an upper half is refused before anything is written."""
        for stepped in (False, True):
            p = Parameter(torch.randn(40))
            optimizer = case.make([p], **case.kwargs[-1])
            if stepped:
                p.grad = torch.ones_like(p)
                optimizer.step()
            p.data = p.data.to(dtype)
            p.grad = torch.ones(40, dtype=dtype)
            with refused(optimizer, (TypeError, RuntimeError), rf"parameter 0 .*{dtype}"):
                optimizer.step()

    def test_four_bytes_a_weight(self) -> None:
        p = Parameter(torch.randn(1009))  # a shape that no other test's tensors have
        optimizer = SplitSGD([p], lr=0.1)
        p.grad = torch.ones_like(p)
        optimizer.step()
        tensors = [p, *optimizer.state[p].values()]
        assert sum(t.untyped_storage().nbytes() for t in tensors) == 4 * p.numel()
        gc.collect()
        floats = [o for o in gc.get_objects() if type(o) is Tensor and o.shape == p.shape]
        assert not any(t.dtype == torch.float32 for t in floats)


class TestCheckpoints:
    @each_split_case
    def test_checkpoint_of_no_step(self, case: OptimizerCase) -> None:
        p = Parameter(torch.randn(1000))
        optimizer = case.make([p], **case.kwargs[-1])
        other = case.make([Parameter(p.detach().clone())])
        other.load_state_dict(through_a_file(optimizer.state_dict()))
        assert torch.equal(*optimizer.master_params(), *other.master_params())
        step_alike(optimizer, other)
        assert torch.equal(*optimizer.master_params(), *other.master_params())

    def test_checkpoint_of_torchs_sgd(self) -> None:
        """The momentum of a float32 model is loaded exactly; the lower halves do not change."""
        params = make_params(torch.float32, ["17", "channels_last"])
        wide = [Parameter(p.detach().clone()) for p in params]
        torchs = torch.optim.SGD(wide, lr=0.1, momentum=0.9)
        step_alike(torchs)
        for p, w in zip(params, wide):
            p.data.copy_(w.detach())
        optimizer = SplitSGD(params, lr=0.5, momentum=0.5)
        trails = [optimizer.halves.trail(p).clone() for p in params]
        optimizer.load_state_dict(through_a_file(torchs.state_dict()))
        assert optimizer.param_groups[0]["momentum"] == 0.9
        for p, w, trail in zip(params, wide, trails):
            assert torch.equal(exact_values(optimizer)[p], w)
            assert torch.equal(optimizer.state[p]["trail"], trail)
            buffer = optimizer.state[p]["momentum_buffer"]
            assert buffer.dtype == torch.float32
            assert torch.equal(buffer, torchs.state[w]["momentum_buffer"])

    @each_split_case
    @pytest.mark.parametrize("damage", ["lost", "shape", "dtype", "no state"])
    def test_damaged(self, case: OptimizerCase, damage: str) -> None:
        params = [Parameter(torch.randn(5)) for _ in range(2)]
        optimizer = case.make(params, **case.kwargs[-1])
        step_alike(optimizer)
        checkpoint = copy.deepcopy(optimizer.state_dict())
        checkpoint["param_groups"][0]["lr"] = 0.75
        if damage == "no state":
            del checkpoint["state"][1]
        elif damage == "lost":
            del checkpoint["state"][1]["trail"]
        else:
            bad = {"shape": torch.zeros(6, dtype=torch.int16), "dtype": torch.zeros(5)}
            checkpoint["state"][1]["trail"] = bad[damage]
        groups = copy.deepcopy(optimizer.state_dict()["param_groups"])
        with refused(optimizer, ValueError, rf"{case.name}: .*'trail' of parameter 1"):
            optimizer.load_state_dict(checkpoint)
        assert optimizer.state_dict()["param_groups"] == groups
        optimizer.step()

    @each_split_case
    def test_saved_by_torchs_class_in_between(self, case: OptimizerCase) -> None:
        """torch's class rounds the lower halves to the parameter's dtype: loading refuses that."""
        p = Parameter(torch.randn(1000))
        optimizer = case.make([p], **case.kwargs[-1])
        step_alike(optimizer)
        (master,) = optimizer.master_params()
        cls = case.reference if case.is_torchs else torch.optim.Adam
        theirs = cls([Parameter(p.detach().clone())])
        theirs.load_state_dict(through_a_file(optimizer.state_dict()))
        checkpoint = through_a_file(theirs.state_dict())
        with refused(optimizer, ValueError, r"is torch\.bfloat16: .* Remove 'trail' from each"):
            optimizer.load_state_dict(checkpoint)
        for state in checkpoint["state"].values():
            del state["trail"]
        optimizer.load_state_dict(checkpoint)
        assert torch.equal(*optimizer.master_params(), master)
        optimizer.step()


@pytest.mark.parametrize("value", ["yes", None, 2])
def test_split_is_no_flag(value: Any) -> None:
    with pytest.raises(TypeError, match=f"FusedSGD: split is {value!r}; pass True or False"):
        FusedSGD([Parameter(torch.ones(1))], split=value)


def test_without_memory_no_parameter_is_split() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(1000, 2000))
    before = copy.deepcopy(model.state_dict())
    pool = Pool("cpu", limit="3MiB")  # enough for the first one's halves alone
    with pool, pytest.raises(OutOfMemoryError):
        FusedSGD(model.parameters(), lr=0.1, split=True)
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    with pool, pytest.raises(OutOfMemoryError):
        optimizer.split_params(model.parameters())
    optimizer = FusedSGD(model[0].parameters(), lr=0.1, split=True)
    with pool, pytest.raises(OutOfMemoryError):
        optimizer.add_param_group({"params": list(model[1].parameters())})
    assert len(optimizer.param_groups) == 1
    for name, value in model[1].state_dict().items():
        assert torch.equal(value, before[f"1.{name}"])
