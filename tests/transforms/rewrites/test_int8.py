"""INT8 layers compute exactly what their codes give, except for rounding the result."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fusedoptim import transforms
from fusedoptim.allocator import processor_features
from tests.compiling import another_thread_compiles, another_thread_exports
from tests.running import check_script
from tests.tolerances import int8_errors
from transforms.rewrites import int8_operators
from transforms.rewrites.int8 import Int8Module, is_quantized
from transforms.rewrites.int8_operators import Grid, code_bits, quantized_activation

FUNCTIONS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: nn.functional.linear,
    nn.Conv1d: nn.functional.conv1d,
    nn.Conv2d: nn.functional.conv2d,
    nn.Conv3d: nn.functional.conv3d,
}

LAYERS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(33, 17), (5, 33)),
    "linear, no bias": (lambda: nn.Linear(64, 16, bias=False), (2, 3, 64)),
    "linear of a vector": (lambda: nn.Linear(7, 3), (7,)),
    "linear of one feature": (lambda: nn.Linear(1, 1), (4, 1)),
    "conv": (lambda: nn.Conv2d(3, 8, 3, padding=1), (2, 3, 9, 9)),
    "conv 1x1, no bias": (lambda: nn.Conv2d(16, 5, 1, bias=False), (2, 16, 5, 7)),
    "conv, strided and dilated": (lambda: nn.Conv2d(5, 7, 3, 2, 2, 2), (2, 5, 11, 8)),
    "conv in groups": (lambda: nn.Conv2d(6, 9, (3, 1), 1, "same", (2, 1), 3), (1, 6, 7, 5)),
    "conv, depthwise": (lambda: nn.Conv2d(19, 19, 3, groups=19), (2, 19, 8, 8)),
    "conv1d": (lambda: nn.Conv1d(5, 7, 3, padding=2), (3, 5, 21)),
    "conv3d": (lambda: nn.Conv3d(4, 6, 3, padding=1), (2, 4, 5, 6, 7)),
}
each_layer = pytest.mark.parametrize("name", LAYERS)


def quantized(layer: nn.Module, *batches: Tensor, **arguments: Any) -> Any:
    if not arguments.get("dynamic"):
        arguments["ranges"] = "min-max"
    return transforms.quantize(nn.Sequential(layer).eval(), batches, **arguments)[0]


def grid_of(low: float, high: float) -> tuple[float, int]:
    """Compute the expected scale and zero point."""
    largest = 2 ** code_bits() - 1
    scale = torch.tensor((max(high, 0) - min(low, 0)) / largest, dtype=torch.float32).item()
    return scale, min(round(-min(low, 0) / scale), largest)


def decoded(x: Tensor, scale: float, zero: int) -> Tensor:
    """The values of the codes of ``x``, in float64."""
    inverse = torch.tensor(1 / scale, dtype=torch.float32).double()
    codes = (x.double() * inverse + zero).float().double().round().clamp(0, 2 ** code_bits() - 1)
    return (codes - zero) * scale


def rounded_weight(weight: Tensor) -> Tensor:
    """The values of the codes of a weight, in float64."""
    weight = weight.detach().float()
    scales = weight.flatten(1).abs().amax(1) / 127
    scales = scales.masked_fill(scales == 0, 1).view(-1, *[1] * (weight.dim() - 1))
    return (weight / scales).round().double() * scales.double()


def exact(
    layer: Any, kind: type[nn.Module], x: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Return what the codes give, in float64, and how far float32 may be from it."""
    scale, zero = grid_of(low, high)
    values, weight = decoded(x, scale, zero), rounded_weight(layer.weight)
    bias = None if layer.bias is None else layer.bias.detach().double()
    geometry = () if kind is nn.Linear else (
        layer.stride, layer.padding, layer.dilation, layer.groups
    )  # fmt: skip
    result = FUNCTIONS[kind](values, weight, bias, *geometry)
    magnitudes = FUNCTIONS[kind](values.abs() + zero * scale, weight.abs(), None, *geometry)
    # Padding has the code of the zero point, whose share is subtracted too.
    ones = torch.full_like(values, zero * scale)
    if kind is not nn.Linear and any(layer.padding):
        everywhere = weight.abs().flatten(1).sum(1).view(-1, *[1] * (weight.dim() - 2))
        magnitudes = magnitudes + ones.flatten()[0] * everywhere
    shaped = None if bias is None else bias.view(-1, *[1] * (result.dim() - 2))
    if kind is nn.Linear:
        shaped = bias
    return result, int8_errors(magnitudes, shaped, torch.float32)


