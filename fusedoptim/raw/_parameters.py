"""Parameters such as "float32 x, raw T y" of elementwise and reduction kernels, in C too."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fusedoptim.dtypes import ELEMENTS, Element
from fusedoptim.launch.devices import BACKENDS
from fusedoptim.raw._errors import class_of
from fusedoptim.raw._pointers import MASKED, NESTED
from fusedoptim.raw._scalars import TRUTH
from fusedoptim.raw._spirv import Parameter
from fusedoptim.step.tensors import has_shared_elements

Scalar = bool | int | float


class Dtype(NamedTuple):
    """A number's type in torch, and in C in memory and in arithmetic."""

    torch: torch.dtype
    memory: str
    arithmetic: str
    load: str = ""
    store: str = ""
    """C functions between memory and arithmetic, "" if those are the same."""


def _dtype(element: Element) -> Dtype:
    arithmetic, convert = ELEMENTS[element.arithmetic].c, ("", "")
    if element.arithmetic != element.name:
        convert = f"from_{element.c}", f"to_{element.c}"
    return Dtype(getattr(torch, element.dtype), element.c, arithmetic, *convert)


DTYPES = {"bool": Dtype(torch.bool, "uchar", "bool", "(bool)", "(uchar)")} | {
    element.dtype: _dtype(element) for element in ELEMENTS.values()
}
_BY_TORCH = {dtype.torch: dtype for dtype in DTYPES.values()}
_BY_C = {element.c: element for element in ELEMENTS.values()}
_PYTHON = {bool: torch.bool, int: torch.int64, float: torch.float32}
_KEYWORDS = frozenset(
    """
    auto break case char const continue default do double else enum extern float for goto half if
    inline int long register restrict return short signed sizeof static struct switch typedef union
    unsigned void volatile while bool uchar ushort uint ulong size_t kernel global local constant
    private generic pipe read_only write_only read_write uniform
    """.split()  # noqa: SIM905  # a list would be much longer
)

# Round to nearest even in integer arithmetic, as fusedoptim/kernels/_lowering.py explains. A half
# is read as a ushort: reading a half takes the extension for float16 arithmetic.
CONVERSIONS = """
typedef ushort bfloat16;
static inline float from_bfloat16(ushort bits) { return as_float((uint)bits << 16); }
static inline ushort to_bfloat16(float value) {
    uint bits = as_uint(value);
    return isnan(value) ? 0x7FC0 : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}
static inline float from_half(ushort bits) {
    uint magnitude = bits & 0x7FFF, sign = (uint)(bits & 0x8000) << 16;
    uint normal = (magnitude << 13) + ((127 - 15) << 23);
    normal = magnitude >= 0x7C00 ? normal | 0x7F800000 : normal;
    uint tiny = as_uint((float)magnitude * 0x1p-24f);
    return as_float((magnitude < 0x0400 ? tiny : normal) | sign);
}
static inline ushort to_half(float value) {
    uint bits = as_uint(value), magnitude = bits & 0x7FFFFFFF, sign = (bits >> 16) & 0x8000;
    uint normal = (magnitude - ((127 - 15) << 23) + 0x0FFF + ((magnitude >> 13) & 1)) >> 13;
    uint tiny = as_uint(as_float(magnitude) + 0.5f) - 0x3F000000;
    uint result = magnitude < 0x38800000 ? tiny : normal;
    result = magnitude >= 0x47800000 ? 0x7C00 : result;
    return (magnitude > 0x7F800000 ? 0x7E00 : result) | sign;
}
"""


MEMORY = "_memory_"
"""What the name of a tensor ends with in the kernel, where its own is that of an element."""


class Param(NamedTuple):
    """A declared parameter."""

    type: str
    """A name of DTYPES, or a capital letter that stands for any of them."""
    name: str
    raw: bool
    """Whether the operation indexes the tensor itself."""

    def __str__(self) -> str:
        return f"{'raw ' if self.raw else ''}{self.type} {self.name}"


