"""``python -m hf_fsdp_plugin``: runs a script with the plugin. What follows is printed by ``--help``.

usage: accelerate launch [LAUNCHER FLAGS] -m hf_fsdp_plugin [FLAGS] SCRIPT [ARGS ...]
       torchrun [LAUNCHER FLAGS] -m hf_fsdp_plugin [FLAGS] SCRIPT [ARGS ...]

Run an unmodified script with the plugin installed, as a rank of accelerate launch or torchrun.
`hf-fsdp launch` starts the ranks itself; `hf-fsdp --help` lists all verbs.

flags, with hyphens or underscores:
  --config_file CONFIG    Accelerate YAML or JSON (default: the config of accelerate launch)
  --set NAME=VALUE        override one setting, with the highest precedence; repeatable
  --fsdp WORDS            as in TrainingArguments: "full_shard auto_wrap"
  --fsdp_config JSON|PATH as in TrainingArguments
  --fsdp_*, --parallelism_config_*, --mixed_precision
                          setting flags of accelerate launch
  --report PATH           file of the report of the run
  --report_table          print the tables of the report, instead of a summary
  -m MODULE               run a module, as in python -m

examples:
  accelerate launch --config_file fsdp.yaml -m hf_fsdp_plugin train.py --epochs 3
  torchrun --nproc_per_node 4 -m hf_fsdp_plugin --config_file fsdp.yaml train.py
"""

from __future__ import annotations

import os
import sys

from hf_fsdp_plugin.launcher.flags import LaunchArguments, parse_launch_arguments
from hf_fsdp_plugin.launcher.run_script import check_script
from hf_fsdp_plugin.problems import UsageError
from hf_fsdp_plugin.rank_variables import launched_local_rank
from hf_fsdp_plugin.sources.command_line import flag_name

_USAGE = """\
this module runs inside the ranks of a launcher. Use one of
  hf-fsdp launch --config_file CONFIG SCRIPT
  accelerate launch --config_file CONFIG -m hf_fsdp_plugin SCRIPT
  torchrun --nproc_per_node N -m hf_fsdp_plugin --config_file CONFIG SCRIPT"""
_PLAIN_PROCESS = (
    "accelerate launch has started a plain process instead of ranks. It does so for --cpu and for configs without "
    "FSDP. Use `hf-fsdp launch --config_file CONFIG SCRIPT`, which also starts CPU ranks."
)
_OPTIONS = frozenset({"config_file", "set", "report", "report_table", "module"})
_SETTING_FLAGS = ("fsdp", "parallelism_config_", "mixed_precision")


def main() -> int:
    """Run the script. Returns 2 for wrong usage."""
    if sys.argv[1:] in (["-h"], ["--help"]):
        print((__doc__ or "").partition("\n\n")[2].rstrip())
        return 0
    try:
        arguments = _parse_arguments(sys.argv[1:])
    except UsageError as error:
        if launched_local_rank() == 0:
            print(f"python -m hf_fsdp_plugin: {error}", file=sys.stderr)
        return 2
    if _rank() != "0":
        # tqdm reads this when it is imported. Only rank 0 shows progress bars.
        os.environ.setdefault("TQDM_DISABLE", "1")
    # Imported here, because run_script loads torch and the libraries whose functions are replaced.
    from hf_fsdp_plugin.launcher.run_script import run_rank

    run_rank(
        arguments.script,
        arguments.script_args,
        module="module" in arguments.options,
        config=arguments.options.get("config_file"),
        command_line=arguments.command_line,
        overrides=arguments.overrides,
        report=arguments.options.get("report"),
        report_table="report_table" in arguments.options,
    )
    return 0


def _rank() -> str | None:
    """Return the rank of this process; ``None`` if no launcher has started it as a rank."""
    return os.environ.get("RANK") or os.environ.get("SLURM_PROCID")


def _parse_arguments(argv: list[str]) -> LaunchArguments:
    arguments = parse_launch_arguments(argv, "python -m hf_fsdp_plugin")
    if _rank() is None:
        # The only variable that `accelerate launch` sets in every mode.
        raise UsageError(_PLAIN_PROCESS if "ACCELERATE_MIXED_PRECISION" in os.environ else _USAGE)
    others = [f"--{name}" for name in arguments.options if name not in _OPTIONS]
    flags = [flag.partition("=")[0] for flag in arguments.command_line]
    others += [flag for flag in flags if not flag_name(flag).startswith(_SETTING_FLAGS)]
    if others:
        raise UsageError(f"{', '.join(others)}: the launcher has already started this rank. Pass it these flags.")
    if not arguments.script:
        raise UsageError(f"no script; {_USAGE}")
    check_script(arguments)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
