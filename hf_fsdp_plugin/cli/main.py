"""``hf-fsdp VERB``: finds the verb's file and runs it.

A verb is a module of this package with ``HELP``, ``add_arguments(parser)`` and ``run(args) -> int``; one that takes
another program's arguments too has ``parse_argv(argv)``, which returns what ``run`` takes. Exit codes are those of a
linter: 0 clean, 1 problems found, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import hf_fsdp_plugin

VERBS: Mapping[str, str] = MappingProxyType(
    {
        "check": "judge a config: every setting, where it was said, and every problem",
        "schema": "print a JSON Schema of the YAML, for editors",
        "launch": "check a config, then run a script on every rank with it",
        "inspect": "tell what a checkpoint is, or all those of a run, from metadata alone",
        "verify": "check every byte of a checkpoint, and its names and shapes",
        "merge": "write any checkpoint as a Hugging Face folder, for from_pretrained",
        "export": "merge a run's newest complete checkpoint, or its best one",
    }
)
"""Verb -> what it does. Each is the module of that name, imported when it is called."""

OK, PROBLEMS, USAGE = 0, 1, 2
PROG = "hf-fsdp"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return OK if words else USAGE
    if words[0] == "--version":
        print(f"{PROG} {hf_fsdp_plugin.__version__}")
        return OK
    if words[0] not in VERBS:
        print(f"{PROG}: there is no verb '{words[0]}'; the verbs are {', '.join(VERBS)}.", file=sys.stderr)
        return USAGE
    return _run(words[0], words[1:])


def _run(verb: str, argv: Sequence[str]) -> int:
    module = importlib.import_module(f"hf_fsdp_plugin.cli.{verb}")
    try:
        if hasattr(module, "parse_argv"):
            args = module.parse_argv(argv)
        else:
            parser = argparse.ArgumentParser(prog=f"{PROG} {verb}", description=module.HELP)
            module.add_arguments(parser)
            args = parser.parse_args(argv)
        code = module.run(args)
        sys.stdout.flush()
        return int(code)
    except SystemExit as stop:  # argparse has said what was wrong
        return stop.code if isinstance(stop.code, int) else USAGE
    except BrokenPipeError:  # the reader (head, less) has gone; nothing is left to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PROBLEMS
    except OSError as error:  # a full disk under stdout, say
        print(f"{PROG} {verb}: {error.strerror or error}", file=sys.stderr)
        return PROBLEMS
    except KeyboardInterrupt:
        return 130


def _usage() -> str:
    lines = [f"usage: {PROG} VERB [ARGUMENTS]", "", "verbs:"]
    lines += [f"  {verb:<8} {about}" for verb, about in VERBS.items()]
    lines += ["", f"{PROG} VERB --help tells more; {PROG} --version names the version."]
    return "\n".join(lines)


def entry_point() -> None:
    """The console script."""
    sys.exit(main())


if __name__ == "__main__":
    entry_point()
