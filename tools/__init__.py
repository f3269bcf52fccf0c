"""Developer tools, run in a clone; not part of the distribution."""
