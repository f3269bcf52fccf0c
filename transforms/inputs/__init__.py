"""The inputs of a call of :func:`transforms.optimize`: checked, copied, defaults filled in."""
