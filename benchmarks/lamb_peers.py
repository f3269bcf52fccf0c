"""Times FusedLamb against IPEX's Lamb: ``python -m benchmarks.lamb_peers --ipex PYTHON``.

Each optimizer runs in its own process, and the processes alternate. ``--ipex`` is the Python of an
environment with IPEX 2.8.
"""

from __future__ import annotations

from benchmarks import _alternating, _output
from benchmarks._alternating import Contender
from benchmarks._shapes import MODELS
from benchmarks._workloads import MOMENTUM
from benchmarks.lamb import WEIGHT_DECAY

DECAY = {"weight_decay": WEIGHT_DECAY}
CONTENDERS = {
    "torch fused SGD": Contender("torch.optim:SGD", {"momentum": MOMENTUM, "fused": True}),
    "FusedLamb": Contender("fusedoptim:FusedLamb", DECAY),
    "IPEX Lamb": Contender("benchmarks._peers:ipex_lamb", DECAY, "ipex"),
}


def main() -> None:
    parser = _alternating.parser("benchmarks.lamb_peers", __doc__, {"ipex": "IPEX 2.8"}, rounds=3)
    parser.add_argument("--model", action="append", choices=MODELS, help="repeatable")
    args = parser.parse_args()
    _output.print_machine()
    for model in args.model or ("resnet50", "bert-base"):
        _output.print_table(_alternating.table(CONTENDERS, args, model, "float32"))


if __name__ == "__main__":
    main()
