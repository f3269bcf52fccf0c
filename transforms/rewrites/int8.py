"""Convolutions and Linears that compute in INT8.

A module keeps its Parameters, which are saved, loaded, moved and written to as before. The codes of
its weight are made from them when it is called, and made again after they have changed. In addition
it keeps the range of its input, or nothing if each call finds the range.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from fusedoptim._torch_private import (
    count_modes,
    disable_dynamo,
    is_exported,
    is_forward_mode,
    proxy_mode,
    tracing_state,
    transform_level,
)
from transforms.rewrites import exchanged_class
from transforms.rewrites import int8_chain as chain
from transforms.rewrites import int8_operators as operators
from transforms.rewrites.finite import is_finite
from transforms.rewrites.fused_activation import FusedActivation, mark_activated, mark_free
from transforms.rewrites.geometry import all_expanded, padding_of
from transforms.rewrites.int8_operators import Codes, Geometry, Grid, Result
from transforms.rewrites.packed_copy import CallState, are_sources, call_state, can_follow
from transforms.rewrites.watched_parameter import detached, exposures, state, unwatch_all

DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes in which a product has its weight and its inputs, before INT8 replaces it."""
_MEMORY_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The channels-last format for each number of dimensions of a batch of images."""


class Range(NamedTuple):
    """The range of a module's input in calibration."""

    low: float
    high: float


class _Packed(NamedTuple):
    """A weight ready for the operators, and what it was made from."""

    sources: tuple[Callable[[], Tensor | None], ...]
    """Each returns the Parameter, weight or bias, or None if that is gone."""
    state: tuple[tuple[Any, ...], ...]
    """Of each: its address, version, uses and dtype."""
    shape: tuple[int, ...]
    weight: Tensor
    scales: Tensor
    bias: Tensor | None
    """float32."""


class _Call(NamedTuple):
    """A call that passed all checks, and what these depended on."""

    packed: _Packed
    grid: Grid | None
    """The grid of the codes; None if each call finds its own."""
    dtype: torch.dtype
    """The dtype of the result."""
    geometry: Any
    options: tuple[object, ...]
    """The module's attributes that give the geometry."""
    passed: chain.Passed | None
    """The meaning of the input, if it was codes."""
    state: CallState

    def is_repeated(
        self,
        x: Tensor,
        passed: chain.Passed | None,
        params: Sequence[Tensor],
        options: tuple[object, ...],
    ) -> bool:
        """Whether a call with these would pass the same checks, and use the same packed weight."""
        sources, states = self.packed.sources, self.packed.state
        return (
            self.state.fits(x, params)  # first: other parameters may have no version
            and all(
                source() is param and param.data_ptr() == address and param._version == version
                for source, param, (address, version, *_) in zip(sources, params, states)
            )
            and self.options == options
            and self.passed == passed
            and bool(torch.backends.mkldnn.enabled)
        )


