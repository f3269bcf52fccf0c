"""The pool: blocks, where they come from, and who gets them."""
