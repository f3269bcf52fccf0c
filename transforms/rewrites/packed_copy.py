"""The packed copy of a module's weights, and when it may be used."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedoptim._torch_private import TensorGuards
from fusedoptim.step.unchanged import tensor_guards
from transforms.rewrites.watched_parameter import (
    detached,
    exposures,
    is_exposed,
    settle,
    state,
    watch,
)

Geometry = tuple[Any, ...]
"""The geometry of a convolution, in the order of its operator; empty for other modules."""


class Signature(NamedTuple):
    """What a packed copy depends on."""

    state: tuple[tuple[int, int, int], ...]
    """The state of each plain weight."""
    dtype: torch.dtype
    """The dtype in which the product is computed: autocast's, or the weight's."""
    geometry: Geometry
    layout: tuple[object, ...]
    """The shape and strides of a convolution's input; empty for a Linear."""


class Packed(NamedTuple):
    """Packed weights, and what they were made from."""

    signature: Signature
    sources: tuple[Callable[[], Tensor | None], ...]
    """Each returns a plain weight, or None if that is gone."""
    weights: Sequence[Tensor]
    trials: dict[object, bool]
    """Whether oneDNN computes an activation as torch does, by all that this depends on."""

    @property
    def weight(self) -> Tensor:
        """The packed weight of a module that has one."""
        return self.weights[0]


class CallState(NamedTuple):
    """What the checks of a call depended on, besides the module and its weights' values."""

    guards: TensorGuards
    """Of the input and the parameters, and of torch's modes: inference, autocast and others."""
    param_count: int
    exposures: int
    """The number of the latest use of any watched Parameter before the checks."""
    autocast: torch.dtype
    """Autocast's dtype, whether or not it is enabled."""

    def fits(self, x: Tensor, params: Sequence[Tensor]) -> bool:
        """Whether a call with these tensors would pass the same checks."""
        return (
            self.exposures == exposures()
            and self.autocast == torch.get_autocast_dtype("cpu")
            and self.param_count == len(params)
            and type(x) is Tensor
            and not x.is_nested  # torch's guards end the process at a nested tensor
            and self.guards.check(x, *params)
        )


def call_state(x: Tensor, params: Sequence[Tensor], latest: int) -> CallState:
    """The state of a call that passed all checks.

    Args:
        x: the input.
        params: the parameters.
        latest: what :func:`exposures` returned before the checks: a use since then makes the next
            call check everything.
    """
    guards = tensor_guards([x, *params])
    return CallState(guards, len(params), latest, torch.get_autocast_dtype("cpu"))


class _Call(NamedTuple):
    """A call that used a packed copy."""

    packed: Packed
    state: CallState


class Pack:
    """The packed copy of a module's weights. Copies and pickles of it are empty."""

    def __init__(self) -> None:
        self._copy: Packed | None = None  # replaced as a whole: threads may call one module
        self._last: _Call | None = None
        self._missed: Signature | None = None
        """The signature of the latest call that differed from the copy's."""
        self._useless: Signature | None = None
        """The signature for which oneDNN's layout was useless."""

    def __reduce__(self) -> tuple[type[Pack], tuple[()]]:
        return Pack, ()

    def __deepcopy__(self, memo: object) -> Pack:
        return Pack()

    @property
    def is_empty(self) -> bool:
        """Whether there is no copy now."""
        return self._copy is None

    def of_last_call(
        self, x: Tensor, params: tuple[Tensor, ...], geometry: Geometry | None
    ) -> Packed | None:
        """The copy that :meth:`remember` was given, if nothing that it depends on has changed.

        This takes a quarter of the time of all checks, which take as long as a small convolution.
        """
        last, weight = self._last, params[0]
        if last is None or torch.is_grad_enabled() or last.packed.sources[0]() is not weight:
            return None
        signature = last.packed.signature
        address, version, _ = signature.state[0]
        is_same = (
            last.state.fits(x, params)  # first: other weights may have no version
            and geometry == signature.geometry
            and version == weight._version
            and address == weight.data_ptr()
        )
        return last.packed if is_same else None

    def remember(self, x: Tensor, params: tuple[Tensor, ...], packed: Packed) -> None:
        """Note a call that passed all checks and uses ``packed``, which :meth:`of` has returned."""
        latest = exposures()  # first, see call_state
        weight = params[0]
        is_current = state(weight) == packed.signature.state[0] and not is_exposed(weight)
        if is_current and not torch.is_grad_enabled():
            self._last = _Call(packed, call_state(x, params, latest))

    def of(
        self,
        params: tuple[Tensor, ...],
        dtype: torch.dtype,
        geometry: Geometry,
        layout: tuple[object, ...],
        reorder: Callable[[Sequence[Tensor]], Sequence[Tensor] | None],
    ) -> Packed | None:
        """The packed copy of ``params``, or None where the plain weights must be used.

        Args:
            params: the plain weights.
            dtype: the dtype of the product.
            geometry: that of a convolution.
            layout: the layout of the input.
            reorder: packs weights of that dtype; returns None if packing is useless.
        """
        signature = Signature(tuple(map(state, params)), dtype, geometry, layout)
        kept = self._copy
        if kept is not None and kept.signature == signature:
            if are_sources(kept.sources, params):
                return kept
        elif kept is not None and self._is_passing(signature, kept.signature):
            return None
        if signature == self._useless or not all(map(can_follow, params)):
            return None
        # Before the new one is made, so that there is never more than one.
        self._copy = self._last = kept = None
        signature = signature._replace(state=tuple(map(state, params)))  # watched only now
        weights = reorder([detached(param).to(dtype) for param in params])
        if weights is None:
            self._useless = signature
        else:
            sources = tuple(map(weakref.ref, params))
            self._copy = kept = Packed(signature, sources, weights, {})
        return kept

    def _is_passing(self, signature: Signature, kept: Signature) -> bool:
        """Whether only the input's layout is new: it is ignored until it comes twice."""
        is_passing = signature != self._missed and signature[:-1] == kept[:-1]
        self._missed = signature
        return is_passing


def are_sources(sources: Sequence[Callable[[], Tensor | None]], params: Sequence[Tensor]) -> bool:
    """Whether the copies are of these weights, and no write into them can have gone unnoticed."""
    for source, param in zip(sources, params):
        if source() is not param or is_exposed(param):
            return False
    return True


def can_follow(param: Tensor) -> bool:
    """Whether every later change of a weight will be noticed."""
    is_tracked = not (is_shared(param) or param.is_inference())
    return is_tracked and watch(param) and settle(param)


def is_shared(param: Tensor) -> bool:
    """Whether other processes may write into it."""
    storage: Any = param.untyped_storage()
    return bool(storage.is_shared())
