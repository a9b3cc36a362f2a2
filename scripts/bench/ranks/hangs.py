"""A training script that hangs in a given way. ``hangs.py`` and tests/gloo/test_hangs.py launch it on two ranks.

``python hangs.py KIND loop|trainer``: an own loop with Accelerate, or the Trainer. The time of the fault is
written to the file ``provoked``. ``python hangs.py healthy SECONDS`` trains slowly without faults.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather as gather_tensors
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

RANK = int(os.environ["RANK"])
FAULT_STEP, NUM_STEPS = 2, 5
LENGTH = 8
PAUSE = 600.0
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 32}


def note() -> None:
    Path("provoked").write_text(str(time.time()))


class Samples(torch.utils.data.Dataset[Any]):
    """Token sequences. One of them takes long on rank 1."""

    def __init__(self, kind: str) -> None:
        self.kind, self.num_read = kind, 0

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.num_read += 1
        if RANK == 1 and self.kind in ("loader", "busy") and self.num_read == FAULT_STEP + 2:
            note()
            end = time.monotonic() + PAUSE
            while time.monotonic() < end:
                if self.kind == "loader":
                    time.sleep(PAUSE)
        tokens = torch.arange(LENGTH) % SIZES["vocab_size"]
        return {"input_ids": tokens, "labels": tokens}


class Collate:
    """Makes batches; the worker of rank 1 does not end one of them."""

    def __init__(self, kind: str) -> None:
        self.kind, self.num_batches = kind, 0

    @property
    def num_workers(self) -> int:
        return int(self.kind == "collate")

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        self.num_batches += 1
        if RANK == 1 and self.kind == "collate" and self.num_batches == FAULT_STEP + 2:
            note()
            while True:
                pass
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def sleep() -> None:
    if RANK == 1:
        time.sleep(PAUSE)


def lock() -> None:
    """Wait for a lock that this thread itself holds."""
    if RANK == 1:
        held = threading.Lock()
        held.acquire()
        held.acquire()


def barrier() -> None:
    if RANK == 0:
        dist.barrier()


def gather() -> None:
    """Gather a metric once more on one rank, as in a branch that depends on the data."""
    if RANK == 1:
        gather_tensors(torch.ones(5))


def stop() -> None:
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def leave() -> None:
    if RANK == 1:
        os._exit(0)


def reduce_shapes() -> None:
    dist.all_reduce(torch.ones(3 + RANK))


def reduce_dtypes() -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.float64 if RANK else torch.float32))


FAULTS: dict[str, Callable[[], None]] = {
    "sleep": sleep,
    "lock": lock,
    "barrier": barrier,
    "gather": gather,
    "stop": stop,
    "leave": leave,
    "shapes": reduce_shapes,
    "dtypes": reduce_dtypes,
}
"""Kinds whose fault needs neither the model nor the Trainer."""


def set_layers(model: Any, kind: str, step: int) -> None:
    """Let rank 1 skip the last layer in one step, as it skips an expert without tokens."""
    if kind == "skip":
        if step == FAULT_STEP:
            note()
        skips = RANK == 1 and step == FAULT_STEP
        model.config.num_hidden_layers = SIZES["num_hidden_layers"] - skips


def train_loop(kind: str) -> None:
    accelerator = Accelerator()
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES, use_cache=False))
    collate = Collate(kind)
    loader = torch.utils.data.DataLoader(Samples(kind), 1, num_workers=collate.num_workers, collate_fn=collate)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    batches = iter(loader)
    if kind == "warm" and RANK == 0:
        note()
        model(**next(batches))
    for step in range(NUM_STEPS - 2 * (kind == "steps" and RANK == 1)):
        batch = next(batches)
        set_layers(model, kind, step)
        if step == FAULT_STEP and kind in FAULTS:
            note()
            FAULTS[kind]()
        loss = model(**batch).loss
        if kind == "nan" and step == FAULT_STEP and RANK == 1:
            note()
            break  # as if its loss were not finite
        accelerator.backward(loss)
        if step == FAULT_STEP and RANK == 0:
            alone(kind, accelerator, model, batch)
        optimizer.step()
        optimizer.zero_grad()
    note()


def alone(kind: str, accelerator: Accelerator, model: Any, batch: dict[str, torch.Tensor]) -> None:
    """Make a call of all ranks on rank 0 only."""
    note()
    if kind == "save":
        accelerator.save_state("saved")
    elif kind == "evaluate":
        with torch.no_grad():
            model.eval()(**batch)
    elif kind == "generate":
        model.generate(torch.tensor([[1, 2]]), max_new_tokens=2)
    elif kind == "clip":
        accelerator.clip_grad_norm_(model.parameters(), 1.0)


class Faults(TrainerCallback):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        set_layers(model, self.kind, state.global_step)
        if self.kind == "warm" and state.global_step == 0 and RANK == 0:
            note()
            model(**{name: tensor[None] for name, tensor in Samples("none")[0].items()})
        if state.global_step == FAULT_STEP and self.kind in FAULTS:
            note()
            FAULTS[self.kind]()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        if self.kind == "nan" and state.global_step == FAULT_STEP and RANK == 1:
            note()
            control.should_training_stop = True
        if state.global_step != FAULT_STEP or RANK != 0:
            return
        note()
        control.should_save, control.should_evaluate = self.kind == "save", self.kind == "evaluate"
        if self.kind == "generate":
            model.generate(torch.tensor([[1, 2]]), max_new_tokens=2)
        elif self.kind == "clip":
            self.trainer.accelerator.clip_grad_norm_(model.parameters(), 1.0)

    trainer: Any = None


def train_with_trainer(kind: str) -> None:
    num_steps = NUM_STEPS - 2 * (kind == "steps" and RANK == 1)
    clipping = {"max_grad_norm": 0.0} if kind == "clip" else {}
    data, collate = Samples(kind), Collate(kind)
    arguments = TrainingArguments(
        "out", max_steps=num_steps, per_device_train_batch_size=1, save_strategy="no", report_to=[],
        dataloader_num_workers=collate.num_workers, **clipping,
    )  # fmt: skip
    faults = Faults(kind)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, use_cache=False))
    evaluated = torch.utils.data.Subset(data, range(2))
    trainer = Trainer(
        model, arguments, data_collator=collate, train_dataset=data, eval_dataset=evaluated, callbacks=[faults]
    )
    faults.trainer = trainer
    trainer.train()
    note()
    if kind == "predict" and RANK == 0:
        trainer.predict(evaluated)


def train_slowly(seconds: float) -> None:
    """Train without faults, with one long phase after another, each on one rank or on all."""
    accelerator = Accelerator()
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES, use_cache=False))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    batch = {name: tensor[None] for name, tensor in Samples("none")[0].items()}
    deadline = time.monotonic() + seconds
    step = 0
    while True:
        # All ranks decide together when to end.
        go_on = torch.tensor(float(time.monotonic() < deadline))
        dist.broadcast(go_on, 0)
        if not go_on:
            break
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 20 == 0:
            _slow_phase(step // 20 % 7, accelerator, model, batch)


def _slow_phase(phase: int, accelerator: Accelerator, model: Any, batch: Any) -> None:
    print(f"phase {phase} at {time.strftime('%X')}", flush=True)
    if phase == 0 and RANK == 1:
        time.sleep(100)  # a slow data loader on one rank
    elif phase == 1:
        time.sleep(60)  # on all ranks
    elif phase == 2:
        accelerator.save_state("saved")
    elif phase == 3:
        with torch.no_grad():
            for _ in range(20):
                model(**batch)
                time.sleep(1 + RANK)
    elif phase == 4:
        for _ in range(3):
            model.generate(torch.tensor([[1, 2]]), max_new_tokens=4)
    elif phase == 5 and RANK == 0:
        _work(100)  # an evaluation of a model of its own
    elif phase == 6 and RANK == 1:
        torch.compile(torch.nn.Linear(4, 4))(torch.ones(2, 4))
        _work(30)


def _work(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.ones(64, 64) @ torch.ones(64, 64)


if __name__ == "__main__":
    if sys.argv[1] == "healthy":
        train_slowly(float(sys.argv[2]))
    elif sys.argv[2] == "trainer":
        train_with_trainer(sys.argv[1])
    else:
        train_loop(sys.argv[1])
