"""torch tensors over a pool's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from allocator.exchange.devices import check_torch_has, torch_name
from allocator.exchange.dlpack import VERSIONED_NAME, View, is_valid
from allocator.exchange.dtypes import as_dtype
from allocator.exchange.exports import Export
from allocator.exchange.reuse import Entry
from allocator.pool.allocation import Allocation
from allocator.pool.core import Core
from allocator.pool.sizes import as_shape, checked_nbytes, contiguous_strides, extent

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_NO_DTYPE = type(None)  # the reuse cache has no tensor of it


class TensorFactory:
    """Makes tensors of a pool: released ones of the reuse cache where possible, else new ones.

    The fastest path, for a tensor that replaces the one released last, is in
    :meth:`allocator.Pool.empty` itself.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._device: tuple[int, int] = core.store.source.driver.dlpack_device
        self.by_dtype = core.cache.by_dtype
        """the reuse cache's entries."""
        self.default_dtype: Callable[[], Any] = _NO_DTYPE
        """torch's default dtype, once torch is loaded."""
        self.from_dlpack: Callable[[Any], Tensor] = _torch_not_loaded
        """a tensor from a capsule, once torch is loaded."""

    def load_torch(self) -> Any:
        """The module torch, imported on demand: this package works without it."""
        import torch

        if self.from_dlpack is _torch_not_loaded:
            check_torch_has(self._device, torch, self._core.name)
            self.default_dtype = torch.get_default_dtype
            self.from_dlpack = torch._C._from_dlpack
        return torch

    def another(self, entry: Entry, shape: Any, dtype: torch.dtype) -> Tensor:
        """A tensor of an entry whose last two tensors are in use."""
        export = entry.reuse()
        if export is None:
            return self.empty(shape, dtype)
        # Not a function, as in Pool.empty(): an interrupt could come before its first line.
        try:
            return self.from_dlpack(export.capsule)
        except BaseException:
            self.drop_unclaimed(export)
            raise

    def empty(self, shape: Any, dtype: torch.dtype | None) -> Tensor:
        """A tensor, for when none of this shape and dtype was released just now."""
        kind = self.load_torch().get_default_dtype() if dtype is None else dtype
        sizes = as_shape(shape)
        entry = self._core.cache.find(sizes, kind)
        if entry is not None and entry.cached:
            tensor = self._cached(entry)
            if tensor is not None:
                return tensor
        return self.strided(sizes, contiguous_strides(sizes), kind, is_reusable=True)

    def strided(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: torch.dtype | None,
        *,
        is_reusable: bool = False,
    ) -> Tensor:
        """A new tensor, which the reuse cache may take after its release if ``is_reusable``."""
        torch, core = self.load_torch(), self._core
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype={dtype!r} is not a torch.dtype{_cure(torch, shape, dtype)}")
        kind = as_dtype(dtype)
        nbytes = checked_nbytes(extent(shape, strides) * kind.itemsize, shape)
        if nbytes == 0:
            core.check_usable()
            device = torch_name(self._device)
            empty: Tensor = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            return empty
        allocation = core.acquire(nbytes)
        export = core.exporter.export(View(allocation.address, shape, strides, kind, self._device))
        if is_reusable and allocation.is_ordinary:
            self._make_reusable(export, shape, dtype, allocation)
        return self._tensor_of(export, allocation)

    def drop_unclaimed(self, export: Export) -> None:
        """Take back an export, unless torch had consumed it when an interrupt came."""
        if export.is_held and is_valid(export.capsule, VERSIONED_NAME):
            export.drop()

    def _tensor_of(self, export: Export, owner: Allocation) -> Tensor:
        """The tensor that an export describes, which keeps the owner alive."""
        export.renew_capsule()
        try:
            export.give(owner)
            return self.from_dlpack(export.capsule)
        except BaseException:
            self.drop_unclaimed(export)
            raise

    def _cached(self, entry: Entry) -> Tensor | None:
        """A cached tensor of an entry."""
        core = self._core
        core.check_usable()
        with core.lock, core.reentrancy as is_outermost:
            if not is_outermost:
                return None
            core.drain()
            export = core.cache.take(entry)
            if export is None:
                return None
            allocation, export.owner = export.owner, None  # so that it counts as lost if we fail
            core.store.uncache(core.pool(), allocation)
            entry.add_recent(export)
        return self._tensor_of(export, allocation)

    def _make_reusable(
        self, export: Export, shape: tuple[int, ...], dtype: Any, allocation: Allocation
    ) -> None:
        """Let the export be handed out again, once released, for the same shape and dtype."""
        core = self._core
        with core.lock, core.reentrancy as is_outermost:
            # Checked with the lock held, as another thread may add a hook.
            if core.is_closed or core.bypasses_cache or core.store.source.is_over_limit:
                return
            if is_outermost and core.cache.is_full:
                core.flush_cache()
            core.cache.entry_for(shape, dtype, allocation).add_recent(export)


def _cure(torch: Any, shape: tuple[int, ...], dtype: Any) -> str:
    """The advice for a dtype argument that is not a dtype: what was probably meant."""
    if isinstance(dtype, int):
        return f"; a shape of several dimensions is a tuple, such as {(*shape, dtype)}"
    name = getattr(dtype, "__name__", str(dtype))  # of a class of NumPy's, too
    if isinstance(getattr(torch, name, None), torch.dtype):
        return f"; pass torch.{name}"
    return ""


def _torch_not_loaded(capsule: Any) -> Tensor:
    raise AssertionError("no tensor can have been released before the first was made")
