"""Gives the sub-groups of a compiled kernel a size; docs/design/launch-shape.md says why."""

from __future__ import annotations

from array import array

_VERSION_1_1 = 0x00010100  # the first version that has sizes of sub-groups
_HEADER = 5  # words
# SPIR-V's numbers of instructions, of a capability and of an execution mode.
_ENTRY_POINT, _EXECUTION_MODE, _CAPABILITY = 15, 16, 17
_SUBGROUP_DISPATCH, _SUBGROUP_SIZE = 58, 35


def with_sub_groups(spirv: bytes, size: int) -> bytes:
    """Give the sub-groups of a module's only kernel ``size`` work items.

    Example:
        >>> from fusedoptim.launch.modules import load_module
        >>> spirv = load_module("sgd", "f32").spirv
        >>> len(with_sub_groups(spirv, 16)) - len(spirv)
        24
    """
    words = array("I", spirv)
    place = _HEADER
    while words[place] & 0xFFFF != _ENTRY_POINT:
        place += _length(words[place])
    kernel, after = words[place + 2], place + _length(words[place])
    head = words[:_HEADER]
    head[1] = max(head[1], _VERSION_1_1)
    capability = _instruction(_CAPABILITY, _SUBGROUP_DISPATCH)
    mode = _instruction(_EXECUTION_MODE, kernel, _SUBGROUP_SIZE, size)
    return (head + capability + words[_HEADER:after] + mode + words[after:]).tobytes()


def _length(first: int) -> int:
    """The number of words in an instruction, of which this is the first."""
    return first >> 16


def _instruction(opcode: int, *operands: int) -> array[int]:
    return array("I", [(len(operands) + 1) << 16 | opcode, *operands])
