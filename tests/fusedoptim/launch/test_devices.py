"""A kind of device that SYCL drives is one class, the only one that launching code asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from allocator.runtime.kinds import DEVICE_KINDS
from fusedoptim import allocator, ops
from fusedoptim.launch import devices
from fusedoptim.launch.backend import Backend, Compiler, LaunchShape
from fusedoptim.launch.sycl import SyclCompiler, SyclKernel
from tests.fusedoptim.helpers import SideBySide, assert_within, each_case, make_params
from tests.optimizer_cases import OptimizerCase
from tests.running import check_script
from tests.tolerances import cross_entropy_errors


class Accelerator(Backend):
    """A CPU as another kind of device, with SYCL, a queue and a launch shape of its own."""

    torch_type = "cpu"
    shape = LaunchShape(lanes=32, chunk=4096, elements_per_group=512)
    runs_on_host = True

    def __init__(self) -> None:
        # Programs are kept by queue, so those of the CPU's own kind are not found.
        device = allocator.queue("cpu").sycl_device
        self.own_queue = allocator.load_dpctl().SyclQueue(device, property="in_order")

    def drives(self, sycl_device: Any) -> bool:
        return bool(sycl_device.is_cpu)

    def devices(self) -> Sequence[torch.device]:
        return [torch.device("cpu")]

    def queue(self, device: torch.device) -> Any:
        return self.own_queue

    def compiler(self, queue: Any, by_sycl: bool = False) -> Compiler:
        return SyclCompiler.of(queue, is_ordered=True)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, sycl_launches: list[SyclKernel]) -> list[SyclKernel]:
    """The kernels launched by the new kind of device, which is the only one."""
    kind = Accelerator()
    monkeypatch.setattr(devices, "_BACKENDS", (kind,))
    monkeypatch.setitem(devices.BACKENDS, "cpu", kind)
    return sycl_launches


@each_case
def test_optimizers_follow_torch(case: OptimizerCase, launched: list[SyclKernel]) -> None:
    pair = SideBySide(case, {}, make_params(torch.float32))
    pair.train(steps=2)
    assert launched


def test_operators_follow_torch(launched: list[SyclKernel]) -> None:
    logits, target = torch.randn(5, 1000, dtype=torch.float32), torch.randint(1000, (5,))
    loss, _ = ops.cross_entropy(logits, target)
    exact = torch.nn.functional.cross_entropy(logits.double(), target, reduction="none")
    allowed, _ = cross_entropy_errors(logits.double(), target, 0.0, torch.float32)
    assert launched
    assert_within(loss, exact, allowed, "loss")


@pytest.mark.parametrize(
    ("torch_type", "keys"),
    [("mtia", ["MTIA"]), ("npu", ["PrivateUse1", "SparsePrivateUse1", "SparseCsrPrivateUse1"])],
)
def test_operators_are_registered_for_another_torch_type(torch_type: str, keys: list[str]) -> None:
    """torch.library accepts no keys for MTIA's sparse tensors; PrivateUse1 is renamed "npu"."""
    script = """
        import sys
        import torch
        from fusedoptim.launch import cpu, devices

        name, *keys = sys.argv[1:]

        class Accelerator(cpu.CPU):
            torch_type = name

        torch.utils.rename_privateuse1_backend("npu")
        devices.BACKENDS[name] = Accelerator()
        from fusedoptim import ops

        assert ops.dropout(torch.ones(4), torch.tensor(1), 0.0).sum() == 4
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        assert all(has_kernel("fusedoptim::dropout", key) for key in keys)
    """
    check_script(script, torch_type, *keys)


def test_the_allocator_has_the_same_kinds() -> None:
    by_torch = {kind.torch_type: kind.is_host for kind in DEVICE_KINDS}
    assert by_torch == {name: kind.runs_on_host for name, kind in devices.BACKENDS.items()}
