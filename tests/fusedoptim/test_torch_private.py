"""torch's private names still do what this package uses them for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import Parameter
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from fusedoptim import _torch_private
from fusedoptim._torch_private import TensorGuards
from tests.compiling import another_thread_exports


def test_each_is_covered_here() -> None:
    tests = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {name.lower() for name in _torch_private.__all__} <= tests


def test_tensorguards() -> None:
    """Guards compare every property that a kernel relies on, and no values."""
    plain = torch.ones(4, 6)
    guards = TensorGuards(plain, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    assert guards.check(torch.zeros(4, 6))
    others = {
        "class": Parameter(plain, requires_grad=False),
        "dtype": plain.double(),
        "device": plain.to("meta"),
        "shape": torch.ones(4, 7),
        "strides": torch.ones(6, 4).t(),
        "layout": plain.to_sparse(),
        "negative": torch._neg_view(plain),
    }
    assert [fact for fact, other in others.items() if guards.check(other)] == []
    complex_guards = TensorGuards(
        torch.ones(2, dtype=torch.complex64), dynamic_dims_sizes=None, dynamic_dims_strides=None
    )
    assert not complex_guards.check(torch.ones(2, dtype=torch.complex64).conj())


def test_saved_tensors_hooks() -> None:
    assert _torch_private.saved_tensors_hooks(False) is None
    pack, unpack = Tensor.clone, Tensor.detach
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert _torch_private.saved_tensors_hooks(False) == (pack, unpack)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        assert _torch_private.saved_tensors_hooks(False) is not None


def test_active_ddp() -> None:
    class Inner(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(_torch_private.active_ddp())
            return x

    seen: list[Any] = []
    model = torch.nn.Sequential(Inner(), torch.nn.Linear(2, 2))
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        wrapped(torch.ones(1, 2))
        model(torch.ones(1, 2))
    finally:
        distributed.destroy_process_group()
    assert seen == [wrapped, None]
    assert wrapped.parameters_to_ignore == set()
    assert {name for name, _ in wrapped.module.named_parameters()} == {"1.weight", "1.bias"}


def test_disable_dynamo() -> None:
    assert _torch_private.disable_dynamo(lambda x: x + 1)(1) == 2


def test_without_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only torch's own methods lose their decorator, and only while its compiler is not loaded."""

    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            """A method that torch does not know."""

    optimizer = Own([Parameter(torch.ones(2))])
    optimizer.add_param_group({"params": [Parameter(torch.ones(3))]})  # loads the compiler
    names = ["add_param_group", "load_state_dict", "state_dict"]
    for name in names:
        method = getattr(optimizer, name)
        assert _torch_private.without_dynamo(method) is method
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    for name in names:
        found: Any = _torch_private.without_dynamo(getattr(optimizer, name))
        assert found.func is getattr(Optimizer, name).__wrapped__
    zero_grad = optimizer.zero_grad
    assert _torch_private.without_dynamo(zero_grad) is zero_grad


def test_belowautograd() -> None:
    """What is computed inside is not recorded, although gradients are enabled."""
    x = torch.ones(2, requires_grad=True)
    with _torch_private.BelowAutograd():
        assert torch.is_grad_enabled()
        assert (2 * x).grad_fn is None
    assert (2 * x).grad_fn is not None


def test_keys_after_autograd() -> None:
    """The keys include the device's kernel, and exclude autograd."""
    keys = torch._C._dispatch_keys(torch.ones(2)) & _torch_private.keys_after_autograd
    assert keys.has(torch._C.DispatchKey.CPU)
    assert not keys.has(torch._C.DispatchKey.AutogradCPU)


def test_any_requires_grad() -> None:
    plain, with_grad = torch.ones(2), torch.ones(2, requires_grad=True)
    assert _torch_private.any_requires_grad(plain, 0.5, with_grad)
    assert not _torch_private.any_requires_grad(plain, 0.5)


