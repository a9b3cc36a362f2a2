"""``hf-fsdp config``: Ask for model, machines, batch and FSDP settings, predict the memory, and write a config for
accelerate launch and hf-fsdp launch. An existing file keeps what is not asked.

Examples::

    hf-fsdp config -o fsdp.yaml --model meta-llama/Llama-3.1-8B --gpus 8 --gpu-memory 80GB
    hf-fsdp config --yes --num-machines 2 --gpus 8 --strategy hybrid_shard

The present content of the file is read first, and the file is replaced as the last step.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from hf_fsdp_plugin.cli.output import OK, print_failure, print_json, print_problems
from hf_fsdp_plugin.launcher.world import find_devices
from hf_fsdp_plugin.problems import Origin, Problem, SpecError, has_errors
from hf_fsdp_plugin.sources.config_location import accelerate_cache, default_config_file
from hf_fsdp_plugin.sources.config_tree import ConfigFile, config_tree, read_text
from hf_fsdp_plugin.sources.interface import Sources
from hf_fsdp_plugin.spec.load import Assessment, assess
from hf_fsdp_plugin.spec.value_parsers import setting_to_json
from hf_fsdp_plugin.text import printable
from hf_fsdp_plugin.tools.config import conversation, questions
from hf_fsdp_plugin.tools.config import text as config_text
from hf_fsdp_plugin.tools.config.conversation import Question, State, label_of, show_text
from hf_fsdp_plugin.tools.config.text import check_place, file_exists_error, write_config
from hf_fsdp_plugin.tools.plan.estimate.types import MemoryEstimate
from hf_fsdp_plugin.vocabulary import TRAINING_FILE_MARKS

STDOUT: Final = "-"
_OTHER_CONFIG: Final = "FSDP-E766"


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Where the config is written.

    Attributes:
        path: ``None`` for stdout.
        shown: as the user named it.
        text: the present content; ``None`` if there is no file.
        new: the content that is written.
        present: the settings of the present content.
        is_default: whether it is Accelerate's default file.
    """

    path: Path | None
    shown: str
    text: str | None = None
    new: str = ""
    present: Assessment | None = None
    is_default: bool = False

    @property
    def is_changed(self) -> bool:
        return self.path is not None and self.new != self.text

    @property
    def is_json(self) -> bool:
        return self.path is not None and self.path.suffix.lower() == ".json"


