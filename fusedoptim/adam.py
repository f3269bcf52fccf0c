r"""Adam and AdamW whose step is one kernel launch."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fusedoptim.optimizer import FusedOptimizer
from fusedoptim.step.rule import Candidate, Numbers
from fusedoptim.step.scalars import number
from fusedoptim.step.step_counts import Steps
from fusedoptim.step.tensors import PARAM_DTYPES, Group

__all__ = ["FusedAdam", "FusedAdamW"]


_KERNELS: dict[Any, str] = {
    torch.float32: "adam",
    torch.bfloat16: "adam_bfloat16",
    "float8": "adam_float8",
}
"""The kernel for each ``state_dtype``."""
_REDUCED = [dtype for dtype, known in PARAM_DTYPES.items() if known.state == torch.float32]
"""The dtypes of parameters whose state may have another ``state_dtype`` than float32."""


class _Adam(FusedOptimizer):
    """What Adam and AdamW have in common; an option of the group says which of the two it is."""

    _of_all_groups = (*FusedOptimizer._of_all_groups, "state_dtype")
    _saved_options = frozenset({"lr", "betas", "eps", "weight_decay"})
    _saved_state = frozenset({"exp_avg", "exp_avg_sq", "step"})
    _optional_state = frozenset({"max_exp_avg_sq"})  # amsgrad may be switched on later

    def __init__(self, *args: Any, state_dtype: torch.dtype | str, **kwargs: Any) -> None:
        if not isinstance(state_dtype, Hashable) or state_dtype not in _KERNELS:
            offered = ", ".join(map(repr, _KERNELS))
            raise ValueError(
                f"{type(self).__name__}: state_dtype is {state_dtype!r}; pass one of {offered}"
            )
        vars(self)["state_dtype"] = state_dtype
        super().__init__(*args, **kwargs)

    @property
    def state_dtype(self) -> torch.dtype | str:
        """The dtype of both moments."""
        # One that `transforms.optimize` converts was not constructed here.
        value: torch.dtype | str = self.__dict__.get("state_dtype", torch.float32)
        return value

    @state_dtype.setter
    def state_dtype(self, value: torch.dtype | str) -> NoReturn:
        raise AttributeError(
            f"{type(self).__name__}: state_dtype cannot be changed; construct an optimizer with "
            f"state_dtype={value!r}, and load the state_dict of this one"
        )

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"state_dtype": self.state_dtype}

    def _check_options(self, group: Group) -> None:
        super()._check_options(group)
        if self.state_dtype == torch.float32:
            return
        self._check_amsgrad(group, "amsgrad=True")
        what = f"{type(self).__name__}: state_dtype={self.state_dtype!r}"
        if isinstance(group["params"], list):  # not a generator, before torch has read it
            self._check_param_dtypes(what, group["params"])

    def _check_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super()._check_checkpoint(state_dict)
        for group in state_dict["param_groups"]:
            self._check_amsgrad(group, "amsgrad=True, which the checkpoint has")

    def _check_amsgrad(self, group: Group, what: str) -> None:
        """Raise if ``group`` has amsgrad, called ``what`` in the error, and state is rounded."""
        if self.state_dtype != torch.float32 and group.get("amsgrad"):
            raise ValueError(
                f"{type(self).__name__}: state_dtype={self.state_dtype!r} cannot be combined with "
                f"{what}, because each rounding could raise its maximum; use "
                "state_dtype=torch.float32"
            )

    def _check_param_dtypes(self, what: str, params: list[Any]) -> None:
        for dtype in {p.dtype for p in params if isinstance(p, Tensor)}:
            if dtype in PARAM_DTYPES and dtype not in _REDUCED:
                *names, last = (str(each).removeprefix("torch.") for each in _REDUCED)
                raise TypeError(
                    f"{what} is for parameters of {', '.join(names)} and {last}, and one is "
                    f"{dtype}; convert the model, or use state_dtype=torch.float32"
                )

    def _kernels(self, group: Group, one_row: bool) -> tuple[str, ...]:
        return ("adam_amsgrad",) if group["amsgrad"] else (_KERNELS[self.state_dtype],)

    def _numbers(self, group: Group) -> Numbers:
        beta1, beta2 = map(number, group["betas"])
        lr, decay = number(group["lr"]), number(group["weight_decay"])
        decoupled = group["decoupled_weight_decay"]
        return {
            "lr": lr,
            "decay_factor": 1 - lr * decay if decoupled else 1.0,
            "weight_decay": 0.0 if decoupled else decay,
            "beta1": beta1,
            "one_minus_beta1": 1 - beta1,
            "beta2": beta2,
            "one_minus_beta2": 1 - beta2,
            "eps": number(group["eps"]),
        }

    def _row_numbers(self, group: Group, numbers: Numbers, steps: Steps) -> dict[str, Steps]:
        numbers_of_row = {
            "step_size": numbers["lr"] / (1 - numbers["beta1"] ** steps),
            "root_correction": (1 - numbers["beta2"] ** steps) ** -0.5,
        }
        if self.state_dtype != torch.float32:
            numbers_of_row["step"] = steps  # which draws the random words
        return numbers_of_row

    def _check_sparse(self, group: Group, candidate: Candidate) -> None:
        raise RuntimeError(
            "Adam does not support sparse gradients, please consider SparseAdam instead"
        )


class FusedAdam(_Adam, torch.optim.Adam):
    r"""Drop-in for :class:`torch.optim.Adam` whose whole step is one kernel launch.

    .. math::
        g &\leftarrow \pm \nabla f(\theta) + \lambda\,\theta \\
        m &\leftarrow \beta_1\,m + (1-\beta_1)\,g \\
        v &\leftarrow \beta_2\,v + (1-\beta_2)\,g^2 \\
        \theta &\leftarrow \theta - \gamma\,
            \frac{m/(1-\beta_1^t)}{\sqrt{v/(1-\beta_2^t)} + \epsilon}

    Parameters may be float32, float64, bfloat16, float16 or complex, on the CPU or an Intel GPU,
    of any shape and strides. Arithmetic and state are float32 for the 16-bit dtypes.

    Args:
        params: tensors, (name, tensor) pairs, or dicts of groups, as torch.optim takes them.
        lr: learning rate :math:`\gamma`, a number or a one-element tensor.
        betas: :math:`\beta_1` and :math:`\beta_2`, numbers or one-element tensors.
        eps: :math:`\epsilon`, which keeps the divisor from zero.
        weight_decay: L2 penalty :math:`\lambda`.
        amsgrad: divide by the largest :math:`v` so far.
        foreach: None or False.
        maximize: ascend instead.
        capturable: False.
        differentiable: False.
        fused: None or True.
        decoupled_weight_decay: multiply :math:`\theta` by :math:`1-\gamma\lambda` instead of
            adding the penalty, as AdamW does.
        max_grad_norm: clip the gradients' norm, over all parameters, to this first, as
            :func:`torch.nn.utils.clip_grad_norm_` would. The gradients themselves stay unchanged.
        split: keep float32 values in two halves, as :class:`SplitSGD` does.
        state_dtype: the dtype of :math:`m` and :math:`v`, for parameters of at most 32 bits:
            torch.float32, torch.bfloat16, or "float8" (8-bit floating point with a scale for each
            block). The latter two are rounded stochastically. They allow neither ``amsgrad`` nor
            float64 or complex parameters. With "float8", a moment of 2 to the 126 or more becomes
            NaN, and its weight in the next step: by a gradient from about 3e20 on, if
            :math:`\beta_2` is 0.999.

    Raises:
        ValueError: a hyper-parameter out of range, or a ``state_dtype`` that is not offered.
        RuntimeError: an option that asks for another implementation; in a step, a parameter whose
            moments are rounded has taken 16,777,216 steps.
        TypeError: with ``split``, a parameter is neither float32 nor bfloat16; with another
            ``state_dtype``, one is float64 or complex.

    Example:
        >>> import torch
        >>> from fusedoptim import FusedAdam
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = FusedAdam(model.parameters(), lr=0.001)
        >>> model(torch.ones(2, 3)).sum().backward()
        >>> optimizer.step()

    Semantics, signature and state are those of torch 2.13's Adam; each class loads the other's
    state_dict. Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2015);
    ``amsgrad``: Reddi et al., "On the Convergence of Adam and Beyond" (2018).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        max_grad_norm: float | None = None,
        split: bool = False,
        state_dtype: torch.dtype | str = torch.float32,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
            max_grad_norm=max_grad_norm,
            split=split,
            state_dtype=state_dtype,
        )


