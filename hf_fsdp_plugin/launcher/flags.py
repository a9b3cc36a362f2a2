"""The flags of ``hf-fsdp launch``, as a table, and the parser of the arguments before SCRIPT.

argparse cannot parse them: all arguments after SCRIPT belong to the script, an unknown flag before it must be an error
with a suggestion, and finding SCRIPT requires knowing which flags take a value.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hf_fsdp_plugin.sources.command_line import RENAMED, SWITCHES, flag_name, machine_range, remedy_of_switch
from hf_fsdp_plugin.text import printable
from hf_fsdp_plugin.vocabulary import Scope, find, suggest

Kind = Literal["launcher", "setting", "ignored", "unsupported"]


class UsageError(ValueError):
    """Wrong usage of the command line: exit code 2."""

    def __str__(self) -> str:
        return printable(super().__str__())


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One flag.

    Attributes:
        name: with underscores, without the leading dashes. Hyphens are accepted too.
        kind: ``launcher`` is an option of the launcher, ``setting`` is passed to ``load_spec``, ``ignored`` has no
            effect, ``unsupported`` is an error.
        help: one line; for an unsupported flag, the reason and what to do.
    """

    name: str
    kind: Kind = "setting"
    help: str = ""

    @property
    def takes_value(self) -> bool:
        return self.name not in ("dry_run", "json", "report_table") and self.name not in SWITCHES


def _unsupported(reason: str, *names: str) -> tuple[Flag, ...]:
    return tuple(Flag(name=name, kind="unsupported", help=reason) for name in names)


_NOT_FSDP = "this launcher runs FSDP only. Use `accelerate launch` for other engines."

FLAGS: tuple[Flag, ...] = (
    Flag(name="config_file", kind="launcher", help="Accelerate YAML or JSON with an fsdp_config"),
    Flag(name="module", kind="launcher", help="SCRIPT is a module name, as in python -m (also -m)"),
    Flag(name="set", kind="launcher", help="override one setting, with the highest precedence; repeatable"),
    Flag(name="report", kind="launcher", help="file of the report of the run"),
    Flag(name="report_table", kind="launcher", help="print the tables of the report, instead of a summary"),
    Flag(name="dry_run", kind="launcher", help="print settings, units, rendezvous and command; start nothing"),
    Flag(name="json", kind="launcher", help="with --dry_run: print one JSON object and nothing else on stdout"),
    Flag(name="model", kind="launcher", help="with --dry_run: the model (default: --model_name_or_path of the script)"),
    Flag(name="show_ranks", kind="launcher", help="main (default): rank 0's output; all: every rank's, with its rank"),
    Flag(name="log_dir", kind="launcher", help="also write each rank's output to DIR/rank_N.log"),
    Flag(name="grace", kind="launcher", help="seconds until ranks are killed after SIGINT or SIGTERM (default: 30)"),
    Flag(
        name="hang_timeout",
        kind="launcher",
        help="seconds that a rank may wait in a collective (default: 120, longer for busy ranks; 0: off)",
    ),
    Flag(name="num_cpu_threads_per_process", kind="launcher", help="OMP_NUM_THREADS of a rank"),
    Flag(name="rdzv_conf", kind="launcher", help="options of the rendezvous of several machines, such as timeout=600"),
    Flag(name="role", kind="launcher", help="role name of the ranks, as in torchrun"),
    Flag(name="tee", kind="launcher", help="0 (default); any other value means --show_ranks all (also -t)"),
    Flag(name="max_restarts", kind="launcher", help="restarts after failures, from the newest checkpoint (default: 0)"),
    Flag(name="run_id", kind="launcher", help="name of the run, the same in all its starts (default: random)"),
    Flag(name="quiet", kind="launcher", help="print errors only, no notices (also -q)"),
    Flag(name="monitor_interval", kind="ignored"),
    Flag(name="use_parallelism_config", kind="ignored"),
    Flag(name="use_fsdp", help="enable FSDP with its defaults if nothing else does"),
    Flag(name="fsdp", help='as in TrainingArguments: "full_shard auto_wrap"'),
    Flag(name="fsdp_config", help="as in TrainingArguments: JSON, or the path of a JSON or YAML file"),
    Flag(name="num_processes", help="total ranks of all machines; auto: one per accelerator, or 2 on CPU"),
    Flag(name="num_machines", help="number of machines, or MIN:MAX if some may be missing"),
    Flag(name="machine_rank", help="number of this machine, from 0"),
    Flag(name="main_process_ip", help="address of machine 0"),
    Flag(name="main_process_port", help="port on machine 0; 0 selects a free one (one machine only)"),
    Flag(name="rdzv_backend", help="static (default) or c10d, for several machines"),
    Flag(name="same_network", help="as in Accelerate"),
    Flag(name="mixed_precision", help="no, bf16 or fp16"),
    Flag(name="cpu", help="CPU ranks with gloo, even if there are GPUs"),
    Flag(name="gpu_ids", help="GPUs to use: a comma-separated list, or all"),
    Flag(name="debug", help="check the shapes of collectives, and print full tracebacks"),
    Flag(name="enable_cpu_affinity", help="as in Accelerate"),
    Flag(name="downcast_bf16", help="as in Accelerate"),
    Flag(name="main_training_function", help="as in Accelerate"),
    Flag(name="dynamo_backend", help="backend of torch.compile"),
    Flag(name="dynamo_mode", help="mode of torch.compile"),
    Flag(name="dynamo_use_fullgraph"),
    Flag(name="dynamo_use_dynamic"),
    Flag(name="dynamo_use_regional_compilation"),
    *_unsupported(_NOT_FSDP, "multi_gpu", "tpu", "use_deepspeed", "use_megatron_lm"),
    *_unsupported(_NOT_FSDP, "tpu_cluster", "no_tpu_cluster", "tpu_use_sudo"),
    *_unsupported(_NOT_FSDP, "vm", "env", "aws_access_key_id", "aws_secret_access_key", "zero_stage"),
    *_unsupported(_NOT_FSDP, "deepspeed_config_file", "offload_optimizer_device", "offload_param_device"),
    *_unsupported("every rank runs Python with the plugin installed. Leave the flag out.", "no_python"),
)

