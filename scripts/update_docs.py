"""Write the generated documents in docs/: settings, hooks, upstream changes, problem codes, commands, launchers.

python -m scripts.update_docs            write them
python -m scripts.update_docs --check    change nothing; exit code 1 if a document is out of date
python -m scripts.update_docs --runs     also start ranks for the output of a run in docs/command_line.md
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import yaml

from hf_fsdp_plugin.integrations.hooks import HOOKS, Group, Hook
from hf_fsdp_plugin.problems import AREAS
from hf_fsdp_plugin.sources.command_line import LAUNCHER_FLAGS, OPTIONAL_VALUE, SWITCHES
from hf_fsdp_plugin.spec.fsdp_spec import FAMILY_DEFAULTS, VERSION_DEFAULTS, FsdpSpec
from hf_fsdp_plugin.spec.value_parsers import MAX_DIGITS, UNITS
from hf_fsdp_plugin.tools.convert.conversion import DIALECTS
from hf_fsdp_plugin.tools.convert.dialects.interface import DialectKey
from hf_fsdp_plugin.tools.doctor.contract_probe import private_contracts
from hf_fsdp_plugin.tools.explain.verb import read_entries
from hf_fsdp_plugin.vocabulary import FALSE_WORDS, PREFIXES, ROWS, TRAINING_FILE_MARKS, TRUE_WORDS, SettingRow
from scripts import parts_picture
from scripts.last_runs import record
from scripts.launcher_features import clusters
from scripts.screenshots import command_line
from scripts.script_arguments import ROWS as SCRIPT_ROWS
from scripts.script_arguments import Verdict
from scripts.templates import fill

DOCS = Path(__file__).resolve().parents[1] / "docs"

PLACES = {
    "fsdp": "`fsdp_config`, `TrainingArguments(fsdp_config=…)`",
    "parallelism": "`parallelism_config`",
    "dynamo": "`dynamo_config`",
    "fp8": "`fp8_config`",
    "precision": "`fsdp_mixed_precision_policy`",
    "launch": "the top level of Accelerate's file, `hf-fsdp launch --…`",
    "training": "`TrainingArguments`",
    "distributed": "`DistributedConfig` of Transformers",
}
FAMILIES = {"accelerate": "in an Accelerate file or the environment", "training_arguments": "in TrainingArguments"}

KINDS = {
    "spellings": "one of the listed spellings, which are separated by `=` if they mean the same. A hyphen or spaces "
    "may be written for a `_` between letters or digits. If the table lists names with a dot, one of them may be "
    "written before a spelling that is not a number. A number without a fraction, such as 1.0, is the integer",
    "bool": "{true} for true; {false} for false",
    "integer": "a whole number: an optional sign and digits without leading zeros, optionally followed by a fraction "
    "of zeros. At most {digits} characters and at most 2^63 - 1. A bool is refused",
    "count": "an integer; as text also with thousands separated by all commas or all underscores, then optionally a "
    "fraction, an exponent of up to 3 digits and one of the units {units}, if the result is a whole number: "
    "`100000000`, `1e8`, `100M`, `1_000`, `1.5k`",
    "size": "`auto` or `-1` for auto; or an integer",
    "one": "the integer 1",
    "names": "names of classes: one name, several separated by commas (the last comma is optional), or a list. Text in "
    "brackets (`['A', 'B']`) is a list. A name is a Python identifier, and not a keyword of Python. Names with a path "
    "(`a.b.C`) are refused",
    "devices": "`all`; or different devices, separated by commas or as a list. A device is a number of at most 5 "
    "digits without leading zeros, or a UUID that begins with `GPU-` or `MIG-`",
    "text": "text in one line",
    "mapping": "a section with any content",
    "any": "anything",
    "reshard": "as bool, or as `sharding.strategy`; `no_reshard` is false",
    "section": "a section with the keys of the table that is named after it; `fsdp_mixed_precision_policy` may also be "
    "a value of `precision.param`",
    "options": "options separated by spaces or commas, a list of options, or a bool. Options are the spellings of "
    "`sharding.strategy` that are not numbers (at most one strategy), `auto_wrap` and `offload`; true may be among "
    'them. One pair of quotes around the text is ignored, and text in brackets (`["full_shard", "auto_wrap"]`) '
    "is a list",
    "flag": "as bool; `auto` and `full` are true. False turns off the same mode of a source of lower precedence",
}
"""Kind of a value -> what is accepted, with words of the code in braces."""

VERDICTS: dict[Verdict, str] = {
    "applied": "Applied: it changes the settings of this package, or what it runs.",
    "library": "Left to the library: Accelerate or Transformers applies it, as without this package.",
    "note": "No meaning under FSDP: a note names it (FSDP-N613).",
    "refused": "Refused: the run ends with the error in the table, because ignoring it would change the result.",
}

GROUPS: dict[Group, str] = {
    "accelerate": "Installed by `install()`, `accelerator()` and `FsdpTrainer`, with those of torch, PEFT, TRL and "
    "sentence-transformers. The functions that save and load run as they are for models that are not sharded.",
    "transformers": "Installed by `install()`, and by `FsdpTrainer`, `FsdpTrainerMixin` and `FsdpTrainingArguments`.",
    "loading": "Installed by `install()`, and when a spec enables FSDP.",
    "calls": "Installed together with the groups `hangs` and `phases`.",
    "hangs": "Installed in ranks, unless `--hang_timeout 0` or `HF_FSDP_HANG_TIMEOUT=0` is set. They call the "
    "original and record the call (see [hangs.md](hangs.md)).",
    "phases": "Installed when an observer is attached: in the ranks of `hf-fsdp profile` and of `hf-fsdp check --run`.",
}


def settings() -> str:
    """Return ``docs/settings.md``: every setting with its keys, values and default."""
    spec = FsdpSpec()
    tables = []
    for scope, place in PLACES.items():
        rows = [_setting_row(row, spec) for row in ROWS if row.scope == scope]
        prefix = f", prefix `{PREFIXES[scope]}`" if PREFIXES[scope] else ""
        head = ["| setting | keys | values | default | meaning |", "|---|---|---|---|---|"]
        tables += [f"## In {place}{prefix}", "", *head, *rows, ""]
    parts = {
        "kinds": "\n".join(_kinds()),
        "marks": _quoted(TRAINING_FILE_MARKS),
        "switches": _quoted(f"--{name}" for name in SWITCHES - LAUNCHER_FLAGS),
        "optional": _quoted(f"--{name}" for name in OPTIONAL_VALUE),
        "tables": "\n".join(tables[:-1]),
        "arguments": "\n".join(arguments()),
    }
    return fill("settings.md", parts)


def arguments() -> list[str]:
    """Return the tables of the arguments of a script: one row for each class and verdict."""
    lines = []
    for verdict, meaning in VERDICTS.items():
        lines += [meaning, "", "| class | arguments | why |", "|---|---|---|"]
        for row in (row for row in SCRIPT_ROWS if row.verdict == verdict):
            is_rest = row.owner == "TrainingArguments" and verdict == "library"
            names = "all others" if is_rest else _quoted(row.names)
            code = f" ({row.code})" if row.code else ""
            lines.append(f"| `{row.owner}` | {names} | {row.about}{code} |")
        lines.append("")
    return lines[:-1]


def _kinds() -> list[str]:
    words = {
        "true": _quoted(TRUE_WORDS),
        "false": _quoted(FALSE_WORDS),
        "units": _quoted(unit for unit in UNITS if unit),
        "digits": MAX_DIGITS,
    }
    return [f"| {kind} | {text.format(**words)}. |" for kind, text in KINDS.items()]


def _quoted(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in sorted(words))


def _setting_row(row: SettingRow, spec: FsdpSpec) -> str:
    keys = ", ".join(f"`{spelling}`" for spelling in row.spellings) or "–"
    values = ", ".join(" = ".join(f"`{way}`" for way in (value, *others)) for value, others in row.choices.items())
    if row.prefixes:
        values += f"{'; ' if values else 'reshard; '}also after " + " or ".join(
            f"`{prefix}.`" for prefix in row.prefixes
        )
    if row.minimum is not None:
        values = f"{row.kind}, at least {row.minimum}"
        values += f", at most {row.maximum}" if row.maximum is not None else ""
    default = "–" if row.internal else _default(spec, row.name)
    about = f"{row.about} The key {row.ignored}" if row.ignored else row.about
    if row.stock:
        about += f" Reported (FSDP-W026) unless it is {' or '.join(f'`{value}`' for value in row.stock)}."
    elif row.ignored:
        about += " Reported (FSDP-W026) unless it is empty."
    cells = (f"`{row.name}`", keys, values or row.kind, default, about)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(spec: FsdpSpec, name: str) -> str:
    by_family = [(FAMILIES[family], defaults) for family, defaults in FAMILY_DEFAULTS.items() if family]
    by_version = [(f"in version {version}", defaults) for version, defaults in VERSION_DEFAULTS.items()]
    dependent = [f"`{defaults[name]}` {where}" for where, defaults in by_family + by_version if name in defaults]
    return ", ".join(dependent) or _shown(spec, name)


def _shown(spec: FsdpSpec, name: str) -> str:
    try:
        value = spec.get(name)
    except KeyError:
        return "–"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`" if value not in ("", (), {}) and not hasattr(value, "items") else "empty"


def dialects() -> str:
    """Return ``docs/dialects.md``: every key of the configs of other programs, and what becomes of it."""
    parts = [fill("dialects.md", {})]
    for dialect in DIALECTS:
        head = ["| key | becomes | |", "|---|---|---|"]
        groups: dict[tuple[str, str], list[DialectKey]] = {}  # the keys that have no effect for the same reason
        for key in dialect.table.rows.values():
            group = key.why if key.fate == "irrelevant" and not key.to else key.path
            groups.setdefault((key.fate, group), []).append(key)
        rows = [_dialect_row(keys[0], [key.path for key in keys]) for keys in groups.values()]
        rows += [f"| `{alias}` | as `{path}` | |" for alias, path in dialect.table.aliases.items()]
        parts += [f"## {dialect.title}", "", dialect.table.about.strip(), "", *head, *rows, ""]
    return "\n".join(parts)


def _dialect_row(row: DialectKey, paths: Sequence[str]) -> str:
    texts = {"irrelevant": "no effect", "refused": "refused (FSDP-E062)"}
    target = ", ".join(f"`{name}`" for name in row.to) or texts.get(row.fate, "the same key")
    place = "arguments of the Trainer: " if row.fate == "arguments" else ""
    why = f"{row.why[:1].upper()}{row.why[1:]}"
    if row.fate == "refused":
        unless = f" unless it is {' or '.join(f'`{value}`' for value in row.allowed)}" if row.allowed else ""
        target, why = f"{target}{unless}", f"{why}. {row.fix}"
    return f"| {', '.join(f'`{path}`' for path in paths)} | {place}{target} | {why} |".replace("|  |", "| |")


def hooks() -> str:
    """Return ``docs/hooks.md``: the functions that the package replaces."""
    parts = [fill("hooks.md", {})]
    for group, installed_by in GROUPS.items():
        rows = [
            f"| {' or '.join(f'`{name}`' for name in (hook.target, *hook.instead))} "
            f"| `{hook.replacement.replace('.', '/').replace(':', '.py:')}`{' (always)' * hook.always} | {hook.reason} "
            f"| [{hook.until}](upstream.md#{_anchor(hook.until)}) | {hook.without} |"
            for hook in HOOKS[group]
        ]
        head = ["| function | replacement | reason | until | without it |", "|---|---|---|---|---|"]
        parts += [f"## Group `{group}`", "", installed_by, "", *head, *rows, ""]
    return "\n".join(parts)


def _anchor(title: str) -> str:
    """Return the anchor that GitHub gives a title."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def upstream() -> str:
    """Return ``docs/upstream.md``: the changes in other libraries that would make hooks unnecessary."""
    rows: dict[str, list[Hook]] = {}
    for hook in (hook for hooks in HOOKS.values() for hook in hooks):
        rows.setdefault(hook.until, []).append(hook)
    libraries = yaml.safe_load(Path(__file__).with_name("upstream.yaml").read_text(encoding="utf-8"))
    parts = [fill("upstream.md", {})]
    for library, changes in libraries.items():
        parts += [f"## {library}", ""]
        for title, entry in changes.items():
            removed = _quoted(hook.target for hook in rows.pop(title))
            parts += [f"### {title}", "", f"Problem: {entry['problem']}", "", f"Change: {entry['change']}", ""]
            parts += [f"We would remove the replacements of {removed}.", ""]
    assert not rows, f"hooks.yaml names changes that upstream.yaml does not describe: {sorted(rows)}"
    return "\n".join(parts)


