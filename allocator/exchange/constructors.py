"""The methods of a pool that make torch tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from allocator.exchange.exports import IN_USE, NAME_ADDRESS, NOT_RELEASED
from allocator.exchange.tensors import TensorFactory
from allocator.pool.sizes import are_integers, as_shape, as_strides

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Constructors:
    """The base of :class:`Pool` that makes torch tensors."""

    _tensors: TensorFactory

    def empty(self, shape: Any, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialized torch tensor over the pool's memory.

        Args:
            shape: an integer or a sequence of integers.
            dtype: torch's default dtype if None.

        Raises:
            TypeError: an element of the shape is not an integer, or DLPack lacks the dtype.
            ValueError: a negative dimension, or more than 2^63 - 1 elements.
            OutOfMemoryError: there is no room.
            RuntimeError: the pool was closed, or belongs to another process.

        Example:
            >>> from allocator import Pool
            >>> Pool("cpu").empty(1024).shape
            torch.Size([1024])
        """
        tensors = self._tensors
        if shape.__class__ is not int and not are_integers(shape):  # 1.0 and True equal 1
            return tensors.empty(shape, dtype)
        kind = tensors.default_dtype() if dtype is None else dtype
        try:
            entry = tensors.by_dtype[kind][shape]
        except (KeyError, TypeError):
            entry = None  # not handled here: this error is not the cause of later ones
        if entry is None:
            return tensors.empty(shape, kind)
        # In a loop, the next tensor replaces the last one unchanged. There is no lock: no other
        # thread runs from here until the word says that the tensor is in use (see exports.py).
        export, is_taken = entry.last, False
        words, first = export.words, export.first
        if words[first] in NOT_RELEASED:
            export = entry.before_last
            words, first = export.words, export.first
        # On one line, as a debugger may let other threads run between two. They may have made
        # another tensor of it meanwhile.
        if words[first] not in NOT_RELEASED and export.entry is entry: words[first], is_taken = IN_USE, True  # noqa: E501, E701  # fmt: skip
        if not is_taken:
            return tensors.another(entry, shape, kind)
        if export is not entry.last:
            entry.before_last, entry.last = entry.last, export
        export.capsule_name[0] = NAME_ADDRESS
        entry.reused += 1
        try:
            return tensors.from_dlpack(export.capsule)
        except BaseException:
            tensors.drop_unclaimed(export)
            raise

    def zeros(self, shape: Any, dtype: torch.dtype | None = None) -> Tensor:
        """A torch tensor of zeros; see :meth:`empty`.

        Args:
            shape: an integer or a sequence of integers.
            dtype: torch's default dtype if None.
        """
        return self.empty(shape, dtype).zero_()

    def full(self, shape: Any, value: Any, dtype: torch.dtype | None = None) -> Tensor:
        """A torch tensor filled with ``value``; see :meth:`empty`.

        Args:
            shape: an integer or a sequence of integers.
            value: a number.
            dtype: if None that of ``torch.full``: the default dtype for a float, int64 for an
                integer, bool for a boolean.
        """
        if dtype is None:
            dtype = self._tensors.load_torch().full((), value).dtype
        return self.empty(shape, dtype).fill_(value)

    def empty_strided(self, shape: Any, strides: Any, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialized torch tensor with given strides; see :meth:`empty`.

        Args:
            shape: an integer or a sequence of integers.
            strides: strides in elements, one for each dimension.
            dtype: torch's default dtype if None.

        Raises:
            ValueError: elements would share memory, or a stride is negative.
        """
        sizes = as_shape(shape)
        return self._tensors.strided(sizes, as_strides(strides, sizes), dtype)

    def empty_like(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialized torch tensor of the shape and, if dense, the layout of another one.

        Args:
            tensor: the other tensor, on any device.
            dtype: dtype of ``tensor`` if None.
        """
        # torch's own rule for the strides
        like = self._tensors.load_torch().empty_like(tensor, device="meta")
        return self._tensors.strided(tuple(like.shape), like.stride(), dtype or tensor.dtype)

    def zeros_like(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A torch tensor of zeros with the shape and layout of another; see :meth:`empty_like`.

        Args:
            tensor: the other tensor, on any device.
            dtype: dtype of ``tensor`` if None.
        """
        return self.empty_like(tensor, dtype).zero_()
