"""Rewrites of a model and its optimizer.

``transforms.optimize`` is planned (channels-last, batch-norm folding, split bf16 master weights,
fused update step); this release reserves the package and its import guard, and exports nothing.
"""

__fusedoptim__ = "0.1.0"  # what `fusedoptim.transforms` knows us by, should the name be shadowed

__all__: list[str] = []
