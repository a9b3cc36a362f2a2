"""``hf-fsdp help``: Print the help of a verb: the same as hf-fsdp VERB --help. Without a verb, list the verbs.

Examples::

    hf-fsdp help
    hf-fsdp help launch
"""

from __future__ import annotations

import argparse

from hf_fsdp_plugin.cli.main import VERBS, make_parser, usage_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("verb", nargs="?", choices=VERBS, metavar="VERB", help="one of the verbs")


def run(args: argparse.Namespace) -> int:
    if args.verb is None:
        print(usage_text())
    else:
        print(make_parser(args.verb).format_help(), end="")
    return 0
