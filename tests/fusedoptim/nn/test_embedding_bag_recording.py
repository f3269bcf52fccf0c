"""Merged embedding bags in programs that torch records for other processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedoptim.ops import embedding_bags
from tests.fusedoptim.bag_cases import ROWS, new_bags
from tests.fusedoptim.nn.merged_bags import new_batches, new_module, train
from tests.running import check_script


class Model(torch.nn.Module):
    """Merged bags that have been trained, before a sum."""

    def __init__(self, optimizer: str | None, **options: Any) -> None:
        super().__init__()
        self.bags = new_module(optimizer, modes=["sum", "mean"], padding=0, **options)
        if optimizer is not None:
            train(self.bags, new_batches(self.bags, 1))

    def forward(self, *given: Any) -> Any:
        bags = self.bags(*given)
        return bags + 1 if isinstance(bags, Tensor) else tuple(y + 1 for y in bags)


@pytest.mark.parametrize("strict", [False, True])
class TestExported:
    @pytest.mark.parametrize(("optimizer", "split"), [("sgd", True), ("rowwise_adagrad", False)])
    def test_in_another_process(
        self, optimizer: str, split: bool, strict: bool, tmp_path: Path
    ) -> None:
        """The program updates no tables, least of all those of another module in that process."""
        model, bags = Model(optimizer, split=split).eval(), new_bags(ROWS)
        program = torch.export.export(model, tuple(bags), strict=strict)
        targets = [str(node.target) for node in program.graph.nodes]
        assert "fusedoptim.embedding_bags.default" in targets
        assert "fusedoptim.updated_embedding_bags.default" not in targets
        torch.export.save(program, tmp_path / "program.pt2")
        torch.save((tuple(bags), model(*bags)), tmp_path / "expected")
        script = """
            import sys, torch
            from fusedoptim.nn import MergedEmbeddingBag
            called = torch.export.load(f"{sys.argv[1]}/program.pt2").module()
            bags, expected = torch.load(f"{sys.argv[1]}/expected")
            for is_enabled in (False, True):
                with torch.set_grad_enabled(is_enabled):
                    found = called(*bags)
                assert all(map(torch.equal, found, expected))
                assert not any(y.requires_grad for y in found)
                other = MergedEmbeddingBag([(50, 20)], "sgd")  # whose rule has number 0
        """
        check_script(script, str(tmp_path))

    def test_the_module_is_trained_on(self, strict: bool) -> None:
        model, bags = Model("sgd").eval(), new_bags(ROWS)
        torch.export.export(model, tuple(bags), strict=strict)
        before = model.bags[0].weight.detach().clone()
        torch.cat(model(*bags), 1).sum().backward()
        assert not torch.equal(model.bags[0].weight, before)

    def test_in_training_mode(self, strict: bool) -> None:
        model, bags = Model("adagrad"), new_bags(ROWS)
        message = "the module is in training mode, and torch.export cannot record"
        with pytest.raises(RuntimeError, match=message):
            torch.export.export(model, tuple(bags), strict=strict)
        with torch.no_grad():
            program = torch.export.export(model, tuple(bags), strict=strict)
        model.bags.requires_grad_(False)
        other = torch.export.export(model, tuple(bags), strict=strict)
        for called in (program.module(), other.module()):
            assert all(map(torch.equal, called(*bags), model(*bags)))


def inputs(form: str, count: int) -> tuple[Any, ...]:
    """Bags of each table, or of all in one tensor, or as many in each row of a matrix."""
    bags = new_bags(ROWS, count)
    if form == "matrices":
        return ([torch.randint(rows, (count, 3)) for rows in ROWS],)
    return bags.joined if form == "joined" else tuple(bags)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
class TestTraced:
    @pytest.mark.parametrize("form", ["lists", "joined", "matrices"])
    @pytest.mark.parametrize("optimizer", [None, "adagrad"])
    def test_batches_of_any_size(self, optimizer: str | None, form: str) -> None:
        model = Model(optimizer).eval()
        traced = torch.jit.trace(model, inputs(form, 9))
        for called in (traced, torch.jit.freeze(traced)):
            for count in (1, 20):
                given = inputs(form, count)
                torch.testing.assert_close(called(*given), model(*given))

    # torch's function compares sizes; outside of pytest torch ignores what it says of itself.
    @pytest.mark.filterwarnings("ignore:Converting a tensor to a Python boolean")
    @pytest.mark.parametrize("joined", [False, True])
    @pytest.mark.parametrize("last", [False, True])
    def test_sample_weights(self, joined: bool, last: bool) -> None:
        def weighted(*given: Any) -> tuple[Tensor, ...]:
            return tuple(embedding_bags(*given, include_last_offset=last))

        def arguments(count: int) -> tuple[list[Tensor], ...]:
            bags = new_bags(ROWS, count)
            indices, offsets = ([x] for x in bags.joined) if joined else bags
            offsets = offsets if last else [x[:-1] for x in offsets]
            return weights, indices, offsets, [torch.rand(len(i)) for i in indices]

        weights = [torch.randn(rows, 8, requires_grad=True) for rows in ROWS]
        traced, given = torch.jit.trace(weighted, arguments(9)), arguments(5)
        outputs = traced(*given), weighted(*given)
        torch.testing.assert_close(*outputs)
        grads = [torch.autograd.grad(sum(map(torch.sum, y)), weights) for y in outputs]
        torch.testing.assert_close(*grads)

    def test_in_another_process(self, tmp_path: Path) -> None:
        """It needs nothing but torch."""
        model, bags = Model("sgd").eval(), inputs("lists", 9)
        torch.jit.trace(model, bags).save(tmp_path / "traced.pt")
        torch.save((bags, model(*bags)), tmp_path / "expected")
        script = """
            import sys, torch, warnings
            warnings.simplefilter("ignore")  # torch.jit is deprecated
            bags, expected = torch.load(f"{sys.argv[1]}/expected")
            torch.testing.assert_close(torch.jit.load(f"{sys.argv[1]}/traced.pt")(*bags), expected)
            assert "fusedoptim" not in sys.modules
        """
        check_script(script, str(tmp_path))

    def test_in_training_mode(self) -> None:
        model, bags = Model("sgd"), inputs("lists", 9)
        message = "the module is in training mode, and torch.jit.trace cannot record"
        with pytest.raises(RuntimeError, match=message):
            torch.jit.trace(model, bags)
        with torch.no_grad():
            torch.testing.assert_close(torch.jit.trace(model, bags)(*bags), model(*bags))

    def test_numbers_of_tensors(self) -> None:
        bags = new_bags(ROWS)
        with pytest.raises(ValueError, match="4 tables, 4 tensors of indices and 3 of offsets"):
            torch.jit.trace(
                lambda *given: tuple(embedding_bags([torch.ones(300, 2)] * 4, *given)),
                (bags.indices, bags.offsets[:3]),
            )
