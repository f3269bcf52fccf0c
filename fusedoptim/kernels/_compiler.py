"""From a kernel, a plain Python function, to a SPIR-V module, through numba-dpex.

Needs the ``[jit]`` extra. :func:`compile_kernel` is deterministic: the same source and tool
versions give the same bytes, which ``make kernels-verify`` compares with the committed ones.
"""

from __future__ import annotations

import functools
import inspect
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple, get_args, get_type_hints

import numpy as np

from fusedoptim.allocator import load_compiler
from fusedoptim.dtypes import VARIANTS
from fusedoptim.kernels import language, quarters, rounding
from fusedoptim.kernels.language import STATE_ELEMENTS, Role
from fusedoptim.launch.layout import INTEGERS, REALS, WORD, Argument, Layout

load_compiler()  # numba-dpex's wheels cannot find their own libraries

import dpcpp_llvm_spirv  # noqa: E402
import llvmlite.binding as llvm  # noqa: E402
from numba.core import compiler_machinery, ssa, transforms, types  # noqa: E402
from numba.core.base import BaseContext  # noqa: E402
from numba.core.compiler_lock import global_compiler_lock  # noqa: E402
from numba.core.postproc import PostProcessor, VariableLifetime  # noqa: E402
from numba.core.target_extension import target_override  # noqa: E402
from numba.core.targetconfig import TargetConfig  # noqa: E402
from numba.core.types.functions import BaseFunction  # noqa: E402
from numba_dpex import device_func  # noqa: E402
from numba_dpex.kernel_api_impl.spirv.dispatcher import SPIRVKernelDispatcher  # noqa: E402
from numba_dpex.kernel_api_impl.spirv.target import (  # noqa: E402
    SPIRV_TARGET_NAME,
    CompilationMode,
    SPIRVTargetContext,
)

from fusedoptim.kernels import (  # noqa: E402
    _lowering,
    _prefetching,
    _rounding,
    _vectors,  # noqa: F401 (registers)
)

_TRANSLATION = (
    "--spirv-max-version=1.0",  # what OpenCL 2.1 takes, so every driver
    f"--spirv-allow-unknown-intrinsics={_prefetching.INTRINSIC}",
)
# For these a kernel gets the value instead of the address.
_VALUES = (Role.DEVICE_SCALAR, Role.DEVICE_INT, Role.ROW_INT, Role.ROW_RESULT)
_LANE_FUNCTIONS = ("lane", "lanes", "uniform", "barrier", "group_sum", "group_max")
# What the generated loops call, and their variables: no argument may have such a name.
_CALLED = {
    "group": _lowering.group,
    "first_group": _lowering.first_group,
    "fetch": language.fetch,
    "lane": language.lane,
    "lanes": language.lanes,
}
_VARIABLES = ("rows", "head", "run", "next_row", "end", "row", "all_rows", "kernel", "real")
_ROW_LOOP = (*_VARIABLES, *_CALLED)
_ELEMENT_LOOP = ("at", "quarter", "quarter_of", "start")
_AHEAD = 16  # rows between the one that is walked and the one that is prefetched
_SCATTERED = (Role.PARAM, Role.STATE, Role.STATE_BF16)
_INLINE_THRESHOLD = 2  # of 0 to 3; from 1 on, every call in a kernel is inlined


class Signature(NamedTuple):
    """What a kernel's annotations say."""

    arguments: list[Argument]
    """The arguments in the launch block, in the order of its words."""
    parameters: list[Argument]
    """The parameters of the function, in its order."""
    sums: int
    """The number of values that the kernel returns for an element; a lane sums them over a row."""

    @property
    def is_element_kernel(self) -> bool:
        """Whether the function updates one element, and wants the loop over a row around it."""
        return any(argument.role is Role.INDEX for argument in self.parameters)


def is_serial(kernel: Callable[..., Any]) -> bool:
    """Whether neither a kernel that walks a row itself nor any function it calls uses lanes."""
    if signature(kernel, "f32").is_element_kernel:
        return False
    return not any(
        getattr(function, "__name__", "") in _LANE_FUNCTIONS for function in _called(kernel)
    )


def _called(function: Callable[..., Any]) -> Iterator[FunctionType]:
    """The plain functions that a function calls, directly or indirectly."""
    assert isinstance(function, FunctionType)
    for name in function.__code__.co_names:
        used = function.__globals__.get(name)
        if isinstance(used, FunctionType):
            yield used
            yield from _called(used)


