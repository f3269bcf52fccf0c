"""What the consumers of our memory hold, and how we learn that they are done with it.

A consumer calls an export's deleter whenever its last tensor dies: in any thread, with the GIL or
without, from the garbage collector in the middle of a pool's own call, with an exception pending,
in a fork, while the interpreter exits. No Python function survives all of these: with an exception
pending ctypes takes it for the function's own, clears it, and the interpreter crashes on its way
out (``torch.add(pool.empty(8), 1 / 0)``).

So the deleter is ``time`` of the C library, whose argument says where to write the time: the first
word of the struct. Nothing else happens, in whatever state the process is. A pool that wants to
know which of its exports came back compares the first words of all of them with what they were;
that takes 3 us for 1,000.

A word is changed by the deleter and, under the GIL, by one thread at a time: the interpreter
switches threads, and runs signal handlers, only at calls and where a loop goes back; with a
debugger, also between two lines.
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
"""Each slab has so many times the exports of the one before."""

_SEEN_ALWAYS = 2
"""Slabs, of 1,280 exports together, that are looked at in every call."""
_RANGE = 1024
"""Exports of the others that are: all of 10,000 would take 100 us."""

AT_REST = 0
GIVEN = VERSION[0] | VERSION[1] << 32
"""The first word of a versioned struct, its version, until the deleter overwrites it."""
NOT_BACK = GIVEN, AT_REST
"""The first words of versioned structs whose deleter was not called: all others are times."""
_DROPPED = 2**64 - 1
"""As if the deleter had been called; a time that has not come yet."""

# Not of whoever may have put his own time() before it, as to fake the date.
_DELETER: Any = ctypes.cast(ctypes.CDLL("libc.so.6").time, ctypes.c_void_p).value


def _word_of(struct: type[ctypes.Structure], field: str) -> int:
    return int(getattr(struct, field).offset) // _WORD


class _Slab:
    """Structs that lie side by side, so that one comparison sees them all. It is never freed."""

    def __init__(self, count: int) -> None:
        import numpy as np  # here, as the package is importable without

        structs = (ctypes.c_uint64 * (count * _SLOT))()
        armed = (ctypes.c_uint64 * count)()
        make_immortal(structs)
        self.address = ctypes.addressof(structs)
        self.words = memoryview(structs).cast("B").cast("Q")
        self.armed = memoryview(armed).cast("B").cast("Q")
        """each export's first word, as it is until the deleter is called."""
        self.exports: dict[int, Export] = {}
        """by slot."""
        self._count, self._used = count, 0
        self._first_words = np.frombuffer(self.words, np.uint64)[::_SLOT]
        self._armed = np.frombuffer(self.armed, np.uint64)

    @property
    def used(self) -> int:
        """Slots that have an export."""
        return min(self._used, self._count)

    def changed(self, start: int, stop: int) -> list[int]:
        """The slots in a range whose first word is another than it was made."""
        differs = self._first_words[start:stop] != self._armed[start:stop]
        slots: list[int] = (differs.nonzero()[0] + start).tolist()
        return slots

    def new(self, name: bytes, ndim: int) -> Export | None:
        """An export that was never used, if there is one."""
        slot, self._used = self._used, self._used + 1  # in one line, so that nobody has the same
        if slot >= self._count:
            return None
        return Export(self, slot, name, ndim)


