"""Reads the kernels' parameters and device requirements from a SPIR-V module."""

from __future__ import annotations

import array
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from fusedoptim.dtypes import ELEMENTS
from fusedoptim.raw._errors import InvalidModuleError

_MAGIC = 0x07230203
HEADER = 5  # words
# Instructions, by number (section 3 of the SPIR-V specification).
STRING, NAME, _ENTRY_POINT, _EXECUTION_MODE, _CAPABILITY, _DECORATE = 7, 5, 15, 16, 17, 71
_TYPE_VOID, _TYPE_BOOL, _TYPE_INT, _TYPE_FLOAT, _TYPE_VECTOR = 19, 20, 21, 22, 23
_TYPE_ARRAY, _TYPE_STRUCT, _TYPE_OPAQUE, _TYPE_POINTER, _TYPE_FUNCTION = 28, 30, 31, 32, 33
_CONSTANT, _FUNCTION, _FUNCTION_PARAMETER, _FUNCTION_END, _CALL = 43, 54, 55, 56, 57
_VARIABLE = 59
_UNKNOWN: tuple[int, list[int]] = (0, [])  # any other type
_KERNEL = 6  # execution model
_LOCAL_SIZE = 17  # execution mode
_BFLOAT16 = 0  # floating-point encoding
_CPACKED, _FUNC_PARAM_ATTR, _NO_WRITE = 10, 38, 6  # decorations
# Storage classes.
_UNIFORM_CONSTANT, _WORKGROUP, _CROSS_WORKGROUP, _BY_VALUE, _GENERIC = 0, 4, 5, 7, 8

OPENCL_TYPES = {element.c: element for element in ELEMENTS.values()}
"""The types that a tensor can hold, by their names in OpenCL C."""
_TARGET = re.compile(rf"({'|'.join(OPENCL_TYPES)})(\d*)\*")


class Parameter(NamedTuple):
    """One parameter of a kernel."""

    name: str
    kind: str
    """"pointer", "local" (a pointer to a work-group's memory), "scalar" (or a vector), "struct" (by
    value), or "opaque" (images, samplers and others, which cannot be passed)."""
    dtype: str
    """"f32", "f64", "f16", "bf16", "i8" to "i64", "u8" to "u64"; "int8" to "int64" for an integer
    whose signedness the module does not state; "f32x4" for a vector; "" for other types. For a
    pointer, the type of the target."""
    size: int
    """Size in bytes; for a pointer, that of the target; 0 if the target is void or unknown."""
    is_const: bool
    """Whether it is a pointer through which the kernel only reads."""

    def __str__(self) -> str:
        text = self.dtype or (f"struct of {self.size} bytes" if self.size else "void")
        const = "const " if self.is_const else ""
        place = "local " if self.kind == "local" else ""
        star = " *" if self.kind in ("pointer", "local") else " "
        return f"{place}{const}{text if self.kind != 'opaque' else 'opaque'}{star}{self.name}"


class Entry(NamedTuple):
    """One kernel of a module."""

    parameters: tuple[Parameter, ...]
    local_size: tuple[int, ...] | None
    """The work-group size that the source requires; None if the caller chooses."""


class ModuleFacts(NamedTuple):
    """A module's kernels and requirements."""

    entries: dict[str, Entry]
    """The kernels, by name."""
    capabilities: frozenset[int]
    """The capabilities that the module requires, by SPIR-V's numbers."""
    has_globals: bool
    """Whether the module has variables that keep their values between launches."""


def read_signatures(spirv: bytes) -> dict[str, tuple[Parameter, ...]]:
    """The parameters of each kernel of a SPIR-V module.

    Raises:
        InvalidModuleError: the bytes are not a SPIR-V module, or it has no kernel.

    Example:
        >>> from fusedoptim.raw._opencl_c import compile_opencl_c
        >>> spirv = compile_opencl_c("kernel void f(global const float4 *x, uint n) {}")
        >>> for parameter in read_signatures(spirv)["f"]:
        ...     print(parameter)
        const f32x4 *x
        u32 n
    """
    return {name: entry.parameters for name, entry in read_module(spirv).entries.items()}


def read_module(spirv: bytes) -> ModuleFacts:
    """The kernels of a SPIR-V module and its requirements; see :func:`read_signatures`."""
    try:
        facts = _Reader(spirv).facts()
    except (IndexError, KeyError) as error:  # of a missing operand or id
        raise InvalidModuleError(f"the SPIR-V module is damaged ({error!r})") from error
    if not facts.entries:
        raise InvalidModuleError(
            "the SPIR-V module has no kernel (no OpEntryPoint Kernel); in OpenCL C, a kernel "
            "begins with `kernel void`"
        )
    return facts


