"""An LSTM that computes with copies of its weights in oneDNN's own layout.

torch computes an LSTM by one oneDNN operator for each layer and direction, which reorders the plain
weights in every call. The same operator accepts packed weights, in one layout for all inputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from transforms.rewrites.packed import PackedModule, is_plain_call, product_dtype
from transforms.rewrites.schemas import changed

_State = tuple[Tensor, Tensor]
"""Outputs and cells of all layers and directions."""
_LSTM = 2
"""The operator's number for this kind of network."""


class PackedLSTM(PackedModule, nn.LSTM):
    """A long short-term memory with packed weights."""

    def packed_parameters(self) -> tuple[Tensor, ...]:
        """The weights of all layers and directions, alternately of the input and of the state."""
        weights = map(self._parameters.get, weight_names(self))
        return tuple(weight for weight in weights if weight is not None)

    def forward(self, input: Any, hx: Any = None) -> Any:  # noqa: A002  # torch's name
        """Compute as ``torch.nn.LSTM`` does."""
        self._update_flat_weights()
        result = self._computed(input, hx)
        # torch 2.15 cannot compile super() after a call that it does not trace, as the one above.
        return nn.LSTM.forward(self, input, hx) if result is None else result

    def _computed(self, x: Any, given: Any) -> tuple[Tensor, _State] | None:
        """The results with packed weights; None if plain ones must be used."""
        if (
            not is_plain_call()
            or not isinstance(x, Tensor)
            or x.dim() != 3
            or x.numel() == 0
            or self.training
        ):
            return None
        state = self._zeros(x) if given is None else given
        if not _is_state(state):
            return None
        dtype = product_dtype((x, *state), [w for w in self._flat_weights if w is not None])
        if dtype is None:
            return None
        self.check_forward_args(x, state, None)
        weights = self.packed_parameters()
        packed = self._fusedoptim_pack.of(weights, dtype, (), (), self._reordered)
        if packed is None:
            return None
        x, h, c = (t.to(dtype) for t in (x, *state))
        return self._all_layers(x, (h.contiguous(), c.contiguous()), packed.weights)

    def _zeros(self, x: Tensor) -> _State:
        batch = x.size(0 if self.batch_first else 1)
        shape = len(self.packed_parameters()) // 2, batch, self.hidden_size
        return x.new_zeros(shape), x.new_zeros(shape)

    def _reordered(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Pack the two weights of each layer and direction."""
        reorder: Any = torch.ops.mkldnn._reorder_mkldnn_rnn_layer_weight
        packed: list[Tensor] = []
        for i, pair in enumerate(_pairs(weights)):
            # No shape of the input is given: the layout is the same for all.
            packed += reorder(*pair, self.hidden_size, self._is_reverse(i), self.bias, False, None)
        return packed

    def _is_reverse(self, i: int) -> bool:
        """Whether the ``i``-th of the layers and directions reads from the end."""
        return self.bidirectional and i % 2 == 1

    def _biases(self, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
        """The two biases of each layer and direction."""
        if not self.bias:
            zeros = torch.zeros(4 * self.hidden_size, dtype=dtype)
            yield from itertools.repeat((zeros, zeros), len(self.packed_parameters()) // 2)
            return
        names = [name for name in self._flat_weights_names if name.startswith("bias")]
        for first, second in zip(names[::2], names[1::2]):
            yield getattr(self, first).to(dtype), getattr(self, second).to(dtype)

    def _all_layers(
        self, x: Tensor, state: _State, weights: Sequence[Tensor]
    ) -> tuple[Tensor, _State]:
        directions = 2 if self.bidirectional else 1
        if self.batch_first:
            x = x.transpose(0, 1)
        x = x.contiguous()
        biases = self._biases(x.dtype)
        outputs, last_h, last_c = [], [], []
        for i, (pair, both) in enumerate(zip(_pairs(weights), biases)):
            output, h, c, _ = torch.ops.aten.mkldnn_rnn_layer.default(
                *(x, *pair, *both, state[0][i], state[1][i], self._is_reverse(i), [], _LSTM),
                *(self.hidden_size, self.num_layers, self.bias, self.bidirectional, False, False),
            )
            outputs.append(output)
            last_h.append(h)
            last_c.append(c)
            if len(outputs) == directions:  # the layer is complete
                x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
                outputs = []
        if self.batch_first:
            x = x.transpose(0, 1)
        return x, (torch.stack(last_h), torch.stack(last_c))


def weight_names(module: nn.RNNBase) -> list[str]:
    """The names of the weights, alternately of the input and of the state; without biases."""
    return [name for name in module._flat_weights_names if name.startswith("weight")]


def _pairs(weights: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """The weights of the input and of the state, for each layer and direction."""
    return zip(weights[::2], weights[1::2])


def _is_state(given: Any) -> bool:
    return (
        isinstance(given, tuple | list)
        and len(given) == 2
        and all(isinstance(t, Tensor) and t.dim() == 3 for t in given)
    )


def missing_operators() -> list[str]:
    """The operators that this torch lacks, or has with another signature."""
    return [*changed("aten", _ATEN), *changed("mkldnn", _MKLDNN)]


_ATEN = {
    "mkldnn_rnn_layer": (
        "aten::mkldnn_rnn_layer(Tensor input, Tensor weight0, Tensor weight1, Tensor weight2, "
        "Tensor weight3, Tensor hx_, Tensor cx_, bool reverse, int[] batch_sizes, int mode, "
        "int hidden_size, int num_layers, bool has_biases, bool bidirectional, bool batch_first, "
        "bool train) -> (Tensor, Tensor, Tensor, Tensor)"
    )
}
_MKLDNN = {
    "_reorder_mkldnn_rnn_layer_weight": (
        "mkldnn::_reorder_mkldnn_rnn_layer_weight(Tensor weight0, Tensor weight1, "
        "int hidden_size, bool reverse, bool has_biases, bool batch_first, "
        "int[]? input_size=None) -> Tensor[] Y"
    )
}
"""The schemas as in torch 2.13."""
