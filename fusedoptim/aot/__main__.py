"""``python -m fusedoptim.aot`` does what ``python -m fusedoptim aot`` does."""

import sys

from fusedoptim.__main__ import main

sys.exit(main(["aot", *sys.argv[1:]]))
