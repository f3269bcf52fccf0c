"""Lion with RawKernel: an optimizer of your own whose step is one kernel launch.

``python examples/lion.py`` trains a network on handwritten digits with Lion and with AdamW, in a
few seconds. docs/writing-kernels.md explains the kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from fusedoptim.raw import RawKernel

CHUNK = 32 * 1024  # elements that one work-group updates
LANES = 16  # work items in a group: a CPU's SIMD width

# Each work-group processes a row of the table: the addresses of a chunk of a parameter, of its
# gradient and of its momentum, and the length. One launch updates tensors of any number and size.
kernel = RawKernel("""
kernel void lion(global const ulong4 *rows, float lr, float beta1, float one_minus_beta1,
                 float beta2, float one_minus_beta2, float weight_decay) {
    const ulong4 row = rows[get_group_id(0)];
    global float *theta = (global float *)row.x, *momentum = (global float *)row.z;
    global const float *grad = (global const float *)row.y;
    for (ulong i = get_local_id(0); i < row.w; i += get_local_size(0)) {
        const float g = grad[i], m = momentum[i], t = theta[i];
        const float c = beta1 * m + one_minus_beta1 * g;
        const float sign = c > 0 ? 1 : c < 0 ? -1 : c;  // NaN stays NaN
        theta[i] = t - lr * (sign + weight_decay * t);
        momentum[i] = beta2 * m + one_minus_beta2 * g;
    }
}""")


class Lion(torch.optim.Optimizer):
    """Moves each weight by the learning rate, in the direction of an averaged gradient.

    c = beta1 m + (1 - beta1) g;  theta = theta - lr (sign(c) + weight_decay theta);
    m = beta2 m + (1 - beta2) g, starting from m = 0.

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2.

    Args:
        params: parameters or groups, which must be contiguous float32 on the CPU.
        lr: learning rate; the paper advises a tenth to a third of AdamW's.
        betas: coefficients of the update and of the momentum.
        weight_decay: decoupled; the paper advises three to ten times AdamW's.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if not lr >= 0 or not weight_decay >= 0:
            raise ValueError(f"lr={lr} and weight_decay={weight_decay} must not be negative")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas} must be at least 0 and less than 1")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients, and return the result of ``closure``."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            rows = [row for p in params for row in self._rows(p)]
            if rows:
                table = torch.tensor(rows, dtype=torch.int64).view(torch.uint64)
                beta1, beta2 = group["betas"]  # float64 here, rounded to float32 for the kernel
                numbers = (group["lr"], beta1, 1 - beta1, beta2, 1 - beta2, group["weight_decay"])
                kernel(len(rows) * LANES, LANES, (table, *numbers))
                increment_version(params)  # torch does not see writes through addresses
        return loss

    def _rows(self, p: Tensor) -> list[tuple[int, int, int, int]]:
        """The table rows of a parameter: three addresses and a length for each chunk."""
        for t in (p, p.grad):
            dense = t.layout is torch.strided and t.is_contiguous()
            if t.dtype != torch.float32 or not t.is_cpu or not dense:
                raise ValueError(
                    f"Lion takes contiguous float32 on the CPU, not {t.dtype}, "
                    f"{t.layout} of shape {tuple(t.shape)} on {t.device}"
                )
        if p not in self.state:
            self.state[p]["exp_avg"] = torch.zeros_like(p)
        tensors = p, p.grad, self.state[p]["exp_avg"]
        return [
            (*(t.data_ptr() + 4 * start for t in tensors), min(CHUNK, p.numel() - start))
            for start in range(0, p.numel(), CHUNK)
        ]


def main(epochs: int = 30) -> None:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    train, test = slice(0, 1400), slice(1400, None)
    optimizers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "AdamW": lambda params: torch.optim.AdamW(params, lr=3e-3, weight_decay=0.01),
        "Lion": lambda params: Lion(params, lr=5e-4, weight_decay=0.06),
    }
    for name, make in optimizers.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        optimizer = make(model.parameters())
        start = time.perf_counter()
        for _ in range(epochs):
            for batch in torch.randperm(1400).split(70):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x[train][batch]), y[train][batch])
                loss.backward()
                optimizer.step()
        seconds = time.perf_counter() - start
        correct = (model(x[test]).argmax(1) == y[test]).float().mean().item()
        print(
            f"{name:5}: loss {loss.item():.3f}, {correct:.1%} of the test digits, {seconds:.1f} s"
        )


if __name__ == "__main__":
    main()
