r"""Compares a shipped kernel on a device with its source, run as plain Python in float64.

Inputs are random and new in each run: values in :math:`\pm[1/2, 2]`, optimizer state in
:math:`[1/2, 2]`, scalars in :math:`[1/4, 3/4]`. So no term exceeds 32, and little cancels.

The tolerance is 64 units roundoff of the arithmetic, relative to the result or to 1 if that is
larger. For a stored 16-bit value it is larger by one unit roundoff of the element. For a sum it is
larger by half a unit for each element that a lane adds: the terms have one sign, so partial sums
are about half of the sum. This suffices: a kernel rounds fewer than 40 times on the way to another
result, except for Lamb's ratio of two sums, whose errors are a hundredth of this tolerance. State
that is rounded stochastically may be off by one step of its format, and a scale by a factor of 2. A
wrong instruction, inexact arithmetic and a write to a wrong place are off by far more.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fusedoptim.allocator import default_pool
from fusedoptim.doctor._examples import EXAMPLES
from fusedoptim.doctor._examples.example import Example, Integers
from fusedoptim.dtypes import ELEMENTS, VARIANTS, Element
from fusedoptim.kernels.language import STATE_ELEMENTS, Role, as_lane
from fusedoptim.kernels.rounding import BLOCK, e4m3_value, e5m3_value
from fusedoptim.launch.block import LaunchBlock, as_int64
from fusedoptim.launch.kernel import kernel_for
from fusedoptim.launch.layout import Argument
from fusedoptim.launch.modules import Module, kernel_function, shipped

Reals = np.ndarray[Any, np.dtype[np.float64]]
# The rows' lengths: unaligned, and not multiples of a vector. Plain Python takes long for kernels
# with a position, which round to fewer bits. Others walk the first row in quarters.
_LENGTHS = np.array([301, 1, 211])
_LENGTHS_WITH_QUARTERS = np.array([5301, 1, 211])
_MARGIN = 32  # elements past the end
_UNITS = 64
# Not state, which may be squares.
_SIGNED = (Role.PARAM, Role.TRAIL, Role.GRAD, Role.INPUT, Role.OUTPUT, Role.VALUES)
_DECODERS = {Role.STATE_E4M3: e4m3_value, Role.STATE_E5M3: e5m3_value}
"""The functions that decode state in 8 bits."""
_ARRAYS = (*_SIGNED, Role.INDICES, Role.STATE, Role.STATE_BF16, *_DECODERS, Role.BLOCK_SCALES)
_VALUE_OF_ROW = (Role.ROW_RESULT, Role.ROW_INT)
_NUMBER_OF_ROW = (
    Role.ROW_SCALAR,
    Role.ROW_FLAG,
    Role.ROW_INTEGER,
    Role.POSITION,
    Role.PARAM_NUMBER,
)
_PER_ROW = (Role.SUMS, Role.RESULT, *_VALUE_OF_ROW)
_VALUE_OF_LAUNCH = (Role.DEVICE_SCALAR, Role.DEVICE_INT)
_ADDRESSES = (*_ARRAYS, *_PER_ROW, Role.CHUNK_SUMS, *_VALUE_OF_LAUNCH)
_NARROW = (Role.PARAM, Role.GRAD, Role.INPUT, Role.OUTPUT)
_STORAGES = {
    Role.TRAIL: "trail",
    **dict.fromkeys((Role.INDICES, Role.ROW_INT, Role.DEVICE_INT), "i64"),
    **STATE_ELEMENTS,
}
"""How arrays are stored, apart from those of the arithmetic dtype and of the parameter's."""
_CHUNK_STEP = 1 << 12  # elements: a chunk begins at a multiple of it


class Rows(NamedTuple):
    """The rows of a launch."""

    lengths: Integers
    sizes: Mapping[str, Integers]
    """How many elements of each array belong to each row; a value of the launch belongs to all."""


def _rows(module: Module, lanes: int, example: Example | None) -> Rows:
    roles = {name: role for name, role in module.arguments if role in _ADDRESSES}
    if example is None:
        has_position = any(role is Role.POSITION for _, role in module.arguments)
        lengths = _LENGTHS if has_position else _LENGTHS_WITH_QUARTERS
        sizes = {
            name: _row_sizes(lengths, role, module.sums, lanes) for name, role in roles.items()
        }
        return Rows(lengths, sizes)
    sizes = {name: example.sizes[name] for name, role in roles.items() if role is not Role.TRAIL}
    if Role.TRAIL in roles.values():
        sizes["trail"] = sizes["param"]
    return Rows(example.lengths, sizes)


