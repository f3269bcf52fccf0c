"""The operator interaction: values, gradients, layouts, tracing, errors."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fusedoptim.ops import interaction
from tests.compiling import needs_compiler, quiet_compiler
from tests.fusedoptim.helpers import assert_within, nested_tensor
from tests.optimizer_cases import FLOATS
from tests.running import at_each_thread_count
from tests.tolerances import interaction_errors

OP = torch.ops.fusedoptim.interaction.default
# Samples, features and width: around the kernels' blocks of 4, 8, 16 and 32, and runs of samples.
SHAPES = [
    *((3, 1, 5), (1, 2, 1), (5, 3, 15), (2, 4, 16), (33, 5, 17), (2, 8, 31), (16, 9, 32)),
    *((2, 7, 33), (17, 27, 64), (3, 27, 20), (40, 13, 100), (2, 65, 48), (2, 4, 1000)),
]  # fmt: skip


def inputs(
    samples: int, count: int, width: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """A tensor for each feature."""
    return [torch.randn(samples, width).to(dtype).requires_grad_() for _ in range(count)]


def by_torch(features: Sequence[Tensor]) -> Tensor:
    width = features[0].shape[1]
    x = torch.cat(
        [f if f.dim() == 3 else f.unflatten(1, (f.shape[1] // width, width)) for f in features], 1
    )
    i, j = torch.tril_indices(x.shape[1], x.shape[1], -1)
    return torch.cat([x[:, 0], (x @ x.mT)[:, i, j]], 1)


def gradients(output: Tensor, features: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(output, features, grad)


class TestValues:
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_output_and_gradients(self, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        features = inputs(*shape, dtype)
        _, count, width = shape
        exact = [feature.detach().double().requires_grad_() for feature in features]
        output, expected = interaction(*features), by_torch(exact)
        assert (output.dtype, output.shape) == (dtype, expected.shape)
        grad = torch.randn(output.shape).to(dtype)
        grads, right = gradients(output, features, grad), gradients(expected, exact, grad.double())

        i, j = torch.tril_indices(count, count, -1)
        matrix = torch.zeros(shape[0], count, count, dtype=torch.float64)
        matrix[:, i, j] = matrix[:, j, i] = grad.double()[:, width:]
        stack = torch.stack(exact, 1).detach()
        of_products, of_gradients = interaction_errors(stack, matrix, dtype)
        of_gradients[:, 0] += torch.finfo(dtype).eps * grad[:, :width].double().abs()
        assert torch.equal(output[:, :width], features[0])
        assert_within(
            output[:, width:], expected[:, width:].detach(), of_products[:, i, j], "output"
        )
        for k, (ours, wanted) in enumerate(zip(grads, right)):
            assert ours.dtype == dtype
            assert_within(ours, wanted, of_gradients[:, k], f"gradient {k}")

    @pytest.mark.parametrize(
        "how", ["matrix", "stack", "mixed", "slices", "transposed", "expanded"]
    )
    @pytest.mark.parametrize("width", [16, 20])
    def test_features_of_any_layout(self, how: str, width: int) -> None:
        merged = torch.randn(19, 6 * width)
        whole = torch.randn(19, 7, 2 * width)
        others = {
            "matrix": [merged],
            "stack": [merged.view(19, 6, width)],
            "mixed": [
                merged[:, : 2 * width],
                merged[:, :0],
                merged[:, 2 * width :].view(19, 4, width),
            ],
            "slices": [*whole[:, :, 3 : width + 3].unbind(1)],
            "transposed": [torch.randn(6 * width, 19).t(), torch.randn(19, width, 2).mT],
            "expanded": [
                torch.randn(width).expand(19, width),
                torch.randn(19, 1, width).expand(-1, 3, -1),
            ],
        }[how]
        features = [torch.randn(19, width), *others]
        for feature in features:
            feature.requires_grad_()
        plain = [
            part.detach().contiguous().requires_grad_()
            for f in features
            for part in f.reshape(19, f.shape[1:].numel() // width, width).unbind(1)
        ]
        output, expected = interaction(*features), interaction(*plain)
        assert torch.equal(output, expected)
        grad = torch.randn_like(output)
        grads, right = gradients(output, features, grad), gradients(expected, plain, grad)
        assert [g.shape for g in grads] == [f.shape for f in features]
        parts = [g.reshape(19, g.shape[1:].numel() // width, width) for g in grads]
        assert torch.equal(torch.cat(parts, 1), torch.stack(right, 1))

    def test_memory_that_is_not_aligned(self) -> None:
        """Distances between features need not be multiples of an element's size."""
        plain = inputs(9, 4, 20)
        memory = torch.zeros(9 * 60 * 4 + 1, dtype=torch.uint8)
        apart = torch.frombuffer(memory.numpy(), dtype=torch.float32, offset=1).view(9, 60)
        assert apart.data_ptr() % 4 == 1
        apart.copy_(torch.cat(plain[1:], 1).detach())
        features = [plain[0], apart.requires_grad_()]
        output, expected = interaction(*features), interaction(*plain)
        assert torch.equal(output, expected)
        grad = torch.randn_like(output)
        (first, *others), right = (
            gradients(y, x, grad) for y, x in ((output, features), (expected, plain))
        )
        assert torch.equal(torch.cat([first, *others], 1), torch.cat(right, 1))

    def test_gradient_of_any_layout(self) -> None:
        features = inputs(9, 4, 20)
        output = interaction(*features)
        grad = torch.randn(output.shape[::-1]).t()
        ours = gradients(output, features, grad)
        expected = gradients(interaction(*features), features, grad.contiguous())
        assert all(map(torch.equal, ours, expected))

    def test_no_samples(self) -> None:
        features = inputs(0, 3, 16)
        output = interaction(*features)
        assert output.shape == (0, 19)
        assert [g.shape for g in gradients(output, features, output)] == 3 * [(0, 16)]

    def test_infinite_and_nan_features_stay_where_they_are(self) -> None:
        features = inputs(4, 6, 20)
        with torch.no_grad():
            features[2][1, 3], features[4][2, 0] = torch.inf, torch.nan
        output, expected = interaction(*features), by_torch(features)
        assert torch.equal(output.isnan(), expected.isnan())
        assert torch.equal(output.isinf(), expected.isinf())

    def test_only_the_inputs_that_need_it_get_a_gradient(self) -> None:
        features = inputs(4, 3, 20)
        features[1].requires_grad_(False)
        interaction(*features).sum().backward()
        assert [feature.grad is None for feature in features] == [False, True, False]

    def test_inputs_are_only_read(self) -> None:
        features = inputs(9, 5, 33)
        before = [feature.detach().clone() for feature in features]
        interaction(*features).sum().backward()
        assert all(map(torch.equal, features, before))


