"""Common parts of kernels from expressions: parsed declarations, planned calls, generated C."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fusedoptim._torch_private import count_modes, increment_version, is_forward_mode, tracing_state
from fusedoptim.allocator import check_not_forked
from fusedoptim.launch.backend import LaunchShape, Traits
from fusedoptim.launch.devices import BACKENDS, is_on_host
from fusedoptim.raw import _parameters
from fusedoptim.raw._arguments import Signature
from fusedoptim.raw._errors import class_of
from fusedoptim.raw._parameters import Dtype, Operand
from fusedoptim.raw._pointers import PLAIN
from fusedoptim.raw._recent import Recent
from fusedoptim.raw._repeat import Repeat
from fusedoptim.raw._seen import check_seen
from fusedoptim.raw._sources import check_source_options
from fusedoptim.raw._spirv import Parameter
from fusedoptim.raw._walk import memory
from fusedoptim.raw.kernel import RawKernel, RawModule, untraced

_MOST_PLANS = 512
_REPEATED = PLAIN | {bool, int, float}
"""Types of arguments with which a call may be repeated without all checks."""
NUMBERS = Parameter("numbers_", "pointer", "i64", 8, True)
"""The first parameter of each kernel: sizes and strides."""
_MIN_CHUNK = 4 * 1024  # elements, so that starting a group costs little
LEAST_GROUPS = 16
"""The least number of groups of a launch, so that no core is idle."""


class NewOutput(NamedTuple):
    """An output that a call creates."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def create(self, device: torch.device | str | None = None) -> Tensor:
        """The tensor, uninitialized."""
        device = device or self.device
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


class _Signature(Signature):
    """The parameters of a generated kernel, whose errors name them as the caller did."""

    def what(self, i: int) -> str:
        name = self.parameters[i].name.removesuffix(_parameters.MEMORY)
        return f"{self._kernel}: argument {name!r}"


class GeneratedKernel(RawKernel):
    """A kernel whose source tells which group it is, so a launch may be cut into parts."""

    def __init__(
        self,
        source: RawModule,
        name: str,
        parameters: Sequence[Parameter],
        traits: Traits,
    ) -> None:
        self._parameters = parameters
        self._traits = traits
        super().__init__(source, name)

    def __reduce__(self) -> Any:
        return GeneratedKernel, (self._module, self.name, self._parameters, self._traits)

    def _find(self) -> Signature:
        self._signature = _Signature(self.name, self._parameters)
        return self._signature


