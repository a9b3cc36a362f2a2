"""The script that ``restarts.py`` launches: a Trainer without code for restarts, which logs its losses to a file."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

FOLDER, MAX_STEPS, SAVE_STEPS = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
RANK, ATTEMPT = os.environ["RANK"], os.environ["HF_FSDP_RESTART_COUNT"]
(FOLDER / f"pid_{ATTEMPT}_{RANK}").write_text(str(os.getpid()))  # before the imports, which take seconds

from common import make_dataset, make_llama  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402


class WriteLosses(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in (logs or {}) and RANK == "0":
            with (FOLDER / "losses").open("a") as file:
                file.write(f"{state.global_step} {logs['loss']!r} {ATTEMPT} {time.time()}\n")


def main() -> None:
    model = make_llama(
        vocab_size=2048, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4,
    )  # fmt: skip
    arguments = TrainingArguments(
        str(FOLDER / "out"), max_steps=MAX_STEPS, per_device_train_batch_size=2, learning_rate=1e-3, logging_steps=1,
        save_steps=SAVE_STEPS, save_total_limit=3, report_to="none", disable_tqdm=True, use_cpu=True, seed=3,
    )  # fmt: skip
    dataset = make_dataset(vocab_size=2048, length=32)
    Trainer(model, arguments, train_dataset=dataset, callbacks=[WriteLosses()]).train()


if __name__ == "__main__":
    main()
