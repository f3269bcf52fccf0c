"""Models whose BatchNorms stay: ``forward`` chooses what to call in ways that tracing answers once.

torch.fx finds every attribute in a traced value, so ``hasattr`` is true while a model is traced.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.transforms.models import Block


@contextlib.contextmanager
def _ignores_errors() -> Iterator[None]:
    with contextlib.suppress(AttributeError):
        yield


def _plain(block: Block, x: Any) -> Any:
    return block.conv(x)


def _both(block: Block, x: Any) -> Any:
    return block.norm(block.conv(x))


class Chooses(Block):
    def _both(self, x: Tensor) -> Any:
        return self.norm(self.conv(x))

    def _plain(self, x: Tensor) -> Any:
        return self.conv(x)

    def in_a_list(self, x: Any) -> Any:
        ways = [self.conv, lambda z: self.norm(self.conv(z))]
        return ways[hasattr(x, "tensors")](x)

    def in_a_tuple_by_type(self, x: Any) -> Any:
        ways = (self.conv, self._both)
        return ways[type(x) is not torch.Tensor](x)

    def in_a_dict(self, x: Any) -> Any:
        norms = {True: self.norm, False: nn.Identity()}
        return norms[hasattr(x, "tensors")](self.conv(x))

    def in_a_dict_by_get(self, x: Any) -> Any:
        norms = {True: self.norm}
        return norms.get(hasattr(x, "tensors"), lambda z: z)(self.conv(x))

    def in_a_list_that_is_filled(self, x: Any) -> Any:
        ways: list[Any] = []
        ways.append(self.conv)
        ways.append(self._both)
        return ways[hasattr(x, "tensors")](x)

    def in_a_comprehension(self, x: Any) -> Any:
        ways = [getattr(self, name) for name in ("_plain", "_both")]
        return ways[hasattr(x, "tensors")](x)

    def in_a_call(self, x: Any) -> Any:
        ways = dict(zip((False, True), (self._plain, self._both)))
        return ways[hasattr(x, "tensors")](x)

    def by_name(self, x: Any) -> Any:
        return getattr(self, ["_plain", "_both"][hasattr(x, "tensors")])(x)

    def by_name_in_a_variable(self, x: Any) -> Any:
        name = f"{'_both' if hasattr(x, 'tensors') else '_plain'}"
        return getattr(self, name)(x)

    def by_name_through_the_class(self, x: Any) -> Any:
        name = ["_plain", "_both"][hasattr(x, "tensors")]
        return object.__getattribute__(self, name)(x)

    def by_name_with_attrgetter(self, x: Any) -> Any:
        name = ["_plain", "_both"][hasattr(x, "tensors")]
        return operator.attrgetter(name)(self)(x)

    def by_name_with_methodcaller(self, x: Any) -> Any:
        name = "_both" if hasattr(x, "tensors") else "_plain"
        return operator.methodcaller(name, x)(self)

    def by_name_in_globals(self, x: Any) -> Any:
        name = ["_plain", "_both"][hasattr(x, "tensors")]
        return globals()[name](self, x)

    def by_name_in_globals_by_get(self, x: Any) -> Any:
        name = "_both" if hasattr(x, "tensors") else "_plain"
        return globals().get(name)(self, x)

    def by_index_with_getitem(self, x: Any) -> Any:
        ways = [self._plain, self._both]
        return operator.getitem(ways, hasattr(x, "tensors"))(x)

    def by_index_with_itemgetter(self, x: Any) -> Any:
        ways = [self._plain, self._both]
        return operator.itemgetter(hasattr(x, "tensors"))(ways)(x)

    def evaluated(self, x: Any) -> Any:
        return eval("self._both(x) if hasattr(x, 'tensors') else self._plain(x)")

    def the_largest(self, x: Any) -> Any:
        ways = [self._plain, self._both]
        return max(ways, key=lambda way: (way == self._both) == hasattr(x, "tensors"))(x)

    def the_first_in_order(self, x: Any) -> Any:
        ways = sorted([0, 1], key=lambda way: way != hasattr(x, "tensors"))
        return (self._plain, self._both)[ways[0]](x)

    def if_not_suppressed(self, x: Any) -> Any:
        with contextlib.suppress(AttributeError):
            x.tensors  # noqa: B018
            return self._both(x)
        return self.conv(x)

    def if_a_context_does_not_suppress(self, x: Any) -> Any:
        with torch.no_grad(), _ignores_errors():
            x.tensors  # noqa: B018
            return self._both(x)
        return self.conv(x)

    def if_a_stack_does_not_suppress(self, x: Any) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(AttributeError))
            x.tensors  # noqa: B018
            return self._both(x)
        return self.conv(x)

    def if_suppressed_in_between(self, x: Any) -> Any:
        way = self.conv
        with contextlib.suppress(AttributeError):
            x.tensors  # noqa: B018
            way = self._both
        return way(x)

    def if_finally_returns(self, x: Any) -> Any:
        way = self.conv
        try:
            x.tensors  # noqa: B018
            way = self._both
        finally:
            return way(x)  # noqa: B012

    def in_a_variable(self, x: Any) -> Any:
        way: Any = self.conv
        if hasattr(x, "tensors"):
            way = self._both
        return way(x)

    def in_a_variable_of_a_method(self, x: Any) -> Any:
        way: Any = self._plain
        if hasattr(x, "tensors"):
            way = self._both
        return way(x)

    def in_a_parameter(self, x: Any, way: Any = None) -> Any:
        way = way or self.conv
        if hasattr(x, "tensors"):
            way = self._both
        return way(x)

    def unless_it_fails(self, x: Any) -> Any:
        way: Any = self.conv
        try:
            x.tensors  # noqa: B018
            way = self._both
        except AttributeError:
            pass
        return way(x)
