"""The flags of ``hf-fsdp launch``: our own and Accelerate's, as a table, and the reading of what stands before SCRIPT.

argparse cannot do this: whatever follows SCRIPT belongs to the script, an unknown flag before it must be refused with a
suggestion, and to find SCRIPT one must know which flags take a value.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hf_fsdp_plugin.vocabulary import Scope, find, suggest

Kind = Literal["ours", "setting", "refused"]


class UsageError(ValueError):
    """Wrong usage of the command line: exit code 2."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One flag.

    Attributes:
        name: with underscores, without the leading dashes; hyphens are read too.
        kind: ``ours`` is for the launcher, ``setting`` is part of the config and goes to ``load_spec``.
        takes_value: whether the next word is its value.
        help: one line; for a refused flag, why it is refused and what to do.
        setting: the spelling that ``load_spec`` knows, where it is another (``--cpu`` is ``use_cpu``).
    """

    name: str
    kind: Kind = "setting"
    takes_value: bool = True
    help: str = ""
    setting: str = ""


def _refused(reason: str, *names: str, takes_value: bool = True) -> tuple[Flag, ...]:
    return tuple(Flag(name=name, kind="refused", takes_value=takes_value, help=reason) for name in names)


_NOT_FSDP = "this launcher runs FSDP only. Use `accelerate launch` for other engines."

FLAGS: tuple[Flag, ...] = (
    Flag(name="config_file", kind="ours", help="Accelerate YAML or JSON with an fsdp_config"),
    Flag(name="module", kind="ours", takes_value=False, help="SCRIPT is a module's name, as in python -m (also -m)"),
    Flag(name="set", kind="ours", help="overrules one setting, strongest of all; repeatable"),
    Flag(name="report", kind="ours", help="where the report of the run is written"),
    Flag(name="dry_run", kind="ours", takes_value=False, help="say what would run, rendezvous included, and stop"),
    Flag(name="show_ranks", kind="ours", help="main (default): rank 0's output; all: every rank's, with its rank"),
    Flag(name="log_dir", kind="ours", help="also write each rank's output to DIR/rank_N.log"),
    Flag(name="grace", kind="ours", help="seconds ranks have to end after SIGINT or SIGTERM (default 30)"),
    Flag(name="num_cpu_threads_per_process", kind="ours", help="OMP_NUM_THREADS of a rank"),
    Flag(name="rdzv_conf", kind="ours", help="several machines: KEY=VALUE,… for torchrun's rendezvous (timeout=600)"),
    Flag(name="role", kind="ours", help="name of the ranks' role, as torchrun's"),
    Flag(name="tee", kind="ours", help="0 (default), or as --show_ranks all; also -t"),
    Flag(name="max_restarts", kind="ours", help="0 only: a failed run is resumed from a checkpoint, not restarted"),
    Flag(name="monitor_interval", kind="ours", help="accepted; ranks are always watched"),
    Flag(name="quiet", kind="ours", takes_value=False, help="no notices, only errors (also -q)"),
    Flag(name="use_fsdp", takes_value=False, help="asks for FSDP with its defaults where nothing else does"),
    Flag(name="use_parallelism_config", kind="ours", takes_value=False, help="accepted; read when given"),
    Flag(name="fsdp", help='as TrainingArguments: "full_shard auto_wrap"'),
    Flag(name="fsdp_config", help="as TrainingArguments: JSON, or the path of a JSON or YAML file"),
    Flag(name="num_processes", help="ranks on all machines together; auto: one an accelerator, or 2 on CPU"),
    Flag(name="num_machines", help="machines in this run"),
    Flag(name="machine_rank", help="this machine's number, from 0"),
    Flag(name="main_process_ip", help="address of machine 0"),
    Flag(name="main_process_port", help="port on machine 0; 0: a free one (one machine only)"),
    Flag(name="rdzv_backend", help="static (default) or c10d, for several machines"),
    Flag(name="same_network", takes_value=False, help="as in Accelerate"),
    Flag(name="mixed_precision", help="no, bf16 or fp16"),
    Flag(name="cpu", takes_value=False, setting="use_cpu", help="CPU ranks with gloo, also where there are GPUs"),
    Flag(name="gpu_ids", help="GPUs to use, comma list, or all"),
    Flag(name="debug", takes_value=False, help="check collectives' shapes, and show full tracebacks"),
    Flag(name="enable_cpu_affinity", takes_value=False, help="as in Accelerate"),
    Flag(name="downcast_bf16", takes_value=False, help="as in Accelerate"),
    Flag(name="main_training_function", help="as in Accelerate"),
    Flag(name="dynamo_backend", help="torch.compile's backend"),
    Flag(name="dynamo_mode", help="torch.compile's mode"),
    Flag(name="dynamo_use_fullgraph", takes_value=False),
    Flag(name="dynamo_use_dynamic", takes_value=False),
    Flag(name="dynamo_use_regional_compilation", takes_value=False),
    *_refused(_NOT_FSDP, "multi_gpu", "tpu", "use_deepspeed", "use_megatron_lm", takes_value=False),
    *_refused(_NOT_FSDP, "tpu_cluster", "no_tpu_cluster", "tpu_use_sudo", takes_value=False),
    *_refused(_NOT_FSDP, "vm", "env", "aws_access_key_id", "aws_secret_access_key", "zero_stage"),
    *_refused(_NOT_FSDP, "deepspeed_config_file", "offload_optimizer_device", "offload_param_device"),
    *_refused("a rank here is Python with the plugin in it. Leave the flag out.", "no_python", takes_value=False),
)

_BY_NAME = {flag.name: flag for flag in FLAGS}
_SHORT = {"-m": "module", "-q": "quiet", "-t": "tee"}
_SCOPES: tuple[Scope, ...] = ("fsdp", "parallelism")
_SETTING_PREFIXES = ("fsdp_", "parallelism_config_")
_REFUSED_PREFIXES = ("deepspeed_", "megatron_lm_", "fp8_", "zero3_", "offload_optimizer_", "offload_param_")


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchWords:
    """The words of ``hf-fsdp launch``, sorted.

    Attributes:
        ours: flag name -> value; switches hold ``"true"``.
        overrides: the values of ``--set``.
        command_line: the setting flags for ``load_spec``, always as ``--name=value``.
        script: path, or a module's name where ``module`` is in `ours`; empty where none was given.
        script_args: what follows SCRIPT, untouched.
    """

    ours: dict[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    command_line: tuple[str, ...] = ()
    script: str = ""
    script_args: tuple[str, ...] = ()


def read_words(argv: Sequence[str]) -> LaunchWords:
    """Sorts the words after ``launch``.

    Raises:
        UsageError: unknown or refused flag, a missing value, or ``-h`` (which is not read here).
    """
    words = list(argv)
    ours: dict[str, str] = {}
    overrides: list[str] = []
    command_line: list[str] = []
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word == "--":
            break
        written, equals, value = word.partition("=")
        flag = _flag(written)
        if flag.kind == "refused":
            raise UsageError(f"{written}: {flag.help}")
        if flag.takes_value and not equals:
            if not words:
                raise UsageError(f"{written} needs a value")
            value = words.pop(0)
        if flag.takes_value and flag.kind == "ours" and not value:
            raise UsageError(f"{written} needs a value")
        if not flag.takes_value:
            value = value if equals else "true"
        if flag.kind == "setting":
            command_line.append(f"--{flag.setting or flag.name}={value}")
        elif flag.name == "set":
            overrides.append(value)
        elif flag.takes_value or value.lower() not in ("false", "no", "0", "off"):
            ours[flag.name] = value
        if flag.name == "module":
            break  # as python -m: the next word is the module, even where more flags are meant to follow
    script = words.pop(0) if words else ""
    return LaunchWords(
        ours=ours,
        overrides=tuple(overrides),
        command_line=tuple(command_line),
        script=script,
        script_args=tuple(words),
    )


def _flag(written: str) -> Flag:
    if written in _SHORT:
        return _BY_NAME[_SHORT[written]]
    name = written.removeprefix("--").replace("-", "_").lower() if written.startswith("--") else ""
    if name in _BY_NAME:
        return _BY_NAME[name]
    if name.startswith(_REFUSED_PREFIXES):
        return Flag(name=name, kind="refused", help=_NOT_FSDP)
    if name.startswith(_SETTING_PREFIXES) and find(name, _SCOPES) is not None:
        return Flag(name=name)
    own = [flag.name for flag in FLAGS if flag.kind != "refused"]
    near = suggest(name, _SCOPES) if name.startswith(_SETTING_PREFIXES) else ""
    near = near or next(iter(difflib.get_close_matches(name, own, n=1, cutoff=0.6)), "")
    remedy = f"Did you mean --{near}?" if near else "`hf-fsdp launch --help` lists them."
    raise UsageError(f"unknown flag {written} before the script. {remedy} The script's own flags stand after it.")


_METAVARS = {
    "set": "NAME=VALUE", "report": "PATH", "show_ranks": "main|all", "grace": "SECONDS", "role": "NAME", "tee": "N",
    "num_cpu_threads_per_process": "N", "rdzv_conf": "KEY=VALUE,…", "max_restarts": "N", "fsdp": "WORDS",
    "fsdp_config": "JSON|PATH", "num_processes": "N", "num_machines": "N", "machine_rank": "N",
    "main_process_ip": "ADDRESS", "mixed_precision": "KIND", "log_dir": "DIR",
}  # fmt: skip


def help_lines() -> list[str]:
    """The flags for ``--help``, one or two lines each."""
    lines = []
    for flag in FLAGS:
        if flag.kind == "refused" or not flag.help or flag.help.startswith("accepted"):
            continue
        value = f" {_METAVARS.get(flag.name, flag.name.upper().rsplit('_', 1)[-1])}" if flag.takes_value else ""
        lines.append(f"  --{flag.name}{value}".ljust(38) + flag.help)
    lines.append("  --fsdp_*, --parallelism_config_*".ljust(38) + "Accelerate's flags, all read")
    return lines


def add_help(parser: argparse.ArgumentParser) -> None:
    """Puts the table into a parser's help; the words themselves are read by :func:`read_words`."""
    parser.usage = "hf-fsdp launch [FLAGS] SCRIPT [ARGS ...]"
    parser.epilog = "flags, with hyphens or underscores:\n" + "\n".join(help_lines())
