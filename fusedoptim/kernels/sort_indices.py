"""Sorts the indices of embedding bags, so that those of a row of the table lie together.

A key is an index of the table in its upper 32 bits, and its bag below. Radix sort, the least
significant digit first (Knuth, The Art of Computer Programming, volume 3, section 5.2.5): each pass
counts how often a digit has each value, adds up the counts to the place of each value's first key,
and moves the keys there in their order. So the sort is stable, and the keys of a row stay in the
order of its indices.

One work item sorts a table by itself (:func:`sort_indices`), or several sort it together, a part
each, and get the same keys in the same order (Zagha and Blelloch, Radix Sort for Vector
Multiprocessors, 1991): each counts the digits of its part (:func:`write_keys` at first, then
:func:`count_keys`), and a launch later moves its keys (:func:`move_keys`) behind those of smaller
digits and those of the same digit in earlier parts.
"""

from __future__ import annotations

from typing import Any

from fusedoptim.kernels.language import Indices, RowFlag, RowInt, RowInteger, Values, real

__all__ = ["count_keys", "move_keys", "sort_indices", "write_keys"]


def sort_indices(
    indices: Indices,
    offsets: Indices,
    keys: Indices,
    spare: Indices,
    counters: Indices,
    factors: Values,
    bags_of: Indices,
    sorted_count: Indices,
    bags: RowInteger,
    bags_left: RowInteger,
    count: RowInteger,
    padding: RowInteger,
    passes: RowInteger,
    digit_bits: RowInteger,
    is_weighted: RowFlag,
    is_mean: RowFlag,
) -> None:
    """A table's indices as sorted keys.

    A key of a weighted table has the position :math:`k` in place of the bag, which is in
    ``bags_of`` then. The sorted keys are in ``keys`` after an even number of ``passes``, else in
    ``spare``; ``sorted_count`` is how many there are without padding. ``factors`` gets
    :math:`f_b` of means.
    """
    table = indices, offsets, factors, bags_of, bags_left, count, padding, is_weighted, is_mean
    found = keys_of_bags(table, keys, counters, 0, bags, 0, passes, digit_bits)
    sorted_count[0] = found
    digits = 1 << digit_bits
    digit = 0
    source = keys
    target = spare
    while digit < passes:
        sums_before(counters, digit * digits, digits)
        shift = 32 + digit * digit_bits
        move(source, target, counters, digit * digits, 0, found, shift, digits - 1)
        swapped = source
        source = target
        target = swapped
        digit += 1


def write_keys(
    indices: Indices,
    offsets: Indices,
    keys: Indices,
    counters: Indices,
    factors: Values,
    bags_of: Indices,
    part: Indices,
    first: RowInteger,
    last: RowInteger,
    bags: RowInteger,
    bags_left: RowInteger,
    count: RowInteger,
    padding: RowInteger,
    digit_bits: RowInteger,
    is_weighted: RowFlag,
    is_mean: RowFlag,
) -> None:
    """The keys of the bags that begin from the table's index ``first`` to before ``last``.

    ``counters`` are how often the lowest digit has each value, and ``part`` is where its keys begin
    and end.
    """
    start = offsets[0] if bags > 0 else 0
    bag = bag_from(offsets, bags, start + first)
    stop_bag = bag_from(offsets, bags, start + last)
    begin = offsets[bag] - start if bag < bags else 0
    part[0] = begin
    table = indices, offsets, factors, bags_of, bags_left, count, padding, is_weighted, is_mean
    part[1] = keys_of_bags(table, keys, counters, bag, stop_bag, begin, 1, digit_bits)


