r"""Runs one shipped kernel on one device, and compares with its formula in float64.

Inputs are random and new in each run: values :math:`\pm[1/2, 2]`, second moments :math:`[1/2, 2]`,
numbers :math:`[1/4, 3/4]`. So no term of a formula is larger than 32, few cancel, and nothing is
magnified. A result may be off by 64 units roundoff of the arithmetic (half a last place each),
relative to it or to 1 if it is smaller, and a stored 16-bit value by one unit of its own more. Each
kernel makes fewer than 40 roundings on the way to a result, and a sum's relative error over
``_LENGTHS`` is below that of 32 additions. A wrong formula, an instruction that is not IEEE's, and
a write to a wrong place are all off by far more.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from fusedoptim.allocator import default_pool
from fusedoptim.kernels.language import Role
from fusedoptim.launch.kernel import kernel_for
from fusedoptim.launch.layout import Argument
from fusedoptim.launch.modules import Module
from fusedoptim.launch.table import LaunchBlock

Reals = np.ndarray[Any, np.dtype[np.float64]]
_LENGTHS = np.array([301, 1, 211])  # of the rows; no multiple of a vector, and rows lie unaligned
_BEYOND = 32  # elements past the end, which nothing may write to
_UNITS = 64
_ROUNDOFF = {"f64": 2.0**-53, "f32": 2.0**-24, "bf16": 2.0**-8, "f16": 2.0**-11}
_ARRAYS = (Role.PARAM, Role.TRAIL, Role.GRAD, Role.STATE)
_ADDRESSES = (
    *_ARRAYS,
    Role.SUMS,
    Role.CHUNK_SUMS,
    Role.RESULT,
    Role.ROW_RESULT,
    Role.DEVICE_SCALAR,
)
_SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "sum", "sums")


def _gradient(a: SimpleNamespace) -> Any:
    return a.grad_factor * a.grad + a.weight_decay * a.param


def _sgd(a: SimpleNamespace) -> dict[str, Any]:
    return {"param": a.param - a.lr * _gradient(a)}


def _sgd_momentum(a: SimpleNamespace) -> dict[str, Any]:
    g = _gradient(a)
    b = np.where(a.fresh, g, a.momentum * a.momentum_buffer + a.one_minus_dampening * g)
    step = g + a.momentum * b if a.nesterov else b
    return {"momentum_buffer": b, "param": a.param - a.lr * step}


def _adagrad(a: SimpleNamespace) -> dict[str, Any]:
    g = _gradient(a)
    s = a.sum + g**2
    return {"sum": s, "param": a.param - a.step_size * g / (np.sqrt(s) + a.eps)}


def _adam(a: SimpleNamespace) -> dict[str, Any]:
    theta = a.decay_factor * a.param
    g = a.grad_factor * a.grad + a.weight_decay * theta
    m = a.exp_avg + a.one_minus_beta1 * (g - a.exp_avg)
    if a.one_minus_beta1 >= a.beta1:  # the numbers are random, and do not add up to 1
        m = g + a.beta1 * (a.exp_avg - g)
    v = a.beta2 * a.exp_avg_sq + a.one_minus_beta2 * g**2
    results = {"exp_avg": m, "exp_avg_sq": v}
    if hasattr(a, "max_exp_avg_sq"):
        results["max_exp_avg_sq"] = v = np.maximum(a.max_exp_avg_sq, v)
    step = a.step_size * m / (np.sqrt(v) * a.root_correction + a.eps)
    return results | {"param": theta - step}


def _lamb_direction(a: SimpleNamespace, m: Any, v: Any) -> Any:
    decay = a.weight_decay * a.decay_factor * a.param
    return a.average_correction * m / (np.sqrt(v) * a.root_correction + a.eps) + decay


def _lamb_moments(a: SimpleNamespace) -> dict[str, Any]:
    g = a.grad_factor * a.grad
    m = a.beta1 * a.exp_avg + a.beta3 * g
    v = a.beta2 * a.exp_avg_sq + a.one_minus_beta2 * g**2
    squares = (a.decay_factor * a.param) ** 2, _lamb_direction(a, m, v) ** 2
    return {"exp_avg": m, "exp_avg_sq": v, "sums": _row_sums(*squares)}


def _lamb_ratio(a: SimpleNamespace) -> dict[str, Any]:
    param_squares, update_squares = _row_sums(a.sums[::2], a.sums[1::2]).reshape(-1, 2).T
    ratio = np.ones(len(_LENGTHS))
    if a.adapt:
        norm = np.minimum(np.sqrt(param_squares), a.max_param_norm)
        ratio = norm / np.sqrt(update_squares)
    return {"ratio": np.minimum(ratio, 1) if a.clip else ratio}


def _lamb_update(a: SimpleNamespace) -> dict[str, Any]:
    step = a.lr * a.ratio * _lamb_direction(a, a.exp_avg, a.exp_avg_sq)
    return {"param": a.decay_factor * a.param - step}


def _lamb(a: SimpleNamespace) -> dict[str, Any]:
    moments = _lamb_moments(a)
    ratio = _lamb_ratio(SimpleNamespace(**(vars(a) | {"sums": moments.pop("sums")})))["ratio"]
    after = SimpleNamespace(**(vars(a) | moments | {"ratio": np.repeat(ratio, _LENGTHS)}))
    return moments | _lamb_update(after)


def _sum_of_squares(a: SimpleNamespace) -> dict[str, Any]:
    return {"sums": _row_sums(a.grad**2)}


def _row_sums(*values: Reals) -> Reals:
    """The sums of each row, one after the other."""
    starts = np.cumsum(_LENGTHS) - _LENGTHS
    return np.stack([np.add.reduceat(v, starts) for v in values], axis=1).reshape(-1)


FORMULAS: dict[str, Callable[[SimpleNamespace], dict[str, Any]]] = {
    "adagrad": _adagrad,
    "adam": _adam,
    "adam_amsgrad": _adam,
    "lamb": _lamb,
    "lamb_moments": _lamb_moments,
    "lamb_ratio": _lamb_ratio,
    "lamb_update": _lamb_update,
    "sgd": _sgd,
    "sgd_momentum": _sgd_momentum,
    "sum_of_squares": _sum_of_squares,
}


class _Array:
    """Values in memory that the device reads and writes, and a margin that it must not."""

    def __init__(self, queue: Any, values: Reals, storage: str, in_usm: bool) -> None:
        self._storage = storage
        encoded = _encode(values, storage)
        size = len(encoded) + _BEYOND
        whole = _new_values(queue, size, encoded.dtype, in_usm)
        self._values, self._margin = whole[: len(encoded)], whole[len(encoded) :]
        self._values[:] = encoded
        self._margin.view(np.uint8)[:] = 0x5A
        self.address = whole.ctypes.data
        self.itemsize = encoded.itemsize

    def read(self) -> Any:
        return _decode(self._values, self._storage)

    def joined(self, lower: _Array) -> Any:
        """The float32 values of which this is the upper half."""
        bits = (self._values.astype(np.uint32) << 16) | lower._values
        return bits.view(np.float32).astype(np.float64)

    def is_overrun(self) -> bool:
        return bool((self._margin.view(np.uint8) != 0x5A).any())


def _new_values(queue: Any, size: int, dtype: np.dtype[Any], in_usm: bool) -> Any:
    """Memory that the host and the device of ``queue`` read and write."""
    if not in_usm:
        return np.empty(size, dtype)
    memory = default_pool(queue, "host").allocate(size * dtype.itemsize)
    return np.frombuffer(memoryview(memory), dtype)


def _encode(values: Reals, storage: str) -> Any:
    if storage == "bf16":  # the upper half of a float32
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if storage == "trail":  # any lower half
        return values.astype(np.float32).view(np.uint32).astype(np.uint16)
    return values.astype({"f64": np.float64, "f32": np.float32, "f16": np.float16}[storage])


def _decode(values: Any, storage: str) -> Any:
    if storage == "bf16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64)


class _Trial:
    """One launch of a kernel on random inputs."""

    def __init__(
        self, queue: Any, kernel: str, variant: str, *, options: bool, in_usm: bool
    ) -> None:
        """Lay everything out.

        Args:
            queue: of the device.
            kernel: its name.
            variant: "f32", "f64", "bf16", "f16" or "split".
            options: what flags say; without, weight decay is 0 and norms are not bounded.
            in_usm: whether the arrays are memory of the driver's.
        """
        self._queue, self._formula, self._options = queue, FORMULAS[kernel], options
        self._in_usm = in_usm
        self._kernel = kernel_for(queue, kernel, variant)
        self._module: Module = self._kernel.module
        self._real = "f64" if variant == "f64" else "f32"
        self._narrow = "bf16" if variant == "split" else variant
        self._random = np.random.default_rng()
        self._arrays: dict[str, _Array] = {}
        self._numbers: dict[str, Any] = {}
        for argument in self._module.arguments:
            if argument.role in _ADDRESSES:
                self._arrays[argument.name] = self._new_array(argument)
            elif argument.role is not Role.LENGTH:
                self._numbers[argument.name] = self._new_number(argument)

    def _new_array(self, argument: Argument) -> _Array:
        name, role = argument
        sizes = {
            Role.SUMS: len(_LENGTHS) * self._module.sums,
            Role.CHUNK_SUMS: 2 * _LENGTHS.sum(),
            Role.RESULT: len(_LENGTHS),
            Role.ROW_RESULT: len(_LENGTHS),
            Role.DEVICE_SCALAR: 1,
        }
        values = self._random.uniform(0.5, 2, int(sizes.get(role, _LENGTHS.sum())))
        if role in _ARRAYS and name not in _SQUARES:
            values *= self._random.choice([-1.0, 1.0], len(values))
        storages = {Role.PARAM: self._narrow, Role.GRAD: self._narrow, Role.TRAIL: "trail"}
        return _Array(self._queue, values, storages.get(role, self._real), self._in_usm)

    def _new_number(self, argument: Argument) -> Any:
        name, role = argument
        if role is Role.FLAG:
            return self._options
        if role is Role.ROW_FLAG:
            return self._random.integers(0, 2, len(_LENGTHS))
        if name == "weight_decay" and not self._options:
            return 0.0
        if name == "max_param_norm" and not self._options:
            return float("inf")
        rows = len(_LENGTHS) if role is Role.ROW_SCALAR else None
        value = self._random.uniform(0.25, 0.75, rows)
        return value if self._real == "f64" else np.float32(value).astype(np.float64)

    def _known(self) -> SimpleNamespace:
        """Every argument as the formula takes it: in float64, one for each element or for all."""
        known: dict[str, Any] = {}
        for name, role in self._module.arguments:
            if role in _ADDRESSES:
                known[name] = self._arrays[name].read()
            elif role is not Role.LENGTH:
                known[name] = self._numbers[name]
            if role in (Role.ROW_SCALAR, Role.ROW_FLAG, Role.ROW_RESULT):
                known[name] = np.repeat(known[name], _LENGTHS)
        if "trail" in known:
            known["param"] = self._arrays["param"].joined(self._arrays["trail"])
        return SimpleNamespace(**known)

    def problem(self) -> str:
        """Launch; what is wrong with the results, or nothing."""
        before = self._known()
        expected = self._formula(before)
        self._launch()
        after = self._known()
        roles = dict(self._module.arguments)
        for name, array in self._arrays.items():
            if array.is_overrun():
                return f"wrote past the end of {name!r}"
            if name == "trail":
                continue
            got, wanted = getattr(after, name), expected.get(name, getattr(before, name))
            allowed = _UNITS * _ROUNDOFF[self._real] * np.maximum(abs(wanted), 1)
            if roles[name] is Role.PARAM and "trail" not in roles and self._narrow != self._real:
                allowed = allowed + _ROUNDOFF[self._narrow] * abs(wanted)
            if name not in expected:
                allowed = 0 * allowed
            wrong = np.flatnonzero(~(abs(got - wanted) <= allowed))  # NaN too
            if len(wrong):
                i = wrong[0]
                return (
                    f"{len(wrong)} of {len(got)} values of {name!r} are wrong: element {i} is "
                    f"{got[i]!s}, and {wanted[i]!s} in float64"
                )
        return ""

    def _launch(self) -> None:
        block = LaunchBlock(self._kernel, _LENGTHS)
        starts = np.cumsum(_LENGTHS) - _LENGTHS
        for name, role in self._module.layout.row:
            if role in _ADDRESSES:
                array = self._arrays[name]
                base = np.array([array.address], dtype=np.uint64).view(np.int64)
                places = {
                    Role.SUMS: np.arange(len(_LENGTHS)) * self._module.sums,
                    Role.CHUNK_SUMS: 2 * starts,
                    Role.RESULT: np.arange(len(_LENGTHS)),
                    Role.ROW_RESULT: np.arange(len(_LENGTHS)),
                }.get(role, starts)
                block.write(name, base + places * array.itemsize)
            elif role is not Role.LENGTH:
                block.write(name, self._numbers[name])
        head = {
            name: self._arrays[name].address if role is Role.DEVICE_SCALAR else self._numbers[name]
            for name, role in self._module.layout.head
        }
        block.write_head(self._kernel.in_order(head))
        block.launch()
        block.wait()


def kernel_problem(queue: Any, name: str, *, in_usm: bool) -> str:
    """What is wrong with the kernel ``name``, such as "sgd_f32", on the device of ``queue``.

    Args:
        queue: a dpctl.SyclQueue.
        name: of a kernel that the manifest has.
        in_usm: whether its arrays are memory of the driver's, as a GPU wants it; else they are any
            memory of this process, as torch's tensors are on the CPU.

    Returns:
        a sentence, or an empty string if its results are those of the formula.

    Raises:
        ModuleError: the package's files are damaged.
        RuntimeError: the driver refuses the kernel.
    """
    kernel, _, variant = name.rpartition("_")
    if kernel not in FORMULAS:
        return "has no formula here to compare with"
    for options in (False, True):
        trial = _Trial(queue, kernel, variant, options=options, in_usm=in_usm)
        if problem := trial.problem():
            return problem
    return ""
