"""ElementwiseKernel, from a line of OpenCL C for one element; the interface is CuPy's.

Source: https://docs.cupy.dev/en/stable/user_guide/kernel.html
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from fusedoptim.raw import _parameters
from fusedoptim.raw._expressions import (
    NUMBERS,
    ExpressionKernel,
    Plan,
    check_text,
    chunk_of,
    launch_shape,
    statements,
)
from fusedoptim.raw._parameters import Operand, Scalar
from fusedoptim.raw._walk import Walk, walk

__all__ = ["ElementwiseKernel"]

# A row is a run of elements at equal distances in each tensor. A group walks a chunk of a row, or
# several short rows. The offset at which a row begins is the same for all work items.
_SOURCE = """
static inline void {name}_element(const index_t i_, const index_t j_{parameters}{offsets}) {{
    const ptrdiff_t i = i_, n = n_;
{loads}
{operation}
{stores}
}}
{opening}
{numbers}
    const index_t group_ = get_group_id(0) + get_global_offset(1), lane_ = get_local_id(0);
    const index_t first_ = group_ % chunks_ * chunk_;
    const index_t end_ = first_ + chunk_ < length_ ? first_ + chunk_ : length_;
    const index_t next_ = (group_ / chunks_ + 1) * rows_;
    const index_t last_row_ = next_ < count_ ? next_ : count_;
    for (index_t row_ = group_ / chunks_ * rows_; row_ < last_row_; row_++) {{
{row}
        index_t j_ = first_;
        for (; j_ + {lanes} <= end_; j_ += {lanes})
            {name}_element(row_ * length_ + j_ + lane_, j_ + lane_{names}{offset_names});
        if (j_ + lane_ < end_)
            {name}_element(row_ * length_ + j_ + lane_, j_ + lane_{names}{offset_names});
    }}
}}
"""
_ALONE = 16 * 1024  # elements that one group walks alone


class ElementwiseKernel(ExpressionKernel):
    """A kernel that computes each element of its outputs from those of its inputs.

    ``operation`` is OpenCL C in which a parameter's name is one element; ``i`` is the element's
    index, ``n`` the number of elements. Inputs are broadcast as in torch's operators. A parameter
    declared ``raw`` is a pointer to a contiguous tensor, which the operation indexes. ``i`` and
    ``n`` have a sign (``ptrdiff_t``). After ``return`` the outputs are stored too. A capital letter
    is a type that the call determines, in declarations and in the operation. bfloat16 and float16
    are float32 in the operation (a raw bfloat16: ``from_bfloat16(x[i])``). An output may have
    exactly the memory of an input; with any other overlap the results are undefined.

    Args:
        in_params: the inputs, such as ``"float32 x, raw T y, int64 k"``; types as torch names them.
        out_params: the outputs, in the same form.
        operation: one or several statements.
        name: the kernel's name.
        preamble: OpenCL C before the kernel, such as functions.
        options: the compiler's options; see :class:`fusedoptim.raw.RawKernel`.

    Raises:
        TypeError: an argument is not a str, or ``options`` not a sequence of them.
        ValueError: a declaration, the name or an option is invalid.

    Example:
        >>> import torch
        >>> squared_difference = ElementwiseKernel("T x, T y", "T z", "z = (x - y) * (x - y)")
        >>> squared_difference(torch.arange(3.0), 1.0)
        tensor([1., 0., 1.])
    """

    _reserved = ("i", "n")

    def __init__(
        self,
        in_params: str,
        out_params: str,
        operation: str,
        name: str = "kernel_of_elements",
        preamble: str = "",
        options: Sequence[str] = (),
    ) -> None:
        check_text(operation=operation)
        super().__init__(in_params, out_params, name, preamble, options)
        self.name = name
        """The kernel's name, as errors use it."""
        if not self._outputs:
            raise ValueError("out_params declares no output")
        self._operation = operation
        uses_index = _may_use_index(operation, preamble, self._options)
        self._keeps_order = uses_index or any(param.raw for param in self._params)

    def __call__(self, *args: Tensor | NDArray[Any] | Scalar, size: int | None = None) -> Any:
        """Compute the outputs.

        Args:
            args: the inputs: torch tensors of one device, numpy arrays as tensors of the CPU, or
                numbers. Then all outputs, or none of them: the call then creates them.
            size: the number of elements, if every tensor is raw.

        Returns:
            the output, or a tuple of them if there are several. Outputs that the call creates are
            torch tensors.

        Raises:
            TypeError: too few or too many arguments, or one of another type.
            ValueError: shapes that cannot be broadcast, or an output of another shape.
            RuntimeError: an argument requires a gradient or has a tangent, or torch.jit.trace,
                make_fx or torch.export records the call.
            KernelCompileError: the operation does not compile.
        """
        if size is not None and type(size) is not int:
            size = self._as_size(size)
        return self._call(args, size)

    def _as_size(self, size: Any) -> int:
        # Not True, for which the plan of a call with 1 would be found.
        try:
            if not isinstance(size, bool):
                return operator.index(size)
        except TypeError:
            pass
        raise ValueError(f"{self.name}: size={size!r} is not a number of elements")

    def _plan(self, values: Sequence[Any], size: int | None) -> Plan:
        operands, found = self._operands(values)
        shape, device = self._shape(operands, size)
        strides = self._strides(operands, shape) if len(values) == len(self._inputs) else ()
        outputs = self._new_outputs(operands, found, shape, strides, device)
        n = shape.numel()
        if n == 0:
            return Plan(outputs)

        elements = [operand for operand in operands if operand.is_element]
        in_order_of = None if self._keeps_order else len(elements) - 1  # of an output's memory
        strides_of = [operand.tensor.expand(shape).stride() for operand in elements]
        way = walk(shape, strides_of, in_order_of)
        rows, row = way.cut(max(len(way.shape) - 1, 0))
        chunk = chunk_of(n, device, _ALONE)
        chunks, rows_of_group = -(-row.numel // chunk), max(chunk // row.numel, 1)
        numbers = {"n_": n, "length_": row.numel, "chunk_": chunk, "chunks_": chunks}
        numbers |= {"rows_": rows_of_group, "count_": rows.numel}
        numbers |= rows.numbers("row_") | row.numbers("j_")
        parameters = _parameters.of_kernel([NUMBERS], operands, self._outputs)
        opening = self._opening(parameters, device)
        source = _parameters.head(n, found) + self._preamble
        lanes = launch_shape(device).lanes
        source += self._source(opening, operands, elements, numbers, rows, row, lanes)
        groups = chunks * -(-rows.numel // rows_of_group)
        return self._planned(outputs, source, parameters, numbers, operands, device, groups)

    def _shape(
        self, operands: Sequence[Operand], size: int | None
    ) -> tuple[torch.Size, torch.device]:
        """The shape to walk, and the device of all tensors."""
        if size is not None:
            tensors = [o.tensor for o in operands if isinstance(o.value, Tensor)]
            if any(operand.is_element for operand in operands):
                raise ValueError(
                    f"{self.name}: size={size!r} was given, but the size is the shape of "
                    "the tensors that are not raw"
                )
            if size < 0:
                raise ValueError(f"{self.name}: size={size!r} is not a number of elements")
            return torch.Size([size]), tensors[0].device if tensors else torch.device("cpu")
        inputs = operands[: len(self._inputs)]
        if not any(operand.is_element for operand in inputs):
            inputs = operands
        cure = "pass a tensor that is not raw, or size=, the number of elements"
        shape, device = _parameters.common_shape(self.name, inputs, cure)
        for operand in operands[len(self._inputs) :]:
            if operand.is_element:
                _parameters.check_output(self.name, operand, shape)
        return shape, device

    def _strides(self, operands: Sequence[Operand], shape: torch.Size) -> tuple[int, ...]:
        """The strides of new outputs: those of the first input with their shape."""
        for param in self._outputs:
            if param.raw:
                raise ValueError(f"{self.name}: the raw output {param.name!r} must be passed")
        like = [o.tensor for o in operands if o.is_element and o.tensor.shape == shape]
        if not like or self._keeps_order:
            return torch.empty(shape, device="meta").stride()
        return torch.empty_like(like[0], device="meta").stride()

    def _source(
        self,
        opening: str,
        operands: Sequence[Operand],
        elements: Sequence[Operand],
        numbers: Collection[str],
        rows: Walk,
        row: Walk,
        lanes: int,
    ) -> str:
        """OpenCL C for operands of these types and strides."""
        loads, stores, lines = [], [], [rows.split("row_")]
        for k, operand in enumerate(elements):
            place = f"offset_{k}_ + {row.offset('j_', k)}"
            lines.append(f"const index_t offset_{k}_ = {rows.offset('row_', k)};")
            loads.append(operand.load(place, const=operand.param not in self._outputs))
            if operand.param in self._outputs:
                stores.append(operand.store(place))
        offsets = [f", offset_{k}_" for k in range(len(elements))]
        return _SOURCE.format(
            name=self.name,
            opening=opening,
            operation=statements(self._operation, "operation"),
            lanes=lanes,
            offsets="".join(offsets).replace(",", ", const index_t"),
            offset_names="".join(offsets),
            row="\n".join(lines),
            loads="\n".join(loads),
            stores="\n".join(stores),
            **_parameters.declared(numbers, operands, self._outputs),
        )


def _may_use_index(operation: str, preamble: str, options: Sequence[str]) -> bool:
    """Whether ``i`` is in the operation, or may be in a macro or in a file that is included.

    In a preamble with directives, any ``i`` counts: only a preprocessor knows where they end.
    """
    texts = [option for option in options if option.startswith("-D")]
    if any(mark in preamble for mark in ("#", "%:", "??=")):  # all spellings of #
        texts.append(preamble)
    return re.search(r"\bi\b", operation) is not None or any(
        re.search(r"\b(i|include|import)\b", text) for text in texts
    )