def test_the_same_bits_whatever_the_number_of_threads() -> None:
    features = inputs(1500, 27, 64)
    grad = torch.randn(1500, 64 + 27 * 13)

    def call() -> list[Tensor]:
        output = interaction(*features)
        return [output, *gradients(output, features, grad)]

    first, *others = at_each_thread_count(call)
    for other in others:
        assert all(map(torch.equal, first, other))


def test_a_sample_has_the_same_bits_in_any_batch() -> None:
    features = inputs(3000, 5, 20)
    alone = interaction(*(feature[1234:1235] for feature in features))
    assert torch.equal(interaction(*features)[1234:1235], alone)


class TestDtypes:
    def test_the_widest_of_several(self) -> None:
        features = inputs(5, 3, 20)
        mixed = [features[0].bfloat16(), features[1], features[2].half()]
        output = interaction(*mixed)
        assert output.dtype == torch.float32
        assert torch.equal(output, interaction(*(feature.float() for feature in mixed)))

    def test_autocast(self) -> None:
        features = inputs(5, 3, 20)
        with torch.autocast("cpu", torch.bfloat16):
            output = interaction(*features)
            wide = interaction(*(feature.double() for feature in features))
        assert output.dtype == torch.bfloat16
        assert wide.dtype == torch.float64
        assert torch.equal(output, interaction(*(feature.bfloat16() for feature in features)))
        grads = gradients(output, features, torch.ones_like(output))
        assert {grad.dtype for grad in grads} == {torch.float32}

    def test_meta_tensors(self) -> None:
        x = torch.empty(5, 20, device="meta")
        assert (interaction(x, x).shape, interaction(x, x).device.type) == ((5, 21), "meta")