def signature(kernel: Callable[..., Any], variant: str) -> Signature:
    """Read a kernel's annotations.

    Raises:
        TypeError: an argument is not annotated with a type of ``fusedoptim.kernels.language``, or
            with one that no launch block can hold, or its name is one that :func:`_entry_point`
            uses.
    """
    hints = get_type_hints(kernel, include_extras=True)
    found = []
    for name in inspect.signature(kernel).parameters:
        roles = [m for m in getattr(hints.get(name), "__metadata__", ()) if isinstance(m, Role)]
        if not roles:
            raise TypeError(
                f"{kernel.__name__}: argument {name!r} has no type of fusedoptim.kernels.language; "
                "annotate it with Index, Param, Grad, State, Scalar or another"
            )
        found.append(Argument(name, roles[0]))
    is_element_kernel = any(role is Role.INDEX for _, role in found)
    for name, _ in found:
        if name in _ROW_LOOP or (is_element_kernel and name in _ELEMENT_LOOP):
            raise TypeError(
                f"{kernel.__name__}: argument {name!r} has the name of a variable in the loop that "
                "is put around the kernel; give it another"
            )
    sums = len(get_args(hints.get("return")))
    words = [] if Role.LENGTH in (role for _, role in found) else [Argument("length", Role.LENGTH)]
    for argument in found:
        if argument.role is not Role.INDEX:
            words.append(argument)
        if argument.role is Role.PARAM and variant == "split":
            words.append(Argument("trail", Role.TRAIL))
    if sums:
        words.append(Argument("sums", Role.SUMS))
    Layout(words)  # raises
    return Signature(words, found, sums)


def variants_of(kernel: Callable[..., Any]) -> list[str]:
    """The variants of a kernel: none is of float64 if it rounds state to fewer bits."""
    roles = {role for _, role in signature(kernel, "f32").arguments}
    rounds = not roles.isdisjoint(STATE_ELEMENTS)
    return [v for v in VARIANTS if not (rounds and VARIANTS[v].arithmetic == "float64")]


def argument_types(kernel: Callable[..., Any], variant: str) -> tuple[types.Type, ...]:
    """The types of a kernel's arguments. Variants with equal types share one module."""
    return tuple(_numba_type(role, variant) for _, role in signature(kernel, variant).arguments)


def _numba_type(role: Role, variant: str) -> types.Type:
    element, real = VARIANTS[variant].element, VARIANTS[variant].real
    if role is Role.PARAM:
        return _lowering.Pointer("split" if variant == "split" else element)
    if role in (Role.GRAD, Role.INPUT, Role.OUTPUT):
        return _lowering.Pointer(element)
    if role in REALS:
        return getattr(types, VARIANTS[variant].arithmetic)
    if role in INTEGERS:
        return types.int64
    if role in STATE_ELEMENTS:
        return _lowering.Pointer(STATE_ELEMENTS[role])
    if role in (Role.DEVICE_INT, Role.ROW_INT, Role.INDICES):
        return _lowering.Pointer("i64")
    return _lowering.Pointer(real)


def _entry_point(kernel: Callable[..., Any], variant: str) -> Callable[[int], None]:
    """A function of the first row's address that calls ``kernel`` for each row of a group's run.

    The arguments of the launch are read once for a run.
    """
    shape = signature(kernel, variant)
    layout = Layout(shape.arguments)
    real = getattr(np, VARIANTS[variant].arithmetic)
    namespace: dict[str, Any] = {
        "kernel": _for_device(kernel, real),
        "quarter_of": _for_device(quarters.quarter_of, real),
        "real": real,
        **_CALLED,
    }
    rows, rows_per_group = layout.head_word["rows"], layout.head_word["rows_per_group"]
    of_group = [
        "head = read_length(rows)",
        f"run = read_length(head + {WORD * rows_per_group})",
        "next_row = (first_group() + group()) * run",
        f"all_rows = read_length(head + {WORD * rows})",
        "end = min(next_row + run, all_rows)",
    ]
    of_row = [f"row = rows + next_row * {WORD * layout.row_words}"]
    for argument in shape.arguments:
        name, role = argument
        if role is Role.TRAIL:
            continue  # read with its Param
        namespace[f"read_{name}"] = _lowering.argument_reader(_numba_type(role, variant))
        lines = of_row if role.in_row else of_group
        base, word = ("row", layout.row_word) if role.in_row else ("head", layout.head_word)
        lines.append(f"{name} = read_{name}({base} + {WORD * word[name]})")
        if role in _VALUES:
            lines.append(f"{name}_value = {name}[0]")
    if shape.is_element_kernel:
        of_row += _fetches(shape.arguments, layout)
    values = {Role.INDEX: "at + lane()", **dict.fromkeys(_VALUES, "{}_value")}
    call = ", ".join(values.get(role, "{}").format(name) for name, role in shape.parameters)
    of_row += (
        _loop(f"kernel({call})", shape.sums) if shape.is_element_kernel else [f"kernel({call})"]
    )
    lines = [*of_group, "while next_row < end:"]
    lines += [f"    {line}" for line in [*of_row, "next_row += 1"]]
    source = "def entry_point(rows):\n" + "".join(f"    {line}\n" for line in lines)
    exec(source, namespace)
    entry_point: Callable[[int], None] = namespace["entry_point"]
    return entry_point


