"""Optimizers on the host for parameters on any device that torch has."""

from fusedoptim.offload._optimizer import OffloadOptimizer

__all__ = ["OffloadOptimizer"]
