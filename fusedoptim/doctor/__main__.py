"""``python -m fusedoptim.doctor`` does what ``python -m fusedoptim doctor`` does."""

import sys

from fusedoptim.__main__ import main

sys.exit(main(["doctor", *sys.argv[1:]]))
