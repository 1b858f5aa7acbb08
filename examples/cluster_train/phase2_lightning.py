"""The same training by Lightning, which wraps the model in DDP and shards the data by itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader
from train.train_llm.train_llm_conf import Phase2Config
from train_phase2 import ImageTeller, make_data, save, uses_bf16


class Phase2Module(lightning.LightningModule):
    """What Lightning must know: a step and an optimizer."""

    def __init__(self, config: Phase2Config) -> None:
        """The model by its configuration."""
        super().__init__()
        self.config = config
        self.model = ImageTeller(recomputes=config.gradient_checkpointing)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        """The loss of one batch."""
        loss: torch.Tensor = self.model(*batch)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        """One line for each epoch, on the first rank."""
        loss = self.trainer.callback_metrics["loss"]
        line = f"epoch {self.current_epoch + 1}/{self.config.epochs} loss {loss:.4f}"
        if self.global_rank == 0:
            print(line, flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.config.learning_rate)


def fit(config: Phase2Config) -> None:
    """Train on the ranks that torchrun has started. All ranks must call this."""
    lightning.seed_everything(0, verbose=False)
    folder = Path(config.output_dir)
    trainer = lightning.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        strategy=DDPStrategy(process_group_backend=os.environ.get("BACKEND")),
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_epochs=config.epochs,
        precision="bf16-mixed" if uses_bf16(config) else "32-true",
        accumulate_grad_batches=config.gradient_accumulation,
        callbacks=[
            lightning.pytorch.callbacks.ModelCheckpoint(
                folder, save_last=True, every_n_epochs=config.checkpoint_every
            )
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Phase2Module(config)
    data = DataLoader(make_data(config.samples), config.batch_size, shuffle=True)
    last = folder / "last.ckpt"
    trainer.fit(module, data, ckpt_path=last if last.exists() else None)
    if trainer.is_global_zero:
        save(module.model.state_dict(), folder / "model.pt")
        print(f"saved {folder / 'model.pt'}", flush=True)
