"""Packed weights compute the same, see every change, and are not used where they must not be."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusedoptim import transforms
from tests.tolerances import unit_roundoff
from tests.transforms.helpers import operators_called
from transforms.rewrites import packed
from transforms.rewrites.packed import supported_dtypes
from transforms.rewrites.watched_parameter import WatchedParameter

KNOB = "weights_prepack"
LAST = torch.channels_last


def linear(rows: int = 65, bias: bool = True) -> tuple[nn.Module, Tensor]:
    return nn.Linear(257, 515, bias=bias), torch.randn(rows, 257)


def empty_linear() -> nn.Module:
    with pytest.warns(UserWarning, match="zero-element"):
        return nn.Linear(0, 5)


def images(module: nn.Module, *size: int) -> tuple[nn.Module, Tensor]:
    layout = LAST if len(size) == 4 else torch.channels_last_3d
    return module, torch.randn(*size).to(memory_format=layout)


CASES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "linear": linear,
    "linear-no-bias": lambda: linear(bias=False),
    "linear-small": lambda: (nn.Linear(3, 5), torch.randn(2, 3)),
    "linear-vector": lambda: (nn.Linear(1025, 1030), torch.randn(1025)),
    "linear-4d": lambda: (nn.Linear(129, 515), torch.randn(2, 3, 17, 129)),
    "linear-no-rows": lambda: (nn.Linear(257, 515), torch.randn(0, 257)),
    "linear-no-columns": lambda: (empty_linear(), torch.randn(3, 0)),
    "linear-strided": lambda: (nn.Linear(257, 515), torch.randn(257, 65).t()),
    "conv1d": lambda: (nn.Conv1d(6, 9, 11, 2, 5, 2), torch.randn(2, 6, 43)),
    "conv1d-short": lambda: (nn.Conv1d(16, 9, 3), torch.randn(2, 16, 43)),
    "conv1d-transposed": lambda: (nn.Conv1d(6, 9, 11), torch.randn(2, 43, 6).transpose(1, 2)),
    "conv1d-one-output": lambda: (nn.Conv1d(6, 9, 11), torch.randn(2, 6, 11)),
    "conv1d-one-sequence": lambda: (nn.Conv1d(6, 9, 11), torch.randn(6, 43)),
    "conv1d-depthwise": lambda: (
        nn.Conv1d(17, 17, 15, padding=7, groups=17, bias=False),
        torch.randn(1, 17, 64),
    ),
    "conv2d": lambda: images(nn.Conv2d(3, 17, 3), 2, 3, 9, 11),
    "conv2d-contiguous": lambda: (nn.Conv2d(3, 17, 3), torch.randn(2, 3, 9, 11)),
    "conv2d-one-image": lambda: (nn.Conv2d(3, 17, 3), torch.randn(3, 9, 11)),
    "conv2d-no-images": lambda: (nn.Conv2d(3, 17, 3), torch.randn(0, 3, 9, 11)),
    "conv2d-strided": lambda: images(nn.Conv2d(4, 6, (3, 2), (2, 3), (1, 2), (2, 1)), 2, 4, 15, 9),
    "conv2d-groups": lambda: images(nn.Conv2d(12, 18, 3, groups=3, bias=False), 1, 12, 9, 9),
    "conv2d-depthwise": lambda: images(nn.Conv2d(33, 33, 5, padding=2, groups=33), 1, 33, 9, 9),
    "conv2d-pointwise": lambda: images(nn.Conv2d(31, 65, 1), 1, 31, 7, 7),
    "conv2d-same": lambda: images(nn.Conv2d(3, 5, (3, 5), padding="same"), 2, 3, 9, 9),
    "conv2d-same-uneven": lambda: images(nn.Conv2d(3, 5, 4, padding="same"), 1, 3, 9, 9),
    "conv2d-reflect": lambda: images(nn.Conv2d(3, 5, 3, 1, 1, padding_mode="reflect"), 1, 3, 9, 9),
    "conv3d": lambda: images(nn.Conv3d(3, 5, 3, padding=1), 1, 3, 5, 6, 7),
    "transposed": lambda: images(nn.ConvTranspose2d(6, 4, 3, 2, 1, 1), 2, 6, 5, 7),
    "transposed-padded": lambda: images(
        nn.ConvTranspose2d(6, 4, 3, output_padding=1, dilation=2), 2, 6, 5, 7
    ),
    "transposed-groups": lambda: images(
        nn.ConvTranspose2d(6, 4, 3, groups=2, dilation=2), 1, 6, 5, 5
    ),
}


def optimized(model: nn.Module, **arguments: Any) -> Any:
    return transforms.optimize(
        model.eval(), auto_channels_last=False, weights_prepack=True, inplace=True, **arguments
    )


def calls_onednn(model: nn.Module, x: Tensor) -> bool:
    """Whether a call uses an operator that takes packed weights."""
    return any(name.startswith("mkldnn::") for name in operators_called(lambda: model(x)))


def assert_as_in_float64(plain: nn.Module, ours: nn.Module, x: Tensor, dtype: torch.dtype) -> None:
    """A sum of n products differs by at most n + 1 roundings of its terms' magnitudes.

    What is left to torch in 16 bits has its bits.
    """
    exact = copy.deepcopy(plain).double()
    magnitudes = copy.deepcopy(exact)
    for p in magnitudes.parameters():
        p.detach().abs_()
    with torch.no_grad():
        actual, expected = ours(x), plain(x)
        assert actual.dtype == expected.dtype
        assert actual.stride() == expected.stride()
        if dtype.itemsize == 2 and not calls_onednn(ours, x):  # torch sums in 16 bits, too
            assert torch.equal(actual, expected)
            return
        weight = plain.weight
        terms = weight.numel() // max(min(weight.size(0), weight.size(1)), 1)
        roundings = (terms + 1) * unit_roundoff(torch.float32) + unit_roundoff(dtype)
        bound = magnitudes(x.double().abs()) * roundings * 1.01
        assert bool(((actual.double() - exact(x.double())).abs() <= bound).all())


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_equals_float64_and_keeps_strides(case: str, dtype: torch.dtype) -> None:
    model, x = CASES[case]()
    model, x = model.to(dtype).eval(), x.to(dtype)
    ours = transforms.optimize(model, auto_channels_last=False)
    assert_as_in_float64(model, ours, x, dtype)
    assert_as_in_float64(model, ours, x + 1, dtype)


def is_packed(model: nn.Module, x: Tensor) -> bool:
    """Whether the last call used a packed weight."""
    name = "_linear_pointwise" if isinstance(model, nn.Linear) else "_convolution_pointwise"
    with torch.no_grad():
        return f"mkldnn::{name}" in operators_called(lambda: model(x))


LARGE = ["linear", "linear-4d", "conv1d", "conv1d-depthwise", "conv2d", "conv2d-depthwise"]


@pytest.mark.parametrize("case", [*LARGE, "conv2d-same"])
def test_uses_the_packed_weight(case: str) -> None:
    model, x = CASES[case]()
    assert is_packed(optimized(model), x)


@pytest.mark.parametrize(("device", "packs"), [("cpu", True), ("meta", False)])
def test_default_devices(device: str, packs: bool) -> None:
    """The CPU is the default anyway; with another one, torch's functions make other tensors."""
    model, x = CASES["linear"]()
    ours = optimized(model)
    with torch.device(device):
        assert is_packed(ours, x) == packs


