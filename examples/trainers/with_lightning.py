"""Lightning with FusedAdamW, on handwritten digits in two processes: DDP, or FSDP2.

Run ``torchrun --nproc-per-node 2 examples/trainers/with_lightning.py``, with ``--fsdp`` for FSDP2.
To resume from a checkpoint, add ``--resume out/with_lightning/epoch=1.ckpt``.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from sklearn.datasets import load_digits
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from fusedoptim import FusedAdamW


class Network(lightning.LightningModule):
    def __init__(self, fsdp: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.fsdp, self.losses = fsdp, []

    def configure_model(self) -> None:
        if self.fsdp:
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])
            self.fsdp = False  # Lightning calls this more than once

    def configure_optimizers(self) -> Any:
        optimizer = FusedAdamW(self.parameters(), lr=3e-3, max_grad_norm=1.0)
        schedule = CosineAnnealingLR(optimizer, T_max=self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.layers(images), labels)
        self.losses.append(loss.item())
        return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default="out/with_lightning")
    parser.add_argument("--fsdp", action="store_true", help="shard the weights")
    parser.add_argument("--resume", help="a checkpoint in that folder")
    options = parser.parse_args()
    lightning.seed_everything(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
    model = Network(options.fsdp)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(2, 1) if options.fsdp else "ddp",
        precision="bf16-mixed",
        max_epochs=4,
        accumulate_grad_batches=2,
        callbacks=[ModelCheckpoint(options.folder, filename="{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=32, shuffle=True), ckpt_path=options.resume)
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if trainer.is_global_zero:
        name = type(trainer.optimizers[0]).__name__
        print(f"{name}: loss {model.losses[0]:.3f} to {model.losses[-1]:.3f}")
        torch.save(weights, options.folder / "weights.pt")


if __name__ == "__main__":
    main()
    gc.collect()  # DDP must be gone before its process group, else the process may abort or hang
    distributed.destroy_process_group()
