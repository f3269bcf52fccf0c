"""What a kernel may say: the types of its arguments and the few functions it may call.

A kernel is a plain Python function. Its annotations say where each argument comes from:

============ ======================== =========================================================
annotation   in the kernel            in the launch block (see :mod:`fusedoptim.launch.block`)
============ ======================== =========================================================
Index        int                      nowhere: the element that this call updates
Length       int                      of the row: elements in this chunk, or sums of this tensor
Param        ``x[i]``, ``x[i] = v``   of the row: address of the parameter (split: of both halves)
Grad         ``x[i]``                 of the row: address of the gradient, in the parameter's dtype
State        ``x[i]``, ``x[i] = v``   of the row: address of values in the arithmetic dtype
StateBf16    ``x[i]``, ``x[i] = v``   of the row: address of bfloat16 values
StateE4M3    ``x[i]``, ``x[i] = v``   of the row: address of 8-bit codes (see ``rounding.py``)
StateE5M3    ``x[i]``, ``x[i] = v``   of the row: the same without a sign
BlockScales  ``x[k]``, ``x[k] = v``   of the row: address of bfloat16 scales of blocks of codes
ParamNumber  int                      of the row: which of the optimizer's parameters it is
Input        ``x[i]``                 of the row: address of an operator's input, in its dtype
Output       ``x[i] = v``             of the row: address of an operator's output, in that dtype
Values       ``x[i]``, ``x[i] = v``   of the row: address of an operator's values in the arithmetic
                                      dtype
Indices      ``x[i]``, ``x[i] = v``   of the row: address of int64 values
Position     int                      of the row: index in its tensor of the chunk's first element
ChunkSums    ``x[i]``                 of the row: address of the tensor's sums, one for each chunk
                                      and lane
Result       ``x[0] = v``             of the row: address of one value for the tensor
RowResult    float                    of the row: address of a Result of an earlier kernel
RowScalar    float                    of the row: in the arithmetic dtype
RowFlag      int, 0 is false          of the row
RowInteger   int                      of the row
RowInt       int                      of the row: address of an int64 computed on the device
Scalar       float                    of the launch: in the arithmetic dtype
Flag         int, 0 is false          of the launch
Integer      int                      of the launch
DeviceScalar float                    of the launch: address of a value computed on the device
DeviceInt    int                      of the launch: address of an int64 computed on the device
============ ======================== =========================================================

Arithmetic is float32 for float32, bfloat16 and float16 parameters and float64 for float64
ones; loads and stores convert, and a store rounds to nearest even. The "split" parameters are
float32 values in two halves, the upper of which is a bfloat16.

An **element kernel** takes an Index: it is the update of one element, and the compiler puts the
loop over a row around it. If it returns a tuple, each lane sums the values over its elements of
the row and stores the sums, which a later kernel adds up. Run as plain Python on numpy arrays,
``sgd(i, param, grad, 1.0, 0.1, 0.0)`` is the update of element ``i``: this is how a kernel is
stepped through in a debugger.

Any other kernel is called once for each row and lane of the work-group that walks it. It may use
``lane``, ``lanes``, ``uniform``, ``barrier``, ``group_sum`` and ``group_max``; in plain Python a
group has one lane, and without the last three, :func:`as_lane` makes a call that of any lane. A
kernel that uses none of them is **serial**: its group has one work item on every device. What
``lane_values`` gives belongs to one lane. ``is_word_below`` and ``swapped_halves`` are for random
words of 32 bits. ``fetch`` prefetches memory that the kernel reads later, at the same place in all
lanes.

A kernel that uses no lanes may compute with vectors of ``VECTOR`` numbers instead, where it needs
sums across them: ``load_vector``, ``store_vector``, ``store_quarter``, ``repeated_quarter``,
``spread``, ``quarter_sums``, ``vector_sum``, ``vector_fma`` and ``+``. In plain Python a vector is
a numpy array.

Compiled, :mod:`fusedoptim.kernels._lowering` gives the same names their meaning on the device.
``/`` and ``math.sqrt`` are the device's own.
"""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Iterator
from typing import Annotated, Any, Protocol

import numpy as np


