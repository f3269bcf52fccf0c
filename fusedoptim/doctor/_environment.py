"""Environment variables that change what runs: which ones are set, and what each does."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from fusedoptim.doctor._report import Problem, Section, warning

# By prefix; of several that match, the longest counts.
_MEANINGS = {
    "OCL_ICD_FILENAMES": "OpenCL drivers in addition to the system's; if unset, pip's are added",
    "OCL_ICD_VENDORS": "where the system's OpenCL drivers are registered",
    "OCL_ICD_": "read by the OpenCL loader",
    "ONEAPI_DEVICE_SELECTOR": "SYCL shows only these devices",
    "SYCL_DEVICE_ALLOWLIST": "SYCL shows only these devices",
    "SYCL_DEVICE_FILTER": "nothing: ONEAPI_DEVICE_SELECTOR replaced it",
    "SYCL_PI_TRACE": "oneAPI 2024 prints its calls",
    "SYCL_UR_TRACE": "oneAPI 2025 and later print their calls",
    "SYCL_CACHE_PERSISTENT": "SYCL caches compiled programs on disk; not those of our kernels",
    "SYCL_": "read by the SYCL runtime",
    "UR_": "read by the SYCL runtime",
    "CL_CONFIG_CPU_TARGET_ARCH": "instruction set that the CPU driver compiles for",
    "CL_CONFIG_USE_VECTORIZER": "False: the CPU driver compiles one lane at a time",
    "CL_CONFIG_USE_FAST_RELAXED_MATH": "True: the CPU driver may reorder and approximate",
    "CL_CONFIG_DUMP_": "the CPU driver writes files to the current folder",
    "CL_CONFIG_": "read by the CPU driver",
    "CUDA_VISIBLE_DEVICES": "nothing here: it hides NVIDIA's devices",
    "FUSEDOPTIM_CACHE_DIR": "where compiled kernels are cached; empty: nowhere",
    "FUSEDOPTIM_ISA": "highest instruction set that kernels are compiled for on the CPU",
    "FUSEDOPTIM_": "ours",
    "LD_LIBRARY_PATH": "folders whose libraries are taken first",
    "LD_PRELOAD": "libraries that are loaded first",
    "OMP_NUM_THREADS": "threads of torch's operations, on which kernels here run too",
    "OMP_": "read by OpenMP, in torch's own operations",
    "MALLOC_": "read by glibc's malloc",
    "GLIBC_TUNABLES": "read by glibc, also by its malloc",
    "THP_MEM_ALLOC_ENABLE": "1: torch asks for huge pages for tensors of 2 MiB and more",
    "MKL_": "read by MKL, in torch's matrix products and linear algebra",
    "KMP_": "read by Intel's OpenMP; torch from PyPI has GNU's",
    "GOMP_": "read by GNU's OpenMP, in torch's own operations",
    "ZE_AFFINITY_MASK": "Level Zero shows only these GPUs",
    "ZE_FLAT_DEVICE_HIERARCHY": "whether the tiles of a GPU are devices of their own",
    "ZE_": "read by Level Zero",
    "ZES_": "read by Level Zero",
    "NEO": "read by Intel's GPU driver",
    "IGC_": "read by the compiler of Intel's GPU driver",
}
_TRUE, _FALSE = ("true", "1", "t"), ("false", "0", "f")


def check() -> Section:
    """The variables that are set, and those with unexpected effects."""
    relevant = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(tuple(_MEANINGS))
    }
    facts: dict[str, Any] = {
        name: f"{value!r}: {meaning(name)}" for name, value in relevant.items()
    } or {"variables": "no relevant variable is set"}
    return Section("environment", facts, list(_surprises(relevant)))


def meaning(name: str) -> str:
    """What the variable does in this package."""
    return _MEANINGS[max(filter(name.startswith, _MEANINGS), key=len)]


def _surprises(variables: Mapping[str, str]) -> Iterator[Problem]:
    for name, value in variables.items():
        text, cure = value.lower(), f"unset {name}"
        if name == "ONEAPI_DEVICE_SELECTOR" and value:
            message = f"{name}={value} hides devices"
            if "opencl" in text:
                message += (
                    "; with oneAPI 2026 a selector that names the backend opencl finds none at all"
                )
            yield warning(message, f"{cure}, or write '*:cpu' for the CPU and '*:gpu' for GPUs")
        elif name == "SYCL_DEVICE_FILTER":
            yield warning(
                f"{name} has no effect: SYCL runtimes since 2023 do not read it",
                f"{cure}; ONEAPI_DEVICE_SELECTOR='*:gpu' chooses GPUs",
            )
        elif name == "CL_CONFIG_USE_FAST_RELAXED_MATH" and text in _TRUE:
            yield warning(
                f"{name} lets the CPU driver approximate: results are not reproducible, and split "
                "weights may lose bits",
                cure,
            )
        elif name == "CL_CONFIG_USE_VECTORIZER" and text in _FALSE:
            yield warning(f"{name} keeps the CPU driver from using vectors: kernels are slow", cure)
        elif name.startswith("CL_CONFIG_DUMP_") and text in _TRUE:
            yield warning(
                f"{name} writes files to the current folder, for each kernel that is built", cure
            )
        elif name in ("SYCL_UR_TRACE", "SYCL_PI_TRACE") and value not in ("", "0"):
            yield warning(
                f"{name} prints every call of the SYCL runtime, which makes steps slow", cure
            )