def words_of(spirv: bytes) -> array.array[int]:
    """The words of a SPIR-V module, in this machine's byte order; checks its header."""
    if len(spirv) < 4 * HEADER or len(spirv) % 4:
        raise InvalidModuleError(
            f"{len(spirv)} bytes are not a SPIR-V module, which has a header of {4 * HEADER} "
            "bytes and then words of 4 bytes: the file is truncated or of another kind"
        )
    words = array.array("I", spirv)
    if sys.byteorder != "little":
        words.byteswap()
    if words[0] != _MAGIC:
        words.byteswap()
        if words[0] == _MAGIC:
            raise InvalidModuleError(
                "the SPIR-V module is in big-endian byte order, which no driver here reads; swap "
                "the bytes of each 4-byte word"
            )
        raise InvalidModuleError(
            f"the first bytes {spirv[:4].hex(' ')} are not SPIR-V's magic number 03 02 23 07"
        )
    return words


def instructions(words: array.array[int]) -> Iterator[tuple[int, list[int]]]:
    """The opcode and operands of each instruction of a module."""
    place, end = HEADER, len(words)
    while place < end:
        count, opcode = words[place] >> 16, words[place] & 0xFFFF
        if count == 0 or place + count > end:
            raise InvalidModuleError(
                f"the SPIR-V module is truncated or damaged: its instruction at byte "
                f"{4 * place} has {count} words, and {end - place} remain"
            )
        yield opcode, words[place + 1 : place + count].tolist()
        place += count


def text_of(words: list[int]) -> str:
    """The string that an instruction's words contain."""
    data = b"".join(word.to_bytes(4, "little") for word in words)
    return data.split(b"\0", 1)[0].decode(errors="replace")


