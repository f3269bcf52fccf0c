"""Chooses, calibrates and compares the layers that :func:`transforms.quantize` runs in INT8."""