_BY_NAME = {flag.name: flag for flag in FLAGS}
OTHER_LAUNCHERS: Mapping[str, str] = {
    "config": "config_file",
    "nproc": "num_processes",
    "nproc_per_node": "num_processes",
    "num_gpus": "num_processes",
    "nnodes": "num_machines",
    "num_nodes": "num_machines",
    "node_rank": "machine_rank",
    "master_addr": "main_process_ip",
    "master_port": "main_process_port",
    "bf16": "mixed_precision bf16",
    "fp16": "mixed_precision fp16",
}
"""Flags of torchrun, deepspeed and training scripts -> the flag of launch with this meaning."""
_SHORT = {"-m": "module", "-q": "quiet", "-t": "tee"}
_SCOPES: tuple[Scope, ...] = ("fsdp", "parallelism")
_SETTING_PREFIXES = ("fsdp_", "parallelism_config_")
_UNSUPPORTED_PREFIXES = ("deepspeed_", "megatron_lm_", "fp8_", "zero3_", "offload_optimizer_", "offload_param_")


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


def parse_launch_arguments(argv: Sequence[str]) -> LaunchArguments:
    """Parse the arguments after ``launch``.

    Raises:
        UsageError: an unknown or unsupported flag (``-h`` included), or a missing value.
    """
    rest = list(argv)
    options: dict[str, str] = {}
    overrides: list[str] = []
    command_line: list[str] = []
    while rest and rest[0].startswith("-"):
        argument = rest.pop(0)
        if argument == "--":
            break
        written, equals, value = argument.partition("=")
        flag = _find_flag(written)
        if flag.kind == "unsupported":
            raise UsageError(f"{written} is not supported: {flag.help}")
        value = _take_value(flag, written, value if equals else None, rest)
        if flag.name == "num_machines" and ":" in value:
            options["min_machines"], value = _machine_range(value)
        if flag.kind == "setting":
            command_line.append(f"{written}={value}" if flag.takes_value else written)
        elif flag.name == "set":
            overrides.append(value)
        elif flag.kind == "launcher" and options.setdefault(flag.name, value) != value:
            raise UsageError(f"{written} {value} conflicts with {written} {options[flag.name]}. Keep one of them.")
        if flag.name == "module":
            break  # as in python -m, the next argument is the module
    return LaunchArguments(
        options=options,
        overrides=tuple(overrides),
        command_line=tuple(command_line),
        script=rest[0] if rest else "",
        script_args=tuple(rest[1:]),
    )


def _machine_range(text: str) -> tuple[str, str]:
    """Return the limits of ``MIN:MAX``. Raises ``UsageError``."""
    machines = machine_range(text)
    if machines is None:
        raise UsageError(f"--num_machines is {text!r}; expected a number, or MIN:MAX with MIN from 1 to MAX.")
    return machines


def takes_value(written: str) -> bool:
    """Return whether a flag of launch takes a value. Raises ``UsageError`` for an unknown flag."""
    return _find_flag(written).takes_value


