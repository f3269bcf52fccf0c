"""The Trainer of transformers with FusedAdamW, on handwritten digits in two processes.

Run ``torchrun --nproc-per-node 2 examples/trainers/with_transformers.py``. To resume from a
checkpoint, add ``--resume out/with_transformers/checkpoint-20``.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, distributed, nn
from torch.utils.data import TensorDataset
from transformers import Trainer, TrainingArguments

from fusedoptim import FusedAdamW


class Network(nn.Module):
    """Returns its loss first, as the Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(images)
        return {"loss": nn.functional.cross_entropy(logits.float(), labels), "logits": logits}


def collate(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    images, labels = zip(*samples)
    return {"images": torch.stack(images), "labels": torch.stack(labels)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default="out/with_transformers")
    parser.add_argument("--resume", help="a checkpoint in that folder")
    options = parser.parse_args()
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
    arguments = TrainingArguments(
        output_dir=str(options.folder),
        max_steps=40,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=2,
        lr_scheduler_type="cosine",
        warmup_steps=4,
        bf16=True,
        max_grad_norm=0,  # FusedAdamW clips in its step
        save_steps=20,
        logging_steps=5,
        seed=0,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        report_to="none",
    )
    torch.manual_seed(0)
    trainer = Trainer(
        model=Network(),
        args=arguments,
        train_dataset=data,
        data_collator=collate,
        optimizer_cls_and_kwargs=(FusedAdamW, {"lr": 3e-3, "max_grad_norm": 1.0}),
    )
    trainer.train(resume_from_checkpoint=options.resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        name = type(trainer.optimizer.optimizer).__name__
        print(f"{name}: loss {losses[0]:.3f} to {losses[-1]:.3f}")
        torch.save(trainer.model.state_dict(), options.folder / "weights.pt")


if __name__ == "__main__":
    main()
    gc.collect()  # DDP must be gone before its process group, else the process may abort or hang
    distributed.destroy_process_group()
