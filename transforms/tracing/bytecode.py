"""Reads in CPython's bytecode, which differs between versions, what code stores and calls."""

from __future__ import annotations

import dis
import functools
import itertools
import sys
import types
from collections.abc import Iterable, Iterator


def nested_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Code and that of its nested functions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested_codes(constant)


@functools.lru_cache(maxsize=1024)
def stored_attributes(code: types.CodeType) -> frozenset[str]:
    """The attributes that code assigns to, without its nested functions."""
    found = (each for each in dis.get_instructions(code) if each.opname == "STORE_ATTR")
    return frozenset(each.argval for each in found)


@functools.lru_cache(maxsize=1024)
def attributes_of_first_argument(code: types.CodeType) -> frozenset[str]:
    """The attributes of a function's first argument, such as ``self``, also in nested functions."""
    first = code.co_varnames[0] if code.co_argcount else ""
    found: set[str] = set()
    for part in nested_codes(code):
        for before, each in itertools.pairwise(dis.get_instructions(part)):
            if each.opname in ("LOAD_ATTR", "LOAD_METHOD") and before.opname.startswith("LOAD_"):
                loaded = before.argval[-1] if isinstance(before.argval, tuple) else before.argval
                found |= {each.argval} if loaded == first else set()
    return frozenset(found)


@functools.lru_cache(maxsize=1024)
def names_called(code: types.CodeType) -> list[tuple[str, ...]]:
    """The global names, and their attributes, that code calls, without its nested functions."""
    found: list[tuple[str, ...]] = []
    name: tuple[str, ...] = ()
    is_called = False
    instructions = [i for i in dis.get_instructions(code) if i.opname != "EXTENDED_ARG"]
    for place, each in enumerate(instructions):
        if name and each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            name = (*name, each.argval)
            is_called = is_called or _makes_room(each)
            continue
        if name and (
            is_called
            or _makes_room(each)
            or _is_called_by(itertools.islice(instructions, place, None))
        ):
            found.append(name)
        is_global = each.opname == "LOAD_GLOBAL"
        name = (each.argval,) if is_global else ()
        is_called = is_global and _makes_room(each)
    return found


def _makes_room(instruction: dis.Instruction) -> bool:
    """Whether an instruction makes room on the stack for the call of what was loaded."""
    match instruction.opname:
        case "LOAD_METHOD":  # until CPython 3.11
            return True
        case "LOAD_GLOBAL":
            return sys.version_info >= (3, 11) and bool((instruction.arg or 0) & 1)
        case "LOAD_ATTR":
            return sys.version_info >= (3, 12) and bool((instruction.arg or 0) & 1)
        case "PUSH_NULL":  # older versions push it before they load
            return sys.version_info >= (3, 13)
    return False


def _is_called_by(following: Iterable[dis.Instruction]) -> bool:
    """Whether CPython 3.10 calls what is on the stack before these instructions.

    It makes no room for that, so the arguments are counted.
    """
    above = 0
    for each in following if sys.version_info < (3, 11) else ():
        number = each.arg or 0
        called = {"FUNCTION": number, "FUNCTION_KW": number + 1, "FUNCTION_EX": 1 + (number & 1)}
        if called.get(each.opname.removeprefix("CALL_")) == above:
            return True
        above += dis.stack_effect(each.opcode, each.arg, jump=False)
        if above < 0:
            return False
    return False
