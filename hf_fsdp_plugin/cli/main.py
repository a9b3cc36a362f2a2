"""``hf-fsdp VERB``: imports the verb's module and runs it.

A verb is a module of this package with ``HELP``, two ``EXAMPLES``, ``add_arguments(parser)`` and ``run(args) -> int``.
A verb whose arguments one parser cannot read has ``parse_argv(argv)``, which returns the argument of ``run``. Both may
raise ``UsageError``, and ``run`` may raise ``SpecError``. The exit codes are in :mod:`hf_fsdp_plugin.cli.output`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import hf_fsdp_plugin
from hf_fsdp_plugin.cli.output import INTERRUPTED, OK, PROBLEMS, USAGE, print_failure
from hf_fsdp_plugin.cli.verbs import PROG, VERBS, make_parser, usage_text, verb_module
from hf_fsdp_plugin.launcher.flags import UsageError
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.supported import unsupported_versions
from hf_fsdp_plugin.text import printable

_HELP_FLAGS = ("-h", "--help")
_ANY_VERSION = frozenset({"completion", "disable", "doctor", "explain", "help"})
"""The verbs that run with unsupported versions of other libraries too."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in _HELP_FLAGS:
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
    except BrokenPipeError:  # the process that reads stdout (head, less) has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PROBLEMS
    except OSError as error:  # stdout cannot be written, for example because the disk is full
        print(f"{PROG} {verb}: {error.strerror or error}", file=sys.stderr)
        return PROBLEMS
    except KeyboardInterrupt:
        print(f"{PROG} {verb}: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
