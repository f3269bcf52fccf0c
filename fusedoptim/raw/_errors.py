"""What raw kernels raise besides Python's own errors."""

from __future__ import annotations

from typing import Any


class KernelCompileError(RuntimeError):
    """A kernel that a compiler or a driver refuses; ``log`` is all that it said."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log
        """The compiler's text; "" if it printed nothing."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.log)


class KernelCompileWarning(UserWarning):
    """What a compiler says of a kernel that it compiles all the same."""


class InvalidModuleError(ValueError):
    """Bytes that are no SPIR-V module with kernels, or one that this device cannot run."""
