"""What was done to a model, what was left alone, and why."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import nn

__all__ = ["Entry", "NoEffectWarning", "Report", "report"]

_ATTRIBUTE = "_fusedoptim_report"
_NAMES_SHOWN = 4
_LINES_SHOWN = 3  # of what was done; all that was left is shown


class NoEffectWarning(UserWarning):
    """A pass that was asked for by name found nothing to do."""


class Entry(NamedTuple):
    """One module, parameter or optimizer that a pass changed or left alone."""

    where: str
    """its name in the model."""
    what: str
    """what was done to it, or why it was left alone."""
    done: bool = True
    """whether it was changed."""
    bytes_saved: int = 0
    """fewer bytes that a forward pass or a step reads from memory."""


class Report(NamedTuple):
    """What :func:`transforms.optimize` did to a model, pass by pass.

    ``print`` shows it as text, Jupyter as a table.
    """

    title: str
    """the model's class and what it was optimized for."""
    passes: Mapping[str, Sequence[Entry]]
    """by the name of the knob, in the order in which they ran."""
    kept_bytes: int
    """of memory that hold the plain values for ``restore`` and ``state_dict``."""
    is_final: bool = False
    """whether that memory was freed."""

    def done(self, knob: str) -> list[Entry]:
        """What a pass changed; nothing if it was off.

        Args:
            knob: the name of the pass in :attr:`passes`, such as "conv_bn_folding".
        """
        return [entry for entry in self.passes.get(knob, ()) if entry.done]

    def left(self, knob: str) -> list[Entry]:
        """What a pass looked at and left alone.

        Args:
            knob: the name of the pass in :attr:`passes`, such as "conv_bn_folding".
        """
        return [entry for entry in self.passes.get(knob, ()) if not entry.done]

    def bytes_saved(self, knob: str) -> int:
        """Fewer bytes that a forward pass or a step reads, by all that a pass changed.

        Args:
            knob: the name of the pass in :attr:`passes`, such as "dtype".
        """
        return sum(entry.bytes_saved for entry in self.done(knob))

    def __str__(self) -> str:
        header = ("pass", "done", "left", "bytes saved")
        rows = [header, *self._totals()]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = [self.title]
        for knob, row in zip((None, *self.passes), rows):
            cells = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))
            lines.append("  ".join([row[0].ljust(widths[0]), *cells]))
            if knob is not None:
                lines += [f"    {line}" for line in self._details(knob)]
        lines.append(self._footer())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = []
        for knob, row in zip(self.passes, self._totals()):
            cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
            details = "<br>".join(map(html.escape, self._details(knob)))
            rows.append(f"<tr>{cells}<td style='text-align: left'>{details}</td></tr>")
        header = "".join(
            f"<th>{name}</th>" for name in ("pass", "done", "left", "bytes saved", "details")
        )
        return (
            f"<table><caption>{html.escape(self.title)}</caption><thead><tr>{header}</tr></thead>"
            f"<tbody>{''.join(rows)}</tbody></table><p>{html.escape(self._footer())}</p>"
        )

    def _totals(self) -> list[tuple[str, str, str, str]]:
        return [
            (
                knob,
                str(len(self.done(knob))),
                str(len(self.left(knob))),
                format_bytes(self.bytes_saved(knob)),
            )
            for knob in self.passes
        ]

    def _details(self, knob: str) -> list[str]:
        done = [f"{what}: {names}" for what, names in _grouped(self.done(knob))]
        if len(done) > _LINES_SHOWN:
            done[_LINES_SHOWN:] = [f"and {len(done) - _LINES_SHOWN} more"]
        left = [f"left: {names}: {why}" for why, names in _grouped(self.left(knob))]
        return [*done, *left]

    def _footer(self) -> str:
        return f"kept for restore() and state_dict(): {format_bytes(self.kept_bytes)}"


def _grouped(entries: Iterable[Entry]) -> list[tuple[str, str]]:
    """The names of entries that say the same, with what they say."""
    names: dict[str, list[str]] = {}
    for entry in entries:
        names.setdefault(entry.what, []).append(entry.where or "the model")
    return [(what, _shortened(where)) for what, where in names.items()]


def _shortened(names: Sequence[str]) -> str:
    if len(names) <= _NAMES_SHOWN:
        return ", ".join(names)
    return f"{', '.join(names[: _NAMES_SHOWN - 1])} and {len(names) - _NAMES_SHOWN + 1} more"


def format_bytes(size: float) -> str:
    """Three digits or so, in the unit that suits.

    Example:
        >>> format_bytes(0), format_bytes(1536), format_bytes(437_928_960)
        ('0 B', '1.54 kB', '438 MB')
    """
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def merged(model: nn.Module, report: Report) -> Report:
    """``report`` with what earlier calls did to the model."""
    passes = {knob: list(entries) for knob, entries in report.passes.items()}
    if (before := find(model)) is not None:
        for knob in before.passes:
            passes[knob] = [*before.done(knob), *passes.get(knob, before.left(knob))]
    return report._replace(passes=passes)


def attach(model: nn.Module, report: Report) -> None:
    """Keep ``report`` on the model."""
    vars(model)[_ATTRIBUTE] = report


def find(model: nn.Module) -> Report | None:
    """The report of a model that has been optimized."""
    return vars(model).get(_ATTRIBUTE)


def detach(model: nn.Module) -> None:
    """Forget the report."""
    vars(model).pop(_ATTRIBUTE, None)


def report(model: nn.Module) -> Report:
    """What :func:`transforms.optimize` did to ``model``, what it left alone and why.

    Args:
        model: what ``optimize`` returned.

    Raises:
        ValueError: the model was not optimized, or was restored since.

    Example:
        >>> import torch
        >>> from fusedoptim import transforms
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> model = transforms.optimize(model.eval())
        >>> print(transforms.report(model))
        Sequential for inference
        pass                           done  left  bytes saved
        conv_bn_folding                   1     0        128 B
            folded into 0: 1
        linear_bn_folding                 0     0          0 B
        replace_dropout_with_identity     0     0          0 B
        auto_channels_last                1     0          0 B
            weight in channels_last: 0
        kept for restore() and state_dict(): 1.03 kB
    """
    found = find(model)
    if found is None:
        raise ValueError(
            f"this {type(model).__name__} has no report: pass the model that "
            "transforms.optimize returned (with inplace=False, its argument is left as it was)"
        )
    return found
