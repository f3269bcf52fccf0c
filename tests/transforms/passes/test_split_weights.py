"""Weights are split into halves in the model and the optimizer, and lose nothing."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers.pytorch_utils import Conv1D

from fusedoptim import FusedAdam, FusedSGD, SplitSGD, transforms
from tests.optimizer_cases import OptimizerCase
from tests.transforms.helpers import assert_same, each_class, saved, train
from tests.transforms.models import TASKS, small
from transforms.passes.fuse_step import fuse_update_step
from transforms.passes.split_weights import merge_master_weights, split_master_weights
from transforms.rewrites.fused_step import unfuse

AUTOCAST = torch.autocast("cpu", dtype=torch.bfloat16)
each_task = pytest.mark.parametrize("task", TASKS)


def _optimizer(model: nn.Module, case: OptimizerCase) -> Any:
    return case.reference(model.parameters(), **case.kwargs[-1])


def _split_pair(case: OptimizerCase) -> tuple[nn.Sequential, Any]:
    model = small()
    optimizer = _optimizer(model, case)
    return transforms.optimize(model, optimizer, dtype=torch.bfloat16, inplace=True)


def _split(cls: Any = FusedSGD, **kwargs: Any) -> tuple[nn.Sequential, Any]:
    model = small()
    optimizer = cls(model.parameters(), **kwargs)
    split_master_weights(model, optimizer)
    return model, optimizer


class TestCheckpoints:
    """Checkpoints of a split pair equal a plain pair's, bit for bit, in both directions."""

    @each_class
    def test_resumed(self, case: OptimizerCase) -> None:
        """Training resumed from a checkpoint continues as if there had been none."""
        model, optimizer = _split_pair(case)
        train(model, optimizer)
        states = saved(model, optimizer)
        train(model, optimizer, seed=2)
        twin, its = _split_pair(case)
        train(twin, its, steps=1, seed=5)
        twin.load_state_dict(states[0])
        its.load_state_dict(states[1])
        train(twin, its, seed=2)
        assert_same(saved(twin, its), saved(model, optimizer))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16])
    def test_of_another_dtype(self, dtype: torch.dtype) -> None:
        """Values are rounded once, to float32, as by a plain model's copy_."""
        source, plain, (model, _optimizer) = small().to(dtype), small(), _split()
        for target in (plain, model):
            target.load_state_dict(source.state_dict())
        assert_same(model.state_dict(), plain.state_dict())

    def test_of_a_submodule_with_prefix_and_destination(self) -> None:
        model = small()
        expected = {k: v.clone() for k, v in model[4].state_dict(prefix="x.").items()}
        split_master_weights(model, FusedSGD(model.parameters()))
        destination: dict[str, Any] = {}
        model[4].state_dict(destination=destination, prefix="x.", keep_vars=True)
        assert_same(destination, expected)

    def test_that_does_not_fit(self) -> None:
        model, _optimizer = _split()
        state = copy.deepcopy(model.state_dict())
        state["4.weight"] = state["4.weight"][:1]
        with pytest.raises(RuntimeError, match=r"size mismatch for 4\.weight"):
            model.load_state_dict(state)
        del state["4.weight"]
        with pytest.raises(RuntimeError, match=r"Missing key.*4\.weight"):
            model.load_state_dict(state)
        with pytest.raises(RuntimeError, match=r"assign=True would replace 0\.weight"):
            model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)

    def test_users_hooks_see_exact_values(self) -> None:
        model, _optimizer = _split()
        seen: list[torch.dtype] = []
        model.register_state_dict_post_hook(lambda _, d, *__: seen.append(d["4.weight"].dtype))
        model.state_dict()
        assert seen == [torch.float32]


def _hooks(model: nn.Module) -> list[Any]:
    return [{k: v for k, v in vars(m).items() if "hooks" in k} for m in model.modules()]