class Role(enum.Enum):
    """Where a kernel argument comes from."""

    INDEX = "index"
    LENGTH = "length"
    PARAM = "param"
    TRAIL = "trail"
    """The lower halves of a split parameter. No annotation: part of each Param."""
    GRAD = "grad"
    STATE = "state"
    STATE_BF16 = "state_bf16"
    STATE_E4M3 = "state_e4m3"
    STATE_E5M3 = "state_e5m3"
    BLOCK_SCALES = "block_scales"
    PARAM_NUMBER = "param_number"
    INPUT = "input"
    OUTPUT = "output"
    VALUES = "values"
    INDICES = "indices"
    POSITION = "position"
    SUMS = "sums"
    """Where a row's sums go. No annotation: the kernel's return value."""
    CHUNK_SUMS = "chunk_sums"
    RESULT = "result"
    ROW_RESULT = "row_result"
    ROW_SCALAR = "row_scalar"
    ROW_FLAG = "row_flag"
    ROW_INTEGER = "row_integer"
    ROW_INT = "row_int"
    SCALAR = "scalar"
    FLAG = "flag"
    INTEGER = "integer"
    DEVICE_SCALAR = "device_scalar"
    DEVICE_INT = "device_int"

    @property
    def in_row(self) -> bool:
        """Whether each row of the launch block has its own value (else: one for the launch)."""
        return self not in _OF_LAUNCH


STATE_ELEMENTS = {
    Role.STATE_BF16: "bf16",
    Role.STATE_E4M3: "u8",
    Role.STATE_E5M3: "u8",
    Role.BLOCK_SCALES: "bf16",
}
"""State that is not in the arithmetic dtype: its element's name in ``fusedoptim.dtypes``."""

_OF_LAUNCH = (Role.SCALAR, Role.FLAG, Role.INTEGER, Role.DEVICE_SCALAR, Role.DEVICE_INT)


class _Values(Protocol):
    def __getitem__(self, index: int, /) -> float: ...
    def __setitem__(self, index: int, value: float, /) -> None: ...


class _Codes(Protocol):
    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...


Index = Annotated[int, Role.INDEX]
Length = Annotated[int, Role.LENGTH]
Param = Annotated[_Values, Role.PARAM]
Grad = Annotated[_Values, Role.GRAD]
State = Annotated[_Values, Role.STATE]
StateBf16 = Annotated[_Values, Role.STATE_BF16]
StateE4M3 = Annotated[_Codes, Role.STATE_E4M3]
StateE5M3 = Annotated[_Codes, Role.STATE_E5M3]
BlockScales = Annotated[_Values, Role.BLOCK_SCALES]
ParamNumber = Annotated[int, Role.PARAM_NUMBER]
Input = Annotated[_Values, Role.INPUT]
Output = Annotated[_Values, Role.OUTPUT]
Values = Annotated[_Values, Role.VALUES]
Indices = Annotated[_Codes, Role.INDICES]
Position = Annotated[int, Role.POSITION]
ChunkSums = Annotated[_Values, Role.CHUNK_SUMS]
Result = Annotated[_Values, Role.RESULT]
RowResult = Annotated[float, Role.ROW_RESULT]
RowScalar = Annotated[float, Role.ROW_SCALAR]
RowFlag = Annotated[int, Role.ROW_FLAG]
RowInteger = Annotated[int, Role.ROW_INTEGER]
RowInt = Annotated[int, Role.ROW_INT]
Scalar = Annotated[float, Role.SCALAR]
Flag = Annotated[int, Role.FLAG]
Integer = Annotated[int, Role.INTEGER]
DeviceScalar = Annotated[float, Role.DEVICE_SCALAR]
DeviceInt = Annotated[int, Role.DEVICE_INT]

Vector = np.ndarray[Any, np.dtype[np.float64]]
VECTOR = 16
"""Elements of a vector: as many as an AVX-512 register holds in float32."""


_lane, _lanes = 0, 1


@contextlib.contextmanager
def as_lane(lane: int, lanes: int) -> Iterator[None]:
    """Make :func:`lane` and :func:`lanes` return these numbers in plain Python."""
    global _lane, _lanes
    before = _lane, _lanes
    _lane, _lanes = lane, lanes
    try:
        yield
    finally:
        _lane, _lanes = before


