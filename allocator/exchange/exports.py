"""Exports: the DLPack structs that consumers of our memory hold, and how their release is noticed.

A consumer calls an export's deleter when its last tensor is freed. This may happen in any thread,
with or without the GIL, from the garbage collector in the middle of a pool's own call, with an
exception pending, in a forked process, or while the interpreter exits. No Python function survives
all of these: ctypes takes a pending exception for the function's own, clears it, and the
interpreter crashes later (``torch.add(pool.empty(8), 1 / 0)``).

So the deleter is ``time`` of the C library, whose argument says where to write the time: into the
first word of the struct. Nothing else happens, whatever state the process is in. To find released
exports, a pool compares the first words of all of them with their previous values. See
docs/design/dlpack-deleter.md.

Besides the deleter, only Python code changes a word. Where it must compare the word first, both
operations are on one line without a call. So no other thread and no signal handler comes in
between: the interpreter lets them run only at calls and at backward jumps; with a debugger, also
between lines.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

from allocator.exchange.dlpack import (
    LEGACY_NAME,
    VERSION,
    VERSIONED_NAME,
    DLTensor,
    Legacy,
    Versioned,
    View,
    is_valid,
    make_immortal,
    new_capsule,
)

_WORD = ctypes.sizeof(ctypes.c_uint64)
_SLOT = max(ctypes.sizeof(Versioned), ctypes.sizeof(Legacy)) // _WORD  # words of an export
_FIRST_SLAB = 256
_GROWTH = 4
"""The factor by which each slab is larger than the one before."""

_SEEN_ALWAYS = 2
"""The first slabs, of 1,280 exports together, are checked in every call."""
_RANGE = 1024
"""How many exports of the other slabs each call checks, in rotation: checking thousands is slow."""

IDLE = 0
IN_USE = VERSION[0] | VERSION[1] << 32
"""The first word of a versioned struct, its version, until the deleter overwrites it."""
NOT_RELEASED = IN_USE, IDLE
"""First words of versioned structs whose deleter was not called; any other is a time."""
_DROPPED = 2**64 - 1
"""A time that has not come yet, written as if the deleter had been called."""

# From the C library itself: a preloaded library, such as one that fakes the date, may have its own.
_DELETER: Any = ctypes.cast(ctypes.CDLL("libc.so.6").time, ctypes.c_void_p).value


def _word_of(struct: type[ctypes.Structure], field: str) -> int:
    return int(getattr(struct, field).offset) // _WORD


class _Slab:
    """An array of structs, so that one comparison covers them all. It is never freed."""

    def __init__(self, count: int) -> None:
        import numpy as np  # not at import, which needs no numpy

        structs = (ctypes.c_uint64 * (count * _SLOT))()
        armed = (ctypes.c_uint64 * count)()
        make_immortal(structs)
        self.address = ctypes.addressof(structs)
        self.words = memoryview(structs).cast("B").cast("Q")
        self.armed = memoryview(armed).cast("B").cast("Q")
        """the first word of each export until its deleter is called."""
        self.exports: dict[int, Export] = {}
        """the exports, by slot."""
        self._count, self._used = count, 0
        self._first_words = np.frombuffer(self.words, np.uint64)[::_SLOT]
        self._armed = np.frombuffer(self.armed, np.uint64)

    @property
    def used(self) -> int:
        """Slots with an export."""
        return min(self._used, self._count)

    def changed(self, start: int, stop: int) -> list[int]:
        """The slots in a range whose first word has changed."""
        differs = self._first_words[start:stop] != self._armed[start:stop]
        slots: list[int] = (differs.nonzero()[0] + start).tolist()
        return slots

    def new(self, name: bytes, ndim: int) -> Export | None:
        """An unused export, or None if the slab is full."""
        slot, self._used = self._used, self._used + 1  # on one line: no two threads get the same
        if slot >= self._count:
            return None
        return Export(self, slot, name, ndim)


class Export:
    """A struct that a consumer holds or may hold, and the owner that it keeps alive."""

    __slots__ = (
        "_armed",
        "_given",
        "_numbers",
        "_slot",
        "_tensor",
        "address",
        "capsule",
        "capsule_name",
        "entry",
        "first",
        "is_held",
        "key",
        "name",
        "owner",
        "words",
    )

    def __init__(self, slab: _Slab, slot: int, name: bytes, ndim: int) -> None:
        self.name = name
        self.key = (name, ndim)
        self.owner: Any = None
        """object kept alive while the export is in use."""
        self.is_held = False
        """whether a consumer has it, or may have it."""
        self.entry: Any = None
        """entry of the reuse cache that may hand it out again."""
        self.capsule: Any = None
        """capsule that torch has consumed, to be used again."""
        self.capsule_name: Any = None
        """the capsule's word that points to its name."""
        self.words, self.first = slab.words, slot * _SLOT
        """``words[first]`` is IN_USE until the deleter is called, if the struct is versioned."""
        self.address = slab.address + self.first * _WORD
        self._armed, self._slot = slab.armed, slot
        self._given = IN_USE  # the first word while it is in use
        self._numbers = (ctypes.c_int64 * max(2 * ndim, 1))()
        self._tensor = self.first
        if name == VERSIONED_NAME:
            self._tensor += _word_of(Versioned, "tensor")
        struct = Versioned if name == VERSIONED_NAME else Legacy
        self.words[self.first + _word_of(struct, "deleter")] = _DELETER
        # Strides are always written: DLPack 1.2 requires them for contiguous arrays too.
        start = ctypes.addressof(self._numbers)
        self.words[self._tensor + _word_of(DLTensor, "shape")] = start
        self.words[self._tensor + _word_of(DLTensor, "strides")] = start + ndim * _WORD
        slab.exports[slot] = self

    def describe(self, view: View, flags: int) -> None:
        """Describe a view in the struct."""
        (kind, number), dtype, ndim = view.device, view.dtype, len(view.shape)
        self._numbers[: 2 * ndim] = [*view.shape, *view.strides]
        words, tensor = self.words, self._tensor
        words[tensor + _DEVICE] = kind | number << 32
        words[tensor + _NDIM] = ndim | dtype.code << 32 | dtype.bits << 40 | dtype.lanes << 48
        if self.name == VERSIONED_NAME:
            words[self.first + _FLAGS] = flags
            words[tensor] = view.address
        else:
            self._given = view.address

    def renew_capsule(self) -> None:
        """Make :attr:`capsule` one that torch can consume; torch leaves the consumed one to us."""
        if REUSES_CAPSULES and self.capsule is not None:
            self.capsule_name[0] = NAME_ADDRESS
        else:
            self.capsule = new_capsule(self.address, self.name, None)
            name = ctypes.c_uint64.from_address(id(self.capsule) + _Capsule.name.offset)
            self.capsule_name = memoryview(name).cast("B").cast("Q")

    def give(self, owner: Any) -> None:
        """Keep ``owner`` alive until the deleter is called."""
        self.owner = owner
        self.is_held = True
        self.words[self.first] = self._armed[self._slot] = self._given

    def drop(self) -> None:
        """Do what the deleter does, as no consumer took the export."""
        self.words[self.first] = _DROPPED

    def settle(self) -> bool:
        """Make a released export idle; False if it was not released, or another thread did so."""
        words, first, armed, slot = self.words, self.first, self._armed, self._slot
        is_back = False
        # On one line, as a debugger may let other threads run between two.
        if words[first] != armed[slot]: words[first], armed[slot], is_back = IDLE, IDLE, True  # noqa: E701  # fmt: skip
        return is_back

    def is_lost(self) -> bool:
        """Whether it is idle although it is not cached."""
        if self._given == IDLE:  # zero bytes, in a struct without a version
            return False
        entry = self.entry
        is_cached = entry is not None and not entry.is_closed and self in entry.cached
        return self._armed[self._slot] == IDLE and not is_cached

    def leave_cache(self) -> None:
        """Leave the reuse cache for good."""
        if self.entry is not None:
            self.entry.forget(self)
            self.entry = None

    def end(self) -> bool:
        """Note the release; False if it was noted before: the deleter was called twice."""
        was_held, self.is_held = self.is_held, False
        return was_held


