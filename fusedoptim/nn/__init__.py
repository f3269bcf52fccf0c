"""Modules over :mod:`fusedoptim.ops`: drop-ins for their namesakes of ``torch.nn``."""

from fusedoptim.nn import functional
from fusedoptim.nn.dropout import Dropout

__all__ = ["Dropout", "functional"]