CONVOLUTIONS: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor]], bool]] = {
    "few multiplications": (lambda: images(nn.Conv2d(16, 8, 1), 1, 16, 9, 9), False),
    "two images": (lambda: images(nn.Conv2d(16, 8, 1), 2, 16, 9, 9), True),
    "groups": (lambda: images(nn.Conv2d(16, 16, 3, groups=16), 1, 16, 9, 9), True),
    "large kernel": (lambda: images(nn.Conv2d(16, 8, 5), 1, 16, 9, 9), True),
    "many values": (lambda: images(nn.Conv2d(16, 8, 1), 1, 16, 36, 36), True),
    "one short sequence": (lambda: (nn.Conv1d(16, 8, 11), torch.randn(1, 16, 99)), False),
    "long kernel, one dimension": (
        lambda: (nn.Conv1d(16, 8, 11), torch.randn(2, 16, 99)),
        True,
    ),
    "many multiplications": (lambda: images(nn.Conv2d(160, 360, 1), 1, 160, 11, 14), True),
}
"""Convolutions and inputs, and whether packed weights pay in float32."""


@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_torch_convolves_without_onednn(case: str, dtype: torch.dtype) -> None:
    if dtype not in supported_dtypes():
        pytest.skip("oneDNN does not compute in it on this processor")
    make, pays = CONVOLUTIONS[case]
    model, x = make()
    assert is_packed(optimized(model.to(dtype)), x.to(dtype)) == (pays or dtype != torch.float32)


def write_data(weight: Any) -> None:
    weight.data.add_(1)


