"""What torch.jit.script says about our modules, whose forward functions it cannot compile."""

from __future__ import annotations

from typing import NoReturn

from torch import nn


def refuse_script(module: nn.Module) -> NoReturn:
    """Raise: a module's ``__prepare_scriptable__``, which ``torch.jit.script`` calls.

    It could return a module of torch instead, but torch would put that into the user's model.
    """
    kind = type(module)
    raise TypeError(
        f"torch.jit.script does not compile {kind.__module__}.{kind.__name__}, which calls "
        "kernels; give it a model with torch's own module (transforms.restore makes one of an "
        "optimized model), or use torch.compile"
    )