def split_setting_flags(argv: Sequence[str], own: Collection[str]) -> tuple[list[str], list[str]]:
    """Split the arguments of another verb into the setting flags of launch, and its own words.

    Args:
        own: names of the verb's own flags, with underscores.

    Raises:
        UsageError: a flag that neither the verb nor ``launch`` has, or one that only ``launch`` has.
    """
    settings: list[str] = []
    words = list(argv)
    rest: list[str] = []
    while words:
        word = words.pop(0)
        written, equals, value = word.partition("=")
        if word == "--":
            rest += [word, *words]
            break
        if not word.startswith("--") or _plain(written) in own:
            rest.append(word)
            continue
        flag = _find_flag(written, own)
        if flag.kind == "unsupported":
            raise UsageError(f"{written} is not supported: {flag.help}")
        if flag.kind == "launcher":
            raise UsageError(f"{written} is a flag of hf-fsdp launch only.")
        value = _take_value(flag, written, value if equals else None, words)
        if flag.kind == "setting":
            settings.append(f"{written}={value}" if flag.takes_value else written)
    return settings, rest


def _take_value(flag: Flag, written: str, value: str | None, following: list[str]) -> str:
    """Return the value of a flag, after its ``=`` or as the next word, which is removed; ``"true"`` if it takes none.

    Raises:
        UsageError: the value is missing, or the flag takes none.
    """
    if not flag.takes_value:
        if value is not None:
            raise UsageError(f"{written} takes no value, but is given {value!r}. {remedy_of_switch(written)}")
        return "true"
    if value is None and following and not following[0].startswith("--"):
        value = following.pop(0)
    if value is None or (flag.kind == "launcher" and not value):
        raise UsageError(f"{written} needs a value")
    return value


def _plain(written: str) -> str:
    return flag_name(written) if written.startswith("--") else ""


def _find_flag(written: str, own: Collection[str] | None = None) -> Flag:
    """Return a flag of launch. `own` are the flags of the verb that has these arguments, if it is another one."""
    if written in _SHORT:
        return _BY_NAME[_SHORT[written]]
    name = _plain(written)
    if name in _BY_NAME:
        return _BY_NAME[name]
    if name.startswith(_UNSUPPORTED_PREFIXES):
        return Flag(name=name, kind="unsupported", help=_NOT_FSDP)
    if name.startswith(_SETTING_PREFIXES) and find(name, _SCOPES) is not None:
        return Flag(name=name)
    supported = [flag.name for flag in FLAGS if flag.kind != "unsupported" and (own is None or flag.kind == "setting")]
    near = OTHER_LAUNCHERS.get(name) or RENAMED.get(name, "")
    near = near or (suggest(name, _SCOPES) if name.startswith(_SETTING_PREFIXES) else "")
    near = near or next(iter(difflib.get_close_matches(name, [*(own or ()), *supported], n=1, cutoff=0.6)), "")
    verb = "launch" if own is None else "check"
    remedy = f"Did you mean --{near}?" if near else f"`hf-fsdp {verb} --help` lists the flags."
    if own is None:
        raise UsageError(f"unknown flag {written} before the script. {remedy} Flags of the script go after it.")
    raise UsageError(f"unknown flag {written}. {remedy}")


_METAVARS = {
    "set": "NAME=VALUE", "report": "PATH", "show_ranks": "main|all", "grace": "SECONDS", "hang_timeout": "SECONDS",
    "role": "NAME", "tee": "N", "run_id": "NAME",
    "num_cpu_threads_per_process": "N", "rdzv_conf": "KEY=VALUE,…", "max_restarts": "N", "fsdp": "WORDS",
    "fsdp_config": "JSON|PATH", "num_processes": "N", "num_machines": "N", "machine_rank": "N",
    "main_process_ip": "ADDRESS", "mixed_precision": "KIND", "log_dir": "DIR", "model": "DIR|ID",
}  # fmt: skip


def add_help(parser: argparse.ArgumentParser) -> None:
    """Add the table of flags to a parser's help. :func:`parse_launch_arguments` does the parsing."""
    lines = ["flags, with hyphens or underscores:"]
    for flag in FLAGS:
        if flag.help and flag.kind != "unsupported":
            value = f" {_METAVARS.get(flag.name, flag.name.upper().rsplit('_', 1)[-1])}" if flag.takes_value else ""
            lines.append(f"  --{flag.name}{value}".ljust(38) + flag.help)
    lines.append("  --fsdp_*, --parallelism_config_*".ljust(38) + "all of these flags of Accelerate")
    parser.usage = "hf-fsdp launch [FLAGS] SCRIPT [ARGS ...]"
    parser.epilog = "\n".join(lines)