class FusedAdamW(_Adam, torch.optim.AdamW):
    r"""Drop-in for :class:`torch.optim.AdamW` whose whole step is one kernel launch.

    .. math::
        \theta &\leftarrow (1 - \gamma\,\lambda)\,\theta \\
        m &\leftarrow \beta_1\,m + (1-\beta_1)\,g \\
        v &\leftarrow \beta_2\,v + (1-\beta_2)\,g^2 \\
        \theta &\leftarrow \theta - \gamma\,
            \frac{m/(1-\beta_1^t)}{\sqrt{v/(1-\beta_2^t)} + \epsilon}

    where :math:`g = \pm \nabla f(\theta)`. Parameters may be float32, float64, bfloat16, float16
    or complex, on the CPU or an Intel GPU, of any shape and strides. Arithmetic and state are
    float32 for the 16-bit dtypes.

    Args:
        params: tensors, (name, tensor) pairs, or dicts of groups, as torch.optim takes them.
        lr: learning rate :math:`\gamma`, a number or a one-element tensor.
        betas: :math:`\beta_1` and :math:`\beta_2`, numbers or one-element tensors.
        eps: :math:`\epsilon`, which keeps the divisor from zero.
        weight_decay: decoupled decay :math:`\lambda`.
        amsgrad: divide by the largest :math:`v` so far.
        maximize: ascend instead.
        foreach: None or False.
        capturable: False.
        differentiable: False.
        fused: None or True.
        max_grad_norm: clip the gradients' norm, over all parameters, to this first, as
            :func:`torch.nn.utils.clip_grad_norm_` would. The gradients themselves stay unchanged.
        split: keep float32 values in two halves, as :class:`SplitSGD` does.
        state_dtype: the dtype of :math:`m` and :math:`v`, for parameters of at most 32 bits:
            torch.float32, torch.bfloat16, or "float8" (8-bit floating point with a scale for each
            block). The latter two are rounded stochastically. They allow neither ``amsgrad`` nor
            float64 or complex parameters. With "float8", a moment of 2 to the 126 or more becomes
            NaN, and its weight in the next step: by a gradient from about 3e20 on, if
            :math:`\beta_2` is 0.999.

    Raises:
        ValueError: a hyper-parameter out of range, or a ``state_dtype`` that is not offered.
        RuntimeError: an option that asks for another implementation; in a step, a parameter whose
            moments are rounded has taken 16,777,216 steps.
        TypeError: with ``split``, a parameter is neither float32 nor bfloat16; with another
            ``state_dtype``, one is float64 or complex.

    Example:
        >>> import torch
        >>> from fusedoptim import FusedAdamW
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = FusedAdamW(model.parameters(), lr=0.001)
        >>> model(torch.ones(2, 3)).sum().backward()
        >>> optimizer.step()

    Semantics, signature and state are those of torch 2.13's AdamW; each class loads the other's
    state_dict. Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        max_grad_norm: float | None = None,
        split: bool = False,
        state_dtype: torch.dtype | str = torch.float32,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            max_grad_norm=max_grad_norm,
            split=split,
            state_dtype=state_dtype,
        )
