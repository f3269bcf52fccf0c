"""What a caller may pass for a kernel's pointer: memory, checked and as an address."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter as TorchParameter

from fusedoptim.allocator import Array, Memory
from fusedoptim.dtypes import ELEMENTS
from fusedoptim.launch.devices import BACKENDS
from fusedoptim.raw._spirv import Parameter

PLAIN = frozenset((Tensor, TorchParameter))
"""Classes whose tensors have memory of their own."""
_NAMES = [element.dtype for element in ELEMENTS.values()] + ["bool", "complex64", "complex128"]
_TORCH = {getattr(torch, name): name for name in _NAMES}
# numpy computes a dtype's name anew each time.
_NUMPY = {np.dtype(name): name for name in _NAMES if name in np.sctypeDict}
# The dtypes that a pointer takes, by what it points to. OpenCL C has no bfloat16, whose bits are a
# ushort, and a complex number is a vector of two.
_DTYPES = {
    **{name: (element.dtype,) for name, element in ELEMENTS.items() if element.size > 1},
    "f32x2": ("float32", "complex64"),
    "f64x2": ("float64", "complex128"),
    "u16": ("uint16", "bfloat16"),
    "int16": ("int16", "uint16", "bfloat16", "float16"),
    "int32": ("int32", "uint32"),
    "int64": ("int64", "uint64"),
}


class Uses:
    """What the pointers of one call use, and where it is."""

    __slots__ = ("elements", "elsewhere", "host", "is_elsewhere", "queues", "written")

    def __init__(self) -> None:
        self.host: int | None = None
        """The first argument in the host's memory."""
        self.is_elsewhere = False
        """Whether any memory is not the host's."""
        self.elsewhere: tuple[int, torch.device] | None = None
        """The first torch tensor that is not in the host's memory, and its device."""
        self.queues: list[tuple[int, Any]] = []
        """Arguments in SYCL memory, and their queues."""
        self.written: list[int] = []
        """Arguments that are tensors and that the kernel may write."""
        self.elements = 0
        """Of the largest tensor in the host's memory."""


Accept = Callable[[Any, Uses], int]
"""From what a caller passes to an address; TypeError, ValueError or RuntimeError with what is
wrong and the cure."""


def pointer(parameter: Parameter, index: int) -> Accept:
    """What takes the values of a pointer, the argument of this ``index``."""
    names = _accepted(parameter.dtype)
    dtypes = (
        None if names is None else frozenset(dtype for dtype in _TORCH if _TORCH[dtype] in names)
    )
    aligned = alignment(parameter)
    is_written = not parameter.is_const

    def accept(value: Any, uses: Uses) -> int:
        if not isinstance(value, Tensor):
            return accept_other(value, uses)
        value = _plain(value)
        if dtypes is not None and value.dtype not in dtypes:
            raise TypeError(_wrong_dtype(value.dtype, parameter, names))
        device = value.device
        backend = BACKENDS.get(device.type)
        if backend is None:
            raise RuntimeError(
                f"the tensor is on {device}, which SYCL does not serve; "
                f"move it to {' or '.join(map(repr, BACKENDS))}"
            )
        if backend.runs_on_host:
            uses.host = index
            uses.elements = max(uses.elements, value.numel())
        else:
            _note_device(device, index, uses)
        if value.layout is not torch.strided:
            raise ValueError(
                f"the tensor's layout is {value.layout}, which has no one address; make it dense"
            )
        if not value.is_contiguous():
            raise ValueError(_not_contiguous(value))
        if is_written:
            if value.requires_grad and torch.is_grad_enabled():
                raise RuntimeError(
                    "the kernel may write to a tensor that requires grad, of which autograd would "
                    "know nothing; call it under torch.no_grad(), pass value.detach(), or declare "
                    "the parameter const"
                )
            uses.written.append(index)
        if value.is_neg() or value.is_conj():
            raise ValueError(
                "the tensor's values are the negatives or conjugates of what is in memory; "
                "pass value.resolve_neg().resolve_conj()"
            )
        address: int = value.data_ptr()
        if address % aligned:
            raise ValueError(_misaligned(address, parameter))
        if not address and value.numel():
            raise TypeError(f"a {type(value).__name__} with no memory of its own")
        return address

    def accept_other(value: Any, uses: Uses) -> int:
        if value is None:
            return 0
        address, dtype, is_read_only = _memory(value, index, uses)
        if names is not None and dtype is not None and dtype not in names:
            raise TypeError(_wrong_dtype(dtype, parameter, names))
        if is_read_only and is_written:
            raise ValueError(
                "the array is read-only, and the kernel may write to it; pass a copy, or declare "
                "the parameter const"
            )
        if address % aligned:
            raise ValueError(_misaligned(address, parameter))
        return address

    return accept


def owners(arguments: Sequence[Any]) -> list[Any]:
    """The objects that own the memory of arguments.

    Of a tensor that is the storage: the caller may give the tensor another one.
    """
    return [
        _plain(value).untyped_storage() if isinstance(value, Tensor) else value
        for value in arguments
    ]


def alignment(parameter: Parameter) -> int:
    """What an address must be a multiple of: elsewhere, instructions on vectors fault."""
    return parameter.size if "x" in parameter.dtype else 1


def _accepted(pointee: str) -> tuple[str, ...] | None:
    """The dtypes for a pointer to ``pointee``, or None if all are taken."""
    if pointee in _DTYPES:
        return _DTYPES[pointee]
    scalar, _, lanes = pointee.rpartition("x")
    return _DTYPES.get(scalar) if lanes else None