class Export:
    """A struct that a consumer holds or may hold, and what it keeps alive meanwhile."""

    __slots__ = (
        "_armed",
        "_given",
        "_numbers",
        "_slot",
        "_tensor",
        "address",
        "capsule",
        "capsule_name",
        "first",
        "is_held",
        "key",
        "name",
        "owner",
        "shelf",
        "words",
    )

    def __init__(self, slab: _Slab, slot: int, name: bytes, ndim: int) -> None:
        self.name = name
        self.key = (name, ndim)
        self.owner: Any = None
        """what lives as long as the export is in use."""
        self.is_held = False
        """whether a consumer has it, or may have."""
        self.shelf: Any = None
        """where the pool keeps it for the next tensor of its shape and dtype."""
        self.capsule: Any = None
        """one that torch has emptied, to be filled again."""
        self.capsule_name: Any = None
        """the word in it that says so."""
        self.words, self.first = slab.words, slot * _SLOT
        """``words[first]`` is GIVEN until the deleter is called, if the struct is versioned."""
        self.address = slab.address + self.first * _WORD
        self._armed, self._slot = slab.armed, slot
        self._given = GIVEN  # the first word of a struct that is in use
        self._numbers = (ctypes.c_int64 * max(2 * ndim, 1))()
        self._tensor = self.first
        if name == VERSIONED_NAME:
            self._tensor += _word_of(Versioned, "tensor")
        struct = Versioned if name == VERSIONED_NAME else Legacy
        self.words[self.first + _word_of(struct, "deleter")] = _DELETER
        # Strides are written always: DLPack 1.2 wants them even where the array is contiguous.
        start = ctypes.addressof(self._numbers)
        self.words[self._tensor + _word_of(DLTensor, "shape")] = start
        self.words[self._tensor + _word_of(DLTensor, "strides")] = start + ndim * _WORD
        slab.exports[slot] = self

    def describe(self, view: View, flags: int = 0) -> None:
        """Write in the struct what a consumer sees."""
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

    def full_capsule(self) -> Any:
        """A capsule with the struct for torch, which leaves it to us when it has emptied it."""
        if REUSES_CAPSULES and self.capsule is not None:
            self.capsule_name[0] = NAME_ADDRESS
        else:
            self.capsule = new_capsule(self.address, self.name, None)
            self.capsule_name = name_word(self.capsule)
        return self.capsule

    def give(self, owner: Any) -> None:
        """Have ``owner`` live until the deleter is called."""
        self.owner = owner
        self.is_held = True
        self.words[self.first] = self._armed[self._slot] = self._given

    def drop(self) -> None:
        """Do what the deleter does: there is no consumer after all."""
        self.words[self.first] = _DROPPED

    def settle(self) -> bool:
        """Put to rest what has come back; False if it has not, or another thread was first."""
        words, first, armed, slot = self.words, self.first, self._armed, self._slot
        is_back = False
        # In one line, as a debugger may let other threads run between two.
        if words[first] != armed[slot]: words[first], armed[slot], is_back = AT_REST, AT_REST, True  # noqa: E701  # fmt: skip
        return is_back

    def is_lost(self) -> bool:
        """Whether it is at rest, and not because it is ready for the next tensor."""
        if self._given == AT_REST:  # of no bytes, in a struct without a version
            return False
        shelf = self.shelf
        is_ready = shelf is not None and not shelf.is_gone and self in shelf.ready
        return self._armed[self._slot] == AT_REST and not is_ready

    def leave_shelf(self) -> None:
        """Be given by no shelf any more."""
        if self.shelf is not None:
            self.shelf.forget(self)
            self.shelf = None

    def end(self) -> bool:
        """Note that the consumer is done; False if one was before, and its deleter called twice."""
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
        self._idle: dict[Any, deque[Export]] = {}
        self._public: dict[Export, Any] = {}
        _exporters.append(self)

    @classmethod
    def obtain(cls) -> Exporter:
        """An exporter whose pool is gone, or a new one; none is ever freed."""
        try:
            return _retired.pop()
        except IndexError:
            return cls()

    def retire(self) -> None:
        """Leave this exporter, of which nothing is out, to another pool."""
        self.sweep()
        _retired.append(self)

    @property
    def exports(self) -> list[Export]:
        """All of them, in use or not."""
        return [export for slab in self._slabs for export in list(slab.exports.values())]

    def export(self, view: View, *, versioned: bool = True, flags: int = 0) -> Export:
        """An export that describes the view, to give."""
        key = (VERSIONED_NAME if versioned else LEGACY_NAME, len(view.shape))
        try:
            # The oldest first: a consumer that calls a deleter twice then hits one at rest.
            export = self._idle[key].popleft()
        except LookupError:
            export = self._new(*key)
        export.describe(view, flags)
        return export

    def come_back(self, *, everything: bool = True) -> list[Export]:
        """Those whose consumers are done, once; they are at rest now, and keep their owner.

        Args:
            everything: look at all; if not, at some thousand, and at all the others by turns.
        """
        for export, capsule in list(self._public.items()):
            # First the count: while it is ours alone no other thread can become its consumer.
            is_ours = sys.getrefcount(capsule) == _ONLY_OURS
            if not is_valid(capsule, export.name):
                self._public.pop(export, None)  # a consumer has it
            elif is_ours:
                export.drop()  # first: an interrupt in between has it dropped again
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
        """Whether it takes too long to look at every export in each call."""
        return len(self._slabs) > _SEEN_ALWAYS

    def _ranges(self, everything: bool) -> Iterator[tuple[_Slab, int, int]]:
        """The slots to look at."""
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
        """Have those come back again that an exception kept from being dealt with."""
        for export in self.exports:
            if export.owner is not None and export.is_lost():
                export.leave_shelf()  # which would give it before it is settled again
                export.is_held = True
                export.drop()

    def reclaim(self, export: Export) -> Any:
        """Leave an export at rest to another view; what it kept alive."""
        export.leave_shelf()
        owner, export.owner = export.owner, None  # last: until then it comes back again
        self._idle.setdefault(export.key, deque()).append(export)
        return owner

    def unshelve(self, owner: Any) -> None:
        """Have its exports come back to the books when their consumers are done."""
        for export in self.exports:
            if export.owner is owner:
                export.leave_shelf()

    def public_capsule(self, export: Export, owner: Any) -> Any:
        """A capsule for anyone, who may also drop it; ``owner`` lives meanwhile.

        It has no destructor, which would be Python code at any moment. We hold the capsule
        instead, and :meth:`come_back` looks whether we are the last.
        """
        capsule = new_capsule(export.address, export.name, None)
        self._public[export] = capsule
        export.give(owner)
        return capsule

    def sweep(self) -> None:
        """Let go of what no consumer holds any more."""
        for export in self.come_back():
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
"""all there are: an export in use keeps its owner, and so the pool, whatever becomes of those."""
_retired: list[Exporter] = []