def set_data(weight: Any) -> None:
    weight.data = weight.detach() + 1


def write(weight: Any) -> None:
    with torch.no_grad():
        weight.add_(1)


def write_detached(weight: Any) -> None:
    weight.detach().add_(1)


def write_data_of_detached(weight: Any) -> None:
    weight.detach().data.add_(1)


def write_array(weight: Any) -> None:
    weight.detach().numpy()[:] += 1


def write_dlpack(weight: Any) -> None:
    torch.from_dlpack(weight.detach()).add_(1)


@pytest.mark.parametrize(
    "change",
    [
        *(write_data, set_data, write, write_detached),
        *(write_data_of_detached, write_array, write_dlpack),
    ],
)
@pytest.mark.parametrize("case", ["linear", "conv2d"])
def test_sees_changes_of_the_weight(case: str, change: Any) -> None:
    model, x = CASES[case]()
    ours = optimized(model)
    held = ours.weight.data  # from before the first call
    plain = copy.deepcopy(transforms.restore(copy.deepcopy(ours)))
    for _ in range(2):
        change(ours.weight)
        change(plain.weight)
        assert_as_in_float64(plain, ours, x, torch.float32)
    held.mul_(2)
    if change is not set_data:
        plain.weight.data.mul_(2)
    assert_as_in_float64(plain, ours, x, torch.float32)
    del held
    assert is_packed(ours, x)


@pytest.mark.parametrize("how", ["eager", "graph mode"])
@pytest.mark.parametrize("case", ["linear", "conv2d", "conv3d", "transposed"])
def test_bias_may_have_a_stride(case: str, how: str) -> None:
    """oneDNN's operators would read a bias as if it had no stride."""
    plain, x = CASES[case]()
    plain.bias = nn.Parameter(torch.randn(2 * len(plain.bias))[::2])
    ours = optimized(copy.deepcopy(plain), graph_mode=how == "graph mode", sample_input=x)
    for _ in range(2):
        assert_as_in_float64(plain.eval(), ours, x, torch.float32)
        ours.bias.data = plain.bias.data = torch.randn(3 * len(plain.bias))[1::3]
    assert_as_in_float64(plain.eval(), ours, x, torch.float32)


@pytest.mark.parametrize("how", ["eager", "graph mode"])
@pytest.mark.parametrize("shape", [(1,), (1, 515), (65, 515)])
def test_bias_that_torch_expands(shape: tuple[int, ...], how: str) -> None:
    plain, x = linear()
    ours = optimized(copy.deepcopy(plain), graph_mode=how == "graph mode", sample_input=x)
    for _ in range(2):
        assert_as_in_float64(plain.eval(), ours, x, torch.float32)
        ours.bias = nn.Parameter(torch.randn(shape))
        plain.bias = nn.Parameter(ours.bias.detach().clone())
    assert_as_in_float64(plain.eval(), ours, x, torch.float32)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("layout", [Tensor.to_sparse, Tensor.to_sparse_csr, Tensor.to_mkldnn])
def test_other_layouts_are_torchs(layout: Callable[[Tensor], Tensor]) -> None:
    plain, x = linear()
    ours, given = optimized(copy.deepcopy(plain)), layout(x)
    with torch.no_grad():
        for _ in range(3):
            actual, expected = ours(given), plain(given)
            assert actual.layout == expected.layout
            assert torch.equal(actual.to_dense(), expected.to_dense())
        ours(x)


def test_sees_another_weight_and_state() -> None:
    model, x = linear()
    ours, plain = optimized(model), linear()[0].eval()
    with torch.no_grad():
        ours(x)
    ours.load_state_dict(plain.state_dict())
    assert_as_in_float64(plain, ours, x, torch.float32)
    plain = linear()[0].eval()
    ours.weight, ours.bias = plain.weight, plain.bias
    assert_as_in_float64(copy.deepcopy(plain), ours, x, torch.float32)


def test_other_shapes_and_dtypes_in_turn() -> None:
    model, x = CASES["conv2d"]()
    plain = copy.deepcopy(model)
    ours = optimized(model)
    for size in (9, 9, 12, 9, 12, 12, 30):
        sample = torch.randn(2, 3, size, size).to(memory_format=LAST)
        assert_as_in_float64(plain, ours, sample, torch.float32)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            assert ours(sample).dtype == torch.bfloat16
    assert_as_in_float64(plain.double(), ours.double(), x.double(), torch.float64)


