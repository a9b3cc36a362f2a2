"""Losses of sentence-transformers that have parameters or replace forwards train like an unsharded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_fsdp_plugin as hfp
from tests.support.matrices import slow
from tests.support.ranks import RankError, Ranks, on_accelerator, reset_accelerate
from tests.support.sentence_transformer_runs import WORDS, losses, make_base, make_model

pytest.importorskip("sentence_transformers")


def begin(folder: str, version: int) -> None:
    reset_accelerate()
    make_base(Path(folder) / "base")
    if version:
        hfp.install(
            {"use_cpu": not on_accelerator(), "distributed_type": "FSDP", "fsdp_config": {"fsdp_version": version}}
        )


def with_larger_weights(model: Any, seed: int = 2) -> Any:
    """Make the embeddings of different sentences differ, so that losses of pairs have gradients."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def make_loss(case: str, base: Path) -> tuple[Any, Any]:
    """Return a model and a loss of it."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses as library
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    model, guide = with_larger_weights(make_model(base)), make_model(base)
    torch.manual_seed(5)
    if case == "softmax":
        return model, library.SoftmaxLoss(model, 16, 3)
    if case == "gist":
        return model, library.GISTEmbedLoss(model, guide=with_larger_weights(guide, seed=3))
    if case.startswith("denoising"):
        model = SentenceTransformer(modules=[Transformer(str(base), max_seq_length=16), Pooling(32)], device="cpu")
        is_tied = case == "denoising_tied"
        name = None if is_tied else str(base)
        return model, library.DenoisingAutoEncoderLoss(model, decoder_name_or_path=name, tie_encoder_decoder=is_tied)
    ranking = library.MultipleNegativesRankingLoss(model)
    if case == "adaptive":
        return model, library.AdaptiveLayerLoss(model, ranking, n_layers_per_step=-1)
    return model, library.Matryoshka2dLoss(model, ranking, [16, 8], n_layers_per_step=-1, n_dims_per_step=-1)


def make_trainer(folder: str, version: int, case: str, kind: str = "FULL", **arguments: Any) -> Any:
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    model, loss = make_loss(case, Path(folder) / "base")
    rows = [(f"the {WORDS[i % 8]} cat runs", f"a {WORDS[(i * 3) % 8]} dog sleeps", i % 3) for i in range(32)]
    columns = dict(zip(("first", "second", "label"), map(list, zip(*rows, strict=True)), strict=True))
    if case != "softmax":
        del columns["label"]
    settings = {"fsdp_version": version, "state_dict_type": kind, "transformer_layer_cls_to_wrap": ["BertLayer"]}
    if version:
        arguments |= {"fsdp": "full_shard auto_wrap", "fsdp_config": settings}
    defaults = {
        "use_cpu": True, "per_device_train_batch_size": 8 // dist.get_world_size(), "max_steps": 4,
        "learning_rate": 0.05, "optim": "sgd", "optim_args": "momentum=0.9", "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "seed": 3, "lr_scheduler_type": "constant",
    }  # fmt: skip
    args = SentenceTransformerTrainingArguments(output_dir=str(Path(folder) / "run"), **{**defaults, **arguments})
    return SentenceTransformerTrainer(model=model, args=args, train_dataset=Dataset.from_dict(columns), loss=loss)


def train(folder: str, version: int, case: str) -> dict[str, Any]:
    """Train four steps on a global batch of eight. Version 0 is a Trainer without FSDP."""
    begin(folder, version)
    trainer = make_trainer(folder, version, case)
    trainer.train()
    return {"losses": losses(trainer)}


@pytest.mark.cpu_ranks("the losses fail with DistributedDataParallel on devices, which copies the dicts they share")
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("case", ["adaptive", slow("gist"), slow("matryoshka")])
def test_loss_equals_unsharded_ranks(two_ranks: Ranks, tmp_path: Path, version: int, case: str) -> None:
    expected = two_ranks.run(train, str(tmp_path), 0, case)[0]
    result = two_ranks.run(train, str(tmp_path), version, case)[0]
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert len(set(expected["losses"])) == 4


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("case", ["softmax", slow("denoising"), "denoising_tied"])
def test_loss_with_parameters_is_refused(two_ranks: Ranks, tmp_path: Path, version: int, case: str) -> None:
    with pytest.raises(RankError, match="FSDP-E604"):
        two_ranks.run(train, str(tmp_path), version, case)
