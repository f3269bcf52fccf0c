"""The report of what was done to a model, what was left unchanged, and why."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from transforms.inputs.arguments import check_is_module
from transforms.rewrites import compiled_call, plain_tensors
from transforms.rewrites.packed import is_packed
from transforms.rewrites.undoing import Undo

__all__ = ["Entry", "NoEffectWarning", "Report", "SlowDtypeWarning", "report"]

_ATTRIBUTE = "_fusedoptim_report"
_GRAPH = "graph_mode"
_PACKING = "weights_prepack"
_LOST = "a copy computes without it: call transforms.optimize(model, graph_mode=True, inplace=True)"
_NAMES_SHOWN = 4
_LINES_SHOWN = 3  # of the changes; lines about things left unchanged are all shown


class SlowDtypeWarning(UserWarning):
    """``optimize`` was asked for a dtype in which this processor is slower than in float32."""


class NoEffectWarning(UserWarning):
    """A pass that was asked for by name changed nothing."""


class Entry(NamedTuple):
    """A module, parameter or optimizer that a pass changed or left unchanged."""

    where: str
    """The name in the model."""
    what: str
    """What was done, or why nothing was done."""
    done: bool = True
    """Whether it was changed."""
    bytes_saved: int = 0
    """Bytes that a forward pass or a step no longer reads from memory."""
    error: float | None = None
    """The relative error of a layer in INT8: the norm of the change of its output in calibration,
    divided by the norm of the output."""


class Report(NamedTuple):
    """What :func:`transforms.optimize` did to a model, by pass.

    ``print`` shows it as text, Jupyter as a table.
    """

    title: str
    """The model's class, and whether it was optimized for inference or training."""
    passes: Mapping[str, Sequence[Entry]]
    """Entries by the name of the knob, in the order in which the passes ran."""
    kept_bytes: int
    """Bytes of memory that keep the plain tensors for ``restore`` and ``state_dict``."""
    is_final: bool = False
    """Whether ``finalize`` has freed that memory."""
    seconds: Mapping[str, float] = {}
    """With a ``sample_input`` for inference: the seconds of a forward pass with it, of the plain
    model, of the model after each pass that changed something ("with conv_bn_folding"), before and
    after the passes that must pay, and of the optimized model."""
    errors: Mapping[str, float] = {}
    """With a ``sample_input`` for inference: how far the output was from the plain model's after a
    pass, for each whose effect was compared. It is the largest difference, divided by the largest
    value; for integers, the share that differs. After "dtype", the cast model is the plain one."""

    def done(self, knob: str) -> list[Entry]:
        """The changes of a pass; empty if it was off.

        Args:
            knob: the name of the pass in :attr:`passes`, such as "conv_bn_folding".
        """
        return [entry for entry in self.passes.get(knob, ()) if entry.done]

    def left(self, knob: str) -> list[Entry]:
        """What a pass left unchanged.

        Args:
            knob: the name of the pass in :attr:`passes`, such as "conv_bn_folding".
        """
        return [entry for entry in self.passes.get(knob, ()) if not entry.done]

    def bytes_saved(self, knob: str) -> int:
        """Bytes that a forward pass or a step no longer reads because of a pass.

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
        lines += self._footer()
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
        footer = "<br>".join(map(html.escape, self._footer()))
        return (
            f"<table><caption>{html.escape(self.title)}</caption><thead><tr>{header}</tr></thead>"
            f"<tbody>{''.join(rows)}</tbody></table><p>{footer}</p>"
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

    def _footer(self) -> list[str]:
        lines = []
        if self.seconds:
            times = (f"{seconds * 1e3:.3g} ms {when}" for when, seconds in self.seconds.items())
            lines.append(f"on the sample: {', '.join(times)}")
        if self.errors:
            errors = (f"{error:.2g} after {knob}" for knob, error in self.errors.items())
            lines.append(f"relative error of the output for the sample: {', '.join(errors)}")
        return [*lines, f"kept for restore() and state_dict(): {format_bytes(self.kept_bytes)}"]


def _grouped(entries: Iterable[Entry]) -> list[tuple[str, str]]:
    """Entries with equal texts, as the text and the names."""
    names: dict[str, list[str]] = {}
    for entry in entries:
        names.setdefault(entry.what, []).append(entry.where or "the model")
    return [(what, _shortened(where)) for what, where in names.items()]


def _shortened(names: Sequence[str]) -> str:
    if len(names) <= _NAMES_SHOWN:
        return ", ".join(names)
    return f"{', '.join(names[: _NAMES_SHOWN - 1])} and {len(names) - _NAMES_SHOWN + 1} more"


def format_bytes(size: float) -> str:
    """Format a size with three digits and a unit.

    Example:
        >>> format_bytes(0), format_bytes(1536), format_bytes(437_928_960)
        ('0 B', '1.54 kB', '438 MB')
    """
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def title_of(model: nn.Module) -> str:
    """The title of a model's report."""
    return f"{type(model).__name__} for {'training' if model.training else 'inference'}"


