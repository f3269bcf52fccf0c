"""Finds and loads the SYCL runtime and the CPU driver that pip installed.

The CPU driver's registration file holds a path of its build machine, so the OpenCL loader must be
told where the driver is. The wheels of dpctl 0.17, dpnp 0.15 and numba-dpex 0.23 look for their
libraries in folders of their build machine, so these must be loaded before Python imports the
wheels. See docs/design/finding-the-driver.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

from allocator.runtime.isa import DRIVER_VARIABLE, driver_target
from allocator.runtime.maps import loaded_files
from allocator.runtime.signals import signal_handlers_kept

# (distribution, library), in order of their dependencies.
_INTEL_LIBRARIES = [
    ("intel-cmplr-lib-rt", "libintlc.so.5"),
    ("intel-cmplr-lib-rt", "libirng.so"),
    ("intel-cmplr-lib-rt", "libimf.so"),
    ("intel-cmplr-lib-rt", "libsvml.so"),
]
_SYCL_LIBRARIES = [
    *_INTEL_LIBRARIES,
    ("intel-opencl-rt", "libOpenCL.so.1"),
    ("tbb", "libtbb.so.12"),
    ("tbb", "libtbbmalloc.so.2"),
    ("intel-cmplr-lib-ur", "libur_loader.so.0"),
    ("intel-sycl-rt", "libsycl.so.7"),
]
_MKL_LIBRARIES = [
    ("mkl", "libmkl_core.so.2"),
    ("mkl", "libmkl_tbb_thread.so.2"),
    ("mkl", "libmkl_intel_ilp64.so.2"),
    ("onemkl-sycl-blas", "libmkl_sycl_blas.so.4"),
    ("onemkl-sycl-lapack", "libmkl_sycl_lapack.so.4"),
    ("onemkl-sycl-dft", "libmkl_sycl_dft.so.4"),
    ("onemkl-sycl-vm", "libmkl_sycl_vm.so.4"),
    ("onemkl-sycl-rng", "libmkl_sycl_rng.so.4"),
    ("onemkl-sycl-stats", "libmkl_sycl_stats.so.4"),
]

_lock = threading.RLock()


def _installed_file(distribution: str, name: str) -> Path | None:
    """The path of a file that pip installed with a distribution, or None."""
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name == name:
            path = Path(os.path.normpath(file.locate()))
            return path if path.exists() else None
    return None


def _preload(libraries: Iterable[tuple[str, str]]) -> None:
    """Load libraries with their symbols visible to those loaded later."""
    # ctypes.CDLL resolves every symbol at once (RTLD_NOW) and fails for the MKL libraries, which
    # need each other's symbols; dlopen with RTLD_LAZY does not.
    libc = ctypes.CDLL(None)
    libc.dlopen.argtypes = [ctypes.c_char_p, ctypes.c_int]
    libc.dlopen.restype = ctypes.c_void_p
    for distribution, name in libraries:
        path = _installed_file(distribution, name)
        if path is not None:
            libc.dlopen(os.fsencode(path), os.RTLD_LAZY | os.RTLD_GLOBAL)


def cpu_driver() -> Path | None:
    """The path of Intel's CPU driver, or None if pip did not install it."""
    return _installed_file("intel-opencl-rt", "libintelocl.so")


def cpu_driver_is_loaded() -> bool:
    """Whether this process has loaded Intel's CPU driver."""
    return any(os.path.basename(path).startswith("libintelocl.so") for path in loaded_files())


def _misjudges_processors() -> bool:
    """Whether the CPU driver is of a release that does not recognize newer processors.

    Release 2024.2 calls a Zen 5 an "unknown host CPU" and, unless it is told the instruction set,
    compiles wrong code for it, for example for exp.
    """
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        release = importlib.metadata.version("intel-opencl-rt")
        return release < "2025" and DRIVER_VARIABLE not in os.environ
    return False


