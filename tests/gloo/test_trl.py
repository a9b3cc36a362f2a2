"""TRL's Trainers with a reference model have the losses of one process, and the reference model obeys the config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_fsdp_plugin as hfp
from tests.support.matrices import FSDP1_RACE
from tests.support.ranks import Ranks, on_accelerator
from tests.support.tiny import parallel_config, tiny_llama
from tests.support.training import differing
from tests.support.trl_runs import write_model

NUM_STEPS = 3

GLOBAL_BATCH = 4


pytest.importorskip("trl")

pytest.importorskip("peft")

SLOW = pytest.mark.slow

VERSIONS = pytest.mark.parametrize("version", [1, 2])

UNITS = {
    1: ["model.layers.0", "model.layers.1", "model.layers.2", ""],
    2: ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "model.norm + lm_head"],
}


def config_of(version: int, **settings: Any) -> dict[str, Any]:
    return parallel_config("full_shard", version, 2, fsdp_transformer_layer_cls_to_wrap="LlamaDecoderLayer", **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("trl")
    write_model(str(path))
    return str(path)


def reference_model() -> torch.nn.Module:
    """A llama with other weights than the trained one."""
    model = tiny_llama(pad_token_id=0, eos_token_id=1, bos_token_id=None)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model


def text(seed: int, length: int) -> str:
    numbers = torch.randint(0, 93, (length,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{number}" for number in numbers.tolist())


def config_arguments(folder: str, world_size: int, **arguments: Any) -> dict[str, Any]:
    if on_accelerator():  # TRL asks for device_map="auto" in worlds of other devices than GPUs
        arguments = {"model_init_kwargs": {"device_map": None}, **arguments}
    return {
        "output_dir": f"{folder}/out", "per_device_train_batch_size": GLOBAL_BATCH // world_size,
        "max_steps": NUM_STEPS, "learning_rate": 1e-2, "logging_steps": 1, "report_to": "none", "disable_tqdm": True,
        "use_cpu": True, "bf16": False, "save_strategy": "no", "gradient_checkpointing": False, "seed": 3, **arguments,
    }  # fmt: skip


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")


def install(folder: str, config: dict[str, Any] | None) -> int:
    """Install the plugin if a config is given. Return the number of ranks that share each global batch."""
    if config is not None:
        hfp.install(config, report=f"{folder}/report.json")
    return dist.get_world_size() if dist.is_initialized() else 1


def result(trainer: Any, folder: str, config: dict[str, Any] | None) -> dict[str, Any]:
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    report = json.loads(Path(f"{folder}/report.json").read_text()) if config is not None else None
    return {"losses": losses, "report": report}


def train_dpo(folder: str, config: dict[str, Any] | None, how: str = "reference", **arguments: Any) -> dict[str, Any]:
    """Train with DPO.

    Args:
        config: ``None`` for a training without the plugin.
        how: where the reference probabilities are from: a ``reference`` model, ``path`` for the model's own first
            weights (``sync``: mixed with the trained weights after each step), or ``peft`` for disabled adapters.
    """
    world_size = install(folder, config)
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    rows = [
        {"prompt": text(i, 3), "chosen": text(100 + i, 4), "rejected": text(200 + i, 5)}
        for i in range(GLOBAL_BATCH * NUM_STEPS)
    ]
    if how == "sync":
        arguments = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5, **arguments}
    trainer = DPOTrainer(
        model=folder,
        ref_model=reference_model() if how == "reference" else None,
        args=DPOConfig(**config_arguments(folder, world_size, max_length=16, beta=0.5, **arguments)),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=lora() if how == "peft" else None,
    )
    return result(trainer, folder, config)


@pytest.fixture(scope="module")
def dpo_reference(folder: str, one_rank: Ranks) -> dict[str, Any]:
    return {how: one_rank.run(train_dpo, folder, None, how)[0] for how in ("reference", "path", "sync", "peft")}


@pytest.mark.parametrize(
    "how", ["reference", "peft", pytest.param("path", marks=SLOW), pytest.param("sync", marks=SLOW)]
)
@VERSIONS
def test_dpo_has_losses_of_one_process(
    two_ranks: Ranks, folder: str, dpo_reference: dict[str, Any], version: int, how: str
) -> None:
    config = config_of(version, fsdp_cpu_ram_efficient_loading=how in ("path", "sync"))
    run = two_ranks.run(train_dpo, folder, config, how)[0]
    assert run["losses"] == pytest.approx(dpo_reference[how]["losses"], rel=1e-4)
    assert differing(run["report"]) == []
    others = run["report"]["other_models"]
    assert len(others) == (how != "peft")
    for other in others:
        assert [unit["name"] for unit in other["units"] if unit["num_params"]] == UNITS[version]
        assert differing(other) == []
        assert all(unit["num_frozen"] == unit["num_params"] for unit in other["units"])


def num_even(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(int(word[1:]) % 2 == 0 for word in one.split() if word[1:].isdigit())) for one in completions]


def train_grpo(folder: str, config: dict[str, Any] | None, how: str = "path", **arguments: Any) -> dict[str, Any]:
    """Train with GRPO. The reference has the model's first weights (``path``), or disabled adapters (``peft``)."""
    world_size = install(folder, config)
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer(
        model=folder,
        reward_funcs=num_even,
        args=GRPOConfig(
            **config_arguments(
                folder, world_size, num_generations=2, max_completion_length=6, beta=0.5, num_iterations=2, **arguments
            )
        ),
        train_dataset=Dataset.from_list([{"prompt": text(i, 3)} for i in range(GLOBAL_BATCH * NUM_STEPS)]),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=lora() if how == "peft" else None,
    )
    return result(trainer, folder, config)


@pytest.mark.parametrize("how", ["path", pytest.param("peft", marks=SLOW)])
@pytest.mark.parametrize("version", [pytest.param(1, marks=FSDP1_RACE), 2])
def test_grpo_has_losses_of_unsharded_ranks(two_ranks: Ranks, folder: str, version: int, how: str) -> None:
    expected = two_ranks.run(train_grpo, folder, None, how)[0]
    run = two_ranks.run(train_grpo, folder, config_of(version), how)[0]
    assert any(abs(loss) > 1e-3 for loss in expected["losses"])
    assert run["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert len(run["report"]["other_models"]) == (how != "peft")
