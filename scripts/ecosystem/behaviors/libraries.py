"""Losses, adapters and trainers of PEFT, TRL and sentence-transformers."""

from __future__ import annotations

import os
from typing import Any

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig, get_peft_model
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, Trainer
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from scripts.ecosystem.behaviors.common import argument_values, arguments, llama, texts

TARGETS = ["q_proj", "v_proj"]


def lora_resumed() -> Any:
    def make() -> Any:
        from transformers import set_seed

        set_seed(4)
        return get_peft_model(llama(), LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM"))

    values = {"save_strategy": "steps", "save_steps": 1}
    Trainer(model=make(), args=arguments(**values), train_dataset=texts()).train()
    trainer = Trainer(model=make(), args=arguments(**values), train_dataset=texts())
    trainer.train(resume_from_checkpoint="out/checkpoint-1")
    trainer.save_model("final")
    return trainer


def _rows(name: str) -> Dataset:
    return load_dataset("json", data_files=f"data/{name}/train.jsonl", split="train")


def _model(name: str = "models/llama") -> Any:
    return AutoModelForCausalLM.from_pretrained(name, dtype="float32")


def _trl_values(**changes: Any) -> dict[str, Any]:
    """Without TRL's default, bf16: autocast, as the reference has it, rounds other numbers than FSDP."""
    return argument_values(bf16=False, **changes)


def _ended(trainer: Any) -> Any:
    trainer.train()
    trainer.save_model("final")
    return {
        f"{row['step']} {name}": row[name]
        for row in trainer.state.log_history
        for name in ("loss", "grad_norm")
        if name in row
    }


def sft() -> Any:
    args = SFTConfig(**_trl_values(max_length=48))
    return _ended(SFTTrainer(model="models/llama", args=args, train_dataset=_rows("lm")))


def sft_of_chats_with_lora() -> Any:
    args = SFTConfig(**_trl_values(max_length=48, gradient_checkpointing=False))
    peft_config = LoraConfig(r=4, target_modules=TARGETS)
    return _ended(SFTTrainer(model=_model(), args=args, train_dataset=_rows("chat"), peft_config=peft_config))


def dpo() -> Any:
    args = DPOConfig(**_trl_values(max_length=48))
    tokenizer = AutoTokenizer.from_pretrained("models/llama")
    return _ended(
        DPOTrainer(_model(), _model(), args=args, train_dataset=_rows("preference"), processing_class=tokenizer)
    )


def dpo_ipo_without_reference_given() -> Any:
    args = DPOConfig(**_trl_values(max_length=48, loss_type=["ipo"]))
    return _ended(DPOTrainer("models/llama", args=args, train_dataset=_rows("preference")))


def reward() -> Any:
    args = RewardConfig(**_trl_values(max_length=48))
    model = AutoModelForSequenceClassification.from_pretrained("models/reward", dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained("models/reward")
    return _ended(RewardTrainer(model, args=args, train_dataset=_rows("reward"), processing_class=tokenizer))


def _embedded(loss_of: Any, rows: Dataset, **changes: Any) -> Any:
    model = SentenceTransformer("models/minilm", device="cpu")
    args = SentenceTransformerTrainingArguments(**argument_values(learning_rate=1e-4, **changes))
    trainer = SentenceTransformerTrainer(model=model, args=args, train_dataset=rows, loss=loss_of(model))
    trainer.train()
    model.save_pretrained("final")
    return trainer


def _scored() -> Dataset:
    return _rows("scored")


def _nli() -> Dataset:
    rows = _rows("scored").remove_columns("score")
    return rows.add_column("label", [number % 3 for number in range(len(rows))])


def softmax_loss() -> Any:
    def loss(model: Any) -> Any:
        made = losses.SoftmaxLoss(model, model.get_embedding_dimension(), num_labels=3)
        if os.environ.get("ACCELERATE_USE_FSDP") != "true":
            # DistributedDataParallel wraps the model alone, so each rank would train a classifier of its own.
            for parameter in made.classifier.parameters():
                parameter.register_hook(_mean_of_ranks)
        return made

    return _embedded(loss, _nli())


def _mean_of_ranks(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient / torch.distributed.get_world_size()
    torch.distributed.all_reduce(gradient)
    return gradient


def gist_embed_loss() -> Any:
    guide = SentenceTransformer("models/minilm", device="cpu")
    return _embedded(lambda model: losses.GISTEmbedLoss(model, guide), _rows("pairs"))


def denoising_auto_encoder_loss() -> Any:
    rows = _rows("pairs").rename_columns({"anchor": "damaged", "positive": "text"})
    return _embedded(lambda model: losses.DenoisingAutoEncoderLoss(model, tie_encoder_decoder=True), rows)


def matryoshka_loss() -> Any:
    return _embedded(
        lambda model: losses.MatryoshkaLoss(model, losses.CosineSimilarityLoss(model), [384, 128, 32]), _scored()
    )


def matryoshka_2d_loss() -> Any:
    def loss(model: Any) -> Any:
        return losses.Matryoshka2dLoss(model, losses.CosineSimilarityLoss(model), [384, 128], n_layers_per_step=-1)

    return _embedded(loss, _scored())


def adaptive_layer_loss() -> Any:
    def loss(model: Any) -> Any:
        return losses.AdaptiveLayerLoss(model, losses.CosineSimilarityLoss(model), n_layers_per_step=-1)

    return _embedded(loss, _scored())


def cosent_loss() -> Any:
    return _embedded(losses.CoSENTLoss, _scored())


def angle_loss() -> Any:
    return _embedded(losses.AnglELoss, _scored())


def contrastive_loss() -> Any:
    rows = _rows("classes")
    return _embedded(losses.OnlineContrastiveLoss, rows)


def mse_loss_of_a_teacher() -> Any:
    teacher = SentenceTransformer("models/minilm", device="cpu")
    rows = _rows("pairs")
    rows = rows.add_column("label", teacher.encode(rows["positive"], convert_to_numpy=True).tolist())
    return _embedded(losses.MSELoss, rows.remove_columns("positive"))


def two_losses_for_two_datasets() -> Any:
    model = SentenceTransformer("models/minilm", device="cpu")
    args = SentenceTransformerTrainingArguments(
        **argument_values(learning_rate=1e-4, multi_dataset_batch_sampler="round_robin", max_steps=4)
    )
    by_name = {"pairs": losses.MultipleNegativesRankingLoss(model), "scored": losses.CosineSimilarityLoss(model)}
    rows = {"pairs": _rows("pairs"), "scored": _scored()}
    trainer = SentenceTransformerTrainer(model=model, args=args, train_dataset=rows, loss=by_name)
    trainer.train()
    model.save_pretrained("final")
    return trainer