class Operand(NamedTuple):
    """A parameter and its argument in a call."""

    param: Param
    dtype: Dtype
    value: Tensor | Scalar

    @property
    def tensor(self) -> Tensor:
        """The argument, which must be a tensor."""
        assert isinstance(self.value, Tensor)
        return self.value

    @property
    def is_element(self) -> bool:
        """Whether it is a tensor and the operation gets one element of it."""
        return isinstance(self.value, Tensor) and not self.param.raw

    @property
    def c_name(self) -> str:
        """The name of the kernel's parameter in C."""
        return f"{self.param.name}{MEMORY}" if self.is_element else self.param.name

    def parameter(self, const: bool) -> Parameter:
        """The kernel's parameter."""
        is_pointer = isinstance(self.value, Tensor)
        if not is_pointer and self.dtype.torch == torch.bool:
            return Parameter(self.c_name, "scalar", TRUTH, 1, False)
        element = _BY_C[self.dtype.memory if is_pointer else self.dtype.arithmetic]
        kind = "pointer" if is_pointer else "scalar"
        return Parameter(self.c_name, kind, element.name, element.size, is_pointer and const)

    def load(self, index: str, const: bool) -> str:
        """C that declares a variable with the element at ``index``."""
        value = f"{self.dtype.load}({self._elements(const)}[{index}])"
        return f"{'const ' * const}{self.dtype.arithmetic} {self.param.name} = {value};"

    def store(self, index: str) -> str:
        """C that stores the variable at ``index``."""
        return f"{self._elements(const=False)}[{index}] = {self.dtype.store}({self.param.name});"

    def _elements(self, const: bool) -> str:
        if self.dtype.memory != "half":
            return self.c_name
        return f"((global {'const ' * const}ushort *){self.c_name})"


def parse(text: str, what: str, reserved: Sequence[str]) -> tuple[Param, ...]:
    """The parameters that ``text`` declares.

    Args:
        text: the declarations.
        what: what errors call it.
        reserved: names that the kernel's expressions use.
    """
    if not isinstance(text, str):
        raise TypeError(
            f'{what}={text!r} is {class_of(text)}; pass a str, such as "float32 x, raw T y"'
        )
    params = []
    for declaration in filter(None, map(str.strip, text.split(","))):
        match = re.fullmatch(r"(raw\s+)?(\w+)\s+([A-Za-z]\w*)", declaration)
        if match is None:
            raise ValueError(f'{what}: {declaration!r} is not like "float32 x" or "raw T x"')
        raw, type_, name = match.groups()
        if type_ not in DTYPES and re.fullmatch("[A-Z]", type_) is None:
            raise ValueError(
                f"{what}: {type_!r} of {declaration!r} is not a type; supported types are "
                f"{', '.join(DTYPES)}, and capital letters for any of them"
            )
        if name in reserved or name.endswith("_"):
            raise ValueError(
                f"{what}: {name!r} is a name of the generated kernel, as are "
                f"{', '.join(reserved)} and those that end with _; choose another"
            )
        if name in _KEYWORDS:
            raise ValueError(
                f"{what}: {name!r} is a reserved word of OpenCL C; choose another name"
            )
        params.append(Param(type_, name, raw is not None))
    return tuple(params)


def check_names(kernel: str, params: Sequence[Param]) -> None:
    """Raise ValueError unless the kernel's name is an identifier of C and names are unique."""
    if re.fullmatch(r"[A-Za-z]\w*", kernel) is None or kernel in _KEYWORDS:
        raise ValueError(f"name: {kernel!r} cannot be the name of a function in OpenCL C")
    names = [param.name for param in params]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two parameters have the name {name!r}")


def bind(
    kernel: str, params: Sequence[Param], values: Sequence[Any], inputs: int
) -> dict[str, Dtype]:
    """The dtype of each parameter's type in a call.

    A number has the dtype that tensors give its letter; without any, int64, float32 or bool.

    Args:
        kernel: its name, for errors.
        params: its parameters.
        values: their arguments; those of the outputs may be left out.
        inputs: how many of them, the first ones, may be numbers.

    Raises:
        TypeError: an argument is neither a tensor nor a number, or is of another dtype.
    """
    found = dict(DTYPES)
    numbers = []
    for k, (param, value) in enumerate(zip(params, values)):
        may_be_number = k < inputs and not param.raw
        if isinstance(value, Tensor):
            _bind_tensor(kernel, param, value.dtype, found)
        elif type(value) in _PYTHON and may_be_number:
            numbers.append((param, value))
        else:
            raise TypeError(
                f"{kernel}: argument {param.name!r} is {class_of(value)}; pass a torch "
                f"tensor or a numpy array{', or a number' if may_be_number else ''}"
            )
    for param, value in numbers:
        dtype = found.setdefault(param.type, _BY_TORCH[_PYTHON[type(value)]])
        may_be_real = dtype.torch.is_floating_point or dtype.torch == torch.bool
        if isinstance(value, float) and not may_be_real:
            raise TypeError(
                f"{kernel}: argument {param.name!r} is {value!r} and must be a number of "
                f"{dtype.torch}"
            )
    return found


