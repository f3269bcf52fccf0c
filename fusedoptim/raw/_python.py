"""A raw kernel that is written in Python: its arguments, its identity, and its SPIR-V.

Compiling needs the ``[jit]`` extra. It is deterministic: one :func:`identity`, one module.
"""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import hashlib
import importlib.metadata
import inspect
import itertools
import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np

import fusedoptim.kernels.language
from fusedoptim.dtypes import ELEMENTS
from fusedoptim.raw import language
from fusedoptim.raw._errors import KernelCompileError
from fusedoptim.raw.language import Element, Global, Local

TOOLS = ("numba-dpex", "numba", "llvmlite", "dpcpp-llvm-spirv")
"""The packages that compile."""
_FOLDER = Path(__file__).parents[1]
_SOURCES = (
    *("raw/language.py", "raw/_lowering.py", "raw/_python.py"),
    *("kernels/_lowering.py", "kernels/_compiler.py", "dtypes.py"),
)
_LANGUAGES = (language.__name__, fusedoptim.kernels.language.__name__)
_NUMBERS = (bool, int, float, str, type(None), np.generic)
_BUILTINS = {"abs", "bool", "divmod", "float", "int", "max", "min", "pow", "range", "round"}
_stand_ins = itertools.count()
# The module then has the arguments' types in OpenCL C too: SPIR-V's integers have no signs.
_KEEP_TYPES = "--preserve-ocl-kernel-arg-type-metadata-through-string"


class Argument(NamedTuple):
    """One argument of a kernel, from its annotation."""

    name: str
    element: str
    """The type of the number, or of the numbers in memory, such as "f32"."""
    memory: type[Any] | None
    """Global, Local, or None for a number."""

    @property
    def c_type(self) -> str:
        """The type in OpenCL C."""
        return ELEMENTS[self.element].c + ("*" if self.memory else "")


def identity(function: Callable[..., None]) -> bytes:
    """A hash of everything that decides what ``function`` compiles to.

    This is its code and annotations, the numbers and functions that it uses, and the versions of
    the tools.

    Raises:
        ImportError: the compiler is not installed.
        TypeError: ``function`` is not a kernel, or uses something that a kernel cannot.
    """
    function = _plain(function)
    whole = (_tools(), arguments(function), _description(function, ()))
    return hashlib.sha256(repr(whole).encode()).digest()


def compile_python(function: Callable[..., None], options: Sequence[str] = ()) -> bytes:
    """Compile a Python function to a SPIR-V module, whose entry point has the function's name.

    Args:
        function: annotated with types of :mod:`fusedoptim.raw.language`.
        options: none; numba has no options that a kernel could use.

    Raises:
        ImportError: the compiler is not installed.
        KernelCompileError: numba cannot compile the function, for the reason in the message.
        TypeError: ``function`` is not a kernel, or uses something that a kernel cannot.
        ValueError: there are options.
    """
    if options:
        raise ValueError(f"a kernel written in Python takes no options, and got {list(options)!r}")
    function = _plain(function)
    found = arguments(function)
    _description(function, ())  # refuses what numba would explain less well, or ignore
    _tools()
    # numba is slow to import.
    from numba.core.errors import NumbaError

    from fusedoptim.kernels._compiler import llvm_module, to_spirv
    from fusedoptim.kernels._lowering import VALUES
    from fusedoptim.raw._lowering import Pointer

    types = [
        VALUES[a.element] if a.memory is None else Pointer(a.element, local=a.memory is Local)
        for a in found
    ]
    real = np.float64 if any(a.element == "f64" for a in found) else np.float32
    try:
        # As in numpy, a division by zero is not an error: nobody would see it.
        kernel = _prepared(function, real)
        module = llvm_module(kernel, types, function.__name__, error_model="numpy")
        return to_spirv(_with_arguments(module, function.__name__, found), _KEEP_TYPES)
    except (NumbaError, RuntimeError) as error:
        raise KernelCompileError(
            f"the kernel {function.__name__} does not compile:\n{error}", str(error)
        ) from error


def arguments(function: FunctionType) -> tuple[Argument, ...]:
    """The arguments of ``function``, from its annotations.

    Raises:
        TypeError: an argument has no type of the language, or one that it cannot have.
    """
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise TypeError(
            f"{function.__name__}: an annotation cannot be read ({error}); import the types of "
            "fusedoptim.raw.language at the top of the module"
        ) from error
    found = []
    for parameter in inspect.signature(function).parameters.values():
        argument = _argument(parameter.name, hints.get(parameter.name))
        _check_argument(function.__name__, parameter, argument)
        assert argument is not None
        found.append(argument)
    if hints.get("return", type(None)) is not type(None):
        raise TypeError(f"{function.__name__}: a kernel returns None; store results in a Global")
    return tuple(found)


def _argument(name: str, hint: Any) -> Argument | None:
    memory = get_origin(hint)
    if memory not in (Global, Local):
        memory = None
    (inner,) = get_args(hint) if memory else (hint,)
    elements = [m for m in getattr(inner, "__metadata__", ()) if isinstance(m, Element)]
    return Argument(name, elements[0].dtype, memory) if elements else None


