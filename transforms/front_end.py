"""``optimize``: checks its arguments, runs the passes, and reports what they did."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fusedoptim.runtime.memory import return_free_memory
from transforms.embedding_bags import KNOB as MERGING
from transforms.embedding_bags import mergeable
from transforms.inputs.arguments import (
    check_in_place,
    check_model,
    check_not_for_inference,
    check_pair,
)
from transforms.inputs.copies import copy_pair
from transforms.inputs.options import DTYPE, SPLIT, check_knobs, resolve
from transforms.inputs.sample import Comparison, caller, check_sample, seconds, trial
from transforms.passes import INFERENCE, KNOBS, TRAINING
from transforms.passes.protocol import Job, Pass
from transforms.reports import (
    Entry,
    NoEffectWarning,
    Report,
    SlowDtypeWarning,
    check_not_final,
    conclude,
    merged,
    title_of,
)
from transforms.rewrites.packed import supported_dtypes
from transforms.rewrites.undoing import changes_to
from transforms.tracing.asked import Asked

__all__ = ["optimize"]

_SAMPLE = "sample_input"
_MUCH_SLOWER = 1.1
"""If two times of one model differ by more than this factor, other load is assumed, not noise."""
_USERS_LINE = 4
"""The ``stacklevel`` of warnings that names the line of the user's call of ``optimize``."""