def _check_working_directory() -> None:
    """Raise if the loader of drivers would fail for want of a working directory.

    It would find no device, and the process would never exit: its exit handler waits forever.
    """
    try:
        os.getcwd()
    except FileNotFoundError as error:
        if not cpu_driver_is_loaded():
            raise RuntimeError(
                "the process's working directory was deleted, and the SYCL runtime cannot start "
                "there; call os.chdir() with a folder that exists"
            ) from error


@contextlib.contextmanager
def cpu_driver_registered() -> Iterator[None]:
    """Tell the OpenCL loader where the CPU driver is, and the driver its instruction set.

    The loader adds ``OCL_ICD_FILENAMES`` to the drivers that the system registers, so GPUs stay
    visible. The loader and the driver read their variables once, when the first device and the
    first context are made. A value that the user set is kept. The variables are restored
    afterwards, as a child process may run another environment with another driver. The signal
    handlers are restored too.

    Raises:
        ValueError: this machine does not support the level of FUSEDOPTIM_ISA.
        RuntimeError: the process's working directory was deleted.
    """
    _check_working_directory()
    driver = cpu_driver()
    variables = {
        "OCL_ICD_FILENAMES": None if driver is None else str(driver),
        DRIVER_VARIABLE: driver_target(choose=_misjudges_processors()),
    }
    ours = {name: value for name, value in variables.items() if value and name not in os.environ}
    os.environ.update(ours)
    try:
        with signal_handlers_kept():
            yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def load_dpctl() -> ModuleType:
    """Import dpctl with the SYCL runtime and the CPU driver that pip installed.

    Returns:
        the module ``dpctl``.

    Raises:
        ImportError: dpctl or the SYCL runtime is not installed.

    Example:
        >>> load_dpctl().__name__
        'dpctl'
    """
    with _lock:
        try:
            dpctl = importlib.import_module("dpctl")
        except ModuleNotFoundError as error:
            raise ImportError("dpctl is not installed: pip install dpctl") from error
        except ImportError:
            _preload(_SYCL_LIBRARIES)
            dpctl = importlib.import_module("dpctl")
        for name in ("program", "memory"):  # an interrupted import leaves these unset
            setattr(dpctl, name, importlib.import_module(f"dpctl.{name}"))
        return dpctl


def load_opencl_compiler() -> ctypes.CDLL:
    """Load the OpenCL C compiler that comes with the CPU driver.

    Returns:
        the library ``opencl-clang``, whose only function is ``Compile``.

    Raises:
        ImportError: pip did not install the CPU driver.

    Example:
        >>> load_opencl_compiler().Compile.__name__
        'Compile'
    """
    with _lock:
        path = _installed_file("intel-opencl-rt", "libcommon_clang.so")
        if path is None:
            raise ImportError(
                "the OpenCL C compiler, a part of the CPU driver, is not installed: "
                "pip install intel-opencl-rt"
            )
        # The compiler of 2024 looks for these in folders of its build machine.
        _preload([*_INTEL_LIBRARIES, ("intel-cmplr-lib-rt", "libonnxruntime.1.12.22.721.so")])
        return ctypes.CDLL(str(path))


def load_compiler() -> ModuleType:
    """Import numba-dpex, the kernel compiler of the ``[jit]`` extra.

    Returns:
        the module ``numba_dpex``.

    Raises:
        ImportError: the extra is not installed.

    Example:
        >>> try:
        ...     compiler = load_compiler()
        ... except ImportError:  # in the base environment
        ...     compiler = None
    """
    with _lock:
        load_dpctl()
        _preload(_MKL_LIBRARIES)
        try:
            with cpu_driver_registered():  # numba-dpex looks for devices at import
                return importlib.import_module("numba_dpex")
        except ModuleNotFoundError as error:
            raise ImportError(
                "numba-dpex is not installed: pip install '.[jit]' in a clone of fusedoptim, "
                "into an environment of its own with CPython 3.10 or 3.11"
            ) from error