def assert_exact(layer: Any, kind: type[nn.Module], x: Tensor, low: float, high: float) -> None:
    expected, allowed = exact(layer, kind, x, low, high)
    with torch.no_grad():
        result = layer(x)
    assert result.dtype == torch.float32
    assert ((result.double() - expected).abs() <= allowed).all()


@each_layer
def test_static(name: str) -> None:
    make, shape = LAYERS[name]
    plain = make()
    batch = torch.randn(shape) * 3
    layer = quantized(plain, batch)
    assert isinstance(layer, Int8Module)
    assert_exact(layer, type(plain), batch, batch.min().item(), batch.max().item())
    # Beyond the range, values are clipped.
    assert_exact(layer, type(plain), 2 * batch, batch.min().item(), batch.max().item())


@pytest.mark.parametrize("name", ["linear", "linear, no bias", "linear of a vector"])
def test_dynamic(name: str) -> None:
    make, shape = LAYERS[name]
    layer = transforms.quantize(nn.Sequential(make()).eval())[0]
    for spread in (0.1, 100.0):
        x = torch.randn(shape) * spread
        assert_exact(layer, nn.Linear, x, x.min().item(), x.max().item())


@each_layer
def test_strides_are_torchs(name: str) -> None:
    """Single small volumes are left out: torch's strides for them depend on the thread count."""
    make, shape = LAYERS[name]
    plain = make()
    batch = torch.randn(shape)
    layer = quantized(plain, batch)
    layouts = [batch, batch.transpose(0, -1).contiguous().transpose(0, -1)]
    if batch.dim() == 4:
        layouts.append(batch.contiguous(memory_format=torch.channels_last))
    twin = copy.deepcopy(plain)
    twin.weight.data = layer.weight.detach()
    for x in layouts:
        with torch.no_grad():
            assert layer(x).stride() == twin(x).stride()


def test_ranges_of_one_sign_and_of_one_value() -> None:
    for values in (torch.rand(8, 4) + 1, -torch.rand(8, 4) - 1, torch.zeros(8, 4)):
        layer = quantized(nn.Linear(4, 3), values)
        scale = max(values.abs().max().item(), 1e-9)
        with torch.no_grad():
            expected = torch.nn.functional.linear(values, layer.weight, layer.bias)
            bound = 4 * scale / 100 * layer.weight.abs().max().item()
            assert (layer(values) - expected).abs().max() <= bound + 1e-6


class TestFloatingPoint:
    """Values without codes are computed by torch's module."""

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("is_dynamic", [False, True])
    def test_infinite_and_nan(self, value: float, is_dynamic: bool) -> None:
        plain = nn.Linear(40, 8)
        x = torch.randn(6, 40)
        layer = quantized(plain, x, dynamic=is_dynamic)
        x[3, 5] = value
        with torch.no_grad():
            torch.testing.assert_close(layer(x), plain(x), rtol=0, atol=0, equal_nan=True)

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_weights_that_become_infinite(self, value: float) -> None:
        plain = nn.Linear(4, 8)
        x = torch.randn(6, 4)
        layer = quantized(plain, x)
        with torch.no_grad():
            layer.weight[0, 0] = value
            plain.weight[0, 0] = value
            torch.testing.assert_close(layer(x), plain(x), rtol=0, atol=0, equal_nan=True)

    @each_layer
    def test_no_elements(self, name: str) -> None:
        make, shape = LAYERS[name]
        if len(shape) == 1:
            pytest.skip("has no batch")
        layer = quantized(make(), torch.randn(shape))
        with torch.no_grad():
            empty = torch.empty(0, *shape[1:])
            assert layer(empty).shape == make()(empty).shape

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
    def test_other_dtypes(self, dtype: torch.dtype) -> None:
        plain = nn.Linear(4, 8)
        x = torch.randn(6, 4)
        layer = quantized(plain, x).to(dtype)
        with torch.no_grad():
            assert torch.equal(layer(x.to(dtype)), copy.deepcopy(plain).to(dtype)(x.to(dtype)))
            with pytest.raises(RuntimeError, match="same dtype"):
                layer(x)

    def test_wrong_shapes_raise_as_torchs_do(self) -> None:
        layer = quantized(nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8))
        with torch.no_grad(), pytest.raises(RuntimeError, match="expected input"):
            layer(torch.randn(2, 4, 8, 8))
        with torch.no_grad(), pytest.raises(RuntimeError, match="Kernel size can't be greater"):
            layer(torch.randn(2, 3, 8, 2))
        with torch.no_grad():
            assert layer(torch.randn(3, 8, 8)).shape == (4, 6, 6)

    @pytest.mark.parametrize("shape", [(1,), (1, 8), (6, 8)])
    def test_a_bias_that_torch_expands(self, shape: tuple[int, ...]) -> None:
        plain = nn.Linear(4, 8)
        x = torch.randn(3, 6, 4)
        layer = quantized(plain, x)
        layer.bias = nn.Parameter(torch.randn(shape))
        plain.bias = layer.bias
        with torch.no_grad():
            assert torch.equal(layer(x), plain(x))
        with pytest.raises(ValueError, match="has a bias of shape"):
            quantized(plain, x)


