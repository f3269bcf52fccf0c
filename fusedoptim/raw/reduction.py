"""ReductionKernel, from lines of OpenCL C; the interface is CuPy's.

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
from fusedoptim.raw._build import LARGEST
from fusedoptim.raw._expressions import (
    LEAST_GROUPS,
    NUMBERS,
    ExpressionKernel,
    Plan,
    check_text,
    chunk_of,
    launch_shape,
    statements,
)
from fusedoptim.raw._parameters import DTYPES, Dtype, Operand, Scalar
from fusedoptim.raw._spirv import Parameter
from fusedoptim.raw._walk import Walk, walk

__all__ = ["ReductionKernel"]

# Several groups reduce the chunks of one result. The last one to finish combines the values that
# all have stored, in the order of the chunks. Its increment of the counter makes those values
# visible: device scope, AcquireRelease and CrossWorkgroupMemory, for which OpenCL C 1.2 has no
# function.
_SOURCE = """
uint __attribute__((overloadable)) __spirv_AtomicIIncrement(
    volatile global uint *counter, uint scope, uint semantics);
static inline reduced_t {name}_reduce(const reduced_t a, const reduced_t b) {{
#line 1 "reduce_expr"
    return {reduce};
#line 1 "generated"
}}
static inline reduced_t {name}_map(const index_t o_, const index_t i_{parameters}) {{
    const ptrdiff_t i = i_, n = n_;
{loads}
#line 1 "map_expr"
    return {map};
#line 1 "generated"
}}
static inline void {name}_store(const index_t o_, const reduced_t a{parameters}) {{
    const ptrdiff_t n = n_;
{results}
{post}
{stores}
}}
{opening}
{numbers}
    const index_t group_ = get_group_id(0) + get_global_offset(1), lane_ = get_local_id(0);
    reduced_t a = {identity};
{body}
    if (chunks_ > 1) {{
        volatile global uint *finished_ = (volatile global uint *)scratch_ + o_;
        global reduced_memory *partials_ = (global reduced_memory *)(scratch_ + {counter} * count_);
        partials_[this_ * count_ + o_] = a;
        if (__spirv_AtomicIIncrement(finished_, 1, 0x208) != chunks_ - 1) return;
        *finished_ = 0;
        a = partials_[o_];
        for (index_t k = 1; k < chunks_; k++) a = {name}_reduce(a, partials_[k * count_ + o_]);
    }}
    {name}_store(o_, a{names});
}}
"""
_SCRATCH = Parameter("scratch_", "pointer", "u8", 1, False)
_COUNTER = 8  # bytes for a counter of finished groups, so that everything after it is aligned
_PARTIALS = "a", "b", "c_", "d_"


def _four(place: str) -> str:
    """OpenCL C that reduces an element into each of four partial results: ``place`` of 0 to 3."""
    reduced = "{partial} = {{name}}_reduce({partial}, {{name}}_map({place}{{names}}));"
    return "\n".join(
        reduced.format(partial=partial, place=place.format(k))
        for k, partial in enumerate(_PARTIALS)
    )


# A group reduces a chunk of one result, which its work items walk side by side. Each has four
# partial results: additions to a single one would wait for each other. Those of a long chunk are of
# its quarters: a core reads four places of memory at once faster than one.
_ALONG = f"""
    const index_t o_ = group_ / chunks_, this_ = group_ % chunks_, first_ = this_ * chunk_;
    const index_t end_ = first_ + chunk_ < n_ ? first_ + chunk_ : n_;
    const index_t steps_ = (end_ - first_) / (4 * {{lanes}}), whole_ = 4 * {{lanes}} * steps_;
    const index_t apart_ = whole_ < {{long}} ? {{lanes}} : whole_ / 4;
    const index_t step_ = whole_ < {{long}} ? 4 * {{lanes}} : {{lanes}};
    reduced_t b = {{identity}}, c_ = {{identity}}, d_ = {{identity}};
    index_t at_ = first_ + lane_;
    for (index_t done_ = 0; done_ < steps_; done_++, at_ += step_) {{{{
        {_four("o_, at_ + {} * apart_")}
    }}}}
    a = {{name}}_reduce({{name}}_reduce(a, b), {{name}}_reduce(c_, d_));
    index_t start_ = first_ + whole_;
    for (; start_ + {{lanes}} <= end_; start_ += {{lanes}})
        a = {{name}}_reduce(a, {{name}}_map(o_, start_ + lane_{{names}}));
    if (start_ + lane_ < end_) a = {{name}}_reduce(a, {{name}}_map(o_, start_ + lane_{{names}}));
    local reduced_memory of_lanes_[{{lanes}}];
    of_lanes_[lane_] = a;
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lane_ != 0) return;
    for (index_t k = 1; k < {{lanes}}; k++) a = {{name}}_reduce(a, of_lanes_[k]);
