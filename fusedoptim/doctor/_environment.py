"""Environment variables that change what runs: which are set, and what each does."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from fusedoptim.doctor._report import Problem, Section, warning

_MEANINGS = {
    "OCL_ICD_FILENAMES": "OpenCL drivers besides the system's; ours adds pip's if it is not set",
    "OCL_ICD_VENDORS": "where the system's OpenCL drivers are registered",
    "ONEAPI_DEVICE_SELECTOR": "SYCL shows only these devices",
    "SYCL_DEVICE_ALLOWLIST": "SYCL shows only these devices",
    "SYCL_DEVICE_FILTER": "nothing: ONEAPI_DEVICE_SELECTOR took its place",
    "SYCL_PI_TRACE": "oneAPI 2024 prints its calls",
    "SYCL_UR_TRACE": "oneAPI 2025 and later print their calls",
    "SYCL_CACHE_PERSISTENT": "SYCL keeps compiled programs on disk; our kernels are not among them",
    "CL_CONFIG_CPU_TARGET_ARCH": "instruction set that the CPU driver compiles for",
    "CL_CONFIG_USE_VECTORIZER": "False: the CPU driver compiles one lane at a time",
    "CL_CONFIG_USE_FAST_RELAXED_MATH": "True: the CPU driver may reorder and approximate",
    "CL_CONFIG_DUMP_ASM": "the CPU driver writes files to the current folder",
    "CL_CONFIG_DUMP_BIN": "the CPU driver writes files to the current folder",
    "CL_CONFIG_DUMP_DISASSEMBLY": "the CPU driver writes files to the current folder",
    "CL_CONFIG_DUMP_IR_AFTER_OPTIMIZER": "the CPU driver writes files to the current folder",
    "CL_CONFIG_DUMP_IR_BEFORE_OPTIMIZER": "the CPU driver writes files to the current folder",
    "CUDA_VISIBLE_DEVICES": "nothing here: it hides NVIDIA's devices",
    "FUSEDOPTIM_CACHE_DIR": "where kernels that were compiled are kept; empty: nowhere",
    "FUSEDOPTIM_ISA": "highest instruction set that kernels are compiled for on the CPU",
    "FUSEDOPTIM_NOTEBOOK_SMALL": "the notebooks run with small parameters",
    "FUSEDOPTIM_TEST_SEED": "seed of the tests' random inputs",
    "LD_LIBRARY_PATH": "folders whose libraries are taken first",
    "LD_PRELOAD": "libraries that are loaded first",
    "OMP_NUM_THREADS": "threads of torch's own operations; kernels here run on the driver's",
    "ZE_AFFINITY_MASK": "Level Zero shows only these GPUs",
    "ZE_FLAT_DEVICE_HIERARCHY": "whether the tiles of a GPU are devices of their own",
    "ZE_ENABLE_PCI_ID_DEVICE_ORDER": "Level Zero sorts GPUs by their PCI address",
    "ZES_ENABLE_SYSMAN": "Level Zero tells how much memory is free",
}
_PREFIXES = {
    "OCL_ICD_": "read by the OpenCL loader",
    "SYCL_": "read by the SYCL runtime",
    "UR_": "read by the SYCL runtime",
    "CL_CONFIG_": "read by the CPU driver",
    "FUSEDOPTIM_": "ours",
    "OMP_": "read by OpenMP, in torch's own operations",
    "KMP_": "read by Intel's OpenMP; torch from PyPI has GNU's",
    "GOMP_": "read by GNU's OpenMP, in torch's own operations",
    "ZE_": "read by Level Zero",
    "ZES_": "read by Level Zero",
    "NEO": "read by Intel's GPU driver",
    "IGC_": "read by the compiler of Intel's GPU driver",
}
_TRUE = ("true", "1", "t")


def check() -> Section:
    """The variables that are set, and those that will surprise."""
    relevant = {
        name: value
        for name, value in sorted(os.environ.items())
        if name in _MEANINGS or name.startswith(tuple(_PREFIXES))
    }
    facts: dict[str, Any] = {
        name: f"{value!r}: {meaning(name)}" for name, value in relevant.items()
    } or {"variables": "none is set that matters here"}
    return Section("environment", facts, list(_surprises(relevant)))


def meaning(name: str) -> str:
    """What the variable does here."""
    if name in _MEANINGS:
        return _MEANINGS[name]
    return next(text for prefix, text in _PREFIXES.items() if name.startswith(prefix))


def _surprises(variables: Mapping[str, str]) -> Iterator[Problem]:
    def is_true(name: str) -> bool:
        return variables.get(name, "").lower() in _TRUE

    selector = variables.get("ONEAPI_DEVICE_SELECTOR", "")
    if selector:
        yield warning(
            f"ONEAPI_DEVICE_SELECTOR={selector} hides devices"
            + (
                "; with oneAPI 2026 a selector that names the backend opencl finds none at all"
                if "opencl" in selector.lower()
                else ""
            ),
            "unset ONEAPI_DEVICE_SELECTOR, or write '*:cpu' for the CPU and '*:gpu' for GPUs",
        )
    if "SYCL_DEVICE_FILTER" in variables:
        yield warning(
            "SYCL_DEVICE_FILTER has no effect: SYCL runtimes since 2023 do not read it",
            "unset SYCL_DEVICE_FILTER; ONEAPI_DEVICE_SELECTOR='*:gpu' chooses GPUs",
        )
    if is_true("CL_CONFIG_USE_FAST_RELAXED_MATH"):
        yield warning(
            "CL_CONFIG_USE_FAST_RELAXED_MATH lets the CPU driver approximate: results are not "
            "reproducible, and split weights may lose bits",
            "unset CL_CONFIG_USE_FAST_RELAXED_MATH",
        )
    if variables.get("CL_CONFIG_USE_VECTORIZER", "").lower() in ("false", "0", "f"):
        yield warning(
            "CL_CONFIG_USE_VECTORIZER keeps the CPU driver from using vectors: kernels are slow",
            "unset CL_CONFIG_USE_VECTORIZER",
        )
    for name in variables:
        if name.startswith("CL_CONFIG_DUMP_") and is_true(name):
            yield warning(
                f"{name} writes files to the current folder, for each kernel that is built",
                f"unset {name}",
            )
        if name in ("SYCL_UR_TRACE", "SYCL_PI_TRACE") and variables[name] not in ("", "0"):
            yield warning(
                f"{name} prints every call of the SYCL runtime, which makes steps slow",
                f"unset {name}",
            )