def _references() -> int:
    """To an object that a dict, a list's tuple and a local name hold."""
    objects = {0: object()}
    for _, value in list(objects.items()):
        count = sys.getrefcount(value)
    return count


_ONLY_OURS = _references()


# A capsule that torch has taken is an empty one: only its name, one of its words, has changed.
# Writing that word again takes 0.04 us, a new capsule 0.35.


class _Capsule(ctypes.Structure):
    """CPython's PyCapsule from 3.1 on."""

    _fields_ = (
        ("references", ctypes.c_ssize_t),
        ("type", ctypes.c_void_p),
        ("pointer", ctypes.c_void_p),
        ("name", ctypes.c_void_p),
    )


NAME_ADDRESS: Any = ctypes.cast(ctypes.c_char_p(VERSIONED_NAME), ctypes.c_void_p).value


def name_word(capsule: Any) -> memoryview:
    """The word of a capsule that has the address of its name."""
    address = id(capsule) + _Capsule.name.offset
    return memoryview(ctypes.c_uint64.from_address(address)).cast("B").cast("Q")


def _is_known_layout() -> bool:
    """Whether capsules are as above, and the interpreter switches threads where we think."""
    capsule = new_capsule(_DELETER, VERSIONED_NAME, None)
    fields = _Capsule.from_address(id(capsule))
    is_as_above = (fields.pointer, fields.name) == (_DELETER, NAME_ADDRESS)
    has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    return is_as_above and sys.implementation.name == "cpython" and has_gil


REUSES_CAPSULES = _is_known_layout()
