"""What torch.fx records of our modules: single calls, as of torch's own."""

from __future__ import annotations

import itertools
from typing import Any

from torch import fx, nn


def traced_call(module: nn.Module, *args: Any) -> Any:
    """The Proxy of a call, if torch.fx traces a model that calls ``module``; else None.

    By default torch.fx looks into modules that are not of torch.nn. In ours it would find functions
    with ``training`` as it is during the trace, or conditions that it cannot trace.

    Raises:
        RuntimeError: the module has hooks of its calls. They have seen this one already, and would
            see it again whenever the traced model runs.
    """
    lists = (arg if isinstance(arg, (list, tuple)) else [arg] for arg in args)
    every = itertools.chain.from_iterable(lists)
    tracer = next((arg.tracer for arg in every if isinstance(arg, fx.Proxy)), None)
    if not isinstance(tracer, fx.Tracer) or module is tracer.root:
        return None
    path = tracer.path_of_module(module)
    if module._forward_hooks or module._forward_pre_hooks:
        kind = type(module)
        raise RuntimeError(
            f"torch.fx traces {kind.__module__}.{kind.__name__} ({path!r}) as one call, but it has "
            "hooks, which would run in the trace too; remove them, trace with a torch.fx.Tracer "
            "whose is_leaf_module is true for it, or give torch.fx a model with torch's own module "
            "(transforms.restore makes one of an optimized model)"
        )
    return tracer.create_proxy("call_module", path, args, {})
