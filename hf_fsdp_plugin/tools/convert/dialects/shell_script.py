"""Reads the command in a shell script that starts a training: the flags of its launcher and of the training script."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Final

from hf_fsdp_plugin.sources.command_line import SWITCHES, GivenFlag, add_flag, flag_entry, parse_words
from hf_fsdp_plugin.sources.tree import MAX_BYTES, ConfigEntry, from_python
from hf_fsdp_plugin.text import shorten
from hf_fsdp_plugin.tools.convert.dialects import accelerate, axolotl, llama_factory, ms_swift, training_script
from hf_fsdp_plugin.tools.convert.dialects.interface import ConfigDialect, DialectDocument, DialectReading, load_yaml
from hf_fsdp_plugin.tools.convert.dialects.shell_commands import ShellCommand, ShellWord, parse_commands
from hf_fsdp_plugin.tools.convert.dialects.training_script import as_file, find_file, load_presets, read_training
from hf_fsdp_plugin.vocabulary import TRAINING_FILE_MARKS

_TOOLS: Final[Mapping[str, ConfigDialect]] = {
    "swift": ms_swift.DIALECT,
    "llama_factory": llama_factory.DIALECT,
    "axolotl": axolotl.DIALECT,
}
"""Launcher -> the dialect of its arguments. Other scripts have those of a training script."""
_WITHOUT_SCRIPT: Final = {*_TOOLS, "trl"}
"""Launchers that start a script of their own."""


@cache
def _programs() -> re.Pattern[str]:
    groups = "|".join(f"(?P<{name}>{pattern})" for name, pattern in load_yaml("shell_script")["programs"].items())
    return re.compile(rf"(?<![^ ])(?<!--)(?:{groups}) ")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingCommand:
    """A command that starts a training.

    Attributes:
        name: program and script, for messages.
        first, last: its lines.
        launcher: one of the programs in the table.
        flags: the flags of the launcher.
        arguments: the flags of the training script.
        files: the other words after the script.
        variables: the variables of the script.
    """

    name: str
    first: int
    last: int
    launcher: str
    flags: tuple[GivenFlag, ...]
    arguments: tuple[GivenFlag, ...]
    files: tuple[ShellWord, ...]
    variables: Mapping[str, str]

    def mark(self) -> ConfigEntry:
        """Return the entry of the command, by which its dialect is recognized."""
        return ConfigEntry(key=self.name, line=self.first, value=from_python(self.name))


def find_trainings(document: DialectDocument) -> list[TrainingCommand]:
    """Return the commands that start a training, in a shell script or in a text that is no YAML."""
    if document.error is None and not document.is_script:
        return []
    return [training for command in _all_commands(document.text) if (training := _training_of(command)) is not None]


def _all_commands(text: str, first: int = 1) -> Iterator[ShellCommand]:
    """Yield the commands of a script, also those that ``bash -c`` runs."""
    for command in parse_commands(text):
        words = tuple(replace(word, line=word.line + first - 1) for word in command.words)
        yield replace(command, words=words)
        for option, script in pairwise(words):
            if option.text in ("-c", "-lc"):
                yield from _all_commands(script.text, script.line)


def _training_of(command: ShellCommand) -> TrainingCommand | None:
    if command.words[0].text in ("echo", "printf"):
        return None
    line = "".join(f"{_without_folder(word.text)} " for word in command.words)
    for found in _programs().finditer(line):
        before = line[: found.start()].split(" ")
        if len(before) > 1 and re.fullmatch(r"--[^ =]+", before[-2]):
            continue  # the value of a flag
        launcher = str(found.lastgroup)
        words = command.words[line[: found.end()].count(" ") :]
        flags: tuple[GivenFlag, ...] = ()
        name = found[0]
        if launcher not in _WITHOUT_SCRIPT:
            flags, words = _parse_flags(words, until_script=True)
            name, words = " ".join([name.strip(), *(word.text for word in words[:1])]), words[1:]
        arguments, files = _parse_flags(words)
        return TrainingCommand(
            name=name.strip(),
            first=command.words[0].line,
            last=command.words[-1].line,
            launcher=launcher,
            flags=flags,
            arguments=arguments,
            files=files,
            variables=command.variables,
        )
    return None


def _without_folder(text: str) -> str:
    """Return a word for the recognition of programs: ``/env/bin/torchrun`` is ``torchrun``."""
    return "_" if " " in text or not text else text if text.startswith("-") else text.rpartition("/")[2]


def _parse_flags(
    words: Sequence[ShellWord], *, until_script: bool = False
) -> tuple[tuple[GivenFlag, ...], tuple[ShellWord, ...]]:
    """Return the flags and the other words. ``until_script``: those before the first other word, and the rest."""
    switches = SWITCHES | frozenset(load_yaml("shell_script")["switches"].split() if until_script else ())
    flags: list[GivenFlag] = []
    others: list[ShellWord] = []
    for position, flag in parse_words([word.text for word in words], switches):
        word = words[position]
        if flag is None and until_script and word.text.startswith("$"):  # flags that another script sets
            flag = GivenFlag(written="nproc_per_node", name="nproc_per_node", value=word.text, num_words=1)
        if flag is not None:
            flags.append(flag._replace(line=word.line))
        elif until_script:
            return tuple(flags), tuple(words[position:])
        else:
            others.append(word)
    return tuple(flags), tuple(others)


def _marks(document: DialectDocument) -> Sequence[ConfigEntry]:
    return [training.mark() for training in find_trainings(document)]


def _read(reading: DialectReading) -> None:
    if (training := _choose_training(reading)) is None:
        return
    _include_files(reading, training)
    if training.launcher in ("accelerate", "trl"):
        _add_accelerate_flags(reading, training)
    else:
        _add_launcher_flags(reading, training)
    _add_arguments(reading, training)
    # A flag overrides the files, but does not turn off what they turn on.
    given = {setting.name for setting in reading.settings if setting.origin.source == reading.source}
    given.discard("launch.distributed_type")
    reading.settings = [s for s in reading.settings if s.origin.source == reading.source or s.name not in given]


def _choose_training(reading: DialectReading) -> TrainingCommand | None:
    """Return the only command, or the one in the line that the user gave, or report that there are several."""
    trainings, file = find_trainings(reading.document), reading.document.file
    start = None if file is None else file.start
    chosen = [each for each in trainings if start is None or each.first <= start <= each.last]
    if len(chosen) == 1:
        return chosen[0]
    places = ", ".join(f"line {each.first} ({shorten(each.name, 60)})" for each in trainings)
    message = f"the script has {len(trainings)} training commands: {places}."
    if start is not None and not chosen:
        message = f"line {start} is not in one of the training commands: {places}."
    fix = f"Give the line of one of them: {reading.source}:{trainings[-1].first}."
    reading.report("FSDP-E074", trainings[0].mark(), message, fix)
    return None


def _include_files(reading: DialectReading, training: TrainingCommand) -> None:
    """Read the configs that a command names: of Accelerate, and of the training script."""
    presets = load_presets()["accelerate_of_trl"]
    for flag in (*training.flags, *training.arguments):
        entry = flag_entry(flag)
        if flag.name == "accelerate_config" and flag.text in presets:
            reading.include(as_file(reading, entry, presets[flag.text]))
        elif flag.name == "accelerate_config" or (flag.name == "config_file" and flag in training.flags):
            names = presets if flag.name == "accelerate_config" else ()
            if (file := find_file(reading, entry, names)) is not None:
                reading.include(file)
    words = [flag_entry(flag) for flag in training.arguments if flag.name == "config"]
    words += [ConfigEntry(key="config", line=word.line, value=from_python(word.text)) for word in training.files]
    is_own = training.launcher in _WITHOUT_SCRIPT
    marks = re.compile(rf"^[\s\"']*(?:{'|'.join(TRAINING_FILE_MARKS)})[\"']?\s*:", re.MULTILINE)
    for entry in words:
        if entry.value.text.endswith((".yaml", ".yml", ".json")):
            file = find_file(reading, entry, report=is_own)
            # Another file of a script may be anything, such as data.
            is_small = file is not None and file.path.stat().st_size <= MAX_BYTES
            if file is not None and (is_own or (is_small and marks.search(file.path.read_text("utf-8", "replace")))):
                reading.include(file)


def _add_accelerate_flags(reading: DialectReading, training: TrainingCommand) -> None:
    flags = training.flags or [flag for flag in training.arguments if flag.name in ("num_processes", "mixed_precision")]
    engine = next((flag for flag in flags if flag.name == "use_deepspeed"), None)
    section, keys = dict[str, str](), accelerate.DIALECT.table.rows
    if any("fsdp" in flag.name for flag in flags):
        reading.defaults = "accelerate"
    for flag in flags:
        entry = flag_entry(flag)
        if engine is not None and (flag is engine or f"deepspeed_config.{flag.name}" in keys):
            section[flag.name] = flag.text
            reading.record_read("accelerate.deepspeed", entry)
        elif "$" in flag.text:
            reading.skip(entry, flag.written)
        else:
            add_flag(reading, flag)
            reading.record_read(f"accelerate.{flag.name}", entry)
    if engine is None:
        return
    if any(flag.name == "use_fsdp" for flag in flags):
        message = "--use_fsdp and --use_deepspeed are both set."
        reading.report("FSDP-E073", flag_entry(engine), message, "Remove --use_deepspeed to train with FSDP.")
    del section[engine.name]
    config = {"distributed_type": "DEEPSPEED", "deepspeed_config": section}
    arguments = {flag.name: flag.value for flag in training.arguments if flag.value and "$" not in flag.value}
    reading.include(as_file(reading, flag_entry(engine), config), arguments)


def _add_launcher_flags(reading: DialectReading, training: TrainingCommand) -> None:
    """Add the flags of torchrun or deepspeed, or the variables that take their place."""
    table, flags = reading.dialect_of.table, list(training.flags)
    for variable, name in load_yaml("shell_script")["variables"].items() if training.launcher in _TOOLS else ():
        if variable in training.variables:
            value = training.variables[variable]
            flags.append(GivenFlag(written=variable, name=name, value=value, num_words=0, line=training.first))
    nodes = next((flag.text for flag in flags if flag.name in ("nnodes", "num_nodes")), "1")
    for flag in flags:
        entry, path = flag_entry(flag), table.known(f"launcher.{flag.name}")
        if path == "launcher.nproc_per_node" and flag.text.isdecimal() and nodes.isdecimal():
            entry = replace(entry, value=from_python(int(flag.text) * int(nodes)))
        elif path == "launcher.nproc_per_node" or (path in table.rows and not re.fullmatch(r"[\w.:-]+", flag.text)):
            reading.skip(entry, f"--{table.rows[path].to[0].rpartition('.')[2]}")
            continue
        reading.add_path(path, entry)


def _add_arguments(reading: DialectReading, training: TrainingCommand) -> None:
    """Add the arguments of the training script, with the table of its dialect."""
    own, reading.dialect_of = reading.dialect_of, _TOOLS.get(training.launcher, training_script.DIALECT)
    table, flags = reading.dialect_of.table, {flag.name: flag for flag in training.arguments}
    if "deepspeed_config" in flags and not flags.get("deepspeed", flags["deepspeed_config"]).value:
        flags["deepspeed"] = flags.pop("deepspeed_config")  # --deepspeed --deepspeed_config FILE
    usable: list[tuple[str, ConfigEntry]] = []
    for name, flag in flags.items():
        path, entry = table.known(name), flag_entry(flag)
        row = table.row(path)
        if row is not None and row.fate in ("sets", "refused") and "$" in flag.text:
            reading.report_unresolved(entry)
        else:
            usable.append((path, entry))
    (ms_swift.read_arguments if training.launcher == "swift" else read_training)(reading, usable)
    reading.dialect_of = own


DIALECT: Final = ConfigDialect(name="shell_script", title="a shell script", marks=_marks, read=_read, own_script=True)