@pytest.mark.parametrize("case", ["linear", "conv2d", "conv2d-groups", "conv3d", "transposed"])
@pytest.mark.parametrize("dim", [1, -1])
def test_shapes_that_do_not_fit_raise_as_in_torch(case: str, dim: int) -> None:
    """The inputs have too many channels, or images that are smaller than the kernel."""
    model, x = CASES[case]()
    ours = optimized(copy.deepcopy(model))
    wrong = torch.cat([x, x], dim) if dim == 1 else x[..., :1]
    with torch.no_grad():
        ours(x)
        messages = []
        for each in (model, ours, ours):
            try:
                each(wrong)
            except RuntimeError as error:
                messages.append(str(error))
    assert len(messages) in (0, 3)  # a transposed convolution takes images of any size
    assert len(set(messages)) <= 1


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("case", ["linear", "conv2d"])
def test_gradients_and_transforms_are_torchs(case: str) -> None:
    model, x = CASES[case]()
    plain = copy.deepcopy(model).eval()
    ours = optimized(model)
    x.requires_grad_()
    for each in (plain, ours):
        each(x).square().sum().backward()
    assert torch.equal(ours.weight.grad, plain.weight.grad)
    batch = x.detach()[:, None]
    with torch.no_grad():
        assert torch.equal(torch.vmap(ours)(batch), torch.vmap(plain)(batch))
        tangent = torch.func.jvp(ours, (x.detach(),), (x.detach(),))[1]
        assert torch.equal(tangent, torch.func.jvp(plain, (x.detach(),), (x.detach(),))[1])
        exported = torch.export.export(ours, (x.detach(),)).module()
        assert torch.equal(exported(x.detach()), plain(x.detach()))
        traced = torch.jit.trace(ours, x.detach())
        assert torch.equal(traced(x.detach()), plain(x.detach()))
        assert torch.equal(torch.fx.symbolic_trace(ours)(x.detach()), plain(x.detach()))


@pytest.mark.parametrize("case", ["linear", "conv2d", "conv3d", "transposed"])
def test_copies_and_restores(case: str) -> None:
    model, x = CASES[case]()
    plain = copy.deepcopy(model).eval()
    ours = optimized(model)
    with torch.no_grad():
        ours(x)
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    assert list(torch.load(file)) == list(plain.state_dict())
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), copy.copy(ours)):
        assert_as_in_float64(plain, other, x, torch.float32)
    restored = transforms.restore(ours)
    assert type(restored) is type(plain)
    assert type(restored.weight) is nn.Parameter
    assert vars(restored).keys() == vars(plain).keys()
    assert torch.equal(restored.weight, plain.weight)


def test_shared_weights_and_memory() -> None:
    model = nn.Sequential(linear()[0], nn.Linear(515, 257), linear()[0])
    model[2].weight = model[0].weight
    plain = copy.deepcopy(model).eval()
    ours, x = optimized(model), linear()[1]
    with torch.no_grad():
        torch.testing.assert_close(ours(x), plain(x))
        ours.share_memory()  # another process may write into it from now on
        ours(x)
        assert not is_packed(ours[0], x)
    transforms.restore(ours)
    assert all(type(p) is nn.Parameter for p in ours.parameters())


def test_report_and_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) + 1

    given = nn.Sequential(
        nn.Linear(3, 3), Own(3, 3), nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        nn.ConvTranspose1d(3, 3, 3), nn.ConvTranspose3d(3, 3, 3),
        nn.Conv1d(9, 9, 9), nn.Conv1d(5, 5, 14, groups=5), nn.Conv1d(9, 9, 9).bfloat16(),
    )  # fmt: skip
    short = "is too short: copying oneDNN's result costs what packing gains"
    strides = "oneDNN returns other strides than torch: a copy costs most of what packing gains"
    ours = optimized(given)
    report = transforms.report(ours)
    assert [entry.where for entry in report.done(KNOB)] == ["0", "7"]
    assert {entry.where: entry.what for entry in report.left(KNOB)} == {
        "1": "overrides its methods: Own may differ",
        "2": "has a weight or bias that is computed from others (a parametrization)",
        "3": strides,
        "4": strides,
        "5": short,
        "6": short,
    }
    assert not any(
        isinstance(m, packed.PackedModule)
        for arguments in ({"level": "O0"}, {KNOB: False})
        for m in transforms.optimize(linear()[0].eval(), **arguments).modules()
    )
    model = linear()[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="weights_prepack=True is for a model in eval mode"):
        transforms.optimize(model, optimizer, weights_prepack=True)
    monkeypatch.setitem(packed._SCHEMAS, "_linear_pointwise", "another")
    with pytest.warns(
        transforms.NoEffectWarning, match="this torch differs from torch 2.13 in _linear_pointwise"
    ):
        optimized(linear()[0])