@torch.inference_mode(False)  # otherwise changes of copied weights could not be tracked
def optimize(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    dtype: torch.dtype | None = None,
    level: str = "O1",
    inplace: bool = False,
    conv_bn_folding: bool | None = None,
    linear_bn_folding: bool | None = None,
    replace_dropout_with_identity: bool | None = None,
    split_master_weight_for_bf16: bool | None = None,
    fuse_update_step: bool | None = None,
    parallel_dropout: bool | None = None,
    fuse_gelu: bool | None = None,
    fuse_frozen_batch_norm: bool | None = None,
    onednn_products: bool | None = None,
    auto_channels_last: bool | None = None,
    conv_as_matmul: bool | None = None,
    weights_prepack: bool | None = None,
    fuse: bool | None = None,
    graph_mode: bool | None = None,
    fold_constants: bool | None = None,
    sample_input: Any = None,
) -> Any:
    """Rewrite a model for inference, or a model and its optimizer for training.

    A model in eval mode is optimized for inference. A model in training mode is optimized for
    training, together with its optimizer. Anything that would not be safe to rewrite is left
    unchanged; :func:`transforms.report` lists what was done, what was not, and why. The model keeps
    its class, hooks and names. Its ``state_dict()`` equals the plain model's, and each loads into
    the other. :func:`transforms.restore` undoes the rewrite. If the model is moved afterwards
    (``to``, ``half``, ``share_memory``), it saves, and is restored to, the plain model after the
    same move.

    A model optimized for inference keeps everything that it learns in eval mode, and all writes
    into its parameters: ``state_dict()`` and ``restore`` give a plain model that computes the same.
    For a folded layer, the trained weight is divided by the BatchNorm's scale, and a change of the
    bias goes to the BatchNorm's bias; values that did not change keep every bit. In training mode a
    folded BatchNorm raises: restore the model first. To write new values, use ``load_state_dict``:
    the model does not compute with the tensors of ``state_dict()``.

    For each knob, None means the level's default, True turns it on, and False turns it off.

    Args:
        model: a module on one device.
        optimizer: the optimizer of the model's parameters, for training only.
        dtype: torch.bfloat16 or, for inference, torch.float16: casts the weights of convolutions,
            Linears and embeddings. Run the model under ``torch.autocast`` with the same dtype. None
            and torch.float32 cast nothing.
        level: "O1" does everything that is safe, "O0" only what is asked for.
        inplace: rewrite the given model and optimizer. Otherwise they are copied; schedulers stay
            with the given optimizer, so create new ones for the copy.
        conv_bn_folding: in eval mode, fold each BatchNorm into the convolution before it.
        linear_bn_folding: in eval mode, fold each BatchNorm into the Linear before it.
        replace_dropout_with_identity: in eval mode, remove Dropouts of all kinds.
        split_master_weight_for_bf16: in training, required with bfloat16: split weights into two
            halves, and keep the lower halves in the optimizer.
        fuse_update_step: in training, run the optimizer's step in one kernel. None, at level "O1":
            if its class is SGD, Adagrad, Adam, AdamW or a known Lamb.
        parallel_dropout: in training, draw the masks of each ``torch.nn.Dropout``,
            ``torch.nn.AlphaDropout`` and ``torch.nn.MultiheadAttention``, and of the "sdpa"
            attention of transformers' models, on all cores. The random numbers follow
            ``torch.manual_seed``, but differ from torch's.
        fuse_gelu: in training, compute ``torch.nn.GELU("tanh")``, and the modules of transformers
            that compute the same, with one kernel forward and one backward.
        fuse_frozen_batch_norm: in training, compute each FrozenBatchNorm2d of torchvision and
            detectron2 by ``torch.nn.functional.batch_norm``. In eval mode the two folding passes
            fold them.
        onednn_products: in training, compute large float32 products of Linears, and of
            transformers' Conv1Ds, with oneDNN, forward and backward. Only on processors where
            torch's own library is slower.
        auto_channels_last: lay out the weights of convolutions in channels_last. None, at level
            "O1": on the CPU, if the model's code does not depend on strides and, in eval mode with
            a ``sample_input``, if that is faster. True: always.
        conv_as_matmul: in training, compute 2-d convolutions over small images, whose weights are
            large, as products of matrices, if their tensors are in channels_last: forward and
            backward, or only the gradients of weights, where that is faster on this processor.
        weights_prepack: in eval mode, compute convolutions, Linears and LSTMs on the CPU with a
            copy of their weight in oneDNN's layout, made at the first call. The copy takes as much
            memory as the weight. Where a gradient is recorded, torch's own operators compute: call
            the model under ``torch.no_grad()`` or ``torch.inference_mode()``. Writes into the
            weight are noticed, except direct collectives and writes past torch, as through a NumPy
            array of it (docs/transforms.md). Small products stay torch's. None, at level "O1":
            undone if a ``sample_input`` is given and packing does not make it faster.
        fuse: in eval mode, let convolutions and Linears with packed weights apply the activation
            after them, if nothing else uses their output in calls of the model: GELU, SiLU,
            hardswish, sigmoid, tanh and LeakyReLU in oneDNN; ReLU, ReLU6, Hardtanh and hardsigmoid
            in place. With ``graph_mode``, False also keeps products from applying functions and
            additions, and the graph out of C++.
        graph_mode: in eval mode, capture the model with ``torch.compile`` and compute it by one
            plan of calls, as the backend :func:`transforms.graph_backend` does. The first call, and
            the first with other shapes or another gradient mode, takes a second or more. Copies and
            pickles of the model compute without it. Off at both levels. With a ``sample_input`` the
            model is called once, and the report says what was captured.
        fold_constants: with ``graph_mode``, compute once what depends only on parameters and
            buffers, which is the default. False keeps packed and folded weights only.
        sample_input: in eval mode, a tensor, a tuple of arguments or a dict of keyword arguments.
            The model is called with it before and after folding and dropping. A pass that changes
            the output by more than rounding is undone, and the report says so. All tensors in the
            output are compared, also in attributes of objects, except those that change from call
            to call; of integers, one in a hundred may change. The report has the largest error
            after each pass, and after the cast to ``dtype``, which is not undone. The model is also
            timed with it: in both layouts, and plain, after each pass that changed something, and
            before packing. The report has these times.
            After these calls, buffers are put back, and so are numbers, text, tensors, lists, dicts
            and sets in attributes of modules. Other changes that ``forward`` makes remain.

    Returns:
        the model; with an optimizer, a tuple of the model and the optimizer.

    Raises:
        TypeError: a scripted, compiled or distributed model, or one that cannot be copied; an
            optimizer without a fused step, if the call needs one; a knob that is not a bool; a
            sample_input of another type.
        ValueError: an unknown level or dtype, a knob of the other mode, training mode without an
            optimizer or eval mode with one, an optimizer of other parameters, several devices; a
            model that was optimized for the other mode or with another optimizer; a sample_input
            for training, or one with which the model fails.
        RuntimeError: an optimizer that overrides its step, if the call needs a fused one. Whatever
            is raised, nothing was changed.

    Example:
        >>> import torch
        >>> from fusedoptim import transforms
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Dropout()
        ... ).eval()
        >>> transforms.optimize(model)
        Sequential(
          (0): PackedConv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
          (1): FoldedBatchNorm()
          (2): SkippedDropout()
        )
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> pair = transforms.optimize(model.train(), optimizer, dtype=torch.bfloat16)
        >>> print(transforms.report(pair[0]))
        Sequential for training
        pass                          done  left  bytes saved
        fuse_update_step                 1     0          0 B
            the step of torch.optim.adamw.AdamW is now that of FusedAdamW: optimizer
        parallel_dropout                 1     0          0 B
            mask drawn on all cores, and again in backward: 2
        fuse_gelu                        0     0          0 B
        fuse_frozen_batch_norm           0     0          0 B
        onednn_products                  0     0          0 B
        auto_channels_last               1     0          0 B
            weight in channels_last: 0
        conv_as_matmul                   0     1          0 B
            left: 0: has a weight of fewer than 262,144 elements
        split_master_weight_for_bf16     2     2        448 B
            float32 to bfloat16, lower halves in the optimizer: 0.weight, 0.bias
            left: 1.weight, 1.bias: stays float32: BatchNorm2d uses it
        kept for restore() and state_dict(): 0 B

    Signature and defaults: IPEX 2.8's ``optimize``, whose second argument was the dtype.
    """
    knobs = {name: value for name, value in locals().items() if name in KNOBS}
    check_model(model)
    check_knobs(level, dtype, inplace, knobs)
    passes = TRAINING if model.training else INFERENCE
    defaults = {name: each.default(level) for each in passes for name in (each.knob, *each.parts)}
    options = resolve(dtype, knobs, defaults, model.training)
    check_pair(model, optimizer)
    if optimizer is not None:
        check_not_final(model)
        check_not_for_inference(model)
    if inplace:
        check_in_place(model, optimizer)
    if sample_input is not None:
        check_sample(model, sample_input, options.dtype)
    _warn_of_slow_dtype(model, options.dtype)
    if not inplace:
        model, optimizer = copy_pair(model, optimizer)
    with changes_to(model) as undo:
        job = Job(model, optimizer, options, sample_input, Asked(model), undo)
        report = merged(model, _run(passes, job))
        _warn_of_no_effect(job, report)
        conclude(model, report, undo)
    return model if optimizer is None else (model, optimizer)