def _bind_tensor(kernel: str, param: Param, dtype: torch.dtype, found: dict[str, Dtype]) -> None:
    if dtype not in _BY_TORCH:
        raise TypeError(
            f"{kernel}: argument {param.name!r} is of {dtype}; supported types are "
            f"{', '.join(DTYPES)}"
        )
    bound = found.setdefault(param.type, _BY_TORCH[dtype])
    if bound.torch != dtype:
        letter = "" if param.type in DTYPES else f", which {param.type} is in this call"
        raise TypeError(
            f"{kernel}: argument {param.name!r} is of {dtype} and must be of {bound.torch}{letter}"
            f"; convert it with .to({bound.torch})"
        )


def read(
    kernel: str, params: Sequence[Param], args: Sequence[Any], inputs: int
) -> tuple[list[Tensor | Scalar], tuple[Any, ...]]:
    """The arguments, and for each everything that the plan of a call depends on.

    Args:
        kernel: its name, for errors.
        params: its parameters, for errors.
        args: the arguments; numpy arrays become tensors over the same memory.
        inputs: how many of them, the first ones, are only read.

    Raises:
        RuntimeError: one requires a gradient.
        TypeError: an array is masked, or of a dtype that torch does not have; a tensor is nested.
        ValueError: one is sparse, or an array that torch does not accept or that is read-only.
    """
    values: list[Any] = []
    forms: list[Any] = []
    for k, value in enumerate(args):
        if isinstance(value, np.ndarray):
            value = _tensor_over(value, _label(kernel, params, k), is_input=k < inputs)
        if isinstance(value, Tensor):
            if value.requires_grad and torch.is_grad_enabled():
                raise RuntimeError(
                    f"{_label(kernel, params, k)} requires a gradient, and autograd does not see a "
                    "kernel; call it under torch.no_grad(), or pass tensor.detach()"
                )
            if value.is_nested:
                raise TypeError(f"{_label(kernel, params, k)} is {NESTED}")
            if value.layout is not torch.strided:
                raise ValueError(
                    f"{_label(kernel, params, k)} is {value.layout}; pass its .to_dense()"
                )
            forms.append((value.dtype, value.shape, value.stride(), value.device))
        else:
            if isinstance(value, np.generic):
                value = value.item()
            forms.append(type(value))
        values.append(value)
    return values, tuple(forms)


def _label(kernel: str, params: Sequence[Param], k: int) -> str:
    """What errors call argument ``k``, which may be one too many."""
    return f"{kernel}: argument {repr(params[k].name) if k < len(params) else k}"


def _tensor_over(array: NDArray[Any], label: str, is_input: bool) -> Tensor:
    """A tensor over an array's memory; errors call it ``label``."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{label} is {MASKED}")
    if not array.flags.writeable:
        if not is_input:
            raise ValueError(f"{label} is an output and a read-only array; pass one to write to")
        array = np.asarray(_Writable(array))
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{label} is an array that torch refuses: {error}") from None


class _Writable:
    """A read-only array without that mark, to avoid torch's warning; inputs are only read."""

    def __init__(self, array: NDArray[Any]) -> None:
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
        self._owner = array


def check_count(kernel: str, inputs: int, outputs: int, values: Sequence[Any]) -> None:
    """Raise unless each input and all or no outputs have arguments, on one known device."""
    if len(values) not in (inputs, inputs + outputs):
        raise TypeError(
            f"{kernel} takes {inputs} inputs and then its {outputs} outputs or none; "
            f"{len(values)} were given"
        )
    devices = {str(value.device) for value in values if isinstance(value, Tensor)}
    if len(devices) > 1:
        raise ValueError(
            f"{kernel}: the tensors are on {' and '.join(sorted(devices))}; move them to one device"
        )
    for device in devices:
        if torch.device(device).type not in BACKENDS:
            raise RuntimeError(
                f"{kernel}: the tensors are on {device}, which SYCL does not serve; move them to "
                f"{' or '.join(map(repr, BACKENDS))}"
            )


