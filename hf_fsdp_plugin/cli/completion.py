"""``hf-fsdp completion``: prints a script that completes verbs, flags and their values in a shell.

The scripts are static: pressing TAB starts no Python process.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from hf_fsdp_plugin.cli.verbs import VERBS, make_parser

HELP = "Print a script that completes the verbs, flags and values of hf-fsdp in bash, zsh or fish."
EXAMPLES = (
    "hf-fsdp completion bash > ~/.local/share/bash-completion/completions/hf-fsdp",
    "hf-fsdp completion fish > ~/.config/fish/completions/hf-fsdp.fish",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One flag of a verb.

    Attributes:
        name: the name with the leading dashes.
        takes_value: whether the next word is its value.
        values: the values to complete; files, if it is empty.
    """

    name: str
    takes_value: bool = False
    values: tuple[str, ...] = ()
    help: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verb:
    """One verb, its flags, and the words that are not flags; files, if there are none.

    Attributes:
        has_script: whether a script follows, whose arguments are not completed.
    """

    name: str
    help: str
    flags: tuple[Flag, ...]
    words: tuple[str, ...] = ()
    has_script: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SCRIPTS, help="zsh: write the script to a file named _hf-fsdp in $fpath")


def run(args: argparse.Namespace) -> int:
    print(SCRIPTS[args.shell](verbs_with_flags()), end="")
    return 0


def verbs_with_flags() -> list[Verb]:
    """Return all verbs with their flags."""
    found = []
    for name, about in VERBS.items():
        flags: list[Flag] = []
        words: tuple[str, ...] = ()
        has_script = False
        for action in make_parser(name)._actions:
            choices, about_flag = tuple(map(str, action.choices or ())), getattr(action, "about", action.help)
            if about_flag == argparse.SUPPRESS:
                continue
            for option in (option for option in action.option_strings if option.startswith("--")):
                flag = Flag(name=option, takes_value=action.nargs != 0, values=choices, help=_first(about_flag))
                flags.append(flag)
            if not action.option_strings:
                words = words or choices
                has_script |= action.nargs == argparse.REMAINDER
        found.append(Verb(name=name, help=about, flags=tuple(flags), words=words, has_script=has_script))
    return found


def _first(text: str | None) -> str:
    """Return the first sentence of a description."""
    return (text or "").partition(". ")[0].rstrip(".")


def _words(words: Iterable[str]) -> str:
    return shlex.quote(" ".join(words))


def bash_script(verbs: Iterable[Verb]) -> str:
    """Return the script with a case for the flags of each verb."""
    cases = []
    for verb in verbs:
        by_values: dict[tuple[str, ...], list[str]] = {}
        for flag in verb.flags:
            if flag.takes_value:
                by_values.setdefault(flag.values, []).append(flag.name.replace("_", "-"))
        cases += [
            f"    {verb.name})",
            f"      flags={_words(flag.name for flag in verb.flags)}",
            f"      valued={_words(flag for flags in by_values.values() for flag in flags)}",
            f"      script={int(verb.has_script)} positional={_words(verb.words)}",
            '      case "${prev//_/-}" in',
            *(
                f"        {'|'.join(flags)}) {f'values={_words(values)}' if values else 'files=1'} ;;"
                for values, flags in by_values.items()
            ),
            "      esac ;;",
        ]
    return _BASH.replace("@VERBS@", " ".join(VERBS)).replace("@CASES@", "\n".join(cases)) + _BASH_END


def zsh_script(verbs: Iterable[Verb]) -> str:
    """Return the script for zsh: the function for bash, and code that calls it in zsh."""
    return _ZSH_BEGIN + bash_script(verbs).removesuffix(_BASH_END) + _ZSH_END


def fish_script(verbs: Iterable[Verb]) -> str:
    verbs = list(verbs)
    lines = ["complete -c hf-fsdp -n __fish_use_subcommand -f"]
    for verb in verbs:
        lines.append(f"complete -c hf-fsdp -n __fish_use_subcommand -a {verb.name} -d {shlex.quote(verb.help)}")
    for verb in verbs:
        seen = f"complete -c hf-fsdp -n '__fish_seen_subcommand_from {verb.name}'"
        if verb.words:
            lines.append(f"{seen} -f -a {_words(verb.words)}")
        for flag in verb.flags:
            line = f"{seen} -l {flag.name.removeprefix('--')} -d {shlex.quote(flag.help)}"
            if flag.values:
                line += f" -x -a {_words(flag.values)}"
            elif flag.takes_value:
                line += " -r -F"
            lines.append(line)
    return "\n".join(lines) + "\n"


_BASH = """\
_hf_fsdp() {
  local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}"
  local flags="" valued="" positional="" values="" files="" script=0 i word
  if ((COMP_CWORD == 1)); then
    COMPREPLY=($(compgen -W "@VERBS@ --help --version" -- "$cur"))
    return
  fi
  case "${COMP_WORDS[1]}" in
@CASES@
  esac
  if ((script)); then
    for ((i = 2; i < COMP_CWORD; i++)); do
      word="${COMP_WORDS[i]}"
      if [[ $word != -* ]]; then  # the script: its arguments are its own
        COMPREPLY=($(compgen -f -- "$cur"))
        return
      fi
      [[ " $valued " == *" ${word//_/-} "* ]] && ((i++))
    done
  fi
  if [[ -n $values ]]; then
    COMPREPLY=($(compgen -W "$values" -- "$cur"))
  elif [[ -z $files && $cur == -* ]]; then
    COMPREPLY=($(compgen -W "$flags" -- "$cur"))
  elif [[ -z $files && -n $positional ]]; then
    COMPREPLY=($(compgen -W "$positional" -- "$cur"))
  else
    COMPREPLY=($(compgen -f -- "$cur"))
  fi
}
"""
_BASH_END = "complete -o filenames -F _hf_fsdp hf-fsdp\n"
_ZSH_BEGIN = "#compdef hf-fsdp\nautoload -U bashcompinit && bashcompinit\n"
_ZSH_END = f"""\
if [[ ${{funcstack[1]}} == _hf-fsdp ]]; then _bash_complete -o filenames -F _hf_fsdp; else {_BASH_END[:-1]}; fi
"""

SCRIPTS: Final[Mapping[str, Callable[[Iterable[Verb]], str]]] = MappingProxyType(
    {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
)
