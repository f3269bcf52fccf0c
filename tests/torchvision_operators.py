"""torchvision for tests: imported also where its compiled operators do not load.

The wheel of PyPI is built for CUDA, whose libraries a torch for CPUs lacks. Then its operators'
schemas are defined here, so that ``replace_torchvision`` has something to put our kernels under. Nor
can transformers be imported beside such a wheel, so it is none of the dev extra's packages: these
tests run where it is on the path.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import torch

_BOXES = "float spatial_scale, SymInt pooled_height, SymInt pooled_width"
_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align": f"(Tensor input, Tensor rois, {_BOXES}, int sampling_ratio, bool aligned) "
    "-> Tensor",
    "_roi_align_backward": f"(Tensor grad, Tensor rois, {_BOXES}, SymInt batch_size, "
    "SymInt channels, SymInt height, SymInt width, int sampling_ratio, bool aligned) -> Tensor",
}


@functools.cache
def load() -> Any:
    """The module torchvision; a test that calls this is skipped where it is not installed."""
    try:
        import torchvision
    except ModuleNotFoundError:
        pytest.skip("needs torchvision")
    except RuntimeError:
        return _without_operators()
    return torchvision


def _without_operators() -> Any:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    for name, schema in _SCHEMAS.items():
        torch.library.define(f"torchvision::{name}", schema)
    return _import_despite_others()


def _import_despite_others() -> Any:
    """Import it; fake implementations of operators that nobody has defined are left out."""
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
