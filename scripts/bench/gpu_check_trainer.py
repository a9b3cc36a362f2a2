"""The script that checks of gpu_check.py start with a verb: a Trainer that saves and reports."""

import os
import signal
import sys
import time
from typing import Any

from common import make_dataset, make_llama
from transformers import Trainer, TrainerCallback, TrainingArguments

output_dir, precision, *faults = sys.argv[1:]


class Fault(TrainerCallback):
    """Kills the last rank of the first attempt after step 4, or lets it sleep, if the script is asked to."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        if not faults or not is_last or state.global_step != 4 or os.environ["HF_FSDP_RESTART_COUNT"] != "0":
            return
        if faults == ["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        elif os.environ["WORLD_SIZE"] != "1":
            time.sleep(600)


arguments = TrainingArguments(
    output_dir,
    max_steps=6,
    per_device_train_batch_size=4,
    save_steps=3,
    save_total_limit=1,
    report_to="none",
    disable_tqdm=True,
    bf16=precision == "bf16",
    fp16=precision == "fp16",
)
model = make_llama(
    vocab_size=1024, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
dataset = make_dataset(vocab_size=1024, length=32)
Trainer(model, arguments, train_dataset=dataset, callbacks=[Fault()]).train()
