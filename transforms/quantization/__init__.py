"""Chooses, calibrates and compares the layers that :func:`transforms.quantize` puts in INT8."""
