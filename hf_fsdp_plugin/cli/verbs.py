"""The verbs of ``hf-fsdp``, their parsers, and the text of ``hf-fsdp help``."""

from __future__ import annotations

import argparse
import importlib
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Final

from hf_fsdp_plugin.cli.output import text_width
from hf_fsdp_plugin.launcher.flags import Parser, UsageError

PROG: Final = "hf-fsdp"
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


def verb_module(verb: str) -> ModuleType:
    """Import and return the module of a verb."""
    return importlib.import_module(f"hf_fsdp_plugin.cli.{verb}")


def make_parser(verb: str) -> Parser:
    """Return the parser of a verb's arguments."""
    module = verb_module(verb)
    parser = Parser(
        prog=f"{PROG} {verb}",
        description=textwrap.fill(module.HELP, 100),
        formatter_class=_formatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    examples = "\n".join(["examples:", *(f"  {example}" for example in module.EXAMPLES)])
    parser.epilog = "\n\n".join(filter(None, [parser.epilog, examples]))
    return parser


def _formatter(prog: str) -> argparse.HelpFormatter:
    """Return the formatter of help. Without a width, argparse imports shutil and its compression libraries."""
    return argparse.RawDescriptionHelpFormatter(prog, width=min(text_width() or 100, 100))


def check_needs(args: argparse.Namespace, needs: Mapping[str, Sequence[str]]) -> None:
    """Raise ``UsageError`` for a flag that has no effect, because none of the flags that it needs was written.

    Args:
        needs: attribute of a flag -> attributes of which it needs one.
    """
    for name, others in needs.items():
        if name in args.given and not any(other in args.given for other in others):
            flags = " or ".join(f"--{other.replace('_', '-')}" for other in others)
            raise UsageError(f"{args.given[name]} needs {flags}.")


def check_folder(folder: Path) -> None:
    """Raise ``UsageError`` if the folder of a checkpoint does not exist."""
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise UsageError(f"{folder} {what}. Give the folder of a checkpoint.")


def usage_text() -> str:
    """Return the list of verbs and the exit codes."""
    width = max(map(len, VERBS))
    lines = [f"usage: {PROG} VERB [ARGUMENTS]", "", "verbs:"]
    lines += [f"  {verb:<{width}}  {about}" for verb, about in VERBS.items()]
    lines += ["", "exit codes: 0 fine, 1 problems found, 2 wrong usage or a path that does not exist, 130 interrupted;"]
    lines += ["launch exits with the code of the script."]
    lines += ["", f"{PROG} VERB --help describes a verb, with examples. {PROG} --version prints the version."]
    return "\n".join(lines)


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return the reader of a flag whose value is a whole number in a range, for ``add_argument(type=…)``."""
    limits = f"from {least} on" if most is None else f"from {least} to {most}"

    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or not least <= int(text) <= (most or int(text)):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {limits}.")
        return int(text)

    return read
