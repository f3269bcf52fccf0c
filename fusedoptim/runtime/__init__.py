"""Settings of the process in which a model runs, each changed only by an explicit call.

Importing this changes nothing, loads no compiler and touches no device.
"""

from fusedoptim.runtime.cpu_pool import CPUPool
from fusedoptim.runtime.huge_pages import use_huge_pages
from fusedoptim.runtime.memory import keep_memory, release_memory
from fusedoptim.runtime.pinning import pin

__all__ = ["CPUPool", "keep_memory", "pin", "release_memory", "use_huge_pages"]
