"""Scripts in `scripts/`, written as the documentation of the libraries is. None of them knows the plugin."""

from __future__ import annotations

from typing import Any

from scripts.ecosystem.cases.arguments import BEST, BF16, EVALUATED, PEFT_FSDP1, SEQUENTIAL, TRAINER
from scripts.ecosystem.model import TWO_PROCESSES, Case


def _case(name: str, script: str, arguments: str = "", *, package: str = "transformers", **more: Any) -> Case:
    given = f"{TRAINER} {arguments}".strip()
    return Case(name=name, package=package, script=f"{{here}}/{script}.py", arguments=given, **more)


def _sentence(variant: str, arguments: str = "", **more: Any) -> Case:
    return _case(
        f"SentenceTransformerTrainer, {variant}",
        "sentence_transformer",
        arguments,
        package="sentence_transformers",
        model="sentence_transformer",
        start="minilm",
        **more,
    )


def _seq2seq(variant: str, arguments: str = "", **more: Any) -> Case:
    given = f"{EVALUATED} {SEQUENTIAL} --predict_with_generate true --generation_max_length 12 {arguments}"
    # The Trainer multiplies T5's loss by the number of processes, with every launcher.
    two: dict[str, Any] = {"compared": TWO_PROCESSES, "model": "seq2seq", "start": "t5"}
    return _case(f"Seq2SeqTrainer, {variant}", "seq2seq", given, **two, **more)


def _peft(method: str, variant: str = "", **more: Any) -> Case:
    arguments = f"--method {method} {SEQUENTIAL}"
    name = f"Trainer with PEFT, {method}{variant and ', '}{variant}"
    return _case(name, "peft_trainer", arguments, package="peft", model="adapter", **more)


def _saved(variant: str, form: str, **more: Any) -> Case:
    default: dict[str, Any] = {"model": "classification", "start": "bert"}
    return Case(
        name=f"save_pretrained {variant}",
        package="accelerate",
        script="{here}/save_loop.py",
        arguments=f"--form {form} --batch_size {{batch}}",
        **{**default, **more},
    )


CASES = [
    _sentence("ranking loss", f"{EVALUATED} --per_device_eval_batch_size {{batch}} --save_steps 2"),
    _sentence("ranking loss, final save", saved="out/final"),
    _sentence("cached ranking loss", "--loss cached"),
    _sentence("cosine similarity", f"--loss cosine {BEST}"),
    _case(
        "CrossEncoderTrainer",
        "cross_encoder",
        f"{EVALUATED} --save_steps 2",
        package="sentence_transformers",
        model="cross_encoder",
        start="bert-ranker",
    ),
    _seq2seq("predict with generate"),
    _seq2seq("predict with generate, bf16", "--bf16 true", **BF16),
    _case(
        "Trainer, generation in a callback",
        "generate_callback",
        f"{EVALUATED} {SEQUENTIAL}",
        model="causal_lm",
        start="llama",
    ),
    _case(
        "Trainer, DistributedConfig",
        "sharded_loading",
        SEQUENTIAL,
        model="causal_lm",
        start="llama",
        versions=(2,),
        alone="--fsdp_size 1",
    ),
    _peft("lora"),
    _peft("lora", "PEFT's FSDP configuration, final save", saved="out/final", settings_1=PEFT_FSDP1),
    _peft("dora"),
    _peft("modules_to_save"),
    _peft("ia3"),
    _peft("prompt"),
    _peft("adalora", refused={1: "FSDP-E630", 2: "FSDP-E630"}, note="AdaLoRA changes its shapes while it trains"),
    _saved("on all ranks", "all"),
    _saved("with state_dict", "state_dict"),
    _saved("after evaluation", "after_eval"),
    _saved("of a PEFT model", "peft", needs=("peft",), model="adapter", start=""),
    _saved(
        "on one rank",
        "one",
        refused={1: "FSDP-E670", 2: "FSDP-E670"},
        note="all ranks must make the call",
    ),
]
