"""Pass: compute the graphs that torch.compile captures of the model by plans of calls."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from transforms.graph import backend
from transforms.graph.lowering import Parts
from transforms.graph.plan import Plan
from transforms.inputs.options import FOLD_CONSTANTS, FUSE, GRAPH_MODE
from transforms.inputs.sample import caller, trial
from transforms.passes.protocol import Job, Pass
from transforms.reports import Entry
from transforms.rewrites import compiled_call


class GraphMode(Pass):
    """Compiles the model's calls by our backend of torch.compile.

    It is the last pass, so that it captures the result of the others. Nothing is captured before
    the first call; with a sample input, the pass makes that call.
    """

    knob = GRAPH_MODE
    parts = (FOLD_CONSTANTS,)
    keeps_outputs = True

    def default(self, level: str) -> bool:
        """Off, because the first call of each kind is slow."""
        return False

    def run(self, job: Job) -> list[Entry]:
        """Compile; the entries are the model, and each place where a graph ends early."""
        model = job.model
        reason = backend.why_absent() or _objection(model)
        if reason is not None:
            return [Entry("", reason, done=False)]
        if compiled_call.is_entered(model):
            return []
        was_lost = compiled_call.is_lost(model)
        refused = job.options.refused
        listener = _Listener(Parts(FUSE not in refused, FOLD_CONSTANTS not in refused))
        job.undo.callback(compiled_call.leave, model)
        compiled_call.enter(model, listener, listener.forget)
        if job.sample_input is None:
            entries = [Entry("", "captured at the first call")]
        else:
            entries = _captured(job, listener)
        if not any(each.done for each in entries):
            compiled_call.leave(model)
        return [] if was_lost else entries

    def undo(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Call the model as before."""
        compiled_call.leave(model)


class _Listener:
    """The backend, which knows its plans, and lists those that it makes while someone listens."""

    __name__ = "fusedoptim"

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._plans: list[Plan] | None = None
        self._all: weakref.WeakSet[Plan] = weakref.WeakSet()

    def __call__(self, graph: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        result: Callable[..., Any]
        result = backend.plan(graph, example_inputs, self._parts) or graph.forward
        if isinstance(result, Plan):
            self._all.add(result)
            if self._plans is not None:
                self._plans.append(result)
        return result

    def forget(self) -> None:
        """Free what the plans keep between calls."""
        for each in self._all:
            each.forget()

    @contextmanager
    def listening(self) -> Iterator[list[Plan]]:
        """Collect the plans that are made inside the with block."""
        self._plans = []
        try:
            yield self._plans
        finally:
            self._plans = None


def _objection(model: nn.Module) -> str | None:
    device = next((t.device.type for t in model.parameters()), "cpu")
    return None if device == "cpu" else f"is on {device}: the backend is for the CPU"


def _captured(job: Job, listener: _Listener) -> list[Entry]:
    """Call the model with the sample, and say what was captured."""
    from torch._dynamo.utils import counters  # slow to import

    before = _breaks(counters)
    with listener.listening() as plans:
        try:
            with torch.no_grad(), trial(job.model, job.options.dtype):
                caller(job.model, job.sample_input)()
        except Exception as error:  # of any class: torch.compile's, or the model's own
            return [Entry("", f"torch.compile failed: {_first_line(error)}", done=False)]
    entries = [
        Entry("", f"a graph ends early: {_first_line(why)}", done=False)
        for why in _breaks(counters) - before
    ]
    if not plans:
        why = "torch.compile captured no graph, or only graphs that enter torch.func"
        return [*entries, Entry("", why, done=False)]
    return [Entry("", _summary(plans)), *entries]


def _breaks(counters: Mapping[str, Counter[str]]) -> Counter[str]:
    """How often dynamo ended a graph early, by reason."""
    return counters["unimplemented"] + counters["graph_break"]


def _first_line(text: object) -> str:
    return str(text).strip().split("\n")[0]


def _summary(plans: Sequence[Plan]) -> str:
    """What was rewritten in all graphs."""
    totals = [sum(column) for column in zip(*(each.counts for each in plans))]
    names = (
        *("BatchNorms folded", "paddings folded"),
        *("products packed", "activations fused", "additions fused"),
        *("results in place", "constants kept", "attentions as products", "lookups simplified"),
    )
    parts = [f"{name}: {total}" for total, name in zip(totals, names) if total]
    graphs = "1 graph" if len(plans) == 1 else f"{len(plans)} graphs"
    return "; ".join([graphs, ", ".join(parts)] if parts else [graphs])