@pytest.mark.parametrize("numbers", [1, [1]])
@pytest.mark.parametrize("name", ["stride", "padding", "dilation"])
@pytest.mark.parametrize("case", ["conv1d", "conv, strided and dilated", "conv3d"])
def test_one_number_for_all_dimensions(case: str, name: str, numbers: Any) -> None:
    make, shape = LAYERS[case]
    plain, x = make(), torch.randn(shape)
    layers = [quantized(copy.deepcopy(plain), x)]
    setattr(plain, name, numbers)
    layers.append(quantized(copy.deepcopy(plain), x))
    setattr(layers[0], name, numbers)
    with torch.no_grad():
        expected = plain(x)
        largest = expected.abs().max().item()
        twin = copy.deepcopy(plain)
        setattr(twin, name, (1,) * (x.dim() - 2))
        twin.load_state_dict(layers[1].state_dict())
        exactly = quantized(twin, x)(x)
        for layer in layers:
            result = layer(x)
            assert result.shape == expected.shape
            assert (result - exactly).abs().max().item() <= largest / 1000


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.Conv2d(1, 8, 2, padding=2),
        lambda: nn.Conv2d(4, 8, 3, stride=2, padding=4, groups=4),
        lambda: nn.Conv2d(1, 1, (1, 3), padding=(1, 0)),
        lambda: nn.Conv1d(1, 4, 5, padding=5),
    ],
)
def test_outputs_that_see_only_padding(layer: Callable[[], Any]) -> None:
    """oneDNN leaves them as the memory was: such a layer stays in floating point."""
    model = nn.Sequential(layer(), nn.Flatten(), nn.LazyLinear(9)).eval()
    x = torch.randn(2, model[0].in_channels, 12)
    x = x.unsqueeze(-1).repeat(1, 1, 1, 9) if model[0].weight.dim() == 4 else x
    model(x)
    result = transforms.quantize(model, [x])
    (left,) = transforms.report(result).left("quantize")
    assert left.what.startswith("has one channel in each group, and padding as large")
    assert torch.equal(result[0](x), model[0](x))
    assert is_quantized(result[2])


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
def test_uneven_padding_is_torchs() -> None:
    layer = quantized(plain := nn.Conv2d(3, 4, 4), x := torch.randn(2, 3, 8, 8))
    layer.padding = plain.padding = "same"
    with torch.no_grad():
        torch.testing.assert_close(layer(x), plain(x))  # with weights in other layouts


class TestBfloat16:
    def test_weights_and_inputs(self) -> None:
        plain = nn.Linear(64, 32).bfloat16()
        x = torch.randn(8, 64, dtype=torch.bfloat16)
        layer = quantized(plain, x)
        with torch.no_grad():
            result = layer(x)
        expected, allowed = exact(layer, nn.Linear, x, x.min().item(), x.max().item())
        assert result.dtype == torch.bfloat16
        allowed = allowed + torch.finfo(torch.bfloat16).eps / 2 * expected.abs()
        assert ((result.double() - expected).abs() <= 1.01 * allowed).all()

    def test_autocast_sets_the_dtype_of_the_result(self) -> None:
        x = torch.randn(8, 64)
        layer = quantized(nn.Linear(64, 32), x)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
            assert layer(x.bfloat16()).dtype == torch.bfloat16