def test_global_pre_hooks() -> None:
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    assert len(_torch_private.global_pre_hooks) == 1
    handle.remove()
    assert not _torch_private.global_pre_hooks


def test_global_post_hooks() -> None:
    handle = register_optimizer_step_post_hook(lambda *_: None)
    assert len(_torch_private.global_post_hooks) == 1
    handle.remove()
    assert not _torch_private.global_post_hooks


def test_increment_version() -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    _torch_private.increment_version(tensors)
    assert [tensor._version for tensor in tensors] == [1, 1]


def test_backward_pass() -> None:
    """A pass within a pass has a larger number, and so has a later one."""
    found = []

    def note(_: Any) -> None:
        found.append(_torch_private.backward_pass())

    def note_twice(grad: Any) -> None:
        note(grad)
        with torch.enable_grad():
            y = torch.ones(1, requires_grad=True) * 2
        y.register_hook(note)
        y.backward()
        note(grad)

    x = torch.ones(1, requires_grad=True)
    for hook in (note_twice, note):
        y = x * 2
        y.register_hook(hook)
        y.backward()
    assert found[0] == found[2] < found[1] < found[3]
    assert _torch_private.backward_pass() == -1


def test_profiler_enabled() -> None:
    assert not _torch_private.profiler_enabled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert _torch_private.profiler_enabled()


def test_set_grad_enabled() -> None:
    _torch_private.set_grad_enabled(False)
    try:
        assert not torch.is_grad_enabled()
    finally:
        _torch_private.set_grad_enabled(True)
    assert torch.is_grad_enabled()


def test_storage_use_count() -> None:
    count = _torch_private.storage_use_count
    tensor = torch.ones(8)
    storage = tensor.untyped_storage()
    alone = count(storage._cdata)
    view = tensor[:4]
    assert count(storage._cdata) == alone + 1
    del view
    assert count(storage._cdata) == alone


def test_count_modes() -> None:
    assert _torch_private.count_modes() == 0
    with _Doubling():
        assert _torch_private.count_modes() == 1


def test_bypassmodes() -> None:
    with _Doubling():
        assert torch.ones(1).add(1).item() == 4
        with _torch_private.BypassModes():
            assert torch.ones(1).add(1).item() == 2


def test_bypasssubclasses() -> None:
    class Asked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
            return "asked"

    tensor = torch.ones(1).as_subclass(Asked)
    assert tensor.grad == "asked"
    with _torch_private.BypassSubclasses():
        assert tensor.grad is None
    assert tensor.grad == "asked"


def test_active_modes() -> None:
    assert _torch_private.active_modes() == []
    with FakeTensorMode() as mode:
        assert _torch_private.active_modes() == [mode]


def test_hooks() -> None:
    """A module has each, and so has torch for all modules."""
    for name in _torch_private.HOOKS:
        assert getattr(torch.nn.Module(), name) == {}
        assert getattr(torch.nn.modules.module, f"_global{name}") == {}


def test_remove_hooks() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    earlier = model[0].register_forward_hook(lambda *_: None)
    first = RemovableHandle.next_id
    model.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
    model[0].register_full_backward_hook(lambda *_: None)
    model[0].register_load_state_dict_post_hook(lambda *_: None)
    _torch_private.remove_hooks(model, first)
    found = [
        number
        for module in model.modules()
        for name, hooks in vars(module).items()
        if "_hooks" in name and isinstance(hooks, dict)
        for number in hooks
    ]
    assert found == [earlier.id]


def test_is_exported() -> None:
    """Only in the thread that exports."""
    found = []

    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found.append(_torch_private.is_exported())
            return x + 1

    torch.export.export(Module(), (torch.ones(1),))
    assert found
    assert all(found)
    with another_thread_exports():
        assert torch.compiler.is_exporting()
        assert not _torch_private.is_exported()
    assert not _torch_private.is_exported()