def _check_argument(kernel: str, parameter: inspect.Parameter, argument: Argument | None) -> None:
    name = parameter.name
    if argument is None:
        cure = "annotate it with Int64, Float32, Global[Float32] or another"
        if name in ("item", "nd_item") or "Item" in str(parameter.annotation):
            cure = (
                f"leave {name!r} out and call global_id(0) for {name}.get_id(0) or "
                f"{name}.get_global_id(0), local_id(0) for {name}.get_local_id(0), and annotate "
                "the other arguments, such as x: Global[Float32]"
            )
        raise TypeError(
            f"{kernel}: argument {name!r} has no type of fusedoptim.raw.language; {cure}"
        )
    if argument.memory is None and ELEMENTS[argument.element].arithmetic != argument.element:
        raise TypeError(f"{kernel}: argument {name!r} is a 16-bit number; make it a Float32")
    if parameter.default is not parameter.empty or parameter.kind is parameter.KEYWORD_ONLY:
        raise TypeError(
            f"{kernel}: argument {name!r} has a default or no position; a launch passes "
            "all arguments, in order"
        )


def _plain(function: Any) -> FunctionType:
    """The Python function behind a decorator of numba's or numba-dpex's."""
    function = getattr(function, "py_func", function)
    if not isinstance(function, FunctionType) or not function.__name__.isidentifier():
        raise TypeError(f"a kernel is a function made with def, not {function!r}")
    return function


@functools.cache
def _tools() -> tuple[str, ...]:
    """The versions of all tools that compile."""
    try:
        versions = [importlib.metadata.version(tool) for tool in TOOLS]
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(
            f"{error.name} is not installed, which compiles kernels that are written in Python: "
            "pip install '.[jit]' in a clone of fusedoptim, into an environment of its own with "
            "CPython 3.10 or 3.11; or compile the kernel there (python -m fusedoptim aot build) "
            "and load the bundle here"
        ) from error
    sources = [hashlib.sha256((_FOLDER / name).read_bytes()).hexdigest() for name in _SOURCES]
    return (platform.python_version(), *versions, *sources)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """``code``, and that of the functions and lambdas defined in it."""
    yield code
    for nested in code.co_consts:
        if isinstance(nested, CodeType):
            yield from _codes(nested)


def _operands(function: FunctionType, *operations: str) -> set[str]:
    return {
        op.argval
        for code in _codes(function.__code__)
        for op in dis.get_instructions(code)
        if op.opname in operations
    }


