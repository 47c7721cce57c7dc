"""Hugging Face's Trainer with ``save_total_limit=2`` and ``resume_from_checkpoint=True``."""

from __future__ import annotations

import torch
from states import Notes, arguments, digest
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

EVERY_STEPS = 4


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(32) * (number + 3)) % 211
        return {"input_ids": tokens, "labels": tokens}


class Watch(TrainerCallback):
    def __init__(self, notes: Notes, *, resumed: bool) -> None:
        self._notes = notes
        self._resumed = resumed

    def on_save(self, args, state, control, *, model, optimizer, **others) -> None:
        self._notes.saved[state.global_step] = digest(model.state_dict(), optimizer.state_dict())

    def on_train_begin(self, args, state, control, *, model, optimizer, **others) -> None:
        if self._resumed:
            self._notes.restored[state.global_step] = digest(model.state_dict(), optimizer.state_dict())

    def on_train_end(self, args, state, control, *, model, optimizer, **others) -> None:
        self._notes.final = digest(model.state_dict(), optimizer.state_dict())


def main() -> None:
    directory, steps, resumed = arguments()
    set_seed(7)
    notes = Notes()
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=32, n_embd=64, n_layer=2, n_head=4))
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=directory, max_steps=steps, per_device_train_batch_size=8, save_strategy="steps",
            save_steps=EVERY_STEPS, save_total_limit=2, report_to=[], use_cpu=True, disable_tqdm=True,
            logging_strategy="no", lr_scheduler_type="constant",
        ),
        train_dataset=Tokens(),
        callbacks=[Watch(notes, resumed=resumed)],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=True if resumed else None)
    notes.print()


if __name__ == "__main__":
    main()
