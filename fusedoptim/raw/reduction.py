"""Reductions, from lines of OpenCL C: the interface is CuPy's ReductionKernel.

Source: https://docs.cupy.dev/en/stable/user_guide/kernel.html
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedoptim.raw import _parameters
from fusedoptim.raw._parameters import DTYPES, Made, Operand, Param, Scalar
from fusedoptim.raw._walk import Walk, chunk_of, launch_shape, memory, walk
from fusedoptim.raw.kernel import RawKernel, RawModule

__all__ = ["ReductionKernel"]

_SOURCE = """
static inline reduced_t {name}_reduce(const reduced_t a, const reduced_t b) {{
#line 1 "reduce_expr"
    return {reduce};
#line 1 "generated"
}}
static inline reduced_t {name}_map(
    const index_t o_, const index_t i, const index_t n{declarations}) {{
{loads}
#line 1 "map_expr"
    return {map};
#line 1 "generated"
}}
static inline void {name}_store(
    const index_t o_, const index_t n, const reduced_t a{declarations}) {{
{results}
#line 1 "post_map_expr"
    {post};
#line 1 "generated"
{stores}
}}
kernel void {name}(
    const index_t n, const index_t count_, const index_t chunk_, const index_t chunks_,
    global reduced_memory *partials_{declarations}) {{
    const index_t group_ = get_group_id(0), lane_ = get_local_id(0);
    reduced_t a = {identity};
{body}
}}
kernel void {name}_finish(
    const index_t n, const index_t count_, const index_t chunk_, const index_t chunks_,
    global const reduced_memory *partials_{declarations}) {{
    const index_t o_ = get_global_id(0);
    if (o_ >= count_) return;
    reduced_t a = partials_[o_];
    for (index_t k = 1; k < chunks_; k++) a = {name}_reduce(a, partials_[k * count_ + o_]);
    {name}_store(o_, n, a{names});
}}
"""
# A group reduces a chunk of the elements of one result, its work items side by side. Each has four
# partial results, as one alone would wait in each turn for the turn before.
_ALONG = """
    const index_t o_ = group_ / chunks_, first_ = group_ % chunks_ * chunk_;
    const index_t end_ = first_ + chunk_ < n ? first_ + chunk_ : n;
    index_t start_ = first_;
    reduced_t b = {identity}, c_ = {identity}, d_ = {identity};
    for (; start_ + 4 * {lanes} <= end_; start_ += 4 * {lanes}) {{
        const index_t at_ = start_ + lane_;
        a = {name}_reduce(a, {name}_map(o_, at_, n{names}));
        b = {name}_reduce(b, {name}_map(o_, at_ + {lanes}, n{names}));
        c_ = {name}_reduce(c_, {name}_map(o_, at_ + 2 * {lanes}, n{names}));
        d_ = {name}_reduce(d_, {name}_map(o_, at_ + 3 * {lanes}, n{names}));
    }}
    a = {name}_reduce({name}_reduce(a, b), {name}_reduce(c_, d_));
    for (; start_ + {lanes} <= end_; start_ += {lanes})
        a = {name}_reduce(a, {name}_map(o_, start_ + lane_, n{names}));
    if (start_ + lane_ < end_) a = {name}_reduce(a, {name}_map(o_, start_ + lane_, n{names}));
    local reduced_memory of_lanes_[{lanes}];
    of_lanes_[lane_] = a;
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lane_ != 0) return;
    for (index_t k = 1; k < {lanes}; k++) a = {name}_reduce(a, of_lanes_[k]);
    if (chunks_ == 1) {name}_store(o_, n, a{names});
    else partials_[group_ % chunks_ * count_ + o_] = a;
