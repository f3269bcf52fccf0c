"""What a call of :func:`transforms.optimize` is given: checked, copied, defaults filled in."""
