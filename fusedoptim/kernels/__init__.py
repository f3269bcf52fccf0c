"""The kernels: plain Python functions in the language of :mod:`fusedoptim.kernels.language`.

One file for each algorithm. ``make kernels`` compiles what their ``__all__`` lists to SPIR-V in
``fusedoptim/spirv/``; a running optimizer reads only that.
"""
