"""Parameters that tell whether they may be written to without a change of the version counter."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fusedoptim._torch_private import disable_dynamo, storage_use_count

_data: Any = torch._C.TensorBase.data  # a descriptor, which torch annotates as a Tensor
_uses: Any = WeakIdKeyDictionary()
"""For each parameter, the number of the latest use of its ``data`` or ``detach``."""
_settled: Any = WeakIdKeyDictionary()
"""For each parameter, the number of its use that :func:`settle` has found to be over."""
_numbers = itertools.count(1)
"""Numbers of the uses of all parameters: no two threads get the same."""
_latest = 0


class WatchedParameter(nn.Parameter):
    """A Parameter that remembers that its ``data`` was used, or that it was detached.

    torch counts the writes into a tensor, but not those through ``data``, which shares the memory
    but not the counter. A detached tensor, such as those of ``state_dict()``, shares the counter,
    but its ``data`` does not. Pickling gives a plain Parameter.
    """

    @property
    def data(self) -> Tensor:
        """The values, as torch returns them."""
        # Dynamo takes the descriptor of torch for this property, and would recurse forever.
        is_traced = torch.compiler.is_compiling()
        result: Tensor = detached(self).data if is_traced else _data.__get__(self)
        _note_use(self)  # last: settle() in another thread must find the other tensor
        return result

    @data.setter
    def data(self, values: Tensor) -> None:
        _data.__set__(self, values)
        _expose(self)  # last, as above

    def detach(self) -> Tensor:
        """The values, as torch returns them; :func:`detached` does not count as a use."""
        result = detached(self)
        _note_use(self)  # last, as above
        return result


WATCHABLE = (nn.Parameter, WatchedParameter)
"""The classes of parameters that :func:`watch` accepts."""


def detached(tensor: Tensor) -> Tensor:
    """The values, to be read: of a watched Parameter too, this does not count as a use."""
    return Tensor.detach(tensor)


def _expose(param: Tensor) -> None:
    global _latest
    number = next(_numbers)
    _uses[param] = number
    _latest = number  # last: who has seen this number also sees the rest


_expose_untraced: Any = disable_dynamo(_expose)


def _note_use(param: Tensor) -> None:
    # Dynamo would compile the function again for each number.
    (_expose_untraced if torch.compiler.is_compiling() else _expose)(param)


def exposures() -> int:
    """A number that changes with each use, which may be a write, of any watched Parameter."""
    return _latest


def uses(param: Tensor) -> int:
    """A number that changes with each use, which may be a write, of this Parameter."""
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
        _settled.pop(param, None)
        _uses.pop(param, None)


def unwatch_all(module: nn.Module) -> None:
    """Make the watched Parameters of one module, without those inside it, plain ones again."""
    for param in module._parameters.values():
        unwatch(param)


def is_exposed(param: Tensor) -> bool:
    """Whether values may have been written, or may still be, without changing the counter."""
    return bool(uses(param) != _settled.get(param, 0))


def settle(param: Tensor) -> bool:
    """Forget the uses, if no other tensor shares the memory any more."""
    number = uses(param)  # first: a use in another thread meanwhile is not over
    if number != _settled.get(param, 0) and _has_aliases(param):
        return False
    _settled[param] = number
    return True


def _has_aliases(param: Any) -> bool:
    storage = param.untyped_storage()
    return storage_use_count is None or storage_use_count(storage._cdata) > _ALONE


_ALONE = 2
"""References to a memory without aliases: the tensor's, and that of the object used to count."""
