"""Bad input is refused with an error that names the cure, before anything is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import fusedoptim
from fusedoptim import FusedAdam, FusedAdamW, FusedLamb, FusedSGD
from fusedoptim.launch import kernel, modules
from tests.fusedoptim.helpers import (
    each_case,
    each_class,
    nested_tensor,
    refused,
    run_script,
    single,
    step_alike,
)
from tests.optimizer_cases import OptimizerCase


def _assert_refused(case: OptimizerCase, bad: Tensor, error: type[Exception], message: str) -> None:
    """A step with a good parameter, a bad one and a good one raises, and nothing changes."""
    good = [Parameter(torch.randn(100)) for _ in range(2)]
    optimizer = case.make([good[0], bad, good[1]], **case.kwargs[-1])
    for p in good:
        p.grad = torch.randn_like(p)
    before = good[0].detach().clone()
    with refused(optimizer, error, message):
        optimizer.step()
    bad.grad = None
    optimizer.step()
    assert not torch.equal(good[0], before)


def _assert_not_split(
    case: OptimizerCase, bad: Tensor, error: type[Exception], message: str
) -> None:
    """Construction raises, and splits no other parameter."""
    good = Parameter(torch.randn(3))
    with pytest.raises(error, match=message):
        case.make([good, bad])
    assert good.dtype == torch.float32


@each_class
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool])
def test_integer_parameter(case: OptimizerCase, dtype: torch.dtype) -> None:
    bad = torch.ones(3, dtype=dtype)
    if case.is_split:
        _assert_not_split(case, bad, TypeError, rf"parameter 1 .*{dtype}.*bfloat16, or float32")
        return
    bad.grad = torch.ones_like(bad)
    _assert_refused(case, bad, TypeError, f"parameter 1 .*{dtype}.* not one of float32")


def test_split_with_a_gradient_that_does_not_fit() -> None:
    params = [Parameter(torch.randn(2, 3)) for _ in range(2)]
    optimizer = fusedoptim.FusedSGD(params, lr=0.1)
    grad = params[1].grad = torch.ones(2, 3)
    params[1].data = torch.randn(3, 2)
    with refused(optimizer, RuntimeError, r"parameter 1 .*shape, \(2, 3\); call zero_grad"):
        optimizer.split_params(params)
    assert params[1].grad is grad
    assert list(optimizer.halves) == []


@each_class
def test_some_of_the_state_is_gone(case: OptimizerCase) -> None:
    """torch's classes raise KeyError too."""
    params = [Parameter(torch.randn(10)) for _ in range(2)]
    optimizer = case.make(params, **case.kwargs[-1])
    step_alike(optimizer)
    needed = [key for key in case.state_keys if key not in ("trail", "max_exp_avg_sq")]
    for key in needed if len(needed) > 1 else []:
        value = optimizer.state[params[1]].pop(key)
        with refused(optimizer, KeyError, f"parameter 1 has no '{key}'.*delete"):
            optimizer.step()
        optimizer.state[params[1]][key] = value
        optimizer.step()
    del optimizer.state[params[1]]
    if not case.is_split:
        optimizer.step()


def test_trail_of_another_dtype() -> None:
    """torch's own load_state_dict casts the trail to the parameter's dtype."""
    p = Parameter(torch.randn(10))
    optimizer = fusedoptim.SplitSGD([p], lr=0.1)
    p.grad = torch.ones_like(p)
    torch.optim.Optimizer.load_state_dict(optimizer, optimizer.state_dict())
    with pytest.raises(
        ValueError, match=r"'trail' of parameter 0.* is torch\.bfloat16 .*load_state"
    ):
        optimizer.step()


@each_case
def test_argument_for_all_groups_in_one(case: OptimizerCase) -> None:
    """Another value than the constructor's would be ignored; wrappers pass the same one."""
    others = {"max_grad_norm": 1.0, "split": not case.is_split, "state_dtype": "float8"}
    for name in ("max_grad_norm", "split", "state_dtype"):
        good, new = (Parameter(torch.randn(3)) for _ in range(2))
        optimizer = case.make([good])
        own = {"params": [new], name: getattr(optimizer, name, None)}
        if not hasattr(optimizer, name):  # only Adam has a state_dtype
            optimizer.add_param_group({"params": [new], name: others[name]})
            continue
        other = own | {name: others[name]}
        with pytest.raises(ValueError, match=f"{name} is one for all groups; pass it to the con"):
            case.make([other])
        with pytest.raises(ValueError, match=f"a group has {name}="):
            optimizer.add_param_group(other)
        assert len(optimizer.param_groups) == 1
        assert new.dtype == torch.float32
        optimizer.add_param_group(own)
        step_alike(optimizer)


