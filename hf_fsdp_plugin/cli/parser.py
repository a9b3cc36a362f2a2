"""The argparse parser of a verb."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

from hf_fsdp_plugin.cli.exit_codes import USAGE
from hf_fsdp_plugin.cli.terminal import text_width
from hf_fsdp_plugin.text import printable

PROG = "hf-fsdp"


class Parser(argparse.ArgumentParser):
    """Accepts flags with hyphens or underscores, and prints an error as one line with a suggestion."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else args
        words = [self._with_hyphens(word) for word in words]
        namespace, rest = super().parse_known_args(words, namespace)
        namespace.given = self._given(words)
        return namespace, rest

    def _given(self, words: Sequence[str]) -> dict[str, str]:
        """Return the optional arguments that were written: attribute -> flag."""
        own = words[: words.index("--")] if "--" in words else words
        flags = [word.partition("=")[0] if word.startswith("--") else word[:2] for word in own]
        return {action.dest: flag for flag in flags if (action := self._option_string_actions.get(flag)) is not None}

    def _with_hyphens(self, word: str) -> str:
        name, equals, value = word.partition("=")
        if name.startswith("--") and "_" in name and name.replace("_", "-") in self._option_string_actions:
            return name.replace("_", "-") + equals + value
        return word

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message and unknown.startswith("-"):
            message = f"unknown flag {unknown.split()[0].partition('=')[0]}.{self._suggestion(unknown.split()[0])}"
        print(f"{self.prog}: {printable(message)} `{self.prog} --help` lists the arguments.", file=sys.stderr)
        raise SystemExit(USAGE)

    def _suggestion(self, written: str) -> str:
        import difflib

        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        near = difflib.get_close_matches(self._with_hyphens(written).partition("=")[0], flags, n=1)
        return f" Did you mean {near[0]}?" if near else ""


def needless_flag(args: argparse.Namespace, needs: Mapping[str, Sequence[str]]) -> str:
    """Return why a flag has no effect, because none of those that it needs was written; empty if each has an effect.

    Args:
        needs: attribute of a flag -> attributes of which it needs one.
    """
    for name, others in needs.items():
        if name in args.given and not any(other in args.given for other in others):
            return f"{args.given[name]} needs {' or '.join('--' + other.replace('_', '-') for other in others)}."
    return ""


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
