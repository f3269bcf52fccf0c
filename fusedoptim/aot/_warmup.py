"""The driver's compilation, ahead of the first step."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
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
    """Have the driver compile kernels now, in this process, rather than in the first step.

    What the CPU driver makes of them is kept on the disk: later processes, too, have it compiled
    then.

    Args:
        bundle: whose kernels; None for those of the optimizers of this package, in all dtypes that
            the device has.
        device: where; "cpu" for None, or, of a :class:`Bundle`, the one that it was loaded for;
            "xpu" is torch's current stream.

    Returns:
        the time of each kernel, in the order in which they were compiled: next to nothing for one
        that the process had compiled before, or of which a sibling was compiled.

    Raises:
        BundleError: the file is no bundle, is damaged, or is of another ABI.
        OSError: the file cannot be read; of no file: FileNotFoundError.
        ValueError: ``device`` was given with a :class:`Bundle`, which has its own.
        fusedoptim.raw.KernelCompileError: the driver refuses a kernel of the bundle.
        fusedoptim.allocator.DeviceNotFoundError: there is no such device.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from fusedoptim import aot
        >>> folder = Path(tempfile.mkdtemp())
        >>> code = "kernel void twice(global float *x) { x[get_global_id(0)] *= 2; }"
        >>> _ = (folder / "twice.cl").write_text(code)
        >>> _ = aot.build([folder / "twice.cl"], folder / "mine.fob")
        >>> for name, seconds in aot.warmup(folder / "mine.fob"):
        ...     print(f"{name} {1e3 * seconds:.0f} ms")
        twice ... ms
    """
    if bundle is None:
        return list(_shipped(device or "cpu"))
    if not isinstance(bundle, Bundle):
        bundle = load(bundle, device=device or "cpu")
    elif device is not None:
        raise ValueError(
            f"device={device!r}: the bundle was loaded for a device; load(path, device={device!r})"
        )
    return list(_of(bundle))


def _of(bundle: Bundle) -> Iterator[Warmed]:
    for name, kernel in bundle.items():
        named_queue(kernel.device)  # the driver starts, which is no kernel's time
        began = time.perf_counter()
        kernel.compile()
        yield Warmed(name, time.perf_counter() - began)


def _shipped(device: str) -> Iterator[Warmed]:
    chosen = named_queue(device)
    has_float64 = chosen.sycl_device.has_aspect_fp64
    for kernel, variant in shipped():
        if variant == "f64" and not has_float64:
            continue  # such a step raises on this device
        began = time.perf_counter()
        kernel_for(chosen, kernel, variant)
        yield Warmed(f"{kernel}_{variant}", time.perf_counter() - began)
