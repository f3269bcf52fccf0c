"""A kernel's arguments: checked against its signature, and packed for C functions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fusedoptim._torch_private import tracing_state
from fusedoptim.launch.arguments import LOCAL, Frame, Packing
from fusedoptim.raw._errors import class_of
from fusedoptim.raw._pointers import Uses, alignment, pointer
from fusedoptim.raw._recent import Recent
from fusedoptim.raw._scalars import scalar
from fusedoptim.raw._seen import check_seen
from fusedoptim.raw._spirv import Parameter

_BYTE_TYPE = 1  # of the elements of a work-group's memory
_MOST_BYTES = 1 << 63


class LocalMemory:
    """Memory that the work items of a group share, for a ``local`` pointer of a kernel.

    Args:
        nbytes: the bytes that each group has; their initial values are undefined.

    Raises:
        TypeError: ``nbytes`` is not an integer.
        ValueError: it is not positive.

    Example:
        >>> LocalMemory(16 * 4)
        LocalMemory(64)
    """

    __slots__ = ("nbytes",)

    def __init__(self, nbytes: int) -> None:
        try:
            nbytes = operator.index(nbytes)
        except TypeError:
            raise TypeError(f"nbytes={nbytes!r} is not an integer") from None
        if nbytes <= 0:
            raise ValueError(f"nbytes={nbytes} is not positive")
        self.nbytes = nbytes
        """Bytes for each group."""

    def __repr__(self) -> str:
        return f"LocalMemory({self.nbytes})"


class _Known(NamedTuple):
    """The facts about the pointers of an earlier call, all of them tensors."""

    uses: Uses
    needs_no_grad: bool
    """Whether a tensor that requires grad may be written."""


_ADDRESS = torch.Tensor.data_ptr
REFUSALS = (TypeError, ValueError, OverflowError, RuntimeError, BufferError)


class Signature:
    """A kernel's parameters, which checks and packs the arguments of a call."""

    def __init__(self, kernel: str, parameters: Sequence[Parameter]) -> None:
        self._kernel = kernel
        self.parameters = tuple(parameters)
        self.count = len(self.parameters)
        self._pointers: list[tuple[int, Any]] = []  # index, and what takes it
        self.values: list[tuple[int, Any]] = []
        """Index of each argument that is passed by value, and the function that converts it."""
        formats: list[str | None] = []
        local = []
        for i, parameter in enumerate(self.parameters):
            if parameter.kind in ("pointer", "opaque"):
                accept = pointer(parameter, i) if parameter.kind == "pointer" else _refuse
                self._pointers.append((i, accept))
                formats.append(None)
                continue
            is_local = parameter.kind == "local"
            code, convert = (f"{LOCAL.size}s", _local) if is_local else scalar(parameter)
            if is_local:
                local.append(i)
            self.values.append((i, convert))
            formats.append(code)
        self.packing = Packing(formats, local)
        self._pointed = _getter(self.packing.pointers)
        self._aligned = [alignment(self.parameters[i]) for i, _ in self._pointers]
        self._has_vectors = max(self._aligned, default=1) > 1
        self.needs_local_memory = bool(local)
        """Whether an argument is memory of the work-group."""
        self._recent: Recent[_Known] = Recent()
        self.frames: list[Frame] = []
        """The frames not in use; a list's pop and append are atomic."""

    def bind(self, arguments: Any) -> tuple[Frame, Uses]:
        """The packed arguments of a call; return the frame to :attr:`frames` afterwards.

        Raises:
            TypeError: there are too many or too few, or one is of a wrong type.
            ValueError: one is a wrong value.
            OverflowError: a number does not fit.
            RuntimeError: a tensor is on a wrong device, or requires grad.
        """
        if type(arguments) is not tuple and type(arguments) is not list:
            raise TypeError(
                f"{self._kernel}: args is {class_of(arguments)}; pass a tuple, as in "
                "kernel(1024, 16, (x, y))"
            )
        if len(arguments) != self.count:
            raise TypeError(self._wrong_count(len(arguments)))
        pointed = self._pointed(arguments)
        uses, addresses = self._remembered(pointed) or self._checked(pointed)
        try:
            values = [convert(arguments[i]) for i, convert in self.values]
        except REFUSALS:
            raise self._refused_value(arguments) from None
        try:
            frame = self.frames.pop()
        except IndexError:
            frame = self.packing.new_frame()
        table = frame.table
        for i, address in zip(self.packing.pointers, addresses):
            table[i] = address
        self.packing.pack_into(frame.buffer, 0, *table, *values)
        return frame, uses

    def _remembered(self, pointed: Sequence[Any]) -> tuple[Uses, list[int]] | None:
        """The memory that the pointers use and their addresses, if such tensors were checked."""
        known = self._recent.find(pointed)
        if known is None or (known.needs_no_grad and torch.is_grad_enabled()):
            return None
        addresses = list(map(_ADDRESS, pointed))
        if 0 in addresses:  # freed memory
            return None
        if self._has_vectors and any(map(operator.mod, addresses, self._aligned)):
            return None
        return known.uses, addresses

    def _checked(self, pointed: Sequence[Any]) -> tuple[Uses, list[int]]:
        """The memory that the pointers use, and their addresses."""
        if tracing_state() is not None:  # which makes every call come here
            check_seen(self._kernel, pointed)
        uses = Uses()
        addresses = []
        for value, (i, accept) in zip(pointed, self._pointers):
            try:
                addresses.append(accept(value, uses))
            except REFUSALS as error:
                raise self._refusal(error, i) from None
        if 0 not in addresses:  # as of an empty tensor
            self._recent.remember(pointed, lambda: self._known(pointed, uses))
        return uses, addresses

    def _known(self, pointed: Sequence[torch.Tensor], uses: Uses) -> _Known:
        """The facts to remember about these arguments."""
        written = [t for t, (i, _) in zip(pointed, self._pointers) if i in uses.written]
        return _Known(uses, any(tensor.requires_grad for tensor in written))

    def _refused_value(self, arguments: Sequence[Any]) -> Exception:
        """The error of the first value that is refused."""
        for i, convert in self.values:
            try:
                convert(arguments[i])
            except REFUSALS as error:
                return self._refusal(error, i)
        raise AssertionError("a value was refused once and accepted the second time")

    def _refusal(self, error: Exception, i: int) -> Exception:
        """The error of one argument, with its place, name and type."""
        return type(error)(f"{self.what(i)}: {error}")

    def what(self, i: int) -> str:
        """A name for one argument, for errors."""
        return f"{self._kernel}: argument {i}, {str(self.parameters[i])!r}"

    def _wrong_count(self, count: int) -> str:
        listed = ", ".join(map(str, self.parameters)) or "none"
        return f"{self._kernel} takes {self.count} arguments ({listed}), and {count} were given"


def _getter(indices: tuple[int, ...]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Selects the arguments at these positions."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda arguments: [arguments[i] for i in indices]


def _local(value: Any) -> bytes:
    if not isinstance(value, LocalMemory):
        raise TypeError(
            f"{class_of(value)}, where memory of the work-group is expected; "
            "pass LocalMemory(nbytes)"
        )
    if value.nbytes >= _MOST_BYTES:
        raise ValueError(f"{value!r} is more than any device has")
    return LOCAL.pack(1, _BYTE_TYPE, value.nbytes, 1, 1)


def _refuse(value: Any, uses: Uses) -> int:
    raise TypeError("images, samplers and pipes cannot be passed; use a pointer")
