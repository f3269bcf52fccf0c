"""``quantize``: prepares the model, calibrates, and replaces the classes of its layers."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from transforms.inputs.arguments import check_in_place, check_model
from transforms.inputs.copies import copy_pair
from transforms.inputs.options import Options, check_flag
from transforms.inputs.state import put_back
from transforms.passes import INFERENCE
from transforms.passes.protocol import Job
from transforms.quantization.calibration import Layers, Times, calibrate, errors, times
from transforms.quantization.candidates import objections
from transforms.quantization.chains import find_following
from transforms.quantization.ranges import OBSERVERS
from transforms.quantization.samples import Run, run_batch
from transforms.reports import Entry, Report, attach, conclude, find, merged, title_of
from transforms.rewrites import compiled_call, exchanged_class
from transforms.rewrites import int8_chain as chain
from transforms.rewrites.for_training import ForTraining
from transforms.rewrites.fused_activation import FusedActivation, make_fused
from transforms.rewrites.int8 import CLASSES, Int8, Range, is_quantized
from transforms.rewrites.int8_operators import objection
from transforms.rewrites.packed import PackedModule
from transforms.rewrites.post_ops import ACTIVATION
from transforms.rewrites.undoing import Undo, changes_to
from transforms.rewrites.watched_parameter import unwatch_all
from transforms.tracing.asked import Asked

__all__ = ["quantize"]

KNOB = "quantize"
"""The name of quantization in the report."""
_PREPARING = (
    "conv_bn_folding",
    "linear_bn_folding",
    "replace_dropout_with_identity",
    "auto_channels_last",
)
"""Passes that come first: a folded BatchNorm costs nothing, and INT8 is fastest channels last."""
_REPLACED = ("weights_prepack", "fuse")


class _Choices(NamedTuple):
    """The arguments of one call that say what is quantized, and how."""

    keep: Sequence[str]
    max_error: float | None
    must_pay: bool
    is_dynamic: bool
    ranges: str
    max_batches: int | None
    progress: bool | None
    run: Run


@torch.inference_mode(False)  # as for optimize
def quantize(
    model: nn.Module,
    loader: Iterable[Any] | None = None,
    *,
    dynamic: bool | None = None,
    ranges: str = "mse",
    keep: str | Sequence[str] = (),
    max_error: float | None = None,
    must_pay: bool = False,
    run: Callable[[nn.Module, Any], object] | None = None,
    max_batches: int | None = None,
    progress: bool | None = None,
    inplace: bool = False,
) -> Any:
    r"""Make the convolutions and Linears of a model compute in INT8, for inference on the CPU.

    .. math::
        q(x) &= \mathrm{clip}(\mathrm{round}(x / s) + z), \qquad
        \hat x = s\,(q(x) - z) \\
        y &= \hat x\,\hat W^T + b

    Activations have 8 bits, with a scale :math:`s` and a zero point :math:`z` for the whole tensor;
    weights have 8 bits, with a scale for each output channel and the zero point 0. Products are
    summed exactly, in 32 bits, and results are float32, or autocast's dtype. On processors without
    such sums (without VNNI or AMX) activations have 7 bits. If nothing else uses its output, a
    layer applies the activation module after it, and hands its codes to the next layer.

    The model is first prepared as by :func:`transforms.optimize`: BatchNorms are folded, Dropouts
    are removed, and the memory format is chosen. It keeps its class, hooks and names. Its
    Parameters stay in floating point and take as much memory as before. ``state_dict()``,
    ``load_state_dict`` and in-place writes work as on the plain model, and a changed weight is
    quantized again when it is next used. :func:`transforms.restore` undoes everything, and
    :func:`transforms.report` lists the layers with their errors, worst first.

    Infinite values and NaN, and dtypes other than float32 and bfloat16, are computed in floating
    point. In training mode, with gradients, in ``torch.export`` and in ``torch.compile`` with
    ``fullgraph=True``, a layer in INT8 raises.

    Args:
        model: a module in eval mode on the CPU.
        loader: batches of representative inputs, from which the ranges of activations and the
            errors of layers are found: each a tensor, a tuple or list of arguments, or a dict of
            keyword arguments. None for dynamic quantization. Afterwards, what ``forward`` counts or
            caches in the model is put back, as with the ``sample_input`` of ``optimize``.
        dynamic: quantize only Linears, and take the range of their inputs from each call. None: if
            there is no loader.
        ranges: "mse", the range with the least mean squared error; "percentile", clips 0.01 percent
            of the values; "min-max", clips none. For static quantization.
        keep: names of modules, or patterns such as ``"*.head"``, which stay in floating point with
            everything inside them.
        max_error: layers with a larger relative error stay in floating point. The error is the norm
            of the difference that INT8 makes to the output of the layer, divided by the norm of the
            output, on the first two batches.
        must_pay: time each layer in both ways on the first two batches of the loader. Layers that
            are not faster in INT8 stay in floating point, and the report says so; if none is
            faster, the model is only prepared.
        run: calls the model with a batch, as ``run(model, batch)``; by default as above.
        max_batches: the largest number of batches to use.
        progress: whether to show a progress bar on stderr. None: for a long loader, on a terminal.
            Without tqdm it is a line that counts.
        inplace: rewrite the given model. Otherwise it is copied.

    Returns:
        the model.

    Raises:
        TypeError: the model is not a module, or cannot be copied; an argument has another type.
        ValueError: training mode, a model that is quantized already, an empty loader, a batch with
            which the model or ``run`` fails, infinite values or NaN in calibration, an unknown name
            in ``keep`` or ``ranges``, ``ranges`` in dynamic quantization, an argument that needs a
            loader, nothing to quantize.
        RuntimeError: this torch lacks oneDNN's INT8 operators, or has different ones.
            Whatever is raised, nothing was changed.

    Example:
        >>> import torch
        >>> from fusedoptim import transforms
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()
        ... ).eval()
        >>> loader = torch.utils.data.DataLoader(torch.randn(64, 3, 16, 16), batch_size=16)
        >>> quantized = transforms.quantize(model, loader)
        >>> quantized[0]
        Int8Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
        >>> with torch.no_grad():
        ...     output = quantized(torch.randn(1, 3, 16, 16))
        >>> [entry.where for entry in transforms.report(quantized).done("quantize")]
        ['0']

    Scheme: that of torch's ``X86InductorQuantizer`` (torchao): per-tensor activations, per-channel
    weights, oneDNN's operators. Source: Jacob et al., "Quantization and Training of Neural Networks
    for Efficient Integer-Arithmetic-Only Inference" (2018).
    """
    check_model(model)
    check_flag("must_pay", must_pay)
    check_flag("inplace", inplace)
    choices = _checked(
        loader, dynamic, ranges, keep, max_error, must_pay, max_batches, progress, run
    )
    if model.training:
        raise ValueError(
            "the model is in training mode, and INT8 is for inference: call model.eval()"
        )
    if is_quantized(model):
        raise ValueError("the model is quantized already: call transforms.restore(model) first")
    if (reason := objection()) is not None:
        raise RuntimeError(reason)
    if inplace:
        check_in_place(model, None)
    else:
        model, _ = copy_pair(model, None)
    # torch.compile would capture the hooks that find ranges, errors and times.
    with compiled_call.suspended(model), changes_to(model) as undo:
        _unpack(model, undo)
        asked = Asked(model)
        prepared = _prepare(model, asked, undo)
        entries = _quantize(model, loader, choices, asked, undo)
        report = Report(title_of(model), {**prepared, KNOB: entries}, kept_bytes=0)
        conclude(model, merged(model, report), undo)
    return model


def _checked(
    loader: Any,
    dynamic: Any,
    ranges: Any,
    keep: Any,
    max_error: Any,
    must_pay: bool,
    max_batches: Any,
    progress: Any,
    run: Any,
) -> _Choices:
    """The choices; raises for an argument of another type or with an unknown value."""
    for name, value in (("dynamic", dynamic), ("progress", progress)):
        if value is not None:
            check_flag(name, value)
    _check_loader(loader)
    if dynamic is False and loader is None:
        raise ValueError("dynamic=False needs a loader, to find the ranges of activations")
    if not isinstance(ranges, str) or ranges not in OBSERVERS:
        raise ValueError(f"ranges={ranges!r} is unknown; use {', '.join(map(repr, OBSERVERS))}")
    is_dynamic = loader is None if dynamic is None else dynamic
    if is_dynamic and ranges != "mse":  # the default
        raise ValueError(
            f"ranges={ranges!r} needs a loader and static quantization: in dynamic quantization, "
            "each call finds the range of its input"
        )
    keep = [keep] if isinstance(keep, str) else keep
    if not isinstance(keep, Sequence) or not all(isinstance(name, str) for name in keep):
        raise TypeError(f"keep={keep!r} is not a name, or a sequence of names")
    if max_error is not None:
        _check_max_error(max_error, loader)
    is_number = isinstance(max_batches, int) and not isinstance(max_batches, bool)
    if max_batches is not None and not (is_number and max_batches > 0):
        raise ValueError(f"max_batches={max_batches!r} is not a positive number of batches")
    if run is not None and not callable(run):
        raise TypeError(f"run={run!r} cannot be called as run(model, batch)")
    needs_loader = {
        "run": run,
        "max_batches": max_batches,
        "must_pay": must_pay or None,
        "progress": progress or None,
    }
    for name, value in needs_loader.items():
        if value is not None and loader is None:
            raise ValueError(f"{name} needs a loader: without one, the model is not called")
    return _Choices(
        keep, max_error, must_pay, is_dynamic, ranges, max_batches, progress, run or run_batch
    )


def _check_loader(loader: Any) -> None:
    """Raise TypeError unless it is a loader; the rows of one batch would be taken for batches."""
    if isinstance(loader, Tensor | Mapping | str):
        raise TypeError(
            f"loader is of type {type(loader).__name__}, not a sequence of batches; for one batch, "
            "pass [batch]"
        )
    if loader is not None and not isinstance(loader, Iterable):
        raise TypeError(f"loader is of type {type(loader).__name__}, which yields no batches")


def _check_max_error(max_error: Any, loader: Any) -> None:
    """Raise unless ``max_error`` is valid, and there is a loader to find errors with."""
    is_number = isinstance(max_error, numbers.Real) and not isinstance(max_error, bool)
    if not is_number:
        raise TypeError(f"max_error={max_error!r} is not a number")
    if not max_error > 0:
        raise ValueError(f"max_error={max_error!r} is not positive")
    if loader is None:
        raise ValueError("max_error needs a loader, to find the errors of layers")


def _prepare(model: nn.Module, asked: Asked, undo: Undo) -> dict[str, Sequence[Entry]]:
    """Run the preparing passes, and return their entries."""
    passes = [each for each in INFERENCE if each.knob in _PREPARING]
    knobs = {each.knob: each.default("O1") for each in passes}
    job = Job(model, None, Options(None, knobs, frozenset()), None, asked, undo)
    return {each.knob: each.run(job) for each in passes if knobs[each.knob]}


def _unpack(model: nn.Module, undo: Undo) -> None:
    """Undo the passes of earlier calls of ``optimize`` that INT8 replaces."""
    for module in model.modules():
        if isinstance(module, PackedModule | FusedActivation | ForTraining):
            exchanged_class.suspend(module, undo)
            vars(module).pop(ACTIVATION, None)  # the callback sets it again
    if (report := find(model)) is not None:
        undo.callback(attach, model, report)
        passes = {knob: done for knob, done in report.passes.items() if knob not in _REPLACED}
        attach(model, report._replace(passes=passes))


def _quantize(
    model: nn.Module,
    loader: Iterable[Any] | None,
    choices: _Choices,
    asked: Asked,
    undo: Undo,
) -> list[Entry]:
    """Replace the classes of layers; entries are all convolutions and Linears, worst first."""
    modules = dict(model.named_modules())
    reasons = objections(model, choices.keep, choices.is_dynamic, asked)
    layers: Layers = {name: modules[name] for name, why in reasons.items() if why is None}
    undo.callback(_unwatch, layers.values())
    with put_back(model):
        computations, measured, timed = _computations(model, layers, loader, choices)
    slow = []
    for name in layers:
        if name not in computations:
            reasons[name] = "was not called in calibration"
        elif choices.max_error is not None and not measured.get(name, 0.0) <= choices.max_error:
            reasons[name] = (
                f"its error would be {measured[name]:.2%}, above max_error={choices.max_error:.2%}"
            )
        elif name in timed and not timed[name].int8 < timed[name].plain:
            slow.append(name)
            reasons[name] = (
                f"not faster on the first batches: {timed[name].int8 * 1e3:.3g} ms instead of "
                f"{timed[name].plain * 1e3:.3g} ms"
            )
    chosen = [name for name, why in reasons.items() if why is None]
    _unwatch(layers[name] for name in layers if reasons[name] is not None)
    if not chosen and not slow:
        _refuse(model, reasons)
    following = find_following(model, [modules[name] for name in chosen], asked)
    for name in chosen:
        layer = modules[name]
        given = {
            "_fusedoptim_int8": computations[name],
            ACTIVATION: following[layer].activation,
            chain.FOLLOWER: following[layer].layer,
        }
        exchanged_class.exchange(layer, CLASSES[type(layer)], undo, **given)
    for each in following.values():
        if each.activation is not None:
            make_fused(each.activation, undo)
    done = [
        _entry(name, modules[name], computations[name].range, measured.get(name)) for name in chosen
    ]
    done.sort(key=lambda entry: -1.0 if entry.error is None else -entry.error)
    left = [
        Entry(name, why, done=False, error=measured.get(name))
        for name, why in reasons.items()
        if why is not None
    ]
    return [*done, *left]


def _unwatch(layers: Iterable[nn.Module]) -> None:
    """Forget the weights that were packed to find an error."""
    for layer in layers:
        unwatch_all(layer)


def _computations(
    model: nn.Module, layers: Layers, loader: Iterable[Any] | None, choices: _Choices
) -> tuple[dict[str, Int8], dict[str, float], dict[str, Times]]:
    """How each layer that is called may compute in INT8, and its error and times, if measured."""
    found: dict[str, Range | None] = dict.fromkeys(layers)
    batches: list[Any] = []
    if loader is not None and layers:
        observer = OBSERVERS[choices.ranges]
        ranges, batches = calibrate(
            model, layers, loader, choices.run, observer, choices.max_batches, choices.progress
        )
        found = {name: None if choices.is_dynamic else ranges[name] for name in ranges}
    computations = {
        name: CLASSES[type(layers[name])].computation(range_) for name, range_ in found.items()
    }
    called = {name: layers[name] for name in computations}
    of_all = model, called, computations, batches, choices.run
    return computations, errors(*of_all), times(*of_all) if choices.must_pay else {}


def _entry(name: str, layer: Any, range_: Range | None, error: float | None) -> Entry:
    what = "INT8, range of each call" if range_ is None else "INT8"
    if error is not None:
        what = f"{what}, error {error:.2%}"
    weight = layer.weight
    saved = weight.numel() * (weight.element_size() - 1)
    return Entry(name, what, bytes_saved=saved, error=error)


def _refuse(model: nn.Module, reasons: dict[str, str | None]) -> None:
    why = "; ".join(f"{name or 'the model'}: {why}" for name, why in list(reasons.items())[:5])
    raise ValueError(
        f"this {type(model).__name__} has nothing to quantize: "
        f"{why or 'it has no convolutions and no Linears'}"
    )
