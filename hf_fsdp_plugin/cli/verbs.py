"""The verbs of ``hf-fsdp``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

VERBS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "check": "check a config: show every setting, its origin, and every problem",
        "schema": "print a JSON Schema of the YAML config, for editors",
        "config": "ask for model, machines and settings, predict, and write a config",
        "launch": "check a config, then run a script on every rank with it",
        "profile": "run a script for a few steps, and show where the time of a step goes",
        "plan": "predict memory, communication and time of a training step",
        "bench": "measure throughput, memory and scaling over ranks, strategies and settings",
        "inspect": "describe a checkpoint, or all checkpoints of a run, from metadata alone",
        "verify": "check every byte of a checkpoint, and its names and shapes",
        "merge": "write any checkpoint as a Hugging Face folder, for from_pretrained",
        "export": "merge the newest complete checkpoint of a run, or its best one",
        "doctor": "show versions, devices, and what this package relies on in other libraries",
        "enable": "let stock accelerate launch and torchrun use the plugin in this environment",
        "disable": "undo enable",
        "explain": "print the documentation of a problem code",
        "completion": "print a script that completes flags in bash, zsh or fish",
        "help": "print the help of a verb",
    }
)
"""Verb -> description. Each verb is the module with this name, which is imported when the verb is called."""
