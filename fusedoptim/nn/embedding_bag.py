"""Several embedding bags as one module, which may update its tables in the backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, overload

import torch
from torch import Tensor
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from fusedoptim._torch_private import remove_hooks
from fusedoptim.nn._bag_arguments import OPTIONS, as_bag, check_alike, in_lists, options_of
from fusedoptim.nn._bag_optimizers import BagOptimizer, new_optimizer
from fusedoptim.nn._recording import is_recorded
from fusedoptim.nn._scripting import refuse_script
from fusedoptim.nn._single_bags import check_plain, check_stored, refusal
from fusedoptim.nn._tracing import traced_call
from fusedoptim.ops._embedding_bags import bags_of_tables
from fusedoptim.ops._updated_bags import updated_embedding_bags

if TYPE_CHECKING:
    from typing import Self  # from Python 3.11 on

__all__ = ["MergedEmbeddingBag", "MergedEmbeddingBagWithAdagrad", "MergedEmbeddingBagWithSGD"]


class MergedEmbeddingBag(torch.nn.Module):
    r"""Several ``torch.nn.EmbeddingBag`` modules whose bags are computed at once, as in DLRM.

    With ``optimizer``, the backward pass updates the rows of the batch, and the tables get no
    gradients:

    .. math::
        g &\leftarrow \nabla f(w_r) + \lambda\,w_r \\
        s &\leftarrow s + g^2 \quad \text{or} \quad
            s + \operatorname{mean}(g^2) \text{ ("rowwise_adagrad")} \\
        w_r &\leftarrow w_r - \gamma\,g \quad \text{or} \quad
            w_r - \gamma\,\frac{g}{\sqrt{s} + \epsilon}

    The bags are submodules named "0", "1" and so on, so a state_dict is that of a ``ModuleList`` of
    them. The module does not call them, nor hooks that they get later. Gradients are summed in the
    order of the indices, so they have the same bits on any number of threads. With an optimizer, a
    bag that is called on its own in training mode, with gradients enabled, would learn nothing, and
    raises RuntimeError.

    With an optimizer, the tables have ``requires_grad=False``, as autograd makes no gradients of
    them. :meth:`requires_grad_` of this module freezes them and trains them again; that of a model
    that contains it does not, and neither does ``eval()``.

    The update takes the gradients as they arrive in the backward pass, even if that is by
    ``torch.autograd.grad`` of ``per_sample_weights`` alone. What changes gradients or skips steps
    later has no effect on the tables: clipping them, accumulating them over several backward
    passes, of which each updates, or a ``GradScaler``, whose factor the tables would get (bfloat16
    autocast needs none). ``DistributedDataParallel`` does not average them either, so a forward
    pass within one of several processes raises RuntimeError, unless the tables are among those that
    it ignores. Use ``optimizer=None`` for all of these.

    ``torch.autograd.grad`` and ``backward(inputs=...)`` that ask for no gradient from before the
    bags, but only for those of other layers' parameters, do not update the tables.

    If a pass calls the module several times, as towers with shared tables do, each call is a step
    of its own: with Adagrad or ``weight_decay`` this is not one step with the summed gradients.
    After its first update, a backward pass cannot read what the tables were. It raises RuntimeError
    where it would, and that update stays: for the gradient of ``per_sample_weights`` of another
    call, or of other uses of a table; if a compiled module is called twice (compile a function that
    contains both calls); or if two calls are in ``torch.utils.checkpoint``. A checkpoint cannot
    tell that another backward pass has updated the tables since its forward pass: it computes bags
    from the tables as they are.

    ``torch.compile`` makes a graph for each module with an optimizer. For more than eight modules
    that are compiled by themselves, raise ``torch._dynamo.config.recompile_limit``.

    ``torch.export`` and ``torch.jit.trace`` of a module with an optimizer need eval mode or
    ``torch.no_grad()``, and give a program that computes the bags and updates nothing. In training
    mode they raise RuntimeError. ``torch.jit.trace`` records torch's own functions.

    Args:
        tables: an ``EmbeddingBag``, or its number of rows and its width, for each table. The
            modules become submodules, and share their parameters.
        optimizer: None, "sgd", "adagrad" or "rowwise_adagrad".
        lr: learning rate :math:`\gamma`; by default 0.01.
        weight_decay: L2 penalty :math:`\lambda` of the rows in a batch; by default 0.
        eps: :math:`\epsilon` of Adagrad; by default 1e-10.
        split: whether the tables are kept as bfloat16, with the lower 16 bits of float32 stored
            separately, so that the update is exact in float32. This needs an optimizer.

    Raises:
        ValueError: an unknown optimizer or mode, a number out of range, an option without effect,
            or tables that differ in an option that must be the same for all; a bag has hooks, or a
            weight that is computed from others, such as a pruned one; with an optimizer, tables
            that are frozen, parametrized, have hooks or gradients, or share memory.
        TypeError: ``tables`` is not a list, an entry is not a table, or has a class with a forward
            of its own or an option of a wrong type, or tables have different dtypes.

    Example:
        >>> import torch
        >>> bags = MergedEmbeddingBag([(10, 4), (20, 8)], "adagrad", lr=0.1)
        >>> indices, offsets = torch.tensor([0, 3, 3]), torch.tensor([0, 2])
        >>> first, second = bags([indices, indices], [offsets, offsets])
        >>> first.shape, second.shape
        (torch.Size([2, 4]), torch.Size([2, 8]))
        >>> scheduler = torch.optim.lr_scheduler.StepLR(bags.optimizer(), 1)
        >>> (first.sum() + second.sum()).backward()  # updates rows 0 and 3 of both tables
        >>> bags.optimizer().step()  # counts the step
        >>> scheduler.step()

    Semantics: ``torch.nn.EmbeddingBag`` of torch 2.13, and a step of torch's ``SGD`` or ``Adagrad``
    with its sparse gradients.
    """

    __prepare_scriptable__ = refuse_script
    _optimizer: BagOptimizer | None = None
    _anchor: Tensor | None = None

    def __init__(
        self,
        tables: Sequence[torch.nn.EmbeddingBag | tuple[int, int]],
        optimizer: str | None = None,
        lr: float | None = None,
        weight_decay: float | None = None,
        eps: float | None = None,
        split: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(tables, torch.nn.EmbeddingBag):
            raise TypeError("MergedEmbeddingBag: tables is one EmbeddingBag; pass a list of them")
        if not isinstance(tables, Iterable):
            raise TypeError(
                f"MergedEmbeddingBag: tables={tables!r} is not a list; pass a list of EmbeddingBags"
            )
        bags = [as_bag(t, table) for t, table in enumerate(tables)]
        for t, bag in enumerate(bags):
            where = f"MergedEmbeddingBag: table {t}"
            if optimizer is not None or not parametrize.is_parametrized(bag, "weight"):
                check_stored(where, bag)
            check_plain(where, bag)
        check_alike(bags)
        self.include_last_offset = bags[0].include_last_offset
        """Whether offsets include where the last bag ends, as in torch; the same for all tables."""
        self.sparse = bags[0].sparse
        """Whether the gradients of the tables are sparse; with an optimizer they have none."""
        self._options = [options_of(bag) for bag in bags]
        self._means = [bag.mode == "mean" for bag in bags]
        self._paddings = [-1 if bag.padding_idx is None else bag.padding_idx for bag in bags]
        options = {"lr": lr, "weight_decay": weight_decay, "eps": eps}
        given = {name: value for name, value in options.items() if value is not None}
        self._refusals: list[RemovableHandle] = []
        """The handles of the hooks of :func:`refuse_calls`."""
        for t, bag in enumerate(bags):
            self.add_module(str(t), bag)
        if optimizer is not None:
            weights = [bag.weight for bag in bags]
            self._update_by(new_optimizer(optimizer, weights, split, given))
        elif given or split:
            name = next(iter(given), "split")
            raise ValueError(
                f"MergedEmbeddingBag: {name} is for an optimizer; pass optimizer='sgd' or "
                "'adagrad', or leave it out"
            )

    @classmethod
    def from_embedding_bags(
        cls, bags: Sequence[torch.nn.EmbeddingBag], **options: Any
    ) -> MergedEmbeddingBag:
        """A module of the given bags, which shares their parameters.

        Args:
            bags: the bags, such as a ``ModuleList`` of them.
            options: ``optimizer`` and the other arguments of the class.

        Example:
            >>> import torch
            >>> bags = [torch.nn.EmbeddingBag(10, 4, mode="sum") for _ in range(3)]
            >>> merged = MergedEmbeddingBag.from_embedding_bags(bags, optimizer="sgd", lr=0.1)
            >>> merged[0] is bags[0]
            True
        """
        return cls(bags, **options)

    def __len__(self) -> int:
        return len(self._means)

    def _bags(self) -> list[Any]:
        # They are the first submodules; a user or a subclass may have added others.
        return list(self._modules.values())[: len(self)]

    @overload
    def __getitem__(self, table: int) -> torch.nn.EmbeddingBag: ...

    @overload
    def __getitem__(self, table: slice) -> torch.nn.ModuleList: ...

    def __getitem__(self, table: int | slice) -> torch.nn.EmbeddingBag | torch.nn.ModuleList:
        bags = self._bags()
        if isinstance(table, slice):
            return torch.nn.ModuleList(bags[table])  # as the ModuleList that this replaces
        bag: torch.nn.EmbeddingBag = bags[table]
        return bag

    def __iter__(self) -> Iterator[torch.nn.EmbeddingBag]:
        return iter(self._bags())

    def _update_by(self, optimizer: BagOptimizer) -> None:
        """Let the backward pass, and nothing else, update the tables; the constructor's end."""
        self._optimizer = optimizer
        # It makes autograd run the backward pass. It is not a parameter, as it learns nothing.
        self._anchor = torch.zeros((), requires_grad=True)
        first = RemovableHandle.next_id
        try:
            for bag in self:
                bag.weight.requires_grad_(False)
            refuse_calls(self, "MergedEmbeddingBag", "merged(indices, offsets)")
            optimizer.split_tables()
        except BaseException:  # an interrupt, too, leaves the tables as they were
            for bag in self:
                bag.weight.requires_grad_(True)
            remove_hooks(self, first)
            raise

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze the tables, or train them again: with an optimizer, too.

        Args:
            requires_grad: whether the tables are trained.
        """
        if self._anchor is None:
            return super().requires_grad_(requires_grad)
        self._anchor.requires_grad_(requires_grad)
        tables = {bag.weight for bag in self}
        for param in self.parameters():
            if param not in tables:
                param.requires_grad_(requires_grad)
        return self

    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the tables, for learning-rate schedulers and for checkpoints.

        Its ``step`` updates no table, as the backward pass has already done so. Call it after each
        backward pass all the same, as torch's loops do: it counts the steps in Adagrad's state and
        runs the optimizer's hooks, and torch's schedulers warn if it was not called before theirs.

        Raises:
            RuntimeError: the module has none.
        """
        if self._optimizer is None:
            raise RuntimeError(
                "MergedEmbeddingBag: this module has no optimizer; construct it with "
                "optimizer='sgd' or 'adagrad', or give its parameters to an optimizer"
            )
        return self._optimizer

    def forward(
        self,
        input: Sequence[Tensor] | Tensor,  # noqa: A002 (torch's name)
        offsets: Sequence[Tensor] | Tensor | None = None,
        per_sample_weights: Sequence[Tensor] | Tensor | None = None,
    ) -> list[Tensor] | Tensor:
        """The bags of all tables.

        Args:
            input: int32 or int64 indices: a tensor for each table, or one tensor with the indices
                of all tables, one table after another. A table's tensor may have two dimensions,
                with a bag in each row; then there are no offsets.
            offsets: int32 or int64: for each table, where its bags begin. Or one tensor with as
                many for each table, one table after another, all counted from the beginning of
                ``input``. With ``include_last_offset`` there is one more at the end of each tensor.
            per_sample_weights: factors of the rows, one for each index, in the form of ``input``;
                not for means.

        Returns:
            for each table a tensor (bags, width); or, for one tensor of indices, one tensor (bags,
            sum of widths).

        Raises:
            IndexError: on the CPU, an index is not a row of its table; nothing has been written
                then. On a GPU nothing is raised, and the backward pass writes outside the table:
                check indices that may be wrong beforehand.
            RuntimeError: on the CPU, an offset does not fit. The first must be 0, and none may be
                less than the previous one or more than the number of indices. On a GPU, a wrong
                offset acts like a wrong index. Or an option of a bag, such as its mode, has changed
                since it was merged.
            ValueError: a shape does not fit.
            TypeError: a dtype does not fit.
        """
        traced: list[Tensor] | Tensor | None = traced_call(self, input, offsets, per_sample_weights)
        if traced is not None:
            return traced
        is_joined = isinstance(input, Tensor)
        indices, starts, samples = in_lists(
            input, offsets, per_sample_weights, len(self), self.include_last_offset
        )
        weights, anchor = self._weights(), self._anchor
        is_trained = anchor is not None and anchor.requires_grad and torch.is_grad_enabled()
        # A recording computes bags, and updates nothing.
        is_trained = is_trained and not is_recorded(self.training)
        if self._optimizer is None or anchor is None or not is_trained:
            bags = bags_of_tables(
                weights,
                indices,
                starts,
                samples,
                self._means,
                self._paddings,
                self.include_last_offset,
                self.sparse,
            )
            if not is_joined:  # autograd lets all outputs of an operator require gradients
                for t, weight in enumerate(weights):
                    needs = weight.requires_grad or (samples and samples[t].requires_grad)
                    if bags[t].requires_grad and not needs:
                        bags[t] = bags[t].detach()
        else:
            self._optimizer.check_own(weights)
            bags = updated_embedding_bags(
                anchor,
                weights,
                indices,
                starts,
                samples,
                self._means,
                self._paddings,
                self.include_last_offset,
                self._optimizer.number,
            )
        return bags[0] if is_joined else bags

    def _weights(self) -> list[Tensor]:
        bags = self._bags()
        if [options_of(bag) for bag in bags] != self._options:
            self._raise_changed(bags)
        try:  # ``bag.weight`` finds the same, but calls a Python function for it
            return [bag._parameters["weight"] for bag in bags]
        except KeyError:  # a parametrization computes it
            return [bag.weight for bag in bags]

    def _raise_changed(self, bags: Sequence[Any]) -> NoReturn:
        pairs = zip(map(options_of, bags), self._options)
        t, after, before = next((t, *pair) for t, pair in enumerate(pairs) if pair[0] != pair[1])
        name = next(name for name, a, b in zip(OPTIONS, after, before) if a != b)
        raise RuntimeError(
            f"MergedEmbeddingBag: table {t} has {name}={getattr(bags[t], name)!r}, and had "
            f"{before[OPTIONS.index(name)]!r} when it was merged; set it before the bags are merged"
        )

    def extra_repr(self) -> str:
        """The module's optimizer, if it has one."""
        return "" if self._optimizer is None else f"optimizer={type(self._optimizer).__name__}"