def test_proxy_mode() -> None:
    found = []

    def note(x: torch.Tensor) -> torch.Tensor:
        found.append(_torch_private.proxy_mode())
        return x * 2

    note(torch.ones(3))
    make_fx(note)(torch.ones(3))
    assert found[0] is None
    assert type(found[1]).__name__ == "ProxyTorchDispatchMode"


def test_transform_level() -> None:
    levels = []
    assert _torch_private.transform_level() is None
    torch.func.vmap(lambda x: levels.append(_torch_private.transform_level()) or x)(torch.ones(2))
    assert levels == [1]


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A mesh of one process."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_local_tensor(mesh: DeviceMesh) -> None:
    values = torch.ones(3)
    sharded = DTensor.from_local(values, mesh, [Shard(0)])
    assert _torch_private.local_tensor(sharded).data_ptr() == values.data_ptr()
    with pytest.raises(AttributeError):
        _torch_private.local_tensor(values)


def test_shard_spec(mesh: DeviceMesh) -> None:
    """A shard's spec compares mesh, placements, shape, strides and dtype."""
    sharded = DTensor.from_local(torch.ones(3, 2), mesh, [Shard(0)])
    spec = _torch_private.shard_spec(sharded)
    assert (spec.mesh, spec.placements) == (mesh, (Shard(0),))
    assert spec == _torch_private.shard_spec(DTensor.from_local(torch.ones(3, 2), mesh, [Shard(0)]))
    others = [
        DTensor.from_local(torch.ones(3, 2), mesh, [Replicate()]),
        DTensor.from_local(torch.ones(3, 1), mesh, [Shard(0)]),
        DTensor.from_local(torch.ones(2, 3).t(), mesh, [Shard(0)]),
        DTensor.from_local(torch.ones(3, 2).double(), mesh, [Shard(0)]),
    ]
    assert [other for other in others if _torch_private.shard_spec(other) == spec] == []
    with pytest.raises(AttributeError):
        _torch_private.shard_spec(torch.ones(3))


def test_with_shard(mesh: DeviceMesh) -> None:
    """The shard stays where it is, though the mesh is of another device."""
    elsewhere = DeviceMesh("meta", [0], _init_backend=False, _rank=0)
    for place in mesh, elsewhere:
        spec = _torch_private.shard_spec(DTensor.from_local(torch.ones(3, 2), place, [Shard(0)]))
        like = DTensor(torch.ones(3, 2), spec, requires_grad=False)  # type: ignore[call-arg]  # untyped in torch
        local = torch.arange(6, dtype=torch.int16).view(3, 2)
        found = _torch_private.with_shard(like, local)
        assert isinstance(found, DTensor)
        assert _torch_private.local_tensor(found) is local
        assert (found.device_mesh, found.placements) == (place, (Shard(0),))
        assert (found.shape, found.dtype) == (like.shape, torch.int16)


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_is_flattened(mesh: DeviceMesh) -> None:
    model = FullyShardedDataParallel(
        torch.nn.Linear(2, 1), device_id=torch.device("cpu"), use_orig_params=True
    )
    assert all(map(_torch_private.is_flattened, model.parameters()))
    assert not _torch_private.is_flattened(Parameter(torch.ones(1)))


def test_mark_flattened() -> None:
    copy = Parameter(torch.ones(1))
    _torch_private.mark_flattened(copy)
    assert _torch_private.is_flattened(copy)


def test_is_forward_mode() -> None:
    assert not _torch_private.is_forward_mode()
    with torch.autograd.forward_ad.dual_level():
        assert _torch_private.is_forward_mode()
    assert not _torch_private.is_forward_mode()


def test_is_plain_execution() -> None:
    assert _torch_private.is_plain_execution()
    found: list[bool] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        found.append(_torch_private.is_plain_execution())
        return x * 2

    x = torch.ones(3)
    torch.func.vmap(note)(x)
    with torch.autograd.forward_ad.dual_level():
        note(x)
    with BaseTorchFunctionMode():
        note(x)
    with torch.device("meta"):
        note(x)
    with torch.device("cpu"), BaseTorchFunctionMode():
        note(x)
    with FakeTensorMode():
        note(torch.ones(3))
    assert found == [False] * 6
    for context in (torch.no_grad(), torch.device("cpu")):
        with context:
            assert _torch_private.is_plain_execution()


