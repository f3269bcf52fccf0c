"""The pass that replaces torch's dropout by ours: where, how it is undone, and what is left."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fusedoptim import transforms
from fusedoptim.nn import AlphaDropout, Dropout, MultiheadAttention, functional
from tests.running import check_script
from tests.transforms.helpers import (
    fingerprint,
    levels_of,
    operators_called,
    optimized,
    optimized_twice,
)
from tests.transforms.models import transformers_package

KNOB = "parallel_dropout"


class Subclass(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class AlphaSubclass(nn.AlphaDropout):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)


class Block(nn.Module):
    """A Dropout that is used twice, an AlphaDropout, and one of each kind that is left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.shared = nn.Dropout(0.25)
        self.again = self.shared
        self.alpha = nn.AlphaDropout(0.25)
        self.others = nn.Sequential(
            Subclass(0.1), nn.Dropout1d(0.1), AlphaSubclass(0.1), nn.FeatureAlphaDropout(0.1)
        )
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.last(self.shared(self.alpha(self.first(x)))))


def left(model: nn.Module) -> dict[str, str]:
    return {entry.where: entry.what for entry in transforms.report(model).left(KNOB)}


def test_exchanges_plain_dropouts_and_reports_the_others() -> None:
    model = optimized(Block())
    assert type(model.shared) is Dropout
    assert model.again is model.shared
    assert type(model.alpha) is AlphaDropout
    assert type(model.attention) is MultiheadAttention
    done = [entry.where for entry in transforms.report(model).done(KNOB)]
    assert done == ["shared", "alpha", "attention"]
    assert left(model) == {
        "others.0": "is not a plain torch.nn.Dropout: Subclass may differ from it",
        "others.1": "draws one number for each channel, which is quick",
        "others.2": "is not a plain torch.nn.AlphaDropout: AlphaSubclass may differ from it",
        "others.3": "draws one number for each channel, which is quick",
    }


def test_attention_of_the_users_own_is_reported() -> None:
    model = optimized(nn.Sequential(nn.Linear(4, 4), Attention(), nn.Dropout(0.1)))
    assert left(model) == {
        "1": "calls scaled_dot_product_attention, whose dropout, if any, stays torch's"
    }


def test_levels_and_knob() -> None:
    for arguments, is_ours in levels_of(KNOB):
        assert (type(optimized(Block(), **arguments).shared) is Dropout) == is_ours
    with pytest.raises(ValueError, match="parallel_dropout=True is for a model in train mode"):
        transforms.optimize(Block().eval(), parallel_dropout=True)


def test_warns_where_there_is_nothing_to_exchange() -> None:
    with pytest.warns(transforms.NoEffectWarning, match="parallel_dropout changed nothing"):
        optimized(nn.Linear(2, 2), parallel_dropout=True)


def test_twice_changes_nothing_more_and_restore_restores_every_bit() -> None:
    model = Block().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with optimized_twice(model, optimizer):
        pass
    assert type(model.shared) is nn.Dropout
    assert type(model.alpha) is nn.AlphaDropout


def test_dropouts_that_are_ours_already_stay_ours() -> None:
    model = optimized(nn.Sequential(nn.Linear(2, 2), Dropout(0.1), nn.Dropout(0.1)))
    assert [entry.where for entry in transforms.report(model).done(KNOB)] == ["2"]
    transforms.restore(model)
    assert [type(module) for module in model] == [nn.Linear, Dropout, nn.Dropout]


def test_hooks_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()
    seen: list[str] = []
    model[1].register_forward_pre_hook(lambda *_: seen.append("before"))
    model[1].register_forward_hook(lambda *_: seen.append("after"))
    model[1].register_full_backward_hook(lambda *_: seen.append("backward"))
    model = optimized(model, inplace=True)
    model(torch.ones(2, 4)).sum().backward()
    assert type(model[1]) is Dropout
    assert seen == ["before", "after", "backward"]


