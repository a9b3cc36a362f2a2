"""The cases of ``cases.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import yaml

from scripts.ecosystem.model import Case

_FIELDS: Final = frozenset(field.name for field in fields(Case))
_LORA: Final = {"model": "adapter", "start": "", "needs": ["peft"]}
"""What a case of TRL with ``--use_peft`` has, unless it says otherwise."""
_RESUME: Final = " --resume_from_checkpoint out/checkpoint-2"


class _Words(dict[str, str]):
    """Words of a template. What is none of them stays: places of scripts, and the batch size."""

    def __missing__(self, name: str) -> str:
        return f"{{{name}}}"


def _case(group: Mapping[str, Any], row: Mapping[str, Any], words: Mapping[str, str]) -> Case:
    own = row.get("arguments", "")
    lora = _LORA if "--use_peft" in own or "{QLORA}" in own else {}
    given = {**group["all"], **lora, **row, "arguments": group["all"].get("arguments", "{arguments}")}
    names = _Words({**words, **{name: value for name, value in given.items() if isinstance(value, str)}})
    names |= {"arguments": own}

    def expand(text: str) -> str:
        while (longer := text.format_map(names)) != text:
            text = longer
        return " ".join(text.split())

    arguments = expand(given["arguments"])
    more = [
        f"{option} {value}" for option, value in group.get("options", {}).items() if option not in arguments.split()
    ]
    end = " ".join([*more, *(["--lora_r 4 --lora_dropout 0"] if lora else [])])
    values = {name: value for name, value in given.items() if name in _FIELDS}
    values |= {
        "name": expand(given["name"]),
        "script": expand(given["script"]),
        "arguments": f"{arguments} {end}".strip(),
    }
    if row.get("resumes"):  # one process runs all steps at once
        whole = values["arguments"]
        first = whole.replace("--max_steps 4", "--max_steps 2").replace("--save_steps 4", "--save_steps 2")
        values |= {"arguments": whole + _RESUME, "before": first, "uninterrupted": whole}
    values |= {name: tuple(values[name]) for name in ("needs", "versions") if name in values}
    return Case(**values)


def _read() -> list[Case]:
    tree = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return [_case(group, row, tree["words"]) for group in tree["groups"] for row in group["cases"]]


CASES: Final = _read()
