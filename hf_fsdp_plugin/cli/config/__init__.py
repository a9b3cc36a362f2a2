"""``hf-fsdp config``: asks for model, machines and FSDP settings, and writes a config file for Accelerate."""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_fsdp_plugin.cli.config import settings as answered
from hf_fsdp_plugin.cli.config.conversation import Asker, ask_questions
from hf_fsdp_plugin.cli.config.prediction import predict_memory
from hf_fsdp_plugin.cli.config.question import Question, State, label_of
from hf_fsdp_plugin.cli.config.questions import BY_NAME, QUESTIONS
from hf_fsdp_plugin.cli.config.target import Target, assess_text, find_target, write_target
from hf_fsdp_plugin.cli.config_text import SettingLine, changed_text, new_text, setting_lines, stock_limits
from hf_fsdp_plugin.cli.output import OK, print_failure, print_json, print_problems
from hf_fsdp_plugin.launcher.flags import Suggested
from hf_fsdp_plugin.launcher.world import DeviceSearch
from hf_fsdp_plugin.problems import Origin, Problem, SpecError, has_errors
from hf_fsdp_plugin.spec.load import Assessment
from hf_fsdp_plugin.text import printable

if TYPE_CHECKING:
    from hf_fsdp_plugin.estimate.results import MemoryEstimate

HELP = (
    "Ask for model, machines, batch and FSDP settings, predict the memory, and write a config for accelerate launch "
    "and hf-fsdp launch. An existing file keeps what is not asked."
)
EXAMPLES = (
    "hf-fsdp config -o fsdp.yaml --model meta-llama/Llama-3.1-8B --gpus 8 --gpu-memory 80GB",
    "hf-fsdp config --yes --num-machines 2 --gpus 8 --strategy hybrid_shard --show-args",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--config-file", metavar="PATH",
        help="file to write or change; - prints it (default: Accelerate's default config file)",
    )  # fmt: skip
    parser.add_argument("-y", "--yes", action="store_true", help="ask nothing: take the defaults of other answers")
    parser.add_argument("--force", action="store_true", help="change an existing file without confirmation")
    parser.add_argument("--cpu", action="store_true", help="run on CPU ranks instead of GPUs")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    parser.add_argument("--show-args", action="store_true", help="print the same settings as TrainingArguments(...)")
    answers = parser.add_argument_group("answers", "each replaces a question")
    for question in QUESTIONS:
        labels = Suggested(map(label_of, question.choices_in(State(answers={"gpus": 2}))))
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
    given = {name: value for name in BY_NAME if (value := getattr(args, name)) is not None}
    target = find_target(args.config_file, os.environ, force=args.force)
    if args.yes and target.text is not None and not args.force:
        message = "the file exists. --yes does not change it."
        fix = "Pass --force to change it, or another path with -o."
        raise SpecError([Problem(code="FSDP-E761", message=message, fix=fix, origin=Origin(source=target.shown))])
    search = DeviceSearch()
    try:
        state = State(path=target.shown, machine=search.result)
        if target.present is not None:
            state.existing = target.present.spec
        state.cpu = args.cpu or state.existing.launch.use_cpu
        asker = Asker(takes_defaults=args.yes)
        if not args.yes:
            where = "prints the file" if target.shown == "-" else f"writes {target.shown}"
            asker.show(f"This {where}. Ctrl-C at any question writes nothing.")
        ask_questions(state, asker, given)
    finally:
        search.close()
    settings, comments = answered.settings_of(state), answered.comments_of(state)
    lines = setting_lines(settings, state.version, comments)
    if target.text is None or target.present is None:
        new = setting_lines({**answered.fixed_settings(state), **settings}, state.version, comments)
        text = new_text(new, answered.header_of(state), is_json=target.is_json)
    else:
        unused = answered.unused_settings(state, settings)
        text = changed_text(target.text, lines, unused, target.present.spec, is_json=target.is_json)
    checked = _check(text, target, lines)
    memory, memory_line = predict_memory(state, checked.spec)
    if memory_line:
        asker.show(f"Predicted memory of these settings: {memory_line}.")
    if not target.is_json:
        text = answered.with_header(text, answered.header_of(state, memory_line))
    if not _may_write(args, target, text, asker, state):
        print("Nothing was written.", file=sys.stderr)
        return print_failure([], as_json=args.json)
    if target.path is not None and text != target.text:
        write_target(target, text)
    _print_result(args, target, text, state, checked, memory)
    return OK


def _check(text: str, target: Target, lines: Sequence[SettingLine]) -> Assessment:
    """Return the assessment of the new content. Raises ``SpecError`` if it has errors or other settings."""
    checked = assess_text(text, target)
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


def _may_write(args: argparse.Namespace, target: Target, text: str, asker: Asker, state: State) -> bool:
    """Show the changes of an existing file and ask for confirmation, unless ``--force`` is given."""
    if target.text is None or target.text == text:
        return True
    lines = difflib.unified_diff(target.text.splitlines(), text.splitlines(), "before", "after", lineterm="", n=1)
    print("", *map(printable, lines), sep="\n", file=sys.stderr)
    question = Question(name="force", text=f"Change {target.shown}", default=True)
    return bool(args.force or asker.ask(question, state))


def _print_result(
    args: argparse.Namespace,
    target: Target,
    text: str,
    state: State,
    checked: Assessment,
    memory: MemoryEstimate | None,
) -> None:
    print_problems(problem for problem in checked.problems if problem.severity != "note")
    settings = {
        name: dict(value) if isinstance(value, Mapping) else value for name, value, _ in checked.spec.settings()
    }
    written = {name: value for name, value in settings.items() if checked.spec.asked(name)}
    limits = list(stock_limits(written, state.version))
    arguments = answered.arguments_of(state, checked.spec)
    if args.json:
        print_json(
            {
                "ok": True,
                "path": str(target.path) if target.path is not None else None,
                "written": target.path is not None and text != target.text,
                "text": text,
                "answers": state.answers,
                "settings": settings,
                "training_arguments": arguments,
                "per_rank": memory.to_json() if memory is not None else None,
                "stock_limits": limits,
                "problems": [problem.to_json() for problem in checked.problems],
            }
        )
        return
    for limit in limits:
        print(f"note: {limit}", file=sys.stderr)
    if target.path is None:
        print(text, end="")
    else:
        print(f"\n{'wrote' if text != target.text else 'unchanged:'} {printable(target.shown)}", file=sys.stderr)
        option = "" if target.is_default else f"--config_file {shlex.quote(target.shown)} "
        for launcher in ("accelerate", "hf-fsdp"):
            print(printable(f"  {launcher} launch {option}train.py"), file=sys.stderr)
    if args.show_args:
        print(code_of(arguments))


def code_of(arguments: Mapping[str, Any]) -> str:
    """Return the call of ``TrainingArguments`` as Python code, with one argument per line."""
    lines = ["TrainingArguments("]
    for name, value in arguments.items():
        if isinstance(value, dict):
            lines += [f"    {name}={{", *(f"        {key!r}: {item!r}," for key, item in value.items()), "    },"]
        else:
            lines.append(f"    {name}={value!r},")
    return "\n".join([*lines, ")"])