def count_keys(
    keys: Indices,
    counters: Indices,
    part: Indices,
    sorted_count: RowInt,
    first: RowInteger,
    last: RowInteger,
    shift: RowInteger,
    digit_bits: RowInteger,
) -> None:
    """How often the digit above ``shift`` bits has each value in a part of the keys."""
    digits = 1 << digit_bits
    clear(counters, digits)
    begin = first if first < sorted_count else sorted_count
    end = last if last < sorted_count else sorted_count
    part[0] = begin
    part[1] = end
    while begin < end:
        counters[(keys[begin] >> shift) & (digits - 1)] += 1
        begin += 1


def move_keys(
    keys: Indices,
    spare: Indices,
    counters_of_all: Indices,
    places: Indices,
    part: Indices,
    sorted_count: Indices,
    parts: RowInteger,
    parts_before: RowInteger,
    shift: RowInteger,
    digit_bits: RowInteger,
) -> None:
    """Move a part of ``keys`` to their places in ``spare``.

    ``counters_of_all`` are those of the table's parts, and ``places`` is room for one part's. The
    first part stores how many keys there are.
    """
    digits = 1 << digit_bits
    clear(places, digits)
    add_counters(places, counters_of_all, parts, digits)
    total = sums_before(places, 0, digits)
    if parts_before == 0:
        sorted_count[0] = total
    add_counters(places, counters_of_all, parts_before, digits)
    move(keys, spare, places, 0, part[0], part[1], shift, digits - 1)


def keys_of_bags(
    table: Any,
    keys: Indices,
    counters: Indices,
    bag: int,
    stop_bag: int,
    found: int,
    passes: int,
    digit_bits: int,
) -> int:
    """Write the keys of some bags from place ``found`` on, and count their digits.

    Returns:
        where the keys end.
    """
    indices, offsets, factors, bags_of, bags_left, count, padding, is_weighted, is_mean = table
    digits = 1 << digit_bits
    mask = digits - 1
    clear(counters, passes * digits)
    while bag < stop_bag:
        before = found
        k = offsets[bag]
        end = count
        if bag + 1 < bags_left:
            end = offsets[bag + 1]
        while k < end:
            index = indices[k]
            if index != padding:
                payload = bag
                if is_weighted:
                    payload = k
                    bags_of[k] = bag
                keys[found] = (index << 32) | payload
                found += 1
                digit = 0
                while digit < passes:
                    counter = digit * digits + ((index >> (digit * digit_bits)) & mask)
                    counters[counter] += 1
                    digit += 1
            k += 1
        if is_mean:
            factors[bag] = real(1)
            if found > before:
                terms = real(0)
                while before < found:
                    terms += real(1)
                    before += 1
                factors[bag] = real(1) / terms
        bag += 1
    return found


def clear(counters: Indices, count: int) -> None:
    """Set the first ``count`` counters to zero."""
    i = 0
    while i < count:
        counters[i] = 0
        i += 1


def bag_from(offsets: Indices, bags: int, least: int) -> int:
    """The first bag that begins at ``least`` or later."""
    low = 0
    while low < bags:
        middle = (low + bags) >> 1
        if offsets[middle] < least:
            low = middle + 1
        else:
            bags = middle
    return low


def add_counters(places: Indices, counters: Indices, parts: int, digits: int) -> None:
    """Add the counters of the first ``parts`` parts to ``places``."""
    i = 0
    while i < parts * digits:
        places[i & (digits - 1)] += counters[i]
        i += 1


def sums_before(counters: Indices, first: int, digits: int) -> int:
    """Replace each counter by the sum of those before; return the sum of all."""
    total = 0
    i = first
    while i < first + digits:
        size = counters[i]
        counters[i] = total
        total += size
        i += 1
    return total


def move(
    source: Indices,
    target: Indices,
    places: Indices,
    first: int,
    i: int,
    stop: int,
    shift: int,
    mask: int,
) -> None:
    """Move keys to the places of their digits, which go up; the first is ``places[first]``."""
    while i < stop:
        key = source[i]
        digit = first + ((key >> shift) & mask)
        place = places[digit]
        target[place] = key
        places[digit] = place + 1
        i += 1
