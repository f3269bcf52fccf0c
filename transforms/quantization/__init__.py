"""Chooses, calibrates and compares what :func:`transforms.quantize` computes in INT8."""
