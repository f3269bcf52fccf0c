"""The user's own kernels, launched on torch tensors: RawKernel and RawModule.

OpenCL C text, SPIR-V, or a Python function (``[jit]``) becomes SPIR-V, and the device's driver
compiles that. The conventions are CuPy's: ``kernel(global_size, local_size, args)``.
"""

from __future__ import annotations

import functools
import html
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fusedoptim._torch_private import (
    count_modes,
    disable_dynamo,
    increment_version,
    is_forward_mode,
)
from fusedoptim.allocator import check_not_forked, load_dpctl, queue
from fusedoptim.launch.backend import NO_TRAITS, Traits
from fusedoptim.launch.devices import backend_of, named_queue, queue_of
from fusedoptim.raw._arguments import LocalMemory, Signature
from fusedoptim.raw._build import Built, Program, Size
from fusedoptim.raw._pointers import Uses, owners
from fusedoptim.raw._repeat import Repeat
from fusedoptim.raw._seen import check_seen
from fusedoptim.raw._sources import Source, check_source_options, compile_source, read_source
from fusedoptim.raw._spirv import Parameter

__all__ = ["RawKernel", "RawModule"]


class RawModule:
    """Kernels that are compiled together.

    Args:
        source: OpenCL C text, SPIR-V bytes, a :class:`pathlib.Path` of a ``.cl`` or ``.spv`` file,
            or a Python function in the language of :mod:`fusedoptim.raw.language`, which needs the
            ``[jit]`` extra.
        options: for OpenCL C: ``-DNAME=value``, ``-I/folder``, ``-cl-std=CL2.0`` (1.2 if none is
            named), ``-cl-fast-relaxed-math`` and so on; for SPIR-V: those that its driver accepts;
            for a Python function: none.
        device: where launches run if their arguments do not decide it: a SYCL filter string such as
            "cpu", "gpu", or "level_zero:gpu:1"; "xpu", for torch's current stream; or a
            ``dpctl.SyclQueue``.

    Nothing is compiled before a kernel is called or one of its properties is read. Text is compiled
    to SPIR-V, and SPIR-V by the device's driver. Both results are cached on disk, in the folder
    ``FUSEDOPTIM_CACHE_DIR`` (empty: no cache; default: ``$XDG_CACHE_HOME/fusedoptim``, or
    ``~/.cache/fusedoptim`` if that variable is not set). Two things are not cached: text that
    includes other files, and the driver's results for ``wait=False`` or for your own
    ``dpctl.SyclQueue``.

    Raises:
        TypeError: ``source`` or ``options`` is of another type.
        ValueError: a string that is a file's name, a file of another kind, or an unknown option.

    Example:
        >>> import torch
        >>> module = RawModule('''
        ... kernel void twice(global float *x) { x[get_global_id(0)] *= 2; }
        ... kernel void square(global float *x) { x[get_global_id(0)] *= x[get_global_id(0)]; }
        ... ''')
        >>> module.names
        ('twice', 'square')
        >>> x = torch.arange(4.0)
        >>> module["twice"](4, None, (x,))
        >>> module["square"](4, None, (x,))
        >>> x
        tensor([ 0.,  4., 16., 36.])
    """

    def __init__(self, source: Source, options: Sequence[str] = (), *, device: Any = "cpu") -> None:
        self.kind, self._source = read_source(source)
        """The kind of the source: "OpenCL C", "SPIR-V" or "Python"."""
        self.source = source
        """The source, as given."""
        self.options = check_source_options(self.kind, options)
        """The compiler's options."""
        self.device = _check_device(device)
        """Where launches run if the arguments do not decide it."""
        self._compiled: Program | None = None

    @property
    def _program(self) -> Program:
        # functools.cached_property of CPython 3.11 has one lock for all modules, which a child
        # that is forked while another thread compiles finds locked.
        if self._compiled is None:
            self._compiled = compile_source(self.kind, self._source, self.options)
        return self._compiled

    @property
    def names(self) -> tuple[str, ...]:
        """The kernels, in the order of the source."""
        return tuple(self._program.facts.entries)

    @property
    def spirv(self) -> bytes:
        """The module that is passed to the device's driver."""
        return self._program.spirv

    def get_function(self, name: str) -> RawKernel:
        """The kernel ``name``.

        Args:
            name: its name in the source.

        Raises:
            KeyError: there is no kernel of this name; the message lists the existing ones.
        """
        return RawKernel(self, name)

    def __getitem__(self, name: str) -> RawKernel:
        return self.get_function(name)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"<RawModule of {self.kind}: {', '.join(self.names)}>"

    def __reduce__(self) -> Any:
        make = functools.partial(RawModule, device=self.device)
        return make, (self.source, self.options)


