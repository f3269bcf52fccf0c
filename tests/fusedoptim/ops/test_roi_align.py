"""The operator roi_align: values, gradients, layouts, threads, tracing, errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedoptim.ops import roi_align
from tests import tolerances
from tests.compiling import needs_compiler, quiet_compiler
from tests.optimizer_cases import FLOATS
from tests.references import roi_align as reference
from tests.running import at_each_thread_count

SCALE, BINS = 0.25, (4, 2)  # powers of two, so that positions are exact
HEIGHT, WIDTH = 20, 23
CASES = [
    *(
        (layout, count, channels)
        for layout, count in (("contiguous", 1), ("contiguous", 20), ("channels_last", 20))
        for channels in (1, 15, 16, 17, 64, 150)
    ),
    ("channels_last", 1, 17),
    ("transposed", 1, 17),
    ("transposed", 20, 17),
]
"""The layout of the maps, the number of boxes, and the number of channels.

Few boxes and many use different kernels, unless the maps are channels_last. Transposed maps are
copied to the layout of the kernel.
"""
OP = torch.ops.fusedoptim.roi_align.default


def new_boxes(count: int, maps: int, least: float = -12.0, most: float = 100.0) -> Tensor:
    """Boxes whose corners are multiples of 1/2, some of which reach out of the maps."""
    corners = (torch.rand(count, 2, 2) * (most - least) * 2).round() / 2 + least
    corners = corners.sort(1)[0].flatten(1)
    return torch.cat([torch.randint(maps, (count, 1)), corners], 1)


def laid_out(maps: Tensor, layout: str) -> Tensor:
    if layout == "channels_last":
        return maps.to(memory_format=torch.channels_last)
    return maps.mT.contiguous().mT if layout == "transposed" else maps


def expected_of(maps: Tensor, rois: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """The reference's result in float64, and its result for the magnitudes."""
    arguments = rois.double(), *options
    return reference.roi_align(maps, *arguments), reference.roi_align(maps.abs(), *arguments)


