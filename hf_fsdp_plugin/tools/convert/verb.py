"""``hf-fsdp convert``: Convert a config of DeepSpeed, of another trainer or of Accelerate into one for FSDP, and show
what became of each key; a checkpoint of DeepSpeed or a Hugging Face folder into shards from which a run with FSDP
starts; or shards into a Hugging Face folder.

Examples::

    hf-fsdp convert ds_zero3.json --out fsdp.yaml -- --bf16 true --learning_rate 2e-5
    hf-fsdp convert llama --out llama-fsdp --dtype fp32

The arguments of the script after ``--`` replace the values "auto".
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model
from hf_fsdp_plugin.cli import output
from hf_fsdp_plugin.cli.main import make_parser
from hf_fsdp_plugin.launcher.flags import Parser, add_override_flag, add_setting_flags
from hf_fsdp_plugin.problems import Origin, Problem, SpecError, UsageError
from hf_fsdp_plugin.sources.command_line import parse_flags
from hf_fsdp_plugin.sources.config_tree import ConfigFile
from hf_fsdp_plugin.sources.interface import Sources
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.spec.load import assess
from hf_fsdp_plugin.spec.value_parsers import setting_to_json
from hf_fsdp_plugin.text import SHORT_DTYPES, format_bytes, format_value, plural, printable
from hf_fsdp_plugin.tools.check.verb import config_named
from hf_fsdp_plugin.tools.common import ProgressBars
from hf_fsdp_plugin.tools.config.text import check_new_file, new_text, setting_lines, stock_limits, write_config
from hf_fsdp_plugin.tools.convert.checkpoint import convert_checkpoint
from hf_fsdp_plugin.tools.convert.conversion import print_outcomes, with_converted_config
from hf_fsdp_plugin.tools.convert.deepspeed_files import tag_folder
from hf_fsdp_plugin.tools.convert.dialects.interface import DialectReading, KeyOutcome, shown_setting, typed_value

_OF_ARGUMENTS: Final = ("FSDP-N104",)
"""Notes that an argument after ``--`` repeats the key whose value ``auto`` it replaces."""


def add_arguments(parser: Parser) -> None:
    about = "the config to convert (- reads stdin), or the folder of a checkpoint or of a saved model"
    parser.add_argument("source", metavar="SOURCE", help=about)
    about = "form of the new config: a YAML for accelerate launch (default), or Python arguments"
    parser.add_argument("--to", choices=tuple(TARGETS), default="accelerate", help=about)
    about = "write the new config to this file (default: print it), or the new weights to this folder"
    parser.add_argument("-o", "--out", metavar="OUT", help=about)
    about = "dtype of floating-point tensors, if SOURCE is a folder (default: unchanged)"
    parser.add_argument("--dtype", choices=tuple(SHORT_DTYPES.values()), help=about)
    parser.add_argument("--force", action="store_true", help="replace an existing OUT")
    add_override_flag(parser)
    add_setting_flags(parser)
    parser.epilog = "also all setting flags of `hf-fsdp launch`; after --: arguments of the script"


def parse_argv(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments after ``convert``. The words after ``--`` are arguments of a training script."""
    words = list(argv)
    split = words.index("--") if "--" in words else len(words)
    args = make_parser("convert").parse_args(words[:split])
    flags = list(parse_flags(words[split + 1 :]))
    if sum(flag.num_words for flag in flags) != len(words[split + 1 :]):
        raise UsageError("the words after -- must be flags of the script with their values: --bf16 true.")
    args.training_arguments = {flag.name: True if flag.value is None else typed_value(flag.value) for flag in flags}
    return args