def lane() -> int:
    """Index of this work item in its group."""
    return _lane


def lanes() -> int:
    """Number of work items in the group."""
    return _lanes


def uniform(value: int) -> int:
    """Return ``value``, and tell the compiler that it is the same in all lanes.

    A compiler must assume that what a kernel loads from memory that it may have written differs
    from lane to lane. An address or a loop that depends on it would then be computed for each lane,
    and a load of consecutive elements would become a gather.
    """
    return value


def barrier() -> None:
    """Wait for all lanes of the group; afterwards their stores are visible.

    All lanes must call it equally often.
    """


def group_sum(value: float) -> float:
    """The sum of ``value`` over the lanes of the group, known to each."""
    return value


def group_max(value: float) -> float:
    """The largest ``value`` of the lanes of the group, known to each."""
    return value


def real(value: float) -> float:
    """``value`` in the arithmetic dtype; a bare literal would make a variable float64."""
    return value


def is_word_below(word: int, bound: int) -> bool:
    """``word < bound``, for numbers of 32 bits.

    On a device this compares 32-bit integers; other integers are int64, of which a vector holds
    half as many.
    """
    return word < bound


def swapped_halves(word: int) -> int:
    """Swap the 16-bit halves of a 32-bit number; on a device, in 32-bit arithmetic."""
    return ((word & 0xFFFF) << 16) | (word >> 16)


def fetch(values: _Values, index: int, count: int) -> None:
    """Prefetch ``count`` elements from ``index`` on, without waiting.

    Results never depend on it, wherever the index points. Use it where the device cannot predict
    the access. A GPU's driver may ignore it.

    Args:
        values: where the elements are.
        index: the index of the first element.
        count: the number of elements, a literal.
    """


def rounds(values: _Values) -> bool:
    """Whether values have fewer bits than the arithmetic dtype, which the compiler knows.

    In plain Python, none have.
    """
    return False


def lane_values(count: int) -> list[float]:
    """Memory of this work item alone for ``count`` values of the arithmetic dtype.

    Args:
        count: a constant. What the memory holds before the first store is undefined.
    """
    return [math.nan] * count


def fma(a: float, b: float, c: float) -> float:
    """``a * b + c``, on a device rounded once.

    Compiled kernels never contract a product and a sum by themselves (``ContractionOff``), so
    their results do not depend on the device's compiler; written out, a fused multiply-add is as
    reproducible and costs one instruction where the pair costs two
    (docs/design/element-kernels.md has what that gains).

    Args:
        a: a factor.
        b: the other factor.
        c: what their product is added to.
    """
    return a * b + c


def load_vector(values: _Values, index: int) -> Vector:
    """The elements from ``index`` on."""
    return np.array([values[index + k] for k in range(VECTOR)])


def repeated_quarter(values: _Values, index: int) -> Vector:
    """The quarter of a vector from ``index`` on, four times."""
    return np.array([values[index + k % 4] for k in range(VECTOR)])


def spread(value: float) -> Vector:
    """A vector whose elements are all ``value``."""
    return np.full(VECTOR, value)


def store_vector(values: _Values, index: int, vector: Vector) -> None:
    """Store a vector from ``index`` on."""
    for k in range(VECTOR):
        values[index + k] = float(vector[k])


def store_quarter(values: _Values, index: int, vector: Vector, quarter: int) -> None:
    """Store elements ``4 * quarter`` to ``4 * quarter + 3``; ``quarter`` is a literal."""
    for k in range(4):
        values[index + k] = float(vector[4 * quarter + k])


def vector_fma(a: Vector, b: Vector, c: Vector) -> Vector:
    """``a * b + c`` of each element, on a device rounded once."""
    return a * b + c


def quarter_sums(a: Vector, b: Vector, c: Vector, d: Vector) -> Vector:
    """Sums of the elements of each quarter: the four of ``a``, then of ``b``, ``c`` and ``d``."""
    return np.concatenate([vector.reshape(4, 4).sum(1) for vector in (a, b, c, d)])


def vector_sum(a: Vector) -> float:
    """The sum of the elements."""
    return float(a.sum())