def _fetches(arguments: Sequence[Argument], layout: Layout) -> list[str]:
    """Python source that prefetches 64 elements of a later row, where rows are short.

    They may be rows of a large table that a sparse gradient touches in an order that the processor
    cannot predict. The rows of the gradient itself are adjacent, and need no prefetch.
    """
    lines = [f"if run > 1 and next_row + {_AHEAD} < all_rows:"]
    for name, role in arguments:
        if role in _SCATTERED:
            word = _AHEAD * layout.row_words + layout.row_word[name]
            lines.append(f"    fetch(read_{name}(row + {WORD * word}), 0, 64)")
    return lines if len(lines) > 1 else []


@functools.cache
def _for_device(function: Callable[..., Any], real: Any) -> Any:
    """``function`` for numba, with the functions that it calls, of its module or of another.

    It is compiled once for all kernels that call it.
    """
    assert isinstance(function, FunctionType)
    lane_values = _lowering.lane_values(getattr(types, real.__name__))
    names: dict[str, Any] = {"real": real, "lane_values": lane_values}
    for name in function.__code__.co_names:
        used = function.__globals__.get(name)
        if not isinstance(used, FunctionType) or used.__module__ == language.__name__:
            continue
        if used.__module__ == rounding.__name__ and hasattr(_rounding, name):
            names[name] = getattr(_rounding, name)
        else:
            names[name] = _for_device(used, real)
    return device_func(
        FunctionType(function.__code__, function.__globals__ | names, function.__name__)
    )


def _loop(call: str, sums: int) -> list[str]:
    """Python source of a loop of ``call`` over a row.

    The quarters of a long row are walked side by side, and the rest in order. Until the last
    elements every lane has one, so the CPU driver emits plain vector loads; in one loop with a test
    for each lane all of them would be masked. The last part is skipped if no element is left for
    it, which matters for many short rows (docs/design/element-kernels.md).
    """
    totals = [f"total{k}" for k in range(sums)]
    terms = [f"term{k}" for k in range(sums)]
    body = [call]
    if sums:
        body = [f"({', '.join(terms)},) = {call}"]
        body += [f"{total} += {term}" for total, term in zip(totals, terms)]
    lines = [f"{total} = real(0)" for total in totals]
    lines += [
        "quarter = quarter_of(length)",
        "start = 0",
        "while start < quarter:",
        "    at = start",
        "    while at < 4 * quarter:",
        *(f"        {line}" for line in [*body, "at += quarter"]),
        "    start += lanes()",
        "at = 4 * quarter",
        "while at + lanes() <= length:",
        *(f"    {line}" for line in [*body, "at += lanes()"]),
        "if at < length:",
        "    if at + lane() < length:",
        *(f"        {line}" for line in body),
    ]
    lines += [f"sums[{sums} * lane() + {k}] = {total}" for k, total in enumerate(totals)]
    return lines


def _insert_new(context: Any, definitions: Iterable[Any]) -> None:
    """Insert the implementations that numba's ``context`` does not have."""
    inserted = vars(context).setdefault("_inserted", {})
    new = {id(definition): definition for definition in definitions}
    new = {key: definition for key, definition in new.items() if key not in inserted}
    inserted |= new
    BaseContext.insert_func_defn(context, new.values())


# numba-dpex inserts all of its own again several times for each function that is compiled. The
# search for an operator's implementation goes through all, so each kernel took longer than the
# one before it.
SPIRVTargetContext.insert_func_defn = _insert_new
# As often, it exchanges the same of NumPy's functions for OpenCL's.
SPIRVTargetContext.replace_dpnp_ufunc_with_ocl_intrinsics = functools.cache(
    SPIRVTargetContext.replace_dpnp_ufunc_with_ocl_intrinsics
)
# For each pass over a function, numba formats options and variables for events and logs, which
# nobody reads.
compiler_machinery.pformat = ssa.pformat = lambda value: ""


