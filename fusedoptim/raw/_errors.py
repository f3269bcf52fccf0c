"""The errors and warnings of raw kernels."""

from __future__ import annotations

from typing import Any


class KernelCompileError(RuntimeError):
    """A compiler or a driver refuses a kernel; ``log`` is its output."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log
        """The compiler's text; "" if it printed nothing."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.log)


class KernelCompileWarning(UserWarning):
    """A compiler's warning about a kernel that it compiles."""


class InvalidModuleError(ValueError):
    """Bytes that are not a SPIR-V module with kernels, or a module that the device cannot run."""