class _Reader:
    """Collects what a module's instructions state about its kernels."""

    def __init__(self, spirv: bytes) -> None:
        self._names: dict[int, str] = {}
        self._types: dict[int, tuple[int, list[int]]] = {}  # an id's instruction and operands
        self._constants: dict[int, int] = {}
        self._functions: dict[int, int] = {}  # a function's type
        self._parameters: dict[int, list[int]] = {}
        self._read_only: set[int] = set()
        self._packed: set[int] = set()
        self._entries: dict[int, str] = {}
        self._local_sizes: dict[int, tuple[int, ...]] = {}
        self._texts: list[str] = []
        self._capabilities: set[int] = set()
        self._has_globals = False
        self._open_functions = 0
        self._called: set[int] = set()
        for opcode, operands in instructions(words_of(spirv)):
            self._take(opcode, operands)
        if self._open_functions:
            raise InvalidModuleError("the SPIR-V module is truncated: its last function has no end")
        if not self._called <= self._functions.keys():
            raise InvalidModuleError("the SPIR-V module is truncated: it calls functions it lacks")

    def _take(self, opcode: int, operands: list[int]) -> None:
        if opcode == _CAPABILITY:
            self._capabilities.add(operands[0])
        elif opcode == _ENTRY_POINT and operands[0] == _KERNEL:
            self._entries[operands[1]] = text_of(operands[2:])
        elif opcode == _EXECUTION_MODE and operands[1] == _LOCAL_SIZE:
            self._local_sizes[operands[0]] = tuple(operands[2:5])
        elif opcode == STRING:
            self._texts.append(text_of(operands[1:]))
        elif opcode == NAME:
            self._names[operands[0]] = text_of(operands[1:])
        elif opcode == _DECORATE and operands[1:] == [_FUNC_PARAM_ATTR, _NO_WRITE]:
            self._read_only.add(operands[0])
        elif opcode == _DECORATE and operands[1] == _CPACKED:
            self._packed.add(operands[0])
        elif _TYPE_VOID <= opcode <= _TYPE_FUNCTION:
            self._types[operands[0]] = (opcode, operands[1:])
        elif opcode == _VARIABLE and operands[2] == _CROSS_WORKGROUP:
            self._has_globals = True
        elif opcode == _CONSTANT:
            self._constants[operands[1]] = operands[2]
        elif opcode == _FUNCTION:
            self._functions[operands[1]] = operands[3]
            self._parameters[operands[1]] = []
            self._open_functions += 1
        elif opcode == _FUNCTION_END:
            self._open_functions -= 1
        elif opcode == _CALL:
            self._called.add(operands[2])
        elif opcode == _FUNCTION_PARAMETER and self._parameters:
            next(reversed(self._parameters.values())).append(operands[1])

    def facts(self) -> ModuleFacts:
        entries = {}
        for function, name in self._entries.items():
            if function not in self._functions:
                raise InvalidModuleError(f"the SPIR-V module lacks the function of kernel {name!r}")
            entries[name] = Entry(self._signature(function, name), self._local_sizes.get(function))
        return ModuleFacts(entries, frozenset(self._capabilities), self._has_globals)

    def _signature(self, function: int, kernel: str) -> tuple[Parameter, ...]:
        _, operands = self._types[self._functions[function]]
        types, ids = operands[1:], self._parameters[function]
        texts = self._argument_texts("kernel_arg_type", kernel, len(types))
        qualifiers = self._argument_texts("kernel_arg_type_qual", kernel, len(types))
        return tuple(
            self._parameter(i, type_id, id_, text, "const" in qualifier.split())
            for i, (type_id, id_, text, qualifier) in enumerate(zip(types, ids, texts, qualifiers))
        )

    def _argument_texts(self, kind: str, kernel: str, count: int) -> list[str]:
        """What clang recorded about each parameter, or ""."""
        prefix = f"{kind}.{kernel}."
        for text in self._texts:
            if text.startswith(prefix):
                texts = text.removeprefix(prefix).removesuffix(",").split(",")
                if len(texts) == count:
                    return texts
        return [""] * count

    def _parameter(self, i: int, type_id: int, id_: int, text: str, is_const: bool) -> Parameter:
        name = self._names.get(id_) or f"argument_{i}"
        opcode, operands = self._types.get(type_id, _UNKNOWN)
        if opcode != _TYPE_POINTER:
            size, _ = self._layout(type_id)
            if not size:
                return Parameter(name, "opaque", "", 0, False)
            return Parameter(name, "scalar", self._dtype(type_id, text), size, False)
        storage, pointee = operands
        size, _ = self._layout(pointee)
        if storage == _BY_VALUE:
            return Parameter(name, "struct", "", size, False)
        if storage not in (_UNIFORM_CONSTANT, _WORKGROUP, _CROSS_WORKGROUP, _GENERIC):
            return Parameter(name, "opaque", "", 0, False)
        if text:
            dtype, size = _recorded_target(text)
        else:
            dtype = self._dtype(pointee, "")
        if storage == _WORKGROUP:
            return Parameter(name, "local", dtype, size, False)
        is_const = is_const or storage == _UNIFORM_CONSTANT or id_ in self._read_only
        return Parameter(name, "pointer", dtype, size, is_const)

    def _dtype(self, type_id: int, text: str) -> str:
        """The name of a type; ``text`` is what clang recorded about it, or ""."""
        opcode, operands = self._types.get(type_id, _UNKNOWN)
        if opcode == _TYPE_VECTOR:
            scalar = self._dtype(operands[0], re.sub(r"\d+$", "", text))
            return f"{scalar}x{operands[1]}" if scalar else ""
        if opcode == _TYPE_INT:
            known = OPENCL_TYPES.get(text)
            if known and not known.is_float and 8 * known.size == operands[0]:
                return known.name
            return f"int{operands[0]}"
        if opcode == _TYPE_FLOAT:
            return "bf16" if operands[1:] == [_BFLOAT16] else f"f{operands[0]}"
        return ""

    def _layout(self, type_id: int) -> tuple[int, int]:
        """The size and alignment of a type in bytes; the size is 0 if unknown."""
        opcode, operands = self._types.get(type_id, _UNKNOWN)
        if opcode in (_TYPE_INT, _TYPE_FLOAT):
            return operands[0] // 8, operands[0] // 8
        if opcode == _TYPE_POINTER:
            return 8, 8
        if opcode == _TYPE_VECTOR:
            size = self._layout(operands[0])[0] * (4 if operands[1] == 3 else operands[1])
            return size, size
        if opcode == _TYPE_ARRAY:
            size, alignment = self._layout(operands[0])
            return size * self._constants.get(operands[1], 0), alignment
        if opcode == _TYPE_STRUCT:
            return self._struct_layout(type_id, operands)
        return 0, 1

    def _struct_layout(self, type_id: int, members: list[int]) -> tuple[int, int]:
        end, most = 0, 1
        for size, alignment in map(self._layout, members):
            if not size:
                return 0, 1
            if type_id in self._packed:
                alignment = 1
            end += -end % alignment + size
            most = max(most, alignment)
        return end + -end % most, most


def _recorded_target(text: str) -> tuple[str, int]:
    """The dtype and size of a pointer's target, from what clang recorded about the pointer.

    The pointer's type in the module is that of the first access, or char if there is no access.
    """
    match = _TARGET.fullmatch(text)
    if match is None:
        return "", 0
    scalar, lanes = OPENCL_TYPES[match[1]], int(match[2] or 1)
    size = scalar.size * (4 if lanes == 3 else lanes)
    return (f"{scalar.name}x{lanes}" if lanes > 1 else scalar.name), size
