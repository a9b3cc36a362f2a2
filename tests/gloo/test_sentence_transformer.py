"""A Trainer whose class writes checkpoints with its own methods: all of its folders can be loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

import hf_fsdp_plugin as hfp
from tests.support.matrices import slow
from tests.support.ranks import Ranks, on_accelerator, reset_accelerate
from tests.support.sentence_transformer_runs import WORDS, losses, make_base, make_model
from tests.support.submodule_calls_runs import encode
from tests.support.tiny import parallel_config, tiny_bert
from tests.support.trl_runs import write_model


class RecordSaves(TrainerCallback):
    """Gathers the weights at each save."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.weights[state.global_step] = gathered(self.trainer)


def gathered(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.accelerator.get_state_dict(trainer.model).items()}


pytest.importorskip("sentence_transformers")


def assert_loads(folder: Path, expected: dict[str, torch.Tensor], base: Path) -> None:
    """Load a folder with sentence-transformers, and compare weights and embeddings with those in memory."""
    from sentence_transformers import SentenceTransformer

    loaded = SentenceTransformer(str(folder), device="cpu")
    found = loaded.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    in_memory = make_model(base)
    in_memory.load_state_dict(expected)
    sentences = ["the red cat sings", "a small house near the bird"]
    assert (loaded.encode(sentences) == in_memory.encode(sentences)).all()


def make_trainer(folder: Path, version: int, kind: str, **arguments: Any) -> tuple[Any, RecordSaves]:
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss

    model = make_model(folder / "base")
    rows = [(f"the {WORDS[i % 8]} cat runs", f"a {WORDS[(i * 3) % 8]} dog sleeps", (i % 5) / 4) for i in range(32)]
    first, second, scores = zip(*rows, strict=True)
    data = Dataset.from_dict({"sentence1": list(first), "sentence2": list(second), "score": list(scores)})
    args = SentenceTransformerTrainingArguments(
        output_dir=str(folder / "run"), use_cpu=True, per_device_train_batch_size=4, max_steps=4, learning_rate=1e-2,
        logging_steps=1, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2, report_to="none",
        disable_tqdm=True, seed=3, lr_scheduler_type="constant", fsdp="full_shard auto_wrap",
        fsdp_config={
            "fsdp_version": version, "state_dict_type": kind, "transformer_layer_cls_to_wrap": ["BertLayer"],
        },
        **arguments,
    )  # fmt: skip
    record = RecordSaves()
    trainer = SentenceTransformerTrainer(
        model=model, args=args, train_dataset=data, eval_dataset=data, loss=CosineSimilarityLoss(model),
        callbacks=[record],
    )  # fmt: skip
    record.trainer = trainer
    return trainer, record


def train(output: str, version: int, kind: str) -> dict[str, Any]:
    """Train, save, load the best model, and repeat the second half from a checkpoint."""
    folder = Path(output)
    reset_accelerate()
    make_base(folder / "base")
    hfp.install({"use_cpu": not on_accelerator(), "distributed_type": "FSDP", "fsdp_config": {"fsdp_version": version}})
    trainer, record = make_trainer(folder, version, kind, load_best_model_at_end=True)
    trainer.train()
    best = gathered(trainer)
    trainer.save_model(str(folder / "final"))
    trainer.model.save_pretrained(str(folder / "direct"))
    dist.barrier()
    resumed, _ = make_trainer(folder, version, kind)
    resumed.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-2"))
    return {
        "losses": (losses(trainer), losses(resumed)),
        "saved": record.weights,
        "best": best,
        "best_step": int(trainer.state.best_model_checkpoint.rpartition("-")[2]),
        "resumed": gathered(resumed),
    }


@pytest.mark.parametrize(
    ("version", "kind"),
    [
        slow(1, "SHARDED"),
        slow(2, "FULL"),
        slow(2, "SHARDED"),
    ],
)
def test_every_saved_folder_loads(two_ranks: Ranks, tmp_path: Path, version: int, kind: str) -> None:
    result = two_ranks.run(train, str(tmp_path), version, kind)[0]
    base = tmp_path / "base"
    assert result["saved"].keys() == {2, 4}
    for step, weights in result["saved"].items():
        assert_loads(tmp_path / "run" / f"checkpoint-{step}", weights, base)
    best = result["saved"][result["best_step"]]
    assert all(torch.equal(result["best"][name], tensor) for name, tensor in best.items())
    assert_loads(tmp_path / "final", result["best"], base)
    assert_loads(tmp_path / "direct", result["best"], base)
    whole, resumed = result["losses"]
    assert resumed[-2:] == pytest.approx(whole[-2:], rel=1e-6)
    last = result["saved"][4]
    assert all(torch.allclose(result["resumed"][name], tensor, atol=1e-6) for name, tensor in last.items())


@pytest.mark.parametrize("version", [1, 2])
def test_sentence_transformer_encodes_as_in_one_process(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    write_model(str(tmp_path), tiny_bert())
    config = parallel_config("full_shard", version, 2, fsdp_transformer_layer_cls_to_wrap="BertLayer")
    for found, expected in two_ranks.run(encode, config, str(tmp_path)):
        torch.testing.assert_close(found, expected)
