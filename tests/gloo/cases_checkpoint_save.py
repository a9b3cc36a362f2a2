"""Cases that ranks run: checkpoints of real Trainers, read by the tools of torch, Transformers and PEFT."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from hf_fsdp_plugin.integrations.saving import manager
from tests.gloo.cases_trainer import gathered, losses, make_trainer


def read_dcp(folder: Path) -> dict[str, Any]:
    """Read everything with torch's reader, as ``accelerate merge-weights`` does."""
    state: dict[str, Any] = {}
    _load_state_dict(state, storage_reader=FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


def train_and_save(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """Train three steps, save, and return the state in memory."""
    trainer = make_trainer(output_dir, save_strategy="steps", save_steps=3, max_steps=3, **arguments)
    trainer.train()
    options = StateDictOptions(full_state_dict=True)
    optimizer = get_optimizer_state_dict(trainer.model, trainer.optimizer.optimizer, options=options)
    return {
        "weights": gathered(trainer),
        "optimizer": optimizer if dist.get_rank() == 0 else {},
        "asynchronous": manager.saved_asynchronously.get(trainer.model),
    }


def train_mixture(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """Train a mixture of experts. Transformers keeps the experts in one tensor, and stores them separately."""
    from transformers import MixtralConfig, MixtralForCausalLM

    from tests.gloo import cases_trainer

    def tiny_mixtral() -> torch.nn.Module:
        torch.manual_seed(0)
        config = MixtralConfig(
            vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64, use_cache=False,
        )  # fmt: skip
        return MixtralForCausalLM(config)

    cases_trainer.MODELS["mixtral"] = tiny_mixtral
    trainer = make_trainer(output_dir, "mixtral", save_strategy="steps", save_steps=3, max_steps=3, **arguments)
    trainer.train()
    trainer.save_model(str(Path(output_dir) / "final"))
    dist.barrier()
    return gathered(trainer)


def train_with_only_models(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """Train with ``save_only_model`` and ``load_best_model_at_end``, which the Trainer refuses for FSDP."""
    trainer = make_trainer(
        output_dir, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2, max_steps=4,
        save_only_model=True, load_best_model_at_end=True, metric_for_best_model="eval_loss", save_total_limit=1,
        **arguments,
    )  # fmt: skip
    trainer.train()
    return {
        "best": trainer.state.best_metric,
        "again": trainer.evaluate()["eval_loss"],
        "best_checkpoint": trainer.state.best_model_checkpoint,
        "weights": gathered(trainer),
    }


OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Count the collectives of objects and the all-reduces and barriers that this rank calls through torch."""
    calls: Counter[str] = Counter()

    def counting(name: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        return call

    with mock.patch.multiple(dist, **{name: counting(name) for name in (*OBJECTS, "all_reduce", "barrier")}):
        yield calls


def count_calls_of_saves(output_dir: str, **arguments: Any) -> list[dict[str, int]]:
    """Return the calls of the second save, and of what it waits for, in a Trainer and in ``save_state``."""
    trainer = make_trainer(output_dir, save_strategy="no", max_steps=2, **arguments)
    trainer.train()
    found = []
    for save in (
        lambda: trainer._save_checkpoint(trainer.model, trial=None),
        lambda: trainer.accelerator.save_state(str(Path(output_dir) / "state")),
    ):
        save()
        with counted_calls() as calls:
            save()
            found.append({name: calls[name] for name in (*OBJECTS, "all_reduce", "barrier")})
    manager.wait()
    return found


def load_own_checkpoint(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """Train, load the model of the checkpoint on all ranks two times, and again after the checkpoint was replaced."""
    from transformers import AutoModelForCausalLM

    run = Path(output_dir)
    results: dict[str, Any] = {"loaded": [], "expected": [], "copies": []}
    for learning_rate in (1e-3, 1e-2):
        trainer = make_trainer(
            output_dir, save_strategy="steps", save_steps=2, max_steps=2, learning_rate=learning_rate, **arguments
        )
        trainer.train()
        expected = gathered(trainer)
        for _ in range(2):
            model = AutoModelForCausalLM.from_pretrained(run / "checkpoint-2")
            results["loaded"].append({name: tensor.clone() for name, tensor in model.state_dict().items()})
            results["expected"].append(expected)
            dist.barrier()
            results["copies"].append({path.name: path.stat().st_ino for path in run.glob(".checkpoint-2.merged-*")})
    return results


def train_adapters(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """Train LoRA adapters for three steps, repeat the last step from a checkpoint, and export."""
    from peft import PeftModel

    from tests.support.tiny import tiny_llama

    schedule = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3, "fp16": False, **arguments}
    whole = make_trainer(output_dir, "lora", **schedule)
    whole.train()
    resumed = make_trainer(output_dir, "lora", **schedule)
    resumed.train(resume_from_checkpoint=str(Path(output_dir) / "checkpoint-2"))
    resumed.save_model(str(Path(output_dir) / "final"))
    dist.barrier()
    logits = {}
    tokens = torch.arange(8)[None]
    for name in ("final", "checkpoint-3"):
        loaded = PeftModel.from_pretrained(tiny_llama(), str(Path(output_dir) / name))
        logits[name] = loaded(input_ids=tokens).logits.detach()
    return {
        "losses": (losses(whole), losses(resumed)),
        "live": resumed.model(input_ids=tokens).logits.detach().clone(),
        "loaded": logits,
    }
