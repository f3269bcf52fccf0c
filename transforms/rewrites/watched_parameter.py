"""Parameters that tell whether they may be written to without a change of the version counter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fusedoptim._torch_private import storage_use_count

_data: Any = torch._C.TensorBase.data  # a descriptor, which torch annotates as a Tensor
_exposed: Any = WeakIdKeyDictionary()
"""The parameters whose ``data`` was read or set since :func:`settle`."""
_uses: Any = WeakIdKeyDictionary()
"""For each parameter, the total number of uses of ``data``, over all parameters, at its own latest
use."""
_count = 0


class WatchedParameter(nn.Parameter):
    """A Parameter that remembers that its ``data`` was used.

    torch counts the writes into a tensor, but not those through ``data``, which shares the memory
    but not the counter. Pickling gives a plain Parameter.
    """

    @property
    def data(self) -> Tensor:
        """The values, as torch returns them."""
        _expose(self)
        result: Tensor = _data.__get__(self)
        return result

    @data.setter
    def data(self, values: Tensor) -> None:
        _expose(self)
        _data.__set__(self, values)


def _expose(param: Tensor) -> None:
    global _count
    _count += 1
    _exposed[param] = True
    _uses[param] = _count


def exposures() -> int:
    """How often ``data`` of any watched Parameter was used."""
    return _count


def uses(param: Tensor) -> int:
    """A number that changes whenever ``data`` of this Parameter is used."""
    return int(_uses.get(param, 0))


def state(param: Tensor) -> tuple[int, int, int]:
    """A value that changes whenever the values of a watched Parameter may have changed."""
    version = 0 if param.is_inference() else param._version
    return param.data_ptr(), version, uses(param)


def watch(param: Tensor) -> bool:
    """Notice writes into a Parameter from now on; False if its class is unknown."""
    if type(param) is nn.Parameter:
        _expose(param)  # its data may have been taken before
        param.__class__ = WatchedParameter
    return type(param) is WatchedParameter


def unwatch(param: Any) -> None:
    """Make a watched Parameter a plain one again; leave anything else."""
    if type(param) is WatchedParameter:
        _expose(param)  # for those who still rely on it
        param.__class__ = nn.Parameter  # type: ignore[assignment]  # the class that it had
        _exposed.pop(param, None)
        _uses.pop(param, None)


def is_exposed(param: Tensor) -> bool:
    """Whether values may have been written, or may still be, without changing the counter."""
    return param in _exposed


def settle(param: Tensor) -> bool:
    """Forget that ``data`` was used, if no other tensor shares the memory any more."""
    if is_exposed(param) and _has_aliases(param):
        return False
    _exposed.pop(param, None)
    return True


def _has_aliases(param: Any) -> bool:
    storage = param.untyped_storage()
    return storage_use_count is None or storage_use_count(storage._cdata) > _ALONE


_ALONE = 2
"""References to a memory without aliases: the tensor's, and that of the object used to count."""
