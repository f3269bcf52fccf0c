"""The interface of a pass, and the job that it works on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from torch import nn
from torch.optim import Optimizer

from transforms.inputs.options import Options
from transforms.reports import Entry
from transforms.rewrites import exchanged_class, plain_tensors
from transforms.rewrites.undoing import Undo
from transforms.tracing.asked import Asked


class Job(NamedTuple):
    """One call of :func:`transforms.optimize`, as its passes see it."""

    model: nn.Module
    """in training mode if there is an optimizer, in eval mode otherwise."""
    optimizer: Optimizer | None
    options: Options
    sample_input: Any
    """a tensor, a tuple of arguments, a dict of named ones, or None."""
    asked: Asked
    """the modules that must keep their classes and tensors, because forward asks for them."""
    undo: Undo
    """gets a callback that undoes each change, before the change is made; it can be repeated."""


class Pass:
    """One rewrite of a model, or of a model and its optimizer.

    A pass replaces the tensors inside Parameters, or the class of a module or optimizer. It never
    writes into a tensor, as someone else may hold it. It keeps its own records in ``vars(module)``,
    outside of ``state_dict()``. If checkpoints and moves must see the plain tensors, the record is
    a :class:`transforms.rewrites.plain_tensors.Rewrite`.
    """

    knob: str
    """The argument of :func:`transforms.optimize` that controls it, and its name in the report."""
    parts: ClassVar[Sequence[str]] = ()
    """Further such arguments, which turn parts of the pass off; they have no row in the report."""
    keeps_outputs: ClassVar[bool] = False
    """Whether the model's outputs stay the same, up to rounding; checked with a sample input."""

    must_pay: ClassVar[bool] = False
    """Whether the pass is undone if it does not make the sample faster.

    Adjacent passes of this kind are undone together; none is if the call asks for one by name.
    """

    def default(self, level: str) -> bool:
        """Whether the pass runs if its knob is None."""
        return level == "O1"

    def is_on(self, options: Options) -> bool:
        """Whether a call with these options runs the pass."""
        return options.knobs[self.knob]

    def run(self, job: Job) -> Sequence[Entry]:
        """Rewrite; return an entry for each thing that was changed or left alone."""
        raise NotImplementedError

    def undo(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Undo the pass for good, if it has changed anything; by default, all rewritten tensors.

        After an interrupt, another call finishes what is left: a module's record goes last.
        """
        plain_tensors.undo_all(model)


class ExchangingPass(Pass):
    """A pass that replaces the classes of modules, and does nothing else."""

    what: ClassVar[str]
    """What the new class of a module changes, for the report."""

    def exchange(
        self,
        job: Job,
        name: str,
        module: nn.Module,
        ours: type[nn.Module],
        objection: str | None,
        **attributes: object,
    ) -> Entry:
        """Replace a module's class, unless there is an objection; return the module's entry."""
        reason = objection or job.asked.objection(module)
        if reason is None:
            exchanged_class.exchange(module, ours, job.undo, **attributes)
        return Entry(name, reason or self.what, done=reason is None)

    def undo(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Restore the classes of all modules."""
        exchanged_class.revert_all(model)