"""
# A group reduces several whole results, one of each quarter of them at a time. The last group may
# compute its last result more than once. Then one work item combines all partial values of a
# result. With min() the driver would not see that all lanes have the same row, and load one by one.
_ALONG_SEVERAL = f"""
    const index_t begin_ = group_ * results_, this_ = 0;
    const index_t own_ = count_ - begin_ < results_ ? count_ - begin_ : results_;
    const index_t quarter_ = (own_ + 3) / 4, last_ = own_ - 1;
    local reduced_memory of_lanes_[{{most_results}} * {{lanes}}];
    for (index_t first_ = 0; first_ < quarter_; first_++) {{{{
        const index_t row0_ = first_, in1_ = row0_ + quarter_, row1_ = in1_ < own_ ? in1_ : last_;
        const index_t in2_ = in1_ + quarter_, row2_ = in2_ < own_ ? in2_ : last_;
        const index_t in3_ = in2_ + quarter_, row3_ = in3_ < own_ ? in3_ : last_;
        reduced_t b = {{identity}}, c_ = {{identity}}, d_ = {{identity}};
        a = {{identity}};
        index_t at_ = lane_, end_ = {{lanes}};
        for (; end_ <= n_; end_ += {{lanes}}, at_ += {{lanes}}) {{{{
            {_four("begin_ + row{}_, at_")}
        }}}}
        if (at_ < n_) {{{{
            {_four("begin_ + row{}_, at_")}
        }}}}
        of_lanes_[row0_ * {{lanes}} + lane_] = a;
        of_lanes_[row1_ * {{lanes}} + lane_] = b;
        of_lanes_[row2_ * {{lanes}} + lane_] = c_;
        of_lanes_[row3_ * {{lanes}} + lane_] = d_;
    }}}}
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lane_ >= own_) return;
    const index_t o_ = begin_ + lane_;
    a = of_lanes_[lane_ * {{lanes}}];
    for (index_t k = 1; k < {{lanes}}; k++)
        a = {{name}}_reduce(a, of_lanes_[lane_ * {{lanes}} + k]);
"""
# Each work item has its own result, and the work items of a group read side by side. Consecutive
# groups read the same rows of memory.
_ACROSS = """
    const index_t strips_ = (count_ + {lanes} - 1) / {lanes}, this_ = group_ / strips_;
    const index_t o_ = group_ % strips_ * {lanes} + lane_, first_ = this_ * chunk_;
    const index_t end_ = first_ + chunk_ < n_ ? first_ + chunk_ : n_;
    if (o_ >= count_) return;
    for (index_t i_ = first_; i_ < end_; i_++) a = {name}_reduce(a, {name}_map(o_, i_{names}));
