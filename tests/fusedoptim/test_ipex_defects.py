"""Defects of Intel Extension for PyTorch 2.8's fused optimizers, each shown to be absent here.

Two of its defects are of ``ipex.optimize``, which rewrites models, and have no counterpart in an
optimizer: it accepts an optimizer of another model's parameters and trains a copy of them, and it
changes the memory format of the user's own model although told ``inplace=False``. The contract
tests show the absence of most others:

* 3: split weights with sparse gradients never reach the forward pass (test_sparse.py compares both
  halves, with gradients of layers);
* 4: a split's lower halves lose sparse gradients (``test_updates_too_small_for_bfloat16_add_up``);
* 5: float16 without a GradScaler does nothing; 11: float32 momentum is read as bfloat16
  (``TestParity``);
* 6: no norms of split parameters (``TestParity`` of FusedLamb with ``split=True``);
* 7: Lamb overwrites gradients (``test_gradient_keeps_its_values_and_its_version``);
* 8: no step hook is called (``test_step_hooks``); 9: an earlier scheduler warns (test_training.py);
* 14: integers and float64 are silently left alone (test_bad_input.py, ``TestParity``).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from tests.fusedoptim.helpers import SideBySide, make_params
from tests.optimizer_cases import ADAGRAD, LAMB, SPLIT_CASES, OptimizerCase, configuration_id

SIZES = (1, 7, 15, 16, 17, 31, 32, 33, 63, 65, 32_769)
SPLIT_ADAGRAD = next(case for case in SPLIT_CASES if case.cls is ADAGRAD.cls)
SPLIT_LAMB = next(case for case in SPLIT_CASES if case.cls is LAMB.cls)
each_lamb = pytest.mark.parametrize("case", [LAMB, SPLIT_LAMB], ids=configuration_id)


@pytest.mark.parametrize(
    ("case", "kwargs", "dtype"),
    [
        (SPLIT_ADAGRAD, {}, torch.float32),
        (SPLIT_ADAGRAD, {"weight_decay": 0.5}, torch.float32),
        *((ADAGRAD, {}, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)),
    ],
    ids=configuration_id,
)
def test_01_and_02_adagrads_last_elements(
    case: OptimizerCase, kwargs: dict[str, Any], dtype: torch.dtype
) -> None:
    """IPEX rebuilds the last ``size % 32`` elements wrongly, or decays their upper halves alone."""
    params = [Parameter(torch.randn(size).to(dtype)) for size in SIZES]
    SideBySide(case, {"lr": 0.1, **kwargs}, params).train(4)


class Test10:
    """IPEX's Lamb on GPUs stores a bfloat16's update as the master, and divides 0 by 0."""

    def test_the_master_keeps_its_precision(self) -> None:
        p = Parameter(torch.full((100,), 1.0 + 2.0**-12))
        SideBySide(SPLIT_LAMB, {"lr": 2.0**-14}, [p]).train(4)

    @each_lamb
    @pytest.mark.parametrize("zero", ["parameter", "gradient", "both"])
    def test_norms_of_zero(self, case: OptimizerCase, zero: str) -> None:
        pair = SideBySide(case, {"lr": 0.1}, make_params(torch.float32, ["1000", "1"]))
        for _ in range(2):
            pair.set_gradients()
            p, reference = pair.params[0], pair.references[0]
            with torch.no_grad():
                if zero != "gradient":
                    if p in pair.ours.halves:
                        pair.ours.halves.trail(p).zero_()
                    p.zero_()
                    reference.zero_()
                if zero != "parameter":
                    p.grad.zero_()
                    reference.grad.zero_()
            pair.check()
            assert all(p.isfinite().all() for p in pair.params)

    @each_lamb
    def test_nothing_to_do_changes_nothing(self, case: OptimizerCase) -> None:
        p = Parameter(torch.randn(100))
        optimizer = case.make([p], lr=0.1)
        before = next(optimizer.master_params()).clone()
        p.grad = torch.zeros_like(p)
        optimizer.step()
        assert torch.equal(next(optimizer.master_params()), before)
