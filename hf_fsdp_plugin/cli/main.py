"""``hf-fsdp VERB``: imports the verb's module and runs it.

A verb is a module of this package with ``HELP``, two ``EXAMPLES``, ``add_arguments(parser)`` and ``run(args) -> int``.
A verb that also accepts the arguments of another program has ``parse_argv(argv)``, which replaces argparse and returns
the argument of ``run``. The exit codes are in :mod:`hf_fsdp_plugin.cli.exit_codes`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any

import hf_fsdp_plugin
from hf_fsdp_plugin.cli.exit_codes import INTERRUPTED, OK, PROBLEMS, USAGE
from hf_fsdp_plugin.cli.parser import PROG, make_parser

VERBS: Mapping[str, str] = MappingProxyType(
    {
        "check": "check a config: show every setting, its origin, and every problem",
        "schema": "print a JSON Schema of the YAML config, for editors",
        "launch": "check a config, then run a script on every rank with it",
        "inspect": "describe a checkpoint, or all checkpoints of a run, from metadata alone",
        "verify": "check every byte of a checkpoint, and its names and shapes",
        "merge": "write any checkpoint as a Hugging Face folder, for from_pretrained",
        "export": "merge the newest complete checkpoint of a run, or its best one",
        "explain": "print the documentation of a problem code",
    }
)
"""Verb -> description. Each verb is the module with this name, which is imported when the verb is called."""

_HELP_FLAGS = ("-h", "--help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in _HELP_FLAGS:
        print(_usage())
        return OK if argv else USAGE
    if argv[0] == "--version":
        print(f"{PROG} {hf_fsdp_plugin.__version__}")
        return OK
    if argv[0] not in VERBS:
        print(f"{PROG}: unknown verb '{argv[0]}'. The verbs are {', '.join(VERBS)}.", file=sys.stderr)
        return USAGE
    return _run(argv[0], argv[1:])


def parse_arguments(verb: str, module: ModuleType, argv: Sequence[str]) -> Any:
    """Parse the arguments of a verb. Raises ``SystemExit`` for wrong usage and after ``--help``."""
    if hasattr(module, "parse_argv") and not (argv and argv[0] in _HELP_FLAGS):
        return module.parse_argv(argv)
    return make_parser(verb, module).parse_args(argv)


def _run(verb: str, argv: Sequence[str]) -> int:
    module = importlib.import_module(f"hf_fsdp_plugin.cli.{verb}")
    try:
        code = module.run(parse_arguments(verb, module, argv))
        sys.stdout.flush()
        return int(code)
    except SystemExit as stop:  # argparse has printed the reason
        return stop.code if isinstance(stop.code, int) else USAGE
    except BrokenPipeError:  # the process that reads stdout (head, less) has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PROBLEMS
    except OSError as error:  # stdout cannot be written, for example because the disk is full
        print(f"{PROG} {verb}: {error.strerror or error}", file=sys.stderr)
        return PROBLEMS
    except KeyboardInterrupt:
        print(f"{PROG} {verb}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _usage() -> str:
    lines = [f"usage: {PROG} VERB [ARGUMENTS]", "", "verbs:"]
    lines += [f"  {verb:<8} {about}" for verb, about in VERBS.items()]
    lines += ["", f"{PROG} VERB --help describes a verb, with examples. {PROG} --version prints the version."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