def test_softmax_backward() -> None:
    x = torch.randn(5, 9, requires_grad=True)
    y, grad = torch.softmax(x, -1), torch.randn(5, 9)
    (expected,) = torch.autograd.grad(y, x, grad)
    assert torch.equal(_torch_private.softmax_backward(grad, y, -1, y.dtype), expected)


def test_has_bfloat16_products() -> None:
    assert isinstance(_torch_private.has_bfloat16_products, bool)


class _Doubling(TorchDispatchMode):
    """A mode that doubles the results of additions."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.add.Tensor else result


def test_traced_graph() -> None:
    """TorchScript is made from a function without a warning."""
    added = torch.ones(2)
    graph, _ = _torch_private.traced_graph(
        lambda x: (x + added,), (torch.ones(2),), lambda _: "", False, False, None, ["x"]
    )
    found = _torch_private.graph_function("plan", graph)
    assert found(torch.ones(2))[0].tolist() == [2, 2]


test_graph_function = test_traced_graph


def test_use_onednn_graph() -> None:
    assert not _torch_private.has_onednn_graph()
    _torch_private.use_onednn_graph(True)
    try:
        assert _torch_private.has_onednn_graph()
    finally:
        _torch_private.use_onednn_graph(False)
    assert not _torch_private.has_onednn_graph()


test_has_onednn_graph = test_use_onednn_graph


def test_autocast_operators() -> None:
    found = _torch_private.autocast_operators()
    assert {"aten::linear", "aten::cat", "aten::mse_loss"} <= {*found}
    assert not {"aten::relu", "aten::add.Tensor"} & {*found}


def test_sparse_keys() -> None:
    assert _torch_private.sparse_keys("xpu") == ["SparseXPU", "SparseCsrXPU"]
    assert "SparsePrivateUse1" in _torch_private.sparse_keys("privateuseone")
    assert _torch_private.sparse_keys("mtia") == []


def test_count_function_modes() -> None:
    assert _torch_private.count_function_modes() == 0
    with torch.device("cpu"):
        mode = BaseTorchFunctionMode().__enter__()
        found = [_torch_private.function_mode_at(i) for i in range(2)]
        assert _torch_private.pop_function_mode() is mode
        assert _torch_private.count_function_modes() == 1
    assert type(found[0]) is _torch_private.DeviceContext
    assert found[1] is mode


test_function_mode_at = test_pop_function_mode = test_count_function_modes


def test_devicecontext() -> None:
    """Each is a mode, also inside another, and has its device."""
    torch.set_default_device("cpu")
    try:
        with torch.device("meta"):
            modes = [_torch_private.function_mode_at(i) for i in range(2)]
            assert _torch_private.count_function_modes() == 2
        assert all(type(mode) is _torch_private.DeviceContext for mode in modes)
        assert [mode.device.type for mode in modes] == ["cpu", "meta"]
        with torch.device("cpu"):
            assert _torch_private.is_plain_execution()
    finally:
        torch.set_default_device(None)


def test_is_zero_tensor() -> None:
    assert _torch_private.is_zero_tensor(torch._efficientzerotensor((2,)))
    assert not _torch_private.is_zero_tensor(torch.zeros(2))


def test_is_batched() -> None:
    """Gradients are batched while torch computes those for many vectors at once."""
    x, found = torch.ones(2, requires_grad=True), []
    y = 2 * x
    y.register_hook(lambda grad: found.append(_torch_private.is_batched(grad)))
    torch.autograd.grad(y, x, torch.ones(3, 2), is_grads_batched=True, retain_graph=True)
    torch.autograd.grad(y, x, torch.ones(2))
    assert found == [True, False]
    assert not _torch_private.is_batched(x)


def test_tracing_state() -> None:
    assert _torch_private.tracing_state() is None
