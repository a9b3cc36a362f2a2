"""The argparse parser of a verb."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType

from hf_fsdp_plugin.cli.terminal import text_width
from hf_fsdp_plugin.launcher.flags import Parser, UsageError

PROG = "hf-fsdp"


def check_needs(args: argparse.Namespace, needs: Mapping[str, Sequence[str]]) -> None:
    """Raise ``UsageError`` for a flag that has no effect, because none of the flags that it needs was written.

    Args:
        needs: attribute of a flag -> attributes of which it needs one.
    """
    for name, others in needs.items():
        if name in args.given and not any(other in args.given for other in others):
            flags = " or ".join(f"--{other.replace('_', '-')}" for other in others)
            raise UsageError(f"{args.given[name]} needs {flags}.")


def make_parser(verb: str, module: ModuleType) -> Parser:
    """Return the parser of a verb's arguments."""
    parser = Parser(
        prog=f"{PROG} {verb}",
        description=textwrap.fill(module.HELP, 100),
        formatter_class=_formatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    parser.epilog = "\n\n".join(filter(None, [parser.epilog, _examples(module.EXAMPLES)]))
    return parser


def _formatter(prog: str) -> argparse.HelpFormatter:
    """Return the formatter of help. Without a width, argparse imports shutil and its compression libraries."""
    return argparse.RawDescriptionHelpFormatter(prog, width=min(text_width() or 100, 100))


def _examples(examples: Iterable[str]) -> str:
    return "\n".join(["examples:", *(f"  {example}" for example in examples)])