def _run(passes: Sequence[Pass], job: Job) -> Report:
    chosen = [each for each in passes if each.is_on(job.options)]
    is_compared = job.sample_input is not None and any(
        each.keeps_outputs or each.knob == DTYPE for each in chosen
    )
    comparison = Comparison(job.model, job.sample_input) if is_compared else None
    times = {"plain": _seconds(job)} if comparison is not None else {}
    errors: dict[str, float] = {}
    done: dict[str, Sequence[Entry]] = {}
    if comparison is not None and (why := comparison.objection()) is not None:
        done[_SAMPLE] = [Entry("", f"was not compared: its output {why}", done=False)]
    latest: float | None = None  # the time of the model in its present state, if known
    for must_pay, group in itertools.groupby(chosen, key=lambda each: each.must_pay):
        if must_pay and comparison is not None:
            entries, latest = _run_and_time(list(group), job, latest, comparison, times, errors)
            done |= entries
            continue
        for each in group:
            done[each.knob] = _run_one(each, job, comparison, errors)
            if times and any(entry.done for entry in done[each.knob]):
                latest = times[f"with {each.knob}"] = _seconds(job)
            if comparison is not None and each.knob == DTYPE:  # later passes keep the cast outputs
                plain = comparison
                comparison = Comparison(job.model, job.sample_input, job.options.dtype)
                if (error := plain.error_of(comparison)) is not None:
                    errors[DTYPE] = error
    if times:
        times["optimized"] = _seconds(job) if latest is None else latest
    if could_be_merged := mergeable(job.model):
        done[MERGING] = could_be_merged
    return Report(title_of(job.model), done, kept_bytes=0, seconds=times, errors=errors)


