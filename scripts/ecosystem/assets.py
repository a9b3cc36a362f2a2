"""Makes the models, tokenizers and datasets of the suite in a folder, from installed packages only.

Models are small ones of real architectures with random weights, and all-MiniLM-L6-v2. The tokenizers are those of
SmolLM2 and MiniLM. Texts are from the Python language reference. Every file is the same in every run.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

VERSION = "3"  # change it when anything below changes: the folder is then made again, and so are all references
_SPLITS = {"train": slice(0, 48), "validation": slice(48, 64), "test": slice(64, 72)}


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
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    _make_models(folder / "models", table)
    _make_datasets(folder)
    for name, text in table["files"].items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    for name, target in table["hub_names"].items():
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


def _make_models(folder: Path, table: Mapping[str, Any]) -> None:
    import torch
    import transformers

    from scripts.data import MINILM, SMOLLM2, load_tokenizer, locate

    smol, mini = load_tokenizer(SMOLLM2), load_tokenizer(MINILM)
    special = {name: getattr(smol, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    ends = {name: special[name] for name in ("pad_token_id", "eos_token_id")}
    families = {
        "llama": (smol, {**special, "vocab_size": len(smol)}),
        "bert": (mini, {"vocab_size": len(mini)}),
        "t5": (smol, {**ends, "decoder_start_token_id": smol.pad_token_id, "vocab_size": len(smol)}),
    }
    for seed, (name, row) in enumerate(table["models"].items()):
        tokenizer, sizes = families[row["family"]]
        model_class = getattr(transformers, row["class"])
        torch.manual_seed(seed)
        config = model_class.config_class(**{**table["families"][row["family"]], **sizes, **row.get("sizes", {})})
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
