"""How one module or optimizer is rewritten, saved, moved and restored; passes choose which."""
