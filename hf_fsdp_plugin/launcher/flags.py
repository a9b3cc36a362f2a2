"""The flags of ``hf-fsdp launch``, which are tables of ``flags.yaml``, and the parser of all verbs.

The flags that set FSDP (:func:`add_setting_flags`) also belong to other verbs, as ``check`` and ``plan``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

import yaml

from hf_fsdp_plugin.problems import UsageError
from hf_fsdp_plugin.sources.command_line import SHORT_FLAGS, SWITCHES, flag_name, remedy_of_switch
from hf_fsdp_plugin.vocabulary import BY_KEY, ROWS, WORDS, Scope, SettingRow, nearest_word, similar_key

FLAG_TABLES: Final[Mapping[str, Any]] = yaml.load(
    Path(__file__).with_name("flags.yaml").read_text(encoding="utf-8"),
    Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader),
)
"""The tables of ``flags.yaml``: name of a table -> flag -> its value, which is empty for a switch, and its help."""
_PREFIXED: Final[tuple[Scope, ...]] = ("fsdp", "parallelism", "dynamo", "fp8")
_NOT_FSDP: Final = "this launcher runs FSDP only. Use `accelerate launch` for other engines."
_UNSUPPORTED: Final[Mapping[str, str]] = {
    **dict.fromkeys(WORDS["flags_of_other_engines"], _NOT_FSDP),
    "no_python": "every rank runs Python with the plugin installed. Leave the flag out.",
}
"""Flag of other launchers -> why it is refused."""
_UNSUPPORTED_PREFIXES: Final = tuple(WORDS["flag_prefixes_of_other_engines"])


class SettingFlag(argparse.Action):
    """Appends the flag as it is written, with its value after ``=``, to ``command_line``, for ``load_spec``.

    Args:
        about: the meaning of the setting, also where the help does not list it.
        row: the setting, if it is one.
        aliases: names that are accepted too, with underscores.
    """

    def __init__(self, *, about: str, row: SettingRow | None, aliases: Sequence[str], **options: Any) -> None:
        super().__init__(default=(), **options)
        self.about, self.row, self.aliases = about, row, aliases

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        flag = str(option_string) if self.nargs == 0 else f"{option_string}={values}"
        namespace.command_line = (*namespace.command_line, flag)


class _LauncherFlag(argparse.Action):
    """Stores a value that may be given once."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        present = getattr(namespace, self.dest)
        if not values:
            parser.error(f"{option_string} needs a value.")
        if present not in (None, values):
            parser.error(f"{option_string} {values} conflicts with {option_string} {present}. Keep one of them.")
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """Accepts flags in any case, with hyphens or underscores, and raises ``UsageError`` with one line.

    A value may begin with one dash. SCRIPT takes the rest of the line (``nargs=REMAINDER``): the words after it are its
    arguments, also those that look like flags. The result's attribute ``given`` maps the attribute of each flag that
    was written, apart from settings, to the flag as written.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words, given = self._join_values(sys.argv[1:] if args is None else args)
        namespace, rest = super().parse_known_args(words, namespace)
        namespace.given = given
        return namespace, rest

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        namespace, rest = self.parse_known_args(args, namespace)
        if unknown := next((word for word in rest if word.startswith("-")), ""):
            self.error(self._why_unknown(unknown.partition("=")[0]))
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return namespace

    def find(self, written: str) -> argparse.Action | None:
        """Return the action of a flag in any spelling; ``None`` if there is none."""
        if not written.startswith("--"):
            return self._option_string_actions.get(written)
        return self.by_name().get(flag_name(written))

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} `{self.prog} --help` lists the arguments.")

    def by_name(self) -> dict[str, argparse.Action]:
        """Return name, with underscores -> action of the long flags and their aliases."""
        found: dict[str, argparse.Action] = {}
        for action in self._actions:
            names = [flag_name(flag) for flag in action.option_strings if flag.startswith("--")]
            found |= dict.fromkeys((*names, *getattr(action, "aliases", ())), action)
        return found

    def _join_values(self, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return the words with each flag joined to its value by ``=``, and the flags that were written."""
        waiting, joined, given = list(words), [], {}
        has_script = self._has_script()
        while waiting and waiting[0] != "--" and not (has_script and not waiting[0].startswith("-")):
            word = waiting.pop(0)
            written, equals, value = word.partition("=")
            action = self.find(written)
            if action is not None:
                self._option_string_actions[written] = action  # in the spelling that was used
                if action.nargs == 0 and equals:
                    self.error(f"{written} takes no value, but is given {value!r}. {remedy_of_switch(written)}")
                if action.nargs is None and not equals:
                    if not waiting or waiting[0].startswith("--"):
                        self.error(f"{written} needs a value.")
                    word = f"{written}={waiting.pop(0)}"
                if not isinstance(action, SettingFlag):
                    given[action.dest] = written
            joined.append(word)
        return [*joined, *waiting], given

    def _has_script(self) -> bool:
        return any(action.nargs == argparse.REMAINDER for action in self._actions)

    def _why_unknown(self, written: str) -> str:
        name = flag_name(written) if written.startswith("--") else ""
        near = ""
        if any(isinstance(action, SettingFlag) for action in self._actions):
            if reason := why_refused(name):
                return f"{written} {reason}"
            near = FLAG_TABLES["other_launchers"].get(name, "")
            near = near or (similar_key(name, _PREFIXED) if name.startswith(("fsdp_", "parallelism_config_")) else "")
        if not near:
            known = [flag[2:] for action in self._actions for flag in action.option_strings if flag.startswith("--")]
            names = {flag_name(flag): flag for flag in known}
            near = names.get(nearest_word(name, names), "")
        place, rest = (" before the script", " Flags of the script go after it.") if self._has_script() else ("", "")
        return f"unknown flag {written}{place}.{f' Did you mean --{near}?' if near else ''}{rest}"