def run(args: argparse.Namespace) -> int:
    """Convert a config or a checkpoint. Returns 0 if it was converted, 1 for errors, 2 if there is no such file."""
    if args.source != "-" and Path(args.source).is_dir():
        return _convert_folder(args)
    if args.dtype is not None:
        raise UsageError(f"--dtype is about weights, and {args.source} is not a folder. Leave it out.")
    sources = Sources(
        config=config_named(args.source),
        training_arguments=args.training_arguments,
        environ={},
        command_line=args.command_line,
        overrides=args.overrides,
    )
    sources = with_converted_config(sources, converts=True)
    target = ConfigFile.at(args.out).path if args.out is not None else None
    if target is not None:
        check_new_file(target, args.out, force=args.force)
    assessment = assess(sources)
    if not assessment.ok:
        output.print_failure(output.in_line_order(assessment.problems), as_json=args.json)
        return output.exit_code(assessment.problems, args.source)
    reading, spec = sources.converted, assessment.spec
    if not spec.enabled:
        message = "the config does not enable FSDP, DeepSpeed or DDP, so there is nothing to convert."
        fix = "Pass --use_fsdp to add FSDP with its defaults."
        raise SpecError([Problem(code="FSDP-E736", message=message, fix=fix, origin=Origin(source=args.source))])
    title, outcomes, arguments = None, _outcomes_of(spec), dict[str, Any]()
    if isinstance(reading, DialectReading):
        title, outcomes, arguments = reading.dialect_of.title, reading.outcomes, reading.arguments
    converted = TARGETS[args.to](spec, arguments)
    _check_settings(args.to, converted, spec)
    problems = output.in_line_order(problem for problem in assessment.problems if problem.code not in _OF_ARGUMENTS)
    if target is not None:
        write_config(target, args.out, converted.text)
    limits = list(stock_limits({name: spec.get(name) for name in spec.origins}, spec.fsdp.version))
    if args.json:
        tree = {"ok": True, "dialect": title, "to": args.to, "path": args.out, "text": converted.text}
        tree |= {"keys": outcomes, "script_arguments": converted.script, "launcher": converted.launcher}
        output.print_json({**tree, "stock_limits": limits, "problems": problems})
        return output.exit_code(problems, args.source)
    print_outcomes(outcomes)
    output.print_problems(problems)
    _print_rest(args.to, converted, limits)
    if args.out is None:
        print(converted.text, end="")
    else:
        print(f"wrote {printable(args.out)}", file=sys.stderr)
    return output.exit_code(problems, args.source)


def _convert_folder(args: argparse.Namespace) -> int:
    """Convert a checkpoint of DeepSpeed or whole weights into shards, or shards into whole weights."""
    from hf_fsdp_plugin.tools.convert.model_folder import convert_model_folder  # imports torch
    from hf_fsdp_plugin.tools.merge import verb as merge_verb
    from hf_fsdp_plugin.tools.merge.merging import MergeOptions

    others = [*args.command_line, *(args.given[name] for name in ("to", "overrides") if name in args.given)]
    if others or args.training_arguments:
        flag = others[0] if others else "--"
        raise UsageError(f"{flag} is about configs, and {args.source} is a folder. Leave it out.")
    if args.out is None:
        raise UsageError("a checkpoint needs --out with the folder to write.")
    source, out, dtype = Path(args.source), Path(args.out), merge_verb.DTYPES.get(args.dtype)
    is_deepspeed = tag_folder(source, 0) is not None
    if is_deepspeed and dtype is not None:
        message = "--dtype conflicts with a checkpoint of DeepSpeed, whose masters and optimizer state are fp32."
        raise UsageError(f"{message} Leave it out, and pass it to merge.")
    if not is_deepspeed and read_stored_model(source).format == "dcp":
        return merge_verb.write(args, source, out, MergeOptions(dtype=dtype, force=args.force))
    try:
        with ProgressBars() as progress:
            if is_deepspeed:
                done = convert_checkpoint(source, out, force=args.force, progress=progress)
            else:
                done = convert_model_folder(source, out, dtype=dtype, force=args.force, progress=progress)
    except OSError as error:
        raise merge_verb.file_error(error, args.out) from error
    size = f"{plural(done.num_tensors, 'tensor')}, {format_bytes(done.num_bytes)}"
    text = f"{size} to start a run from"
    if done.step is not None:
        text = f"step {done.step:,}, {size}, written by {plural(done.world_size, 'rank')} of DeepSpeed"
    return output.print_result(args, done.to_json(), f"{printable(str(done.out))}: {text}", done.problems)


