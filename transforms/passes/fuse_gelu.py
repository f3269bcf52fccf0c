"""Pass: compute approximate GELUs with one kernel forward and one backward.

The class of each ``torch.nn.GELU("tanh")``, and of the modules of transformers that compute the
same in single operations, becomes :class:`fusedoptim.nn.GELU`: the object and its hooks stay.
"""

from __future__ import annotations

import sys

from torch import nn

from fusedoptim.nn import GELU
from transforms.passes.protocol import ExchangingPass, Job
from transforms.reports import Entry
from transforms.tracing.modules import Kinds, is_plain
from transforms.tracing.source import functions_called

_MODULE = "transformers.activations"
_NAMES = ("NewGELUActivation", "FastGELUActivation", "GELUTanh")
"""Classes that compute the approximation in single operations, or by a call of torch's."""


class FuseGELU(ExchangingPass):
    """Replaces approximate GELUs by ours; exact ones stay torch's, and are not reported."""

    knob = "fuse_gelu"
    what = "one kernel forward, and one backward"

    def run(self, job: Job) -> list[Entry]:
        """Replace classes."""
        kinds = _kinds()
        entries = []
        for name, module in job.model.named_modules():
            if _is_approximate(module, kinds):
                reason = _objection(module, kinds)
                entry = self.exchange(job, name, module, GELU, reason, approximate="tanh")
                entries.append(entry)
            elif _calls_approximation(type(module)):
                why = "calls torch.nn.functional.gelu(approximate='tanh'), which stays torch's"
                entries.append(Entry(name, why, done=False))
        return entries


def _kinds() -> Kinds:
    """The classes that compute the approximation; transformers' only if it is imported."""
    library = sys.modules.get(_MODULE)
    others = (getattr(library, name, None) for name in _NAMES)
    return (nn.GELU, *(kind for kind in others if kind is not None))


def _is_approximate(module: nn.Module, kinds: Kinds) -> bool:
    if isinstance(module, GELU) or not isinstance(module, kinds):
        return False
    return not isinstance(module, nn.GELU) or module.approximate == "tanh"


def _calls_approximation(cls: type[nn.Module]) -> bool:
    """Whether code of the class calls torch's function, and mentions the approximation."""
    return any(
        function is nn.functional.gelu and "tanh" in code.co_consts
        for function, code in functions_called(cls)
    )


def _objection(module: nn.Module, kinds: Kinds) -> str | None:
    if is_plain(module, kinds):
        return None
    return f"overrides GELU: {type(module).__name__} may differ from it"