"""
# Each work item has a result of its own, and those of a group read side by side. One group after
# the other goes over the same rows of memory.
_ACROSS = """
    const index_t strips_ = (count_ + {lanes} - 1) / {lanes};
    const index_t o_ = group_ % strips_ * {lanes} + lane_, first_ = group_ / strips_ * chunk_;
    const index_t end_ = first_ + chunk_ < n ? first_ + chunk_ : n;
    if (o_ >= count_) return;
    for (index_t i = first_; i < end_; i++) a = {name}_reduce(a, {name}_map(o_, i, n{names}));
    if (chunks_ == 1) {name}_store(o_, n, a{names});
    else partials_[group_ / strips_ * count_ + o_] = a;
"""
_ROWS = 256  # that a group reads in a chunk across
_SHORT = 64  # elements; so few are reduced by one work item


class _Plan(NamedTuple):
    """All that a call needs to know besides the addresses, for arguments of given forms."""

    kernels: tuple[RawKernel, RawKernel] | None
    """None where there are no results."""
    global_sizes: tuple[int, int]
    lanes: int
    numbers: tuple[int, ...]
    """Arguments of both kernels before the partial results: n, results, chunk, chunks."""
    more_numbers: tuple[int, ...]
    """Their arguments after the partial results."""
    partials: Made | None
    """None where one kernel does."""
    strided: tuple[int, ...]
    """Indices of the caller's arguments that are not contiguous."""
    made: tuple[Made, ...]
    """Outputs that are to be made."""