@pytest.mark.parametrize("options", [{"activation": torch.tanh}, {"nhead": 3}, {"bias": False}])
def test_linears_that_torch_does_not_call(options: dict[str, Any]) -> None:
    """torch's fast path for transformer layers reads their weights; it needs some options."""
    encoder: Any = nn.TransformerEncoderLayer
    usual = {"d_model": 96, "nhead": 2, "dim_feedforward": 256, "batch_first": True}
    for given, is_called in ((usual, False), ({**usual, **options}, True)):
        ours, seen = transforms.optimize(encoder(**given).eval()), []
        done = {entry.where for entry in transforms.report(ours).done(KNOB)}
        assert done == ({"linear1", "linear2"} if is_called else set())
        forward = ours.linear1.forward
        ours.linear1.forward = lambda x, forward=forward, seen=seen: (seen.append(x), forward(x))[1]
        with torch.no_grad():
            ours(torch.randn(3, 40, 96))
        assert bool(seen) == is_called


def test_training_needs_a_restored_model() -> None:
    ours, x = optimized(linear()[0]), linear()[1]
    with pytest.warns(UserWarning, match=r"call transforms\.restore\(model\) before training"):
        ours.train()
    ours(x).sum().backward()  # without packed weights
    ours.train()  # no second warning
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"call transforms\.restore\(model\) first"):
        transforms.optimize(ours, optimizer)


def test_packed_weights_give_way_and_come_back_where_it_fails() -> None:
    model = nn.Sequential(nn.Linear(257, 515), nn.GELU(), nn.Linear(515, 4)).eval()
    x = torch.randn(64, 257)
    packed = transforms.optimize(model)
    before = transforms.report(packed)
    with pytest.raises(ValueError, match="keep: 'nowhere'"):
        transforms.quantize(packed, [x], keep="nowhere", inplace=True)
    assert [type(m).__name__ for m in packed] == [
        *("PackedLinear", "FusedActivation", "PackedLinear")
    ]
    assert transforms.report(packed) == before
    quantized = transforms.quantize(packed, [x])
    names = ["Int8Linear", "FusedActivation", "Int8Linear"]
    assert [type(m).__name__ for m in quantized] == names
    assert not transforms.report(quantized).done("weights_prepack")
    again = transforms.optimize(quantized)
    assert [e.what for e in transforms.report(again).left("weights_prepack")] == [
        "computes in INT8"
    ] * 2
    with torch.no_grad():
        assert torch.equal(again(x), quantized(x))
    restored = transforms.restore(quantized)
    assert list(map(type, restored)) == list(map(type, model))
    with torch.no_grad():
        assert torch.equal(restored(x), model(x))


def test_parameters_stay_weakly_held() -> None:
    ours, x = optimized(linear()[0]), linear()[1]
    with torch.no_grad():
        ours(x)
    assert type(ours.weight) is WatchedParameter
    before = ours.weight.data_ptr()
    ours.weight = nn.Parameter(torch.zeros_like(ours.weight))
    with torch.no_grad():
        assert torch.equal(ours(x), ours.bias.expand(65, -1)), before


@pytest.mark.parametrize("case", ["linear", "conv2d", "conv3d", "transposed"])
def test_compiled_calls_check_as_little_as_of_plain_modules(case: str) -> None:
    module, x = CASES[case]()
    plain = nn.Sequential(module, copy.deepcopy(module)).eval()
    ours = transforms.optimize(plain, level="O0", weights_prepack=True)
    assert type(ours[1]) is packed.CLASSES[type(module)]
    assert guards_of_second(ours, x) == guards_of_second(plain, x)


def guards_of_second(model: nn.Module, x: Tensor) -> list[tuple[str, str]]:
    """List what torch.compile checks of a model's second module before it runs a captured graph.

    Of the first module it also checks what all modules of the class share.
    """
    found: list[tuple[str, str]] = []

    def keep_all(entries: Any) -> list[bool]:
        found.extend((each.name, each.guard_type) for each in entries)
        return [True] * len(entries)

    def call(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(module(x) for module in model)

    torch._dynamo.reset()
    options = {"guard_filter_fn": keep_all}
    with torch.inference_mode():
        torch.compile(call, backend="eager", options=options)(x)
    torch._dynamo.reset()
    return sorted(each for each in found if "_modules['1']" in each[0])