def _outcomes_of(spec: FsdpSpec) -> list[KeyOutcome]:
    """Return what became of the keys of a config that is one of FSDP already."""
    given = ((shown_setting(name, value), origin) for name, value, origin in spec.settings() if spec.asked(name))
    return [KeyOutcome(origin=origin, fate="sets", becomes=(shown,)) for shown, origin in given]


def _check_settings(target: str, converted: Converted, spec: FsdpSpec) -> None:
    """Raise ``SpecError`` if the new config lacks settings."""
    if names := converted.changed_settings(spec):
        message = f"the new config does not contain {', '.join(shown_setting(name, spec.get(name)) for name in names)}."
        fix = "Use --to accelerate, which has all settings." if target != "accelerate" else "Report this as a bug."
        raise SpecError([Problem(code="FSDP-E737", message=message, fix=f"{fix} Nothing was written.")])


def _print_rest(target: str, converted: Converted, limits: Sequence[str]) -> None:
    """Print what the new config does not contain, and the limits of stock Accelerate, to stderr."""
    for limit in limits if target == "accelerate" else ():
        print(f"note: {limit}", file=sys.stderr)
    script = "The same as flags of the script" if target == "training-arguments" else "Arguments of the script"
    for title, values in ((script, converted.script), ("Settings of hf-fsdp launch", converted.launcher)):
        flags = [f"--{name.removeprefix('launch.')} {_flag_value(value)}" for name, value in values.items()]
        if flags:
            print(printable(f"{title}: {' '.join(flags)}"), file=sys.stderr)


def _flag_value(value: Any) -> str:
    is_nested = isinstance(value, Mapping | list)
    return shlex.quote(json.dumps(value) if is_nested else format_value(value, ""))


_ALWAYS: Final = ("launch.distributed_type", "fsdp.version", "sharding.strategy", "wrap.policy")
_DTYPES: Final = ("precision.param", "precision.reduce", "precision.output", "precision.buffer")
_FP8: Final = ("fp8.backend", "fp8.all_gather", "fp8.pad_inner_dim")
_IMPLIED_DTYPE: Final = {"no": "auto", "fp8": "bf16"}
"""Mixed precision mode -> ``precision.param`` that it implies, if that has another name."""
_NOT_IN_FILES: Final = frozenset({"launch.extra", "activation.native"})
_ARGUMENT_NAMES: Final = {"offload_params": "cpu_offload", "mixed_precision": "mixed_precision_policy"}
"""Key of ``fsdp_config`` in Accelerate's file -> its name in ``TrainingArguments``."""
_LAUNCHED: Final = frozenset({"launch.distributed_type", "launch.mixed_precision", "launch.use_cpu"})
"""Settings of the launcher that ``TrainingArguments`` have, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """A config in its new form.

    Attributes:
        text: what is written.
        sources: the new form as a source, which must give the same spec.
        script: arguments of the script that the form does not contain: name -> value.
        launcher: settings of the launcher that the form does not contain, by canonical name.
    """

    text: str
    sources: Sources
    script: Mapping[str, Any] = field(default_factory=dict)
    launcher: Mapping[str, Any] = field(default_factory=dict)

    def changed_settings(self, spec: FsdpSpec) -> list[str]:
        """Return the names of the settings of `spec` that the new form does not set to the same value."""
        new = assess(self.sources)
        ignored = _NOT_IN_FILES | self.launcher.keys()
        given = ((name, value) for name, value, _ in spec.settings() if name not in ignored and value != "auto")
        return [name for name, value in given if new.spec.get(name) != value]


def to_accelerate(spec: FsdpSpec, arguments: Mapping[str, Any]) -> Converted:
    """Return Accelerate's YAML."""
    lines = setting_lines(_settings_of(spec), spec.fsdp.version, {})
    text = new_text(sorted(lines, key=lambda line: (line.section, line.key)))
    native = {"gradient_checkpointing": True} if spec.activation.native else {}
    file = ConfigFile(path=ConfigFile.at("converted.yaml").path, shown="converted.yaml", data=text.encode())
    sources = Sources(config=file, training_arguments=native, environ={})
    return Converted(text=text, sources=sources, script={**native, **arguments})