"""
_ROWS = 256  # that a group reads in a chunk across
_RESULTS = 16  # that a group reduces along, at most
_LONG = 8 * 1024  # elements of a chunk that is walked in quarters: some pages each
_ALONE = 128 * 1024  # elements that one group reduces alone
_SHORT = 64  # elements; so few are reduced by one work item
_ONE_INSTRUCTION = frozenset({"abs", "fabs", "fma", "fmax", "fmin", "mad", "max", "min"})
"""Functions that take no longer than an operator."""


class ReductionKernel(ExpressionKernel):
    """A kernel that reduces tensors, over all dimensions or some of them.

    ``map_expr`` computes a value for each element, ``reduce_expr`` combines two values ``a`` and
    ``b``, and ``post_map_expr`` computes the outputs from the last ``a``. All are OpenCL C. In
    ``map_expr`` a parameter's name is one element, and ``i`` its index among the ``n`` that are
    reduced to one result. Inputs, types and letters are those of
    :class:`fusedoptim.raw.ElementwiseKernel`.

    The order of the reduction depends on shapes and strides only, so results are the same in each
    run, whatever the number of threads.

    Args:
        in_params: the inputs, such as ``"T x, float32 k"``.
        out_params: the results, such as ``"T y"``.
        map_expr: the value to reduce, such as ``"x * x"``.
        reduce_expr: combines ``a`` and ``b``, such as ``"a + b"``; in any order and grouping.
        post_map_expr: computes the outputs, such as ``"y = sqrt(a)"``.
        identity: the neutral element of ``reduce_expr``, such as ``"0"``, or ``"-INFINITY"`` for
            the least number of any type: for integers the nearest one is taken.
        name: the kernel's name.
        reduce_type: the type of ``a`` and ``b``, by torch's name; default: the first output's.
        preamble: OpenCL C before the kernel, such as functions.
        options: the compiler's options; see :class:`fusedoptim.raw.RawKernel`.

    Raises:
        TypeError: an argument is not a str, or ``options`` not a sequence of them.
        ValueError: a declaration, the name, reduce_type or an option is invalid.

    Example:
        >>> import torch
        >>> norm = ReductionKernel("T x", "T y", "x * x", "a + b", "y = sqrt(a)", "0", "norm")
        >>> norm(torch.tensor([[3.0, 4.0], [6.0, 8.0]]), axis=1)
        tensor([ 5., 10.])
    """

    _reserved = ("i", "n", "a", "b")

    def __init__(
        self,
        in_params: str,
        out_params: str,
        map_expr: str,
        reduce_expr: str,
        post_map_expr: str,
        identity: str,
        name: str = "reduction",
        reduce_type: str | None = None,
        preamble: str = "",
        options: Sequence[str] = (),
    ) -> None:
        check_text(map_expr=map_expr, reduce_expr=reduce_expr, post_map_expr=post_map_expr)
        super().__init__(in_params, out_params, name, preamble, options)
        self.name = name
        """The kernel's name, as errors use it."""
        if not self._outputs or any(param.raw for param in self._outputs):
            raise ValueError(f"out_params={out_params!r} must declare outputs, none of them raw")
        letters = {param.type for param in self._params}
        if reduce_type is not None and reduce_type not in DTYPES.keys() | letters:
            raise ValueError(f"reduce_type={reduce_type!r} is not one of {', '.join(DTYPES)}")
        if not isinstance(identity, str) or not identity.strip():
            raise ValueError(f"identity={identity!r} is not a C expression, such as '0'")
        self._expressions = {
            "map": map_expr,
            "reduce": reduce_expr,
            "post": statements(post_map_expr, "post_map_expr"),
            "identity": identity,
        }
        self._reduce_type = reduce_type or self._outputs[0].type
        called = re.findall(r"(\w+)\s*\(", f"{map_expr};{reduce_expr}")
        self._is_light = _ONE_INSTRUCTION.issuperset(called)

    def __call__(
        self,
        *args: Tensor | NDArray[Any] | Scalar,
        axis: int | Sequence[int] | None = None,
        keepdims: bool = False,
        out: Tensor | NDArray[Any] | tuple[Tensor | NDArray[Any], ...] | None = None,
    ) -> Any:
        """Reduce.

        Args:
            args: the inputs: torch tensors of one device, numpy arrays as tensors of the CPU, or
                numbers. Then all outputs, or none of them: the call then creates them.
            axis: the dimension or dimensions to reduce; None is all.
            keepdims: whether the results keep the reduced dimensions, with size 1.
            out: the output, or a tuple of several, if they are not among ``args``.

        Returns:
            the output, or a tuple of them if there are several. Outputs that the call creates are
            torch tensors.

        Raises:
            TypeError: too few or too many arguments, or one of another type.
            ValueError: shapes that cannot be broadcast, an axis that does not exist, or an output
                of another shape.
            RuntimeError: an argument requires a gradient or has a tangent, or torch.jit.trace,
                make_fx or torch.export records the call.
            KernelCompileError: an expression does not compile.
        """
        if out is not None:
            args = *args, *(out if isinstance(out, tuple) else (out,))
        if axis is not None and type(axis) is not int:
            axis = self._as_axes(axis, args)
        if keepdims is not True and keepdims is not False:
            keepdims = self._as_flag(keepdims)
        return self._call(args, axis, keepdims)

    def _as_axes(self, axis: Any, args: Sequence[Any]) -> tuple[int, ...]:
        # Not True, for which the plan of a call with 1 would be found.
        axes = axis if isinstance(axis, (tuple, Sequence)) else (axis,)  # a tuple is told faster
        try:
            if bool not in map(type, axes):
                return tuple(map(operator.index, axes))
        except TypeError:
            pass
        dims = max([getattr(value, "ndim", 0) for value in args[: self._input_count]], default=0)
        raise ValueError(f"{self.name}: axis={axis!r} is not valid for {dims} dimensions")

    def _as_flag(self, keepdims: Any) -> bool:
        try:
            return bool(keepdims)
        except (TypeError, ValueError, RuntimeError):  # as of an array of several elements
            raise ValueError(
                f"{self.name}: keepdims={keepdims!r} is neither true nor false; pass True or False"
            ) from None

    def _plan(
        self, values: Sequence[Any], axis: int | tuple[int, ...] | None, keepdims: bool
    ) -> Plan:
        operands, found = self._operands(values)
        shape, device = _parameters.common_shape(self.name, operands[: len(self._inputs)])
        axes = _axes(self.name, axis, len(shape))
        kept = [d for d in range(len(shape)) if d not in axes]
        result = torch.Size(
            [1 if d in axes else size for d, size in enumerate(shape) if keepdims or d in kept]
        )
        for operand in operands[len(self._inputs) :]:
            _parameters.check_output(self.name, operand, result)
        strides = torch.empty(result, device="meta").stride()
        outputs = self._new_outputs(operands, found, result, strides, device)

        elements = [operand for operand in operands if operand.is_element]
        inner, outer = self._walks(elements, shape, axes, kept, keepdims)
        n, count = inner.numel, outer.numel
        if count == 0:
            return Plan(outputs)
        lanes = launch_shape(device).lanes
        near = [sum(of_one[-1:] == (1,) for of_one in way.strides) for way in (inner, outer)]
        is_across = count >= lanes and (near[1] > near[0] or n < _SHORT)
        alone = _ALONE if n * count <= _ALONE else 0
        chunk = _ROWS if is_across else chunk_of(n, device, alone, count)
        chunks = max(-(-n // chunk), 1)
        results = lanes if is_across else _results_of_group(n, count, chunks, device)
        numbers = {"n_": n, "count_": count, "results_": results}
        numbers |= {"chunk_": chunk, "chunks_": chunks}
        numbers |= inner.numbers("i_") | outer.numbers("o_")
        reduced = found.get(self._reduce_type) or _parameters.output_dtype(
            self.name, self._outputs[0], found
        )
        stored = DTYPES["float32"] if reduced.arithmetic == "float" else reduced
        source = _parameters.head(n * count, found)
        source += f"typedef {reduced.arithmetic} reduced_t;\n"
        source += f"typedef {stored.memory} reduced_memory;\n{self._preamble}"
        body = _ACROSS if is_across else _ALONG if results == 1 else _ALONG_SEVERAL
        parameters = _parameters.of_kernel([NUMBERS, _SCRATCH], operands, self._outputs)
        opening = self._opening(parameters, device)
        identity = _identity(self._expressions["identity"], reduced)
        source += self._source(
            opening, operands, elements, numbers, inner, outer, lanes, identity, body
        )
        groups = chunks * -(-count // results)
        if groups * lanes >= LARGEST:
            raise ValueError(
                f"{self.name}: {count:,} results of {n:,} elements each are too many for one "
                "launch; reduce parts of the tensor"
            )
        zeros = count * (_COUNTER + chunks * stored.torch.itemsize) if chunks > 1 else 0
        return self._planned(outputs, source, parameters, numbers, operands, device, groups, zeros)

    def _walks(
        self,
        elements: Sequence[Operand],
        shape: torch.Size,
        axes: Sequence[int],
        kept: Sequence[int],
        keepdims: bool,
    ) -> tuple[Walk, Walk]:
        """The walk over the elements of one result, and the walk over the results."""
        inner, outer = [], []
        for operand in elements:
            if operand.param in self._outputs:
                strides = operand.tensor.stride()
                inner.append((0,) * len(axes))
                outer.append(tuple([strides[d] for d in kept]) if keepdims else strides)
            else:
                strides = operand.tensor.expand(shape).stride()
                inner.append(tuple([strides[d] for d in axes]))
                outer.append(tuple([strides[d] for d in kept]))
        return walk([shape[d] for d in axes], inner), walk([shape[d] for d in kept], outer)

    def _source(
        self,
        opening: str,
        operands: Sequence[Operand],
        elements: Sequence[Operand],
        numbers: Collection[str],
        inner: Walk,
        outer: Walk,
        lanes: int,
        identity: str,
        body: str,
    ) -> str:
        """OpenCL C for operands of these types and strides."""
        loads, results, stores = [inner.split("i_"), outer.split("o_")], [outer.split("o_")], []
        for k, operand in enumerate(elements):
            place = outer.offset("o_", k)
            if operand.param in self._outputs:
                results.append(operand.load(place, const=False))
                stores.append(operand.store(place))
            else:
                loads.append(operand.load(f"{inner.offset('i_', k)} + {place}", const=True))
        words = _parameters.declared(numbers, operands, self._outputs) | self._expressions
        words |= {"name": self.name, "counter": str(_COUNTER)}
        words |= {"identity": identity, "lanes": str(lanes), "most_results": str(_RESULTS)}
        words |= {"long": str(_LONG)}
        return _SOURCE.format(
            **words,
            opening=opening,
            loads="\n".join(loads),
            results="\n".join(results),
            stores="\n".join(stores),
            body=body.format(**words),
        )


def _identity(text: str, reduced: Dtype) -> str:
    """C for the identity ``text`` in the type ``reduced``.

    In C, the conversion of a floating number that an integer type cannot hold is undefined. Here
    it gives the nearest integer, so -INFINITY is the least one, and the least bool is false.
    """
    if reduced.torch.is_floating_point:
        return text
    is_bool = reduced.torch == torch.bool
    nearest = f"(({text}) > 0)" if is_bool else f"convert_{reduced.arithmetic}_sat({text})"
    return f"_Generic(({text}), float: {nearest}, double: {nearest}, default: ({text}))"


def _results_of_group(n: int, count: int, chunks: int, device: torch.device) -> int:
    """How many results of ``n`` elements a group reduces along them.

    Starting a group costs as much as some hundred additions, so short rows share one: a multiple of
    four of them, as four are reduced at a time. A long row alone has four places to read.
    """
    if chunks > 1 or n >= _LONG:
        return 1
    shape = launch_shape(device)
    most = min(shape.chunk // max(n, 1), count // LEAST_GROUPS, _RESULTS, shape.lanes)
    return most // 4 * 4 or 1


def _axes(kernel: str, axis: int | tuple[int, ...] | None, dims: int) -> list[int]:
    """The dimensions that are reduced, in ascending order, in which ``i`` counts."""
    given = range(dims) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    for one in given:
        if not -dims <= one < dims:
            raise ValueError(f"{kernel}: axis={axis!r} is not valid for {dims} dimensions")
    axes = [one % dims for one in given]
    if len(set(axes)) < len(axes):
        raise ValueError(f"{kernel}: axis={axis!r} names a dimension twice")
    return sorted(axes)
