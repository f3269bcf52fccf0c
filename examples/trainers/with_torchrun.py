r"""Elastic training: torchrun restarts DDP with FusedAdamW or SplitSGD from the newest checkpoint.

FusedAdamW trains float32 weights under autocast, SplitSGD bfloat16 weights. A step uses the
gradients of two batches.

Run::

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 2 \
        --max-restarts 3 examples/trainers/with_torchrun.py

and kill one of its two processes with ``kill -9``. torchrun starts both again, and the final
weights are those of a run that nobody killed. Without the variable, torchrun keeps the store
through which processes find each other, and the new processes look for the killed ones
(https://github.com/pytorch/pytorch/issues/135712).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fusedoptim import FusedAdamW, SplitSGD

EPOCHS = 4
ACCUMULATED = 2


def train(folder: Path, split: bool) -> None:
    rank = distributed.get_rank()
    torch.manual_seed(0)
    digits = load_digits()
    dtype = torch.bfloat16 if split else torch.float32
    data = TensorDataset(torch.tensor(digits.data).to(dtype) / 16, torch.tensor(digits.target))
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(dtype)
    model = DistributedDataParallel(layers)
    if split:
        optimizer = SplitSGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = FusedAdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0)
    scheduler = StepLR(optimizer, step_size=math.ceil(len(loader) / ACCUMULATED), gamma=0.5)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    latest, first = folder / "latest.pt", 0
    if latest.exists():
        saved = torch.load(latest)
        first = saved["epoch"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)
        for number, (images, labels) in enumerate(loader, start=1):
            is_last = number % ACCUMULATED == 0 or number == len(loader)
            with contextlib.nullcontext() if is_last else model.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=not split):
                    logits = model(images)
                loss = nn.functional.cross_entropy(logits.float(), labels)
                (loss / ACCUMULATED).backward()
            if is_last:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            saved = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**saved, "epoch": epoch + 1}, folder / "new.pt")
            (folder / "new.pt").replace(latest)  # a process that is killed here leaves the old one
            print(f"{type(optimizer).__name__}: from epoch {first}, {epoch}: loss {loss:.3f}")
        distributed.barrier()  # all processes resume from the same checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--folder", type=Path, default="out/with_torchrun")
    parser.add_argument("--split", action="store_true", help="SplitSGD, with bfloat16 weights")
    options = parser.parse_args()
    distributed.init_process_group("gloo")
    train(options.folder, options.split)
    gc.collect()  # DDP must be gone before its process group, else the process may abort or hang
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
