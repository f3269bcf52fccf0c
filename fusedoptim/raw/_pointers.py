"""Arguments for pointer parameters: memory, checked and converted to an address."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter as TorchParameter

from fusedoptim.allocator import Array, Memory, load_dpctl
from fusedoptim.dtypes import ELEMENTS
from fusedoptim.launch.devices import BACKENDS
from fusedoptim.raw._errors import class_of
from fusedoptim.raw._spirv import Parameter

MASKED = "a masked array, whose mask no kernel sees; pass value.filled(...), or value.data"
NESTED = "a nested tensor, which has no strides; pass each of its .unbind(), or .to_padded_tensor()"
PLAIN = frozenset((Tensor, TorchParameter))
"""The classes of tensors that have memory of their own."""
_NAMES = [element.dtype for element in ELEMENTS.values()] + ["bool", "complex64", "complex128"]
_TORCH = {getattr(torch, name): name for name in _NAMES}
# Computing a numpy dtype's name is slow.
_NUMPY = {np.dtype(name): name for name in _NAMES if name in np.sctypeDict}
# The dtypes that a pointer accepts, by its target; others accept all: in C, a pointer to char may
# point to any object. OpenCL C has no bfloat16, so a ushort holds its bits; a complex number is a
# vector of two.
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
    """The memory that one call's pointers refer to."""

    __slots__ = ("elements", "elsewhere", "host", "is_elsewhere", "queues", "written")

    def __init__(self) -> None:
        self.host: int | None = None
        """The last argument in host memory."""
        self.is_elsewhere = False
        """Whether an argument is in SYCL memory or on another device than the host."""
        self.elsewhere: tuple[int, torch.device] | None = None
        """The first torch tensor that is not in host memory, and its device."""
        self.queues: list[tuple[int, Any]] = []
        """The arguments in SYCL memory, and their queues."""
        self.written: list[int] = []
        """The tensors that the kernel may write."""
        self.elements = 0
        """Number of elements of the largest tensor in host memory."""

    def add_queue(self, index: int, queue: Any) -> None:
        """Add an argument in SYCL memory."""
        self.is_elsewhere = True
        self.queues.append((index, queue))

    def add_device(self, index: int, device: torch.device) -> None:
        """Add a tensor that is not in host memory."""
        self.is_elsewhere = True
        if self.elsewhere is None:
            self.elsewhere = index, device
        elif self.elsewhere[1] != device:
            raise RuntimeError(
                f"the tensor is on {device}, and argument {self.elsewhere[0]} on "
                f"{self.elsewhere[1]}; move them to one device"
            )


Accept = Callable[[Any, Uses], int]
"""Checks a caller's argument and returns its address; TypeError, ValueError and RuntimeError say
what is wrong and how to fix it."""


def pointer(parameter: Parameter, index: int) -> Accept:
    """The function that checks the arguments for a pointer parameter.

    Args:
        parameter: the pointer.
        index: its position.
    """
    names = _accepted(parameter.dtype)
    dtypes = names and frozenset(dtype for dtype, name in _TORCH.items() if name in names)
    aligned = alignment(parameter)
    is_written = not parameter.is_const

    def accept(value: Any, uses: Uses) -> int:
        if value is None:
            return 0
        if not isinstance(value, Tensor):
            return accept_other(value, uses)
        value = _plain(value)
        if value.is_nested:
            raise TypeError(NESTED)
        if dtypes and value.dtype not in dtypes:
            raise TypeError(_wrong_dtype(value.dtype, names))
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
            uses.add_device(index, device)
        if value.layout is not torch.strided:
            raise ValueError(
                f"the tensor's layout is {value.layout}, which has no single address; make it dense"
            )
        if not value.is_contiguous():
            raise ValueError(
                f"the tensor of shape {tuple(value.shape)} and strides {value.stride()} is not "
                "contiguous, and a kernel gets no strides; pass value.contiguous() (the kernel "
                "then writes to this copy), or the contiguous tensor that it is a view of, with "
                "the strides as integers"
            )
        if is_written:
            if value.requires_grad and torch.is_grad_enabled():
                raise RuntimeError(
                    "the kernel may write to a tensor that requires grad, and autograd does not "
                    "see that; call it under torch.no_grad(), pass value.detach(), or declare the "
                    "parameter const"
                )
            uses.written.append(index)
        if value.is_neg() or value.is_conj():
            raise ValueError(
                "memory holds the negatives or conjugates of the tensor's values; "
                "pass value.resolve_neg().resolve_conj()"
            )
        address: int = value.data_ptr()
        check_alignment(address)
        if not address and value.numel():
            raise TypeError(f"{class_of(value)} with no memory of its own")
        return address

    def accept_other(value: Any, uses: Uses) -> int:
        address, dtype, is_read_only = _memory(value, index, uses)
        if names and dtype is not None and dtype not in names:
            raise TypeError(_wrong_dtype(dtype, names))
        if is_read_only and is_written:
            raise ValueError(
                "the array is read-only, and the kernel may write to it; pass a copy, or declare "
                "the parameter const"
            )
        check_alignment(address)
        return address

    def check_alignment(address: int) -> None:
        if address % aligned:
            raise ValueError(
                f"its address {address:#x} is not a multiple of {parameter.size}, the size of "
                f"{parameter.dtype}; pass a clone(), or declare a pointer to scalars"
            )

    return accept


