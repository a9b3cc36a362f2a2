"""``hf-fsdp migrate``: Rewrite a config for the other FSDP version, with comments and order kept, and list what changes
in the behavior of a run.

Examples::

    hf-fsdp migrate fsdp.yaml --diff
    hf-fsdp migrate fsdp.yaml --to 2 --in-place

The config is printed to stdout unless it is written to a file; the list of changes to stderr.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.cli.output import OK, exit_code, print_failure, print_json, print_problems, text_width
from hf_fsdp_plugin.problems import SpecError, UsageError, has_errors
from hf_fsdp_plugin.spec.value_parsers import setting_to_json
from hf_fsdp_plugin.text import plural, printable, wrap_words
from hf_fsdp_plugin.tools.check.verb import config_named
from hf_fsdp_plugin.tools.common import check_needs
from hf_fsdp_plugin.tools.config.text import check_new_file, stock_limits, write_config
from hf_fsdp_plugin.tools.migrate.rewriting import BehaviorChange, Migration, behavior_changes, migrate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="Accelerate YAML or JSON; - reads stdin")
    about = "the FSDP version (default: the one that CONFIG does not have)"
    parser.add_argument("--to", choices=("1", "2"), metavar="1|2", help=about)
    parser.add_argument("--diff", action="store_true", help="print a unified diff instead of the config")
    parser.add_argument("--in-place", action="store_true", help="change CONFIG itself")
    parser.add_argument("--out", metavar="FILE", help="write the config to this file")
    parser.add_argument("--force", action="store_true", help="with --out: replace a file that exists")


def run(args: argparse.Namespace) -> int:
    """Print or write the config. Returns 0, 1 with errors or if the losses differ, 2 for a missing config."""
    check_needs(args, {"force": ("out",)})
    if args.in_place and (args.out or args.config == "-"):
        raise UsageError(f"--in-place does not combine with {'--out' if args.out else 'stdin'}.")
    try:
        migration = migrate(config_named(args.config), int(args.to) if args.to else None)
        target = Path(args.out) if args.out else migration.old.path if args.in_place else None
        if target is not None:
            check_new_file(target, args.out or args.config, force=args.force or args.in_place)
    except SpecError as error:
        print_failure(error.problems, as_json=args.json)
        return exit_code(error.problems, args.config)
    if target is not None:
        write_config(target, args.out or args.config, migration.after)
    _print(args, migration, target)
    return OK


def _print(args: argparse.Namespace, migration: Migration, written: Path | None) -> None:
    old, new = migration.old_spec, migration.new_spec
    changes = behavior_changes(old, new)
    settings = {name: setting_to_json(value) for name, value, _ in new.settings() if new.asked(name)}
    limits = list(stock_limits(settings, new.fsdp.version))
    problems = [problem for problem in new.problems if args.json or problem.severity != "note"]
    before, after, shown = migration.before.splitlines(), migration.after.splitlines(), migration.old.shown
    diff = list(difflib.unified_diff(before, after, shown, shown, lineterm=""))
    if args.json:
        tree: dict[str, Any] = {"ok": not has_errors(problems), "from": old.fsdp.version, "to": new.fsdp.version}
        tree |= {"path": written, "text": migration.after, "diff": "\n".join(diff), "kept": migration.kept}
        tree |= {"changes": list(map(asdict, changes)), "stock_limits": limits, "problems": problems}
        print_json(tree)
        return
    for line in _change_lines(migration, changes, limits):
        print("\n".join(wrap_words(printable(line), text_width(sys.stderr))), file=sys.stderr)
    print_problems(problems)
    if args.diff:
        print("\n".join(map(printable, diff)))
    elif not (args.out or args.in_place):
        print(migration.after, end="")
    if written is not None:
        print(printable(f"wrote {args.out or args.config}"), file=sys.stderr)


def _change_lines(migration: Migration, changes: list[BehaviorChange], limits: list[str]) -> list[str]:
    """Return the lines that describe what changes."""
    versions = f"FSDP{migration.old_spec.fsdp.version} to FSDP{migration.new_spec.fsdp.version}"
    lines = [f"{versions}: {plural(len(changes), 'change')} in behavior"]
    for change in changes:
        launcher = "stock accelerate launch: " if change.stock else ""
        lines.append(f"  {launcher}{change.what} ({change.setting}): {change.was} -> {change.becomes}")
        lines.append(f"    verify: {change.verify}")
    return [*lines, *(f"  {text}" for text in migration.kept), *(f"  note: {limit}" for limit in limits)]