_DEVICE = _word_of(DLTensor, "device_type")
_NDIM = _word_of(DLTensor, "ndim")
_FLAGS = _word_of(Versioned, "flags")


class Exporter:
    """The exports of one pool."""

    def __init__(self) -> None:
        self._slabs = [_Slab(_FIRST_SLAB)]
        self._turn = 0
        self._free: dict[Any, deque[Export]] = {}
        self._public: dict[Export, Any] = {}
        _exporters.append(self)

    @classmethod
    def obtain(cls) -> Exporter:
        """An exporter whose pool is gone, or a new one; exporters are never freed."""
        try:
            return _retired.pop()
        except IndexError:
            return cls()

    def retire(self) -> None:
        """Make this exporter, none of whose exports are in use, available to another pool."""
        self.sweep()
        _retired.append(self)

    @property
    def exports(self) -> list[Export]:
        """All exports, in use or not."""
        return [export for slab in self._slabs for export in list(slab.exports.values())]

    def export(self, view: View, *, versioned: bool = True, flags: int = 0) -> Export:
        """An export that describes a view."""
        key = (VERSIONED_NAME if versioned else LEGACY_NAME, len(view.shape))
        try:
            # The oldest first: a deleter that is called twice then most likely hits an idle one.
            export = self._free[key].popleft()
        except LookupError:
            export = self._new(*key)
        export.describe(view, flags)
        return export

    def take_released(self, *, everything: bool = True) -> list[Export]:
        """The exports that were released since the last call, now idle, with their owners.

        Args:
            everything: check all exports; otherwise the first 1,280, and others round robin.
        """
        for export, capsule in list(self._public.items()):
            # The count first: with no other reference, no other thread can consume it.
            is_ours = sys.getrefcount(capsule) == _ONLY_OURS
            if not is_valid(capsule, export.name):
                self._public.pop(export, None)  # consumed
            elif is_ours:
                export.drop()  # first: if an interrupt comes in between, it is dropped again
                self._public.pop(export, None)
        found = []
        for slab, start, stop in self._ranges(everything):
            for slot in slab.changed(start, stop):
                export = slab.exports[slot]
                if export.settle():
                    found.append(export)
        return found

    @property
    def is_large(self) -> bool:
        """Whether there are too many exports to check all in each call."""
        return len(self._slabs) > _SEEN_ALWAYS

    def _ranges(self, everything: bool) -> Iterator[tuple[_Slab, int, int]]:
        """The slots to check."""
        for slab in self._slabs if everything else self._slabs[:_SEEN_ALWAYS]:
            yield slab, 0, slab.used
        if not everything and self.is_large:
            self._turn = (self._turn + 1) % sum(slab.used // _RANGE + 1 for slab in self._slabs)
            turn = self._turn
            for slab in self._slabs:
                ranges = slab.used // _RANGE + 1
                if turn < ranges:
                    yield slab, turn * _RANGE, min((turn + 1) * _RANGE, slab.used)
                    return
                turn -= ranges

    def recover(self) -> None:
        """Release again the exports whose release an exception interrupted."""
        for export in self.exports:
            if export.owner is not None and export.is_lost():
                export.leave_cache()  # which could hand it out before it is settled again
                export.is_held = True
                export.drop()

    def reclaim(self, export: Export) -> Any:
        """Make an idle export available for another view; returns its owner."""
        export.leave_cache()
        owner, export.owner = export.owner, None  # last: until then recover() releases it again
        self._free.setdefault(export.key, deque()).append(export)
        return owner

    def stop_reuse(self, owner: Any) -> None:
        """Keep the exports of an owner out of the reuse cache."""
        for export in self.exports:
            if export.owner is owner:
                export.leave_cache()

    def public_capsule(self, export: Export, owner: Any) -> Any:
        """A capsule for any consumer, who may also drop it; ``owner`` is kept alive meanwhile.

        It has no destructor, which would be Python code at an arbitrary moment. We hold the capsule
        too instead, and :meth:`take_released` checks whether it is the last reference.
        """
        capsule = new_capsule(export.address, export.name, None)
        self._public[export] = capsule
        export.give(owner)
        return capsule

    def sweep(self) -> None:
        """Release the owners that no consumer holds any more."""
        for export in self.take_released():
            if export.end():
                self.reclaim(export)

    def _new(self, name: bytes, ndim: int) -> Export:
        while True:
            slab = self._slabs[-1]
            export = slab.new(name, ndim)
            if export is not None:
                return export
            self._slabs.append(_Slab(len(slab.armed) * _GROWTH))


_exporters: list[Exporter] = []
"""all exporters, so that exports in use stay valid whatever happens to their pools."""
_retired: list[Exporter] = []


def _references() -> int:
    """The reference count of an object in a dict, in a tuple in a list, and in a local variable."""
    objects = {0: object()}
    for _, value in list(objects.items()):
        count = sys.getrefcount(value)
    return count


_ONLY_OURS = _references()


# A capsule that torch has consumed differs in one word: the pointer to its name. Writing that word
# again is much cheaper than a new capsule.


class _Capsule(ctypes.Structure):
    """CPython's PyCapsule from 3.1 on."""

    _fields_ = (
        ("references", ctypes.c_ssize_t),
        ("type", ctypes.c_void_p),
        ("pointer", ctypes.c_void_p),
        ("name", ctypes.c_void_p),
    )


NAME_ADDRESS: Any = ctypes.cast(ctypes.c_char_p(VERSIONED_NAME), ctypes.c_void_p).value


def _is_known_layout() -> bool:
    """Whether capsules are laid out as above, and threads switch only where we expect it."""
    capsule = new_capsule(_DELETER, VERSIONED_NAME, None)
    fields = _Capsule.from_address(id(capsule))
    is_same = (fields.pointer, fields.name) == (_DELETER, NAME_ADDRESS)
    has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    return is_same and sys.implementation.name == "cpython" and has_gil


REUSES_CAPSULES = _is_known_layout()