class Int8:
    """How one module computes in INT8. A copy or pickle keeps the range, and packs again."""

    def __init__(self, range_: Range | None) -> None:
        self.range = range_
        """None if each call finds its own range."""
        self._grid: Grid | None = None
        self._packed: _Packed | None = None
        self._last: _Call | None = None
        self._missed: tuple[int, ...] | None = None
        """The latest input's shape, if the weight is packed for another one."""

    def __reduce__(self) -> tuple[type[Int8], tuple[Range | None]]:
        return type(self), (self.range,)

    def __deepcopy__(self, memo: object) -> Int8:
        return type(self)(self.range)

    @property
    def grid(self) -> Grid | None:
        """The grid of the codes of all inputs; None if each call finds its own grid."""
        if self._grid is None and self.range is not None:
            self._grid = Grid.over(*self.range)
        return self._grid

    def product(self, module: Any, x: Tensor) -> Tensor | None:
        """The result of ``module`` for ``x``; None if it must be computed in floating point.

        A module that knows what follows it applies the activation, and returns codes for the next
        layer. ``x`` may be codes of the previous layer.
        """
        passed, options = chain.passed(x), self._options(module)
        weight, bias = module.weight, module.bias
        params = (weight,) if bias is None else (weight, bias)
        call = self._last
        if call is not None and not call.is_repeated(x, passed, params, options):
            call = self._last = None  # with its packed weight, before another is made
        if call is None:
            call = self._checked(module, x, passed, params, options)
        if call is None:
            return None
        grid = self._grid_of(x) if call.grid is None else call.grid
        if grid is None:
            return None
        codes = x if passed is not None else operators.quantized_activation(x, grid)
        return None if codes is None else self._activated(module, codes, grid, call)

    def _checked(
        self,
        module: Any,
        x: Tensor,
        passed: chain.Passed | None,
        params: tuple[Tensor, ...],
        options: tuple[object, ...],
    ) -> _Call | None:
        """Check all that a call depends on; None if it must be computed in floating point."""
        latest = exposures()  # first, see call_state
        dtype = _result_dtype(x, params, None if passed is None else passed.dtype)
        geometry = None if dtype is None else self._geometry(module)
        if dtype is None or geometry is None or not self._takes(module, x, geometry):
            return None
        grid = self.grid if passed is None else passed.grid
        packed = self._weight(params, grid, geometry, x)
        if packed is None:
            return None
        state_now = call_state(x, params, latest)
        call = _Call(packed, grid, dtype, geometry, options, passed, state_now)
        # If the weight is packed for another shape, the next call may have to pack it again. A list
        # may change in place.
        are_fixed = not any(isinstance(option, list) for option in options)
        is_kept = packed is self._packed and self._missed is None and are_fixed
        if is_kept and packed.state == _state(params) and are_sources(packed.sources, params):
            self._last = call
        return call

    def _activated(self, module: Any, codes: Tensor, grid: Grid, call: _Call) -> Tensor:
        dtype, post = call.dtype, chain.activation_of(module)
        name = None if post is None else post.attribute or post.of_numbers
        result, is_applied = Result(dtype), name in self._activations(module)
        if post is not None and is_applied:
            result = Result(dtype, 1.0, 0, name or "", post.scalars, post.algorithm)
        follower = chain.grid_of_follower(module, is_applied)
        if follower is not None:
            result = result._replace(
                dtype=torch.uint8, scale=follower.scale, zero_point=follower.zero_point
            )
        product = self._compute(module, codes, grid, call, result)
        if follower is not None:
            chain.mark(product, chain.Passed(follower, dtype))
        if is_applied:
            mark_activated(product)
        elif post is not None:
            mark_free(product)
        return product

    def _grid_of(self, x: Tensor) -> Grid | None:
        """A grid for the values of ``x``; None if they have none."""
        low, high = (bound.item() for bound in torch.aminmax(x))
        return Grid.over(low, high) if abs(low) + abs(high) < torch.inf else None

    def _weight(
        self, params: tuple[Tensor, ...], grid: Grid | None, geometry: Any, x: Tensor
    ) -> _Packed | None:
        shape, packed, current = self._shape(x), self._packed, _state(params)
        if packed is not None and packed.state == current and are_sources(packed.sources, params):
            self._missed, missed = (None if shape == packed.shape else shape), self._missed
            if self._missed is None or self._missed != missed:
                return packed  # also for another shape, unless that comes twice in a row
        self._packed = packed = None  # before the next is made, so that there is one at most
        can_be_kept = all(map(can_follow, params))
        current = _state(params)  # watched only now, and before values are read
        codes = operators.quantized_weight(params[0])
        bias = None if len(params) == 1 else detached(params[1]).to(torch.float32, copy=True)
        if codes is None or not (bias is None or is_finite(bias)):
            return None
        sources = tuple(map(weakref.ref, params))
        values = self._pack(codes, grid, geometry, x)
        packed = _Packed(sources, current, shape, values, codes.scales, bias)
        if can_be_kept:
            self._packed = packed
        return packed

    def _shape(self, x: Tensor) -> tuple[int, ...]:
        """The part of the input's shape that a weight is packed for; others work, but slower."""
        return ()

    def _activations(self, module: Any) -> frozenset[str]:
        """The activations that its operator applies."""
        raise NotImplementedError

    def _options(self, module: Any) -> tuple[object, ...]:
        """The attributes that the geometry is computed from."""
        return ()

    def _geometry(self, module: Any) -> Any:
        """The geometry of the product; None if the operators have none like it."""
        return ()

    def _takes(self, module: Any, x: Tensor, geometry: Any) -> bool:
        """Whether the operators accept this shape; if not, the module computes or refuses it."""
        raise NotImplementedError

    def _pack(self, codes: Codes, grid: Grid | None, geometry: Any, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _compute(
        self, module: Any, codes: Tensor, grid: Grid, call: _Call, result: Result
    ) -> Tensor:
        raise NotImplementedError


class _OfLinear(Int8):
    def _activations(self, module: Any) -> frozenset[str]:
        return operators.OF_LINEARS

    def _takes(self, module: Any, x: Tensor, geometry: Any) -> bool:
        outputs, columns = module.weight.shape
        is_like = x.dim() > 0 and x.numel() > 0 and x.size(-1) == columns
        return is_like and (module.bias is None or module.bias.shape == (outputs,))

    def _pack(self, codes: Codes, grid: Grid | None, geometry: Any, x: Tensor) -> Tensor:
        return operators.pack_linear(codes.values)

    def _compute(
        self, module: Any, codes: Tensor, grid: Grid, call: _Call, result: Result
    ) -> Tensor:
        packed = call.packed
        return operators.linear(codes, grid, packed.weight, packed.scales, packed.bias, result)


class _OfConvolution(Int8):
    def _activations(self, module: Any) -> frozenset[str]:
        return operators.OF_CONVOLUTIONS[module.weight.dim() - 2]

    def _options(self, module: Any) -> tuple[object, ...]:
        return module.stride, module.padding, module.dilation, module.groups

    def _geometry(self, module: Any) -> Geometry | None:
        return _geometry(module)

    def _takes(self, module: Any, x: Tensor, geometry: Geometry) -> bool:
        channels = module.weight.size(1) * module.groups
        is_like = x.dim() == module.weight.dim() and x.numel() > 0 and x.size(1) == channels
        return is_like and _has_room(geometry, module.weight, x)

    def _shape(self, x: Tensor) -> tuple[int, ...]:
        return tuple(x.shape[1:])

    def _pack(self, codes: Codes, grid: Grid | None, geometry: Geometry, x: Tensor) -> Tensor:
        assert grid is not None  # its range is known
        return operators.pack_convolution(codes, grid, geometry, list(x.shape))

    def _compute(
        self, module: Any, codes: Tensor, grid: Grid, call: _Call, result: Result
    ) -> Tensor:
        packed = call.packed
        y = operators.convolution(
            codes, grid, packed.weight, packed.scales, packed.bias, call.geometry, result
        )
        # Later code may read strides, so they are those of torch's convolution.
        is_channels_last = _is_channels_last(codes) or _is_channels_last(module.weight)
        return y if is_channels_last else y.contiguous()


def _state(params: Sequence[Tensor]) -> tuple[tuple[Any, ...], ...]:
    """The state of what a packed weight was made from."""
    return tuple([(*state(param), param.dtype) for param in params])


def _geometry(module: Any) -> Geometry | None:
    """The geometry; None for padding that differs between two ends."""
    count = module.weight.dim() - 2
    found = all_expanded(count, module.stride, padding_of(module), module.dilation)
    if found is None:
        return None
    stride, padding, dilation = found
    return Geometry(stride, padding, dilation, module.groups)


def _has_room(geometry: Geometry, weight: Tensor, x: Tensor) -> bool:
    """Whether images are, with their padding, as large as the kernel."""
    dims = zip(x.shape[2:], geometry.padding, weight.shape[2:], geometry.dilation)
    return all(size + 2 * padding > step * (taps - 1) for size, padding, taps, step in dims)


def _is_channels_last(t: Tensor) -> bool:
    """Whether torch's convolutions compute in channels_last because of this tensor."""
    layout = _MEMORY_FORMATS.get(t.dim())
    return layout is not None and not t.is_contiguous() and t.is_contiguous(memory_format=layout)


def _result_dtype(
    x: Tensor, params: Sequence[Tensor], given: torch.dtype | None
) -> torch.dtype | None:
    """The dtype of the result; None if these tensors cannot be computed in INT8.

    Args:
        x: a layer's input.
        params: its weight, and its bias if it has one.
        given: the dtype of the values that ``x`` has the codes of, if it has codes.
    """
    if type(x) not in (Tensor, Parameter):
        return None
    weight, x_dtype = params[0], given or x.dtype
    if not (x.is_cpu and weight.is_cpu):
        return None
    if x.layout is not torch.strided or x.is_nested or not torch.backends.mkldnn.enabled:
        return None
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
    elif all(param.dtype == x_dtype for param in params):
        dtype = x_dtype
    else:
        return None  # torch's module raises
    served = all(t in DTYPES for t in (x_dtype, weight.dtype, dtype))
    return dtype if served else None


class Int8Module(nn.Module):
    """The base class of the modules in INT8."""

    _fusedoptim_int8: Int8
    computation: ClassVar[type[Int8]]
    """How modules of this class compute."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        """Compute in INT8 what torch's module computes, up to rounding.

        torch's module computes infinite values and NaN, for which INT8 has no code, and dtypes
        other than float32 and bfloat16.

        torch.compile does not compile this method, but calls it.

        Raises:
            RuntimeError: in training mode, with gradients, or where torch exports or traces.
        """
        if torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting():
            untraced: Tensor = _untraced(self, input)
            return untraced
        _check(self, input)
        product = self._fusedoptim_int8.product(self, input)
        if product is not None:
            return product
        taken = chain.passed(input)
        result: Tensor = super().forward(input if taken is None else taken.values(input))
        return result

    def __prepare_scriptable__(self) -> nn.Module:
        """Raise RuntimeError: ``torch.jit.script`` cannot compile it."""
        raise RuntimeError(
            f"this {type(self).__name__} computes in INT8, and cannot be scripted: call "
            "transforms.restore(model) first"
        )


class Int8Linear(Int8Module, nn.Linear):
    r""":math:`y = x W^T + b` in INT8."""

    computation = _OfLinear


class Int8Conv1d(Int8Module, nn.Conv1d):
    """A convolution of sequences in INT8."""

    computation = _OfConvolution


class Int8Conv2d(Int8Module, nn.Conv2d):
    """A convolution of images in INT8."""

    computation = _OfConvolution


class Int8Conv3d(Int8Module, nn.Conv3d):
    """A convolution of volumes in INT8."""

    computation = _OfConvolution


CLASSES: dict[type[nn.Module], type[Int8Module]] = {
    nn.Linear: Int8Linear,
    nn.Conv1d: Int8Conv1d,
    nn.Conv2d: Int8Conv2d,
    nn.Conv3d: Int8Conv3d,
}
"""Our class for each of torch's."""


def is_quantized(model: nn.Module) -> bool:
    """Whether a module of ``model`` computes in INT8."""
    return any(isinstance(module, Int8Module) for module in model.modules())


def revert_all(model: nn.Module) -> None:
    """Give all modules that compute in INT8 their own classes again."""
    for module in model.modules():
        if isinstance(module, Int8Module):
            unwatch_all(module)
            exchanged_class.revert(module)
        elif isinstance(module, FusedActivation):
            exchanged_class.revert(module)


@disable_dynamo  # type: ignore[untyped-decorator]  # torch does not export it
def _untraced(module: Int8Module, x: Tensor) -> Tensor:
    """A call that torch.compile does not trace, out of a model that it traces."""
    return module.forward(x)


def _check(module: Int8Module, x: Any) -> None:
    """Raise unless torch simply runs operators, and no gradient is wanted."""
    name = type(module).__name__
    if module.training:
        raise RuntimeError(
            f"this {name} computes in INT8, but is in training mode: call "
            "transforms.restore(model) before training, or model.eval()"
        )
    is_tensor = isinstance(x, Tensor)
    if not is_tensor and not hasattr(x, "__torch_function__"):
        return  # torch's module raises
    is_traced = (
        torch.compiler.is_dynamo_compiling()
        or tracing_state() is not None
        or (count_modes() != 0 and (is_exported() or proxy_mode() is not None))
    )
    if is_traced or transform_level() is not None or not is_tensor:  # or a Proxy of torch.fx
        raise RuntimeError(
            f"this {name} computes in INT8, and cannot be exported, traced or "
            "transformed by torch.func: call transforms.restore(model) first"
        )
    if is_forward_mode() or (
        torch.is_grad_enabled()
        and any(t is not None and t.requires_grad for t in (x, module.weight, module.bias))
    ):
        raise RuntimeError(
            f"this {name} computes in INT8, which has no gradients: call the model under "
            "torch.no_grad(), or transforms.restore(model) to train it"
        )