def why_refused(name: str) -> str:
    """Return why a verb that takes settings refuses a flag; empty if the flag is no flag of any launcher."""
    if name in _UNSUPPORTED or name.startswith(_UNSUPPORTED_PREFIXES):
        return f"is not supported: {_UNSUPPORTED.get(name, _NOT_FSDP)}"
    if name in FLAG_TABLES["launch"]:
        return "is a flag of hf-fsdp launch only."
    return ""


def add_launch_flags(parser: Parser) -> None:
    """Add the flags of launch that the parser does not have yet, and SCRIPT with its arguments."""
    known = parser.by_name()
    for name, (value, about) in FLAG_TABLES["launch"].items():
        if name not in known:
            flags = [f"--{name}", *(f"-{letter}" for letter, long in SHORT_FLAGS.items() if long == name)]
            choices = value.split("|") if "|" in value and value.islower() else None
            kind: dict[str, Any] = {"action": _LauncherFlag, "metavar": value, "choices": choices}
            if not value:
                kind = {"action": "store_const", "const": "true"}
            parser.add_argument(*flags, dest=f"launch.{name}", help=about, **kind)
    add_override_flag(parser)
    add_setting_flags(parser, is_shown=True)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="script and its arguments")
    parser.usage = f"{parser.prog} [FLAGS] SCRIPT [ARGS ...]"


def add_override_flag(parser: argparse.ArgumentParser) -> None:
    about = "override one setting, with the highest precedence; repeatable"
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="overrides", help=about)


def add_setting_flags(parser: Parser, *, is_shown: bool = False) -> None:
    """Add all flags that set FSDP and that the parser does not have yet. They are collected in ``command_line``.

    Args:
        is_shown: whether the help lists them.
    """
    flags = "--fsdp_*, --parallelism_config_*, --dynamo_* and --fp8_*"
    more = f"with hyphens or underscores; also all flags {flags} of Accelerate"
    group = parser.add_argument_group("settings", more) if is_shown else parser
    known = parser.by_name()

    def add(to: Any, name: str, metavar: str, about: str, row: SettingRow | None, aliases: Sequence[str] = ()) -> None:
        if name not in known:
            kind = {"metavar": metavar} if metavar else {"nargs": 0}
            shown = (is_shown and to is group and about) or argparse.SUPPRESS
            options = {"action": SettingFlag, "dest": "command_line", "about": about, "help": shown, **kind}
            to.add_argument(f"--{name}", row=row, aliases=aliases, **options)

    for name, (value, about) in FLAG_TABLES["settings"].items():
        add(group, name, value, about, BY_KEY.get(("launch", name)))
    for row in ROWS:
        if row.scope in _PREFIXED and row.opens is None:
            aliases = [row.key.removesuffix(row.spellings[0]) + spelling for spelling in row.spellings]
            add(parser, row.key, "" if row.key in SWITCHES else "VALUE", row.about, row, aliases)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchArguments:
    """The parsed arguments of ``hf-fsdp launch``.

    Attributes:
        options: name -> value of the launcher's flags; ``"true"`` for flags without a value.
        overrides: the values of ``--set``.
        command_line: the setting flags for ``load_spec``: each as written, joined with its value by ``=``.
        script: path, or a module name if ``module`` is in `options`; empty if none was given.
        script_args: the arguments after SCRIPT, unchanged.
        env: further environment variables of the ranks, from another verb.
    """

    options: dict[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    command_line: tuple[str, ...] = ()
    script: str = ""
    script_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


def parse_launch_arguments(argv: Sequence[str], prog: str = "hf-fsdp launch") -> LaunchArguments:
    """Parse flags of launch, SCRIPT and its arguments.

    Raises:
        UsageError: an unknown or unsupported flag (``-h`` included), or a missing value.
    """
    parser = Parser(prog=prog, add_help=False, allow_abbrev=False)
    add_launch_flags(parser)
    return read_launch_arguments(parser.parse_args(argv))


def read_launch_arguments(args: argparse.Namespace) -> LaunchArguments:
    """Return the arguments that the flags of :func:`add_launch_flags` set."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    options = {name.removeprefix("launch."): given[name] for name in given if name.startswith("launch.")}
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    return LaunchArguments(
        options=options,
        overrides=tuple(args.overrides),
        command_line=tuple(args.command_line),
        script=words[0] if words else "",
        script_args=tuple(words[1:]),
    )