class TestGradient:
    def test_gradcheck(self) -> None:
        """Second derivatives are checked too, which come from torch's operations."""
        features = [*inputs(3, 2, 5, torch.float64), torch.randn(3, 10, dtype=torch.float64)]
        features[-1].requires_grad_()
        assert torch.autograd.gradcheck(interaction, features)
        assert torch.autograd.gradgradcheck(interaction, features)


class TestTracing:
    @pytest.mark.parametrize(
        ("samples", "dtype"), [(0, torch.float32), *((12, dtype) for dtype in FLOATS)]
    )
    def test_opcheck(self, samples: int, dtype: torch.dtype) -> None:
        features = inputs(samples, 3, 20, dtype)
        torch.library.opcheck(OP, (features,))
        torch.library.opcheck(OP, ([feature.detach() for feature in features],))
        grad = torch.randn(samples, 23).to(dtype)
        torch.library.opcheck(
            torch.ops.fusedoptim.interaction_backward.default,
            (grad, [feature.detach() for feature in features]),
        )

    @needs_compiler
    @quiet_compiler
    @pytest.mark.parametrize(("dynamic", "backend"), [(False, "aot_eager"), (True, "inductor")])
    def test_compiled_equals_eager(self, dynamic: bool, backend: str) -> None:
        def function(dense: Tensor, sparse: Tensor) -> Tensor:
            return interaction(dense * 2, *sparse.split(20, 1), sparse)

        compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)
        for samples in (9, 11) if dynamic else (9,):
            features = [torch.randn(samples, 20), torch.randn(samples, 60)]
            for feature in features:
                feature.requires_grad_()
            ours, expected = compiled(*features), function(*features)
            assert torch.equal(ours, expected)
            grad = torch.randn_like(ours)
            for a, b in zip(gradients(ours, features, grad), gradients(expected, features, grad)):
                assert torch.equal(a, b)


class TestBadInput:
    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
    def test_dtype(self, dtype: torch.dtype) -> None:
        with pytest.raises(TypeError, match=f"features have dtype {dtype}, and kernels compute"):
            interaction(torch.ones(3, 4, dtype=dtype), torch.ones(3, 4, dtype=dtype))

    def test_no_features(self) -> None:
        with pytest.raises(TypeError, match="there are no features; pass tensors"):
            interaction()

    def test_a_list_of_features(self) -> None:
        x = torch.ones(3, 4)
        with pytest.raises(TypeError, match="interaction: feature 1 is of type list; pass a tens"):
            interaction(x, [x, x])  # type: ignore[arg-type]  # on purpose

    def test_arrays(self) -> None:
        """They have dtypes, too."""
        x = torch.ones(3, 4)
        for features in ([x.numpy()] * 2, [x.numpy(), x]):
            with pytest.raises(TypeError, match="interaction: feature 0 is of type ndarray; pass"):
                interaction(*features)

    @pytest.mark.parametrize("shape", [(4,), (2, 3, 4), (4, 0)])
    def test_first(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(
            ValueError, match=re.escape(f"feature 0 has shape {shape}; pass (B, d)")
        ):
            interaction(torch.ones(shape))

    @pytest.mark.parametrize("shape", [(3,), (4, 5), (3, 7), (3, 2, 4), (3, 5, 1), (3, 1, 5, 1)])
    def test_shape(self, shape: tuple[int, ...]) -> None:
        problem = f"feature 1 has shape {shape} and feature 0 (3, 5); pass (3, 5) for one feature"
        with pytest.raises(ValueError, match=re.escape(problem)):
            interaction(torch.ones(3, 5), torch.ones(shape))

    @pytest.mark.parametrize("place", [0, 1])
    def test_nested(self, place: int) -> None:
        """Torch refuses it, after a call of the same form too."""
        features = [torch.ones(2, 4), torch.ones(2, 4)]
        interaction(*features)
        features[place] = nested_tensor(torch.ones(4), torch.ones(4))
        with pytest.raises(NotImplementedError, match="NestedTensor"):
            interaction(*features)

    def test_device_and_dtype_of_the_operator(self) -> None:
        first = torch.ones(3, 5)
        with pytest.raises(ValueError, match="feature 1 is on meta; move it to cpu"):
            OP([first, first.to("meta")])
        with pytest.raises(TypeError, match=r"feature 1 has dtype torch.float64; convert it to"):
            OP([first, first.double()])
