"""The arguments of ``hf-fsdp bench``, and their problems."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

from hf_fsdp_plugin.integrations.bench.cases import (
    PREFETCHES,
    SYSTEMS,
    TITLES,
    BenchWorkload,
    Case,
    CaseSetting,
    System,
    all_settings,
    why_inexpressible,
)
from hf_fsdp_plugin.launcher.flags import Parser, add_override_flag, add_setting_flags
from hf_fsdp_plugin.problems import Origin, Problem

_LARGEST: Final = 1 << 20
_MAX_WORLD: Final = 4096
_VERSIONS: Final = ("1", "2")
_PAIRS: Final = 5
"""Blocks of a round by default, if systems are compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is to be measured.

    Attributes:
        others: the systems of ``--vs``.
        device: the type on which the ranks run; empty until it is known.
    """

    settings: tuple[CaseSetting, ...]
    others: tuple[System, ...]
    workload: BenchWorkload
    limit: float
    device: str = ""

    def cases(self, setting: CaseSetting) -> list[Case]:
        """Return the case of this package, and those of the other systems that can run the setting."""
        others = [name for name in self.others if not why_inexpressible(setting, name, self.device)]
        return [Case(setting=setting), *(Case(setting=setting, system=name) for name in others)]


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--model", metavar="DIR|ID", help="folder with a config.json, or a model id")
    parser.add_argument("--config-file", "--config", metavar="CONFIG", help="Accelerate YAML or JSON of other settings")
    add_override_flag(parser)
    what = parser.add_argument_group("cases, each a list with commas")
    what.add_argument("--world-sizes", metavar="N,…", default="2", help="numbers of ranks on this machine (default: 2)")
    what.add_argument(
        "--strategies", metavar="S,…", default="ddp,shard_grad_op,full_shard", help=f"of {', '.join(TITLES)}"
    )
    what.add_argument("--prefetch", metavar="P,…", default="pre", help=f"of {', '.join(PREFETCHES)} (default: pre)")
    what.add_argument("--versions", metavar="V,…", default="2", help="FSDP versions (default: 2)")
    what.add_argument("--vs", metavar="S,…", default="", help="also run the same settings by: stock, raw")
    how = parser.add_argument_group("measurement")
    how.add_argument("--micro-batch", metavar="B", default="1", help="samples per rank and step (default: 1)")
    how.add_argument("--seq-len", metavar="S", default="512", help="tokens per sample (default: 512)")
    how.add_argument("--steps", metavar="N", default="5", help="steps of a timed block (default: 5)")
    how.add_argument("--warm-up", metavar="N", default="2", help="steps of a case before its blocks (default: 2)")
    how.add_argument("--rounds", metavar="N", default="3", help="times that each case is built (default: 3)")
    how.add_argument("--blocks", metavar="N", help=f"blocks of a case in a round (default: 1; {_PAIRS} with --vs)")
    how.add_argument("--limit", metavar="SECONDS", default="600", help="end a case without progress (default: 600)")
    how.add_argument("--machine", metavar="NAME|FILE", help="machine of `hf-fsdp plan --machine`, for the MFU")
    out = parser.add_argument_group("output")
    out.add_argument("-o", "--output", metavar="OUT", help="JSON file, written after each case")
    out.add_argument("--resume", action="store_true", help="continue the file of -o")
    out.add_argument("--html", metavar="OUT", help="write an HTML page with plots and tables")
    out.add_argument("--png", metavar="OUT", help="write the plots as a PNG; needs matplotlib")
    out.add_argument("--force", action="store_true", help="replace existing files; run cases that do not fit")
    out.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    add_setting_flags(parser)
    parser.epilog = "also all setting flags of `hf-fsdp launch`: --mixed_precision bf16, --cpu, …"


def read_request(args: argparse.Namespace, problems: list[Problem]) -> Request | None:
    """Return what is to be measured; ``None`` after errors, which are all reported."""
    before = len(problems)
    worlds = _list(args, "world-sizes", problems, _whole_number(_MAX_WORLD))
    strategies = _list(args, "strategies", problems, _one_of(TITLES))
    prefetches = _list(args, "prefetch", problems, _one_of(PREFETCHES))
    versions = _list(args, "versions", problems, _one_of(_VERSIONS))
    others = _list(args, "vs", problems, _one_of([name for name in SYSTEMS if name != "plugin"])) if args.vs else []
    blocks = args.blocks if args.blocks is not None else str(_PAIRS if others else 1)
    texts = {
        "micro-batch": args.micro_batch, "seq-len": args.seq_len, "steps": args.steps, "warm-up": args.warm_up,
        "rounds": args.rounds, "blocks": blocks, "limit": args.limit,
    }  # fmt: skip
    numbers = {name: _read(name, text, problems, _whole_number(_LARGEST)) for name, text in texts.items()}
    if len(problems) > before:
        return None
    limit = numbers.pop("limit")
    workload = BenchWorkload(**{name.replace("-", "_"): number for name, number in numbers.items()})
    settings = tuple(all_settings(worlds, strategies, [int(version) for version in versions], prefetches))
    return Request(settings=settings, others=tuple(dict.fromkeys(others)), workload=workload, limit=float(limit))


def not_compared(request: Request) -> list[Problem]:
    """Return a warning for each reason why a system cannot run a setting."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for setting in request.settings:
        for name in request.others:
            if reason := why_inexpressible(setting, name, request.device):
                labels = reasons.setdefault((name, reason), [])
                labels += [setting.label] if setting.label not in labels else []
    return [
        Problem(code="FSDP-W787", message=f"{SYSTEMS[name]} is not compared in {'; '.join(labels)}: {reason}.")
        for (name, reason), labels in reasons.items()
    ]


Parse = Callable[[str], Any]


def _list(args: argparse.Namespace, flag: str, problems: list[Problem], parse: Parse) -> list[Any]:
    words = [word.strip().lower() for word in getattr(args, flag.replace("-", "_")).split(",")]
    return [_read(flag, word, problems, parse) for word in words]


def _read(flag: str, text: str, problems: list[Problem], parse: Parse) -> Any:
    """Return a parsed word; ``None`` for an invalid one, which is reported."""
    try:
        return parse(text)
    except ValueError as error:
        expected, fix = error.args
        code = "FSDP-E788" if "whole number" in expected else "FSDP-E780"
        origin = Origin(source="command line", spelling=f"--{flag}", text=text)
        message = f"--{flag}: {text!r} is not {expected}."
        problems.append(Problem(code=code, message=message, fix=fix, origin=origin))
        return None


def _whole_number(largest: int) -> Parse:
    def parse(text: str) -> int:
        if text.isascii() and text.isdecimal() and 1 <= int(text) <= largest:
            return int(text)
        raise ValueError(f"a whole number between 1 and {largest:,}", "Correct it.")

    return parse


def _one_of(known: Collection[str]) -> Parse:
    def parse(text: str) -> str:
        if text in known:
            return text
        near = difflib.get_close_matches(text, known, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Use {', '.join(known)}."
        raise ValueError(f"one of {', '.join(known)}", hint)

    return parse
