"""``hf-fsdp help``: prints the verbs, or the help of one verb."""

from __future__ import annotations

import argparse
import importlib

from hf_fsdp_plugin.cli.parser import PROG, make_parser
from hf_fsdp_plugin.cli.verbs import VERBS

HELP = "Print the help of a verb: the same as hf-fsdp VERB --help. Without a verb, list the verbs."
EXAMPLES = ("hf-fsdp help", "hf-fsdp help launch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("verb", nargs="?", choices=VERBS, metavar="VERB", help="one of the verbs")


def run(args: argparse.Namespace) -> int:
    if args.verb is None:
        print(usage())
    else:
        module = importlib.import_module(f"hf_fsdp_plugin.cli.{args.verb}")
        print(make_parser(args.verb, module).format_help(), end="")
    return 0


def usage() -> str:
    """Return the list of verbs and the exit codes."""
    width = max(map(len, VERBS))
    lines = [f"usage: {PROG} VERB [ARGUMENTS]", "", "verbs:"]
    lines += [f"  {verb:<{width}}  {about}" for verb, about in VERBS.items()]
    lines += ["", "exit codes: 0 fine, 1 problems found, 2 wrong usage or a path that does not exist, 130 interrupted;"]
    lines += ["launch exits with the code of the script."]
    lines += ["", f"{PROG} VERB --help describes a verb, with examples. {PROG} --version prints the version."]
    return "\n".join(lines)
