"""The pass that has oneDNN compute the float32 products of Linears in training."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fusedoptim import _processor, transforms
from fusedoptim.ops import _linear
from tests.fusedoptim.helpers import assert_within, each_way_to_copy
from tests.tolerances import unit_roundoff
from tests.transforms.helpers import (
    assert_gradients_for_many_vectors,
    levels_of,
    optimized,
    optimized_twice,
    reads_of_weight,
)
from transforms.rewrites import onednn_products
from transforms.rewrites.onednn_products import OneDNNLinear

KNOB = "onednn_products"
ROWS, INPUTS, OUTPUTS = 33, 40, 70


@pytest.fixture(autouse=True)
def _on_any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apply the pass as on a processor for which oneDNN is faster, and to small products too."""
    monkeypatch.setattr(onednn_products, "objection", lambda: None)
    monkeypatch.setattr(onednn_products, "LEAST_PRODUCTS", 1)
    monkeypatch.setattr(_linear, "LEAST_COLUMNS", 1)


def linear() -> nn.Linear:
    return nn.Linear(INPUTS, OUTPUTS)


def conv1d() -> Any:
    module = pytest.importorskip("transformers.pytorch_utils").Conv1D(OUTPUTS, INPUTS)
    nn.init.normal_(module.bias)
    return module


KINDS = {"Linear": linear, "Conv1D": conv1d}
each_kind = pytest.mark.parametrize("kind", KINDS)


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, INPUTS) if shape else torch.randn(ROWS, INPUTS)


