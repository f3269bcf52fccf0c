"""Multi-head attention that draws its dropout's mask on all cores."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedoptim.nn import functional
from fusedoptim.nn._scripting import refuse_script
from fusedoptim.nn._tracing import traced_call

__all__ = ["MultiheadAttention"]


class MultiheadAttention(torch.nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` whose dropout is that of :mod:`fusedoptim.nn.functional`.

    In training on the CPU with ``dropout > 0``, weights are dropped by
    :func:`~fusedoptim.nn.functional.dropout`, inside
    :func:`~fusedoptim.nn.functional.scaled_dot_product_attention` unless the caller needs them.
    torch's own code handles everything else: other devices, eval mode, ``add_bias_kv``,
    ``add_zero_attn``, and inputs without a batch.

    Args:
        embed_dim: the width of queries and outputs.
        num_heads: the heads, which share the width.
        dropout: the probability of zeroing a weight.
        bias: whether the projections have biases.
        add_bias_kv: whether to append a bias to keys and values.
        add_zero_attn: whether to append zeros to keys and values.
        kdim: the width of keys; ``embed_dim`` if None.
        vdim: the width of values; ``embed_dim`` if None.
        batch_first: whether inputs have the shape (N, L, E) rather than (L, N, E).
        device: the device of the parameters.
        dtype: the dtype of the parameters.

    Raises:
        ValueError: embed_dim or num_heads is not positive.
        AssertionError: num_heads does not divide embed_dim; in the call, shapes do not fit.

    Example:
        >>> import torch
        >>> x = torch.ones(5, 2, 8)
        >>> output, weights = MultiheadAttention(8, 2, dropout=0.1)(x, x, x)
        >>> output.shape, weights.shape
        (torch.Size([5, 2, 8]), torch.Size([2, 5, 5]))

    Semantics: ``torch.nn.MultiheadAttention`` of torch 2.13.
    """

    __prepare_scriptable__ = refuse_script

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; the result includes the weights after dropout, unless ``need_weights`` is False.

        Args:
            query: the inputs from which queries are made.
            key: the inputs from which keys are made.
            value: the inputs from which values are made.
            key_padding_mask: (N, S): true where a key is left out, or numbers that are added.
            need_weights: whether to return the weights.
            attn_mask: (L, S) or (N * num_heads, L, S): the same for pairs of query and key.
            average_attn_weights: whether the weights are averaged over the heads.
            is_causal: whether attn_mask is that of causal attention.
        """
        masks = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        traced: tuple[Tensor, Tensor | None] | None = traced_call(self, query, key, value, *masks)
        if traced is not None:
            return traced
        if not (
            self._is_served(query, key, value)
            and self._are_masks(query, key, key_padding_mask, attn_mask, is_causal)
        ):
            return super().forward(query, key, value, *masks)
        if is_causal and key_padding_mask is None and not need_weights:
            attn_mask = None
        else:
            is_causal = False
        q, k, v = self._heads(query, key, value)
        mask = self._mask(attn_mask, key_padding_mask, query.dtype)
        if need_weights:
            scores = q * (1 / math.sqrt(self.head_dim)) @ k.mT
            weights = torch.softmax(scores if mask is None else scores + mask, -1)
            weights = functional.dropout(weights, self.dropout)
            output = weights @ v
            returned = weights.mean(1) if average_attn_weights else weights
        else:
            output = functional.scaled_dot_product_attention(q, k, v, mask, self.dropout, is_causal)
            returned = None
        output = output.transpose(1, 2).flatten(2)
        output = torch.nn.functional.linear(output, self.out_proj.weight, self.out_proj.bias)
        return output if self.batch_first else output.transpose(0, 1), returned

    def _is_served(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        if not (self.training and 0 < self.dropout <= 1):
            return False
        if self.bias_k is not None or self.bias_v is not None or self.add_zero_attn:
            return False
        for tensor, width in ((query, self.embed_dim), (key, self.kdim), (value, self.vdim)):
            if tensor.is_nested or tensor.dim() != 3 or tensor.shape[2] != width:
                return False
            if not functional.is_ours_to_attend(tensor) or not tensor.numel():
                return False
        batch = 0 if self.batch_first else 1
        return query.shape[batch] == key.shape[batch] and key.shape[:2] == value.shape[:2]

    def _are_masks(
        self,
        query: Tensor,
        key: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> bool:
        """Whether torch's module accepts the masks without an error or a warning."""
        if is_causal and attn_mask is None:
            return False
        dtypes = {mask.dtype for mask in (key_padding_mask, attn_mask) if mask is not None}
        if len(dtypes) > 1 or not dtypes <= {torch.bool, query.dtype}:
            return False
        length = 1 if self.batch_first else 0
        batch, rows, columns = query.shape[1 - length], query.shape[length], key.shape[length]
        if key_padding_mask is not None and key_padding_mask.shape != (batch, columns):
            return False
        matrices = ((rows, columns), (batch * self.num_heads, rows, columns))
        return attn_mask is None or tuple(attn_mask.shape) in matrices

    def _heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """The projections, each of shape (N, heads, L or S, width of a head)."""
        linear = torch.nn.functional.linear
        if self._qkv_same_embed_dim and query is key and key is value:
            projected = linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            weights = (
                self.in_proj_weight.chunk(3)
                if self._qkv_same_embed_dim
                else (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            )
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            projected = tuple(map(linear, (query, key, value), weights, biases))
        dims = (0, 2, 1, 3) if self.batch_first else (1, 2, 0, 3)
        return tuple(
            each.reshape(*each.shape[:2], self.num_heads, self.head_dim).permute(dims)
            for each in projected
        )

    def _mask(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, dtype: torch.dtype
    ) -> Tensor | None:
        """What to add to the scores."""
        added: Tensor | None = None
        if attn_mask is not None:
            added = _additive(attn_mask, dtype)
            if added.dim() == 3:
                added = added.reshape(-1, self.num_heads, *added.shape[1:])
        if key_padding_mask is not None:
            padding = _additive(key_padding_mask, dtype)[:, None, None]
            added = padding if added is None else added + padding
        return added


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return functional.additive_mask(mask, dtype) if mask.dtype == torch.bool else mask
