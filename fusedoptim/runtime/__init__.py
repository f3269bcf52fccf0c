"""Settings of the process in which a model runs, each of them made by an explicit call only.

Importing this changes nothing, loads no compiler and touches no device.
"""

from fusedoptim.runtime.cpu_pool import CPUPool
from fusedoptim.runtime.memory import keep_memory, release_memory
from fusedoptim.runtime.pinning import pin

__all__ = ["CPUPool", "keep_memory", "pin", "release_memory"]