def is_onednn(model: nn.Module, x: Tensor) -> bool:
    """Whether our operator computed the output."""
    output = model(x)
    return output.grad_fn is not None and output.grad_fn.name() == "linearBackward"


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output, and the gradients of the input and the parameters."""
    x = x.detach().requires_grad_()
    output = model(x)
    given = [p for p in (x, *model.parameters()) if p.requires_grad]
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    return [output.detach(), *torch.autograd.grad(output, given, weights)]


def assert_as_exact(model: nn.Module, plain: nn.Module, x: Tensor) -> None:
    """Assert equality with float64, up to the roundings of sums of so many products."""
    exact = gradients(copy.deepcopy(plain).double(), x.double())
    sizes = copy.deepcopy(plain).double()
    with torch.no_grad():
        for p in sizes.parameters():
            p.abs_()
    wide = x.detach().double().abs().requires_grad_()
    output = sizes(wide)
    given = [p for p in (wide, *sizes.parameters()) if p.requires_grad]
    magnitudes = [output.detach(), *torch.autograd.grad(output, given, torch.ones_like(output))]
    relative = (x.numel() + OUTPUTS + 2) * unit_roundoff(torch.float32)
    for i, (each, right, size) in enumerate(zip(gradients(model, x), exact, magnitudes)):
        assert_within(each, right, relative * size, str(i))


@each_kind
class TestProducts:
    @pytest.mark.parametrize("shape", [(ROWS,), (2, 3, 5), (1,)], ids=str)
    def test_equal_float64(self, kind: str, shape: tuple[int, ...]) -> None:
        plain = KINDS[kind]()
        ours, x = optimized(plain), rows(*shape)
        assert is_onednn(ours, x)
        assert_as_exact(ours, plain, x)

    @pytest.mark.parametrize("frozen", ["weight", "bias"])
    def test_with_frozen_parameters(self, kind: str, frozen: str) -> None:
        plain = KINDS[kind]()
        getattr(plain, frozen).requires_grad_(False)
        ours = optimized(plain)
        assert is_onednn(ours, rows())
        assert_as_exact(ours, plain, rows())

    def test_gradients_are_not_copied(self, kind: str) -> None:
        """Gradients have their weights' layout, so torch keeps the tensors that were computed."""
        ours = optimized(KINDS[kind]())
        made: list[int] = []
        ours.weight.register_hook(lambda grad: made.append(grad.data_ptr()))
        ours(rows()).sum().backward()
        assert ours.weight.grad.stride() == ours.weight.stride()
        assert made == [ours.weight.grad.data_ptr()]

    def test_the_rest_is_torchs(self, kind: str) -> None:
        plain = KINDS[kind]()
        ours, x = optimized(plain), rows()
        strided = torch.randn(INPUTS, 2, ROWS).transpose(0, 2)
        given = [strided, rows(0), rows(2)[0]] if kind == "Linear" else [rows(0)]
        for other in given:
            assert not is_onednn(ours, other)
            assert torch.equal(ours(other), plain(other))
        with FlopCounterMode(display=False) as counter:
            assert not is_onednn(ours, x)
        assert counter.get_total_flops() == 2 * ROWS * INPUTS * OUTPUTS
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(ours(x), plain(x))
        assert not is_onednn(ours.eval(), x)
        assert not is_onednn(ours.train().double(), x.double())
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            ours.float()(torch.randn(3, INPUTS + 1))

    @pytest.mark.filterwarnings("ignore:`torch.jit")
    def test_transforms_and_traces_are_torchs(self, kind: str) -> None:
        plain = KINDS[kind]()
        ours, x = optimized(plain), rows()
        if kind == "Linear":  # torch's own vmap refuses Conv1D's view
            assert torch.equal(torch.vmap(ours)(x[:, None]), torch.vmap(plain.train())(x[:, None]))
        results = [torch.func.jvp(each, (x,), (x,)) for each in (ours, plain)]
        assert torch.equal(results[0][1], results[1][1])

        def loss(model: nn.Module, params: dict[str, Tensor]) -> Tensor:
            result: Tensor = torch.func.functional_call(model, params, (x,)).square().sum()
            return result

        params = {name: p.detach() for name, p in plain.named_parameters()}
        found = [torch.func.grad(lambda p, m=m: loss(m, p))(params) for m in (ours, plain)]
        assert all(torch.equal(found[0][name], found[1][name]) for name in params)
        traced = torch.jit.trace(ours, x)
        assert "fusedoptim" not in str(traced.graph)
        exported = torch.export.export(ours, (x,))
        assert "fusedoptim" not in str(exported.graph)

    def test_undone_bit_for_bit(self, kind: str) -> None:
        given = nn.Sequential(KINDS[kind](), nn.ReLU()).train()
        seen: list[str] = []
        given[0].register_forward_hook(lambda *_: seen.append("after"))
        given[0].register_full_backward_hook(lambda *_: seen.append("backward"))
        optimizer = torch.optim.SGD(given.parameters(), lr=0.1)
        with optimized_twice(given, optimizer):
            given(rows().requires_grad_()).sum().backward()
            assert seen == ["after", "backward"]
            given.zero_grad()

    @each_way_to_copy
    def test_copies(self, kind: str, copied: Any) -> None:
        plain = KINDS[kind]()
        ours = copied(optimized(plain))
        assert is_onednn(ours, rows())
        assert_as_exact(ours, plain, rows())
        assert type(transforms.restore(ours)) is type(plain)

    @pytest.mark.filterwarnings("ignore:`torch.jit.script")
    def test_compiled_equals_eager(self, kind: str) -> None:
        """``test_linear.py`` of the operators compiles them to C++."""
        plain = KINDS[kind]()
        ours = optimized(plain)
        graphs: list[str] = []
        compiler = lookup_backend("aot_eager")

        def backend(module: Any, inputs: Any) -> Any:
            graphs.append(str(module.graph))
            return compiler(module, inputs)

        compiled = torch.compile(ours, fullgraph=True, backend=backend)
        assert_as_exact(compiled, plain, rows())
        assert "fusedoptim.linear" in graphs[0]

    @pytest.mark.filterwarnings("ignore:`torch.jit.script")
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # by torch
    def test_compiled_transforms_are_torchs(self, kind: str) -> None:
        plain = KINDS[kind]()
        ours, x = optimized(plain), rows()

        def gradient(model: nn.Module) -> Any:
            return torch.func.grad(lambda x: model(x).square().sum())(x)

        def derivative(model: nn.Module) -> Any:
            return torch.func.jvp(model, (x,), (x,))[1]

        for function in (gradient, derivative):
            compiled = torch.compile(function, backend="aot_eager")
            torch.testing.assert_close(compiled(ours), function(plain.train()))

    def test_gradients_for_many_vectors(self, kind: str) -> None:
        """Both of torch's ways to batch gradients work, without a warning."""
        ours, x = optimized(KINDS[kind]()), rows().requires_grad_()
        assert_gradients_for_many_vectors(ours(x), [x, *ours.parameters()])

    def test_checkpointed(self, kind: str) -> None:
        plain = KINDS[kind]()
        ours = optimized(plain)
        for is_reentrant in (False, True):

            class Checkpointed(nn.Module):
                def __init__(self, inner: nn.Module, is_reentrant: bool) -> None:
                    super().__init__()
                    self.inner, self.is_reentrant = inner, is_reentrant

                def forward(self, x: Tensor) -> Any:
                    return checkpoint(self.inner, x, use_reentrant=self.is_reentrant)

            x = rows().requires_grad_()
            Checkpointed(ours, is_reentrant)(x).sum().backward()
            exact = x.detach().double().requires_grad_()
            copy.deepcopy(plain).double()(exact).sum().backward()
            assert exact.grad is not None
            torch.testing.assert_close(x.grad, exact.grad.float())


def test_tied_weights() -> None:
    model = nn.Sequential(nn.Embedding(OUTPUTS, INPUTS), nn.Linear(INPUTS, OUTPUTS, bias=False))
    model[1].weight = model[0].weight
    ours = optimized(model)
    assert ours[1].weight is ours[0].weight
    words = torch.randint(OUTPUTS, (ROWS,))
    exact = copy.deepcopy(model).double()
    for each in (ours, exact):
        each(words).square().mean().backward()
    torch.testing.assert_close(ours[0].weight.grad, exact[0].weight.grad.float())


