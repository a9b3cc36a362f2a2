"""Makes the models, tokenizers and datasets of the suite in a folder, from installed packages only.

Models are small ones of real architectures with random weights, and all-MiniLM-L6-v2. The tokenizers are those of
SmolLM2 and MiniLM. Texts are from the Python language reference. Every file is the same in every run.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

VERSION = "3"  # change it when anything below changes: the folder is then made again, and so are all references
_HIDDEN = 64
_SIZES = {"hidden_size": _HIDDEN, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}

# The scripts of Accelerate name their model and dataset. These folders are found where the hub would be asked.
_HUB_NAMES = {
    "bert-base-cased": "models/bert",
    "hf-internal-testing/mrpc-bert-base-cased": "models/bert",
    "HuggingFaceTB/SmolLM-360M": "models/llama",
}

_REWARDS = '''"""Reward functions for GRPO and RLOO."""


def vowels(completions, **kwargs):
    """Return the share of vowels of each completion."""
    return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in completions]
'''

_METRIC = '''"""A metric, under the name by which scripts load it."""

import datasets
import evaluate


class {name}(evaluate.Metric):
    def _info(self):
        features = datasets.Features({features})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
{body}
'''
_NUMBERS = '{"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}'
_TAGS = '{kind: datasets.Sequence(datasets.Value("string")) for kind in ("predictions", "references")}'
_ANSWERS = (
    '{"predictions": {"id": datasets.Value("string"), "prediction_text": datasets.Value("string")}, "references": '
    '{"id": datasets.Value("string"), "answers": datasets.Sequence({"text": datasets.Value("string"), '
    '"answer_start": datasets.Value("int32")})}}'
)
_ACCURACY = "sum(a == b for a, b in zip(predictions, references)) / len(references)"
_METRICS = {
    "accuracy": (_NUMBERS, f'        return {{"accuracy": {_ACCURACY}}}'),
    "glue": (
        _NUMBERS,
        "        from sklearn.metrics import f1_score\n\n"
        f'        return {{"accuracy": {_ACCURACY}, "f1": float(f1_score(references, predictions))}}',
    ),
    "seqeval": (
        _TAGS,
        "        from seqeval.metrics import accuracy_score, f1_score, precision_score, recall_score\n\n"
        '        functions = {"precision": precision_score, "recall": recall_score, "f1": f1_score, '
        '"accuracy": accuracy_score}\n'
        '        return {f"overall_{name}": float(get(references, predictions)) for name, get in functions.items()}',
    ),
    "squad": (
        _ANSWERS,
        '        pairs = zip((row["prediction_text"] for row in predictions), references)\n'
        '        found = [text in row["answers"]["text"] for text, row in pairs]\n'
        '        return {"exact_match": 100 * sum(found) / len(found)}',
    ),
}

_SPLITS = {"train": slice(0, 48), "validation": slice(48, 64), "test": slice(64, 72)}

# SmolLM2's template, with the marks by which TRL finds the assistant's tokens.
_TRAINING_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{{ '\n' }}{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _card(name: str) -> str:
    """Return the card of a dataset with one configuration, whose files are in the folder of its name."""
    files = "".join(f"  - {{split: {split}, path: {name}/{split}.jsonl}}\n" for split in _SPLITS)
    return f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{files}---\n"


def make_assets(folder: Path) -> None:
    """Make all files below `folder`, unless they are there."""
    done = folder / "version"
    if done.exists() and done.read_text() == VERSION:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _make_models(folder / "models")
    _make_datasets(folder)
    (folder / "suite_rewards.py").write_text(_REWARDS)
    (folder / "templates").mkdir()
    (folder / "templates" / "training.jinja").write_text(_TRAINING_TEMPLATE)
    _make_metrics(folder)
    for name, target in _HUB_NAMES.items():
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(folder / target, link.parent))
    done.write_text(VERSION)


def make_fresh(folder: Path, target: Path) -> None:
    """Empty `target`, the working folder of a script, and link everything in `folder` into it."""
    shutil.rmtree(target, ignore_errors=True)
    link_assets(folder, target)


def link_assets(folder: Path, target: Path) -> None:
    """Link everything in `folder` into `target`, the working folder of a script."""
    target.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        (target / path.name).symlink_to(path)


def _make_models(folder: Path) -> None:
    import torch
    import transformers

    from scripts.data import MINILM, SMOLLM2, load_tokenizer, locate

    smol, mini = load_tokenizer(SMOLLM2), load_tokenizer(MINILM)
    special = {name: getattr(smol, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    llama = {**_SIZES, **special, "vocab_size": len(smol), "max_position_embeddings": 512, "tie_word_embeddings": True}
    bert = {**_SIZES, "vocab_size": len(mini), "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    t5 = {
        "vocab_size": len(smol),
        "d_model": _HIDDEN,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
        "pad_token_id": smol.pad_token_id,
        "eos_token_id": smol.eos_token_id,
        "decoder_start_token_id": smol.pad_token_id,
    }
    models: dict[str, tuple[Any, Any, Any]] = {
        "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**llama), smol),
        "teacher": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**{**llama, "num_hidden_layers": 3}), smol),
        "qwen3": (
            transformers.Qwen3ForCausalLM,
            transformers.Qwen3Config(**llama, num_key_value_heads=2, head_dim=16),
            smol,
        ),
        "reward": (
            transformers.LlamaForSequenceClassification,
            transformers.LlamaConfig(**llama, num_labels=1),
            smol,
        ),
        "bert": (transformers.BertForSequenceClassification, transformers.BertConfig(**bert, num_labels=2), mini),
        "bert-ranker": (
            transformers.BertForSequenceClassification,
            transformers.BertConfig(**bert, num_labels=1),
            mini,
        ),
        "bert-lm": (transformers.BertForMaskedLM, transformers.BertConfig(**bert), mini),
        "bert-tags": (transformers.BertForTokenClassification, transformers.BertConfig(**bert, num_labels=5), mini),
        "bert-answers": (transformers.BertForQuestionAnswering, transformers.BertConfig(**bert), mini),
        "bert-choice": (transformers.BertForMultipleChoice, transformers.BertConfig(**bert), mini),
        "t5": (transformers.T5ForConditionalGeneration, transformers.T5Config(**t5), smol),
    }
    for seed, (name, (model_class, config, tokenizer)) in enumerate(models.items()):
        torch.manual_seed(seed)
        model_class(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    _link_without_dropout(Path(locate(MINILM)), folder / "minilm")


def _link_without_dropout(source: Path, target: Path) -> None:
    """Link the files of a model folder, and copy its config with dropout off: the ranks of a run draw other masks."""
    target.mkdir()
    for path in source.iterdir():
        if path.name != "config.json":
            (target / path.name).symlink_to(path)
    config = json.loads((source / "config.json").read_text())
    config |= {name: 0.0 for name in config if name.endswith("dropout_prob")}
    (target / "config.json").write_text(json.dumps(config))


def _make_metrics(folder: Path) -> None:
    for name, (features, body) in _METRICS.items():
        (folder / name).mkdir()
        text = _METRIC.replace("{name}", name.title()).replace("{features}", features).replace("{body}", body)
        (folder / name / f"{name}.py").write_text(text)


def _make_datasets(folder: Path) -> None:
    from pydoc_data.topics import topics

    # The markup of the reference is removed: words only.
    words = [" ".join(topics[name].replace("*", "").replace("`", "").split()) for name in sorted(topics)]
    texts = [text[:240] for text in words if len(text) >= 240][:72]
    pick = random.Random(0)
    other = [pick.choice(texts) for _ in texts]
    tags = ["O", "B-NAME", "I-NAME", "B-CODE", "I-CODE"]

    def chat(question: str, answer: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def write(name: str, rows: Iterable[dict[str, Any]], splits: dict[str, slice] | None = None) -> None:
        (folder / name).mkdir(parents=True)
        listed = list(rows)
        for split, part in (splits or {"train": slice(0, 64), "test": slice(64, 72)}).items():
            lines = [json.dumps(row) + "\n" for row in listed[part]]
            (folder / name / f"{split}.jsonl").write_text("".join(lines))
            if name.startswith("data/"):  # the same files for scripts that take no .jsonl
                copy = folder / "files" / name.removeprefix("data/") / f"{split}.json"
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text("".join(lines))
                if name == "data/questions":  # in the form of SQuAD
                    copy.write_text(json.dumps({"data": listed[part]}))

    pairs = list(zip(texts, other, strict=True))
    write("data/lm", ({"text": text} for text in texts))
    write("data/chat", ({"messages": chat(a[:60], a[60:160])} for a, _ in pairs))
    write("data/preference", ({"prompt": a[:60], "chosen": a[60:140], "rejected": b[60:120]} for a, b in pairs))
    write("data/reward", ({"chosen": a[:120], "rejected": b[20:150]} for a, b in pairs))
    write(
        "data/kto", ({"prompt": a[:60], "completion": a[60:140], "label": i % 2 == 0} for i, (a, b) in enumerate(pairs))
    )
    write("data/prompts", ({"prompt": a[:60]} for a, _ in pairs))
    write("data/chat-prompts", ({"prompt": chat(a[:60], "")[:1]} for a, _ in pairs))
    write("data/summaries", ({"document": a, "summary": a[:40]} for a, _ in pairs))
    write(
        "data/tags",
        ({"tokens": a.split()[:20], "ner_tags": [tags[len(w) % 5] for w in a.split()[:20]]} for a, _ in pairs),
    )
    write(
        "data/classes", ({"sentence1": a[:80], "sentence2": b[:80], "label": i % 2} for i, (a, b) in enumerate(pairs))
    )
    write("data/pairs", ({"anchor": a[:60], "positive": a[60:140]} for a, _ in pairs))
    write(
        "data/scored",
        ({"sentence1": a[:80], "sentence2": b[:80], "score": (i % 5) / 4} for i, (a, b) in enumerate(pairs)),
    )
    write(
        "data/questions",
        (
            {"id": str(i), "context": a, "question": a[:30], "answers": {"text": [a[40:60]], "answer_start": [40]}}
            for i, (a, _) in enumerate(pairs)
        ),
    )
    write("Salesforce/wikitext/wikitext-2-v1", ({"text": text} for text in texts), _SPLITS)
    (folder / "Salesforce/wikitext/README.md").write_text(_card("wikitext-2-v1"))
    mrpc = ({"sentence1": a[:80], "sentence2": b[:80], "label": i % 2, "idx": i} for i, (a, b) in enumerate(pairs))
    write("nyu-mll/glue/mrpc", mrpc, _SPLITS)
    (folder / "nyu-mll/glue/README.md").write_text(_card("mrpc"))