def _option_values(options: Any) -> dict[str, Any]:
    """All options and their values, without a call of a property for each."""
    own = options._values
    return {name: own.get(name, option.default) for name, option in options.options.items()}


TargetConfig.values = _option_values

_search_templates = BaseFunction.get_call_type


def _types_of_call(
    function: Any, context: Any, args: Sequence[types.Type], options: dict[str, types.Type]
) -> Any:
    """The types that a call takes and returns: numba tries a function's templates at each use.

    A call of a template that compiles something for it is not remembered, as that also depends on
    how its caller is compiled.
    """
    found = vars(function).setdefault("_found_types", {})
    key = context, tuple(args), tuple(options.items())
    if key in found:
        function._impl_keys[found[key].args] = function.typing_key
        return found[key]
    signature = _search_templates(function, context, args, options)
    if function._impl_keys[signature.args] is function.typing_key:
        found[key] = signature
    return signature


BaseFunction.get_call_type = _types_of_call
# For each variable that is stored, numba has LLVM parse a module to find the size of its type.
BaseContext.get_abi_sizeof = functools.cache(BaseContext.get_abi_sizeof)

_post_process = PostProcessor.run


def _after_pass(self: Any, emit_dels: bool = False, extend_lifetimes: bool = False) -> None:
    """What numba does after a pass, except to find which variables live in which block.

    Before it inserts their deletions, only generators need that.
    """
    ir = self.func_ir
    if emit_dels or ir.is_generator:
        _post_process(self, emit_dels, extend_lifetimes)
    else:
        ir.blocks = transforms.canonicalize_cfg(ir.blocks)
        ir.variable_lifetime = VariableLifetime(ir.blocks)
        ir.generator_info = None


PostProcessor.run = _after_pass


@global_compiler_lock  # type: ignore[untyped-decorator]
def llvm_module(
    function: Callable[..., None], arguments: Sequence[types.Type], name: str, **options: Any
) -> Any:
    """The optimized LLVM module of one kernel, whose only visible symbol is ``name``.

    Args:
        function: the kernel.
        arguments: their types.
        name: the name of the entry point.
        options: further ones of numba's.
    """
    options |= {
        "_compilation_mode": CompilationMode.KERNEL,
        "inline_threshold": _INLINE_THRESHOLD,
    }
    dispatcher = SPIRVKernelDispatcher(function, targetoptions=options)
    with target_override(SPIRV_TARGET_NAME):
        compiled = dispatcher._compiler._compile_core(tuple(arguments), types.void)
    library = compiled.library
    definition = library.get_function(compiled.fndesc.llvm_func_name)
    wrapper = compiled.target_context.prepare_spir_kernel(definition, compiled.fndesc.argtypes)
    library.inline_threshold = _INLINE_THRESHOLD
    library.finalize()

    module = llvm.parse_assembly(str(library.final_module))
    # A NumbaEnv global is left that spirv-val rejects and Intel's GPU compiler aborts on.
    for variable in module.global_variables:
        variable.linkage = "internal"
    for definition in module.functions:
        if definition.name == wrapper.name:
            definition.name = name
        elif not definition.is_declaration:
            definition.linkage = "internal"
    passes = llvm.ModulePassManager()
    passes.add_global_dce_pass()
    passes.add_strip_symbols_pass()  # names hold a counter: two builds would differ
    passes.run(module)
    return module


def compile_kernel(kernel: Callable[..., Any], variant: str, name: str) -> bytes:
    """Compile a variant of ``kernel`` to a SPIR-V module.

    Args:
        kernel: a function whose arguments are annotated with types of the kernel language.
        variant: its name, such as "bf16" or "split".
        name: the name of the module's entry point.

    Returns:
        the binary module; its only entry point takes one int64, the address of a row.
    """
    return to_spirv(llvm_module(_entry_point(kernel, variant), [types.int64], name))


def to_spirv(module: Any, *options: str) -> bytes:
    """Translate an LLVM module, with further options of the translator.

    Raises:
        RuntimeError: llvm-spirv failed; the message has its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        bitcode, spirv = Path(folder, "kernel.bc"), Path(folder, "kernel.spv")
        bitcode.write_bytes(module.as_bitcode())
        translator = dpcpp_llvm_spirv.get_llvm_spirv_path()
        command = [translator, *_TRANSLATION, *options, str(bitcode), "-o", str(spirv)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"llvm-spirv cannot translate the kernel: {done.stderr.strip()}")
        return spirv.read_bytes()
