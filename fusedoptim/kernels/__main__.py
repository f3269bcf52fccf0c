"""Build and check what is compiled ahead of time: ``python -m fusedoptim.kernels <command>``.

build    compile every kernel to ``fusedoptim/spirv/``, the machine code that launches them on
         torch's threads, and write the manifest ([jit] extra)
check    fail if a source changed and its module did not, or a module is damaged (no compiler)
verify   compile everything again and compare byte for byte ([jit] extra)
validate pass every module through spirv-val and, for skl, dg2 and pvc, ocloc; float64 modules for
         dg2 take minutes, and are compiled again if they or ocloc changed since the last time
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

from fusedoptim.kernels._validation import validate
from fusedoptim.launch.modules import FOLDER, MANIFEST, MANIFEST_VERSION
from fusedoptim.launch.parts import CODE

_HERE = Path(__file__).parent
_HELPERS = (
    "fetching.py",
    "language.py",
    "philox.py",
    "quarters.py",
    "rounding.py",
)  # no kernels, but what kernels use
_COMPILER_SOURCES = (
    *_HELPERS,
    *("_lowering.py", "_prefetching.py", "_rounding.py", "_vectors.py", "_compiler.py"),
)
_TABLES = tuple(_HERE.parent / name for name in ("dtypes.py", "launch/layout.py"))
_CODE_SOURCE = _HERE / "_native.py"
_TOOLS = ("numba-dpex", "numba", "llvmlite", "dpcpp-llvm-spirv")


def kernel_files() -> list[Path]:
    """The files that define kernels: one for each algorithm."""
    return sorted(path for path in _HERE.glob("[!_]*.py") if path.name not in _HELPERS)


def source_hash(path: Path) -> str:
    """SHA-256 of all the source that decides what the kernels of ``path`` compile to."""
    digest = hashlib.sha256()
    for source in (path, *(_HERE / name for name in _COMPILER_SOURCES), *_TABLES):
        digest.update(_text_of(source))
    return digest.hexdigest()


def _text_of(source: Path) -> bytes:
    """A source, the same whatever ends its lines."""
    return source.read_bytes().replace(b"\r\n", b"\n")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _compile_all() -> tuple[dict[str, Any], dict[Path, bytes]]:
    """The manifest, and the contents of each other file."""
    from fusedoptim.kernels._compiler import (
        argument_types,
        compile_kernel,
        is_serial,
        signature,
        variants_of,
    )
    from fusedoptim.kernels._native import compile_native

    code = compile_native()
    entries, files = {}, {CODE: code}
    for path in kernel_files():
        source = importlib.import_module(f"fusedoptim.kernels.{path.stem}")
        for kernel in (getattr(source, name) for name in source.__all__):
            alike: dict[Any, list[str]] = {}
            for variant in variants_of(kernel):
                alike.setdefault(argument_types(kernel, variant), []).append(variant)
            for variants in alike.values():
                shape = signature(kernel, variants[0])
                name = f"{kernel.__name__}_{variants[0]}"
                spirv = compile_kernel(kernel, variants[0], name)
                files[FOLDER / f"{name}.spv"] = spirv
                entries[name] = {
                    "kernel": kernel.__name__,
                    "variants": variants,
                    "file": f"{name}.spv",
                    "sha256": _sha256(spirv),
                    "source": path.name,
                    "source_sha256": source_hash(path),
                    "arguments": [[arg.name, arg.role.value] for arg in shape.arguments],
                    "sums": shape.sums,
                    "is_serial": is_serial(kernel),
                }
    manifest = {
        "version": MANIFEST_VERSION,
        "tools": {tool: importlib.metadata.version(tool) for tool in _TOOLS},
        "code": {"sha256": _sha256(code), "source_sha256": _sha256(_text_of(_CODE_SOURCE))},
        "modules": entries,
    }
    return manifest, files


def build() -> list[str]:
    """Compile every kernel, and replace what ``fusedoptim/spirv/`` holds."""
    manifest, files = _compile_all()
    for stale in FOLDER.glob("*.spv"):
        stale.unlink()
    for path, content in files.items():
        path.unlink(missing_ok=True)  # a process may have it mapped
        path.write_bytes(content)
    MANIFEST.write_text(_text(manifest))
    return []


def _text(manifest: dict[str, Any]) -> str:
    """The manifest as JSON, a line for each module."""
    entries = manifest["modules"].items()
    modules = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries)
    rest = {key: value for key, value in manifest.items() if key != "modules"}
    return f'{json.dumps(rest)[:-1]}, "modules": {{\n{modules}\n}}}}\n'


def check() -> list[str]:
    """What differs between the sources, the manifest and the modules, without the compiler."""
    manifest = json.loads(MANIFEST.read_text())
    modules, problems = manifest["modules"], []
    if manifest["code"]["source_sha256"] != _sha256(_text_of(_CODE_SOURCE)):
        problems.append(f"{_CODE_SOURCE.name} changed since it was compiled: run `make kernels`")
    if manifest["code"]["sha256"] != _sha256(CODE.read_bytes()):
        problems.append(f"{CODE.name} is not the code that was built: run `make kernels`")
    for path in kernel_files():
        entries = [entry for entry in modules.values() if entry["source"] == path.name]
        if not entries:
            problems.append(f"{path.name} has no compiled module: run `make kernels`")
        elif any(entry["source_sha256"] != source_hash(path) for entry in entries):
            problems.append(f"{path.name} changed since it was compiled: run `make kernels`")
    for name, entry in modules.items():
        path = FOLDER / entry["file"]
        if not (_HERE / entry["source"]).exists():
            problems.append(f"{name}: its source {entry['source']} is gone: run `make kernels`")
        if not path.exists():
            problems.append(f"{path.name} is missing: run `make kernels`")
        elif _sha256(path.read_bytes()) != entry["sha256"]:
            problems.append(f"{path.name} is not the module that was built: run `make kernels`")
    listed = {entry["file"] for entry in modules.values()}
    problems += [
        f"{path.name} is not in the manifest: run `make kernels`"
        for path in FOLDER.glob("*.spv")
        if path.name not in listed
    ]
    return problems


def verify() -> list[str]:
    """What differs between the committed files and a fresh build, byte for byte."""
    manifest, files = _compile_all()
    problems = []
    if json.loads(MANIFEST.read_text()) != manifest:
        problems.append("manifest.json differs from a fresh build: run `make kernels`")
    for path, content in files.items():
        if not path.exists() or path.read_bytes() != content:
            problems.append(f"{path.name} differs from a fresh build: run `make kernels`")
    return problems


def main() -> int:
    """Run the command that the command line names; print what is wrong."""
    commands = {"build": build, "check": check, "verify": verify, "validate": validate}
    parser = argparse.ArgumentParser(prog="python -m fusedoptim.kernels", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("command", choices=commands)
    command = parser.parse_args().command
    problems = commands[command]()
    for problem in problems:
        print(problem, file=sys.stderr)
    count = len(list(FOLDER.glob("*.spv")))
    print(f"{command}: {count} modules, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