def contracts() -> str:
    """Return ``docs/contracts.md``: the private names of other libraries that the package uses."""
    rows = []
    for row in private_contracts():
        module, _, path = row.target.partition(":")
        older = f" (older versions: {', '.join(f'`{name}`' for name in row.instead)})" if row.instead else ""
        text = row.behavior or f"exists{older}"
        rows.append(f"| `{module}` | `{path}` | {text} | {row.use} | {row.without} |")
    head = ["| module | name | what is relied on | for | without it |", "|---|---|---|---|---|"]
    return "\n".join([fill("contracts.md", {}), _renamed_names(), "", *head, *rows, ""])


def _renamed_names() -> str:
    """Return one sentence about the last run of ``scripts/bench/measure/renamed_names.py``."""
    result = json.loads((DOCS / "results" / "renamed_names.json").read_text(encoding="utf-8"))
    counts, versions = result["counts"], result["versions"]
    return (
        f"Of {sum(counts.values())} names, tried one at a time with torch {versions['torch']}, transformers "
        f"{versions['transformers']} and accelerate {versions['accelerate']}: "
        + "; ".join(f"{name}: {counts[name]}" for name in sorted(counts))
        + "."
    )


def problems() -> str:
    """Return ``docs/problems.md``: the pages of all areas, with a table of contents."""
    contents, sections = [], []
    for area in AREAS.values():
        found = [entry for entry in read_entries().values() if entry.area == area]
        links = [f"[{entry.code}](#{entry.code.lower()})" for entry in found]
        contents.append(f"- [{area}](#{area}): {', '.join(links)}")
        sections.append(f"## {area}\n")
        sections += [
            f'<a id="{entry.code.lower()}"></a>\n\n### {entry.code}: {entry.title}\n\n{entry.text}\n' for entry in found
        ]
    return "\n".join([fill("problems.md", {}), *contents, "", *sections])


DOCUMENTS: dict[str, Callable[[], str]] = {
    "settings.md": settings,
    "dialects.md": dialects,
    "hooks.md": hooks,
    "upstream.md": upstream,
    "contracts.md": contracts,
    "problems.md": problems,
    "command_line.md": command_line,
    "clusters.md": clusters,
    "parts.svg": parts_picture.draw,
}
"""File in docs/ -> the function that returns its text."""


def outdated() -> dict[Path, str]:
    """Return the path and the new text of each document that is out of date."""
    rendered = {DOCS / name: render() for name, render in DOCUMENTS.items()}
    return {path: text for path, text in rendered.items() if not path.exists() or path.read_text("utf-8") != text}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a document is out of date")
    parser.add_argument("--runs", action="store_true", help="also start ranks for the output of a run")
    args = parser.parse_args()
    check = args.check
    if args.runs:
        (DOCS / "command_line.md").write_text(command_line(runs=True), encoding="utf-8")
        record("screenshots", "passed")
    changed = outdated()
    for path, text in changed.items():
        if check:
            print(f"{path} is out of date. Run: python -m scripts.update_docs", file=sys.stderr)
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")
    return 1 if check and changed else 0


if __name__ == "__main__":
    raise SystemExit(main())
