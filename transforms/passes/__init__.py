"""The passes, in the order in which they run.

A new pass needs a module here, a line below, and an argument of :func:`transforms.optimize`. A pass
decides what is rewritten, and says why something is not. The rewrites themselves are in
:mod:`transforms.rewrites`.
"""

from collections.abc import Sequence

from transforms.passes.cast import Cast
from transforms.passes.channels_last import ChannelsLast
from transforms.passes.conv_as_matmul import ConvAsMatmul
from transforms.passes.drop_dropout import DropDropout
from transforms.passes.fold_batch_norm import FoldIntoConvolutions, FoldIntoLinears
from transforms.passes.frozen_batch_norm import FuseFrozenBatchNorm
from transforms.passes.fuse import Fuse
from transforms.passes.fuse_gelu import FuseGELU
from transforms.passes.fuse_step import FuseStep
from transforms.passes.graph_mode import GraphMode
from transforms.passes.onednn_products import OneDNNProducts
from transforms.passes.pack_weights import PackWeights
from transforms.passes.parallel_dropout import ParallelDropout
from transforms.passes.protocol import Pass
from transforms.passes.split_weights import SplitWeights

_CHANNELS_LAST = ChannelsLast()
INFERENCE: Sequence[Pass] = (
    FoldIntoConvolutions(),
    FoldIntoLinears(),
    DropDropout(),
    Cast(),
    _CHANNELS_LAST,
    PackWeights(),
    Fuse(),
    GraphMode(),
)
"""For a model in eval mode: passes that change values first, then those that change layouts.
GraphMode is last, as it captures the result of the others."""
TRAINING: Sequence[Pass] = (
    FuseStep(),
    ParallelDropout(),
    FuseGELU(),
    FuseFrozenBatchNorm(),
    OneDNNProducts(),
    _CHANNELS_LAST,
    ConvAsMatmul(),
    SplitWeights(),
)
"""For a model and its optimizer: FuseStep first, as it may raise; SplitWeights last, so that
halves copy the layout of the weights."""
_ALL = (*INFERENCE, *TRAINING)
KNOBS = {name for each in _ALL for name in (each.knob, *each.parts)} - {Cast.knob}
"""The arguments of :func:`transforms.optimize` that are True, False or None."""
