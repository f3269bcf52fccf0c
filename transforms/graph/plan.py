"""The plan of a captured graph: one function, and constants that are kept between calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from transforms.graph.aliases import roots, written_roots
from transforms.graph.autocast import cast_explicitly
from transforms.graph.batch_norms import NotFinite
from transforms.graph.bounds import are_as_assumed, values_to_compare
from transforms.graph.constants import Evaluator, Numbering, computed, inputs_of, positions
from transforms.graph.lowering import Counts, Lowered, Parts, Simplified, lowered, simplified
from transforms.graph.operators import has_fixed_shape, is_own
from transforms.graph.products import Product
from transforms.graph.recording import Layouts, Recorder
from transforms.graph.script import Script, can_be_scripted, script
from transforms.graph.sources import CannotWatch, Snapshot
from transforms.rewrites.packed import is_plain_call


class _Variant:
    """The function for inputs of one shape, or of any shape."""

    def __init__(self, captured: GraphModule, lowered: Lowered, numbering: Numbering) -> None:
        self.run: Callable[..., Any] = GraphModule(captured, lowered.graph, "Plan").forward
        self.lowered = lowered
        self.numbers = numbering.of(lowered.source, lowered.kept)
        """The numbers of its constants, which follow the captured graph's arguments."""


class _LaidOut(NamedTuple):
    """The function for inputs of one shape, with packed convolutions."""

    key: tuple[object, ...]
    """Shapes and strides of the inputs."""
    variant: _Variant
    layouts: Layouts
    compared: tuple[str, ...] | None
    """Values whose sizes the function returns too; None if not all need be finite."""


