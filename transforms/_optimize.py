"""The front end: which passes run on what, and how they are undone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar, overload

import torch
from torch import nn
from torch.optim import Optimizer

from transforms import _channels_last, _plain, _report, _stand_in
from transforms._arguments import (
    check_halves,
    check_model,
    check_no_copied_halves,
    check_not_for_inference,
    check_pair,
    check_same_parameters,
)
from transforms._cast import cast
from transforms._channels_last import channels_last
from transforms._copies import copy_pair
from transforms._drop_dropout import drop_dropout
from transforms._fold_batch_norm import CONVOLUTION_KINDS, LINEAR_KINDS, fold_batch_norm
from transforms._fuse_step import fuse_update_step, is_converted, unfuse_update_step
from transforms._options import Options, resolve
from transforms._report import Entry, NoEffectWarning, Report
from transforms._sample import Comparison, check_sample
from transforms._split_weights import (
    SPLIT_ALREADY,
    back_to_now,
    merge_copies,
    merge_master_weights,
    split_master_weights,
)

CAST, FUSE, SPLIT = "dtype", "fuse_update_step", "split_master_weight_for_bf16"


class Job(NamedTuple):
    """What passes work on."""

    model: nn.Module
    optimizer: Optimizer | None
    options: Options
    sample_input: Any
    undo: ExitStack
    """gets what undoes each change, before it is made, should a later one fail."""


class Pass(NamedTuple):
    """One rewrite, of a model for inference or of a model and its optimizer for training."""

    knob: str
    run: Callable[[Job], list[Entry]]
    """Rewrites what the job has, and says what it did and what it left."""
    undo: Callable[[nn.Module, Optimizer | None], None]
    """Undoes that; of a model that the pass did not change, or no longer, nothing."""
    keeps_outputs: bool = False
    """whether the model returns what it did, but for rounding; checked with a sample input."""

    def is_on(self, job: Job) -> bool:
        """Whether the job asks for it."""
        if self.knob == CAST:
            return job.options.dtype is not None
        return job.options.knobs[self.knob]


def _cast(job: Job) -> list[Entry]:
    assert job.options.dtype is not None
    return cast(job.model, job.options.dtype, job.undo)


def _lay_out(job: Job) -> list[Entry]:
    is_forced = "auto_channels_last" in job.options.explicit or bool(_channels_last.default())
    return channels_last(job.model, job.sample_input, job.options.dtype, is_forced, job.undo)


def _fuse(job: Job) -> list[Entry]:
    assert job.optimizer is not None
    if is_converted(job.optimizer):  # by an earlier call, which has reported it
        return []
    job.undo.callback(unfuse_update_step, job.optimizer)
    try:
        return [fuse_update_step(job.optimizer)]
    except (TypeError, ValueError, RuntimeError) as error:
        if job.options.knobs[SPLIT]:
            raise type(error)(
                f"dtype=torch.bfloat16 needs a fused step: {error} and no dtype, in float32 or "
                "under torch.autocast"
            ) from error
        if FUSE in job.options.explicit:
            raise
        return [Entry("optimizer", str(error), done=False)]


def _split(job: Job) -> list[Entry]:
    assert job.optimizer is not None
    halves = getattr(job.optimizer, "halves", None)
    is_first = halves is None or not halves.in_model
    job.undo.callback(back_to_now(job.model, job.optimizer))
    entries = split_master_weights(job.model, job.optimizer)
    return [entry for entry in entries if is_first or entry.what != SPLIT_ALREADY]


def _merge(model: nn.Module, optimizer: Optimizer | None) -> None:
    if optimizer is not None:
        merge_master_weights(model, optimizer)
    merge_copies(model)


def _unfuse(_: nn.Module, optimizer: Optimizer | None) -> None:
    if optimizer is not None:
        unfuse_update_step(optimizer)


def _make_plain(model: nn.Module, _: Optimizer | None) -> None:
    _plain.undo_all(model)


_LAYOUT = Pass("auto_channels_last", _lay_out, lambda model, optimizer: _channels_last.undo(model))
INFERENCE: Sequence[Pass] = (
    Pass(
        "conv_bn_folding",
        lambda job: fold_batch_norm(job.model, CONVOLUTION_KINDS, job.undo),
        _make_plain,
        keeps_outputs=True,
    ),
    Pass(
        "linear_bn_folding",
        lambda job: fold_batch_norm(job.model, LINEAR_KINDS, job.undo),
        _make_plain,
        keeps_outputs=True,
    ),
    Pass(
        "replace_dropout_with_identity",
        lambda job: drop_dropout(job.model, job.undo),
        lambda model, optimizer: _stand_in.revert_all(model),
        keeps_outputs=True,
    ),
    Pass(CAST, _cast, _make_plain),
    _LAYOUT,
)
"""In the order in which they run: what changes values first, the layout of the result last."""
TRAINING: Sequence[Pass] = (Pass(FUSE, _fuse, _unfuse), _LAYOUT, Pass(SPLIT, _split, _merge))
"""What may refuse comes first; halves need a fused step, and are laid out as the weights are."""

_Model = TypeVar("_Model", bound=nn.Module)
_Optimizer = TypeVar("_Optimizer", bound=Optimizer)


@overload
def optimize(
    model: _Model,
    optimizer: None = None,
    *,
    dtype: torch.dtype | None = None,
    level: str = "O1",
    inplace: bool = False,
    conv_bn_folding: bool | None = None,
    linear_bn_folding: bool | None = None,
    replace_dropout_with_identity: bool | None = None,
    split_master_weight_for_bf16: bool | None = None,
    fuse_update_step: bool | None = None,
    auto_channels_last: bool | None = None,
    sample_input: Any = None,
    weights_prepack: bool | None = None,
    graph_mode: bool | None = None,
    optimize_lstm: bool | None = None,
    concat_linear: bool | None = None,
    auto_kernel_selection: bool | None = None,
) -> _Model: ...


@overload
def optimize(
    model: _Model,
    optimizer: _Optimizer,
    *,
    dtype: torch.dtype | None = None,
    level: str = "O1",
    inplace: bool = False,
    conv_bn_folding: bool | None = None,
    linear_bn_folding: bool | None = None,
    replace_dropout_with_identity: bool | None = None,
    split_master_weight_for_bf16: bool | None = None,
    fuse_update_step: bool | None = None,
    auto_channels_last: bool | None = None,
    sample_input: Any = None,
    weights_prepack: bool | None = None,
    graph_mode: bool | None = None,
    optimize_lstm: bool | None = None,
    concat_linear: bool | None = None,
    auto_kernel_selection: bool | None = None,
) -> tuple[_Model, _Optimizer]: ...


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
    auto_channels_last: bool | None = None,
    sample_input: Any = None,
    weights_prepack: bool | None = None,
    graph_mode: bool | None = None,
    optimize_lstm: bool | None = None,
    concat_linear: bool | None = None,
    auto_kernel_selection: bool | None = None,
) -> nn.Module | tuple[nn.Module, Optimizer]:
    """Rewrite a model for inference, or a model and its optimizer for training.

    A model in eval mode is optimized for inference, one in training mode with its optimizer for
    training. What is not safe is left alone; :func:`transforms.report` says what was done, what
    was not, and why. The model keeps its class, hooks and names; ``state_dict()`` gives what the
    plain model's gives, and either loads into the other. :func:`transforms.restore` undoes it. A
    model that is moved afterwards (``to``, ``half``, ``share_memory``) saves, and is restored to,
    what the plain model would be after that move.

    A model optimized for inference keeps what it learns in eval mode, and what is written into its
    parameters: ``state_dict()`` and ``restore`` give a plain model that computes the same. What a
    folded weight learnt is divided by the BatchNorm's scale, and what its bias learnt goes to the
    BatchNorm's bias; values that did not change keep every bit. In training mode a folded BatchNorm
    raises: restore the model first. Write through ``load_state_dict``, not into the tensors of
    ``state_dict()``, which the model does not compute with.

    Of each knob None is the level's default, True asks for it, and False turns it off.

    Args:
        model: a module on one device.
        optimizer: of the model's parameters; for training, and only then.
        dtype: torch.bfloat16 or, for inference, torch.float16 for the weights of convolutions,
            Linears and embeddings; run the model under ``torch.autocast`` with it. None or float32:
            as is.
        level: "O1": all that is safe. "O0": what is asked for, and no more.
        inplace: rewrite the model and the optimizer themselves, and not copies. A scheduler made
            before is that of the given optimizer, so with False a new one is needed.
        conv_bn_folding: in eval mode, fold each BatchNorm into the convolution before it.
        linear_bn_folding: in eval mode, into the Linear before it.
        replace_dropout_with_identity: in eval mode, Dropouts of all kinds.
        split_master_weight_for_bf16: in training with bfloat16, which needs it: weights in two
            halves, of which the optimizer has the lower ones.
        fuse_update_step: in training, the optimizer's step in one kernel. None, level "O1": if its
            class is SGD, Adagrad, Adam, AdamW or a known Lamb.
        auto_channels_last: convolutions' weights in channels_last. None, level "O1": on the CPU,
            if the code of the model does not depend on the layout and, in eval mode with
            a ``sample_input``, if it is faster. True: in any case.
        sample_input: a tensor, a tuple of arguments or a dict of named ones. In eval mode the
            model is called with it before and after folding and dropping: a pass that changes its
            output by more than rounding is undone, and the report says so. The model is also
            timed with it in both layouts.
        weights_prepack: IPEX's; not here.
        graph_mode: IPEX's; not here.
        optimize_lstm: IPEX's; not here.
        concat_linear: IPEX's; not here.
        auto_kernel_selection: IPEX's; not here.

    Returns:
        the model; with an optimizer, the model and the optimizer.

    Raises:
        TypeError: a scripted, compiled or distributed model, or one that cannot be copied; an
            optimizer for which there is no fused step, if the call needs one; an option that is
            no bool.
        ValueError: an unknown level or dtype, a knob of the other mode, training mode without an
            optimizer or eval mode with one, an optimizer of other parameters, several devices; a
            model that is optimized for the other mode or with another optimizer.
        RuntimeError: an optimizer with a step of its own, if the call needs a fused one.
        NotImplementedError: a knob that does not exist here. Whatever is raised, nothing that was
            there before the call was changed.

    Example:
        >>> import torch
        >>> from fusedoptim import transforms
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Dropout()
        ... ).eval()
        >>> transforms.optimize(model)
        Sequential(
          (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
          (1): FoldedBatchNorm()
          (2): SkippedDropout()
        )
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> pair = transforms.optimize(model.train(), optimizer, dtype=torch.bfloat16)
        >>> print(transforms.report(pair[0]))
        Sequential for training
        pass                          done  left  bytes saved
        fuse_update_step                 1     0          0 B
            torch.optim.adamw.AdamW's step is FusedAdamW's: optimizer
        auto_channels_last               1     0          0 B
            weight in channels_last: 0
        split_master_weight_for_bf16     2     2        448 B
            float32 to bfloat16, lower halves in the optimizer: 0.weight, 0.bias
            left: 1.weight, 1.bias: float32 still: BatchNorm2d has it
        kept for restore() and state_dict(): 0 B

    Signature and defaults: IPEX 2.8's ``optimize``, whose second argument was the dtype.
    """
    check_model(model)
    if not isinstance(inplace, bool):
        raise TypeError(f"inplace={inplace!r} is neither True nor False")
    options = resolve(
        level,
        dtype,
        model.training,
        {
            "conv_bn_folding": conv_bn_folding,
            "linear_bn_folding": linear_bn_folding,
            "replace_dropout_with_identity": replace_dropout_with_identity,
            "split_master_weight_for_bf16": split_master_weight_for_bf16,
            "fuse_update_step": fuse_update_step,
            "auto_channels_last": auto_channels_last,
            "weights_prepack": weights_prepack,
            "graph_mode": graph_mode,
            "optimize_lstm": optimize_lstm,
            "concat_linear": concat_linear,
            "auto_kernel_selection": auto_kernel_selection,
        },
    )
    if auto_channels_last is None and (default := _channels_last.default()) is not None:
        options = options._replace(knobs={**options.knobs, "auto_channels_last": default})
    check_pair(model, optimizer)
    if optimizer is not None:
        check_not_for_inference(model)
    if inplace:
        check_halves(model, optimizer)
        check_no_copied_halves(model)
    if sample_input is not None and not model.training:
        check_sample(model, sample_input)
    if not inplace:
        model, optimizer = copy_pair(model, optimizer)
        merge_copies(model)
    with ExitStack() as undo:
        job = Job(model, optimizer, options, sample_input, undo)
        report = _report.merged(model, _run(job))
        _warn_of_no_effect(job, report)
        undo.pop_all()
    _report.attach(model, report)
    return model if optimizer is None else (model, optimizer)


def _run(job: Job) -> Report:
    passes = TRAINING if job.model.training else INFERENCE
    chosen = [each for each in passes if each.is_on(job)]
    is_compared = job.sample_input is not None and any(each.keeps_outputs for each in chosen)
    comparison = Comparison(job.model, job.sample_input) if is_compared else None
    done = {each.knob: _run_one(each, job, comparison) for each in chosen}
    mode = "training" if job.model.training else "inference"
    title = f"{type(job.model).__name__} for {mode}"
    return Report(title, done, _plain.kept_bytes(job.model))


def _run_one(each: Pass, job: Job, comparison: Comparison | None) -> list[Entry]:
    """Run a pass, and undo it if it changes what the model returns for the sample."""
    undo = job.undo.enter_context(ExitStack())
    entries = each.run(job._replace(undo=undo))
    if comparison is None or not each.keeps_outputs or not any(e.done for e in entries):
        return entries
    difference = comparison.difference()
    if difference is None:
        return entries
    undo.close()
    why = f"undone: {difference}"
    return [e._replace(what=why, done=False, bytes_saved=0) if e.done else e for e in entries]


def _warn_of_no_effect(job: Job, report: Report) -> None:
    """Warn of passes that the call asked for by name and that have done nothing, now or before."""
    asked = job.options.explicit | ({CAST, SPLIT} if job.options.dtype is not None else set())
    for knob in report.passes:
        if knob in asked and not report.done(knob):
            reasons = {entry.what for entry in report.left(knob)} or {
                "there is nothing of the kind"
            }
            warnings.warn(
                f"{knob} changed nothing in this {type(job.model).__name__}: "
                f"{'; '.join(sorted(reasons))}",
                NoEffectWarning,
                stacklevel=3,
            )


@overload
def restore(model: _Model, optimizer: None = None) -> _Model: ...


@overload
def restore(model: _Model, optimizer: _Optimizer) -> tuple[_Model, _Optimizer]: ...


def restore(
    model: nn.Module, optimizer: Optimizer | None = None
) -> nn.Module | tuple[nn.Module, Optimizer]:
    """Undo all that :func:`transforms.optimize` did, in place and bit for bit.

    What was loaded, written or trained since is kept: the model computes what it did before.

    Args:
        model: what ``optimize`` returned.
        optimizer: what it returned with it, if it did.

    Returns:
        the model; with an optimizer, the model and the optimizer.

    Raises:
        ValueError: the model was not optimized, or finalized since; the optimizer is another's; or
            weights are split, and the optimizer that has their lower halves is not given.
        RuntimeError: a folded or rounded weight was pruned, parametrized or given another shape
            since. Whatever is raised, nothing was changed.

    Example:
        >>> import torch
        >>> from fusedoptim import transforms
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).eval()
        >>> weight = model[0].weight.clone()
        >>> _ = transforms.optimize(model, inplace=True)
        >>> _ = transforms.restore(model)
        >>> torch.equal(model[0].weight, weight), type(model[1]).__name__
        (True, 'BatchNorm1d')
    """
    if optimizer is None or not is_converted(optimizer):  # else by a call for another optimizer
        _report.report(model)
    if (report := _report.find(model)) is not None and report.is_final:
        raise ValueError("the model was finalized, which dropped what restore() needs")
    if optimizer is not None:
        check_same_parameters(model, optimizer)
    check_halves(model, optimizer)
    _plain.check_all(model)
    for passes in (TRAINING, INFERENCE):
        for each in reversed(passes):
            each.undo(model, optimizer)
    _report.detach(model)
    return model if optimizer is None else (model, optimizer)


def finalize(model: _Model) -> _Model:
    """Drop what :func:`restore` and ``state_dict()`` keep of the plain model, to free its memory.

    From now on the model saves and loads what it computes with: folded, in 16 bits, without the
    BatchNorms.

    Args:
        model: what :func:`transforms.optimize` returned for inference.

    Raises:
        ValueError: the model was not optimized.

    Example:
        >>> import torch
        >>> from fusedoptim import transforms
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).eval()
        >>> model = transforms.finalize(transforms.optimize(model))
        >>> list(model.state_dict())
        ['0.weight', '0.bias']
    """
    report = _report.report(model)
    _plain.discard(model)
    vars(model)[_report.ATTRIBUTE] = report._replace(kept_bytes=0, is_final=True)
    return model
