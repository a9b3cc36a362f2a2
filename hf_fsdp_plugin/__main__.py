"""``python -m hf_fsdp_plugin``: a rank of a stock launcher, with the plugin in it.

::

    accelerate launch --config_file fsdp.yaml -m hf_fsdp_plugin train.py ARGS…
    torchrun --nproc_per_node 4 -m hf_fsdp_plugin --config_file fsdp.yaml train.py ARGS…

Before the script: ``--config_file``, ``--set NAME=VALUE``, ``--report PATH``, ``--fsdp…`` flags; ``-m`` for a module.
"""

from __future__ import annotations

import os
import sys

from hf_fsdp_plugin.cli.launch_flags import LaunchWords, UsageError, read_words
from hf_fsdp_plugin.cli.scripts import check_script
from hf_fsdp_plugin.problems import SpecError

_HOW = """\
this runs inside the ranks of a launcher. Use one of
  hf-fsdp launch --config_file CONFIG SCRIPT
  accelerate launch --config_file CONFIG -m hf_fsdp_plugin SCRIPT
  torchrun --nproc_per_node N -m hf_fsdp_plugin --config_file CONFIG SCRIPT"""
_OURS = frozenset({"config_file", "set", "report", "module"})
_SETTINGS = ("--fsdp", "--parallelism_config_", "--mixed_precision")


def main() -> int:
    """Exit code 2 for wrong usage, 1 for a config with errors; else the script ends the process as it likes."""
    try:
        words = _words(sys.argv[1:])
    except UsageError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"python -m hf_fsdp_plugin: {error}", file=sys.stderr)
        return 2
    if os.environ["RANK"] != "0":
        # Before anything imports tqdm: a progress bar of every rank is a bar for each, on top of each other.
        os.environ.setdefault("TQDM_DISABLE", "1")
    # Heavy from here on: torch and the libraries that are hooked.
    import hf_fsdp_plugin
    from hf_fsdp_plugin.cli.run_script import is_failure, run
    from hf_fsdp_plugin.integrations.messages import tell_error
    from hf_fsdp_plugin.integrations.run_report import abandon

    try:
        hf_fsdp_plugin.install(
            words.ours.get("config_file"),
            command_line=words.command_line,
            overrides=words.overrides,
            report=words.ours.get("report"),
        )
        run(words.script, words.script_args, module="module" in words.ours)
    except SpecError as error:
        tell_error(error)
        return 1
    except BaseException as error:
        if is_failure(error):
            abandon()
        raise
    return 0


def _words(argv: list[str]) -> LaunchWords:
    words = read_words(argv)
    others = [f"--{name}" for name in words.ours if name not in _OURS]
    others += [word.partition("=")[0] for word in words.command_line if not word.startswith(_SETTINGS)]
    if "RANK" not in os.environ:
        raise UsageError(_no_rank())
    if others:
        raise UsageError(f"{', '.join(others)}: for the launcher, which has started this rank already.")
    if not words.script:
        raise UsageError(f"no script is named; {_HOW}")
    check_script(words)
    return words


def _no_rank() -> str:
    if "ACCELERATE_MIXED_PRECISION" in os.environ:  # the one variable that every way of `accelerate launch` sets
        return (
            "accelerate launch has started a plain process, not ranks, as it does for --cpu and for configs without "
            "FSDP. Use `hf-fsdp launch --config_file CONFIG SCRIPT`, which starts CPU ranks too."
        )
    return _HOW


if __name__ == "__main__":
    sys.exit(main())
