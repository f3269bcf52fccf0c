"""The pool: its blocks, the segments they come from, and the allocations that get them."""
