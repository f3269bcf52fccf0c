"""The base class of modules that compute differently from their own class in training only."""

from __future__ import annotations

from transforms.rewrites.scripting import ScriptedAsOwn


class ForTraining(ScriptedAsOwn):
    """A module whose own class computes in eval mode; passes for inference take that back."""
