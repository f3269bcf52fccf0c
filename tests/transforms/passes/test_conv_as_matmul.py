"""The pass that computes convolutions over small images as products of matrices in training."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fusedoptim import _processor, transforms
from tests.fusedoptim.helpers import assert_within, each_way_to_copy
from tests.tolerances import unit_roundoff
from tests.transforms.helpers import (
    assert_gradients_for_many_vectors,
    levels_of,
    optimized,
    optimized_twice,
    randomise,
    reads_of_weight,
)
from transforms.rewrites import conv_as_matmul, onednn_products
from transforms.rewrites.conv_as_matmul import Limits, MatmulConv2d

KNOB = "conv_as_matmul"
IMAGES, CHANNELS, OUTPUTS, SIZE = 3, 17, 9, 4
CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "1x1": {"kernel_size": 1},
    "1x1, strided": {"kernel_size": 1, "stride": 2, "bias": False},
    "3x3": {"kernel_size": 3, "padding": 1},
    "3x3, strided": {"kernel_size": 3, "padding": 1, "stride": 2, "bias": False},
    "2x3": {"kernel_size": (2, 3), "padding": (1, 0)},
}
each_convolution = pytest.mark.parametrize("name", CONVOLUTIONS)
WHOLE, WEIGHT = Limits(64, 64), Limits(0, 64)
each_limits = pytest.mark.parametrize("most", [WHOLE, WEIGHT], ids=["whole", "weight's gradient"])


@pytest.fixture
def most() -> Limits:
    return WHOLE


@pytest.fixture(autouse=True)
def _on_any_machine(monkeypatch: pytest.MonkeyPatch, most: Limits) -> None:
    """Apply the pass as on a processor on which products are faster, and to small weights too."""
    monkeypatch.setattr(conv_as_matmul, "LEAST_WEIGHT", 1)
    monkeypatch.setattr(conv_as_matmul, "limits", lambda *_: most)


def convolution(name: str = "3x3") -> nn.Conv2d:
    return nn.Conv2d(CHANNELS, OUTPUTS, **CONVOLUTIONS[name])


def images(number: int = IMAGES, size: int = SIZE, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(number, CHANNELS, size, size, dtype=dtype)
    return x.contiguous(memory_format=torch.channels_last)


def is_product(model: nn.Module, x: Tensor) -> bool:
    """Whether our operator computed the output."""
    output = model(x)
    return output.grad_fn is not None and output.grad_fn.name() == "conv2dBackward"


def gradients(model: nn.Module, x: Tensor, *, sizes: bool = False) -> list[Tensor]:
    """The output, and the gradients of the input and the parameters; or sums of magnitudes."""
    x = x.detach().requires_grad_()
    output = model(x)
    given = [p for p in (x, *model.parameters()) if p.requires_grad]
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    found = torch.autograd.grad(output, given, weights.abs() if sizes else weights)
    return [output.detach(), *found]


def assert_as_exact(model: nn.Module, plain: nn.Module, x: Tensor) -> None:
    """Assert equality with float64, up to the roundings of sums of so many products."""
    wide, sizes = copy.deepcopy(plain).double(), copy.deepcopy(plain).double()
    with torch.no_grad():
        for p in sizes.parameters():
            p.abs_()
    exact = gradients(wide, x.double())
    magnitudes = gradients(sizes, x.double().abs(), sizes=True)
    terms = x.numel() + sum(p.numel() for p in plain.parameters()) + 2
    relative = terms * unit_roundoff(torch.float32)
    for i, (each, right, size) in enumerate(zip(gradients(model, x), exact, magnitudes)):
        assert_within(each, right, relative * size, str(i))


@each_limits
@each_convolution
class TestProducts:
    def test_equal_float64(self, name: str) -> None:
        plain = convolution(name)
        ours = optimized(plain)
        for x in (images(), images(1), images(size=8)):
            assert is_product(ours, x)
            assert_as_exact(ours, plain, x)

    @pytest.mark.parametrize("frozen", ["weight", "bias"])
    def test_with_frozen_parameters(self, name: str, frozen: str, most: Limits) -> None:
        plain = convolution(name)
        if getattr(plain, frozen) is not None:
            getattr(plain, frozen).requires_grad_(False)
        ours = optimized(plain)
        is_ours = most is WHOLE or frozen != "weight"
        assert is_product(ours, images().requires_grad_()) == is_ours
        assert_as_exact(ours, plain, images())

    def test_gradients_are_not_copied(self, name: str) -> None:
        """Gradients have their weights' layout, so torch keeps the tensors that were computed."""
        ours = optimized(convolution(name))
        made: list[int] = []
        ours.weight.register_hook(lambda grad: made.append(grad.data_ptr()))
        ours(images()).sum().backward()
        assert made == [ours.weight.grad.data_ptr()]

    def test_gradients_of_gradients(self, name: str) -> None:
        plain = convolution(name)
        found = []
        for model, x in ((optimized(plain), images()), (plain.double(), None)):
            x = found[0][0].detach().double() if x is None else x
            x.requires_grad_()
            (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            found.append((x, *torch.autograd.grad(grad.square().sum(), [x, model.weight])))
        for each, exact in zip(found[0][1:], found[1][1:]):
            torch.testing.assert_close(each, exact.float(), rtol=1e-4, atol=1e-4)

    def test_gradients_for_many_vectors(self, name: str) -> None:
        """Both of torch's ways to batch gradients work, without a warning."""
        ours, x = optimized(convolution(name)), images().requires_grad_()
        assert_gradients_for_many_vectors(ours(x), [x, *ours.parameters()])

    @each_way_to_copy
    def test_copies(self, name: str, copied: Any) -> None:
        plain = convolution(name)
        ours = copied(optimized(plain))
        assert is_product(ours, images())
        assert_as_exact(ours, plain, images())
        assert type(transforms.restore(ours)) is nn.Conv2d

    def test_undone_bit_for_bit(self, name: str) -> None:
        given = nn.Sequential(convolution(name), nn.ReLU()).train()
        given.to(memory_format=torch.channels_last)  # or restore would lay it out anew
        seen: list[str] = []
        given[0].register_forward_hook(lambda *_: seen.append("after"))
        given[0].register_full_backward_hook(lambda *_: seen.append("backward"))
        optimizer = torch.optim.SGD(given.parameters(), lr=0.1)
        with optimized_twice(given, optimizer):
            given(images().requires_grad_()).sum().backward()
            assert seen == ["after", "backward"]
            given.zero_grad()


class TestTheRestIsTorchs:
    def test_of_larger_images(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where only the weight's gradient may be a product, that depends on the need for it."""
        monkeypatch.setattr(conv_as_matmul, "limits", lambda *_: Limits(SIZE**2, 64))
        plain = convolution()
        ours, larger = optimized(plain), images(size=SIZE + 1).requires_grad_()
        assert is_product(ours, larger)
        assert_as_exact(ours, plain, larger)
        ours.weight.requires_grad_(False)
        assert not is_product(ours, larger)
        assert is_product(ours, images().requires_grad_())
        assert not is_product(ours.requires_grad_(), images(size=9))

    def test_of_calls(self) -> None:
        plain = convolution()
        ours, x = optimized(plain), images()
        for other in (images(size=9), images(0), x.contiguous(), x[0]):
            assert not is_product(ours, other)
            torch.testing.assert_close(ours(other), plain(other))
        with FlopCounterMode(display=False) as counter:
            assert not is_product(ours, x)
        assert counter.get_total_flops() == 2 * OUTPUTS * 9 * CHANNELS * IMAGES * SIZE**2
        with torch.autocast("cpu", torch.bfloat16):  # the weight would be cast in each call
            assert not is_product(ours, x)
        assert not is_product(ours.eval(), x)
        assert not is_product(
            ours.train().double().to(memory_format=torch.contiguous_format), x.double()
        )

    def test_of_weights_that_are_computed(self) -> None:
        ours = optimized(convolution())
        assert reads_of_weight(ours, images()) == 1

    def test_where_products_may_be_rounded(self) -> None:
        """A program that allows bfloat16 in products has not allowed it in convolutions."""
        ours, before = optimized(convolution()), torch.get_float32_matmul_precision()
        try:
            torch.set_float32_matmul_precision("medium")
            assert not is_product(ours, images())
        finally:
            torch.set_float32_matmul_precision(before)
        assert is_product(ours, images())

    def test_of_changed_modules(self) -> None:
        ours, x = optimized(convolution()), images()
        assert is_product(ours, x)
        for changes in (
            {"dilation": (2, 2)}, {"dilation": 1}, {"padding_mode": "circular"},
            {"padding": "same"}, {"padding": 1}, {"padding": (1,)}, {"stride": 1}, {"stride": (2,)},
            {"weight": nn.Parameter(ours.weight.detach().contiguous())},
        ):  # fmt: skip
            changed = copy.deepcopy(ours)
            for attribute, value in changes.items():
                setattr(changed, attribute, value)
            assert not is_product(changed, x)
        for attribute in ("stride", "padding"):
            setattr(changed, attribute, (-1, -1))
            with pytest.raises(RuntimeError, match=r"non-positive stride|negative padding"):
                changed(x)
        given = convolution()
        given.dilation = 1  # type: ignore[assignment]  # torch takes it
        assert type(optimized(given)) is nn.Conv2d

    @pytest.mark.parametrize("size", [1, 2])
    def test_errors(self, size: int) -> None:
        ours = optimized(nn.Conv2d(CHANNELS, OUTPUTS, 3))
        with pytest.raises(RuntimeError, match="Kernel size can't be greater than actual input"):
            ours(images(size=size))
        with pytest.raises(RuntimeError, match="channels"):
            ours(torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))
        with pytest.raises(TypeError, match="conv2d"):
            ours(None)

    @pytest.mark.filterwarnings("ignore:`torch.jit")
    def test_of_transforms_and_traces(self) -> None:
        plain = convolution()
        ours, x = optimized(plain), images()
        plain.to(memory_format=torch.channels_last)
        results = [torch.func.jvp(each, (x,), (x,)) for each in (ours, plain)]
        torch.testing.assert_close(results[0][1], results[1][1])
        assert "fusedoptim" not in str(torch.jit.trace(ours, x).graph)
        traced = torch.fx.symbolic_trace(nn.Sequential(ours))
        torch.testing.assert_close(traced(x), plain(x))
        assert "fusedoptim" not in str(torch.export.export(ours, (x,)).graph)
        found = torch.func.grad(lambda x: ours(x).square().sum())(x)
        torch.testing.assert_close(found, torch.func.grad(lambda x: plain(x).square().sum())(x))

    @pytest.mark.filterwarnings("ignore:`torch.jit.script")
    def test_of_compiled_models(self) -> None:
        plain = convolution()
        compiled = torch.compile(optimized(plain), fullgraph=True, backend="aot_eager")
        assert_as_exact(compiled, plain, images())


def test_a_write_into_the_output() -> None:
    """Layers that work in place may follow, as in VGG."""
    plain = nn.Sequential(convolution(), nn.ReLU(inplace=True)).train()
    ours = optimized(plain)
    assert is_product(ours[:1], images())
    assert not ours[0](images())._is_view()
    assert_as_exact(ours, plain, images())


def test_a_backward_pass_within_autocast() -> None:
    """As in torch, the gradients of float32 convolutions are computed in float32."""
    plain, x = convolution(), images()
    output = optimized(plain)(x.requires_grad_())
    with torch.autocast("cpu", torch.bfloat16):
        output.sum().backward()
    exact = x.detach().double().requires_grad_()
    plain.double()(exact).sum().backward()
    assert x.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(x.grad, exact.grad.float())


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpointed(is_reentrant: bool) -> None:
    plain = convolution()
    ours, x = optimized(plain), images().requires_grad_()
    output: Any = checkpoint(ours, x, use_reentrant=is_reentrant)
    output.sum().backward()
    exact = x.detach().double().requires_grad_()
    copy.deepcopy(plain).double()(exact).sum().backward()
    assert exact.grad is not None
    torch.testing.assert_close(x.grad, exact.grad.float())


def test_in_bfloat16() -> None:
    """Split weights are multiplied as they are, and the input is cast as autocast casts it."""
    given = nn.Sequential(
        convolution(), nn.ReLU(), convolution("1x1").requires_grad_(False)
    ).train()
    given[2] = nn.Conv2d(OUTPUTS, OUTPUTS, 1)
    optimizer = torch.optim.AdamW(given.parameters())
    plain = copy.deepcopy(given).bfloat16().double()
    model, step = transforms.optimize(given, optimizer, dtype=torch.bfloat16)
    assert model[0].weight.dtype is torch.bfloat16
    x = images()
    with torch.autocast("cpu", torch.bfloat16):
        assert is_product(model[:1], x)
        assert is_product(model, x)
        output = model(x)
    assert output.dtype is torch.bfloat16
    right = plain(x.bfloat16().double())
    sizes = sum(p.abs().sum() for p in plain.parameters()).item()
    bound = 4 * unit_roundoff(torch.bfloat16) * x.abs().max().item() * sizes
    assert_within(output.detach(), right.detach(), torch.full_like(right, bound), "output")
    output.sum().backward()
    assert model[0].weight.grad.dtype is torch.bfloat16
    step.step()
    transforms.restore(model, step)
    assert (type(model[0]), model[0].weight.dtype) == (nn.Conv2d, torch.float32)


def test_report_levels_and_knob(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) + 1

    given = nn.Sequential(
        convolution(),
        Own(4, 4, 1),
        parametrizations.weight_norm(nn.Conv2d(4, 4, 1)),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(4, 4, 3, dilation=2),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
    )
    report = transforms.report(optimized(given))
    assert [entry.where for entry in report.done(KNOB)] == ["0"]
    assert {entry.where: entry.what for entry in report.left(KNOB)} == {
        "1": "overrides its methods: Own may differ",
        "2": "has a weight or bias that is computed from others (a parametrization)",
        "3": "is grouped",
        "4": "has dilation=(2, 2)",
        "5": "pads by (1, 1) with 'reflect'",
    }
    for arguments, is_ours in levels_of(KNOB):
        assert isinstance(optimized(convolution(), **arguments), MatmulConv2d) == is_ours
    with pytest.raises(ValueError, match="conv_as_matmul=True is for a model in train mode"):
        transforms.optimize(convolution().eval(), conv_as_matmul=True)
    monkeypatch.setattr(conv_as_matmul, "limits", lambda *_: Limits(0, 0))
    with pytest.warns(transforms.NoEffectWarning, match="products are no faster on this processor"):
        optimized(convolution(), conv_as_matmul=True)
    monkeypatch.undo()
    with pytest.warns(transforms.NoEffectWarning, match="fewer than 262,144 elements|no faster"):
        optimized(convolution(), conv_as_matmul=True)


class TestLimits:
    @pytest.fixture(autouse=True)
    def _unpatched(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.undo()
        _processor.has_tiles.cache_clear()
        yield
        _processor.has_tiles.cache_clear()

    @pytest.mark.parametrize(
        ("flags", "has_products", "one_tap", "several"),
        [
            ("avx2 amx_bf16", True, (64, 64), (49, 64)),
            ("avx512_bf16", True, (49, 64), (0, 49)),
            ("amx_bf16", False, (0, 0), (0, 0)),
        ],
    )
    def test_in_bfloat16(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        flags: str,
        has_products: bool,
        one_tap: tuple[int, int],
        several: tuple[int, int],
    ) -> None:
        facts = tmp_path / "cpuinfo"
        facts.write_text(f"flags\t\t: fpu {flags} avx\n")
        monkeypatch.setattr(_processor, "PROCESSORS", facts)
        monkeypatch.setattr(conv_as_matmul, "has_bfloat16_products", has_products)
        assert conv_as_matmul.limits(torch.bfloat16, (1, 1)) == one_tap
        assert conv_as_matmul.limits(torch.bfloat16, (1, 3)) == several

    def test_without_facts(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(_processor, "PROCESSORS", tmp_path / "none")
        monkeypatch.setattr(conv_as_matmul, "has_bfloat16_products", True)
        assert conv_as_matmul.limits(torch.bfloat16, (1, 1)) == (49, 64)

    @pytest.mark.parametrize(
        ("objection", "one_tap", "several"),
        [(None, (0, 16), (0, 16)), ("MKL is as fast", (49, 64), (16, 49))],
    )
    def test_in_float32(
        self,
        monkeypatch: pytest.MonkeyPatch,
        objection: str | None,
        one_tap: tuple[int, int],
        several: tuple[int, int],
    ) -> None:
        """Where oneDNN's products are faster than MKL's, so are its convolutions."""
        monkeypatch.setattr(onednn_products, "objection", lambda: objection)
        assert conv_as_matmul.limits(torch.float32, (1, 1)) == one_tap
        assert conv_as_matmul.limits(torch.float32, (3, 3)) == several
        assert conv_as_matmul.limits(torch.float64, (1, 1)) == (0, 0)


class TestInferenceAfterTraining:
    def trained(self) -> nn.Sequential:
        plain = nn.Sequential(convolution(), nn.BatchNorm2d(OUTPUTS), nn.ReLU())
        model: nn.Sequential = optimized(plain)
        assert isinstance(model[0], MatmulConv2d)
        randomise(model)
        return model

    def test_packed_and_folded(self) -> None:
        model = self.trained()
        with torch.no_grad():
            right = model(images())
            ours = transforms.optimize(model)
            assert type(ours[0]).__name__ == "PackedConv2d"
            assert ours(images()).shape == right.shape
        assert type(transforms.restore(ours)[0]) is nn.Conv2d

    def test_quantized(self) -> None:
        ours = transforms.quantize(self.trained(), [images()])
        assert type(ours[0]).__name__ == "Int8Conv2d"
        assert type(transforms.restore(ours)[0]) is nn.Conv2d