class _Kept:
    """Everything that was computed from one state of the sources."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.values: dict[int, Tensor] = {}
        """Constants by number."""
        self.arguments: dict[_Variant, list[Tensor]] = {}
        """The constants of each variant, in order."""
        self.scripts: dict[_Variant, Script | None] = {}
        """The C++ script that replaces each variant; None if there can be none."""
        self.calls = 0
        """The calls so far without a script."""
        self.is_examined = False
        """Whether :attr:`compared` is known."""
        self.compared: tuple[str, ...] | None = None
        """The values that show whether all are finite; None if none do."""


class Plan:
    """Computes what a captured graph does, for inference, with constants kept between calls.

    Wherever the result might differ, the captured graph itself runs: if a gradient is recorded, if
    a parameter may be written to unnoticed, and under ``torch.func``.
    """

    def __init__(self, captured: GraphModule, sources: Sequence[int], parts: Parts) -> None:
        self._captured = captured
        self._parts = parts
        self._plain: Callable[..., Any] = captured.forward
        self._sources = list(sources)
        self._folds = True
        """Whether BatchNorms and paddings are folded, as they are until a weight is infinite."""
        self._examines = parts.fuses
        """Whether values are shown to be finite, as they are until one exceeds its bound."""
        self._numbering = Numbering()
        self._kept: _Kept | None = None
        self._is_steady = True
        """Whether the latest call found the sources unchanged."""
        self._missed: tuple[object, ...] | None = None
        """The inputs' shapes, and strides, in the latest call that was not laid out for them."""
        self._misses = 0
        """How many such calls in a row had these shapes."""
        self._most_misses = 2
        """How many of them make the graph be laid out again."""
        self._patience = 0
        """How many calls of one state of the sources come before the next compilation."""
        known = set(sources)
        placeholders = [node for node in captured.graph.nodes if node.op == "placeholder"]
        self._inputs = [i for i in range(len(placeholders)) if i not in known]
        of = roots(captured.graph)
        changed = written_roots(captured.graph, of)
        self._written = [i for i, node in enumerate(placeholders) if node in changed]
        self._prepare()

    def _simplified(self) -> Simplified:
        """A copy of the captured graph, which lowering uses up."""
        return simplified(self._captured.graph, self._sources, self._folds, self._parts)

    def _prepare(self) -> None:
        """Lower the graph for inputs of any shape; a variant for one shape may follow later."""
        given = self._simplified()
        products = given.products
        self._lays_out = _is_laid_out(given.graph, products)
        """Whether variants are made for one shape of the inputs."""
        general = lowered(given, None)
        self._general = _Variant(self._captured, general, self._numbering)
        packed = products if self._lays_out else []
        weights = [node for each in packed for node in (each.weight, each.bias) if node]
        self._watched = inputs_of(general.source, [*general.kept, *weights])
        """The sources that constants are computed from, in this variant or a later one."""
        self._laid_out: _LaidOut | None = None  # replaced as a whole: threads may call one model

    @property
    def counts(self) -> Counts:
        """What was rewritten, for the shape of the latest inputs."""
        last = self._general if self._laid_out is None else self._laid_out.variant
        return last.lowered.counts

    def __call__(self, *args: Any) -> Any:
        """Compute what the captured graph does."""
        if not is_plain_call() or (torch.is_grad_enabled() and _needs_gradient(args)):
            return self._plain(*args)
        kept = self._current(args)
        if kept is None or self._overlaps(kept, args):
            return self._plain(*args)
        try:
            if self._lays_out:
                key, laid_out = self._key(args), self._laid_out
                if laid_out is not None and laid_out.key == key:
                    return self._run_laid_out(kept, laid_out, args)
                if self._is_to_be_laid_out(key):
                    return self._record(kept, key, args)
            return self._run(kept, self._general, args)
        except NotFinite:
            return self._without_folding(args)

    def forget(self) -> None:
        """Free what is kept between calls; a later call computes it again."""
        self._kept = None

    def _run(self, kept: _Kept, variant: _Variant, args: Sequence[Any]) -> Any:
        constants = kept.arguments.get(variant)
        if constants is None:
            constants = self._computed(kept, variant, args)
        return variant.run(*args, *constants)

    def _run_laid_out(self, kept: _Kept, laid_out: _LaidOut, args: Sequence[Any]) -> Any:
        compared = self._compared(kept, args)
        if laid_out.compared != compared:  # the weights have changed
            laid_out = self._lay_out(kept, laid_out.key, laid_out.layouts, args)
        compiled = self._script(kept, laid_out, args)
        result = self._run(kept, laid_out.variant, args) if compiled is None else compiled(args)
        if not compared:
            return result
        result, found = result[: -len(compared)], result[-len(compared) :]
        if are_as_assumed(found):
            return result
        self._examines, kept.compared = False, None  # further calls may exceed the bounds too
        return self._plain(*args)

    def _compared(self, kept: _Kept, args: Sequence[Any]) -> tuple[str, ...] | None:
        """The values that show, with the present weights, whether all are finite."""
        if not kept.is_examined:
            kept.compared = self._examined(args) if self._examines else None
            kept.is_examined = True
        return kept.compared

    @torch.no_grad()
    def _examined(self, args: Sequence[Any]) -> tuple[str, ...] | None:
        given = self._simplified()
        watched = set(self._watched)

        def evaluate(node: Node) -> Tensor | None:
            if not watched.issuperset(inputs_of(given.graph, [node])):
                return None
            found: Tensor = Evaluator(given.graph, args).evaluate(node)
            return found

        with torch.inference_mode(False):
            return values_to_compare(given.graph, given.constants, evaluate)

    def _current(self, args: Sequence[Any]) -> _Kept | None:
        """The kept results, if they belong to the sources' current values.

        After a change they are computed again, but not in each call if each follows a change.
        """
        kept = self._kept
        if kept is not None and kept.snapshot.matches(args):
            self._is_steady = True
            return kept
        was_steady, self._is_steady, self._kept = self._is_steady, False, None
        try:
            kept = _Kept(Snapshot(self._watched, args))
        except CannotWatch:
            self._is_steady = True
            return None
        self._kept = kept
        return kept if was_steady else None

    def _script(self, kept: _Kept, laid_out: _LaidOut, args: Sequence[Any]) -> Script | None:
        """The C++ script of a variant, if there is one.

        Compiling takes longer than many calls, so each compilation waits for more calls than the
        one before.
        """
        variant = laid_out.variant
        if variant in kept.scripts:
            return kept.scripts[variant]
        if kept.calls < self._patience:
            kept.calls += 1
            return None
        self._patience = 2 * self._patience + 2
        is_scripted = self._parts.fuses and not self._written  # oneDNN Graph fuses
        found = self._compiled(laid_out, args) if is_scripted else None
        kept.scripts[variant] = found
        return found

    def _compiled(self, laid_out: _LaidOut, args: Sequence[Any]) -> Script | None:
        given = self._simplified()
        if torch.is_autocast_enabled("cpu") and not cast_explicitly(given.graph, given.constants):
            return None
        products = given.products
        if not can_be_scripted(given.graph, given.constants, products):
            return None
        weights = {node for each in products for node in (each.weight, each.bias) if node}
        compared = laid_out.compared
        inner = lowered(given, laid_out.layouts, packs=False, compared=compared)
        fixed = {i for node, i in positions(inner.source).items() if node in weights}
        if not fixed.union(inputs_of(inner.source, inner.kept)) <= {*self._watched}:
            return None  # a change of these would not be noticed
        values = [*args, *computed(inner.source, inner.kept, args)]
        fixed |= set(range(len(args), len(values)))
        expected = self._plain(*args)
        dtype = products[0].dtype
        return script(
            self._captured, inner.graph, values, fixed, expected, dtype, compared is not None
        )

    def _computed(self, kept: _Kept, variant: _Variant, args: Sequence[Any]) -> list[Tensor]:
        """The constants of a variant; those that are missing are computed."""
        source, nodes = variant.lowered.source, variant.lowered.kept
        known = dict(kept.values)  # a copy: another thread may lay out again, and remove some
        missing = [i for i, n in enumerate(variant.numbers) if n not in known]
        values = computed(source, [nodes[i] for i in missing], args)
        found = {variant.numbers[i]: each for i, each in zip(missing, values)}
        kept.values.update(found)
        known |= found
        result = [known[number] for number in variant.numbers]
        kept.arguments[variant] = result
        return result

    def _key(self, args: Sequence[Any]) -> tuple[object, ...]:
        """Everything that the layouts of the convolutions' inputs depend on."""
        key: list[object] = [torch.get_num_threads()]
        for i in self._inputs:
            given = args[i]
            key += (given.shape, given.stride()) if isinstance(given, Tensor) else (given,)
        return tuple(key)

    def _is_to_be_laid_out(self, key: tuple[object, ...]) -> bool:
        """Count a call with a new shape; return whether it has come often enough in a row.

        Laying out takes longer than many calls, so each waits for more calls than the one before.
        """
        if self._laid_out is None:
            return True
        self._misses = self._misses + 1 if key == self._missed else 1
        self._missed = key
        if self._misses < self._most_misses:
            return False
        self._most_misses *= 2
        return True

    def _record(self, kept: _Kept, key: tuple[object, ...], args: Sequence[Any]) -> Any:
        """Run the graph once, and lower it for the layouts that occur."""
        given = self._simplified()
        folded = [node for node in given.graph.nodes if is_own(node)]
        computed(given.graph, folded, args)  # may raise NotFinite, so before anything is written
        recorder = Recorder(GraphModule(self._captured, given.graph), given.products)
        result = recorder.run(*args)
        self._lay_out(kept, key, recorder.layouts, args)
        return result

    def _lay_out(
        self, kept: _Kept, key: tuple[object, ...], layouts: Layouts, args: Sequence[Any]
    ) -> _LaidOut:
        given = self._simplified()
        before, compared = self._laid_out, self._compared(kept, args)
        made = lowered(given, layouts, compared=compared)
        variant = _Variant(self._captured, made, self._numbering)
        laid_out = self._laid_out = _LaidOut(key, variant, layouts, compared)
        if before is not None:
            kept.arguments.pop(before.variant, None)
            kept.scripts.pop(before.variant, None)
            for number in set(before.variant.numbers) - {*variant.numbers, *self._general.numbers}:
                kept.values.pop(number, None)
        return laid_out

    def _overlaps(self, kept: _Kept, args: Sequence[Any]) -> bool:
        """Whether the graph may write into a watched source through another argument."""
        return any(
            args[i].untyped_storage().data_ptr() in kept.snapshot.storages for i in self._written
        )

    def _without_folding(self, args: Sequence[Any]) -> Any:
        """Run the captured graph, and stop folding its BatchNorms."""
        self._folds, self._kept = False, None
        self._prepare()
        return self._plain(*args)


def _is_laid_out(graph: Graph, products: Sequence[Product]) -> bool:
    """Whether a graph gains by variants for one shape: for convolutions, or by C++ alone.

    In bfloat16 Linears take so little time that calling them counts. They run in C++ in graphs of
    one shape only; torch captures a graph for any shape once a second one comes.
    """
    if any(each.is_convolution for each in products):
        return True
    placeholders = (node for node in graph.nodes if node.op == "placeholder")
    return {each.dtype for each in products} == {torch.bfloat16} and all(
        map(has_fixed_shape, placeholders)
    )


def _needs_gradient(args: Sequence[Any]) -> bool:
    return any(isinstance(each, Tensor) and each.requires_grad for each in args)
