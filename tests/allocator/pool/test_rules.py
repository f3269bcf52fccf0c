"""Valid rules of a pool never hand memory out twice; invalid ones are refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator import Pool, Rules
from tests.allocator.helpers import MIB, FaultyDriver

roundings = st.integers(9, 21).map(lambda exponent: 2**exponent)
counts = st.one_of(st.just(0), st.integers(0, 8 * MIB))


@st.composite
def valid_rules(draw: Any) -> Rules:
    rounding = draw(roundings)
    segment = draw(st.integers(1, 2 * MIB // rounding)) * rounding
    return Rules(
        rounding=rounding,
        small_limit=draw(st.one_of(st.just(segment), st.integers(0, segment))),
        small_segment=segment,
        over_reserve=draw(st.floats(0, 2)),
        slack=draw(counts),
        replace_limit=draw(counts),
        replace_rest=draw(st.floats(0, 2)),
    )


requests = st.lists(
    st.tuples(
        st.integers(1, 3 * MIB),
        st.integers(9, 21).map(lambda exponent: 2**exponent),
        st.booleans(),
    ),
    max_size=30,
)


@given(rules=valid_rules(), requests=requests)
@settings(derandomize=True, database=None, deadline=None, max_examples=60)
def test_live_allocations_never_overlap(
    rules: Rules, requests: list[tuple[int, int, bool]]
) -> None:
    driver = FaultyDriver()
    pool = Pool(driver=driver, rules=rules)
    held: list[Any] = []
    for nbytes, alignment, is_released in requests:
        memory = pool.allocate(nbytes, alignment=alignment)
        assert memory.address % alignment == 0
        end = memory.address + nbytes
        assert any(
            start <= memory.address and end <= start + size
            for start, (size, _) in driver.held.items()
        )
        for other in held:
            assert end <= other.address or other.address + other.nbytes <= memory.address
        held.append(memory)
        if is_released:
            held.pop(len(held) // 2).release()
    assert pool.memory_reserved() == driver.reserved
    while held:
        held.pop().release()
    pool.close(force=True)
    assert not driver.held


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"small_limit": 4 * MIB}, r"small_limit=4194304 .* small_segment=2097152; .*at most"),
        ({"small_segment": 1024}, r"small_limit=65536 .* small_segment=1024; .*at most"),
        ({"rounding": 0}, "rounding=0 .*power of two"),
        ({"rounding": 256}, "rounding=256 .*at least 512"),
        ({"rounding": 1000}, "rounding=1000 .*power of two"),
        ({"rounding": 4 * MIB, "small_segment": 8 * MIB}, "rounding=4194304 .*at most 2097152"),
        ({"rounding": -512}, "rounding=-512"),
        ({"small_segment": 2 * MIB + 1}, "small_segment=2097153 .*multiple of rounding=512"),
        ({"small_segment": 3 * MIB, "rounding": 2 * MIB}, "multiple of rounding=2097152"),
        ({"small_segment": 0, "small_limit": 0}, "small_segment=0 .*positive"),
        ({"small_limit": -1}, "small_limit=-1 is negative"),
        ({"slack": -1}, "slack=-1 is negative"),
        ({"replace_limit": -1}, "replace_limit=-1 is negative"),
        ({"over_reserve": -0.1}, "over_reserve=-0.1 .*finite"),
        ({"over_reserve": float("nan")}, "over_reserve=nan .*finite"),
        ({"over_reserve": float("inf")}, "over_reserve=inf .*finite"),
        ({"replace_rest": float("nan")}, "replace_rest=nan .*finite"),
        ({"replace_rest": -1}, "replace_rest=-1 .*finite"),
    ],
)
def test_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rules(**fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rounding", 512.0),
        ("small_limit", "64KiB"),
        ("small_segment", None),
        ("slack", True),
        ("replace_limit", 1e6),
        ("over_reserve", "3%"),
        ("over_reserve", False),
        ("replace_rest", None),
    ],
)
def test_of_another_type(field: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{field}={value!r} is not a"):
        Rules(**{field: value})


def test_large_rounding_serves_every_alignment() -> None:
    """Blocks are multiples of 4 KiB; the driver's memory is a multiple of 512 bytes only."""
    pool = Pool(driver=FaultyDriver(), rules=Rules(rounding=4096, small_limit=0, slack=0))
    held = [pool.allocate(100_000, alignment=2048) for _ in range(20)]
    held.sort(key=lambda memory: memory.address)
    assert all(a.address + a.nbytes <= b.address for a, b in itertools.pairwise(held))
