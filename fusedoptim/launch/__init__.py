"""Kernels on a device: the launch block, the backends that submit it, the compiled modules."""