class Plan(NamedTuple):
    """Everything that a call needs besides its tensors, for arguments of given types and shapes."""

    outputs: tuple[NewOutput, ...]
    kernel: GeneratedKernel | None = None
    """None if there is nothing to compute."""
    arguments: tuple[Tensor, ...] = ()
    """The kernel's first arguments: its sizes and strides, and if needed a second one."""
    zeros: int = 0
    """Bytes of a tensor of zeros, its next argument, which the kernel leaves as zeros; 0 if there
    is none."""
    groups: int = 0
    lanes: int = 0
    strided: tuple[int, ...] = ()
    """Indices of the caller's arguments that are not contiguous."""
    device: torch.device | None = None

    def launch(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Launch the kernel on inputs and outputs, and return all of its arguments."""
        assert self.kernel is not None
        passed = list(values)
        for k in self.strided:
            passed[k] = memory(values[k])
        first = self.arguments
        if self.zeros:
            first += (torch.zeros(self.zeros, dtype=torch.uint8, device=self.device),)
        arguments = *first, *passed
        self.kernel(self.groups * self.lanes, self.lanes, arguments)
        return arguments

    def repeat(self, arguments: Sequence[Any]) -> Repeat | None:
        """A repeatable launch on these arguments; None if their checks cannot be omitted."""
        assert self.kernel is not None
        if any(isinstance(value, Tensor) and value.requires_grad for value in arguments):
            return None  # to be refused where gradients are enabled
        own = len(self.arguments)
        return self.kernel._repeat(self.groups * self.lanes, self.lanes, arguments, own, self.zeros)


class _Again(NamedTuple):
    """The data for a call whose tensors have the same forms as in an earlier call."""

    outputs: tuple[NewOutput, ...]
    """The outputs that the call creates."""
    repeat: Repeat


class ExpressionKernel(abc.ABC):
    """The base of ElementwiseKernel and ReductionKernel."""

    _reserved: ClassVar[tuple[str, ...]]
    """Names that the expressions use."""
    _is_light = False
    """See :class:`fusedoptim.launch.backend.Traits`."""

    def __init__(
        self, in_params: str, out_params: str, name: str, preamble: str, options: Sequence[str]
    ) -> None:
        check_text(name=name, preamble=preamble)
        self._inputs = _parameters.parse(in_params, "in_params", self._reserved)
        self._outputs = _parameters.parse(out_params, "out_params", self._reserved)
        self._params = self._inputs + self._outputs
        self._input_count = len(self._inputs)
        _parameters.check_names(name, self._params)
        self._name = name
        self._preamble = preamble
        self._options = check_source_options("OpenCL C", options)
        self._kernels: dict[str, GeneratedKernel] = {}  # by their C source
        self._plans: dict[Any, Plan] = {}
        self._recent: dict[int | tuple[type, ...], Recent[_Again]] = {}
        """Recent calls, by the number of arguments if all are tensors, otherwise by their types."""

    def __repr__(self) -> str:
        inputs, outputs = (", ".join(map(str, p)) for p in (self._inputs, self._outputs))
        return f"<{type(self).__name__} {self._name}({inputs}) -> {outputs}>"

    def _call(self, args: tuple[Any, ...], *options: Any) -> Any:
        """The outputs; ``options`` are those of :meth:`_plan`."""
        if torch.compiler.is_dynamo_compiling():  # dynamo recognizes the full name only
            return untraced(self._call, args, *options)
        if count_modes() or is_forward_mode():
            check_seen(self._name, args)
        outputs = self._repeated(args, options)
        if outputs is None:
            outputs = self._checked(args, options)
        return outputs if len(outputs) > 1 else outputs[0]

    def _repeated(self, args: tuple[Any, ...], options: object) -> tuple[Any, ...] | None:
        """The outputs of a call like an earlier one; None if its arguments must be checked."""
        recent = self._recent.get(len(args))
        again = None if recent is None else recent.find(args, options)
        if again is None:
            recent = self._recent.get(tuple(map(type, args)))
            again = None if recent is None else recent.find(args, options)
            if again is None:
                return None
        if again.outputs:
            created = [output.create() for output in again.outputs]
            if not PLAIN.issuperset(map(type, created)):  # in a torch mode, such as a fake one
                return None
            args = *args, *created
        outputs = args[self._input_count :]
        check_not_forked()
        increment_version(outputs)
        return outputs if again.repeat.launch(args) else None

    def _checked(self, args: Sequence[Any], options: tuple[Any, ...]) -> tuple[Any, ...]:
        """The outputs of a call whose arguments are checked."""
        if tracing_state() is not None:  # which makes every call come here
            check_seen(self._name, args)
        values, forms = _parameters.read(self._name, self._params, args, self._input_count)
        key = forms, options
        known = self._plans.get(key)
        plan = known or self._plan(values, *options)
        created = [output.create() for output in plan.outputs]
        if plan.kernel is not None:
            launched = plan.launch([*values, *created])
            self._remember(args, options, plan, launched)
        if known is None:  # only now: a plan made under FakeTensorMode has a fake tensor, and fails
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return (*args[self._input_count :], *created)

    def _remember(
        self, args: Sequence[Any], options: object, plan: Plan, launched: Sequence[Any]
    ) -> None:
        """Remember how to repeat a call that launched a kernel on these arguments."""
        kinds = tuple(map(type, args))
        if not _REPEATED.issuperset(kinds):
            return

        def find_out() -> _Again | None:
            repeat = plan.repeat(launched)
            return None if repeat is None else _Again(plan.outputs, repeat)

        tensors = [i for i, kind in enumerate(kinds) if kind in PLAIN]
        are_all = len(tensors) == len(kinds)
        key = len(kinds) if are_all else kinds
        if key not in self._recent:
            self._recent[key] = Recent(None if are_all else tensors)
        self._recent[key].remember(args, find_out, options)

    @abc.abstractmethod
    def _plan(self, values: Sequence[Any], *options: Any) -> Plan:
        """The plan of calls with such arguments."""

    def _operands(self, values: Sequence[Any]) -> tuple[list[Operand], dict[str, Dtype]]:
        """The arguments with their parameters, and the dtype of each parameter's type."""
        _parameters.check_count(self._name, len(self._inputs), len(self._outputs), values)
        found = _parameters.bind(self._name, self._params, values, self._input_count)
        return [Operand(p, found[p.type], v) for p, v in zip(self._params, values)], found

    def _opening(self, parameters: Sequence[Parameter], device: torch.device) -> str:
        """C that begins the kernel."""
        size = launch_shape(device).sub_group
        attribute = f"__attribute__((intel_reqd_sub_group_size({size})))\n" if size else ""
        return attribute + _parameters.opening(self._name, parameters, takes_frame(device))

    def _new_outputs(
        self,
        operands: list[Operand],
        found: dict[str, Dtype],
        shape: torch.Size,
        strides: tuple[int, ...],
        device: torch.device,
    ) -> tuple[NewOutput, ...]:
        """The outputs that the call creates, after appending stand-ins for them to the operands."""
        if len(operands) == len(self._params):
            return ()
        outputs = []
        for param in self._outputs:
            dtype = _parameters.output_dtype(self._name, param, found)
            outputs.append(NewOutput(tuple(shape), strides, dtype.torch, device))
            operands.append(Operand(param, dtype, outputs[-1].create("meta")))
        return tuple(outputs)

    def _planned(
        self,
        outputs: tuple[NewOutput, ...],
        source: str,
        parameters: Sequence[Parameter],
        numbers: dict[str, int],
        operands: Sequence[Operand],
        device: torch.device,
        groups: int,
        zeros: int | None = None,
    ) -> Plan:
        """The plan of a call that launches the kernel in ``source``.

        Args:
            outputs: the outputs that the call creates.
            source: OpenCL C.
            parameters: the kernel's parameters.
            numbers: the sizes and strides that the kernel reads from its first argument.
            operands: the kernel's last arguments.
            device: the device of all of them.
            groups: the number of work-groups.
            zeros: bytes of zeros that the kernel takes in between; None if it has no such
                parameter, 0 if it does not use it.
        """
        if source not in self._kernels:
            module = RawModule(source, self._options)
            traits = Traits(
                is_divisible=True,
                takes_frame=takes_frame(device),
                is_light=self._is_light,
            )
            self._kernels[source] = GeneratedKernel(module, self._name, parameters, traits)
        with torch.inference_mode(False):  # the plan outlives the caller's mode
            sizes = torch.tensor([*numbers.values()], dtype=torch.int64, device=device)
        lanes = launch_shape(device).lanes
        strided = [
            k for k, o in enumerate(operands) if o.is_element and not o.tensor.is_contiguous()
        ]
        kernel = self._kernels[source]
        # Not the same tensor twice: Signature would not recognize the arguments at the next call.
        first = (sizes, sizes[:1]) if zeros == 0 else (sizes,)
        return Plan(outputs, kernel, first, zeros or 0, groups, lanes, tuple(strided), device)


def check_text(**texts: Any) -> None:
    """Raise TypeError unless all these arguments are strings."""
    for name, text in texts.items():
        if not isinstance(text, str):
            raise TypeError(f"{name}={text!r} is {class_of(text)}; pass a str")


def statements(text: str, what: str) -> str:
    """C of the caller's statements, which errors call ``what``.

    ``return`` skips the rest of them, but not what follows them: the outputs are stored, as they
    are in CuPy, where they are references.
    """
    return (
        f'#define return goto stored_\n#line 1 "{what}"\n    {text};\n#line 1 "generated"\n'
        "#undef return\nstored_:;"
    )


def takes_frame(device: torch.device) -> bool:
    """Whether kernels take the address of their arguments: a GPU cannot read the host's memory."""
    return is_on_host(device)


def launch_shape(device: torch.device) -> LaunchShape:
    """How a kernel is spread over a device."""
    return BACKENDS[device.type].shape


def chunk_of(n: int, device: torch.device, most_on_caller: int, count: int = 1) -> int:
    """The number of elements, of ``n``, that a group walks.

    Args:
        n: the number of elements.
        device: where the kernel runs.
        most_on_caller: the most elements that one group walks on the host. One group runs on the
            calling thread there, and waking other threads takes longer than a short kernel.
        count: how many times ``n`` elements are walked, by groups of their own.
    """
    if n <= most_on_caller and is_on_host(device):
        return max(n, 1)
    return min(launch_shape(device).chunk, max(_MIN_CHUNK, -(-n * count // LEAST_GROUPS)))
