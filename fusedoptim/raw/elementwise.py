"""Kernels of one element, from a line of OpenCL C: the interface is CuPy's ElementwiseKernel.

Source: https://docs.cupy.dev/en/stable/user_guide/kernel.html
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedoptim.raw import _parameters
from fusedoptim.raw._parameters import Made, Operand, Param, Scalar
from fusedoptim.raw._walk import Walk, chunk_of, launch_shape, memory, walk
from fusedoptim.raw.kernel import RawKernel

__all__ = ["ElementwiseKernel"]

# A row is a run of elements that lie at equal distances in each tensor; a group walks a chunk of a
# row, or some short rows. What a row's elements start at is the same for all work items.
_SOURCE = """
static inline void {name}_element(
    const index_t i, const index_t j_, const index_t n{declarations}{offsets_declared}) {{
{loads}
#line 1 "operation"
    {operation};
#line 1 "generated"
{stores}
}}
kernel void {name}(
    const index_t n, const index_t length_, const index_t chunk_, const index_t chunks_,
    const index_t rows_, const index_t count_{declarations}) {{
    const index_t group_ = get_group_id(0), lane_ = get_local_id(0);
    const index_t first_ = group_ % chunks_ * chunk_;
    const index_t end_ = first_ + chunk_ < length_ ? first_ + chunk_ : length_;
    const index_t next_ = (group_ / chunks_ + 1) * rows_;
    const index_t last_row_ = next_ < count_ ? next_ : count_;
    for (index_t row_ = group_ / chunks_ * rows_; row_ < last_row_; row_++) {{
{offsets}
        index_t j_ = first_;
        for (; j_ + {lanes} <= end_; j_ += {lanes})
            {name}_element(row_ * length_ + j_ + lane_, j_ + lane_, n{names}{offset_names});
        if (j_ + lane_ < end_)
            {name}_element(row_ * length_ + j_ + lane_, j_ + lane_, n{names}{offset_names});
    }}
}}
"""


class _Plan(NamedTuple):
    """All that a call needs to know besides the addresses, for arguments of given forms."""

    kernel: RawKernel | None
    """None where there are no elements."""
    global_size: int
    lanes: int
    numbers: tuple[int, ...]
    """Arguments of the kernel before the caller's."""
    strided: tuple[int, ...]
    """Indices of the caller's arguments that are not contiguous."""
    made: tuple[Made, ...]
    """Outputs that are to be made."""


