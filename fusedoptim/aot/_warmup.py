"""Compilation by the driver ahead of the first step."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import NamedTuple

from fusedoptim.aot._bundle import Bundle, load
from fusedoptim.launch.devices import named_queue
from fusedoptim.launch.kernel import kernel_for
from fusedoptim.launch.modules import shipped


class Warmed(NamedTuple):
    """A kernel that the driver compiled."""

    name: str
    """Name of the kernel."""
    seconds: float
    """Time that it took."""


def warmup(
    bundle: Bundle | str | os.PathLike[str] | None = None, *, device: str | None = None
) -> list[Warmed]:
    """Make the driver compile kernels now rather than at their first launch in this process.

    The CPU driver's programs are cached on disk, so later processes find them compiled.

    Args:
        bundle: the bundle with the kernels; None for all kernels that this package ships, for
            optimizers and operators, in all dtypes that the device has.
        device: the device to compile for. None is "cpu", or the device for which the
            :class:`Bundle` was loaded; "xpu" is torch's current stream.

    Returns:
        the time of each kernel in the order of compilation. It is nearly zero for a kernel that was
        compiled already, by this process or with another kernel of its module.

    Raises:
        BundleError: the file is not a bundle, is damaged, or has another ABI.
        OSError: the file cannot be read; if there is none, FileNotFoundError.
        ValueError: ``device`` was given with a :class:`Bundle`, which has its own.
        fusedoptim.raw.KernelCompileError: the driver refuses a kernel of the bundle.
        fusedoptim.allocator.DeviceNotFoundError: there is no such device.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from fusedoptim import aot
        >>> source = Path(tempfile.mkdtemp()) / "twice.cl"
        >>> code = "kernel void twice(global float *x) { x[get_global_id(0)] *= 2; }"
        >>> _ = source.write_text(code)
        >>> _ = aot.build([source], source.with_suffix(".fob"))
        >>> for name, seconds in aot.warmup(source.with_suffix(".fob")):
        ...     print(f"{name} {1e3 * seconds:.0f} ms")
        twice ... ms
    """
    if bundle is None:
        return _warm_shipped(device or "cpu")
    if not isinstance(bundle, Bundle):
        bundle = load(bundle, device=device or "cpu")
    elif device is not None:
        raise ValueError(
            f"device={device!r}: the bundle was loaded for a device; use "
            f"load(path, device={device!r})"
        )
    for kernel in bundle.values():
        named_queue(kernel.device)  # starts the driver, which is not part of a kernel's time
    return [_timed(name, kernel.compile) for name, kernel in bundle.items()]


def _warm_shipped(device: str) -> list[Warmed]:
    queue = named_queue(device)
    has_float64 = queue.sycl_device.has_aspect_fp64
    return [
        _timed(f"{kernel}_{variant}", functools.partial(kernel_for, queue, kernel, variant))
        for kernel, variant in shipped()
        if variant != "f64" or has_float64  # without it, such a step raises
    ]


def _timed(name: str, compile_it: Callable[[], object]) -> Warmed:
    began = time.perf_counter()
    compile_it()
    return Warmed(name, time.perf_counter() - began)
