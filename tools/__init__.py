"""What developers run in a clone; not part of the distribution."""
