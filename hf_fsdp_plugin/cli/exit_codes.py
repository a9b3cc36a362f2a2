"""The exit codes of all verbs."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from hf_fsdp_plugin.hangs.hang_watch import HANG as HANG
from hf_fsdp_plugin.problems import Problem, has_errors
from hf_fsdp_plugin.text import printable

OK: Final = 0
PROBLEMS: Final = 1
USAGE: Final = 2
"""Wrong usage: an unknown flag, a missing argument, or an argument that is not the path of a file or folder."""
INTERRUPTED: Final = 130
"""128 plus the number of SIGINT, as in a shell."""


_NO_FILE: Final = frozenset({"FSDP-E001", "FSDP-E002", "FSDP-E042"})
"""Problems of a config that is not a file. Origins: the config of the command line, or none for the default one."""


def exit_code(problems: Iterable[Problem], config: str | None) -> int:
    """Return the exit code for the problems of a config.

    Args:
        config: the config as the user named it; ``None`` without one.
    """
    problems = list(problems)
    for problem in problems:
        source = problem.origin.source if problem.origin is not None else None
        if problem.code in _NO_FILE and source == config:
            return USAGE
    return PROBLEMS if has_errors(problems) else OK


def check_folder(verb: str, folder: Path) -> bool:
    """Return whether `folder` exists. Otherwise print what is wrong."""
    if folder.is_dir():
        return True
    what = "is not a folder" if folder.exists() else "does not exist"
    print(f"hf-fsdp {verb}: {printable(str(folder))} {what}. Give the folder of a checkpoint.", file=sys.stderr)
    return False
