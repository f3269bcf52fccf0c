"""Merged embedding bags in programs that torch records for other processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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

    def forward(self, indices: Any, offsets: Any) -> list[Tensor]:
        return [bags + 1 for bags in self.bags(indices, offsets)]


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
