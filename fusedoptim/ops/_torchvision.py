"""Makes torchvision's operators run on our kernels, until that is undone.

torchvision's functions and models call operators by name, so the kernels of these operators are
replaced, only on the CPU. torchvision's own objects stay unchanged, and models need no change.
"""

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from fusedoptim.ops._nms import nms
from fusedoptim.ops._roi_align import roi_align
from fusedoptim.ops._roi_align_backward import roi_align_backward

__all__ = ["Replacement", "replace_torchvision"]

_NAMESPACE = "torchvision"


class Replacement:
    """What :func:`replace_torchvision` has replaced; a context manager that restores it at its end.

    Made by :func:`replace_torchvision`. Contexts may be nested, and run in several threads: the
    last one that ends restores, unless a call without a context has replaced the kernels too. What
    was restored cannot be entered again, and raises RuntimeError.

    Example:
        >>> import fusedoptim
        >>> with fusedoptim.ops.replace_torchvision():  # doctest: +SKIP
        ...     outputs = detector(images)
    """

    def __init__(self, library: Any) -> None:
        self._library: Any = library
        self._calls = 0
        """Calls that have returned this, without those that a context has begun with."""
        self._contexts = 0
        """Contexts that have begun and not ended."""

    @property
    def is_active(self) -> bool:
        """Whether torchvision's operators run on our kernels because of this call."""
        return self._library is not None

    def restore(self) -> None:
        """Make torchvision's operators use its own kernels again, whoever else replaced them.

        A second call does nothing.
        """
        with _lock:
            self._restore()

    def _restore(self) -> None:
        global _current
        if self._library is not None:
            self._library = _current = None  # a library lasts as long as it is referred to

    def __enter__(self) -> Replacement:
        with _lock:
            if not self.is_active:
                raise RuntimeError(
                    "replace_torchvision: this Replacement was restored, so torchvision's kernels "
                    "would run in the context; call replace_torchvision() again"
                )
            self._calls = max(self._calls - 1, 0)
            self._contexts += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with _lock:
            self._contexts -= 1
            if not (self._calls or self._contexts):
                self._restore()


_lock = threading.Lock()
_current: Replacement | None = None


def replace_torchvision() -> Replacement:
    """Make torchvision's roi_align and nms run on our kernels on the CPU, in the whole process.

    All callers of ``torchvision.ops.roi_align``, ``nms``, ``batched_nms`` and
    ``MultiScaleRoIAlign`` get our kernels, and so do all of torchvision's detection models. Our
    kernels accept bfloat16 maps too. On other devices, and for quantized tensors, torchvision's own
    kernels stay.

    Returns:
        a ``Replacement``; call its ``restore()``, or use it as a context manager. While one is
        active, further calls return the same, which stays active until the last context ends.

    Raises:
        ImportError: torchvision cannot be imported.

    Example:
        >>> import fusedoptim
        >>> replaced = fusedoptim.ops.replace_torchvision()  # doctest: +SKIP
        >>> replaced.restore()  # doctest: +SKIP

    Semantics: those of the operators :func:`roi_align` and :func:`nms`.
    """
    global _current
    try:
        importlib.import_module(_NAMESPACE)
    except (ImportError, RuntimeError) as error:  # the latter where its operators do not load
        raise ImportError(
            f"torchvision cannot be imported ({error}); install the build for your torch: pip "
            "install torchvision, for a torch for CPUs from the index that torch itself came from"
        ) from error
    with _lock:
        if _current is None:
            _current = Replacement(_registered())
        _current._calls += 1
        return _current


def _registered() -> Any:
    library: Any = torch.library.Library(_NAMESPACE, "IMPL")  # type: ignore[no-untyped-call]  # untyped in torch
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        for name, function, key in _KERNELS:
            library.impl(name, function, key)
    return library


def _roi_align(
    input: Tensor,  # noqa: A002 (torchvision's name)
    rois: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    size = pooled_height, pooled_width
    return roi_align(input, rois, size, spatial_scale, sampling_ratio, aligned)


def _roi_align_backward(
    grad: Tensor,
    rois: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    batch_size: int,
    channels: int,
    height: int,
    width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    numbers = spatial_scale, pooled_height, pooled_width, sampling_ratio, aligned
    shape = [batch_size, channels, height, width]
    result: Tensor = roi_align_backward(grad, rois, *numbers, shape, False)
    return result


_KERNELS: tuple[tuple[str, Callable[..., Any], str], ...] = (
    ("roi_align", _roi_align, "CPU"),
    # With our own gradient, which has the layout of the maps.
    ("roi_align", _roi_align, "AutogradCPU"),
    ("_roi_align_backward", _roi_align_backward, "CPU"),
    ("nms", nms, "CPU"),
)
