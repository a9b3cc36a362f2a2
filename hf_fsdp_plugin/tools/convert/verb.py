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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model
from hf_fsdp_plugin.cli.main import make_parser
from hf_fsdp_plugin.cli.output import (
    exit_code,
    in_line_order,
    print_failure,
    print_json,
    print_problems,
    print_result,
)
from hf_fsdp_plugin.launcher.flags import Parser, add_override_flag, add_setting_flags
from hf_fsdp_plugin.problems import Origin, Problem, SpecError, UsageError
from hf_fsdp_plugin.sources.command_line import parse_flags
from hf_fsdp_plugin.sources.config_tree import ConfigFile
from hf_fsdp_plugin.sources.interface import Sources
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.spec.load import assess
from hf_fsdp_plugin.text import format_bytes, format_value, plural, printable
from hf_fsdp_plugin.tools.check.verb import config_named
from hf_fsdp_plugin.tools.common import ProgressBars
from hf_fsdp_plugin.tools.config.text import check_place, file_exists_error, stock_limits, write_config
from hf_fsdp_plugin.tools.convert.checkpoint import convert_checkpoint
from hf_fsdp_plugin.tools.convert.conversion import print_outcomes, with_converted_config
from hf_fsdp_plugin.tools.convert.converted import TARGETS, Converted
from hf_fsdp_plugin.tools.convert.deepspeed_files import tag_folder
from hf_fsdp_plugin.tools.convert.dialects.interface import DialectReading, KeyOutcome, shown_setting, typed_value
from hf_fsdp_plugin.tools.convert.model_folder import convert_model_folder
from hf_fsdp_plugin.tools.merge import verb as merge_verb
from hf_fsdp_plugin.tools.merge.merging import MergeOptions

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
    parser.add_argument("--dtype", choices=merge_verb.DTYPES, help=about)
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
        if target.exists() and not args.force:
            raise file_exists_error(args.out, "the file exists.", "--out")
        check_place(target, args.out)
    assessment = assess(sources)
    if not assessment.ok:
        print_failure(in_line_order(assessment.problems), as_json=args.json)
        return exit_code(assessment.problems, args.source)
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
    problems = in_line_order(problem for problem in assessment.problems if problem.code not in _OF_ARGUMENTS)
    if target is not None:
        write_config(target, args.out, converted.text)
    limits = list(stock_limits({name: spec.get(name) for name in spec.origins}, spec.fsdp.version))
    if args.json:
        tree = {"ok": True, "dialect": title, "to": args.to, "path": args.out, "text": converted.text}
        tree |= {"keys": outcomes, "script_arguments": converted.script, "launcher": converted.launcher}
        print_json({**tree, "stock_limits": limits, "problems": problems})
        return exit_code(problems, args.source)
    print_outcomes(outcomes)
    print_problems(problems)
    _print_rest(args.to, converted, limits)
    if args.out is None:
        print(converted.text, end="")
    else:
        print(f"wrote {printable(args.out)}", file=sys.stderr)
    return exit_code(problems, args.source)


def _convert_folder(args: argparse.Namespace) -> int:
    """Convert a checkpoint of DeepSpeed or whole weights into shards, or shards into whole weights."""
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
    return print_result(args, done.to_json(), f"{printable(str(done.out))}: {text}", done.problems)


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