def _row_sizes(lengths: Integers, role: Role, sums: int, lanes: int) -> Integers:
    if role in _VALUE_OF_LAUNCH:
        return np.array([1])
    if role is Role.BLOCK_SCALES:
        return -(-lengths // (BLOCK * lanes)) * lanes
    if role in _PER_ROW:
        return np.full(len(lengths), sums if role is Role.SUMS else 1)
    return lengths * 2 if role is Role.CHUNK_SUMS else lengths


class _Array:
    """Elements that the device reads and writes, followed by a margin that it must not touch."""

    def __init__(self, queue: Any, values: Reals, storage: str, in_usm: bool) -> None:
        self._storage = storage
        encoded = _encode(values, storage)
        size, dtype = len(encoded) + _MARGIN, encoded.dtype
        if in_usm:
            memory = default_pool(queue, "host").allocate(size * dtype.itemsize)
            whole: Any = np.frombuffer(memoryview(memory), dtype)
        else:
            whole = np.empty(size, dtype)
        self._values, margin = whole[: len(encoded)], whole[len(encoded) :]
        self._values[:] = encoded
        self._margin = margin.view(np.uint8)
        self._margin[:] = 0x5A
        self.address: int = whole.ctypes.data
        self.itemsize = dtype.itemsize

    def read(self) -> Reals:
        return _decode(self._values, self._storage)

    def joined(self, lower: _Array) -> Reals:
        """The float32 values of which this is the upper half."""
        return _decode((self._values.astype(np.uint32) << 16) | lower._values, "f32")

    def is_overrun(self) -> bool:
        return bool((self._margin != 0x5A).any())


def _encode(values: Reals, storage: str) -> Any:
    """Values in [1/2, 2], of either sign, truncated to an element's bits.

    For "trail" any 16 bits are used, for "i64" any 64, and for "u8" the integers themselves.
    """
    if storage == "i64":
        return values.view(np.int64)
    if storage == "trail":
        return _encode(values, "f32").astype(np.uint16)
    if storage == "u8":
        return values.astype(np.uint8)
    element = ELEMENTS[storage]
    mantissa, exponent = np.frexp(abs(values))
    fraction = ((2 * mantissa - 1) * 2.0**element.fraction).astype(np.uint64)
    biased = (exponent - 1 + _bias(element)).astype(np.uint64) << np.uint64(element.fraction)
    sign = (values < 0).astype(np.uint64) << np.uint64(8 * element.size - 1)
    return (sign | biased | fraction).astype(f"u{element.size}")


def _decode(bits: Any, storage: str) -> Reals:
    """The values of an element's bits; those of "trail" mean nothing."""
    if storage == "i64":
        return np.array(bits)
    if storage == "trail":
        return np.zeros(len(bits))
    if storage == "u8":
        return np.array(bits, np.float64)
    element = ELEMENTS[storage]
    bits = bits.astype(np.uint64)
    fraction = (bits & np.uint64((1 << element.fraction) - 1)) * 2.0**-element.fraction
    biased = (bits >> np.uint64(element.fraction)).astype(np.int64) & (2 * _bias(element) + 1)
    exponent = np.maximum(biased, 1) - _bias(element)  # subnormal numbers use exponent 1
    with np.errstate(over="ignore"):
        values = np.ldexp(fraction + (biased > 0), exponent)
    special = np.where(fraction == 0, np.inf, np.nan)
    values = np.where(biased == 2 * _bias(element) + 1, special, values)
    return np.where(bits >> np.uint64(8 * element.size - 1) != 0, -values, values)


def _bias(element: Element) -> int:
    """The offset of the exponent."""
    return (1 << (8 * element.size - 2 - element.fraction)) - 1


class _Trial:
    """One launch of a kernel on random inputs."""

    def __init__(
        self, queue: Any, kernel: str, variant: str, *, options: bool, in_usm: bool
    ) -> None:
        """Lay everything out.

        Args:
            queue: the device's queue.
            kernel: the kernel's name.
            variant: one of :data:`fusedoptim.dtypes.VARIANTS`.
            options: the value of all flags; if False, weight decay is 0, norms are not bounded.
            in_usm: whether the arrays are in the driver's memory.
        """
        self._queue, self._options, self._in_usm = queue, options, in_usm
        self._function = kernel_function(kernel)
        self._kernel = kernel_for(queue, kernel, variant)
        self._module: Module = self._kernel.module
        self._real, self._narrow = VARIANTS[variant].real, VARIANTS[variant].element
        self._random = np.random.default_rng()
        example = EXAMPLES[kernel](self._random) if kernel in EXAMPLES else None
        self._rows = _rows(self._module, self._kernel.shape.lanes, example)
        self._given = {} if example is None else example.given
        self._scratch = () if example is None else example.scratch
        self._arrays: dict[str, _Array] = {}
        self._numbers: dict[str, Any] = {}
        for argument in self._module.arguments:
            if argument.role in _ADDRESSES:
                self._arrays[argument.name] = self._new_array(argument)
            elif argument.role is not Role.LENGTH:
                self._numbers[argument.name] = self._new_number(argument)

    def _new_array(self, argument: Argument) -> _Array:
        role = argument.role
        values = self._random.uniform(0.5, 2, self._rows.sizes[argument.name].sum())
        if role is Role.SUMS:
            values = np.repeat(values, self._kernel.shape.lanes)
        if role in _SIGNED:
            values *= self._random.choice([-1.0, 1.0], len(values))
        if role is Role.ROW_INT:  # an index of one of the row's elements
            values = self._random.integers(0, self._rows.lengths).view(np.float64)
        storage = self._narrow if role in _NARROW else _STORAGES.get(role, self._real)
        if argument.name in self._given:
            values = np.asarray(self._given[argument.name])
            if storage == "i64":
                values = values.astype(np.int64).view(np.float64)
        if role in _DECODERS:
            values = self._random.integers(24, 96, len(values)).astype(np.float64)
        elif role is Role.BLOCK_SCALES:
            values = 2.0 ** self._random.integers(-12, -9, len(values))
        return _Array(self._queue, values, storage, self._in_usm)

    def _new_number(self, argument: Argument) -> Any:
        name, role = argument
        if name in self._given:
            return self._given[name]
        if role is Role.FLAG:
            return self._options
        if role is Role.INTEGER:
            return int(self._random.integers(1 << 32))
        if role is Role.ROW_FLAG:
            return self._random.integers(0, 2, len(self._rows.lengths))
        if role is Role.PARAM_NUMBER:
            return self._random.integers(0, 1 << 20, len(self._rows.lengths))
        if role is Role.POSITION:
            return self._random.integers(0, 1 << 28, len(self._rows.lengths)) * _CHUNK_STEP
        if name == "weight_decay" and not self._options:
            return 0.0
        if name == "max_param_norm" and not self._options:
            return float("inf")
        rows = len(self._rows.lengths) if role is Role.ROW_SCALAR else None
        value = self._random.uniform(0.25, 0.75, rows)
        return np.asarray(value, self._kernel.real).astype(np.float64)[()]

    def _values(self) -> dict[str, Reals]:
        """The arrays' values; the halves of a split parameter are one, and the sums of lanes."""
        values = {name: array.read() for name, array in self._arrays.items()}
        if self._module.sums:
            by_lane = values["sums"].reshape(len(self._rows.lengths), -1, self._module.sums)
            values["sums"] = by_lane.sum(1).ravel()
        if values.pop("trail", None) is not None:
            values["param"] = self._arrays["param"].joined(self._arrays["trail"])
        return values

    def _with_codes_read(self, values: dict[str, Reals]) -> dict[str, Reals]:
        """``values`` with 8-bit codes replaced by the values that they stand for."""
        read = dict(values)
        lanes = self._kernel.shape.lanes
        sizes = _row_sizes(self._rows.lengths, Role.BLOCK_SCALES, 0, lanes)
        blocks = np.concatenate(
            [
                first + np.arange(length) // (BLOCK * lanes) * lanes + np.arange(length) % lanes
                for first, length in zip(np.cumsum(sizes) - sizes, self._rows.lengths)
            ]
        )
        for name, role in self._module.arguments:
            if role in _DECODERS:
                scales = values[f"{name}_scale"][blocks]
                pairs = zip(values[name].astype(int).tolist(), scales.tolist())
                read[name] = np.array([_DECODERS[role](*pair) for pair in pairs])
        return read

    def problem(self) -> str:
        """Launch; return what is wrong with the results, or ""."""
        before = self._values()
        lanes = self._kernel.shape.lanes
        given = before | self._numbers
        expected = in_float64(self._function, self._module, given, self._rows, lanes)
        self._launch()
        before, expected, after = map(self._with_codes_read, (before, expected, self._values()))
        for name, array in self._arrays.items():
            if array.is_overrun():
                return f"wrote past the end of {name!r}"
        for name, wanted in expected.items():
            if name in self._scratch:
                continue
            wrong = np.flatnonzero(
                ~(abs(after[name] - wanted) <= self._allowed(name, before[name], wanted))  # or NaN
            )
            if len(wrong):
                i = wrong[0]
                return (
                    f"{len(wrong)} of {len(wanted)} values of {name!r} are wrong: element {i} is "
                    f"{after[name][i]!s}, and {wanted[i]!s} in float64"
                )
        return ""

    def _allowed(self, name: str, before: Reals, wanted: Reals) -> Reals:
        """The tolerance of each result."""
        if np.array_equal(before, wanted):  # the kernel does not write it
            return np.zeros(len(wanted))
        roles = dict(self._module.arguments)
        if roles[name] is Role.BLOCK_SCALES:
            return wanted
        if roles[name] is Role.INDICES:
            return np.zeros(len(wanted))
        if roles[name] in _DECODERS:  # three bits of fraction, and a step of the smallest numbers
            return abs(wanted) / 8 + 2.0**-12
        units = _UNITS
        if roles[name] is Role.SUMS:
            units += self._rows.lengths.max() // self._kernel.shape.lanes // 2
        allowed = units * ELEMENTS[self._real].roundoff * np.maximum(abs(wanted), 1)
        if roles[name] is Role.STATE_BF16:  # rounded either way, after arithmetic that may cancel
            return allowed + 2 * ELEMENTS["bf16"].roundoff * abs(wanted)
        is_rounded = self._narrow != self._real and Role.TRAIL not in roles.values()
        if roles[name] in (Role.PARAM, Role.OUTPUT) and is_rounded:
            allowed = allowed + ELEMENTS[self._narrow].roundoff * abs(wanted)
        return allowed

    def _launch(self) -> None:
        block = LaunchBlock(self._kernel, self._rows.lengths)
        for name, role in self._module.layout.row:
            if role in _ADDRESSES:
                array = self._arrays[name]
                sizes = self._rows.sizes[name]
                if role is Role.SUMS:
                    sizes = sizes * self._kernel.shape.lanes
                block.write(
                    name, as_int64([array.address]) + (np.cumsum(sizes) - sizes) * array.itemsize
                )
            elif role is not Role.LENGTH:
                block.write(name, self._numbers[name])
        head = {
            name: self._arrays[name].address if role in _VALUE_OF_LAUNCH else self._numbers[name]
            for name, role in self._module.layout.head
        }
        block.write_head(head)
        block.launch()
        block.wait()


def in_float64(
    function: Callable[..., Any], module: Module, values: dict[str, Any], rows: Rows, lanes: int
) -> dict[str, Reals]:
    """The arrays after ``function`` has run on all rows, as plain Python.

    Args:
        function: a kernel.
        module: its compiled form.
        values: an array or a number for each argument except the row's length.
        rows: the rows of the launch.
        lanes: the lanes of a group, for kernels in which each call is one lane, independent of the
            others.
    """
    roles = dict(module.arguments)
    names = list(inspect.signature(function).parameters)
    index = [name for name in names if name not in roles]
    arrays = {  # each a list of the rows' parts
        name: [
            (part.astype(int) if role in _DECODERS else part).tolist()
            for part in np.split(values[name], np.cumsum(rows.sizes[name])[:-1])
        ]
        for name, role in module.arguments
        if role in _ADDRESSES and name in values
    }
    for row, length in enumerate(rows.lengths.tolist()):
        given: dict[str, Any] = {}
        for name in names:
            role = roles.get(name)
            if role is Role.LENGTH:
                given[name] = length
            elif role in _NUMBER_OF_ROW:
                given[name] = values[name][row].item()
            elif role in _VALUE_OF_ROW:
                given[name] = arrays[name][row][0]
            elif role in _VALUE_OF_LAUNCH:
                given[name] = arrays[name][0][0]
            elif name in arrays:
                given[name] = arrays[name][row]
            elif name not in index:
                given[name] = values[name]
        if Role.POSITION in roles.values():
            for lane in range(lanes):
                with as_lane(lane, lanes):
                    function(**given)
            continue
        if not index:
            function(**given)
            continue
        terms = [function(**given, **{index[0]: i}) for i in range(length)]
        if module.sums:
            arrays["sums"][row] = [sum(term) for term in zip(*terms)]
    return {name: np.concatenate(parts) for name, parts in arrays.items()}


def kernel_problem(queue: Any, name: str, *, in_usm: bool) -> str:
    """What is wrong with the kernel ``name``, such as "sgd_f32", on the device of ``queue``.

    Args:
        queue: a dpctl.SyclQueue.
        name: the name of a kernel in the manifest.
        in_usm: whether its arrays are in the driver's memory, as a GPU requires, or in any memory
            of this process, like torch's tensors on the CPU.

    Returns:
        a sentence, or "" if its results are right.

    Raises:
        ModuleError: the package's files are damaged.
        RuntimeError: the driver refuses the kernel.
    """
    kernel, _, variant = name.rpartition("_")
    if (kernel, variant) not in shipped():
        return "is not a kernel of this package"
    for options in (False, True):
        trial = _Trial(queue, kernel, variant, options=options, in_usm=in_usm)
        if problem := trial.problem():
            return problem
    return ""
