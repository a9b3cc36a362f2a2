"""``hf-fsdp VERB``: the verbs, their parsers and the text of ``hf-fsdp help``; imports a verb's module and runs it.

A verb is a module of this package, or ``verb.py`` in the folder of a tool. It has ``run(args) -> int`` and, if it has
arguments, ``add_arguments(parser)``. Its help is the first paragraph of the module's docstring, and the two examples
after it. A verb whose arguments one parser cannot read has ``parse_argv(argv)``, which returns the argument of ``run``.
Both may raise ``UsageError``, and ``run`` may raise ``SpecError``.

The exit codes are in :mod:`hf_fsdp_plugin.cli.output`.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import hf_fsdp_plugin
from hf_fsdp_plugin.cli.output import INTERRUPTED, OK, PROBLEMS, USAGE, print_failure, text_width
from hf_fsdp_plugin.problems import SpecError, UsageError
from hf_fsdp_plugin.supported import unsupported_versions
from hf_fsdp_plugin.text import printable

if TYPE_CHECKING:
    # Imported where it is used: it reads the tables of settings and flags, which `hf-fsdp --version` does not need.
    from hf_fsdp_plugin.launcher.flags import Parser

PROG: Final = "hf-fsdp"
VERBS: Final[Mapping[str, str]] = {
    "check": "check a config: show every setting, its origin, and every problem",
    "schema": "print a JSON Schema of the YAML config, for editors",
    "config": "ask for model, machines and settings, predict, and write a config",
    "convert": "convert a config, or a checkpoint of DeepSpeed, into one for FSDP",
    "launch": "check a config, then run a script on every rank with it",
    "profile": "run a script for a few steps, and show where the time of a step goes",
    "watch": "show a run from its files: loss, figures over time, checkpoints, restarts",
    "plan": "predict memory, communication and time of a training step",
    "bench": "measure throughput, memory and scaling over ranks, strategies and settings",
    "inspect": "describe a checkpoint, or all checkpoints of a run, from metadata alone",
    "verify": "check every byte of a checkpoint, and its names and shapes",
    "merge": "write any checkpoint as a Hugging Face folder, for from_pretrained",
    "export": "merge the newest complete checkpoint of a run, or its best one",
    "doctor": "show versions, devices, and what this package relies on in other libraries",
    "enable": "let stock accelerate launch and torchrun use the plugin in this environment",
    "disable": "undo enable",
    "migrate": "rewrite a config for FSDP1 or FSDP2, and list what changes",
    "explain": "print the documentation of a problem code",
    "completion": "print a script that completes flags in bash, zsh or fish",
    "help": "print the help of a verb",
}
"""Verb -> description. Its module is imported when the verb is called."""
_OF_RUNTIME: Final = frozenset({"launch", "enable", "disable", "help"})
"""The verbs that start a run, and the help. All others are tools, each a folder in ``tools``."""
TOOLS: Final = frozenset({"jinja2", "prompt_toolkit", "questionary"})
"""Libraries of the extra ``tools``, which some verbs import where they use them."""
_WITHOUT_JSON: Final = frozenset({"completion", "help", "schema"})
"""Verbs that print a text of one form. All others have the flag ``--json``."""
_ANY_VERSION = frozenset({"completion", "disable", "doctor", "explain", "help"})
"""The verbs that run with unsupported versions of other libraries too."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    gc.set_threshold(50_000)  # not 700: a search for garbage takes a sixth of the time in which libraries are imported
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(usage_text())
        return OK if argv else USAGE
    if argv[0] == "--version":
        print(f"{PROG} {hf_fsdp_plugin.__version__}")
        return OK
    if argv[0] not in VERBS:
        print(f"{PROG}: unknown verb '{printable(argv[0])}'. The verbs are {', '.join(VERBS)}.", file=sys.stderr)
        return USAGE
    if argv[0] not in _ANY_VERSION and (messages := unsupported_versions()):
        print("\n".join(messages), file=sys.stderr)
        return PROBLEMS
    return _run(argv[0], argv[1:])


def parse_arguments(verb: str, argv: Sequence[str]) -> Any:
    """Parse the arguments of a verb. Raises ``UsageError`` for wrong usage, and ``SystemExit`` after ``--help``."""
    module = verb_module(verb)
    return module.parse_argv(argv) if hasattr(module, "parse_argv") else make_parser(verb).parse_args(argv)


def _run(verb: str, argv: Sequence[str]) -> int:
    args = None
    try:
        args = parse_arguments(verb, argv)
        code = verb_module(verb).run(args)
        sys.stdout.flush()
        return int(code)
    except SystemExit as stop:  # after --help
        return stop.code if isinstance(stop.code, int) else USAGE
    except UsageError as error:
        print(f"{PROG} {verb}: {error}", file=sys.stderr)
        return USAGE
    except SpecError as error:
        return print_failure(error.problems, as_json=getattr(args, "json", False))
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in TOOLS:
            raise
        fix = 'Install it with the other tools: pip install "hf_fsdp_plugin[tools]"'
        print(f"{PROG} {verb}: {library} is not installed. {fix}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:  # the process that reads stdout (head, less) has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PROBLEMS
    except OSError as error:  # stdout cannot be written, for example because the disk is full
        print(f"{PROG} {verb}: {error.strerror or error}", file=sys.stderr)
        return PROBLEMS
    except KeyboardInterrupt:
        print(f"{PROG} {verb}: interrupted", file=sys.stderr)
        return INTERRUPTED


def verb_module(verb: str) -> ModuleType:
    """Import and return the module of a verb."""
    return importlib.import_module(f"{__package__}.{verb}") if verb in _OF_RUNTIME else tool(f"{verb}.verb")


def tool(name: str) -> ModuleType:
    """Import and return a tool, in the process of ``hf-fsdp`` only: the one way from the runtime to a tool."""
    return importlib.import_module(f"hf_fsdp_plugin.tools.{name}")


def make_parser(verb: str) -> Parser:
    """Return the parser of a verb's arguments."""
    from hf_fsdp_plugin.launcher.flags import Parser

    module = verb_module(verb)
    about, _, rest = (module.__doc__ or "").partition("\n\nExamples::\n\n")
    parser = Parser(
        prog=f"{PROG} {verb}",
        description=textwrap.fill(about.partition(": ")[2], 100),
        # Without a width, argparse imports shutil and its compression libraries.
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=min(text_width() or 100, 100)),
        allow_abbrev=False,
    )
    if hasattr(module, "add_arguments"):
        module.add_arguments(parser)
    if parser.find("--json") is None and verb not in _WITHOUT_JSON:
        parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    examples = "examples:\n" + textwrap.indent(textwrap.dedent(rest.partition("\n\n")[0]).rstrip(), "  ")
    parser.epilog = "\n\n".join(filter(None, [parser.epilog, examples]))
    return parser


def usage_text() -> str:
    """Return the list of verbs and the exit codes."""
    width = max(map(len, VERBS))
    lines = [f"usage: {PROG} VERB [ARGUMENTS]", "", "verbs:"]
    lines += [f"  {verb:<{width}}  {about}" for verb, about in VERBS.items()]
    lines += ["", "exit codes: 0 fine, 1 problems found, 2 wrong usage or a path that does not exist, 130 interrupted;"]
    lines += ["launch exits with the code of the script."]
    lines += ["", f"{PROG} VERB --help describes a verb, with examples. {PROG} --version prints the version."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
