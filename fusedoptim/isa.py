"""The instruction set for which the CPU driver compiles kernels.

Kernels are shipped as SPIR-V, which the CPU driver translates for the best instruction set of the
machine. The environment variable ``FUSEDOPTIM_ISA``, set before Python starts, caps it at one of
:data:`LEVELS`, to compare levels or to see on a new machine what an older one will do.

Optimizers give the same bits at every level: their kernels spell out each fused multiply-add, and
the driver may not fuse others, and Lamb's sums are taken for 16 lanes whatever the width of the
registers. Only ``max_grad_norm`` depends on more, as torch adds up the kernel's results.

The variable affects this package's kernels and the user's raw kernels. torch's operators have
``ATEN_CPU_CAPABILITY`` and oneDNN's have ``ONEDNN_MAX_CPU_ISA``; neither changes anything here.
"""

from __future__ import annotations

from fusedoptim.allocator import ISA_LEVELS, highest_isa, loaded_isa, queue

__all__ = ["LEVELS", "highest", "level"]

LEVELS = ISA_LEVELS
"""``"sse4.2"``, ``"avx"``, ``"avx2"``, ``"avx512"`` (Skylake's: F, CD, BW, DQ and VL) and
``"avx512_fp16"`` (Sapphire Rapids'); each contains the ones before it. Below ``"avx2"`` a
fused multiply-add is a function call, which makes steps many times slower (docs/isa.md)."""


def level() -> str:
    """The level for which kernels are compiled in this process; starts the driver if needed.

    Returns:
        one of ``LEVELS``, read from what the driver has loaded.

    Raises:
        ValueError: ``FUSEDOPTIM_ISA`` is not a level, is above the machine's, or contradicts
            ``CL_CONFIG_CPU_TARGET_ARCH``.
        RuntimeError: ``FUSEDOPTIM_ISA`` was set after the driver had started; or the machine's
            CPU driver is not Intel's, the only one known to show its level.
        fusedoptim.allocator.DeviceNotFoundError: there is no CPU driver.

    Example:
        >>> from fusedoptim import isa
        >>> isa.level() in isa.LEVELS
        True
    """
    device = queue("cpu").sycl_device
    loaded = loaded_isa()
    if loaded is None:
        raise RuntimeError(
            f"{device.name}'s driver {device.driver_version} ({device.vendor}) does not show its "
            "instruction set as Intel's CPU driver does; pip install intel-opencl-rt"
        )
    return loaded


def highest() -> str:
    """The highest level of this machine: what the processor has and the system lets programs use.

    Returns:
        one of ``LEVELS``.

    Raises:
        RuntimeError: the processor lacks even SSE4.2.

    Example:
        >>> from fusedoptim import isa
        >>> isa.LEVELS.index(isa.level()) <= isa.LEVELS.index(isa.highest())
        True
    """
    return highest_isa()
