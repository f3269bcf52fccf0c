"""torchvision for tests, imported even where its compiled operators do not load.

The wheel of PyPI is built for CUDA, whose libraries a torch for CPUs lacks. Then its operators'
schemas are defined here, so that ``replace_torchvision`` has operators to register our kernels for.
transformers cannot be imported if such a wheel is on the path, so the wheel is in a folder that is
not.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.references.nms import nms
from tests.references.roi_align import roi_align

_FOLDER = Path(sys.prefix, "apart")  # made by `make .venv/installed`
_BOXES = "float spatial_scale, SymInt pooled_height, SymInt pooled_width"
_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align": f"(Tensor input, Tensor rois, {_BOXES}, int sampling_ratio, bool aligned) "
    "-> Tensor",
    "_roi_align_backward": f"(Tensor grad, Tensor rois, {_BOXES}, SymInt batch_size, "
    "SymInt channels, SymInt height, SymInt width, int sampling_ratio, bool aligned) -> Tensor",
}


@contextlib.contextmanager
def loaded() -> Iterator[Any]:
    """Import torchvision, and remove it again afterwards."""
    sys.path.append(str(_FOLDER))
    try:
        yield _load()
    finally:
        sys.path.remove(str(_FOLDER))
        _forget()


@contextlib.contextmanager
def computed_by_references() -> Iterator[None]:
    """Compute with tests/references/ where torchvision's compiled operators do not load."""
    if torch.ops.torchvision.nms.default.has_kernel_for_dispatch_key(torch._C.DispatchKey.CPU):
        yield
        return
    library: Any = torch.library.Library("torchvision", "IMPL")
    library.impl("nms", _nms, "CompositeImplicitAutograd")
    library.impl("roi_align", _roi_align, "CompositeImplicitAutograd")
    try:
        yield
    finally:
        library._destroy()


def _nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    return torch.tensor(nms(boxes, scores, Fraction(iou_threshold)), dtype=torch.int64)


def _roi_align(
    maps: Tensor, rois: Tensor, scale: float, height: int, width: int, *how: Any
) -> Tensor:
    if not len(rois):
        return maps.new_zeros(0, maps.shape[1], height, width)
    return roi_align(maps, rois, (height, width), scale, *how)


def _load() -> Any:
    try:
        import torchvision
    except RuntimeError:
        _forget()
        return _without_operators()
    return torchvision


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]


def _without_operators() -> Any:
    for name, schema in _SCHEMAS.items():
        torch.library.define(f"torchvision::{name}", schema)
    return _import_despite_others()


def _import_despite_others() -> Any:
    """Import torchvision without its fake implementations of operators that are not defined."""
    register_fake = torch.library.register_fake

    def register(name: str, *args: Any, **kwargs: Any) -> Any:
        is_known = name.removeprefix("torchvision::") in _SCHEMAS
        return register_fake(name, *args, **kwargs) if is_known else lambda function: function

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.library, "register_fake", register)
        import torchvision
    for name in ("torchvision.extension", "torchvision.ops.roi_align"):
        vars(sys.modules[name])["_has_ops"] = lambda: True
    return torchvision
