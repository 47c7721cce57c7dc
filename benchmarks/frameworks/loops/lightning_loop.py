"""Lightning's Trainer with a ModelCheckpoint that keeps the last two, and a link to the newest."""

from __future__ import annotations

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from states import Notes, arguments, digest
from torch.utils.data import DataLoader, TensorDataset

EVERY_STEPS = 4


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8))

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Watch(Callback):
    def __init__(self, notes: Notes, *, resumed: bool) -> None:
        self._notes = notes
        self._resumed = resumed

    def on_save_checkpoint(self, trainer, module, checkpoint) -> None:
        state = digest(checkpoint["state_dict"], checkpoint["optimizer_states"])
        self._notes.saved[checkpoint["global_step"]] = state

    def on_train_start(self, trainer, module) -> None:
        if self._resumed:
            self._notes.restored[trainer.global_step] = self._now(trainer, module)

    def on_train_end(self, trainer, module) -> None:
        self._notes.final = self._now(trainer, module)

    @staticmethod
    def _now(trainer, module) -> str:
        return digest(module.state_dict(), [optimizer.state_dict() for optimizer in trainer.optimizers])


def main() -> None:
    directory, steps, resumed = arguments()
    lightning.seed_everything(7)
    inputs = torch.randn(256, 64)
    data = DataLoader(TensorDataset(inputs, inputs[:, :8] ** 2), batch_size=16)
    notes = Notes()
    saving = ModelCheckpoint(
        dirpath=directory, filename="{step}", every_n_train_steps=EVERY_STEPS, save_top_k=2, monitor="step",
        mode="max", save_last="link",
    )  # fmt: skip
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, deterministic=True, callbacks=[saving, Watch(notes, resumed=resumed)],
    )  # fmt: skip
    trainer.fit(Model(), data, ckpt_path=f"{directory}/last.ckpt" if resumed else None)
    notes.print()


if __name__ == "__main__":
    main()