class TestMerge:
    @each_class
    def test_restores_exactly(self, case: OptimizerCase) -> None:
        model = small()
        optimizer = _optimizer(model, case)
        train(model, optimizer)
        before, modules = saved(model, optimizer), [dict(vars(m)) for m in model.modules()]
        hooks, params = copy.deepcopy(_hooks(model)), dict(model.named_parameters())
        fuse_update_step(optimizer)
        split_master_weights(model, optimizer)
        assert_same(saved(model, optimizer), before)
        assert dict(model.named_parameters()).keys() == params.keys()
        assert all(p is params[name] for name, p in model.named_parameters())
        split = [name for name, p in params.items() if p.dtype == torch.bfloat16]
        assert split == ["0.weight", "0.bias", "4.weight", "4.bias"]
        merge_master_weights(model, optimizer)
        unfuse(optimizer)
        assert_same(saved(model, optimizer), before)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        for module, attributes in zip(model.modules(), modules):
            assert vars(module).keys() == attributes.keys()
        assert _hooks(model) == hooks
        train(model, optimizer)

    def test_order(self) -> None:
        model = small()
        optimizer = torch.optim.SGD(model.parameters())
        fuse_update_step(optimizer)
        split_master_weights(model, optimizer)
        with pytest.raises(RuntimeError, match="merge them first"):
            unfuse(optimizer)
        with pytest.raises(
            RuntimeError, match=r"FusedSGD: parameters are split .*merge them first"
        ):
            _ = optimizer._original_step
        assert optimizer.fused  # type: ignore[attr-defined]

    def test_what_was_not_split(self) -> None:
        model = small()
        for optimizer in (torch.optim.SGD(model.parameters()), FusedSGD(model.parameters())):
            before = saved(model, optimizer)
            merge_master_weights(model, optimizer)
            assert_same(saved(model, optimizer), before)

    def test_one_that_was_made_split_stays(self) -> None:
        model = small()
        exact = copy.deepcopy(model.state_dict())
        optimizer = SplitSGD(model.parameters())
        assert not any(entry.done for entry in split_master_weights(model, optimizer))
        assert_same(model.state_dict(), exact)
        merge_master_weights(model, optimizer)
        assert model[0].weight.dtype == torch.bfloat16
        assert model.state_dict()["0.weight"].dtype == torch.bfloat16
        assert "trail" in optimizer.state_dict()["state"][0]

    def test_lower_halves_are_in_one_state_dict(self) -> None:
        """The model's has the exact values, whether or not the optimizer has taken a step."""
        model, optimizer = _split(FusedAdam)
        for _ in range(2):
            assert not any("trail" in s for s in optimizer.state_dict()["state"].values())
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()


def test_clipping_of_gradients_of_both_dtypes() -> None:
    model, optimizer = _split(lr=0.1)
    with AUTOCAST:
        model(torch.randn(6, 3, 4, 4)).float().square().mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    assert torch.stack(squares).sum().sqrt() == pytest.approx(1e-3, rel=0.01)
    assert norm > 1e-3
    optimizer.step()


def test_layers_added_later() -> None:
    model, optimizer = _split(lr=0.1)
    model.append(nn.Linear(2, 2))
    optimizer.add_param_group({"params": list(model[5].parameters())})
    assert model[5].weight.dtype == torch.float32
    train(model, optimizer)
    exact = copy.deepcopy(model.state_dict())
    entries = split_master_weights(model, optimizer)
    assert [entry.where for entry in entries if entry.done] == ["5.weight", "5.bias"]
    assert_same(model.state_dict(), exact)
    train(model, optimizer)