class TestValues:
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize(("layout", "count", "channels"), CASES)
    def test_forward_and_backward(
        self, layout: str, count: int, channels: int, dtype: torch.dtype
    ) -> None:
        x = laid_out(torch.randn(2, channels, HEIGHT, WIDTH).to(dtype), layout).requires_grad_()
        rois = new_boxes(count, 2).to(dtype)
        options = BINS, SCALE, 2, bool(count % 2)
        y = roi_align(x, rois, *options)
        grad = torch.randn_like(y)
        (of_x,) = torch.autograd.grad(y, x, grad)

        wide = x.detach().double().requires_grad_()
        expected, magnitudes = expected_of(wide, rois, *options)
        assert y.is_contiguous()
        assert y.dtype == dtype
        error = tolerances.roi_align_error(magnitudes, 16, dtype)
        assert bool(((y.double() - expected).abs() <= error).all())

        (of_wide,) = torch.autograd.grad(expected, wide, grad.double(), retain_graph=True)
        (sizes,) = torch.autograd.grad(expected, wide, grad.double().abs())
        error = tolerances.roi_align_error(sizes, 4 * count * math.prod(BINS), dtype)
        assert of_x.dtype == dtype
        is_last = layout == "channels_last"
        order = torch.channels_last if is_last else torch.contiguous_format
        assert of_x.is_contiguous(memory_format=order)
        assert bool(((of_x.double() - of_wide).abs() <= error).all())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("sampling_ratio", [-1, 0, 1, 3])
    @pytest.mark.parametrize("aligned", [False, True])
    @pytest.mark.parametrize("bins", [(1, 1), (7, 7), (3, 14)])
    def test_any_bins(
        self, bins: tuple[int, int], aligned: bool, sampling_ratio: int, dtype: torch.dtype
    ) -> None:
        x = torch.randn(3, 20, HEIGHT, WIDTH, dtype=dtype)
        rois = new_boxes(15, 3, 1.0, 18.0).to(dtype)
        options = bins, 1.0, sampling_ratio, aligned
        expected, _ = expected_of(x.double(), rois, *options)
        error = tolerances.roi_align_position_error(float(x.abs().max()), WIDTH, dtype)
        assert float((roi_align(x, rois, *options) - expected).abs().max()) <= error

    def test_list_of_boxes(self) -> None:
        x, rois = torch.randn(3, 5, HEIGHT, WIDTH), new_boxes(9, 3)
        rois = rois[rois[:, 0].sort(stable=True)[1]]
        lists = [rois[rois[:, 0] == k, 1:] for k in range(3)]
        for boxes in (lists, tuple(lists)):
            assert torch.equal(roi_align(x, boxes, 4, SCALE), roi_align(x, rois, (4, 4), SCALE))

    @pytest.mark.parametrize(("dtype", "maps"), [(torch.bfloat16, 259), (torch.float16, 2051)])
    @pytest.mark.parametrize("is_autocast", [False, True])
    def test_list_of_16_bit_boxes_for_many_maps(
        self, dtype: torch.dtype, maps: int, is_autocast: bool
    ) -> None:
        """More maps than the boxes' dtype has integers."""
        x = torch.arange(maps).remainder(7).to(dtype).view(maps, 1, 1, 1).expand(maps, 1, 2, 2)
        boxes = [torch.tensor([[0.0, 0, 1, 1]], dtype=dtype)] * maps
        with torch.autocast("cpu", dtype, enabled=is_autocast):
            assert torch.equal(roi_align(x, boxes, 1), x[:, :, :1, :1])

    def test_wider_boxes_of_16_bit_maps(self) -> None:
        x, rois = torch.randn(1, 17, HEIGHT, WIDTH).bfloat16(), new_boxes(9, 1) + 1 / 512
        rois[:, 0] = 0
        y = roi_align(x, rois, BINS, SCALE, 2)
        assert torch.equal(y, roi_align(x.float(), rois, BINS, SCALE, 2).bfloat16())

    def test_autocast(self) -> None:
        """The arithmetic is float32, and the result has the maps' dtype."""
        x, rois = torch.randn(1, 17, HEIGHT, WIDTH).bfloat16(), new_boxes(9, 1)
        with torch.autocast("cpu", torch.bfloat16):
            for boxes in (rois, rois.bfloat16()):
                expected = roi_align(x.float(), boxes.float(), BINS, SCALE, 2).bfloat16()
                assert torch.equal(roi_align(x, boxes, BINS, SCALE, 2), expected)

    def test_meta_tensors(self) -> None:
        x, boxes = torch.empty(1, 3, 8, 9, device="meta"), torch.empty(2, 4, device="meta")
        y = roi_align(x, [boxes], 5)
        assert (y.shape, y.device.type) == ((2, 3, 5, 5), "meta")

    @pytest.mark.parametrize("shape", [(0, 5), (3, 5)])
    def test_empty(self, shape: tuple[int, int]) -> None:
        x = torch.randn(2, 3, HEIGHT, WIDTH, requires_grad=True)
        rois = torch.zeros(shape)
        assert roi_align(x[:, :0], rois, 2).shape == (shape[0], 0, 2, 2)
        assert roi_align(x, rois, (2, 0)).shape == (shape[0], 3, 2, 0)
        y = roi_align(x, rois, 2)
        assert torch.equal(torch.autograd.grad(y.sum() * 0, x)[0], torch.zeros_like(x))
        assert roi_align(x[:0], rois[:0], 2).shape == (0, 3, 2, 2)

    def test_boxes_without_area(self) -> None:
        x = torch.randn(1, 3, HEIGHT, WIDTH)
        rois = torch.tensor([[0.0, 5, 5, 5, 5], [0.0, 9, 9, 3, 3]])
        assert bool(roi_align(x, rois, 2).ne(0).all())  # they count as one pixel
        assert bool(roi_align(x, rois, 2, aligned=True).eq(0).all())
        expected, _ = expected_of(x.double(), rois, (2, 2), 1.0, 2, True)
        error = tolerances.roi_align_position_error(float(x.abs().max()), WIDTH, x.dtype)
        torch.testing.assert_close(
            roi_align(x, rois, 2, 1.0, 2, True), expected.float(), rtol=0, atol=error
        )

    @pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
    def test_boxes_that_are_not_finite_have_no_samples(self, number: float) -> None:
        x = torch.randn(1, 3, HEIGHT, WIDTH)
        rois = torch.tensor([[0.0, 1, 1, 5, number]])
        assert bool(roi_align(x, rois, 2, aligned=True).eq(0).all())

    @pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
    def test_gradcheck(self, layout: str) -> None:
        x = laid_out(torch.randn(2, 2, 4, 5, dtype=torch.float64), layout).requires_grad_()
        rois = new_boxes(3, 2, -2.0, 6.0).double()
        assert torch.autograd.gradcheck(lambda x: roi_align(x, rois, 2), x)
        assert torch.autograd.gradgradcheck(lambda x: roi_align(x, rois, 2), x)


class TestBits:
    @pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
    def test_any_number_of_threads(self, layout: str) -> None:
        x = laid_out(torch.randn(2, 70, 40, 50), layout).requires_grad_()
        rois = new_boxes(300, 2, 0.0, 180.0)
        grad = torch.randn(300, 70, 7, 7)

        def both() -> list[Tensor]:
            y = roi_align(x, rois, 7, SCALE)
            return [y, *torch.autograd.grad(y, x, grad)]

        first, *others = at_each_thread_count(both)
        for other in others:
            assert all(map(torch.equal, first, other))


class TestTracing:
    @pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_opcheck(self, layout: str, dtype: torch.dtype) -> None:
        x = laid_out(torch.randn(2, 5, HEIGHT, WIDTH).to(dtype), layout)
        arguments = new_boxes(6, 2).to(dtype), SCALE, *BINS, 2, False
        for value in (x, x.clone().requires_grad_()):
            torch.library.opcheck(OP, (value, *arguments))

    @needs_compiler
    @quiet_compiler
    def test_compiled_equals_eager(self) -> None:
        def function(x: Tensor, boxes: list[Tensor]) -> Tensor:
            return roi_align(x, boxes, 7, SCALE, 2) * 2

        compiled = torch.compile(function, fullgraph=True)
        x = torch.randn(2, 20, HEIGHT, WIDTH, requires_grad=True)
        boxes = [new_boxes(4, 1)[:, 1:], new_boxes(2, 1)[:, 1:]]
        results = [call(x, boxes) for call in (compiled, function)]
        assert torch.equal(*results)
        assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in results))


