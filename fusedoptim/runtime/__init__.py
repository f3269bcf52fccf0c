"""Settings of the process in which a training runs, each of them made by an explicit call only.

Importing this changes nothing, loads no compiler and touches no device.
"""

from fusedoptim.runtime.memory import keep_memory, release_memory

__all__ = ["keep_memory", "release_memory"]
