"""From channels last to channels first: the channels of consecutive pixels, in the output's dtype.

A launch's row is a run of pixels. Its reads of one pixel's channels are in the cache for as long
as it takes to write all of them.
"""

from __future__ import annotations

from fusedoptim.kernels.language import (
    Integer,
    Length,
    Output,
    RowInteger,
    Values,
    lane,
    lanes,
)

__all__ = ["channels_first"]


def channels_first(
    length: Length,
    size: RowInteger,
    values: Values,
    output: Output,
    channels: Integer,
    spacing: Integer,
) -> None:
    """``size`` pixels; those of the next channel lie ``spacing`` elements further."""
    c = 0
    while c < channels:
        i = lane()
        while i < size:
            output[c * spacing + i] = values[i * channels + c]
            i += lanes()
        c += 1