class ElementwiseKernel:
    """A kernel that computes each element of its outputs from those of its inputs.

    ``operation`` is OpenCL C in which a parameter's name is one element; ``i`` is the element's
    index, ``n`` the number of elements. Inputs are broadcast as torch's operators do. A parameter
    declared ``raw`` is a pointer to a contiguous tensor, which the operation indexes. A capital
    letter is a type that a call decides, of the parameters and in the operation. bfloat16 and
    float16 are float32 in the operation (a raw bfloat16: ``from_bfloat16(x[i])``). An output may be
    an input, element for element; memory that overlaps otherwise gives any result.

    Args:
        in_params: such as ``"float32 x, raw T y, int64 k"``; types as torch names them.
        out_params: likewise.
        operation: a statement, or several.
        name: of the kernel.
        preamble: OpenCL C before the kernel, such as functions.
        options: of the compiler; see :class:`fusedoptim.raw.RawKernel`.

    Raises:
        ValueError: a declaration or the name is none.

    Example:
        >>> import torch
        >>> squared_difference = ElementwiseKernel("T x, T y", "T z", "z = (x - y) * (x - y)")
        >>> squared_difference(torch.arange(3.0), 1.0)
        tensor([1., 0., 1.])
    """

    def __init__(
        self,
        in_params: str,
        out_params: str,
        operation: str,
        name: str = "kernel_of_elements",
        preamble: str = "",
        options: Sequence[str] = (),
    ) -> None:
        self._inputs = _parameters.parse(in_params, "in_params")
        self._outputs = _parameters.parse(out_params, "out_params")
        _parameters.check_names(name, self._inputs + self._outputs)
        if not self._outputs:
            raise ValueError("out_params declares no output")
        self.name = name
        """The kernel's name, as errors use it."""
        self._operation = operation
        self._preamble = preamble
        self._options = tuple(options)
        uses_index = re.search(r"\bi\b", operation) is not None
        self._keeps_order = uses_index or any(p.raw for p in self._inputs + self._outputs)
        self._kernels: dict[Any, RawKernel] = {}
        self._plans: dict[Any, _Plan] = {}

    def __repr__(self) -> str:
        return (
            f"<ElementwiseKernel {_parameters.signature(self.name, self._inputs, self._outputs)}>"
        )

    def __call__(self, *args: Tensor | Scalar, size: int | None = None) -> Any:
        """Compute the outputs.

        Args:
            args: the inputs, torch tensors of one device or numbers; then the outputs, or none of
                them, to have them made.
            size: the number of elements, where every tensor is raw.

        Returns:
            the output, or a tuple of them if there are several.

        Raises:
            TypeError: too few or too many arguments, or one of another type.
            ValueError: shapes that cannot be broadcast, or an output of another shape.
            RuntimeError: an argument requires a gradient.
            KernelCompileError: the operation does not compile.
        """
        if torch.compiler.is_compiling():
            return _parameters.untraced(self, *args, size=size)
        values, forms = _parameters.prepared(self.name, args)
        plan = self._plans.get((forms, size))
        if plan is None:
            plan = self._plan(values, size)
            _parameters.keep(self._plans, (forms, size), plan)
        values += [made.tensor() for made in plan.made]
        if plan.kernel is not None:
            passed = values.copy()
            for k in plan.strided:
                passed[k] = memory(passed[k])
            plan.kernel(plan.global_size, plan.lanes, [*plan.numbers, *passed])
        outputs = values[len(self._inputs) :]
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    def _plan(self, values: Sequence[Any], size: int | None) -> _Plan:
        params = self._inputs + self._outputs
        _parameters.check_count(self.name, len(self._inputs), len(self._outputs), values)
        found = _parameters.bind(self.name, params, values)
        operands = [Operand(p, found[p.type], v) for p, v in zip(params, values)]
        shape, device = self._shape(operands, size)
        made = []
        if len(values) == len(self._inputs):
            strides = self._strides(operands, shape)
            for param in self._outputs:
                dtype = _parameters.output_dtype(self.name, param, found)
                made.append(Made(tuple(shape), strides, dtype.torch, device))
                operands.append(Operand(param, dtype, made[-1].stand_in()))
        n = shape.numel()
        if n == 0:
            return _Plan(None, 0, 0, (), (), tuple(made))

        elements = [operand.tensor for operand in operands if operand.is_element]
        in_order_of = None if self._keeps_order else len(elements) - 1  # of an output's memory
        way = walk(shape, [tensor.expand(shape).stride() for tensor in elements], in_order_of)
        rows, row = way.cut(max(len(way.shape) - 1, 0))
        types = tuple([(o.dtype, isinstance(o.value, Tensor)) for o in operands])
        key = types, rows.pattern, row.pattern, n < 2**32, device.type
        spread = launch_shape(device)
        lanes = spread.lanes
        if key not in self._kernels:
            source = _source(self.name, self._operation, operands, self._outputs, rows, row, lanes)
            head = _parameters.head(n, found) + self._preamble
            self._kernels[key] = RawKernel(head + source, self.name, self._options)

        length, count = row.numel, rows.numel
        chunk = chunk_of(n, spread)
        chunks = -(-length // chunk)
        rows_of_group = max(chunk // length, 1)
        groups = chunks * -(-count // rows_of_group)
        numbers = (n, length, chunk, chunks, rows_of_group, count, *rows.numbers, *row.numbers)
        strided = [
            k for k, o in enumerate(operands) if o.is_element and not o.tensor.is_contiguous()
        ]
        return _Plan(
            self._kernels[key], groups * lanes, lanes, numbers, tuple(strided), tuple(made)
        )

    def _shape(
        self, operands: Sequence[Operand], size: int | None
    ) -> tuple[torch.Size, torch.device]:
        """The shape that is walked, and the device of all."""
        if size is not None:
            tensors = [o.tensor for o in operands if isinstance(o.value, Tensor)]
            if any(operand.is_element for operand in operands):
                raise ValueError(
                    f"{self.name}: size={size!r}, beside tensors that are not raw, whose shape is "
                    "the size"
                )
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise ValueError(f"{self.name}: size={size!r} is not a number of elements")
            return torch.Size([size]), tensors[0].device if tensors else torch.device("cpu")
        inputs = operands[: len(self._inputs)]
        if not any(operand.is_element for operand in inputs):
            inputs = operands
        shape, device = _parameters.common_shape(self.name, inputs)
        for operand in operands[len(self._inputs) :]:
            if operand.is_element:
                _parameters.check_output(self.name, operand, shape)
        return shape, device

    def _strides(self, operands: Sequence[Operand], shape: torch.Size) -> tuple[int, ...]:
        """Those of new outputs: of the first input that has their shape."""
        for param in self._outputs:
            if param.raw:
                raise ValueError(f"{self.name}: the raw output {param.name!r} must be passed")
        like = [o.tensor for o in operands if o.is_element and o.tensor.shape == shape]
        if not like or self._keeps_order:
            return torch.empty(shape, device="meta").stride()
        return torch.empty_like(like[0], device="meta").stride()


def _source(
    name: str,
    operation: str,
    operands: Sequence[Operand],
    outputs: Sequence[Param],
    rows: Walk,
    row: Walk,
    lanes: int,
) -> str:
    """OpenCL C for operands of these types, walked this way."""
    loads, stores, offsets = [], [], [rows.split("row_")]
    elements = [operand for operand in operands if operand.is_element]
    for k, operand in enumerate(elements):
        place = f"offset_{k}_ + {row.offset('j_', k)}"
        offsets.append(f"const index_t offset_{k}_ = {rows.offset('row_', k)};")
        loads.append(operand.load(place, const=operand.param not in outputs))
        if operand.param in outputs:
            stores.append(operand.store(place))
    declared = [f"const index_t {number}" for number in rows.names("row_") + row.names("j_")]
    declared += [o.declaration(const=o.param not in outputs) for o in operands]
    return _SOURCE.format(
        name=name,
        operation=operation,
        lanes=lanes,
        declarations="".join(f", {text}" for text in declared),
        names="".join(f", {_parameters.declared_name(text)}" for text in declared),
        offsets="\n".join(offsets),
        offsets_declared="".join(f", const index_t offset_{k}_" for k in range(len(elements))),
        offset_names="".join(f", offset_{k}_" for k in range(len(elements))),
        loads="\n".join(loads),
        stores="\n".join(stores),
    )
