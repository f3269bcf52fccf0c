"""The result of an examination: facts, and problems with their cures."""

from __future__ import annotations

import html
import json
import textwrap
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from fusedoptim._version import __version__

SCHEMA = 1
_WIDTH = 88  # of a line of facts; paths may be longer


class Problem(NamedTuple):
    """Something that is wrong or unexpected, and what to do about it."""

    level: str
    """"error" if steps fail or compute wrongly, else "warning"."""
    message: str
    """What is wrong, with the values."""
    cure: str
    """What to do, as a command where there is one."""


def error(message: str, cure: str) -> Problem:
    """Steps fail or compute wrong results."""
    return Problem("error", message, cure)


def warning(message: str, cure: str) -> Problem:
    """Steps work, but more slowly or not as expected."""
    return Problem("warning", message, cure)


class Section(NamedTuple):
    """The result of one check."""

    name: str
    """Name of the check."""
    facts: dict[str, Any]
    """Facts by name: strings, numbers, lists or dicts of them."""
    problems: list[Problem]
    """What is wrong, each with its cure."""
    details: Mapping[str, Any] = {}
    """Facts that are too long to print, for JSON."""


class Report:
    """The result of an examination, which prints as a page in a terminal and in a notebook.

    Made by :func:`examine`.
    """

    def __init__(self, sections: Iterable[Section], seconds: float) -> None:
        self.sections = tuple(sections)
        """One section for each check."""
        self.seconds = seconds
        """Time that the examination took."""

    @property
    def problems(self) -> tuple[Problem, ...]:
        """All problems without duplicates, errors first."""
        found = dict.fromkeys(p for section in self.sections for p in section.problems)
        return tuple(sorted(found, key=lambda problem: problem.level != "error"))

    @property
    def verdict(self) -> str:
        """The worst problem's level: "ok", "warning" or "error"."""
        return self.problems[0].level if self.problems else "ok"

    @property
    def exit_code(self) -> int:
        """1 if there is an error, else 0."""
        return int(self.verdict == "error")

    def as_dict(self) -> dict[str, Any]:
        """The report as an object of JSON.

        Returns:
            ``schema`` (1; counts up when a key changes its meaning), ``fusedoptim`` (the version),
            ``verdict``, ``seconds``, ``sections``: by name, each a dict of facts by name, and
            ``problems``: a list of dicts with ``section``, ``level``, ``message`` and ``cure``.
        """
        return {
            "schema": SCHEMA,
            "fusedoptim": __version__,
            "verdict": self.verdict,
            "seconds": round(self.seconds, 2),
            "sections": {
                section.name: {**section.facts, **section.details} for section in self.sections
            },
            "problems": [
                {"section": section.name, **problem._asdict()}
                for section in self.sections
                for problem in section.problems
            ],
        }

    def json(self) -> str:
        """:meth:`as_dict`, as text."""
        return json.dumps(self.as_dict(), indent=2)

    def __repr__(self) -> str:
        lines = []
        for section in self.sections:
            rows = _rows(section.facts)
            width = max((len(name) for name, _ in rows), default=0)
            lines += [section.name, *(f"  {name:<{width}}  {line}" for name, line in rows), ""]
        for problem in self.problems:
            lines += [f"{problem.level}: {problem.message}", f"  cure: {problem.cure}", ""]
        return "\n".join([*lines, self._summary()])

    def _summary(self) -> str:
        levels = [problem.level for problem in self.problems]
        counts = {level: levels.count(level) for level in ("error", "warning")}
        parts = [f"{n} {level}{'s' * (n > 1)}" for level, n in counts.items() if n]
        return f"{' and '.join(parts) or 'no problems'} ({self.seconds:.1f} s)"

    def _repr_html_(self) -> str:
        problems = "".join(
            f"<li><b>{problem.level}</b>: {html.escape(problem.message)}<br>"
            f"cure: <code>{html.escape(problem.cure)}</code></li>"
            for problem in self.problems
        )
        sections = "".join(
            f"<details><summary>{html.escape(section.name)}</summary><table>"
            + "".join(
                f"<tr><td>{html.escape(name)}</td><td>{html.escape(line)}</td></tr>"
                for name, line in _rows(section.facts)
            )
            + "</table></details>"
            for section in self.sections
        )
        return f"<p>{self._summary()}</p><ul>{problems}</ul>{sections}"


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Facts as lines; a long fact takes several, of which only the first has its name."""
    rows: list[tuple[str, str]] = []
    for name, value in facts.items():
        text = _text(value)
        lines = textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
        rows += zip([name, *[""] * (len(lines) - 1)], lines)
    return rows


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        value = [f"{key}: {_text(part)}" for key, part in value.items()]
    if isinstance(value, list):
        value = ", ".join(map(_text, value))
    return "none" if value in (None, "") else str(value)


def guarded(name: str, check: Callable[[], Section]) -> Section:
    """The result of ``check``, or the problem that it failed."""
    try:
        return check()
    except Exception as failure:  # a defect of the check must not hide what the others find
        line = traceback.format_exception_only(failure)[-1].strip()
        return Section(name, {}, [error(f"the check of {name} failed: {line}", REPORT_IT)])


REPORT_IT = "report it with the output of `python -m fusedoptim doctor --json`"
