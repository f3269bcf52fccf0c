"""Times AdamW on the host, for offloaded parameters: ``python -m benchmarks.host_adam``.

Only the host's step is timed, on lists of parameters with existing gradients. Each contender runs
in its own processes, and the processes alternate. DeepSpeed's needs ``--deepspeed``, a Python with
DeepSpeed and torch; it compiles its step when it is first used. "The bytes alone" moves the bytes
that FusedAdamW moves with float32 state, "those of float8 state" the bytes it moves with that.
"""

from __future__ import annotations

from benchmarks import _alternating, _output
from benchmarks._alternating import Contender

LISTS = {
    "bert-base float32": ("bert-base", "float32"),
    "bert-base bfloat16": ("bert-base", "bfloat16"),
    "10000x1000 float32": ("10000x1000", "float32"),
    "lora bfloat16": ("lora", "bfloat16"),
}
"""The shapes and the dtype of each list."""
CONTENDERS = {
    "DeepSpeedCPUAdam": Contender(
        "deepspeed.ops.adam:DeepSpeedCPUAdam", {"adamw_mode": True}, "deepspeed"
    ),
    "torch fused": Contender("torch.optim:AdamW", {"fused": True}),
    "FusedAdamW": Contender("fusedoptim:FusedAdamW", {}),
    "FusedAdamW, float8 state": Contender("fusedoptim:FusedAdamW", {"state_dtype": "float8"}),
    "the bytes alone": Contender("benchmarks._bytes:BytesOfAdamW", {}),
    "those of float8 state": Contender("benchmarks._bytes:BytesOfAdamW", {"moments": "uint8"}),
}


def main() -> None:
    parser = _alternating.parser(
        "benchmarks.host_adam", __doc__, {"deepspeed": "DeepSpeed"}, rounds=3
    )
    parser.add_argument("--list", action="append", choices=LISTS, help="repeatable")
    args = parser.parse_args()
    _output.print_machine()
    for workload in args.list or LISTS:
        _output.print_table(_alternating.table(CONTENDERS, args, *LISTS[workload]))


if __name__ == "__main__":
    main()
