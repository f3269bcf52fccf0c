"""The geometry of a convolution: a number for each dimension, and where oneDNN crashes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn


def expanded(numbers: Any, count: int) -> tuple[int, ...] | None:
    """One number for each dimension, as torch reads an int or one number; None for a name."""
    if isinstance(numbers, int):
        return (numbers,) * count
    if not isinstance(numbers, tuple | list) or not all(isinstance(n, int) for n in numbers):
        return None
    return tuple(numbers) * count if len(numbers) == 1 else tuple(numbers)


class Window(NamedTuple):
    """How the window of a convolution moves: one number for each dimension."""

    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]


def window_of(given: Mapping[str, Any], count: int) -> Window | None:
    """The window of a call with these arguments; None if one of them is no number."""
    padding = expanded(given.get("padding", 0), count)
    stride = expanded(given.get("stride", 1), count)
    dilation = expanded(given.get("dilation", 1), count)
    if padding is None or stride is None or dilation is None:
        return None
    return Window(padding, stride, dilation)


def all_expanded(count: int, *given: Any) -> tuple[tuple[int, ...], ...] | None:
    """Several attributes of a module, expanded; None if one is a name."""
    for numbers in given:
        if type(numbers) is not tuple or len(numbers) != count:  # torch's modules have such tuples
            found = [expanded(each, count) for each in given]
            return None if None in found else tuple(each for each in found if each is not None)
    return given


def named_padding(name: str, taps: Sequence[int], dilation: Any) -> tuple[int, ...] | None:
    """The numbers for which ``"same"`` or ``"valid"`` stands; None if two ends' numbers differ."""
    steps = expanded(dilation, len(taps))
    if steps is None:
        return None
    both = [step * (n - 1) if name == "same" else 0 for step, n in zip(steps, taps)]
    if not all(isinstance(each, int) and each % 2 == 0 for each in both):
        return None
    return tuple(each // 2 for each in both)


def padding_of(module: Any) -> Any:
    """A convolution's padding, as numbers if there are such."""
    padding = module.padding
    if isinstance(padding, str):
        return named_padding(padding, module.weight.shape[2:], module.dilation) or padding
    return padding


OBJECTION = "has rows of padding alone for some inputs, for which oneDNN may crash"
"""Why a module is left alone for which :func:`may_crash` is true."""


def may_crash(module: Any) -> bool:
    """Whether oneDNN may read past an image in channels_last, or with a packed weight."""
    if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return False
    given: Any = module.kernel_size, module.stride, module.padding, module.dilation
    if isinstance(module.padding, str):  # torch pads by as much as the kernel needs
        return False
    return may_see_only_padding(*(n if isinstance(n, int) else n[-1] for n in given))


def leaves_outputs_unwritten(module: Any) -> bool:
    """Whether oneDNN in INT8 does not write outputs that see only padding."""
    if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) or isinstance(module.padding, str):
        return False
    given = module.padding, module.dilation, module.kernel_size
    numbers = all_expanded(module.weight.dim() - 2, *given)
    if numbers is None or module.in_channels != module.groups:
        return False
    return any(p > d * (taps - 1) for p, d, taps in zip(*numbers))


def objection(module: Any) -> str | None:
    """Why oneDNN's operators cannot compute a module with its padding; None if they can."""
    if may_crash(module):
        return OBJECTION
    if hasattr(module, "padding") and isinstance(padding_of(module), str):
        return f"has padding={module.padding!r}, which pads two ends by different numbers"
    if getattr(module, "padding_mode", "zeros") != "zeros":
        return f"has padding_mode={module.padding_mode!r}"
    return None


def may_see_only_padding(taps: int, stride: int, padding: int, dilation: int) -> bool:
    """Whether oneDNN may crash, given the numbers of the last dimension.

    It reads past an image if the kernel is dilated, and all outputs of a row, at least two, see
    only padding.
    """
    # Longer rows than these cannot lie between the places that are read.
    sizes = range(1, max(stride, dilation)) if dilation > 1 and padding > 0 else ()
    for size in sizes:
        outputs = (size + 2 * padding - dilation * (taps - 1) - 1) // stride + 1
        starts = range(-padding, -padding + outputs * stride, stride)
        places = (start + tap * dilation for start in starts for tap in range(taps))
        if outputs > 1 and not any(0 <= place < size for place in places):
            return True
    return False