class _Suggested(tuple[str, ...]):
    """Values for completion in a shell. The reader of the value checks it, and accepts more spellings."""

    def __contains__(self, value: object) -> bool:
        return True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--config-file", metavar="PATH",
        help="file to write or change; - prints it (default: Accelerate's default config file)",
    )  # fmt: skip
    parser.add_argument("-y", "--yes", action="store_true", help="ask nothing: take the defaults of other answers")
    parser.add_argument("--force", action="store_true", help="change an existing file without confirmation")
    parser.add_argument("--cpu", action="store_true", help="run on CPU ranks instead of GPUs")
    answers = parser.add_argument_group("answers", "each replaces a question")
    for question in questions.QUESTIONS:
        labels = _Suggested(map(label_of, question.choices_in(State(answers={"gpus": 2}))))
        answers.add_argument(
            question.flag, metavar="|".join(labels) or question.name.rpartition("_")[2].upper(), help=question.help,
            choices=labels or None,
        )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Ask, then write the file. Returns 0 if it was written, 1 if not, 2 for wrong options."""
    try:
        return _run(args)
    except KeyboardInterrupt:
        print("\nNothing was written.", file=sys.stderr)
        raise


def _run(args: argparse.Namespace) -> int:
    given = {name: value for name in questions.BY_NAME if (value := getattr(args, name)) is not None}
    target = find_target(args.config_file, os.environ, force=args.force)
    if args.yes and target.text is not None and not args.force:
        raise file_exists_error(target.shown, "the file exists. --yes does not change it.", "-o")
    state = State(path=target.shown, machine=functools.cache(find_devices), takes_defaults=args.yes)
    if target.present is not None:
        state.existing = target.present.spec
    state.cpu = args.cpu or state.existing.launch.use_cpu
    if not args.yes:
        where = "prints the file" if target.shown == "-" else f"writes {target.shown}"
        show_text(f"This {where}. Ctrl-C at any question writes nothing.")
    conversation.ask_questions(questions.QUESTIONS, state, given)
    fixed = questions.fixed_settings(state) if target.present is None else {}
    settings = fixed | questions.settings_of(state)
    lines = config_text.setting_lines(settings, state.version, questions.comments_of(state))
    if target.text is None or target.present is None:
        text = config_text.new_text(lines, is_json=target.is_json)
    else:
        unused, present = questions.unused_settings(state, settings), target.present.spec
        new = [line for line in lines if not (present.asked(line.name) and present.get(line.name) == line.means)]
        text = config_text.changed_text(target.text, new, unused, is_json=target.is_json)
    target = replace(target, new=text)
    checked = _check(target, lines)
    memory = conversation.predict_memory(state, checked.spec)
    if not _may_write(args, target, state):
        print("Nothing was written.", file=sys.stderr)
        return print_failure([], as_json=args.json)
    if target.path is not None and target.is_changed:
        write_config(target.path, target.shown, target.new)
    _print_result(args, target, state, checked, memory)
    return OK


def _check(target: Target, lines: Sequence[config_text.SettingLine]) -> Assessment:
    """Return the assessment of the new content. Raises ``SpecError`` if it has errors or other settings."""
    path = target.path or Path.cwd() / "stdout.yaml"
    checked = assess(Sources(config=ConfigFile(path=path, shown=target.shown, data=target.new.encode()), environ={}))
    if has_errors(checked.problems):
        print("The file would have these errors. It was not written.", file=sys.stderr)
        raise SpecError(checked.problems)
    for line in lines:
        found = checked.spec.get(line.name) if checked.spec.asked(line.name) else line.means
        if found != line.means:
            message = f"{line.name} would be {found} instead of {line.means}, because of other keys in the file."
            fix = "Correct these keys, or write a new file with -o. Nothing was written."
            raise SpecError([Problem(code="FSDP-E765", message=message, fix=fix, setting=line.name)])
    return checked


def _may_write(args: argparse.Namespace, target: Target, state: State) -> bool:
    """Show the changes of an existing file and ask for confirmation, unless ``--force`` is given."""
    if target.text is None or target.text == target.new:
        return True
    before, after = target.text.splitlines(), target.new.splitlines()
    lines = difflib.unified_diff(before, after, "before", "after", lineterm="", n=1)
    print("", *map(printable, lines), sep="\n", file=sys.stderr)
    question = Question(name="force", text=f"Change {target.shown}", default=True)
    return bool(args.force or conversation.ask_question(question, state))


def _print_result(
    args: argparse.Namespace, target: Target, state: State, checked: Assessment, memory: MemoryEstimate | None
) -> None:
    print_problems(problem for problem in checked.problems if problem.severity != "note")
    settings = {name: setting_to_json(value) for name, value, _ in checked.spec.settings()}
    written = {name: value for name, value in settings.items() if checked.spec.asked(name)}
    limits = list(config_text.stock_limits(written, state.version))
    sizes = state.answers["micro_batch"], state.accumulation, state.answers.get("sync_each_batch", False)
    show_text(f"Arguments of the script: {' '.join(config_text.script_arguments(*sizes))}")
    if args.json:
        tree: dict[str, Any] = {"ok": True, "path": target.path, "written": target.is_changed, "text": target.new}
        tree |= {"answers": state.answers, "settings": settings, "per_rank": memory, "stock_limits": limits}
        print_json({**tree, "problems": checked.problems})
        return
    for limit in limits:
        print(f"note: {limit}", file=sys.stderr)
    if target.path is None:
        print(target.new, end="")
    else:
        print(f"\n{'wrote' if target.is_changed else 'unchanged:'} {printable(target.shown)}", file=sys.stderr)
        option = "" if target.is_default else f"--config_file {shlex.quote(target.shown)} "
        for launcher in ("accelerate", "hf-fsdp"):
            print(printable(f"  {launcher} launch {option}train.py"), file=sys.stderr)


def find_target(name: str | None, variables: Mapping[str, str], *, force: bool) -> Target:
    """Return the file that is written, with its present content.

    Args:
        name: a path; ``-`` for stdout; ``None`` for Accelerate's default file.
        force: whether a file that cannot be parsed may be replaced.

    Raises:
        SpecError: the place cannot be written, or has a file that cannot be read as a config.
    """
    if name == STDOUT:
        return Target(path=None, shown=STDOUT)
    found = default_config_file(variables) if name is None else ConfigFile.at(name)
    folder = accelerate_cache(variables)
    path = found.path if found is not None else Path(folder, "default_config.yaml")
    target = Target(path=path, shown=name or str(path), is_default=name is None)
    check_place(path, target.shown, makes_folders=target.is_default)
    if not os.path.lexists(path):
        return target
    try:
        text, present = _read(path, target.shown)
    except SpecError as error:
        if not force or error.problems[0].code == _OTHER_CONFIG:
            raise
        text, present = "", None
    return replace(target, text=text, present=present)


def _read(path: Path, shown: str) -> tuple[str, Assessment]:
    file = ConfigFile(path=path, shown=shown)
    text = read_text(file)
    keys = {entry.key.strip().lower() for entry in config_tree(file).value}
    if keys & TRAINING_FILE_MARKS and "distributed_type" not in keys:
        message = "this is the config of a training script, not a config of Accelerate."
        fix = "Give another path with -o."
        raise SpecError([Problem(code=_OTHER_CONFIG, message=message, fix=fix, origin=Origin(source=shown))])
    return text, assess(Sources(config=file, environ={}, allows_deepspeed=True))