class RawKernel:
    """The user's own kernel: ``kernel(global_size, local_size, args)``.

    Args:
        source: the source, as for :class:`RawModule`, or such a module.
        name: the kernel's name; may be omitted if there is only one.
        options: the options, as for :class:`RawModule`.
        device: the device, as for :class:`RawModule`.

    Raises:
        TypeError: ``source`` or ``options`` is of another type.
        ValueError: a string that is a file's name, a file of another kind, or an unknown option.

    Errors of compilation are raised when the kernel is first called, or at :meth:`compile`.

    Example:
        >>> import torch
        >>> saxpy = RawKernel('''
        ... kernel void saxpy(ulong n, float a, global const float *x, global float *y) {
        ...     size_t i = get_global_id(0);
        ...     if (i < n) y[i] += a * x[i];
        ... }''')
        >>> x, y = torch.ones(1000), torch.ones(1000)
        >>> saxpy(1024, 16, (1000, 0.5, x, y))
        >>> y[:3]
        tensor([1.5000, 1.5000, 1.5000])
    """

    _traits: Traits = NO_TRAITS

    def __init__(
        self,
        source: Source | RawModule,
        name: str | None = None,
        options: Sequence[str] = (),
        *,
        device: Any = "cpu",
    ) -> None:
        if isinstance(source, RawModule):
            if options:
                raise ValueError(f"options={options!r}: the module already has its own")
            self._module = source
        else:
            self._module = RawModule(source, options, device=device)
        self._asked = name
        self._signature: Signature | None = None
        self._lock = threading.RLock()  # a signal handler may launch it in the middle
        self._built: dict[Any, Built] = {}
        self._on_cpu: Built | None = None
        if isinstance(source, RawModule):
            self._find()

    def __call__(
        self,
        global_size: Size,
        local_size: Size | None,
        args: Sequence[Any],
        *,
        wait: bool | None = None,
    ) -> None:
        """Launch the kernel.

        It runs where its arguments are: torch XPU tensors on torch's current stream, arrays in SYCL
        memory on their queue, the host's memory on the CPU device. Tensors and arrays are passed as
        the address of their first element, without a copy, and the kernel writes into them.
        Autograd is told that they changed, but not how: no gradient flows through a kernel.

        Nothing protects against errors in a kernel. On the CPU, an access outside of its arguments
        ends the process if there is no memory at that address, and hits other data if there is. An
        integer divided by zero is some number, or ends the process. On a GPU the SYCL runtime
        reports a fault when the kernel's end is waited for; dpctl then ends the process.

        Args:
            global_size: work items in all, in 1 to 3 dimensions; the first is that of
                ``get_global_id(0)``. Zero launches nothing.
            local_size: work items of a work-group; the global size must be a multiple of it. None
                lets the driver choose.
            args: a value for each parameter. For a pointer: a torch tensor, a numpy array, or an
                array or memory of a pool, of dpctl or dpnp, contiguous and of the dtype that it
                points to (of any dtype for ``char``, ``uchar`` and ``void``, as in C), or None. For
                a ``local`` pointer: :class:`LocalMemory`. Else a number, or bytes.
            wait: whether to wait for the kernel's end. None waits on the CPU device, whose results
                are in the host's memory, and returns at once elsewhere, where torch's stream keeps
                the order. After False on the CPU, ``allocator.queue("cpu").wait()`` waits, as does
                any later call without False: launches run in order. Until then the kernel keeps its
                arguments' memory alive, so the caller may drop them, but must not free or move that
                memory: by ``resize_`` of a tensor or its storage, or ``release`` of pool memory.

        Raises:
            KernelCompileError: the source does not compile, at the first call.
            TypeError: a wrong number of arguments, or one of a wrong type or dtype.
            ValueError: sizes that cannot be launched, or an argument that cannot be passed.
            OverflowError: an integer that does not fit its parameter.
            RuntimeError: tensors of two devices, a tensor that requires grad and may be written, or
                one with a tangent; a call that torch.jit.trace, make_fx or torch.export records, or
                in a process that was forked after its parent used a device.
        """
        if torch.compiler.is_dynamo_compiling():  # dynamo recognizes the full name only
            untraced(self, global_size, local_size, args, wait=wait)
            return
        if count_modes() or is_forward_mode():
            check_seen(self.name, args)
        signature = self._signature
        if signature is None:
            signature = self._find()
        if type(args) is list:  # another thread may change it while the kernel runs
            args = tuple(args)
        frame, uses = signature.bind(args)
        built = self._on_cpu
        if built is None or uses.is_elsewhere:
            built = self._built_for(self._queue(uses))
        else:
            check_not_forked()
        shape = built.shape(global_size, local_size)
        if signature.needs_local_memory:
            self._check_local_memory(args, built)
        if shape.is_empty:
            return
        if wait is None:
            wait = built.on_host
        if uses.is_elsewhere or not built.in_order:
            wait = _wait_for_others(uses, built) or wait
        kept = None if wait else owners(args)
        increment_version([args[i] for i in uses.written])
        built.launch(shape, frame, uses, kept)
        signature.frames.append(frame)

    def compile(self) -> RawKernel:
        """Compile now, for the kernel's own device, rather than at the first call.

        Returns:
            the kernel.

        Raises:
            KernelCompileError: the source does not compile.
            KeyError: it has no kernel of this name.
            ValueError: no name was given, and the source has several kernels.
        """
        self._own()
        return self

    @property
    def name(self) -> str:
        """The kernel's name in its source."""
        return self._asked if self._asked is not None else self._found_name()

    @property
    def kind(self) -> str:
        """The kind of the source: "OpenCL C", "SPIR-V" or "Python"."""
        return self._module.kind

    @property
    def options(self) -> tuple[str, ...]:
        """The compiler's options."""
        return self._module.options

    @property
    def device(self) -> Any:
        """Where launches run if the arguments do not decide it."""
        return self._module.device

    @property
    def spirv(self) -> bytes:
        """The module that is passed to the device's driver."""
        return self._module.spirv

    @property
    def signature(self) -> tuple[Parameter, ...]:
        """The parameters."""
        return (self._signature or self._find()).parameters

    @property
    def num_args(self) -> int:
        """Number of parameters."""
        return len(self.signature)

    @property
    def max_work_group_size(self) -> int:
        """The largest work-group of this kernel on its device."""
        return self._own().limits.work_group_size

    @property
    def preferred_work_group_size_multiple(self) -> int:
        """The number that a group's size should be a multiple of on its device."""
        return self._own().limits.preferred_work_group_size_multiple

    @property
    def private_mem_size(self) -> int:
        """Bytes that each work item needs on its device."""
        return self._own().limits.private_mem_size

    def __repr__(self) -> str:
        if self._signature is None:
            name = "" if self._asked is None else f"{self._asked} "
            return f"<RawKernel {name}of {self.kind}, not compiled>"
        return f"<RawKernel {self.name}({', '.join(map(str, self.signature))})>"

    def _repr_html_(self) -> str:
        """The parameters and the device's limits, for a notebook."""
        rows = "".join(
            f"<tr><td>{i}</td><td>{html.escape(parameter.name)}</td>"
            f"<td>{html.escape(_type_text(parameter))}</td></tr>"
            for i, parameter in enumerate(self.signature)
        )
        own = self._own()
        facts = (
            f"{self.kind}, {len(self.spirv):,} bytes of SPIR-V; {own.queue.sycl_device.name}: "
            f"at most {self.max_work_group_size:,} work items a group, best multiples of "
            f"{self.preferred_work_group_size_multiple}; {self.private_mem_size:,} bytes an item"
        )
        return (
            f"<table><caption><b>{html.escape(self.name)}</b></caption>"
            "<tr><th></th><th>parameter</th><th>type</th></tr>"
            f"{rows}</table><p>{html.escape(facts)}</p>"
        )

    def __reduce__(self) -> Any:
        return RawKernel, (self._module, self._asked)

    def _found_name(self) -> str:
        names = self._module.names
        if len(names) != 1:
            raise ValueError(f"name=None, but there are several kernels: {', '.join(names)}")
        return names[0]

    def _find(self) -> Signature:
        """The kernel's signature; compiles the source."""
        program, name = self._module._program, self.name
        entry = program.facts.entries.get(name)
        if entry is None:
            names = ", ".join(program.facts.entries)
            raise KeyError(f"the {self.kind} has no kernel {name!r}; available: {names}")
        self._signature = Signature(name, entry.parameters)
        return self._signature

    def _own(self) -> Built:
        """The kernel, built for its own device."""
        return self._built_for(named_queue(self.device))

    def _repeat(
        self, items: int, group: int, args: Sequence[Any], first: int, zeros: int
    ) -> Repeat | None:
        """A repeatable launch of the kernel, if it runs on the CPU's shared queue.

        Args:
            items: work items in all.
            group: work items of a work-group.
            args: the arguments of an earlier launch.
            first: how many of the first arguments are the same in each launch.
            zeros: bytes of the next argument, a tensor of zeros; 0 if there is none.
        """
        built = self._on_cpu
        if built is None or not built.in_order or not self._traits.takes_frame:
            return None
        signature = self._signature or self._find()
        frame, uses = signature.bind(args)
        signature.frames.append(frame)
        if uses.is_elsewhere:
            return None
        return Repeat(built, built.shape(items, group), signature, uses, args[:first], zeros)

    def _queue(self, uses: Uses) -> Any:
        """The queue of the arguments."""
        cpu, queues = self._on_cpu, uses.queues
        if cpu is not None and uses.elsewhere is None and all(q is cpu.queue for _, q in queues):
            return cpu.queue
        if uses.elsewhere is not None:
            chosen = queue_of(uses.elsewhere[1])
        elif queues:
            chosen = queues[0][1]
        else:
            chosen = named_queue(self._module.device)
        for index, other in queues:
            if other.sycl_context != chosen.sycl_context:
                raise RuntimeError(
                    f"{self.name}: argument {index} is in the SYCL context of "
                    f"{other.sycl_device.name}, not in that of {self._place(uses, chosen)}; "
                    "copy it there"
                )
        backend = backend_of(chosen)
        if uses.host is not None and not backend.runs_on_host:
            raise RuntimeError(
                f"{self.name}: argument {uses.host} is in the host's memory, which "
                f"{chosen.sycl_device.name} ({self._place(uses, chosen)}) cannot read; move it "
                f"there, as tensor.to({backend.torch_type!r}) does, or use device='cpu' and "
                "arguments on the host alone"
            )
        return chosen

    def _place(self, uses: Uses, chosen: Any) -> str:
        """What chose the queue, for errors."""
        if uses.elsewhere is not None:
            index, device = uses.elsewhere
            return f"argument {index}, on {device}"
        if uses.queues:
            return f"argument {uses.queues[0][0]}, on {chosen.sycl_device.name}"
        return f"device={self.device!r}"

    def _built_for(self, chosen: Any) -> Built:
        check_not_forked()
        built = self._built.get(chosen)
        if built is None:
            signature = self._signature or self._find()
            with self._lock:
                program = self._module._program
                built = Built(chosen, program, self.name, signature, self._traits)
                built = self._built.setdefault(chosen, built)
                if isinstance(self.device, str) and self.device == "cpu" and chosen is queue("cpu"):
                    self._on_cpu = built
        return built

    def _check_local_memory(self, args: Sequence[Any], built: Built) -> None:
        asked = sum(value.nbytes for value in args if isinstance(value, LocalMemory))
        if asked > built.local_memory:
            raise ValueError(
                f"{self.name}: LocalMemory of {asked:,} bytes in all, and "
                f"{built.queue.sycl_device.name} has {built.local_memory:,} for a group"
            )


def _wait_for_others(uses: Uses, built: Built) -> bool:
    """Wait for other queues' work on the arguments; return whether to wait for the kernel too."""
    others = [other for _, other in uses.queues if other != built.queue or not built.in_order]
    for other in others:
        other.wait()
    return bool(others) or not built.in_order


def _type_text(parameter: Parameter) -> str:
    return str(parameter).removesuffix(parameter.name).strip()


@disable_dynamo  # type: ignore[untyped-decorator]  # torch does not export it
def untraced(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A call that torch.compile does not trace, out of a function that it traces."""
    return call(*args, **options)


def _check_device(device: Any) -> Any:
    if isinstance(device, (str, torch.device)):
        return str(device)
    if not isinstance(device, load_dpctl().SyclQueue):
        raise TypeError(f"device={device!r} is neither a SYCL filter string nor a dpctl.SyclQueue")
    return device