def common_shape(
    kernel: str, operands: Sequence[Operand], cure: str = "pass a tensor that is not raw"
) -> tuple[torch.Size, torch.device]:
    """The shape to which tensors that are not raw are broadcast, and their device.

    Args:
        kernel: its name, for errors.
        operands: the arguments.
        cure: what to do if none of them is such a tensor.
    """
    elements = [operand.tensor for operand in operands if operand.is_element]
    if not elements:
        raise ValueError(f"{kernel}: no argument gives a shape; {cure}")
    try:
        shape = torch.broadcast_shapes(*[t.shape for t in elements])  # type: ignore[no-untyped-call]  # untyped in torch
    except RuntimeError as error:
        raise ValueError(f"{kernel}: the arguments' shapes do not fit: {error}") from error
    return shape, elements[0].device


def check_output(kernel: str, operand: Operand, shape: torch.Size) -> None:
    """Raise ValueError unless an output has this shape, and its elements do not share memory."""
    tensor = operand.tensor
    if tensor.shape != shape:
        raise ValueError(
            f"{kernel}: the output {operand.param.name!r} has shape {tuple(tensor.shape)}, and the "
            f"result's is {tuple(shape)}"
        )
    if has_shared_elements(tensor):
        raise ValueError(
            f"{kernel}: elements of the output {operand.param.name!r} share memory; "
            "pass its .clone()"
        )


def output_dtype(kernel: str, param: Param, found: dict[str, Dtype]) -> Dtype:
    """The dtype of an output that the call creates."""
    if param.type not in found:
        raise TypeError(
            f"{kernel}: no input says what {param.type} of the output {param.name!r} is; pass the "
            "output, or declare its type"
        )
    return found[param.type]


def head(n: int, found: dict[str, Dtype]) -> str:
    """C that begins a kernel over ``n`` elements: index types, conversions, types by letter.

    An index has 64 bits. As a narrower one may wrap, the CPU driver could not tell that
    adjacent work items access adjacent elements, and would use gathers. Divisions use 32
    bits if possible, because 64-bit divisions are slow.
    """
    narrow = "uint" if n < 2**32 else "ulong"
    letters = sorted(found.keys() - DTYPES.keys())
    lines = [f"typedef {found[letter].arithmetic} {letter};\n" for letter in letters]
    return f"typedef ulong index_t;\ntypedef {narrow} narrow_t;{CONVERSIONS}{''.join(lines)}"


def of_kernel(
    first: Sequence[Parameter], operands: Sequence[Operand], outputs: Sequence[Param]
) -> tuple[Parameter, ...]:
    """A kernel's parameters: the ``first`` ones, then those of operands, some of them written."""
    return (*first, *[operand.parameter(operand.param not in outputs) for operand in operands])


def opening(kernel: str, parameters: Sequence[Parameter], takes_frame: bool) -> str:
    """C that begins a kernel with these parameters.

    A kernel that takes a frame finds in it one word for each parameter: the value of a pointer, or
    the address of any other value.
    """
    if not takes_frame:
        return f"kernel void {kernel}({', '.join(map(_declaration, parameters))}) {{"
    lines = [f"kernel void {kernel}(const ulong frame_) {{"]
    for k, parameter in enumerate(parameters):
        word = f"((global const ulong *)frame_)[{k}]"
        if parameter.kind == "pointer":
            value = f"({_c_type(parameter)}){word}"
        else:
            value = f"*(global {_c_type(parameter)}*){word}"
        lines.append(f"    {_declaration(parameter)} = {value};")
    return "\n".join(lines)


def _c_type(parameter: Parameter) -> str:
    c = "uchar" if parameter.dtype == TRUTH else ELEMENTS[parameter.dtype].c
    return (
        f"global {'const ' * parameter.is_const}{c} *"
        if parameter.kind == "pointer"
        else f"const {c} "
    )


def _declaration(parameter: Parameter) -> str:
    return f"{_c_type(parameter)}{parameter.name}"


def declared(
    numbers: Collection[str], operands: Sequence[Operand], outputs: Sequence[Param]
) -> dict[str, str]:
    """C for a kernel whose first argument is an array ``numbers_``.

    Args:
        numbers: the names of the numbers in the array.
        operands: the last arguments.
        outputs: the parameters that the kernel writes.

    Returns:
        "numbers": C that reads the array. For functions that the kernel calls: "parameters", for
        both the numbers and the operands, and their "names".
    """
    declarations = map(_declaration, of_kernel((), operands, outputs))
    names = [*numbers, *[operand.c_name for operand in operands]]
    parameters = [*[f"const index_t {number}" for number in numbers], *declarations]
    return {
        "numbers": "\n".join(
            f"const index_t {number} = numbers_[{k}];" for k, number in enumerate(numbers)
        ),
        "parameters": "".join(f", {text}" for text in parameters),
        "names": "".join(f", {name}" for name in names),
    }
