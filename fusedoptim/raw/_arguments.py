"""A kernel's arguments, checked against its signature, as C functions take them."""

from __future__ import annotations

import ctypes
import itertools
import operator
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fusedoptim.launch.opencl import OpenCL, Owned, check
from fusedoptim.raw._dpctl import ANY_SIZE, BY_SIZE, LOCAL_MEMORY, POINTER, functions
from fusedoptim.raw._pointers import PLAIN, Uses, alignment, pointer
from fusedoptim.raw._scalars import scalar
from fusedoptim.raw._spirv import Parameter
from fusedoptim.step.unchanged import tensor_guards

_WORD = 8
_BYTE_TYPE = 1  # of the elements of memory of a work-group
_LOCAL = struct.Struct("<5Q")  # dimensions, type, and the size in each
_MOST_BYTES = 1 << 63


class LocalMemory:
    """Memory that the work items of a group share, for a ``local`` pointer of a kernel.

    Args:
        nbytes: that each group has; what is there at first is undefined.

    Raises:
        TypeError: ``nbytes`` is no integer.
        ValueError: it is not positive.

    Example:
        >>> LocalMemory(16 * 4)
        LocalMemory(64)
    """

    __slots__ = ("nbytes",)

    def __init__(self, nbytes: int) -> None:
        if not isinstance(nbytes, int):
            raise TypeError(f"nbytes={nbytes!r} is no integer")
        if nbytes <= 0:
            raise ValueError(f"nbytes={nbytes} is not positive")
        self.nbytes = nbytes
        """of each group."""

    def __repr__(self) -> str:
        return f"LocalMemory({self.nbytes})"


class Frame:
    """The memory that a launch's arguments lie in while it is submitted."""

    __slots__ = ("buffer", "given", "kernel", "table")

    def __init__(self, size: int, places: Sequence[int | None]) -> None:
        """Lay out a table of where each argument is, and the values that it leads to.

        Args:
            size: of both together.
            places: of each argument's value in the memory, None for a pointer.
        """
        self.buffer = ctypes.create_string_buffer(max(size, 1))
        base = ctypes.addressof(self.buffer)
        self.table = [0 if place is None else base + place for place in places]
        self.kernel: Owned | None = None
        """OpenCL's, which keeps the arguments that it is given."""
        self.given: bytes | None = None
        """the memory as it was when they were given."""


class _Known(NamedTuple):
    """The pointers' tensors of a call that were found good."""

    is_same: Callable[..., bool]
    """compares all that was checked of them, but for their addresses, with that of others."""
    uses: Uses
    needs_no_grad: bool
    """whether one that requires grad may be written."""


_MOST_KNOWN = 8
_PATIENCE = 32  # calls with new shapes, after which they are remembered one time in so many
_ADDRESS = torch.Tensor.data_ptr
_REFUSALS = (TypeError, ValueError, OverflowError, RuntimeError, BufferError)


