"""Splits the arguments of ``hf-fsdp check --run``, some of which belong to ``TrainingArguments`` or to a script."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from hf_fsdp_plugin.launcher.flags import LaunchArguments, Parser, UsageError, why_refused
from hf_fsdp_plugin.launcher.run_script import check_script
from hf_fsdp_plugin.sources.command_line import flag_name

if TYPE_CHECKING:
    from hf_fsdp_plugin.integrations.preflight.stages import Options

RUN_FLAG: Final = "--run"
DEFAULT_LIMIT: Final = 240.0
"""Seconds until the ranks of a preflight are stopped."""
_CONFIG_SUFFIXES: Final = (".yaml", ".yml", ".json")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--run`` and its options to the arguments of ``check``."""
    parser.add_argument(
        "--run",
        action="store_true",
        help="also train a tiny clone of the model on CPU ranks: prepare, step, clip, evaluate, save, resume, export",
    )
    about = f"with --run: stop the ranks after this time (default: {DEFAULT_LIMIT:g})"
    parser.add_argument("--limit", type=float, default=DEFAULT_LIMIT, metavar="SECONDS", help=about)


def split_run_words(argv: Sequence[str], parser: Parser) -> tuple[list[str], list[str], list[str]]:
    """Return the words of ``check`` and of settings, those of ``TrainingArguments``, and SCRIPT with its arguments.

    SCRIPT is the first word after CONFIG that is no flag or value, or the first one that ends in ``.py``. A flag that
    neither ``check`` nor ``launch`` has belongs to ``TrainingArguments``, with the words up to the next flag.

    Args:
        parser: the parser of ``check``.
    """
    words, training, script = list(argv), [], []
    checked: list[str] = []
    has_config = any(flag_name(word.partition("=")[0]) in ("config_file", "fsdp") for word in words)
    while words:
        word = words.pop(0)
        written, equals, _ = word.partition("=")
        action = parser.find(written)
        if word == "-m" or (not word.startswith("-") and (has_config or word.endswith(".py"))):
            script = [word, *words]
            break
        if not word.startswith("--"):
            checked.append(word)
            has_config |= not word.startswith("-") or word == "-"
        elif action is not None or why_refused(flag_name(written)):
            checked.append(word)
            takes_value = not equals and action is not None and action.nargs != 0
            if takes_value and words and not words[0].startswith("--"):
                checked.append(words.pop(0))
        else:
            training.append(word)
            while not equals and words and not words[0].startswith("--") and not _is_file(words[0]):
                training.append(words.pop(0))
    return checked, training, script


def _is_file(word: str) -> bool:
    """Return whether a word is more likely CONFIG or SCRIPT than the value of a flag."""
    return word.endswith((*_CONFIG_SUFFIXES, ".py"))


def options_of(args: argparse.Namespace) -> Options:
    """Return the options of a preflight. ``--fsdp`` and ``--fsdp-config`` belong to ``TrainingArguments`` too."""
    from hf_fsdp_plugin.integrations.preflight.stages import Options

    given = {name: value for name in ("fsdp", "fsdp_config") if (value := getattr(args, name)) is not None}
    return Options(
        model=args.model or "",
        script=args.script,
        arguments=[*(word for name, value in given.items() for word in (f"--{name}", str(value))), *args.training],
    )


def check_run_usage(args: argparse.Namespace, num_configs: int) -> None:
    """Raise ``UsageError`` if the usage of ``--run`` is wrong."""
    if num_configs != 1 or args.fix or args.distributed_config:
        raise UsageError("--run needs one config, and does not combine with --fix and --distributed-config.")
    if not args.model and not args.script:
        raise UsageError("--run needs --model DIR|ID or a SCRIPT.")
    if args.script and args.training:
        raise UsageError(f"{args.training[0]} is an argument of the script: write it after SCRIPT.")
    if not args.limit > 0:
        raise UsageError(f"--limit is {args.limit:g}; expected a positive number of seconds.")
    if args.script:
        is_module = args.script[0] == "-m"
        words = args.script[1:] if is_module else args.script
        options = {"module": "true"} if is_module else {}
        check_script(LaunchArguments(script=words[0] if words else "", options=options))
