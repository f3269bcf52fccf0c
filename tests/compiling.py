"""Marks for tests that compile, by torch.compile's default backend, which is slow, or for GPUs."""

from __future__ import annotations

import shutil

import pytest

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler"
)
needs_gpu_compiler = pytest.mark.skipif(
    shutil.which("spirv-val") is None or shutil.which("ocloc") is None,
    reason="apt install spirv-tools intel-opencl-icd",
)
quiet_compiler = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script:DeprecationWarning",
    "ignore:.*autograd.function.Function.*instantiated:DeprecationWarning",  # by torch itself
)
each_compilation = pytest.mark.parametrize(
    ("dynamic", "sizes"), [(False, [9]), (True, [9, 11])], ids=["static", "dynamic"]
)
"""One size for a static graph, since another would only recompile it; two for a dynamic one."""
