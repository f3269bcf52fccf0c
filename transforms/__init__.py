"""Rewrites a model for inference, or a model and its optimizer for training.

:func:`optimize` folds BatchNorms, removes Dropouts, casts to 16 bits and chooses the memory format.
In graph mode it runs the graphs that torch.compile captures, as :func:`graph_backend` does.
For training it fuses the optimizer's step and splits weights into bfloat16 halves. :func:`report`
lists what it did and why; :func:`restore` undoes it. :func:`quantize` makes convolutions and
Linears compute in INT8, and :func:`merge_embedding_bags` merges embedding bags into one module.
"""

from transforms.embedding_bags import merge_embedding_bags
from transforms.front_end import optimize
from transforms.graph.backend import graph_backend
from transforms.passes.channels_last import disable_auto_channels_last, enable_auto_channels_last
from transforms.quantization.front_end import quantize
from transforms.reports import Entry, NoEffectWarning, Report, SlowDtypeWarning, report
from transforms.undo import finalize, restore

__fusedoptim__ = "0.1.0"  # by which `fusedoptim.transforms` recognizes this package

__all__ = [
    "Entry",
    "NoEffectWarning",
    "Report",
    "SlowDtypeWarning",
    "disable_auto_channels_last",
    "enable_auto_channels_last",
    "finalize",
    "graph_backend",
    "merge_embedding_bags",
    "optimize",
    "quantize",
    "report",
    "restore",
]
