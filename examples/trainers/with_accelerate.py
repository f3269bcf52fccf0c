"""Accelerate with FusedAdamW, on handwritten digits in two processes: DDP, or FSDP2.

Run ``torchrun --nproc-per-node 2 examples/trainers/with_accelerate.py``, with ``--fsdp`` for FSDP2
on GPUs. To resume from a checkpoint, add ``--resume out/with_accelerate/checkpoint-2``.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType, set_seed
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from fusedoptim import FusedAdamW

EPOCHS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default="out/with_accelerate")
    parser.add_argument("--fsdp", action="store_true", help="shard the weights")
    parser.add_argument("--resume", help="a checkpoint in that folder")
    options = parser.parse_args()
    accelerator = Accelerator(
        cpu=not torch.xpu.is_available(),
        mixed_precision="bf16",
        gradient_accumulation_steps=2,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) if options.fsdp else None,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0),
    )
    if options.fsdp and accelerator.distributed_type != DistributedType.FSDP:
        sys.exit("Accelerate shards on GPUs only; on a CPU it would use DDP")
    set_seed(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = FusedAdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0)
    loader = DataLoader(data, batch_size=32, shuffle=True)
    # Accelerate calls the scheduler once for each process.
    scheduler = CosineAnnealingLR(optimizer, T_max=EPOCHS * len(loader) // 2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    first = 0
    if options.resume:
        accelerator.load_state(options.resume)
        first = int(options.resume.rpartition("-")[2])
    losses = []
    for epoch in range(first, EPOCHS):
        loader.set_epoch(epoch)
        total = torch.zeros(())
        for images, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            total += loss.detach()
        losses.append(accelerator.reduce(total, "mean").item() / len(loader))
        accelerator.save_state(str(options.folder / f"checkpoint-{epoch + 1}"))
    weights = accelerator.get_state_dict(model)
    name = type(optimizer.optimizer).__name__
    accelerator.print(f"{name}: loss {losses[0]:.3f} to {losses[-1]:.3f}")
    accelerator.save(weights, options.folder / "weights.pt")


if __name__ == "__main__":
    main()
    gc.collect()  # DDP must be gone before its process group, else the process may abort or hang
    distributed.destroy_process_group()
