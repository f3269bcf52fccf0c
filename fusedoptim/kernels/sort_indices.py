"""Sorts the indices of embedding bags, so that those of a row of the table lie together.

A key is an index of the table in its upper 32 bits, and its bag below. Radix sort, the least
significant digit first (Knuth, The Art of Computer Programming, volume 3, section 5.2.5): each pass
counts how often a digit has each value, adds up the counts to the place of each value's first key,
and moves the keys there in their order. So the sort is stable, and the keys of a row stay in the
order of its indices.
"""

from __future__ import annotations

from fusedoptim.kernels.language import Indices, RowFlag, RowInteger, Values, real

__all__ = ["sort_indices"]


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
    """A table's indices as keys, sorted by radix: the index, then 32 bits for its bag.

    A key of a weighted table has the position :math:`k` in place of the bag, which is in
    ``bags_of`` then. The sorted keys are in ``keys`` after an even number of ``passes``, else in
    ``spare``; ``sorted_count`` is how many there are without padding. ``factors`` gets
    :math:`f_b` of means.
    """
    digits = 1 << digit_bits
    mask = digits - 1
    i = 0
    while i < passes * digits:
        counters[i] = 0
        i += 1
    found = 0
    bag = 0
    while bag < bags:
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
    sorted_count[0] = found

    digit = 0
    source = keys
    target = spare
    while digit < passes:
        total = 0
        i = digit * digits
        while i < (digit + 1) * digits:
            size = counters[i]
            counters[i] = total
            total += size
            i += 1
        shift = 32 + digit * digit_bits
        i = 0
        while i < found:
            key = source[i]
            counter = digit * digits + ((key >> shift) & mask)
            place = counters[counter]
            target[place] = key
            counters[counter] = place + 1
            i += 1
        swapped = source
        source = target
        target = swapped
        digit += 1