def _names(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The globals and variables of enclosing functions that ``function`` uses."""
    for name in sorted(_operands(function, "LOAD_GLOBAL")):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        yield name, cell.cell_contents


class _Attributes:
    """The attributes that ``function`` uses of each module.

    A path is the name of a variable and those of attributes, as in ``package.module``. It is ()
    for a module that is not used by name, as in ``m = package.module; m.scale``: that has every
    attribute that the function uses, of whatever object.
    """

    def __init__(self, function: FunctionType) -> None:
        self._all = sorted(_operands(function, "LOAD_ATTR", "LOAD_METHOD"))
        self._paths: set[tuple[str, ...]] = set()
        """What is loaded, with all attributes that are taken of it at once."""
        for code in _codes(function.__code__):
            path: tuple[str, ...] = ()
            for op in dis.get_instructions(code):
                if op.opname in ("LOAD_ATTR", "LOAD_METHOD") and path:
                    path = *path, op.argval
                elif op.opname != "EXTENDED_ARG":
                    self._paths.add(path)
                    path = (op.argval,) if op.opname in ("LOAD_GLOBAL", "LOAD_DEREF") else ()

    def of(self, path: tuple[str, ...]) -> list[tuple[str, tuple[str, ...]]]:
        """The attributes of the module at ``path``, with their paths."""
        if path in self._paths:
            return [(name, ()) for name in self._all]
        n = len(path)
        names = {each[n] for each in self._paths if each[:n] == path and len(each) > n}
        return [(name, (*path, name)) for name in sorted(names)]


def _values(
    module: ModuleType, attributes: Sequence[tuple[str, tuple[str, ...]]]
) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """What a kernel can use of a module, except what numba knows, such as ``math.exp``."""
    for name, path in attributes:
        value = getattr(module, name, None)
        is_known = callable(value) and not isinstance(value, enum.EnumMeta)
        if value is not None and (hasattr(value, "py_func") or not is_known):
            yield name, value, path


def _description(function: FunctionType, callers: tuple[FunctionType, ...]) -> Any:
    """A description of ``function`` whose repr is the same in every process.

    Raises:
        TypeError: it uses something that a kernel cannot.
    """
    name = function.__name__
    if function in callers:
        raise TypeError(f"{name} calls itself, which no device can do: write a loop")
    if _operands(function, "RAISE_VARARGS"):
        raise TypeError(
            f"{name} contains raise or assert, which a device cannot report: store a flag in a "
            "Global[Int32] and look at it after the launch"
        )
    builtin = _operands(function, "LOAD_GLOBAL") - function.__globals__.keys()
    if unknown := sorted(builtin.intersection(vars(builtins)) - _BUILTINS):
        raise TypeError(
            f"{name} uses {unknown[0]}; of Python's built-ins, a kernel can use "
            f"{', '.join(sorted(_BUILTINS))}"
        )
    attributes = _Attributes(function)

    def describe(
        used: str, value: Any, path: tuple[str, ...] = (), modules: tuple[Any, ...] = ()
    ) -> Any:
        value = getattr(value, "py_func", value)
        if isinstance(value, _NUMBERS):
            return type(value).__name__, repr(value)
        if isinstance(value, tuple):
            fields = getattr(value, "_fields", None)
            return type(value).__name__, fields, [describe(used, item) for item in value]
        if isinstance(value, CodeType):
            consts = [describe("a constant", const) for const in value.co_consts]
            names = value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars
            return value.co_name, value.co_code.hex(), names, consts
        if isinstance(value, ModuleType):
            if (value, path) in modules:  # modules of a package that import each other
                return value.__name__
            inside = (*modules, (value, path))
            found = _values(value, attributes.of(path))
            return value.__name__, [(a, describe(a, v, p, inside)) for a, v, p in found]
        if isinstance(value, FunctionType) and value.__module__ not in _LANGUAGES:
            return _description(value, (*callers, function))
        if isinstance(value, enum.EnumMeta):
            members: list[enum.Enum] = list(value)
            # Not its module, whose name aot makes from the file's path.
            return value.__name__, list(map(repr, members))
        if isinstance(value, (FunctionType, BuiltinFunctionType, type, np.ufunc)):
            return getattr(value, "__module__", "numpy"), value.__name__
        raise TypeError(
            f"{name} uses {used!r}, of type {type(value).__name__}; of what is outside of it, a "
            "kernel can use numbers, tuples of numbers, functions and modules"
        )

    defaults = describe("a default", function.__defaults__ or ())
    used = [(key, describe(key, value, (key,))) for key, value in _names(function)]
    return name, describe("its code", function.__code__), defaults, used


def _prepared(function: FunctionType, real: type[np.floating[Any]]) -> FunctionType:
    """``function`` with its real numbers as ``real``; functions that it calls are prepared too.

    A bare literal would be a float64, and turn every operation with it into float64: slow, and
    impossible on a GPU without float64 units.
    """
    from numba_dpex import device_func

    attributes = _Attributes(function)

    def prepare(value: Any, path: tuple[str, ...] = ()) -> Any:
        value = getattr(value, "py_func", value)
        if type(value) is float:
            return real(value)
        if isinstance(value, tuple):
            items = map(prepare, value)
            return value._make(items) if hasattr(value, "_make") else tuple(items)
        if isinstance(value, CodeType):
            return value.replace(co_consts=prepare(value.co_consts))
        if isinstance(value, ModuleType):
            return prepare_module(value, path, {})
        if isinstance(value, FunctionType) and value.__module__ not in _LANGUAGES:
            return device_func(_prepared(value, real))
        return value

    def prepare_module(
        module: ModuleType, path: tuple[str, ...], known: dict[Any, ModuleType]
    ) -> ModuleType:
        """A stand-in with the attributes that the function may use."""
        if (module, path) not in known:
            # For numba, modules of one name are one module.
            stand_in = known[module, path] = ModuleType(f"{module.__name__} ({next(_stand_ins)})")
            used = attributes.of(path)
            held = {a: getattr(module, a) for a, _ in used if hasattr(module, a)}
            for name, value, p in _values(module, used):
                is_module = isinstance(value, ModuleType)
                held[name] = prepare_module(value, p, known) if is_module else prepare(value)
            vars(stand_in).update(held)
        return known[module, path]

    names = {name: prepare(value, (name,)) for name, value in _names(function)}
    return FunctionType(
        prepare(function.__code__),
        function.__globals__ | names,
        function.__name__,
        prepare(function.__defaults__),
        tuple([CellType(names[name]) for name in function.__code__.co_freevars]),
    )


def _with_arguments(module: Any, name: str, found: Sequence[Argument]) -> Any:
    """``module`` with the names and types of its kernel's arguments, for those who read it."""
    import llvmlite.binding as llvm

    for argument, value in zip(found, module.get_function(name).arguments):
        value.name = argument.name
    types = ", ".join(f'!"{argument.c_type}"' for argument in found)
    lines = str(module).splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("define spir_kernel "))
    new = f"!{sum(line.startswith('!') for line in lines)}"  # no number so far is as large
    lines[head] = lines[head].removesuffix("{") + f"!kernel_arg_type {new} {{"
    return llvm.parse_assembly("\n".join([*lines, f"{new} = !{{{types}}}", ""]))