def _note_device(device: torch.device, index: int, uses: Uses) -> None:
    uses.is_elsewhere = True
    if uses.elsewhere is None:
        uses.elsewhere = index, device
    elif uses.elsewhere[1] != device:
        raise RuntimeError(
            f"the tensor is on {device}, and argument {uses.elsewhere[0]} on "
            f"{uses.elsewhere[1]}; move them to one device"
        )


def _note_queue(queue: Any, index: int, uses: Uses) -> None:
    uses.is_elsewhere = True
    uses.queues.append((index, queue))


def _memory(value: Any, index: int, uses: Uses) -> tuple[int, str | None, bool]:
    """The address, the dtype if it has one, and whether it is read-only, of what is no tensor."""
    if isinstance(value, np.ndarray):
        if not value.flags.c_contiguous:
            raise ValueError(
                f"the array of strides {value.strides} (bytes) is not contiguous, and a kernel "
                "gets no strides; pass numpy.ascontiguousarray(value)"
            )
        uses.host = index
        dtype = _NUMPY.get(value.dtype) or value.dtype.str
        address, is_read_only = value.__array_interface__["data"]
        return address, dtype, is_read_only
    if isinstance(value, Array):
        return _array(value, index, uses)
    if isinstance(value, Memory):  # whose interface is for those who keep the memory
        if value.is_released:
            raise RuntimeError("the memory was released; allocate it again")
        _note_memory(value, index, uses)
        return value.address, None, False
    try:
        interface = value.__sycl_usm_array_interface__
    except AttributeError:
        raise TypeError(_unknown(value)) from None
    _note_queue(_queue(interface["syclobj"]), index, uses)
    untyped = not hasattr(value, "dtype")
    dtype = np.dtype(interface["typestr"])
    offset = interface.get("offset") or 0
    strides = interface.get("strides")
    if strides is not None and not _is_contiguous(interface["shape"], strides):
        raise ValueError(
            f"the array of shape {interface['shape']} and strides {strides} is not contiguous, and "
            "a kernel gets no strides; pass a contiguous copy"
        )
    address, is_read_only = interface["data"]
    if untyped:  # dpctl's memory always says that it is read-only
        return address, None, False
    return address + offset * dtype.itemsize, dtype.name, is_read_only


def _note_memory(memory: Memory, index: int, uses: Uses) -> None:
    if memory.sycl_queue is None:
        uses.host = index
    else:
        _note_queue(memory.sycl_queue, index, uses)


def _array(value: Array, index: int, uses: Uses) -> tuple[int, str, bool]:
    """Of an array of :mod:`allocator`, which has element types that numpy has not."""
    if not value.is_contiguous:
        raise ValueError(
            f"the array of strides {value.strides} is not contiguous, and a kernel gets no strides"
        )
    memory = value.memory
    if isinstance(memory, Memory):
        if memory.is_released:
            raise ValueError(f"the memory of the array at {value.address:#x} was released")
        _note_memory(memory, index, uses)
    elif value.__dlpack_device__()[0] != 1:  # DLPack's number of the host
        raise TypeError("the array is another library's device memory; pass that library's object")
    else:
        uses.host = index
    return value.address, value.dtype.name, value.is_read_only


def _queue(syclobj: Any) -> Any:
    """The queue that an array interface names, which may say so in several ways."""
    from fusedoptim.allocator import load_dpctl

    queue_class = load_dpctl().SyclQueue
    return syclobj if isinstance(syclobj, queue_class) else queue_class(syclobj)


def _is_contiguous(shape: Any, strides: Any) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(strides)):
        if size > 1 and step != expected:
            return 0 in shape
        expected *= size
    return True


def _plain(value: Tensor) -> Tensor:
    """The tensor, or if it is of a subclass, a plain one over the same memory."""
    if type(value) in PLAIN:
        return value
    if type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise TypeError(
            f"a {type(value).__name__} has no memory of its own; pass the tensor inside of it "
            "(of a DTensor: value.to_local())"
        )
    return value.as_subclass(Tensor)


def _wrong_dtype(dtype: object, parameter: Parameter, names: tuple[str, ...] | None) -> str:
    wanted = " or ".join(names or ())
    hint = ""
    if str(dtype) in ("torch.complex64", "torch.complex128"):
        hint = ", or torch.view_as_real(value)"
    return (
        f"its dtype is {dtype}, and the kernel reads {wanted}; "
        f"convert it, declare another pointer{hint}"
    )


def _not_contiguous(value: Tensor) -> str:
    return (
        f"the tensor of shape {tuple(value.shape)} and strides {value.stride()} is not contiguous, "
        "and a kernel gets no strides; pass value.contiguous() (a copy: what the kernel writes is "
        "there), or the contiguous tensor that it is a view of, with the strides as integers"
    )


def _misaligned(address: int, parameter: Parameter) -> str:
    return (
        f"it starts at {address:#x}, and a {parameter.dtype} lies at a multiple of "
        f"{parameter.size} bytes; pass a clone(), or declare a pointer to scalars"
    )


def _unknown(value: Any) -> str:
    return (
        f"{type(value).__name__} {value!r:.60}, where a torch tensor, a numpy array, an array or "
        "memory with __sycl_usm_array_interface__ (dpctl, dpnp, a pool) or None is wanted; "
        "torch.from_dlpack(value) may make one"
    )