class TestWeights:
    def test_a_write_is_seen(self) -> None:
        x = torch.randn(6, 40)
        layer = quantized(nn.Linear(40, 8), x)
        with torch.no_grad():
            before = layer(x)
            layer.weight.mul_(2)
            layer.bias.mul_(2)
            torch.testing.assert_close(layer(x), 2 * before, rtol=1e-6, atol=1e-6)

    def test_a_write_through_data_is_seen(self) -> None:
        x = torch.randn(6, 40)
        layer = quantized(nn.Linear(40, 8, bias=False), x)
        with torch.no_grad():
            before = layer(x)
            alias = layer.weight.data
            for factor in (2, 4):
                alias.mul_(2)
                torch.testing.assert_close(layer(x), factor * before, rtol=1e-6, atol=1e-6)
            del alias
            assert torch.equal(layer(x), layer(x))
            layer.weight.data.mul_(2)
            torch.testing.assert_close(layer(x), 8 * before, rtol=1e-6, atol=1e-6)
            layer.state_dict()["weight"].data.mul_(2)
            torch.testing.assert_close(layer(x), 16 * before, rtol=1e-6, atol=1e-6)

    def test_another_shape_of_images(self) -> None:
        """A weight is packed for one shape, but correct for all."""
        plain = nn.Conv2d(16, 24, 3, padding=1)
        batch = torch.randn(2, 16, 30, 30)
        layer = quantized(plain, batch)
        bounds = batch.min().item(), batch.max().item()
        for side in (30, 7, 30, 3, 64, 64, 64, 1, 30):
            x = torch.randn(3, 16, side, side).clamp(*bounds)
            assert_exact(layer, nn.Conv2d, x, *bounds)

    def test_copies_and_pickles_compute_the_same(self) -> None:
        x = torch.randn(6, 40)
        layer = quantized(nn.Linear(40, 8), x)
        with torch.no_grad():
            expected = layer(x)
            for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
                assert torch.equal(twin(x), expected)
                twin.weight.zero_()
                assert not torch.equal(twin(x), expected)
            assert torch.equal(layer(x), expected)

    def test_inference_tensors(self) -> None:
        x = torch.randn(6, 40)
        with torch.inference_mode():
            plain = nn.Linear(40, 8).eval()
            layer = quantized(plain, x)
            before = layer(x)
            assert torch.equal(layer(x), before)
            layer.weight.mul_(2)  # torch does not count writes into these
            layer.bias.mul_(2)
            torch.testing.assert_close(layer(x), 2 * before, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("name", ["weight", "bias"])
    def test_a_write_of_another_process_is_seen(self, name: str) -> None:
        x = torch.randn(6, 40)
        layer = quantized(nn.Linear(40, 8), x).share_memory()
        storage: Any = getattr(layer, name).untyped_storage()
        mapped = torch.UntypedStorage._new_shared_fd_cpu(*storage._share_fd_cpu_())
        theirs = torch.empty(0).set_(mapped)  # what another process has
        with torch.no_grad():
            before, bias = layer(x), layer.bias.clone()
            theirs.zero_()
            expected = bias.expand(6, 8) if name == "weight" else before - bias
            torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-6)


class TestRefused:
    def test_gradients(self) -> None:
        x = torch.randn(6, 40)
        layer = quantized(nn.Linear(40, 8), x)
        with pytest.raises(RuntimeError, match=r"no gradients: call the model under torch.no_grad"):
            layer(x)
        layer.requires_grad_(False)
        assert layer(x).shape == (6, 8)
        with pytest.raises(RuntimeError, match="no gradients"):
            layer(x.requires_grad_())

    @pytest.mark.parametrize("wrong", [None, [1.0], torch.ones(2, 40).numpy()])
    def test_what_is_no_tensor_raises_as_torchs_does(self, wrong: Any) -> None:
        plain = nn.Linear(40, 8)
        layer = quantized(plain, torch.randn(6, 40))
        with pytest.raises(TypeError) as expected:
            plain(wrong)
        with pytest.raises(TypeError) as actual:
            layer(wrong)
        assert str(actual.value) == str(expected.value)

    @pytest.mark.filterwarnings("ignore:.*torch.jit")  # torch's own import
    def test_forward_derivatives(self) -> None:
        x = torch.randn(6, 40)
        layer = quantized(nn.Linear(40, 8), x).requires_grad_(False)
        with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="gradients"):
            layer(torch.autograd.forward_ad.make_dual(x, x))

    def test_training_mode(self) -> None:
        x = torch.randn(6, 40)
        layer = quantized(nn.Linear(40, 8), x).train()
        with (
            torch.no_grad(),
            pytest.raises(RuntimeError, match=r"training mode: call transforms\.r"),
        ):
            layer(x)

    def test_export_and_transforms_of_functions(self) -> None:
        x = torch.randn(6, 40)
        layer = quantized(nn.Linear(40, 8), x).requires_grad_(False)
        with pytest.raises(RuntimeError, match=r"exported.*transforms\.restore"):
            torch.export.export(layer, (x,))
        with pytest.raises(RuntimeError, match=r"transformed by torch\.func"):
            torch.func.vmap(layer)(x)
        with pytest.raises(RuntimeError, match="traced"):
            torch.fx.symbolic_trace(layer)
        with pytest.raises(RuntimeError, match=r"traced.*transforms\.restore"):
            make_fx(layer)(x)

    def test_another_thread_is_recorded(self) -> None:
        x, plain = torch.randn(6, 40), nn.Linear(40, 8)
        layer = quantized(plain, x).requires_grad_(False)
        others = {another_thread_compiles: layer(x), another_thread_exports: plain(x)}
        for other, expected in others.items():  # torch.export turns oneDNN off, in all threads
            with other():
                assert torch.equal(layer(x), expected)

    @pytest.mark.filterwarnings("ignore:.*torch.jit")  # torch's own import
    def test_compiled_models_run_them_uncompiled(self) -> None:
        x = torch.randn(6, 40)
        layer = quantized(nn.Linear(40, 8), x).requires_grad_(False)
        compiled = torch.compile(nn.Sequential(layer, nn.ReLU()), backend="eager")
        assert torch.equal(compiled(x), layer(x).relu())