@each_case
def test_what_only_the_constructor_sets(case: OptimizerCase) -> None:
    p, optimizer = single(case)
    names = [name for name in ("split", "state_dtype") if hasattr(optimizer, name)]
    for name in names:
        value = getattr(optimizer, name)
        with pytest.raises(AttributeError, match=f"{name} cannot be changed; construct an optimi"):
            setattr(optimizer, name, "float8" if name == "state_dtype" else not value)
        assert getattr(optimizer, name) == value
    optimizer.step()
    assert p.dtype == (torch.bfloat16 if case.is_split else torch.float32)


@each_class
def test_sparse_parameter(case: OptimizerCase) -> None:
    bad = torch.eye(3).to_sparse().requires_grad_()
    if case.is_split:
        _assert_not_split(case, bad, TypeError, r"layout torch\.sparse_coo")
        return
    if case.has_state_from_the_start:  # torch cannot make the state then
        with pytest.raises(RuntimeError, match="only supported by strided tensors"):
            case.make([bad])
        return
    bad.grad = torch.eye(3).to_sparse()
    _assert_refused(case, bad, TypeError, "parameter 1 .*layout torch.sparse_coo")


@each_class
def test_meta_parameter(case: OptimizerCase) -> None:
    bad = Parameter(torch.ones(3, device="meta"))
    bad.grad = torch.ones_like(bad)
    _assert_refused(case, bad, RuntimeError, "parameter 1 .*meta.* SYCL does not serve")


@each_class
def test_gradient_of_another_shape(case: OptimizerCase) -> None:
    bad = Parameter(torch.ones(2, 3, dtype=case.dtypes[-1]))
    bad.grad = torch.ones_like(bad)
    bad.data = torch.ones(3, 2, dtype=bad.dtype)
    _assert_refused(
        case, bad, RuntimeError, r"parameter 1 .*gradient whose shape differs: \(2, 3\)"
    )


@each_class
def test_gradient_of_another_dtype(case: OptimizerCase) -> None:
    if case.is_split:
        pytest.skip("a parameter of another dtype has no second half; see test_split_sgd.py")
    bad = Parameter(torch.ones(2, 3))
    bad.grad = torch.ones(2, 3)
    bad.data = torch.ones(2, 3, dtype=torch.float64)
    _assert_refused(
        case, bad, RuntimeError, "parameter 1 .*gradient whose dtype differs: torch.float32"
    )


def test_nested_parameter() -> None:
    nested = Parameter(nested_tensor(torch.ones(2), torch.ones(3)))
    torch.nested.to_padded_tensor(nested, 0.0).sum().backward()  # type: ignore[no-untyped-call]  # torch's
    optimizer = fusedoptim.FusedSGD([nested], lr=0.1)
    text = r"parameter 0 \(nested, torch.float32, cpu\) has no strides, and only strided ones work"
    with pytest.raises(TypeError, match=text):
        optimizer.step()


@pytest.mark.parametrize("strides", [(0, 1), (1, 1)])
@each_class
def test_overlapping_parameter(case: OptimizerCase, strides: tuple[int, int]) -> None:
    bad = Parameter(torch.ones(4, dtype=case.dtypes[-1]).as_strided((2, 3), strides))
    bad.grad = torch.ones(2, 3, dtype=bad.dtype)
    if case.is_split:
        _assert_not_split(case, bad, RuntimeError, "share memory")
        return
    _assert_refused(case, bad, RuntimeError, "share memory")


@each_class
def test_shape_changed_after_some_steps(case: OptimizerCase) -> None:
    """A plan that was used before is checked too."""
    p = Parameter(torch.randn(2, 3))
    optimizer = case.make([p], **case.kwargs[-1])
    p.grad = torch.randn_like(p)
    optimizer.step()
    for smaller in (p.data[:1], p.data.view(3, 2)):  # at the same address
        p.data = smaller
        with refused(optimizer, RuntimeError, "whose shape differs"):
            optimizer.step()