class TestRefused:
    @pytest.mark.parametrize(
        ("change", "error", "match"),
        [
            ({"input": torch.zeros(1, 2, 4, 4).int()}, TypeError, "input has dtype torch.int32"),
            ({"boxes": torch.zeros(1, 5).double()}, TypeError, "boxes have dtype torch.float64"),
            ({"input": torch.zeros(2, 4, 4)}, ValueError, r"pass \(N, C, H, W\)"),
            ({"boxes": torch.zeros(1, 4)}, ValueError, r"pass \(K, 5\)"),
            ({"boxes": [torch.zeros(1, 5)]}, ValueError, r"boxes\[0\] has shape \(1, 5\)"),
            ({"boxes": []}, ValueError, "empty list"),
            (
                {"boxes": torch.tensor([[3.0, 0, 0, 1, 1]])},
                IndexError,
                r"boxes\[0\] names map 3, but",
            ),
            ({"boxes": torch.tensor([[-1.0, 0, 0, 1, 1]])}, IndexError, "names map -1"),
            ({"boxes": torch.tensor([[math.nan, 0, 0, 1, 1]])}, IndexError, "names map nan"),
            ({"boxes": torch.tensor([[0.0, 0, math.nan, 1, 1]])}, ValueError, "not finite"),
            ({"spatial_scale": math.inf}, ValueError, "spatial_scale=inf"),
            ({"output_size": -1}, ValueError, "sizes must not be negative"),
            ({"output_size": (1, 2, 3)}, ValueError, "pass one integer, or two"),
            (
                {"output_size": 2.5},
                TypeError,
                r"output_size=2\.5 is of type float; pass an integer",
            ),
            (
                {"sampling_ratio": 2.5},
                TypeError,
                r"sampling_ratio=2\.5 is of type float; pass an int",
            ),
            ({"spatial_scale": "1"}, TypeError, "spatial_scale='1' is of type str; pass a number"),
            (
                {"spatial_scale": torch.tensor(0.5, requires_grad=True)},
                TypeError,
                r"spatial_scale is a tensor that requires grad; pass spatial_scale\.item\(\)",
            ),
            ({"aligned": None}, TypeError, "aligned=None is of type NoneType; pass True or False"),
            ({"boxes": 5}, TypeError, r"boxes are of type int; pass a tensor of \(K, 5\), or one"),
            ({"boxes": iter(())}, ValueError, "boxes is an empty list"),
            ({"input": [[1.0]]}, TypeError, "input is of type list; pass a tensor"),
            ({"boxes": [[0.0, 0, 1, 1]]}, TypeError, r"boxes\[0\] is of type list; pass a tensor"),
            ({"input": torch.zeros(1, 2, 0, 4)}, ValueError, "0 x 4 pixels"),
            *(
                ({"sampling_ratio": n}, ValueError, f"sampling_ratio={n}, .* 1048576 .*; pass 2")
                for n in (2**20 + 1, 2**31 - 1, 2**31, 10**12)
            ),
            (
                {"boxes": torch.tensor([[0.0, 0, 0, 1, 4e9]]), "sampling_ratio": 0},
                ValueError,
                r"boxes\[0\] is \[0.0, 0.0, 1.0, 4000000000.0\], .* has 2000000000 samples",
            ),
        ],
    )
    def test_refused(self, change: dict[str, Any], error: type[Exception], match: str) -> None:
        arguments: dict[str, Any] = {
            "input": torch.zeros(1, 2, 4, 4),
            "boxes": torch.tensor([[0.0, 0, 0, 1, 1]]),
            "output_size": 2,
            "sampling_ratio": 2,
        }
        with pytest.raises(error, match=match):
            roi_align(**arguments | change)

    def test_too_many_samples_in_a_graph(self) -> None:
        x = torch.zeros(1, 2, 4, 4, device="meta")
        for call in (roi_align, torch.compile(roi_align, backend="eager", fullgraph=True)):
            with pytest.raises(Exception, match=r"sampling_ratio=1000000000000, .*; pass 2"):
                call(x, [torch.zeros(1, 4, device="meta")], 2, sampling_ratio=10**12)

    def test_most_samples(self) -> None:
        x, box = torch.arange(16.0).view(1, 1, 4, 4), torch.tensor([[0.0, 0, 0, 2, 2]])
        wide = torch.tensor([[0.0, 0, 0, 2**21, 2]])
        y = roi_align(x, box, 2, sampling_ratio=2**20)
        torch.testing.assert_close(y, roi_align(x, box, 2, sampling_ratio=2), rtol=1e-4, atol=0)
        assert roi_align(x, wide, 2).isfinite().all()
