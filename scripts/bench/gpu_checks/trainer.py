"""The script that checks of gpu_check.py start with a verb: a Trainer that saves and reports."""

import os
import signal
import subprocess
import sys
import time
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments

from scripts.bench.common import make_dataset, make_llama
from scripts.bench.gpu_checks.base import SIZES, TINY

output_dir, precision, name, *faults = sys.argv[1:]
size = next(size for size in SIZES if size.name == name)


class Fault(TrainerCallback):
    """Kills the last rank of the first attempt after step 4, or lets it sleep, if the script is asked to.

    If the run resumes, prints the step at which it begins. ``child`` starts a process in each rank in step 2.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if faults == ["resume"]:
            print(f"resumed at step {state.global_step}", flush=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if faults == ["child"] and state.global_step == 2:
            command = [sys.executable, "-m", "scripts.bench.gpu_checks.child", "config.json"]
            subprocess.run(command, timeout=60, check=True)
        is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        if (
            faults not in (["kill"], ["hang"])
            or not is_last
            or state.global_step != 4
            or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
        ):
            return
        if faults == ["kill"]:
            wait_for_checkpoint()
            os.kill(os.getpid(), signal.SIGKILL)
        elif os.environ["WORLD_SIZE"] != "1":
            time.sleep(600)


def wait_for_checkpoint() -> None:
    """Wait until the checkpoint of step 3 is complete. It is written in the background."""
    deadline = time.monotonic() + 60
    while not os.path.exists(f"{output_dir}/checkpoint-3"):
        if time.monotonic() > deadline:
            raise TimeoutError("the checkpoint of step 3 was not complete after 60 s")
        time.sleep(0.05)


arguments = TrainingArguments(
    output_dir,
    max_steps=3 if faults == ["stop"] else 6,
    per_device_train_batch_size=size.micro_batch,
    save_strategy="steps" if size is TINY else "no",
    save_steps=3,
    save_total_limit=1,
    report_to="none",
    disable_tqdm=True,
    bf16=precision == "bf16",
    fp16=precision == "fp16",
)
model = make_llama(**size.config)
dataset = make_dataset(vocab_size=size.config["vocab_size"], length=size.seq_len)
trainer = Trainer(model, arguments, train_dataset=dataset, callbacks=[Fault()])
trainer.train(resume_from_checkpoint=True if faults == ["resume"] else None)
