"""The ranks of host_waits.py: run the cases of one FSDP version, and write the waits of rank 0 as JSON."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

NUM_STEPS = 6
SETTINGS = {
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_USE_ORIG_PARAMS": "true",
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_MIXED_PRECISION": "bf16",
}
STEP_CASES: dict[str, dict[str, str]] = {
    "step": {},
    "step, clipping": {"clip": "1"},
    "step, accumulation": {"accumulation": "2", "clip": "1"},
    "step, fp16": {"ACCELERATE_MIXED_PRECISION": "fp16", "clip": "1"},
    "step, offload": {"FSDP_OFFLOAD_PARAMS": "true"},
    "step, activation checkpointing": {"FSDP_ACTIVATION_CHECKPOINTING": "true", "clip": "1"},
    "step, fused optimizer": {"fused": "1", "clip": "1"},
    "step, logging": {"log": "1", "clip": "1"},
}


def main(who: str, version: int, folder: Path, only: list[str]) -> None:
    os.environ.update(SETTINGS, FSDP_VERSION=str(version))
    import torch.distributed as dist

    found: dict[str, Any] = {}

    def wanted(name: str) -> bool:
        return not only or any(word in name for word in only)

    for name, options in STEP_CASES.items():
        if wanted(name):
            found[name] = {"per_step": True, "waits": steps(who, options)}
    for name, num_layers in (("", 2), (", 6 layers", 6)):
        if any(wanted(phase + name) for phase in ("load", "save", "save, asynchronous", "resume")):
            for phase, waits in load_save_resume(who, folder / f"layers-{num_layers}", num_layers, {}).items():
                found[f"{phase}{name}"] = {"per_step": False, "waits": [waits]}
    if dist.get_rank() == 0:
        (folder / "waits.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def environment(who: str, options: dict[str, str]) -> Iterator[None]:
    """Set variables for one case, in which the plugin is installed or not, and reset Accelerate's state afterwards."""
    from accelerate.state import AcceleratorState, GradientState
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    import hf_fsdp_plugin

    # Its default is CUDA, and Accelerate passes no device: the scaler of stock FSDP1 would be disabled.
    ShardedGradScaler.__init__.__defaults__ = ("npu", *ShardedGradScaler.__init__.__defaults__[1:])
    before = dict(os.environ)
    os.environ.update({name: value for name, value in options.items() if name.isupper()})
    if who == "plugin":
        hf_fsdp_plugin.install()
    try:
        yield
    finally:
        hf_fsdp_plugin.uninstall()
        os.environ.clear()
        os.environ.update(before)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        gc.collect()


def places(of: Callable[[], Any]) -> list[str]:
    """Call a function, and return kind and place of each host wait of the main thread."""
    import torch_npu

    with torch_npu.HostWaits() as waits:
        of()
    in_main_thread = [wait for wait in waits.events if "threading.py" not in wait.stack]
    return [f"{wait.kind} | {' < '.join(wait.stack.split(' < ')[:4])}" for wait in in_main_thread]


def model_of(num_layers: int = 2) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=num_layers, num_key_value_heads=4))


def batches(device: Any) -> Iterator[dict[str, Any]]:
    import torch

    while True:
        ids = (torch.arange(64, device=device).view(2, 32) * 3) % 96
        yield {"input_ids": ids, "labels": ids}


def steps(who: str, options: dict[str, str]) -> list[list[str]]:
    """Return the waits of each optimizer step of a training loop with Accelerate."""
    import torch
    from accelerate import Accelerator

    with environment(who, options):
        accumulation = int(options.get("accumulation", "1"))
        accelerator = Accelerator(gradient_accumulation_steps=accumulation)
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=bool(options.get("fused")))
        model, optimizer = accelerator.prepare(model, optimizer)
        data = batches(accelerator.device)

        def step() -> None:
            for _ in range(accumulation):
                batch = next(data)
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients and options.get("clip"):
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
            if options.get("log"):
                accelerator.print(f"loss {loss.item():.4f}")

        return [places(step) for _ in range(NUM_STEPS)]


def load_save_resume(who: str, folder: Path, num_layers: int, settings: dict[str, str]) -> dict[str, list[str]]:
    """Return the waits of loading a saved model with `prepare`, of saves, and of resuming."""
    import torch
    import torch.distributed as dist
    from accelerate import Accelerator
    from transformers import LlamaForCausalLM

    found: dict[str, list[str]] = {}
    kinds = {"save": {}} | ({"save, asynchronous": {"FSDP_ASYNC_SAVE": "true"}} if who == "plugin" else {})
    for name, options in kinds.items():
        with environment(who, settings | options):
            accelerator = Accelerator()
            if accelerator.is_main_process and not (folder / "model").exists():
                model_of(num_layers).save_pretrained(folder / "model")
            dist.barrier()
            objects: list[Any] = []

            def load(accelerator: Any = accelerator, objects: list[Any] = objects) -> None:
                model = LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
                optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
                objects += accelerator.prepare(model, optimizer)

            found.setdefault("load", places(load))
            model, optimizer = objects
            data = batches(accelerator.device)
            for _ in range(2):  # the first steps create the optimizer's state
                accelerator.backward(model(**next(data)).loss)
                optimizer.step()
                optimizer.zero_grad()
            saved = [str(folder / name / number) for number in ("first", "second")]
            accelerator.save_state(saved[0])  # allocates the buffers
            found[name] = places(partial(accelerator.save_state, saved[1]))
            accelerator.wait_for_everyone()
            found.setdefault("resume", places(partial(accelerator.load_state, saved[1])))
    return found


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