class TestLeftAlone:
    @staticmethod
    def _reasons(model: nn.Module, optimizer: Any = None) -> dict[str, str]:
        optimizer = optimizer or FusedSGD(model.parameters())
        entries = split_master_weights(model, optimizer)
        for entry in entries:
            assert entry.done == (model.get_parameter(entry.where).dtype == torch.bfloat16)
        return {entry.where: entry.what for entry in entries if not entry.done}

    def test_norms_and_recurrent_layers(self) -> None:
        reasons = self._reasons(
            nn.ModuleList([nn.LayerNorm(3), nn.LSTM(3, 3), nn.PReLU(), nn.Linear(3, 3)])
        )
        assert {what for name, what in reasons.items() if name[0] == "1"} == {
            "stays float32: LSTM uses it"
        }
        assert reasons["0.weight"] == "stays float32: LayerNorm uses it"
        assert not any(name.startswith("3.") for name in reasons)

    def test_shared_with_a_module_of_another_kind(self) -> None:
        class Head(nn.Module):
            def __init__(self, weight: nn.Parameter) -> None:
                super().__init__()
                self.weight = weight

        table, linear = nn.Embedding(5, 3), nn.Linear(3, 5)
        linear.weight = table.weight
        held = copy.deepcopy(nn.ModuleList([table, linear, Head(table.weight)]))
        assert self._reasons(nn.ModuleList([table, linear])) == {}
        assert self._reasons(held) == {"0.weight": "stays float32: Head uses it"}

    def test_subclasses(self) -> None:
        class Own(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return x @ self.weight.log()

        assert set(self._reasons(nn.Sequential(Own(3, 3)))) == {"0.weight", "0.bias"}

    def test_computed_weights(self) -> None:
        model = nn.Sequential(
            parametrizations.weight_norm(nn.Linear(3, 3)), prune.identity(nn.Linear(3, 3), "weight")
        )
        reasons = self._reasons(model)
        assert reasons["1.weight_orig"] == "stays float32: a weight is computed from it"
        assert len(reasons) == 4  # for the parametrized module, the bias too

    def test_table_that_forward_passes_write_to(self) -> None:
        reasons = self._reasons(nn.ModuleList([nn.Embedding(5, 3, max_norm=1.0), nn.Linear(3, 3)]))
        assert reasons == {"0.weight": "stays float32: a forward pass with max_norm writes to it"}

    def test_what_the_optimizer_has_not(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[0].weight.requires_grad_(False)  # but it has this one
        reasons = self._reasons(model, FusedSGD(model[0].parameters()))
        assert set(reasons) == {"1.weight", "1.bias"}
        assert set(reasons.values()) == {"stays float32: the optimizer does not update it"}

    def test_dtypes(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3).double(), nn.Linear(3, 3).bfloat16())
        entries = split_master_weights(model, FusedSGD(model.parameters()))
        assert [entry.what for entry in entries] == [
            f"stays {dtype}: only float32 weights are split"
            for dtype in ("float64", "float64", "bfloat16", "bfloat16")
        ]

    def test_shared_memory(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = nn.Parameter(model[0].weight.detach().t())
        reasons = self._reasons(model)
        assert reasons == dict.fromkeys(
            ["0.weight", "1.weight"], "stays float32: its elements share memory"
        )


def _bags_in_bfloat16(module: nn.EmbeddingBag, args: tuple[Tensor, ...], _: Tensor) -> Tensor:
    weight = module.weight.bfloat16()
    return nn.functional.embedding_bag(args[0], weight, *args[1:], mode=module.mode).float()


class TestForward:
    @each_task
    def test_under_autocast(self, task: str) -> None:
        """Outputs are those of the plain model whose weights are truncated to bfloat16."""
        make, loss, _ = TASKS[task]
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fuse_update_step(optimizer)
        split_master_weights(model, optimizer)
        plain = make()
        plain.load_state_dict(_truncated(model))
        for module in plain.modules():
            if isinstance(module, nn.EmbeddingBag):  # its rows are added in bfloat16
                module.register_forward_hook(_bags_in_bfloat16)
        with AUTOCAST:
            losses = [loss(m, torch.Generator().manual_seed(0)) for m in (model, plain)]
        assert losses[0].dtype == torch.float32
        assert torch.equal(*losses)

    @pytest.mark.parametrize(
        ("module", "x"),
        [
            (nn.Linear(3, 2), torch.ones(4, 3)),
            (nn.Conv1d(3, 2, 1), torch.ones(1, 3, 4)),
            (nn.ConvTranspose2d(3, 2, 1), torch.ones(1, 3, 4, 4)),
            (Conv1D(2, 3), torch.ones(4, 3)),
        ],
    )
    def test_without_autocast(self, module: nn.Module, x: Tensor) -> None:
        optimizer = FusedSGD(module.parameters())
        split_master_weights(module, optimizer)
        name = type(module).__name__
        with pytest.raises(
            RuntimeError, match=rf"{name}'s weights are bfloat16 .* under torch\.autocast\('cpu'"
        ):
            module(x)
        assert module(x.bfloat16()).dtype == torch.bfloat16
        merge_master_weights(module, optimizer)
        assert module(x).dtype == torch.float32

    @pytest.mark.parametrize(
        ("module", "widths"),
        [
            (Conv1D(5, 3), [3]),
            (nn.MultiheadAttention(8, 2, dropout=0.1), [8]),
            (nn.MultiheadAttention(8, 2, kdim=5, vdim=3, bias=False), [8, 5, 3]),
            (nn.MultiheadAttention(8, 2, add_bias_kv=True), [8]),
        ],
        ids=["Linear of GPT-2", "self-attention", "attention", "attention with biases"],
    )
    def test_other_products(self, module: nn.Module, widths: list[int]) -> None:
        """Outputs and gradients are those of the plain module with truncated weights."""
        split, optimizer = transforms.optimize(
            module, torch.optim.SGD(module.parameters()), dtype=torch.bfloat16
        )
        plain = copy.deepcopy(module)
        plain.load_state_dict(_truncated(split))
        inputs = [torch.randn(4, 2, width) for width in widths]
        inputs *= 3 if len(inputs) == 1 and isinstance(module, nn.MultiheadAttention) else 1
        for each in (split, plain):
            torch.manual_seed(0)
            each.eval() if getattr(module, "dropout", 0) else each.train()
            with AUTOCAST:
                output = each(*inputs)
            output = output[0] if isinstance(output, tuple) else output
            output.float().square().sum().backward()
        for (name, ours), theirs in zip(split.named_parameters(), plain.parameters()):
            is_split = not name.startswith("bias_")
            assert ours.dtype == (torch.bfloat16 if is_split else torch.float32)
            assert torch.equal(ours.grad.float(), theirs.grad)
        assert_same(dict(transforms.restore(split, optimizer)[0].state_dict()), module.state_dict())

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
    @pytest.mark.parametrize("is_nested", [True, False])
    def test_attention_with_nested_tensors(self, is_nested: bool) -> None:
        """TransformerEncoder makes them in evaluation with a padding mask."""
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        model: Any = nn.TransformerEncoder(layer, 1, enable_nested_tensor=is_nested)
        x, padding = torch.randn(2, 3, 8), torch.tensor([[False, False, True], [False] * 3])
        split, _ = transforms.optimize(
            model, torch.optim.SGD(model.parameters()), dtype=torch.bfloat16
        )
        attention = split.layers[0].self_attn
        weights = (attention.in_proj_weight, attention.out_proj.weight)
        assert {w.dtype for w in weights} == {torch.float32 if is_nested else torch.bfloat16}
        assert split.layers[0].linear1.weight.dtype == torch.bfloat16
        split.eval()
        with torch.no_grad(), AUTOCAST:
            assert split(x, src_key_padding_mask=padding)[1].isfinite().all()

    def test_attention_that_may_use_its_weights_otherwise(self) -> None:
        class Own(nn.MultiheadAttention):
            def forward(self, x: Tensor) -> Tensor:
                return x @ self.out_proj.weight.log()

        model = nn.ModuleList([Own(8, 2, bias=False), nn.MultiheadAttention(8, 2).out_proj])
        entries = split_master_weights(model, FusedSGD(model.parameters()))
        assert {entry.where: entry.what for entry in entries} == {
            "0.in_proj_weight": "stays float32: Own uses it",
            "0.out_proj.weight": "stays float32: Own uses it",
            **{
                f"1.{name}": "stays float32: NonDynamicallyQuantizableLinear uses it"
                for name in ("weight", "bias")
            },
        }

    def test_embeddings_return_float32(self) -> None:
        model = nn.ModuleList([nn.Embedding(5, 3), nn.EmbeddingBag(5, 3, mode="sum")])
        split_master_weights(model, FusedSGD(model.parameters()))
        tokens, weights = torch.tensor([[1, 2]]), torch.tensor([[0.5, 2.0]])
        for output in (
            model[0](tokens),
            model[1](tokens),
            model[1](tokens, per_sample_weights=weights),
            model[1](tokens, None, weights),
        ):
            assert output.dtype == torch.float32
            output.sum().backward()
        assert model[0].weight.grad.dtype == torch.bfloat16


def _truncated(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: model.get_parameter(name).detach().float()
        if name in dict(model.named_parameters(remove_duplicate=False))
        else value
        for name, value in model.state_dict().items()
    }


class TestCopies:
    @each_class
    @pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
    @pytest.mark.parametrize("order", [1, -1])
    def test_of_the_pair(self, case: OptimizerCase, how: Any, order: int) -> None:
        model, optimizer = _split_pair(case)
        train(model, optimizer)
        twin, its = how((model, optimizer)[::order])[::order]
        train(twin, its, seed=3)
        train(model, optimizer, seed=3)
        assert_same(saved(twin, its), saved(model, optimizer))
        transforms.restore(twin, its)
        assert type(its) is case.reference
        assert twin[0].weight.dtype == torch.float32
        assert_same(twin.state_dict(), model.state_dict())
        assert model[0].weight.dtype == torch.bfloat16

    @each_class
    def test_of_the_model_alone(self, case: OptimizerCase) -> None:
        model, optimizer = _split_pair(case)
        train(model, optimizer)
        before = copy.deepcopy(model.state_dict())
        twin = copy.deepcopy(model)
        average = AveragedModel(model)  # type: ignore[no-untyped-call]
        train(model, optimizer)
        assert_same(twin.state_dict(), before)
        assert_same(average.module.state_dict(), before)
        exact = copy.deepcopy(model.state_dict())
        twin.load_state_dict(exact)
        assert_same(twin.state_dict(), exact)

    @pytest.mark.parametrize("use_buffers", [False, True])
    @pytest.mark.parametrize("kind", ["mean", "ema", "function"])
    def test_average(self, kind: str, use_buffers: bool) -> None:
        """The exact weights are averaged, as for a plain model with the same weights."""
        options: dict[str, Any] = {
            "mean": {},
            "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},  # type: ignore[no-untyped-call]
            "function": {"avg_fn": lambda mean, value, _: 0.9 * mean + 0.1 * value},
        }[kind]
        model = small()
        plain = copy.deepcopy(model)
        optimizer = FusedAdam(model.parameters())
        split_master_weights(model, optimizer)
        average, expected = (
            AveragedModel(m, use_buffers=use_buffers, **options) for m in (model, plain)
        )
        for seed in range(3):
            train(model, optimizer, seed=seed)
            before = saved(model, optimizer)
            if seed == 1:
                average = copy.deepcopy(average)
            average.update_parameters(model)
            assert_same(saved(model, optimizer), before)
            plain.load_state_dict(model.state_dict())
            expected.update_parameters(plain)
        assert_same(average.state_dict(), expected.state_dict())

    def test_without_the_optimizer(self) -> None:
        model, optimizer = _split(FusedAdam)
        train(model, optimizer)
        before = copy.deepcopy(model.state_dict())
        del optimizer
        assert_same(model.state_dict(), before)


class TestBadInput:
    def test_optimizer_that_is_not_fused(self) -> None:
        model = small()
        with pytest.raises(RuntimeError, match=r"step of SGD is not fused.*fuse_update_step=True"):
            split_master_weights(model, torch.optim.SGD(model.parameters()))

    def test_optimizer_of_another_model(self) -> None:
        model = small()
        with pytest.raises(ValueError, match="none of the model's parameters"):
            split_master_weights(model, FusedSGD(small().parameters()))
        assert {p.dtype for p in model.parameters()} == {torch.float32}

    def test_lost_halves(self) -> None:
        model, optimizer = _split()
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.state.clear()
        for action in (model.state_dict, lambda: merge_master_weights(model, optimizer)):
            with pytest.raises(ValueError, match="lost its lower half"):
                action()