def merged(model: nn.Module, report: Report) -> Report:
    """``report``, with the changes of earlier calls."""
    passes = {knob: list(entries) for knob, entries in report.passes.items()}
    if (before := find(model)) is not None:
        for knob in before.passes:
            passes[knob] = [*before.done(knob), *passes.get(knob, before.left(knob))]
        report = report._replace(is_final=before.is_final)
    return report._replace(passes=passes)


def check_not_final(model: nn.Module) -> None:
    """Raise if ``model``, which is to be trained, was finalized, or contains such a model."""
    for name, module in model.named_modules():
        if (found := find(module)) is not None and found.is_final:
            raise ValueError(
                f"{name or 'the model'} was finalized, which is for inference only: optimize the "
                "plain model for training"
            )


def attach(model: nn.Module, report: Report | None) -> None:
    """Store the report in the model; None removes the one that it has."""
    if report is None:
        vars(model).pop(_ATTRIBUTE, None)
    else:
        vars(model)[_ATTRIBUTE] = report


def find(model: nn.Module) -> Report | None:
    """The report of an optimized model, if any."""
    return vars(model).get(_ATTRIBUTE)


def conclude(model: nn.Module, report: Report, undo: Undo) -> None:
    """Store the report of changes, and keep them; until then, ``undo`` undoes that too."""
    undo.callback(attach, model, find(model))
    attach(model, report)
    undo.keep()


def report(model: nn.Module) -> Report:
    """Return the report of what :func:`transforms.optimize` did, what it left unchanged, and why.

    Args:
        model: the model that ``optimize`` returned.

    Raises:
        TypeError: the model is not a module.
        ValueError: the model was not optimized, or has been restored.

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
        weights_prepack                   1     0          0 B
            weight packed at the first call that is large enough: 0
        fuse                              0     0          0 B
        kept for restore() and state_dict(): 1.03 kB
    """
    check_is_module(model)
    found = find(model)
    if found is None:
        raise ValueError(
            f"this {type(model).__name__} has no report: pass the model that "
            "transforms.optimize returned (with inplace=False, its argument is unchanged), "
            "unless it was restored already"
        )
    undone = {
        name: why
        for name, module in model.named_modules()
        if (rewrite := plain_tensors.find(module)) is not None
        if (why := rewrite.reason_undone(module)) is not None
    }
    passes = {
        knob: [
            entry._replace(what=f"undone: {undone[entry.where]}", done=False, bytes_saved=0)
            if entry.done and entry.where in undone
            else entry
            for entry in entries
        ]
        for knob, entries in found.passes.items()
    }
    if _PACKING in passes:
        packed = {name for name, module in model.named_modules() if is_packed(module)}
        passes[_PACKING] = [
            entry._replace(what="weight packed") if entry.done and entry.where in packed else entry
            for entry in passes[_PACKING]
        ]
    if compiled_call.is_lost(model) and _GRAPH in passes:
        done = [entry for entry in passes[_GRAPH] if entry.done]
        passes[_GRAPH] = [entry._replace(what=_LOST, done=False) for entry in done]
    return found._replace(passes=passes, kept_bytes=plain_tensors.kept_bytes(model))