class MergedEmbeddingBagWithSGD(MergedEmbeddingBag):
    """:class:`MergedEmbeddingBag` with SGD, under the name that IPEX gave it.

    Args:
        tables: the tables, as for :class:`MergedEmbeddingBag`.
        lr: learning rate.
        weight_decay: L2 penalty of the rows in a batch.

    Raises:
        ValueError: as :class:`MergedEmbeddingBag`.

    Example:
        >>> import torch
        >>> bags = torch.nn.ModuleList([torch.nn.EmbeddingBag(10, 4, mode="sum")])
        >>> merged = MergedEmbeddingBagWithSGD.from_embeddingbag_list(bags, lr=0.1)

    Source: IPEX's class of the same name, whose ``to_bfloat16_train`` is ``split=True`` of
    :class:`MergedEmbeddingBag`.
    """

    def __init__(
        self,
        tables: Sequence[torch.nn.EmbeddingBag | tuple[int, int]],
        lr: float = 0.01,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(tables, "sgd", lr=lr, weight_decay=weight_decay)

    @classmethod
    def from_embeddingbag_list(
        cls, tables: Sequence[torch.nn.EmbeddingBag], lr: float = 0.01, weight_decay: float = 0.0
    ) -> MergedEmbeddingBagWithSGD:
        """A module of the given bags, which shares their parameters.

        Args:
            tables: the bags, such as a ``ModuleList`` of them.
            lr: learning rate.
            weight_decay: L2 penalty of the rows in a batch.
        """
        return cls(tables, lr, weight_decay)


class MergedEmbeddingBagWithAdagrad(MergedEmbeddingBag):
    """:class:`MergedEmbeddingBag` with Adagrad, under the name that IPEX gave it.

    Args:
        tables: the tables, as for :class:`MergedEmbeddingBag`.
        lr: learning rate.
        eps: what keeps the divisor from zero.

    Raises:
        ValueError: as :class:`MergedEmbeddingBag`.

    Example:
        >>> import torch
        >>> bags = torch.nn.ModuleList([torch.nn.EmbeddingBag(10, 4, mode="sum")])
        >>> merged = MergedEmbeddingBagWithAdagrad.from_embeddingbag_list(bags, lr=0.1)

    Source: IPEX's ``MergedEmbeddingBagWithAdaGrad``.
    """

    def __init__(
        self,
        tables: Sequence[torch.nn.EmbeddingBag | tuple[int, int]],
        lr: float = 0.01,
        eps: float = 1e-10,
    ) -> None:
        super().__init__(tables, "adagrad", lr=lr, eps=eps)

    @classmethod
    def from_embeddingbag_list(
        cls, tables: Sequence[torch.nn.EmbeddingBag], lr: float = 0.01, eps: float = 1e-10
    ) -> MergedEmbeddingBagWithAdagrad:
        """A module of the given bags, which shares their parameters.

        Args:
            tables: the bags, such as a ``ModuleList`` of them.
            lr: learning rate.
            eps: what keeps the divisor from zero.
        """
        return cls(tables, lr, eps)


def refuse_calls(merged: MergedEmbeddingBag, name: str, call: str) -> Sequence[RemovableHandle]:
    """Make the bags of a module refuse to be called on their own for training.

    Args:
        merged: the module, which updates them.
        name: what errors call it.
        call: how errors say to call it.

    Returns:
        the handles, which remove the hooks again.
    """
    for handle in merged._refusals:
        handle.remove()
    refuse = refusal(name, call)
    merged._refusals[:] = [bag.register_forward_pre_hook(refuse) for bag in merged]
    return merged._refusals


def is_frozen(merged: MergedEmbeddingBag) -> bool:
    """Whether the tables of a module with an optimizer are frozen."""
    return merged._anchor is not None and not merged._anchor.requires_grad


def optimizer_of(merged: MergedEmbeddingBag) -> BagOptimizer | None:
    """The optimizer that updates the tables of a module, if it has one."""
    return merged._optimizer