def owners(arguments: Sequence[Any]) -> list[Any]:
    """The objects that own the arguments' memory.

    For a tensor it is the storage, because the caller may give the tensor another storage.
    """
    return [
        _plain(value).untyped_storage() if isinstance(value, Tensor) else value
        for value in arguments
    ]


def alignment(parameter: Parameter) -> int:
    """The alignment that an address must have; vector instructions fault at other addresses."""
    return parameter.size if "x" in parameter.dtype else 1


def _accepted(target: str) -> tuple[str, ...] | None:
    """The dtypes for a pointer to ``target``, or None if it accepts all."""
    scalar = target.rpartition("x")[0]
    return _DTYPES.get(target) or _DTYPES.get(scalar)


def _memory(value: Any, index: int, uses: Uses) -> tuple[int, str | None, bool]:
    """Address, dtype if any, and read-only mark of an argument that is not a tensor."""
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(MASKED)
    if isinstance(value, np.ndarray):
        if not value.flags.c_contiguous:
            raise ValueError(
                f"the array of strides {value.strides} (bytes) is not contiguous, and a kernel "
                "gets no strides; pass numpy.ascontiguousarray(value)"
            )
        uses.host = index
        address, is_read_only = value.__array_interface__["data"]
        return address, _NUMPY.get(value.dtype) or value.dtype.str, is_read_only
    if isinstance(value, Array):  # has dtypes that an array interface cannot express
        return _array(value, index, uses)
    if isinstance(value, Memory):  # its interface would mark the memory as exported
        if value.is_released:
            raise RuntimeError("the memory was released; allocate it again")
        _add_memory(value, index, uses)
        return value.address, None, False
    try:
        interface = value.__sycl_usm_array_interface__
    except AttributeError:
        raise TypeError(
            f"{type(value).__name__} {value!r:.60}, where a torch tensor, a numpy array, an array "
            "or memory with __sycl_usm_array_interface__ (dpctl, dpnp, a pool) or None is "
            "expected; torch.from_dlpack(value) may make one"
        ) from None
    queue, queue_class = interface["syclobj"], load_dpctl().SyclQueue
    uses.add_queue(index, queue if isinstance(queue, queue_class) else queue_class(queue))
    dtype = np.dtype(interface["typestr"])
    strides = interface.get("strides")
    if strides is not None and not _is_contiguous(interface["shape"], strides):
        raise ValueError(
            f"the array of shape {interface['shape']} and strides {strides} is not contiguous, and "
            "a kernel gets no strides; pass a contiguous copy"
        )
    address, is_read_only = interface["data"]
    if not hasattr(value, "dtype"):  # dpctl's memory, which always calls itself read-only
        return address, None, False
    return address + (interface.get("offset") or 0) * dtype.itemsize, dtype.name, is_read_only


def _add_memory(memory: Memory, index: int, uses: Uses) -> None:
    if memory.sycl_queue is None:
        uses.host = index
    else:
        uses.add_queue(index, memory.sycl_queue)


def _array(value: Array, index: int, uses: Uses) -> tuple[int, str, bool]:
    if not value.is_contiguous:
        raise ValueError(
            f"the array of strides {value.strides} is not contiguous, and a kernel gets no strides"
        )
    memory = value.memory
    if isinstance(memory, Memory):
        if memory.is_released:
            raise ValueError(f"the memory of the array at {value.address:#x} was released")
        _add_memory(memory, index, uses)
    elif value.__dlpack_device__()[0] != 1:  # DLPack's number for the host
        raise TypeError("the array is another library's device memory; pass that library's object")
    else:
        uses.host = index
    return value.address, value.dtype.name, value.is_read_only


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
            f"{class_of(value)} has no memory of its own; pass the tensor inside it "
            "(of a DTensor: value.to_local())"
        )
    return value.as_subclass(Tensor)


def _wrong_dtype(dtype: object, names: Sequence[str] | None) -> str:
    cure = "convert it, or declare another pointer"
    if "complex" in str(dtype):
        cure = "convert it, declare another pointer, or pass torch.view_as_real(value)"
    return f"its dtype is {dtype}, and the kernel reads {' or '.join(names or ())}; {cure}"