def to_training_arguments(spec: FsdpSpec, arguments: Mapping[str, Any]) -> Converted:
    """Return Python code with the arguments of ``TrainingArguments``."""
    lines = [line for line in setting_lines(_settings_of(spec), spec.fsdp.version, {}) if line.section]
    keys = {line.key.removeprefix("fsdp_").removeprefix("parallelism_config_"): line.value for line in lines}
    given: dict[str, Any] = {"fsdp": True, "fsdp_config": {_ARGUMENT_NAMES.get(key, key): v for key, v in keys.items()}}
    given |= {name: True for name in (spec.launch.mixed_precision,) if name != "no"}
    given |= {"use_cpu": True} if spec.launch.use_cpu else {}
    given |= {"gradient_checkpointing": True} if spec.activation.native else {}
    given |= {name: value for name, value in arguments.items() if name not in given}
    text = "".join(f"    {name}={_python(value)},\n" for name, value in given.items())
    sources = Sources(training_arguments=given, environ={})
    return Converted(text=f"TrainingArguments(\n{text})\n", sources=sources, launcher=_of_launcher(spec), script=given)


TARGETS: Final[Mapping[str, Callable[[FsdpSpec, Mapping[str, Any]], Converted]]] = {
    "accelerate": to_accelerate,
    "training-arguments": to_training_arguments,
}
"""Value of ``--to`` -> the function that returns the new form, from a spec and arguments of the script."""


def _python(value: Any) -> str:
    """Return the Python code of a value, a dict with one line for each key."""
    if not isinstance(value, dict):
        return repr(value)
    lines = [f"        {key!r}: {inner!r},\n" for key, inner in value.items()]
    return f"{{\n{''.join(lines)}    }}"


def _of_launcher(spec: FsdpSpec) -> dict[str, Any]:
    """Return the launcher's settings that are set, and that are no settings of a script."""
    names = [name for name, _, _ in spec.settings() if name.startswith("launch.") and spec.asked(name)]
    return {name: _plain(spec.get(name)) for name in names if name not in _LAUNCHED | _NOT_IN_FILES}


def _settings_of(spec: FsdpSpec) -> dict[str, Any]:
    """Return the settings that a new file has: those that are set, and those whose default depends on the file."""
    asked = {name: value for name, value, _ in spec.settings() if name in _ALWAYS or spec.asked(name)}
    settings = {name: _plain(value) for name, value in asked.items() if name not in _NOT_IN_FILES}
    dtypes = {name.rpartition(".")[2]: settings.pop(name) for name in _DTYPES if name in settings}
    mode = settings.get("launch.mixed_precision", "no")
    if dtypes.get("param") == _IMPLIED_DTYPE.get(mode, mode):
        del dtypes["param"]
    if dtypes:
        settings["precision.policy"] = {f"{name}_dtype": dtype for name, dtype in dtypes.items()}
    fp8 = {name.partition(".")[2]: settings.pop(name) for name in _FP8 if name in settings}
    fp8 |= settings.pop("fp8.te_options", {})
    if fp8:
        settings["launch.fp8_config"] = fp8
    if spec.activation.native:
        del settings["activation.checkpointing"]
    return settings


def _plain(value: Any) -> Any:
    return setting_to_json(value) if isinstance(value, Mapping) else value
