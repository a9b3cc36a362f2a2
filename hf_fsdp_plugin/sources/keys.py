"""From keys as written to canonical names: the one place where spellings are looked up."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from hf_fsdp_plugin.problems import Origin, Problem
from hf_fsdp_plugin.sources.settings import Dialect, Level, Reading, Setting
from hf_fsdp_plugin.sources.tree import Entries, Entry, Node, from_python, shorten
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.vocabulary import FOREIGN, Row, Scope, find, plain_key, suggest

TRUE_WORDS = frozenset({"true", "yes", "on", "1"})
FALSE_WORDS = frozenset({"false", "no", "off", "0"})
AUTO_WRAP = "wrap.auto"
"""Internal name: the word ``auto_wrap`` was said, which leaves the policy to what else is known."""


class Collector:
    """Gathers the settings and the problems of one source."""

    def __init__(self, *, level: Level, source: str) -> None:
        self.level = level
        self.source = source
        self.settings: list[Setting] = []
        self.problems: list[Problem] = []
        self.speaks_of_fsdp = False

    def reading(self, *, dialect: Dialect | None) -> Reading:
        return Reading(level=self.level, settings=tuple(self.settings), problems=tuple(self.problems), dialect=dialect)

    def take_mapping(
        self, entries: Iterable[Entry], scopes: Sequence[Scope], *, misplaced: Sequence[Scope] = ()
    ) -> None:
        """All keys of a mapping. A key known only in one of the ``misplaced`` scopes is taken with a warning."""
        for entry in entries:
            # dynamo_backend stood at top level before there was a dynamo_config
            older: tuple[Scope, ...] = ("dynamo",) if entry.key.lower().startswith("dynamo_") else ()
            if row := find(entry.key, (*scopes, *older)):
                self.take(row, entry)
            elif row := find(entry.key, misplaced):
                self._warn_misplaced(row, entry)
                self.take(row, entry)
            else:
                self._unknown(entry, (*scopes, *misplaced))

    def take_training_file(self, entries: Iterable[Entry]) -> None:
        """A training script's own file: what it says of FSDP and precision; the rest is the script's business."""
        others = 0
        for entry in entries:
            scopes: tuple[Scope, ...] = ("training", "parallelism")
            row = find(entry.key, (*scopes, "fsdp") if entry.key.lower().startswith("fsdp") else scopes)
            if row is not None and row.scope in ("training", "parallelism", "fsdp"):
                self.take(row, entry)
            elif entry.key.lower().startswith("fsdp"):
                self._unknown(entry, ("training", "fsdp"))
            elif plain_key(entry.key, "launch") == "deepspeed" and not entry.value.is_empty:
                self.add("launch.extra.deepspeed_config", entry)
            else:
                others += 1
        if others:
            message = f"read as a training script's own file; its {others} keys that are not about FSDP are left alone."
            self.problems.append(Problem(severity="note", message=message, origin=Origin(source=self.source)))

    def take(self, row: Row, entry: Entry) -> None:
        """One key, whatever its row makes of it. What says nothing (null, empty) is passed over."""
        if row.scope in ("fsdp", "precision", "parallelism") or row.kind == "words":
            self.speaks_of_fsdp = True
        if row.opens is not None and not self._is_text_policy(row, entry.value):
            self._take_section(row, entry)
        elif entry.value.is_empty and row.kind != "words":
            return
        elif row.kind == "words":
            self._take_words(entry)
        elif row.kind == "mode":
            self.add(row.name, entry)
            self._add_param(entry, str(entry.value.value))
        elif row.kind == "flag":
            self._take_flag(row, entry)
        elif row.opens == "precision":
            self.add("precision.param", entry)
        else:
            if row.name == "launch.distributed_type" and str(entry.value.value).strip().upper() == "FSDP":
                self.speaks_of_fsdp = True
            self.add(row.name, entry)

    def add(self, name: str, entry: Entry, *, value: object = ..., implied: bool = False) -> None:
        raw = entry.value.plain() if value is ... else value
        self.settings.append(
            Setting(name=name, value=raw, origin=self.origin(entry), level=self.level, implied=implied)
        )

    def origin(self, entry: Entry) -> Origin:
        return Origin(source=self.source, line=entry.line, spelling=entry.key, text=entry.value.text)

    def complain(self, entry: Entry, message: str, fix: str = "", *, setting: str | None = None) -> None:
        self.problems.append(
            Problem(severity="error", message=message, fix=fix, setting=setting, origin=self.origin(entry))
        )

    @staticmethod
    def _is_text_policy(row: Row, value: Node) -> bool:
        return row.opens == "precision" and not value.is_mapping  # fsdp_mixed_precision_policy: bf16

    def _take_section(self, row: Row, entry: Entry) -> None:
        assert row.opens is not None
        if entry.value.is_empty:
            return
        if not entry.value.is_mapping:
            self.complain(
                entry,
                f"'{entry.key}' is {entry.value.text!r}; expected keys and values under it.",
                f"Indent the settings under {entry.key}:.",
            )
            return
        self.speaks_of_fsdp |= row.opens == "fsdp"
        scopes: tuple[Scope, ...] = ("fsdp", "precision", "parallelism") if row.opens == "fsdp" else (row.opens,)
        self.take_mapping(entry.value.value, scopes)

    def _take_words(self, entry: Entry) -> None:
        """``fsdp="full_shard auto_wrap"``: words split on blanks or commas, a list of them, or true or false."""
        value = entry.value.value
        if isinstance(value, Entries):
            self.take_mapping(value, ("fsdp", "precision", "parallelism"))
            return
        texts = (
            [str(node.value) for node in value] if isinstance(value, tuple) else [str("" if value is None else value)]
        )
        words = _words(" ".join(texts))
        if value is None:
            self.speaks_of_fsdp = False
            return
        if not words or words == ["false"]:
            self.speaks_of_fsdp = False
            self.add("launch.distributed_type", entry, value="NO", implied=True)
            return
        self.add("launch.distributed_type", entry, value="FSDP", implied=True)
        for word in words:
            if word in TRUE_WORDS:
                continue
            if word.lstrip("_") in STRATEGIES:
                self.add("sharding.strategy", entry, value=word)
            elif word == "auto_wrap":
                self.add(AUTO_WRAP, entry, value=True)
            elif word == "offload":
                self.add("offload.params", entry, value=True)
            else:
                known = (*STRATEGIES, "auto_wrap", "offload")
                near = _nearest(word, known)
                self.complain(
                    entry,
                    f"'{shorten(word)}' is no word of fsdp; it takes {', '.join(known)}, true or false.",
                    f"Did you mean {near}?" if near else "Remove it.",
                    setting="sharding.strategy",
                )

    def _take_flag(self, row: Row, entry: Entry) -> None:
        """``bf16: true``; ``auto`` and ``full`` are axolotl's ways to say yes."""
        word = str(entry.value.value).strip().lower()
        name = row.name.rpartition(".")[2]
        if word in TRUE_WORDS or word in ("auto", "full"):
            self.add("launch.mixed_precision", entry, value=name)
            self._add_param(entry, name)
        elif word not in FALSE_WORDS:
            self.complain(
                entry,
                f"{entry.value.text!r} is neither true nor false.",
                f"Write {entry.key}: true or leave it out.",
                setting="launch.mixed_precision",
            )

    def _add_param(self, entry: Entry, mode: str) -> None:
        """What a mode of mixed precision says about the parameters; a wrong mode is complained of as a mode."""
        word = mode.strip().lower()
        if word in ("bf16", "fp16", "bfloat16", "float16"):
            self.add("precision.param", entry, value=word, implied=True)
        elif word in ("no", "false", "none"):
            self.add("precision.param", entry, value="auto", implied=True)

    def _warn_misplaced(self, row: Row, entry: Entry) -> None:
        section = "parallelism_config" if row.scope == "parallelism" else "fsdp_config"
        message = f"'{entry.key}' stands at top level, where accelerate launch refuses it; it is read all the same."
        fix = f"Move it under {section}:."
        self.problems.append(
            Problem(severity="warning", message=message, fix=fix, setting=row.name, origin=self.origin(entry))
        )

    def _unknown(self, entry: Entry, scopes: Sequence[Scope]) -> None:
        for scope in scopes:
            if foreign := FOREIGN.get((scope, plain_key(entry.key, scope))):
                self.problems.append(
                    Problem(
                        severity=foreign.severity,
                        message=f"'{entry.key}' {foreign.why}",
                        fix=foreign.fix,
                        origin=self.origin(entry),
                    )
                )
                return
        if entry.key.startswith("_"):
            message = f"'{shorten(entry.key)}' is taken for a comment, by its underscore."
            self.problems.append(Problem(severity="note", message=message, origin=self.origin(entry)))
            return
        near = suggest(entry.key, scopes)
        fix = f"Did you mean {near}?" if near else "Remove it, or see hf-fsdp schema for the keys that are known."
        self.complain(entry, f"unknown key '{shorten(entry.key)}'.", fix)


def entry_of(key: str, value: object, *, line: int | None = None) -> Entry:
    """A key and a Python value as an entry."""
    return Entry(key=key, line=line, value=from_python(value, line=line))


def _words(text: str) -> list[str]:
    """Lower-case words; ``full shard`` and ``FSDPOption.FULL_SHARD`` are ``full_shard``."""
    joined = " ".join(word.rpartition(".")[2] for word in text.lower().replace(",", " ").replace("-", "_").split())
    for name in sorted((*STRATEGIES, "auto_wrap"), key=len, reverse=True):
        joined = f" {joined} ".replace(f" {name.replace('_', ' ')} ", f" {name} ").strip()
    return joined.split()


def _nearest(word: str, known: Sequence[str]) -> str:
    return next(iter(difflib.get_close_matches(word, known, n=1)), "")
