"""The kernels of an update, and what they sum."""

from __future__ import annotations

import pytest
import torch

from fusedoptim.allocator import queue
from fusedoptim.launch.block import Chunks
from fusedoptim.launch.kernel import kernel_for
from fusedoptim.launch.pipeline import Pipeline


@pytest.mark.parametrize(("dtype", "variant"), [(torch.float32, "f32"), (torch.float64, "f64")])
def test_a_sum_does_not_depend_on_torchs_threads(dtype: torch.dtype, variant: str) -> None:
    """The chunks are so many that torch would divide their sum among its threads."""
    values = torch.randn(2_000_000, dtype=dtype)
    chunks = Chunks([len(values)], 256)
    pipeline = Pipeline(
        [kernel_for(queue("cpu"), "sum_of_squares", variant)], chunks, values.device
    )
    pipeline.write_addresses("grad", [values.data_ptr()], values.element_size())
    before, sums = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            sums.append(pipeline.launch_and_sum().item())
    finally:
        torch.set_num_threads(before)
    assert len(set(sums)) == 1
    assert sums[0] == pytest.approx(values.double().square().sum().item(), rel=1e-5)