@pytest.mark.parametrize("kind", ["own forward", "parametrized"])
def test_changed_objects_are_left(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    dropout: Any = model[1]
    if kind == "own forward":
        dropout.forward = torch.relu
    else:
        dropout.scale = nn.Parameter(torch.ones(()))
        parametrize.register_parametrization(dropout, "scale", nn.Identity())
    changed = type(dropout)
    model = optimized(model, inplace=True)
    assert type(model[1]) is changed
    assert "is not a plain torch.nn.Dropout" in left(model)["1"]


def test_inference_afterwards_and_restored() -> None:
    """Both passes are undone in reverse order: the Dropout is torch's again."""
    model = optimized(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.AlphaDropout(0.5)))
    plain = transforms.optimize(model.eval(), inplace=True)
    assert all(isinstance(module, nn.Identity) for module in plain[1:])
    kinds = [type(module) for module in transforms.restore(plain)[1:]]
    assert kinds == [nn.Dropout, nn.AlphaDropout]


def test_training_repeats_under_a_seed_and_copies() -> None:
    model = optimized(Block())
    twin = copy.deepcopy(model)
    x, outputs = torch.randn(5, 8), []
    for module in (model, model, twin):
        torch.manual_seed(3)
        outputs.append(module(x))
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert (outputs[0] == 0).any()
    assert not draws_on_one_thread(lambda: model(x).sum().backward())
    assert torch.equal(model.eval()(x), transforms.restore(model)(x))


def draws_on_one_thread(call: Any) -> bool:
    """Whether torch's own generator draws a mask during the call."""
    return any(name.startswith("aten::bernoulli") for name in operators_called(call))


class TestMultiheadAttention:
    def test_encoder_layers_draw_no_mask_by_torch(self) -> None:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        given = nn.TransformerEncoder(layer, 2)
        x = torch.randn(3, 5, 8)
        assert draws_on_one_thread(lambda: given(x))
        model = optimized(given)
        assert type(model.layers[1].self_attn) is MultiheadAttention
        assert type(given.layers[1].self_attn) is nn.MultiheadAttention
        assert not draws_on_one_thread(lambda: model(x).sum().backward())
        assert left(model) == {}
        torch.testing.assert_close(model.eval()(x), given.eval()(x))

    def test_restored_and_loaded(self) -> None:
        model = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.1).train()
        before, state = fingerprint(model), copy.deepcopy(model.state_dict())
        optimized(model, inplace=True)
        assert type(model.multihead_attn) is MultiheadAttention
        assert list(model.state_dict()) == list(state)
        model.load_state_dict(state)
        transforms.restore(model)
        assert fingerprint(model) == before

    @pytest.mark.parametrize("how", ["bias", "zero", "subclass", "own forward", "no dropout"])
    def test_what_is_left(self, how: str) -> None:
        class Own(nn.MultiheadAttention):
            def forward(self, *arguments: Any, **options: Any) -> Any:
                return super().forward(*arguments, **options)

        options = {"bias": {"add_bias_kv": True}, "zero": {"add_zero_attn": True}}.get(how, {})
        cls = Own if how == "subclass" else nn.MultiheadAttention
        attention = cls(8, 2, dropout=0.0 if how == "no dropout" else 0.1, **options)
        if how == "own forward":
            attention.forward = torch.relu  # type: ignore[method-assign, assignment]
        model = optimized(nn.Sequential(attention, nn.Dropout(0.1)), inplace=True)
        assert type(model[0]) is cls
        expected = {
            "bias": "drops attention weights inside torch's function (add_bias_kv or "
            "add_zero_attn)",
            "subclass": "is not a plain torch.nn.MultiheadAttention: Own may differ from it",
            "own forward": "is not a plain torch.nn.MultiheadAttention: MultiheadAttention may "
            "differ from it",
        }
        expected["zero"] = expected["bias"]
        assert left(model) == ({"0": expected[how]} if how in expected else {})

    def test_ours_already_stays_ours(self) -> None:
        model = optimized(nn.Sequential(MultiheadAttention(8, 2, dropout=0.1), nn.Dropout(0.1)))
        assert type(transforms.restore(model)[0]) is MultiheadAttention

    def test_convolutions_beside_it_get_channels_last(self) -> None:
        """Our class's code does not depend on strides."""
        model = optimized(nn.ModuleList([nn.Conv2d(3, 8, 3), nn.MultiheadAttention(8, 2, 0.1)]))
        assert [e.where for e in transforms.report(model).done("auto_channels_last")] == ["0"]


NAME = "fusedoptim_sdpa"


def bert(attention: str = "sdpa", drop: float = 0.1, **options: Any) -> Any:
    transformers = transformers_package()
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        attention_probs_dropout_prob=drop,
        hidden_dropout_prob=drop,
        attn_implementation=attention,
        **options,
    )
    return transformers.BertForMaskedLM(config).train()


