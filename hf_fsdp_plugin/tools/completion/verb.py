"""``hf-fsdp completion``: Print a script that completes the verbs, flags and values of hf-fsdp in bash, zsh or fish.

Examples::

    hf-fsdp completion bash > ~/.local/share/bash-completion/completions/hf-fsdp
    hf-fsdp completion fish > ~/.config/fish/completions/hf-fsdp.fish

The scripts are static: pressing TAB starts no Python process.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterable, Mapping
from importlib.resources import files
from typing import Final

from hf_fsdp_plugin.cli.main import VERBS, make_parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SCRIPTS, help="zsh: write the script to a file named _hf-fsdp in $fpath")


def run(args: argparse.Namespace) -> int:
    print(SCRIPTS[args.shell](), end="")
    return 0


def visible_actions(verb: str) -> list[argparse.Action]:
    """Return the arguments of a verb that its help describes, and all settings."""
    return [action for action in make_parser(verb)._actions if _about(action) != argparse.SUPPRESS]


def long_flags(action: argparse.Action) -> list[str]:
    return [option for option in action.option_strings if option.startswith("--")]


def _about(action: argparse.Action) -> str:
    return getattr(action, "about", action.help) or ""


def _choices(action: argparse.Action) -> tuple[str, ...]:
    """Return the values to complete; files, if there are none. For settings, more spellings are accepted."""
    row = getattr(action, "row", None)
    if row is None or action.nargs == 0:
        return tuple(map(str, action.choices or ()))
    if row.kind in ("bool", "reshard"):
        return "true", "false"
    return tuple(value for value in row.choices if value != "auto")


def _words(actions: Iterable[argparse.Action]) -> tuple[str, ...]:
    """Return the words to complete that are not flags; files, if there are none."""
    return next((words for action in actions if not action.option_strings and (words := _choices(action))), ())


def _quoted(words: Iterable[str]) -> str:
    return shlex.quote(" ".join(words))


def bash_script() -> str:
    """Return the script for bash and for zsh: ``completion.bash``, with a case for the flags of each verb."""
    cases = []
    for verb in VERBS:
        actions = visible_actions(verb)
        by_values: dict[tuple[str, ...], list[str]] = {}
        for action in actions:
            if action.option_strings and action.nargs != 0:
                flags = [flag.replace("_", "-") for flag in long_flags(action)]
                by_values.setdefault(_choices(action), []).extend(flags)
        has_script = any(action.nargs == argparse.REMAINDER for action in actions)  # its arguments are not completed
        cases += [
            f"    {verb})",
            f"      flags={_quoted(flag for action in actions for flag in long_flags(action))}",
            f"      valued={_quoted(flag for flags in by_values.values() for flag in flags)}",
            f"      script={int(has_script)} positional={_quoted(_words(actions))}",
            '      case "${prev//_/-}" in',
            *(
                f"        {'|'.join(flags)}) {f'values={_quoted(values)}' if values else 'files=1'} ;;"
                for values, flags in by_values.items()
            ),
            "      esac ;;",
        ]
    script = (files("hf_fsdp_plugin.tools.completion") / "completion.bash").read_text(encoding="utf-8")
    return script.replace("@VERBS@", " ".join(VERBS)).replace("@CASES@", "\n".join(cases))


def fish_script() -> str:
    begin = "complete -c hf-fsdp -n __fish_use_subcommand"
    lines = [f"{begin} -f", *(f"{begin} -a {verb} -d {shlex.quote(about)}" for verb, about in VERBS.items())]
    for verb in VERBS:
        seen, actions = f"complete -c hf-fsdp -n '__fish_seen_subcommand_from {verb}'", visible_actions(verb)
        if words := _words(actions):
            lines.append(f"{seen} -f -a {_quoted(words)}")
        for action in actions:
            values = _choices(action)
            value = f" -x -a {_quoted(values)}" if values else " -r -F" if action.nargs != 0 else ""
            first_sentence = _about(action).partition(". ")[0].rstrip(".")
            for flag in long_flags(action):
                lines.append(f"{seen} -l {flag.removeprefix('--')} -d {shlex.quote(first_sentence)}{value}")
    return "\n".join(lines) + "\n"


SCRIPTS: Final[Mapping[str, Callable[[], str]]] = {"bash": bash_script, "zsh": bash_script, "fish": fish_script}