class TestOperators:
    def test_codes_round_to_nearest_and_clip(self) -> None:
        grid = Grid(0.5, 3, 255)
        x = torch.tensor([-100.0, -1.5, -1.26, -0.25, 0.0, 0.25, 0.74, 0.76, 1.0, 1000.0])
        codes = quantized_activation(x, grid)
        assert codes is not None
        # -0.25 and 0.25 lie between two codes, of which the even one is taken.
        assert codes.tolist() == [0, 0, 0, 2, 3, 4, 4, 5, 5, 255]

    @pytest.mark.parametrize("n", [1, 15, 16, 17, 1000, 16 * 1024 + 3, 3 * 64 * 1024 + 5])
    def test_codes_of_any_length(self, n: int) -> None:
        x = torch.randn(n)
        scale, zero = grid_of(-3, 3)
        codes = quantized_activation(x, Grid(scale, zero, 2 ** code_bits() - 1))
        assert codes is not None
        assert torch.equal((codes.double() - zero) * scale, decoded(x, scale, zero))

    def test_codes_keep_the_order_in_memory(self) -> None:
        grid = Grid(0.05, 100, 255)
        x = torch.randn(2, 6, 5, 4)
        for layout in (
            x, x.contiguous(memory_format=torch.channels_last), x.permute(3, 1, 0, 2),
            x[:, ::2], x[:, 1:3, 2:], x.expand(2, 2, 6, 5, 4)[1],
        ):  # fmt: skip
            codes = quantized_activation(layout, grid)
            plain = quantized_activation(layout.contiguous(), grid)
            assert codes is not None
            assert plain is not None
            assert torch.equal(codes, plain)

    def test_a_newer_torch_with_another_operator(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert int8_operators.objection() is None
        schemas = {**int8_operators._SCHEMAS, "qlinear_prepack": "another", "gone": "absent"}
        monkeypatch.setattr(int8_operators, "_SCHEMAS", schemas)
        with pytest.raises(
            RuntimeError, match=r"onednn::qlinear_prepack, onednn::gone: INT8 needs"
        ):
            transforms.quantize(nn.Linear(2, 2).eval())

    @pytest.mark.parametrize(
        ("isa", "bits"), [("AVX2", 7), ("AVX512_CORE", 7), ("AVX512_CORE_VNNI", 8)]
    )
    def test_processors_with_and_without_vnni(self, isa: str, bits: int) -> None:
        """With 7 bits, no sum of two products saturates, even of the largest codes."""
        features = processor_features().split()
        if isa == "AVX512_CORE_VNNI" and "avx512_vnni" not in features:
            pytest.skip("this processor has no VNNI")
        printed = check_script(
            """
            import torch
            from torch import nn
            from fusedoptim import transforms
            from transforms.rewrites.int8_operators import code_bits
            shapes = (16, 256), (2, 32, 9, 9)
            for layer, shape in zip((nn.Linear(256, 8), nn.Conv2d(32, 8, 3)), shapes):
                nn.init.constant_(layer.weight, 1.0)
                x = torch.ones(shape)
                int8 = transforms.quantize(nn.Sequential(layer).eval(), [x])
                with torch.no_grad():
                    print((int8(x) - layer(x)).abs().max().item() < 1e-2)
            print(code_bits())
            """,
            ONEDNN_MAX_CPU_ISA=isa,
        )
        assert printed.split() == ["True", "True", str(bits)]


def test_is_quantized() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    assert not is_quantized(model)
    assert is_quantized(transforms.quantize(model))