def gpt() -> Any:
    transformers = transformers_package()
    config = transformers.GPT2Config(
        vocab_size=50,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config).train()


def llama() -> Any:
    """Make a model in which two query heads share a key head."""
    transformers = transformers_package()
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, attention_dropout=0.1,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def t5() -> Any:
    """Make a model whose masks are learned."""
    transformers = transformers_package()
    config = transformers.T5Config(
        vocab_size=50, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.T5EncoderModel(config).train()


def tokens() -> dict[str, Tensor]:
    """Two sentences, of which the second ends earlier."""
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, 6:] = 0
    return {"input_ids": torch.randint(50, (2, 9)), "attention_mask": mask}


def logits(model: Any, words: dict[str, Tensor], seed: int = 3) -> Tensor:
    torch.manual_seed(seed)
    result: Tensor = model(**words).logits
    return result


class TestTransformers:
    @pytest.mark.parametrize("new", [bert, gpt])
    @pytest.mark.parametrize("dtype", [None, torch.bfloat16])
    def test_no_mask_is_torchs(self, new: Any, dtype: Any) -> None:
        given, words = new(), tokens()
        assert draws_on_one_thread(lambda: given(**words))
        model = optimized(given, dtype=dtype)
        done = {entry.where: entry.what for entry in transforms.report(model).done(KNOB)}
        assert done[""] == "masks of its attention drawn on all cores"
        assert left(model) == {}
        assert model.config._attn_implementation == NAME
        assert given.config._attn_implementation == "sdpa"

        def call() -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
                model(**words).logits.float().square().sum().backward()

        assert not draws_on_one_thread(call)
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())

    @pytest.mark.parametrize("new", [bert, gpt, llama, t5])
    def test_all_but_the_masks_is_transformers(self, new: Any) -> None:
        """Results agree at a probability with which nothing is ever dropped, with padding too."""
        given, words = new().double(), tokens()
        model, results = optimized(given, fuse_gelu=False), []
        assert model.config._attn_implementation == NAME
        for each in (model, given):
            for module in each.modules():
                for name in {"p", "dropout", "attention_dropout"} & vars(module).keys():
                    if isinstance(vars(module)[name], float):
                        setattr(module, name, 1e-12)
            with mock.patch.object(functional, "attention", wraps=functional.attention) as called:
                output = each(**words)[0]
            assert called.called == (each is model)
            output.square().sum().backward()
            results.append([output.detach(), *(p.grad for p in each.parameters())])
        torch.testing.assert_close(*results)
        assert torch.equal(model.eval()(**words)[0], given.eval()(**words)[0])

    def test_twice_and_restored(self) -> None:
        model = bert()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with optimized_twice(model, optimizer):
            pass
        assert model.config._attn_implementation == "sdpa"

    def test_copies_are_restored_alone(self) -> None:
        model = optimized(bert())
        twin, words = copy.deepcopy(model), tokens()
        assert torch.equal(logits(twin, words), logits(model, words))
        transforms.restore(twin)
        assert twin.config._attn_implementation == "sdpa"
        assert model.config._attn_implementation == NAME
        part = copy.deepcopy(model.bert)
        assert part.config._attn_implementation == NAME
        assert not draws_on_one_thread(lambda: part(**words))

    def test_unpickled_in_another_process(self, tmp_path: Path) -> None:
        """Each is loaded in its own fork, where nothing else has registered the function."""
        model, words = optimized(bert()), tokens()
        expected = logits(model, words)
        for name, part in (("model", model), ("part", model.bert)):
            torch.save((part, words), tmp_path / name)
        script = """
        import os, sys, torch
        import transformers.models.bert.modeling_bert
        for name in ("model", "part"):
            if child := os.fork():
                assert os.waitpid(child, 0)[1] == 0
                continue
            model, words = torch.load(f"{sys.argv[1]}/{name}", weights_only=False)
            torch.manual_seed(3)
            output = model(**words)[0]
            print(output.detach().double().sum().item(), flush=True)
            os._exit(0)
        """
        whole, _ = map(float, check_script(script, str(tmp_path)).splitlines())
        assert whole == float(expected.detach().double().sum())

    def test_saved_configs_have_the_name_of_torchs(self, tmp_path: Path) -> None:
        transformers = pytest.importorskip("transformers")
        model = optimized(bert())
        model.save_pretrained(tmp_path)
        assert NAME not in (tmp_path / "config.json").read_text()
        loaded = transformers.BertForMaskedLM.from_pretrained(tmp_path)
        assert loaded.config._attn_implementation == "sdpa"

    def test_models_inside_others(self) -> None:
        """Each config is changed by itself; that of another model of the same class stays."""
        other, inner = bert(), bert()
        model = optimized(nn.ModuleDict({"a": inner, "b": gpt(), "c": bert("eager")}), inplace=True)
        configs = [each.config._attn_implementation for each in (*model.values(), other)]
        assert configs == [NAME, NAME, "eager", "sdpa"]
        assert left(model) == {"c": 'has "eager" attention, whose dropout, if any, stays torch\'s'}
        transforms.restore(model)
        assert [each.config._attn_implementation for each in model.values()] == [
            "sdpa", "sdpa", "eager"
        ]  # fmt: skip

    def test_configs_inside_configs(self) -> None:
        """The vision model has no dropout, and keeps its attention."""
        transformers = pytest.importorskip("transformers")
        small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        small |= {"num_attention_heads": 2}
        config = transformers.CLIPConfig(
            text_config={**small, "vocab_size": 50, "attention_dropout": 0.1},
            vision_config={**small, "image_size": 8, "patch_size": 4},
            projection_dim=8,
        )
        model = optimized(transformers.CLIPModel(config).train(), inplace=True)
        assert model.text_model.config._attn_implementation == NAME
        assert model.vision_model.config._attn_implementation == "sdpa"
        assert model.config._attn_implementation == "sdpa"

    def test_without_dropout_nothing_is_done(self) -> None:
        model = optimized(bert(drop=0.0))
        assert model.config._attn_implementation == "sdpa"
        assert "" not in left(model)

    def test_code_that_asks_for_the_name_is_left(self) -> None:
        """An example is Falcon, whose layers compare the name with "sdpa"."""
        transformers = pytest.importorskip("transformers")
        config = transformers.FalconConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            attention_dropout=0.1, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        model = optimized(transformers.FalconForCausalLM(config).train())
        assert model.config._attn_implementation == "sdpa"
        assert any("scaled_dot_product_attention" in why for why in left(model).values())

    def test_a_subclass_that_treats_the_name_is_left(self) -> None:
        model = bert()

        class Asks(type(model)):  # type: ignore[misc]
            @property
            def is_quick(self) -> bool:
                return bool(self.config._attn_implementation == "sdpa")

        model.__class__ = Asks
        model = optimized(model, inplace=True)
        assert left(model) == {"": 'the code of Asks treats "sdpa" in its own way'}

    def test_versions_without_all_registries_are_left(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        transformers = pytest.importorskip("transformers")
        given = bert()
        monkeypatch.setattr(transformers, "__version__", "4.57.1")
        model = optimized(given)
        assert model.config._attn_implementation == "sdpa"
        assert left(model) == {"": "transformers 4.57.1 is older than 5"}

    def test_checkpoints_of_layers_draw_the_same_masks(self) -> None:
        model, words, results = optimized(bert()), tokens(), []
        for _ in range(2):
            model.zero_grad()
            output = logits(model, words)
            output.square().sum().backward()
            results.append([output.detach(), *(p.grad for p in model.parameters())])
            model.activation_checkpointing_enable()
        torch.testing.assert_close(*results, rtol=0, atol=0)

    def test_the_users_choice_of_another_stays(self) -> None:
        model = optimized(bert(), inplace=True)
        model.set_attn_implementation("eager")
        transforms.restore(model)
        assert model.config._attn_implementation == "eager"

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_compiled_without_a_graph_break(self) -> None:
        given, words = bert(), tokens()
        model = optimized(given)
        for module in (*model.modules(), *given.modules()):
            if isinstance(module, nn.Dropout):
                module.p = 1e-12
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(logits(compiled, words), logits(given, words))

    def test_transformers_is_not_imported(self) -> None:
        check_script(
            """
            import sys, torch
            from fusedoptim import transforms
            model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.1))
            transforms.optimize(model, torch.optim.SGD(model.parameters()))
            assert "transformers" not in sys.modules
            """
        )