def _run_and_time(
    passes: Sequence[Pass],
    job: Job,
    before: float | None,
    comparison: Comparison,
    times: dict[str, float],
    errors: dict[str, float],
) -> tuple[dict[str, Sequence[Entry]], float]:
    """Run passes; undo all if they do not pay together and the call asks for none by name.

    If other load has slowed the machine meanwhile, they have a second chance. ``before`` is the
    time of the model without them, if known.

    Returns:
        their entries, and the time of the resulting model.
    """
    names = " and ".join(each.knob for each in passes)
    before = _seconds(job) if before is None else before
    for _ in range(2):
        times[f"before {names}"] = before
        undo = job.undo.nested()
        done = {
            each.knob: _run_one(each, job._replace(undo=undo), comparison, errors)
            for each in passes
        }
        if not any(entry.done for entries in done.values() for entry in entries):
            return done, before
        after = times[f"with {names}"] = _seconds(job)
        if after < before or any(each.knob in job.options.explicit for each in passes):
            return done, after
        why = f"not faster on the sample: {after * 1e3:.3g} ms instead of {before * 1e3:.3g} ms"
        undo.close()
        for each in passes:
            errors.pop(each.knob, None)
        earlier, before = before, _seconds(job)
        if before <= max(after, _MUCH_SLOWER * earlier):
            break
    return {knob: _undone(entries, why) for knob, entries in done.items()}, before


def _run_one(
    each: Pass, job: Job, comparison: Comparison | None, errors: dict[str, float]
) -> Sequence[Entry]:
    """Run a pass, and undo it if it changes what the model returns for the sample."""
    undo = job.undo.nested()
    entries = each.run(job._replace(undo=undo))
    if not any(entry.done for entry in entries):
        return entries
    return_free_memory()  # of temporaries: packed weights may be too large to reuse it
    if comparison is None or not each.keeps_outputs:
        return entries
    difference = comparison.difference()
    if difference is None:
        if comparison.error is not None:
            errors[each.knob] = comparison.error
        return entries
    undo.close()
    return _undone(entries, difference)


def _undone(entries: Sequence[Entry], why: str) -> list[Entry]:
    what = f"undone: {why}"
    return [e._replace(what=what, done=False, bytes_saved=0) if e.done else e for e in entries]


def _seconds(job: Job) -> float:
    """The time of a forward pass, under autocast if the model's weights are in 16 bits."""
    with trial(job.model, job.options.dtype):
        return seconds(caller(job.model, job.sample_input))


def _warn_of_slow_dtype(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Warn if torch has to compute without oneDNN."""
    if dtype is None or dtype in supported_dtypes():
        return
    if any(p.device.type == "cpu" for p in model.parameters()):
        warnings.warn(
            f"dtype={dtype}: oneDNN does not compute in it on this processor, so products and "
            "convolutions take several times as long as in float32; pass dtype=None",
            SlowDtypeWarning,
            stacklevel=_USERS_LINE,
        )


def _warn_of_no_effect(job: Job, report: Report) -> None:
    """Warn about passes that were asked for by name and changed nothing, now or earlier."""
    asked = job.options.explicit | ({DTYPE, SPLIT} if job.options.dtype is not None else set())
    for knob in report.passes:
        if knob in asked and not report.done(knob):
            reasons = {entry.what for entry in report.left(knob)} or {
                "the model has nothing of the kind"
            }
            warnings.warn(
                f"{knob} changed nothing in the model: {'; '.join(sorted(reasons))}",
                NoEffectWarning,
                stacklevel=_USERS_LINE,
            )