class Signature:
    """A kernel's parameters, and what takes the arguments for them.

    To check a tensor in Python costs 1.3 us; to compare it with one that was checked before, 0.1.
    So what was found of the tensors of the last few calls is remembered.
    """

    def __init__(self, kernel: str, parameters: Sequence[Parameter]) -> None:
        self._kernel = kernel
        self.parameters = tuple(parameters)
        self.count = len(self.parameters)
        self._pointers: list[tuple[int, Any]] = []  # index, and what takes it
        self._values: list[tuple[int, Any]] = []
        self._raw: list[tuple[int, int, int]] = []  # index, place and size
        self._local: list[tuple[int, int]] = []  # index and place
        self._places: list[int | None] = []
        by_value, sizes = [], []
        types, code = [], f"<{self.count}Q"
        for i, parameter in enumerate(self.parameters):
            if parameter.kind in ("pointer", "opaque"):
                types.append(POINTER)
                accept = pointer(parameter, i) if parameter.kind == "pointer" else _refuse
                self._pointers.append((i, accept))
                self._places.append(None)
                continue
            kind, packing, convert = _by_value(parameter)
            place, size = struct.calcsize(code), struct.calcsize(f"<{packing}")
            types.append(kind)
            if kind == ANY_SIZE:
                self._raw.append((i, place, size))
            if kind == LOCAL_MEMORY:
                self._local.append((i, place))
            else:
                by_value.append(i)
                sizes.append(size)
            self._values.append((i, convert))
            self._places.append(place)
            code += f"{packing}{-size % _WORD}x"
        self._pack = struct.Struct(code)
        self._indices = tuple(i for i, _ in self._pointers)
        self._pointed = _getter(self._indices)
        self._by_value = _getter(tuple(by_value))
        self._sizes = by_value, sizes
        self._aligned = [alignment(self.parameters[i]) for i, _ in self._pointers]
        self._has_vectors = max(self._aligned, default=1) > 1
        self.types = (ctypes.c_int * max(len(types), 1))(*types)
        """of the arguments, as dpctl numbers them."""
        self.has_raw = bool(self._raw)
        """whether there are values of other than 1, 2, 4 or 8 bytes."""
        self.needs_local_memory = bool(self._local)
        """whether there are pointers to memory of the work-group."""
        self._known: list[_Known] = []
        self._misses = 0
        self._frames: list[Frame] = []

    def bind(self, arguments: Any) -> tuple[Frame, Uses]:
        """The arguments of a call in a frame, to be given back with :meth:`release`.

        Raises:
            TypeError: there are too many or too few, or one is of a wrong type.
            ValueError: one is a wrong value.
            OverflowError: a number does not fit.
            RuntimeError: a tensor on a wrong device, or one that requires grad.
        """
        if type(arguments) is not tuple and type(arguments) is not list:
            raise TypeError(
                f"{self._kernel}: args is a {type(arguments).__name__}; pass a tuple, as in "
                "kernel(1024, 16, (x, y))"
            )
        if len(arguments) != self.count:
            raise TypeError(self._wrong_count(len(arguments)))
        pointed = self._pointed(arguments)
        uses, addresses = self._remembered(pointed) or self._checked(pointed)
        try:
            values = [convert(arguments[i]) for i, convert in self._values]
        except _REFUSALS:
            raise self._refused_value(arguments) from None
        try:
            frame = self._frames.pop()  # a list's pop and append are atomic
        except IndexError:
            frame = Frame(self._pack.size, self._places)
        table = frame.table
        for i, address in zip(self._indices, addresses):
            table[i] = address
        self._pack.pack_into(frame.buffer, 0, *table, *values)
        return frame, uses

    def _remembered(self, pointed: Sequence[Any]) -> tuple[Uses, list[int]] | None:
        """What the pointers use, and their addresses, if such tensors were found good before."""
        for is_same, uses, needs_no_grad in self._known:
            if is_same(*pointed):
                if needs_no_grad and torch.is_grad_enabled():
                    return None
                addresses = list(map(_ADDRESS, pointed))
                if 0 in addresses:  # one has lost its memory
                    return None
                if self._has_vectors and any(map(operator.mod, addresses, self._aligned)):
                    return None
                self._misses = 0
                return uses, addresses
        return None

    def _checked(self, pointed: Sequence[Any]) -> tuple[Uses, list[int]]:
        """What the pointers use, and their addresses."""
        uses = Uses()
        addresses = []
        for value, (i, accept) in zip(pointed, self._pointers):
            try:
                addresses.append(accept(value, uses))
            except _REFUSALS as error:
                raise self._refusal(error, i) from None
        self._misses += 1
        # It takes 15 us, for nothing where each call has other shapes.
        if self._misses < _PATIENCE or self._misses % _PATIENCE == 0:
            self._remember(pointed, uses)
        return uses, addresses

    def _remember(self, pointed: Sequence[Any], uses: Uses) -> None:
        """Keep what was found of these pointers, if all are plain tensors."""
        if not pointed or not all(type(value) in PLAIN for value in pointed):
            return
        requires_grad = any(
            value.requires_grad
            for value, (i, _) in zip(pointed, self._pointers)
            if i in uses.written
        )
        known = _Known(tensor_guards(pointed).check, uses, requires_grad)
        self._known = [known, *self._known[: _MOST_KNOWN - 1]]

    def _refused_value(self, arguments: Sequence[Any]) -> Exception:
        """The error of the first argument by value that is refused."""
        for i, convert in self._values:
            try:
                convert(arguments[i])
            except _REFUSALS as error:
                return self._refusal(error, i)
        raise AssertionError("a value was refused once and taken the second time")

    def give(self, frame: Frame, opencl: OpenCL, kernel: Owned) -> None:
        """Give a kernel of OpenCL's the arguments in a frame that it does not have yet.

        Raises:
            RuntimeError: it refuses one.
        """
        now, before = frame.buffer.raw, frame.given
        if now == before:
            return
        frame.given = None  # whatever it has if this is interrupted
        handle, table = itertools.repeat(kernel.handle), frame.table
        end = _WORD * self.count  # of the table
        statuses: list[int] = []
        if before is None or now[:end] != before[:end]:
            statuses += map(opencl.set_pointer, handle, self._indices, self._pointed(table))
        if before is None or now[end:] != before[end:]:
            statuses += map(opencl.set_argument, handle, *self._sizes, self._by_value(table))
            for i, place in self._local:
                nbytes = _LOCAL.unpack_from(frame.buffer, place)[2]
                statuses.append(opencl.set_argument(kernel.handle, i, nbytes, None))
        for status in filter(None, statuses):
            check(status, "clSetKernelArg")
        frame.given = now

    def release(self, frame: Frame) -> None:
        """Take back the frame of a launch that was submitted, which copied it."""
        self._frames.append(frame)

    def make_raw(self, frame: Frame) -> list[int]:
        """Make what dpctl has for values of any size; to be given to :meth:`delete_raw`."""
        made: list[int] = []
        for i, place, size in self._raw:
            make = functions().raw_argument
            if make is None:
                raise RuntimeError(
                    f"{self._what(i)}: this dpctl passes only values of 1, 2, 4 or 8 bytes, and "
                    f"this one has {size}; pass a pointer to it, wait for the kernel on the CPU, "
                    "or install dpctl 0.21 or newer"
                )
            made.append(make(ctypes.addressof(frame.buffer) + place, size))
            struct.pack_into("<Q", frame.buffer, _WORD * i, made[-1])
        return made

    def delete_raw(self, made: Sequence[int]) -> None:
        """Delete what :meth:`make_raw` made."""
        for argument in made:
            functions().delete_raw_argument(argument)

    def _refusal(self, error: Exception, i: int) -> Exception:
        """The error of one argument, with its place, name and type."""
        return type(error)(f"{self._what(i)}: {error}")

    def _what(self, i: int) -> str:
        return f"{self._kernel}: argument {i}, {str(self.parameters[i])!r}"

    def _wrong_count(self, count: int) -> str:
        listed = ", ".join(map(str, self.parameters)) or "none"
        return f"{self._kernel} takes {self.count} arguments ({listed}), and {count} were given"


def _getter(indices: tuple[int, ...]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What takes the arguments at these places out of all."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda arguments: [arguments[i] for i in indices]


def _by_value(parameter: Parameter) -> tuple[int, str, Any]:
    """The type that dpctl has for a parameter, how it is packed, and what takes its values."""
    if parameter.kind == "local":
        return LOCAL_MEMORY, f"{_LOCAL.size}s", _local
    packing, convert = scalar(parameter)
    return BY_SIZE.get(parameter.size, ANY_SIZE), packing, convert


def _local(value: Any) -> bytes:
    if not isinstance(value, LocalMemory):
        raise TypeError(
            f"a {type(value).__name__}, where memory of the work-group is wanted; "
            "pass LocalMemory(nbytes)"
        )
    if value.nbytes >= _MOST_BYTES:
        raise ValueError(f"{value!r} is more than any device has")
    return _LOCAL.pack(1, _BYTE_TYPE, value.nbytes, 1, 1)


def _refuse(value: Any, uses: Uses) -> int:
    raise TypeError("images, samplers, pipes and the like cannot be passed; use a pointer")