@each_kind
def test_weights_that_are_computed(kind: str) -> None:
    assert reads_of_weight(optimized(KINDS[kind]()), rows()) == 1


def test_parametrized_later() -> None:
    ours = optimized(linear())
    nn.utils.parametrizations.weight_norm(ours)
    plain = nn.utils.parametrizations.weight_norm(linear())
    plain.load_state_dict(ours.state_dict())
    for each in (ours, plain):
        each.zero_grad()
    x = rows()
    for mine, theirs in zip(gradients(ours, x), gradients(plain, x)):
        torch.testing.assert_close(mine, theirs)


def test_report_levels_and_knob(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) + 1

    weight_norm = nn.utils.parametrizations.weight_norm
    given = nn.Sequential(nn.Linear(3, 3), Own(3, 3), weight_norm(nn.Linear(3, 3)))
    report = transforms.report(optimized(given))
    assert [entry.where for entry in report.done(KNOB)] == ["0"]
    assert {entry.where: entry.what for entry in report.left(KNOB)} == {
        "1": "overrides its methods: Own may differ",
        "2": "has a weight or bias that is computed from others (a parametrization)",
    }
    for arguments, is_ours in levels_of(KNOB):
        assert isinstance(optimized(linear(), **arguments), OneDNNLinear) == is_ours
    with pytest.raises(ValueError, match="onednn_products=True is for a model in train mode"):
        transforms.optimize(linear().eval(), onednn_products=True)
    with pytest.warns(transforms.NoEffectWarning, match="computes in float64"):
        optimized(linear().double(), onednn_products=True)
    monkeypatch.setattr(onednn_products, "objection", lambda: "MKL is as quick")
    with pytest.warns(transforms.NoEffectWarning, match="MKL is as quick"):
        optimized(linear(), onednn_products=True)


class TestObjection:
    @pytest.fixture(autouse=True)
    def _unpatched(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.undo()
        onednn_products.objection.cache_clear()
        yield
        onednn_products.objection.cache_clear()

    @pytest.mark.parametrize(
        ("vendor", "capability", "reason"),
        [
            ("AuthenticAMD", "AVX512", None),
            ("AuthenticAMD", "AVX2", "no faster than MKL without AVX-512"),
            ("GenuineIntel", "AVX512", "on Intel's processors"),
        ],
    )
    def test_by_processor(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        vendor: str,
        capability: str,
        reason: str | None,
    ) -> None:
        facts = tmp_path / "cpuinfo"
        facts.write_text(f"vendor_id\t: {vendor}\n")
        monkeypatch.setattr(_processor, "PROCESSORS", facts)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        found = onednn_products.objection()
        assert found is None if reason is None else reason in str(found)

    def test_without_facts(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(_processor, "PROCESSORS", tmp_path / "none")
        assert "does not name the processor's vendor" in str(onednn_products.objection())

    def test_by_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
        assert onednn_products.objection() == "this torch computes products without MKL"
        onednn_products.objection.cache_clear()
        monkeypatch.setattr(onednn_products, "missing_operators", lambda: ["_linear_pointwise"])
        assert "torch 2.13 in _linear_pointwise" in str(onednn_products.objection())


class TestOtherPasses:
    def test_bfloat16_splits_the_weights(self) -> None:
        given = nn.Sequential(linear())
        optimizer = torch.optim.SGD(given.parameters(), lr=0.1)
        transforms.optimize(given, optimizer, inplace=True)
        transforms.optimize(given, optimizer, dtype=torch.bfloat16, inplace=True)
        assert given[0].weight.dtype == torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            given(rows()).sum().backward()
        transforms.restore(given, optimizer)
        assert (type(given[0]), given[0].weight.dtype) == (nn.Linear, torch.float32)

    def test_bfloat16_alone_leaves_them(self) -> None:
        ours = optimized(linear(), dtype=torch.bfloat16)
        assert type(ours) is nn.Linear
        (entry,) = transforms.report(ours).left(KNOB)
        assert entry.what == "computes in bfloat16, for which torch itself calls oneDNN"

    def test_packed_for_inference_after_training(self) -> None:
        plain = nn.Sequential(linear(), nn.GELU())
        ours = transforms.optimize(optimized(plain).eval())
        assert type(ours[0]).__name__ == "PackedLinear"
        with torch.no_grad():
            torch.testing.assert_close(ours(rows()).shape, (ROWS, OUTPUTS))
        assert type(transforms.restore(ours)[0]) is nn.Linear

    def test_quantized_after_training(self) -> None:
        ours = transforms.quantize(optimized(nn.Sequential(linear())).eval())
        assert type(ours[0]).__name__ == "Int8Linear"
        assert type(transforms.restore(ours)[0]) is nn.Linear


def test_state_dict_is_torchs() -> None:
    plain = linear()
    ours = optimized(plain)
    assert list(ours.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(pickle.loads(pickle.dumps(ours.state_dict())))
