"""``hf-fsdp watch``: Show a run from the files in its folder, while it is running or afterwards: progress, loss and
other figures over time, memory, checkpoints, restarts, slow ranks and the report.

Examples::

    hf-fsdp watch out
    hf-fsdp watch out --html run.html --force
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

from hf_fsdp_plugin.checkpoint.errors import refuse
from hf_fsdp_plugin.cli.output import OK, PROBLEMS, print_failure, print_result, text_width
from hf_fsdp_plugin.text import truncate_lines
from hf_fsdp_plugin.tools.common import check_folder, check_needs, whole_number
from hf_fsdp_plugin.tools.pages import refuse_present, write_page
from hf_fsdp_plugin.tools.watch.run_folder import Run, RunFolder
from hf_fsdp_plugin.tools.watch.terminal import run_text

_CLEAR: Final = "\033[J"
"""Clears the terminal from the cursor on."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="output folder of a Trainer, or project folder of an Accelerator")
    about = "seconds between two looks at the files (default: 2)"
    parser.add_argument("--interval", metavar="SECONDS", type=whole_number(1, 86400), default=2, help=about)
    about = "print once, as with an output that is not a terminal, and with TERM=dumb"
    parser.add_argument("--once", action="store_true", help=about)
    parser.add_argument("--html", metavar="OUT", help="write an HTML page of the run; it needs no network")
    parser.add_argument("--force", action="store_true", help="overwrite the file of --html")


def run(args: argparse.Namespace) -> int:
    """Show the run. Returns 0, or 1 if it has failed or the folder has no files of a run.

    Raises:
        SpecError: a file cannot be read (FSDP-E472), or the page cannot be written (FSDP-E835).
    """
    check_needs(args, {"force": ["html"]})
    folder = RunFolder(check_folder(args.run, "run"))
    if problems := refuse_present(args):
        return print_failure(problems, as_json=args.json)
    is_once = args.once or args.json or args.html is not None or os.environ.get("TERM") == "dumb"
    found = folder.read() if is_once or not sys.stdout.isatty() else _follow(folder, args.interval)
    if found.source is None and not found.checkpoints and not found.report:
        message = "contains no fsdp_run.jsonl, no report and no checkpoint of a run."
        refuse("FSDP-E496", found.folder, message, "Give the output folder of a Trainer, or wait for its first log.")
    code = PROBLEMS if found.state == "failed" else OK
    if args.html is not None:
        from hf_fsdp_plugin.tools.watch.page import run_page

        written = write_page(Path(args.html), run_page(found))
        print_result(args, run_tree(found), "\n".join(written))
    elif is_once or not sys.stdout.isatty():
        print_result(args, run_tree(found), run_text(found, text_width()))
    return code


def _follow(folder: RunFolder, interval: int) -> Run:
    """Show the run until it has finished: each time, over the lines of the last time."""
    above = 0
    while True:
        found = folder.read()
        width, height = text_width(), os.get_terminal_size(sys.stdout.fileno()).lines
        lines = truncate_lines(run_text(found, width).split("\n"), max(1, height - 3))
        up = f"\033[{above}A\r" if above else ""
        print(up + _CLEAR + "\n".join(lines), flush=True)
        if found.state == "finished":
            return found
        above = len(lines)
        time.sleep(interval)


def run_tree(found: Run) -> dict[str, Any]:
    """Return the object of ``--json``. Numbers that are not finite are null."""
    events = found.events
    history = [
        {"step": step, **{name: value if math.isfinite(value) else None for name, value in row.items()}}
        for step, row in sorted(events.rows.items())
    ]
    return {
        "run": str(found.folder),
        **{name: getattr(found, name) for name in ("state", "source", "max_steps", "checkpoints")},
        **{name: getattr(events, name) for name in ("result", "step", "start", "restarts", "stragglers")},
        "seconds_since_event": found.seconds,
        "history": history,
        "report": found.report or None,
        "damaged_lines": events.damaged,
    }
