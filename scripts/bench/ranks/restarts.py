"""The script that ``restarts.py`` launches: a Trainer without code for restarts, or a loop with Accelerate.

Both log their losses to a file.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

FOLDER, MAX_STEPS, SAVE_STEPS, WAY = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
RANK, ATTEMPT = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
(FOLDER / f"pid_{ATTEMPT}_{RANK}").write_text(str(os.getpid()))  # before the imports, which take seconds

from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from scripts.bench.common import make_dataset, make_llama  # noqa: E402


class WriteLosses(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in (logs or {}) and RANK == "0":
            write_loss(state.global_step, logs["loss"])


def write_loss(step: int, loss: float) -> None:
    with (FOLDER / "losses").open("a") as file:
        file.write(f"{step} {loss!r} {ATTEMPT} {time.time()}\n")


def make_model() -> Any:
    return make_llama(
        vocab_size=2048, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4,
    )  # fmt: skip


def train_with_loop() -> None:
    """Train in a loop that resumes from the newest checkpoint of its run, as docs/clusters.md shows."""
    import torch
    from accelerate import Accelerator

    import hf_fsdp_plugin as hfp

    accelerator = Accelerator()
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    step = 0
    if (checkpoint := hfp.newest_checkpoint(FOLDER / "out", this_run=True)) is not None:
        accelerator.load_state(checkpoint)
        step = int(checkpoint.name.removeprefix("step_"))
    while step < MAX_STEPS:
        generator = torch.Generator().manual_seed(100 * step + accelerator.process_index)
        ids = torch.randint(0, 2048, (2, 32), generator=generator)
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        mean = accelerator.reduce(loss.detach(), reduction="mean").item()
        if RANK == "0":
            write_loss(step, mean)
        if step % SAVE_STEPS == 0:
            accelerator.save_state(FOLDER / "out" / f"step_{step}")
    accelerator.end_training()


def train_with_trainer() -> None:
    arguments = TrainingArguments(
        str(FOLDER / "out"), max_steps=MAX_STEPS, per_device_train_batch_size=2, learning_rate=1e-3, logging_steps=1,
        save_steps=SAVE_STEPS, save_total_limit=3, report_to="none", disable_tqdm=True, use_cpu=True, seed=3,
    )  # fmt: skip
    dataset = make_dataset(vocab_size=2048, length=32)
    Trainer(make_model(), arguments, train_dataset=dataset, callbacks=[WriteLosses()]).train()


if __name__ == "__main__":
    train_with_loop() if WAY == "loop" else train_with_trainer()
