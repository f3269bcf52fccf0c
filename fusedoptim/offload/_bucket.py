"""Parameters of one group, device and dtype, which are copied and updated together."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fusedoptim._torch_private import is_flattened, mark_flattened
from fusedoptim.offload._link import Link, views
from fusedoptim.optimizer import FusedOptimizer
from fusedoptim.split.hooks import check_no_hooks
from fusedoptim.step.checks import check_numbers
from fusedoptim.step.tensors import PARAM_DTYPES, Group, State

MakeOptimizer = Callable[[list[Group]], Optimizer]
"""Makes the host's optimizer of some groups."""


class Bucket:
    """Parameters of a device, their copies on the host, and the optimizer of the copies.

    A copy of a gradient is valid while the parameter's gradient is the same tensor with the same
    version: a step copies again what has changed since, whether by another backward pass or by
    clipping. In the same way it notices weights that something else has written. What torch does
    not count, such as writes through ``data``, needs :meth:`distrust_copies` or
    :meth:`distrust_weights`.
    """

    def __init__(
        self,
        link: Link,
        params: list[Tensor],
        options: Group,
        make: MakeOptimizer,
    ) -> None:
        """Copy the parameters to the host.

        Args:
            link: the link to their device.
            params: the parameters, of one group, device and dtype.
            options: the group's, without its parameters.
            make: makes the host's optimizer.
        """
        self.link = link
        self.group: Group | None = None
        """The group that the parameters are in; None if it was removed."""
        self.params = params
        self.host = [Parameter(_on_host(p)) for p in params]
        for p, h in zip(params, self.host):
            if is_flattened(p):
                mark_flattened(h)  # for the optimizer, which may need norms of whole parameters
        self.optimizer = make([{"params": self.host, **options}])
        converted = [p for p, h in zip(params, self.host) if p.dtype != h.dtype]
        check_no_hooks("OffloadOptimizer", converted)  # before any of them is converted
        numel = sum(h.numel() for h in self.host)
        self._weights = link.buffer(numel, self.host[0].dtype)  # after a split: the upper halves
        for h, view in zip(self.host, views(self._weights, self.host)):
            h.data = view.copy_(h.detach())
        self._grads = link.buffer(0, self._weights.dtype)
        self._grad_views: list[Tensor] = []
        self._fetched: list[tuple[Tensor, int] | None] = [None] * len(params)
        """The gradients that the host has copied or is copying, and their versions."""
        self._known: list[tuple[int, int, torch.Size] | None] = []
        """Version, address and shape of each parameter when the host last had its values."""
        self._arrived: set[int] = set()
        self._count_trained()
        self._with_grad: list[int] = []
        self._end_of_fetch: Any = None
        self._end_of_send: Any = None
        self.hooks: list[RemovableHandle] = []
        """The hooks on the parameters by which backward calls :meth:`arrive`."""

    def attach(self) -> None:
        """Give the device's parameters the dtype of the host's, which a split changes."""
        for p, h in zip(self.params, self.host):
            if p.dtype != h.dtype:
                grad = p.grad
                p.data = torch.empty_like(p, dtype=h.dtype).copy_(h.detach())
                if grad is not None:
                    p.grad = grad.to(h.dtype)
        self._note_weights()

    def detach(self, dtype: torch.dtype, grads: Sequence[Tensor | None]) -> None:
        """Undo :meth:`attach`, wherever it was interrupted, and remove the hooks.

        A hook that an interrupt has kept out of the list does nothing without its bucket.

        Args:
            dtype: the dtype that the parameters had.
            grads: the gradients that they had.
        """
        remove_all(self.hooks)
        for p, grad, exact in zip(self.params, grads, self.exact_values()):
            if p.dtype != dtype:
                p.data = torch.empty_like(p, dtype=dtype).copy_(exact)
            if p.grad is not grad:
                p.grad = grad

    def arrive(self, index: int) -> None:
        """Note that backward has made a gradient; copy all when the last one is there."""
        self._arrived.add(index)
        if len(self._arrived) == self._trained:
            chosen = sorted(self._arrived)
            self._arrived.clear()
            grads = [self.params[i].grad for i in chosen]
            # A removed group may be changed, and backward still computes its gradients.
            if self.fits and all(grad is not None and _is_strided(grad) for grad in grads):
                self._fetch(chosen)

    def _count_trained(self) -> None:
        self._trained = sum(p.requires_grad for p in self.params)

    def _fetch(self, chosen: Sequence[int]) -> None:
        """Begin to copy gradients to the host."""
        whole = len(chosen) == len(self.params)
        if not self._grad_views:
            self._grads = self.link.buffer(self._weights.numel(), self._weights.dtype)
            self._grad_views = views(self._grads, self.host)
        self._drop_fetched(chosen)
        self.link.begin()
        sources = []
        for i in chosen:
            grad = self.params[i].grad
            assert grad is not None
            self._fetched[i] = grad, grad._version
            sources.append(grad.detach())
        targets = [self._grad_views[i] for i in chosen]
        self.link.fetch(self._grads if whole else None, targets, sources)
        self._end_of_fetch = self.link.mark()

    def distrust_copies(self) -> None:
        """Make the next step copy all gradients again, and keep none of them."""
        self._arrived.clear()
        self._drop_fetched(range(len(self.params)))

    def distrust_weights(self) -> None:
        """Make the next step take all weights from the device."""
        self._known = [None] * len(self.params)

    def _drop_fetched(self, chosen: Sequence[int]) -> None:
        """Drop gradients that the host has copied, once their copies are complete.

        The device may then reuse their memory.
        """
        if any(self._fetched[i] is not None for i in chosen):
            self.link.finish()
        for i in chosen:
            self._fetched[i] = None

    def prepare(self) -> bool:
        """Begin to copy what the host lacks; return whether there is anything to update.

        Raises:
            RuntimeError: a parameter is no longer on its first device, or has another dtype or
                shape.
            TypeError: a gradient has another dtype than its parameter.
        """
        self._arrived.clear()
        self._count_trained()
        self.take_weights()
        stale = []
        self._with_grad = []
        for i, (p, h, fetched) in enumerate(zip(self.params, self.host, self._fetched)):
            grad = p.grad
            if grad is None:
                h.grad = None
                continue
            self._with_grad.append(i)
            if grad.dtype != p.dtype:
                raise TypeError(
                    f"OffloadOptimizer: the gradient of a parameter of shape {tuple(p.shape)} is "
                    f"{grad.dtype}, and the parameter {p.dtype}; convert it, or do not set "
                    "p.grad_dtype"
                )
            if not _is_strided(grad):
                self._drop_fetched([i])
                h.grad = grad.detach().to("cpu", copy=True)
            elif fetched is None or fetched[0] is not grad or fetched[1] != grad._version:
                stale.append(i)
        if stale:
            self._fetch(stale)
        for i in self._with_grad:
            h, fetched = self.host[i], self._fetched[i]
            if fetched is not None and h.grad is not self._grad_views[i]:
                h.grad = self._grad_views[i]
        return bool(self._with_grad)

    @property
    def fits(self) -> bool:
        """Whether all parameters are what the host's copies were made for."""
        return all(map(self._has_copy, self.params, self.host))

    def is_whole(self) -> bool:
        """Whether parameters that were removed can be added again with what the host has."""
        if not isinstance(self.optimizer, FusedOptimizer):
            return self.fits
        halves = self.optimizer.halves
        return self.fits and not any(h in halves and halves.find(h) is None for h in self.host)

    def _has_copy(self, param: Tensor, host: Tensor) -> bool:
        place = self.link.device, host.dtype, host.shape
        return (param.device, param.dtype, param.shape) == place

    def take_weights(self) -> None:
        """Copy to the host the weights that something other than a step has written."""
        for p, h, known in zip(self.params, self.host, self._known):
            if known != _written(p):
                if not self._has_copy(p, h):
                    raise RuntimeError(
                        f"OffloadOptimizer: a parameter of shape {tuple(h.shape)}, {h.dtype}, on "
                        f"{self.link.device} has become one of shape {tuple(p.shape)}, {p.dtype}, "
                        f"on {p.device}; move and convert the model before the optimizer is made"
                    )
                self.link.wait(self._end_of_send)
                h.detach().copy_(p.detach())
        self._note_weights()

    def _note_weights(self) -> None:
        self._known = list(map(_written, self.params))

    @property
    def grads(self) -> Iterator[Tensor]:
        """The gradients on the device that the next update uses."""
        for i in self._with_grad:
            grad = self.params[i].grad
            if grad is not None:
                yield grad.detach()

    def check_options(self, owner: str, numbers: Group) -> None:
        """Raise if one of the group's options is one that the optimizer cannot take.

        Args:
            owner: the optimizer's name in errors.
            numbers: the options whose defaults are numbers, with these.
        """
        group = self.group or {}
        options = {name: group[name] for name in numbers if name in group}
        largest = math.inf
        if not isinstance(self.optimizer, FusedOptimizer):  # a user's class may take None
            options = {name: value for name, value in options.items() if value is not None}
        else:
            self.optimizer._check_options({**own_options(group), "params": self.host})
            if (known := PARAM_DTYPES.get(self._weights.dtype)) is not None:
                largest = known.largest
        check_numbers(owner, options, numbers, largest)

    def update(self, grad_scale: Tensor | None) -> None:
        """Take the step on the host, with the present options of the group.

        Args:
            grad_scale: what gradients are divided by, or None.
        """
        assert self.group is not None
        self.link.wait(self._end_of_send)
        self.link.wait(self._end_of_fetch)
        optimizer: Any = self.optimizer
        optimizer.param_groups[0].update(own_options(self.group))
        if grad_scale is None:
            optimizer.step()
        elif getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.grad_scale, optimizer.found_inf = grad_scale, torch.zeros((), device="cpu")
            try:
                optimizer.step()
            finally:
                del optimizer.grad_scale, optimizer.found_inf
        else:
            grads = [h.grad for h in self.host if h.grad is not None]
            try:
                torch._foreach_div_(grads, grad_scale)
                optimizer.step()
            finally:
                self.distrust_copies()  # a step that is tried again must not divide them twice

    def send(self) -> None:
        """Begin to copy the weights to the device, after :meth:`update`."""
        chosen = self._with_grad
        whole = len(chosen) == len(self.params)
        sources = [self.host[i].detach() for i in chosen]
        targets = [self.params[i].detach() for i in chosen]
        self.link.send(self._weights if whole else None, sources, targets)
        self._end_of_send = self.link.mark()
        self._note_weights()
        self._fetched = [None] * len(self.params)  # their copies are complete

    def exact_values(self) -> Iterator[Tensor]:
        """Copies of the values that the host has, float32 if split."""
        own: Callable[[], Iterator[Tensor]] | None
        own = getattr(self.optimizer, "master_params", None)
        return own() if own is not None else (h.detach().clone() for h in self.host)

    def is_split(self, host: Tensor) -> bool:
        """Whether one of ``host`` is the upper half of float32 values."""
        ask = getattr(self.optimizer, "is_split", None)
        return ask is not None and ask(host)

    def contents(self) -> dict[str, Any]:
        """What a load replaces in the host's optimizer, for ``__setstate__``."""
        optimizer = self.optimizer
        contents: dict[str, Any]
        contents = {"state": optimizer.state, "param_groups": optimizer.param_groups}
        if isinstance(optimizer, FusedOptimizer):
            contents["halves"] = copy.copy(optimizer.halves)  # trails that are not in the state yet
        return contents

    def states(self) -> Iterator[tuple[Tensor, State]]:
        """The state that each parameter has on the host."""
        state = self.optimizer.state
        for p, h in zip(self.params, self.host):
            if h in state:
                yield p, state[h]

    def take_states(self, shown: Mapping[Tensor, State]) -> None:
        """Use the state that the parameters have now, after a user has changed some of it."""
        state = self.optimizer.state
        for p, h in zip(self.params, self.host):
            own = shown.get(p)
            if own is None:
                state.pop(h, None)
            elif own is not state.get(h):
                state[h] = own


def remove_all(hooks: Sequence[RemovableHandle]) -> None:
    """Remove hooks, some of which may be removed already."""
    for hook in hooks:
        hook.remove()


def own_options(group: Group) -> Group:
    """The options of a group, without the entries that list its parameters."""
    return {name: v for name, v in group.items() if name not in ("params", "param_names")}


def _written(param: Tensor) -> tuple[int, int, torch.Size]:
    """What changes when something is written to a parameter, or its memory is replaced."""
    return param._version, param.data_ptr(), param.shape


def _is_strided(grad: Tensor) -> bool:
    return grad.layout is torch.strided


def _on_host(param: Tensor) -> Tensor:
    copy = torch.empty(param.shape, dtype=param.dtype, device="cpu")  # whatever the default is
    return copy.copy_(param.detach())
