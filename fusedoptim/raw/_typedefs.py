"""Names that a source of OpenCL C gives to types, as ``typedef float real`` does.

The compiler records the types of a kernel's parameters as they are written. It can tell what a name
means: it encodes the type of a parameter in the symbol of an overloadable function.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fusedoptim.raw._spirv import (
    HEADER,
    NAME,
    OPENCL_TYPES,
    STRING,
    instructions,
    text_of,
    words_of,
)

_RECORD = "kernel_arg_type"
_KNOWN = re.compile(rf"({'|'.join([*OPENCL_TYPES, 'void', 'bool'])})\d*")
_NAME = re.compile(r"(?<![\w ])([A-Za-z_]\w*)(?=\*?,)")  # not the E of "enum E*,"
_QUESTION = "fusedoptim_type_"
# The second parameter tells the alignment: a name may be for vectors of any address.
_FUNCTION = """
#undef {name}
__attribute__((overloadable))
void {question}{k}_(global {name} *, char (*)[__alignof__({name})]) {{}}
"""
# Words of the question that the source may have defined as macros, such as #define global __global.
_WORDS = ("__attribute__", "overloadable", "void", "global", "char", "__alignof__")
# Codes of the ABI for C++: https://itanium-cxx-abi.github.io/cxx-abi/abi.html#mangling-builtin
_CODES = {"c": "char", "a": "char", "s": "short", "i": "int", "l": "long"}
_CODES |= {"h": "uchar", "t": "ushort", "j": "uint", "m": "ulong"}
_CODES |= {"Dh": "half", "f": "float", "d": "double"}
_ANSWER = re.compile(
    rf"_Z\d+{_QUESTION}(\d+)_PU3AS1[VK]*(?:Dv(\d+)_)?({'|'.join(_CODES)})PA(\d+)_(?:U3AS\d)?c"
)


def unknown_types(spirv: bytes) -> list[str]:
    """The names of types that a module's kernels take, of which it does not state the meaning."""
    records = [text for text in _texts(spirv) if text.startswith(f"{_RECORD}.")]
    names = {name for text in records for name in _NAME.findall(_types(text))}
    return sorted(name for name in names if _KNOWN.fullmatch(name) is None)


def question(names: Sequence[str]) -> str:
    """OpenCL C that asks what ``names`` mean, to compile after the source that defines them."""
    functions = [
        _FUNCTION.format(question=_QUESTION, k=k, name=name) for k, name in enumerate(names)
    ]
    plain = [f"\n#undef {word}" for word in _WORDS]
    return "".join([*plain, *functions])


def answers(names: Sequence[str], spirv: bytes) -> dict[str, str]:
    """The numbers and vectors that ``names`` stand for; others, as of structs, are left out."""
    found = {}
    for symbol in _texts(spirv):
        match = _ANSWER.fullmatch(symbol)
        if match is not None:
            k, lanes, code, alignment = match.groups()
            element = OPENCL_TYPES[_CODES[code]]
            room = {None: 1, "3": 4}.get(lanes) or int(lanes)
            if int(alignment) == element.size * room:
                found[names[int(k)]] = f"{element.c}{lanes or ''}"
    return found


def with_types(spirv: bytes, meanings: Mapping[str, str]) -> bytes:
    """The module, with its record of its kernels' parameters in known types."""
    words = words_of(spirv)
    result = words[:HEADER]
    for opcode, operands in instructions(words):
        text = text_of(operands[1:]) if opcode == STRING else ""
        if text.startswith(f"{_RECORD}."):
            types = _types(text)
            known = _NAME.sub(lambda match: meanings.get(match[1], match[1]), types)
            data = f"{text.removesuffix(types)}{known}".encode()
            data += bytes(4 - len(data) % 4)
            operands[1:] = [
                int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)
            ]
        result.append(len(operands) + 1 << 16 | opcode)
        result.extend(operands)
    return result.tobytes()


def _texts(spirv: bytes) -> list[str]:
    """The strings and the names of a module."""
    return [
        text_of(operands[1:])
        for opcode, operands in instructions(words_of(spirv))
        if opcode in (STRING, NAME)
    ]


def _types(record: str) -> str:
    """The list of types in the record of one kernel: ``kernel_arg_type.<kernel>.<types>``."""
    return record.split(".", 2)[2]
