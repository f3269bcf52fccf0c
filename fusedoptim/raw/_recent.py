"""Remembers facts about the tensors of the last few calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from fusedoptim.raw._pointers import PLAIN
from fusedoptim.step.unchanged import may_be_compared, tensor_guards

Fact = TypeVar("Fact")
_MOST_KNOWN = 8
_PATIENCE = 32  # after so many calls with new shapes, only one in so many is remembered


class Recent(Generic[Fact]):
    """Caches one derived value for each of the last few lists of arguments, of one length.

    Comparing a tensor, in C, with one that was checked before is faster than checking it.
    """

    def __init__(self, places: Sequence[int] | None = None) -> None:
        """``places`` are the positions of the tensors that are compared; None is all arguments."""
        self._places = places
        self._known: list[tuple[Callable[..., bool], object, Fact]] = []
        """For each call: what compares other tensors with its own, in all except addresses; its
        options; and the fact."""
        self._misses = 0

    def __reduce__(self) -> Any:
        return Recent, (self._places,)  # a copy knows nothing yet, in another process too

    def find(self, arguments: Sequence[Any], options: object = None) -> Fact | None:
        """The fact remembered about such arguments with equal options."""
        tensors = arguments if self._places is None else [arguments[i] for i in self._places]
        if not may_be_compared(tensors):
            return None
        for is_same, known_options, fact in self._known:
            if known_options == options and is_same(*tensors):
                self._misses = 0
                return fact
        return None

    def remember(
        self, arguments: Sequence[Any], find_out: Callable[[], Fact | None], options: object = None
    ) -> None:
        """Remember the result of ``find_out``, if all arguments are plain tensors; never None.

        This takes longer than a check, and is useless if each call has other shapes.
        """
        self._misses += 1
        if self._misses >= _PATIENCE and self._misses % _PATIENCE:
            return
        tensors = arguments if self._places is None else [arguments[i] for i in self._places]
        if not tensors or not PLAIN.issuperset(map(type, tensors)):
            return
        fact = find_out()
        if fact is not None:
            known = _comparison(tensors), options, fact
            self._known = [known, *self._known[: _MOST_KNOWN - 1]]


def _comparison(tensors: Sequence[Any]) -> Callable[..., bool]:
    first = {id(tensor): i for i, tensor in reversed([*enumerate(tensors)])}
    if len(first) == len(tensors):
        return tensor_guards(tensors).check
    # Torch's guards refuse a tensor that occurs twice.
    places = sorted(first.values())
    again = [(i, first[id(tensor)]) for i, tensor in enumerate(tensors) if i not in places]
    check = tensor_guards([tensors[i] for i in places]).check

    def is_same(*others: Any) -> bool:
        return all(others[i] is others[k] for i, k in again) and check(*[others[i] for i in places])

    return is_same
