"""The errors and warnings of raw kernels, and words for them."""

from __future__ import annotations

from typing import Any


def class_of(value: Any) -> str:
    """The name of a value's class for an error, with its article: "an int"."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


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
