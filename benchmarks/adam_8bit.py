"""Times AdamW with reduced state against torchao's: ``python -m benchmarks.adam_8bit``.

Each optimizer runs in its own process, and the processes alternate. ``--torchao`` is the Python of
an environment with torchao, whose optimizers need torch.compile and a C++ compiler. Final losses
are compared by ``examples/state_dtype.py --torchao``. "The bytes" move what the steps move. The
lower halves of split weights count as state.
"""

from __future__ import annotations

from benchmarks import _alternating, _output
from benchmarks._alternating import Contender
from benchmarks._shapes import MODELS

OURS, BYTES = "fusedoptim:FusedAdamW", "benchmarks._bytes:BytesOfAdamW"
CONTENDERS = {
    "torch fused AdamW": Contender("torch.optim:AdamW", {"fused": True}),
    "FusedAdamW": Contender(OURS, {}),
    "FusedAdamW, bfloat16 state": Contender(OURS, {"state_dtype": "torch.bfloat16"}),
    "FusedAdamW, float8 state": Contender(OURS, {"state_dtype": "float8"}),
    "FusedAdamW, float8 state, split": Contender(OURS, {"state_dtype": "float8", "split": True}),
    "the bytes of float8 state": Contender(BYTES, {"moments": "uint8"}),
    "those with split weights": Contender(BYTES, {"moments": "uint8", "gradients": "bfloat16"}),
    "torchao AdamW8bit": Contender("torchao.optim:AdamW8bit", {}, "torchao"),
    "torchao AdamWFp8": Contender("torchao.optim:AdamWFp8", {}, "torchao"),
}


def main() -> None:
    parser = _alternating.parser("benchmarks.adam_8bit", __doc__, {"torchao": "torchao"}, rounds=2)
    parser.add_argument("--model", default="resnet50", choices=MODELS, help="shapes of parameters")
    args = parser.parse_args()
    _output.print_machine()
    _output.print_table(_alternating.table(CONTENDERS, args, args.model, "float32"))


if __name__ == "__main__":
    main()