class ReductionKernel:
    """A kernel that reduces tensors, over all dimensions or some of them.

    The result is that of ``post_map_expr`` for ``a``, the reduction by ``reduce_expr`` of ``a``
    and ``b`` over the values of ``map_expr``. The expressions are OpenCL C; in the first a
    parameter's name is one element, and ``i`` its index among the ``n`` that are reduced to one
    result. Inputs, types and letters are as of :class:`fusedoptim.raw.ElementwiseKernel`.

    The order of the reduction depends on shapes and strides only, so results are the same in each
    run, whatever the number of threads.

    Args:
        in_params: such as ``"T x, float32 k"``.
        out_params: the results, such as ``"T y"``.
        map_expr: what is reduced, such as ``"x * x"``.
        reduce_expr: of ``a`` and ``b``, such as ``"a + b"``; in any order and grouping.
        post_map_expr: such as ``"y = sqrt(a)"``.
        identity: what ``reduce_expr`` changes nothing with, such as ``"0"``.
        name: of the kernel.
        reduce_type: of ``a`` and ``b``, a torch type's name; default: the first output's.
        preamble: OpenCL C before the kernel, such as functions.
        options: of the compiler; see :class:`fusedoptim.raw.RawKernel`.

    Raises:
        ValueError: a declaration, the name or reduce_type is none.

    Example:
        >>> import torch
        >>> norm = ReductionKernel("T x", "T y", "x * x", "a + b", "y = sqrt(a)", "0", "norm")
        >>> norm(torch.tensor([[3.0, 4.0], [6.0, 8.0]]), axis=1)
        tensor([ 5., 10.])
    """

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
        self._inputs = _parameters.parse(in_params, "in_params")
        self._outputs = _parameters.parse(out_params, "out_params")
        _parameters.check_names(name, self._inputs + self._outputs)
        if not self._outputs or any(param.raw for param in self._outputs):
            raise ValueError(f"out_params={out_params!r} needs an output, and no raw one")
        letters = {param.type for param in self._inputs + self._outputs}
        if reduce_type is not None and reduce_type not in DTYPES.keys() | letters:
            raise ValueError(f"reduce_type={reduce_type!r} is none of {', '.join(DTYPES)}")
        if not isinstance(identity, str) or not identity.strip():
            raise ValueError(f"identity={identity!r} is no C expression, such as '0'")
        self.name = name
        """The kernel's name, as errors use it."""
        self._expressions = {
            "map": map_expr,
            "reduce": reduce_expr,
            "post": post_map_expr,
            "identity": identity,
        }
        self._reduce_type = reduce_type or self._outputs[0].type
        self._preamble = preamble
        self._options = tuple(options)
        self._kernels: dict[Any, tuple[RawKernel, RawKernel]] = {}
        self._plans: dict[Any, _Plan] = {}

    def __repr__(self) -> str:
        return f"<ReductionKernel {_parameters.signature(self.name, self._inputs, self._outputs)}>"

    def __call__(
        self,
        *args: Tensor | Scalar,
        axis: int | Sequence[int] | None = None,
        keepdims: bool = False,
    ) -> Any:
        """Reduce.

        Args:
            args: the inputs, torch tensors of one device or numbers; then the outputs, or none of
                them, to have them made.
            axis: the dimension or dimensions over which is reduced; None is all.
            keepdims: whether the results keep them, of size 1.

        Returns:
            the output, or a tuple of them if there are several.

        Raises:
            TypeError: too few or too many arguments, or one of another type.
            ValueError: shapes that cannot be broadcast, an axis that is none, or an output of
                another shape.
            RuntimeError: an argument requires a gradient.
            KernelCompileError: an expression does not compile.
        """
        if torch.compiler.is_compiling():
            return _parameters.untraced(self, *args, axis=axis, keepdims=keepdims)
        values, forms = _parameters.prepared(self.name, args)
        key = forms, tuple(axis) if isinstance(axis, list) else axis, keepdims
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plan(values, axis, keepdims)
            _parameters.keep(self._plans, key, plan)
        values += [made.tensor() for made in plan.made]
        if plan.kernels is not None:
            passed = values.copy()
            for k in plan.strided:
                passed[k] = memory(passed[k])
            partials = plan.partials.tensor() if plan.partials else None
            arguments = [*plan.numbers, partials, *plan.more_numbers, *passed]
            plan.kernels[0](plan.global_sizes[0], plan.lanes, arguments)
            if partials is not None:
                plan.kernels[1](plan.global_sizes[1], plan.lanes, arguments)
        outputs = values[len(self._inputs) :]
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    def _plan(self, values: Sequence[Any], axis: Any, keepdims: bool) -> _Plan:
        params = self._inputs + self._outputs
        _parameters.check_count(self.name, len(self._inputs), len(self._outputs), values)
        found = _parameters.bind(self.name, params, values)
        operands = [Operand(p, found[p.type], v) for p, v in zip(params, values)]
        shape, device = _parameters.common_shape(self.name, operands[: len(self._inputs)])
        axes = _axes(self.name, axis, len(shape))
        kept = [d for d in range(len(shape)) if d not in axes]
        result = torch.Size(
            [1 if d in axes else size for d, size in enumerate(shape) if keepdims or d in kept]
        )
        for operand in operands[len(self._inputs) :]:
            _parameters.check_output(self.name, operand, result)
        made = []
        if len(values) == len(self._inputs):
            strides = torch.empty(result, device="meta").stride()
            for param in self._outputs:
                dtype = _parameters.output_dtype(self.name, param, found)
                made.append(Made(tuple(result), strides, dtype.torch, device))
                operands.append(Operand(param, dtype, made[-1].stand_in()))

        elements = [operand for operand in operands if operand.is_element]
        inner, outer = _walks(elements, self._outputs, shape, axes, kept, keepdims)
        n, count = inner.numel, outer.numel
        if count == 0:
            return _Plan(None, (0, 0), 0, (), (), None, (), tuple(made))
        spread = launch_shape(device)
        lanes = spread.lanes
        near = [sum(of_one[-1:] == (1,) for of_one in way.strides) for way in (inner, outer)]
        is_across = count >= lanes and (near[1] > near[0] or n < _SHORT)
        types = tuple([(o.dtype, isinstance(o.value, Tensor)) for o in operands])
        key = types, inner.pattern, outer.pattern, is_across, n * count < 2**32, device.type
        reduced = found.get(self._reduce_type) or _parameters.output_dtype(
            self.name, self._outputs[0], found
        )
        kept_as = DTYPES["float32"] if reduced.arithmetic == "float" else reduced
        if key not in self._kernels:
            head = _parameters.head(n * count, found)
            head += f"typedef {reduced.arithmetic} reduced_t;\n"
            head += f"typedef {kept_as.memory} reduced_memory;\n{self._preamble}"
            body = _ACROSS if is_across else _ALONG
            source = self._source(operands, inner, outer, lanes, body)
            module = RawModule(head + source, self._options)
            self._kernels[key] = module[self.name], module[f"{self.name}_finish"]

        chunk = min(_ROWS, max(n, 1)) if is_across else chunk_of(n, spread)
        chunks = max(-(-n // chunk), 1)
        items = -(-count // lanes) * lanes
        strided = [
            k for k, o in enumerate(operands) if o.is_element and not o.tensor.is_contiguous()
        ]
        return _Plan(
            self._kernels[key],
            (chunks * (items if is_across else count * lanes), items),
            lanes,
            (n, count, chunk, chunks),
            (*inner.numbers, *outer.numbers),
            Made((chunks * count,), (1,), kept_as.torch, device) if chunks > 1 else None,
            tuple(strided),
            tuple(made),
        )

    def _source(
        self, operands: Sequence[Operand], inner: Walk, outer: Walk, lanes: int, body: str
    ) -> str:
        """OpenCL C for operands of these types, walked this way."""
        loads, results, stores = [inner.split("i"), outer.split("o_")], [outer.split("o_")], []
        for k, operand in enumerate(o for o in operands if o.is_element):
            place = outer.offset("o_", k)
            if operand.param in self._outputs:
                results.append(operand.load(place, const=False))
                stores.append(operand.store(place))
            else:
                loads.append(operand.load(f"{inner.offset('i', k)} + {place}", const=True))
        declared = [f"const index_t {name}" for name in inner.names("i") + outer.names("o_")]
        declared += [o.declaration(const=o.param not in self._outputs) for o in operands]
        names = "".join(f", {_parameters.declared_name(text)}" for text in declared)
        return _SOURCE.format(
            **self._expressions,
            name=self.name,
            declarations="".join(f", {text}" for text in declared),
            names=names,
            loads="\n".join(loads),
            results="\n".join(results),
            stores="\n".join(stores),
            body=body.format(
                name=self.name, names=names, lanes=lanes, identity=self._expressions["identity"]
            ),
        )


def _axes(kernel: str, axis: Any, dims: int) -> list[int]:
    """The dimensions that are reduced, from 0 on."""
    given = range(dims) if axis is None else axis if isinstance(axis, (tuple, list)) else (axis,)
    for one in given:
        if isinstance(one, bool) or not isinstance(one, int) or not -dims <= one < dims:
            raise ValueError(f"{kernel}: axis={axis!r}, and there are {dims} dimensions")
    axes = [one % dims for one in given]
    if len(set(axes)) < len(axes):
        raise ValueError(f"{kernel}: axis={axis!r} has a dimension twice")
    return axes


def _walks(
    elements: Sequence[Operand],
    outputs: Sequence[Param],
    shape: torch.Size,
    axes: Sequence[int],
    kept: Sequence[int],
    keepdims: bool,
) -> tuple[Walk, Walk]:
    """Of what is reduced to one result, and of the results."""
    inner, outer = [], []
    for operand in elements:
        if operand.param in outputs:
            strides = operand.tensor.stride()
            inner.append((0,) * len(axes))
            outer.append(tuple([strides[d] for d in kept]) if keepdims else strides)
        else:
            strides = operand.tensor.expand(shape).stride()
            inner.append(tuple([strides[d] for d in axes]))
            outer.append(tuple([strides[d] for d in kept]))
    return walk([shape[d] for d in axes], inner), walk([shape[d] for d in kept], outer)