@pytest.mark.parametrize(
    ("cls", "name", "bad", "error", "message"),
    [
        (FusedSGD, "lr", 1j, TypeError, "^FusedSGD: lr is 1j; set it to a number"),
        (FusedSGD, "momentum", [0.5], TypeError, r"^FusedSGD: no step .* momentum=\[0.5\]"),
        (FusedAdam, "eps", torch.tensor(1j), TypeError, "^FusedAdam: eps is "),
        (FusedAdam, "betas", (0.9, 1.0), ValueError, r"^FusedAdam: no step .* betas=\(0.9, 1.0\)"),
        (FusedAdam, "betas", (1.0, 0.9), ValueError, "^FusedAdam: no step can be computed with lr"),
        (FusedAdamW, "betas", (0.9, 1.5), TypeError, "^FusedAdamW: no step can be computed with"),
        (FusedAdamW, "lr", 3e38, OverflowError, "^FusedAdamW: the hyper-parameters give "),
        (FusedLamb, "max_param_norm", "x", TypeError, "^FusedLamb: no step .*max_param_norm='x'"),
        (FusedLamb, "max_param_norm", 1j, TypeError, "^FusedLamb: no step .*max_param_norm=1j"),
        (FusedLamb, "bias_correction", torch.ones(2), TypeError, "^FusedLamb: bias_correction is"),
    ],
)
def test_hyper_parameter_with_which_no_step_can_be_computed(
    cls: Any, name: str, bad: object, error: type[Exception], message: str
) -> None:
    """No group is updated, also none that comes before the one with this hyper-parameter."""
    params = [Parameter(torch.zeros(3)) for _ in range(2)]
    optimizer = cls([{"params": [p]} for p in params], lr=1.0)
    optimizer.param_groups[1][name] = bad
    for p in params:
        p.grad = torch.ones(3)
    with pytest.raises(error, match=message):
        optimizer.step()
    assert not optimizer.state
    assert all(p.tolist() == [0.0] * 3 for p in params)


def change_manifest(spirv: Path, **changes: Any) -> None:
    path = spirv / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@each_class
class TestCompiledKernels:
    """A lost, damaged or foreign file among the compiled kernels."""

    @pytest.fixture
    def spirv(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        folder = tmp_path / "spirv"
        shutil.copytree(modules.FOLDER, folder)
        monkeypatch.setattr(modules, "FOLDER", folder)
        monkeypatch.setattr(modules, "MANIFEST", folder / "manifest.json")
        self._forget()
        yield folder
        self._forget()

    @staticmethod
    def _forget() -> None:
        modules.load_module.cache_clear()
        modules._manifest.cache_clear()
        kernel.kernel_for.cache_clear()

    DAMAGES: ClassVar[dict[str, tuple[Callable[[Path], object], str]]] = {
        "lost": (lambda spirv: [p.unlink() for p in spirv.glob("*.spv")], r"\.spv cannot be read"),
        "corrupt": (
            lambda spirv: [p.write_bytes(p.read_bytes()[:-4]) for p in spirv.glob("*.spv")],
            "is not the one that was shipped",
        ),
        "manifest of another version": (
            lambda spirv: change_manifest(spirv, version=99),
            "has version 99",
        ),
        "manifest without kernels": (
            lambda spirv: change_manifest(spirv, modules={}),
            "has no kernel",
        ),
        "manifest lost": (lambda spirv: (spirv / "manifest.json").unlink(), "cannot be read"),
        "manifest cut": (
            lambda spirv: (spirv / "manifest.json").write_text("{"),
            "cannot be read",
        ),
        "manifest empty": (
            lambda spirv: (spirv / "manifest.json").write_text("[]"),
            "has version None",
        ),
    }

    @pytest.mark.parametrize("damage", DAMAGES)
    def test_refused(self, case: OptimizerCase, spirv: Path, damage: str) -> None:
        make, message = self.DAMAGES[damage]
        make(spirv)
        p = Parameter(torch.ones(3))
        p.grad = torch.ones(3)
        optimizer = case.make([p], **case.kwargs[-1])
        with refused(optimizer, fusedoptim.ModuleError, message) as raised:
            optimizer.step()
        assert "reinstall" in str(raised.value)


def test_no_driver() -> None:
    script = """
import torch, fusedoptim
from fusedoptim.allocator import DeviceNotFoundError
p = torch.nn.Parameter(torch.ones(3))
p.grad = torch.ones(3)
optimizer = fusedoptim.FusedSGD([p], lr=0.1)
try:
    optimizer.step()
except DeviceNotFoundError as error:
    print(error)
assert torch.equal(p, torch.ones(3))
"""
    # A value that the user set is respected, so this one hides the CPU driver.
    output = run_script(script, OCL_ICD_FILENAMES="/nonexistent.so").stdout
    assert "no SYCL driver serves the device 'cpu'" in output
    assert "pip install intel-opencl-rt" in output


def test_opencl_had_looked_for_drivers_before() -> None:
    script = """
from allocator import DeviceNotFoundError, queue
from allocator.runtime.libraries import load_dpctl
assert not load_dpctl().get_devices(device_type="cpu")
try:
    queue()
except DeviceNotFoundError as error:
    print(error)
"""
    # The folder where the system registers drivers.
    output = run_script(script, OCL_ICD_VENDORS="/nonexistent").stdout
    assert "OpenCL looked for drivers before this package could name it" in output
    assert "pip install" not in output
